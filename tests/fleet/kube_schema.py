"""Manifests are checked as ``kubectl create --dry-run=client --validate=strict`` does, by kubectl
itself: here is the server that it asks what kinds there are and which fields they have.

The definitions are those of Kubernetes v1.31.0. They are read when a test asks, from the JSON
schemas that the package kubernetes-validate (Apache License 2.0) installs, and turned back into
the OpenAPI v2 that they were made of, without descriptions; only its data is read, its code is
never run. kubectl reads them in gnostic's protobuf form (``openapi.v2.Document``), which is
encoded here.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import importlib.util
import json
from typing import TYPE_CHECKING, Any

from tests.answering import answering

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = "x-kubernetes-group-version-kind"
PROTOBUF = "application/com.github.proto-openapi.spec.v2.v1.0+protobuf"
CLUSTER_WIDE = ("Namespace",)
USED = (
    "apps.v1.Deployment",
    "apps.v1.StatefulSet",
    "autoscaling.v2.HorizontalPodAutoscaler",
    "core.v1.ConfigMap",
    "core.v1.Namespace",
    "core.v1.Service",
    "core.v1.ServiceAccount",
    "networking.v1.NetworkPolicy",
    "policy.v1.PodDisruptionBudget",
    "rbac.v1.Role",
    "rbac.v1.RoleBinding",
)
"""What the manifests are of: the kinds that the server says it has."""

PACKAGE = "kubernetes_validate"
SCHEMAS = ("kubernetes-json-schema", "v1.31.0-local", "_definitions.json")
UNIONS = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": {"type": "string"},
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": {
        "type": "string", "format": "int-or-string",
    },
}  # fmt: skip
"""What OpenAPI v2 says of the two definitions that JSON schema says with ``oneOf``."""


# ---- definitions ----


def _packed() -> dict[str, Any]:
    """The package's definitions by name, as JSON schemas."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ModuleNotFoundError(f"{PACKAGE} is not installed: pip install -e '.[dev]'")
    # A module that is made and not run is enough to find the files that lie beside it.
    folder = importlib.resources.files(importlib.util.module_from_spec(spec))
    found: dict[str, Any] = json.loads(folder.joinpath(*SCHEMAS).read_text())["$defs"]
    return found


def _openapi(schema: dict[str, Any]) -> dict[str, Any]:
    """The same in OpenAPI v2, where null is no type; only what kubectl looks at."""
    out = {each: schema[each] for each in ("format", "required", KINDS) if each in schema}
    if "$ref" in schema:
        out["$ref"] = "#/definitions/" + schema["$ref"].rpartition("/")[2]
    if "type" in schema:
        said = schema["type"]
        (out["type"],) = {said} if isinstance(said, str) else set(said) - {"null"}
    for inner in ("items", "additionalProperties"):
        if inner in schema:
            out[inner] = _openapi(schema[inner])
    if "properties" in schema:
        out["properties"] = {name: _openapi(each) for name, each in schema["properties"].items()}
    return out


def definitions() -> dict[str, Any]:
    """By name, all that Kubernetes has."""
    return {name: UNIONS.get(name) or _openapi(each) for name, each in _packed().items()}


def kinds() -> dict[tuple[str, str], list[str]]:
    """Kinds by (group, version)."""
    known = definitions()
    found: dict[tuple[str, str], list[str]] = {}
    for name in USED:
        (each,) = known[f"io.k8s.api.{name}"][KINDS]
        found.setdefault((each["group"], each["version"]), []).append(each["kind"])
    return found


# ---- OpenAPI v2 as protobuf ----


def _field(number: int, data: bytes) -> bytes:
    return _number(number << 3 | 2) + _number(len(data)) + data


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _text(number: int, text: str) -> bytes:
    return _field(number, text.encode())


def _named(name: str, schema: dict[str, Any]) -> bytes:
    return _field(1, _text(1, name) + _field(2, _schema(schema)))


def _schema(schema: dict[str, Any]) -> bytes:
    """An ``openapi.v2.Schema``; numbers are those of its fields."""
    out = b""
    if "$ref" in schema:
        out += _text(1, schema["$ref"])
    if "format" in schema:
        out += _text(2, schema["format"])
    for name in schema.get("required", ()):
        out += _text(19, name)
    if "additionalProperties" in schema:
        out += _field(21, _field(1, _schema(schema["additionalProperties"])))
    if "type" in schema:
        out += _field(22, _text(1, schema["type"]))
    if "items" in schema:
        out += _field(23, _field(1, _schema(schema["items"])))
    if "properties" in schema:
        members = b"".join(_named(*each) for each in sorted(schema["properties"].items()))
        out += _field(25, members)
    if KINDS in schema:
        said = _text(2, json.dumps(schema[KINDS]))
        out += _field(31, _text(1, KINDS) + _field(2, said))
    return out


def document() -> bytes:
    """The whole, as ``/openapi/v2`` answers it."""
    named = b"".join(_named(*each) for each in definitions().items())
    info = _text(1, "Kubernetes") + _text(2, "v1.31.0")
    return _text(1, "2.0") + _field(2, info) + _field(8, b"") + _field(9, named)


# ---- discovery ----


def _resources(group: str, version: str, names: list[str]) -> dict[str, Any]:
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{group}/{version}" if group else version,
        "resources": [
            {
                "name": _plural(kind), "singularName": kind.lower(), "kind": kind,
                "namespaced": kind not in CLUSTER_WIDE, "verbs": ["create", "get", "list", "patch"],
            }
            for kind in names
        ],
    }  # fmt: skip


def _plural(kind: str) -> str:
    name = kind.lower()
    return name[:-1] + "ies" if name.endswith("y") else name + "s"


def answers() -> dict[str, tuple[str, bytes]]:
    """Content type and body, by path."""
    groups: list[dict[str, Any]] = []
    out: dict[str, Any] = {
        "/version": {"major": "1", "minor": "31", "gitVersion": "v1.31.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    for (group, version), names in kinds().items():
        if not group:
            out["/api/v1"] = _resources(group, version, names)
            continue
        out[f"/apis/{group}/{version}"] = _resources(group, version, names)
        known = {"groupVersion": f"{group}/{version}", "version": version}
        groups.append({"name": group, "versions": [known], "preferredVersion": known})
    out["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    said = {path: ("application/json", json.dumps(each).encode()) for path, each in out.items()}
    return said | {"/openapi/v2": (PROTOBUF, document())}


@contextlib.contextmanager
def discovery_server() -> Iterator[str]:
    """What kubectl asks before it validates; its URL."""
    known = answers()

    def answer(path: str) -> tuple[int, str, bytes]:
        kind, body = known.get(path.partition("?")[0], ("", b""))
        return (200 if kind else 404), kind or "text/plain", body

    with answering(answer) as url:
        yield url
