"""What is in ``controller/deploy``: valid, least in what it may, and true of the controller.

No cluster runs here and no container is built: kubectl validates what would be sent, by the
definitions of v1.31, and the ScaledObject, which is KEDA's, is only compared with the rest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import yaml

from controller.config import Settings
from controller.fleet.kubernetes_config import Cluster, read_cluster
from tests.fleet.kube_schema import definitions, discovery_server

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPLOY = Path(__file__).parents[2] / "controller" / "deploy"
FOLDERS = ("kubernetes", "keda", "hpa")
NOT_OURS = ("Kustomization", "ScaledObject")
"""Kinds that no Kubernetes API server knows by itself."""

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")


@cache
def manifests(folder: str) -> tuple[dict[str, Any], ...]:
    """Every object in the folder's files."""
    found = [
        each for path in sorted((DEPLOY / folder).glob("*.yaml"))
        if path.name != "adapter-rules.yaml" for each in yaml.safe_load_all(path.read_text())
    ]  # fmt: skip
    assert found
    return tuple(found)


def the(kind: str, name: str, folder: str = "kubernetes") -> dict[str, Any]:
    (found,) = (
        each for each in manifests(folder)
        if each["kind"] == kind and each["metadata"]["name"] == name
    )  # fmt: skip
    return found


def cluster_of(folder: str) -> Cluster:
    """The fleet file of a folder, as the controller reads it."""
    text = the("ConfigMap", "twinkeel-fleet", folder)["data"]["fleet.yaml"]
    return read_cluster(f"{folder}/fleet.yaml", yaml.safe_load(text))


# ---- fields ----


def complaints(value: Any, schema: dict[str, Any], where: str) -> Iterator[str]:
    """Fields that are unknown, missing or of another type, as strict validation finds them."""
    if "$ref" in schema:
        schema = definitions_once()[schema["$ref"].rpartition("/")[2]]
    kind = schema.get("type", "object")
    if schema.get("format") == "int-or-string":
        right = isinstance(value, int | str)
    else:
        types = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool,
                 "number": (int, float)}  # fmt: skip
        right = isinstance(value, types[kind]) and not (
            kind == "integer" and isinstance(value, bool)
        )
    if not right:
        yield f"{where}: {value!r} is no {kind}"
    elif kind == "array":
        for number, each in enumerate(value):
            yield from complaints(each, schema["items"], f"{where}[{number}]")
    elif kind == "object":
        known, rest = schema.get("properties", {}), schema.get("additionalProperties")
        yield from (f"{where}: {name} is missing" for name in schema.get("required", ())
                    if name not in value)  # fmt: skip
        for name, each in value.items():
            if name in known:
                yield from complaints(each, known[name], f"{where}.{name}")
            elif rest is not None:
                yield from complaints(each, rest, f"{where}.{name}")
            elif known:
                yield f"{where}: unknown field {name}"


@cache
def definitions_once() -> dict[str, Any]:
    return definitions()


def schema_of(manifest: dict[str, Any]) -> dict[str, Any]:
    group, _, version = manifest["apiVersion"].rpartition("/")
    wanted = {"group": group, "version": version, "kind": manifest["kind"]}
    (found,) = (
        schema for schema in definitions_once().values()
        if wanted in schema.get("x-kubernetes-group-version-kind", ())
    )  # fmt: skip
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_field_is_one_of_its_kind(folder: str) -> None:
    for each in manifests(folder):
        if each["kind"] not in NOT_OURS:
            where = f"{folder}: {each['kind']} {each['metadata']['name']}"
            assert not list(complaints(each, schema_of(each), where))


def test_a_wrong_field_is_found() -> None:
    """Else the test above could not fail."""
    made = msgspec.json.decode(msgspec.json.encode(the("Deployment", "vllm-qwen3-8b")))
    made["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["nap"] = 1
    made["spec"]["progressDeadlineSeconds"] = "20"
    del made["spec"]["selector"]
    assert [each.partition(": ")[2] for each in complaints(made, schema_of(made), "it")] == [
        "selector is missing", "'20' is no integer", "unknown field nap",
    ]  # fmt: skip


# ---- kubectl ----


@pytest.fixture(scope="module")
def discovery() -> Iterator[str]:
    with discovery_server() as url:
        yield url


def kubectl(*arguments: str, folder: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOME": str(folder), "KUBECONFIG": str(folder / "none")}
    return subprocess.run(
        ["kubectl", "--cache-dir", str(folder / "cache"), *arguments],
        input=given, capture_output=True, text=True, timeout=60, check=False, env=environ,
    )  # fmt: skip


def dry_run(text: str, url: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return kubectl(
        "--server", url, "create", "--dry-run=client", "--validate=strict", "-o", "name", "-f", "-",
        folder=folder, given=text,
    )  # fmt: skip


@needs_kubectl
@pytest.mark.parametrize("folder", FOLDERS)
def test_kubectl_takes_them(folder: str, discovery: str, tmp_path: Path) -> None:
    """Put together by kustomize, and validated strictly, each by its kind's definition."""
    built = kubectl("kustomize", str(DEPLOY / folder), folder=tmp_path)
    assert built.returncode == 0, built.stderr
    ours = [each for each in yaml.safe_load_all(built.stdout) if each["kind"] not in NOT_OURS]
    done = dry_run(yaml.safe_dump_all(ours), discovery, tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(ours)
    assert all(
        each["metadata"]["namespace"] == "twinkeel" for each in ours if each["kind"] != "Namespace"
    )


@needs_kubectl
def test_kubectl_refuses_a_wrong_field(discovery: str, tmp_path: Path) -> None:
    text = (DEPLOY / "kubernetes" / "vllm.yaml").read_text()
    done = dry_run(text.replace("sleep: {seconds: 5}", "nap: {seconds: 5}"), discovery, tmp_path)
    assert done.returncode != 0
    assert 'lifecycle.preStop): unknown field "nap"' in done.stderr


# ---- what they say ----


def test_the_settings_are_the_controllers() -> None:
    text = the("ConfigMap", "twinkeel")["data"]["controller.yaml"]
    raw = yaml.safe_load(text)
    assert raw.pop("schema") == 1
    settings = msgspec.convert(raw, Settings)
    pod = the("StatefulSet", "twinkeel")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > settings.unready_s + settings.drain_s
    mounts = {each["name"]: each["mountPath"] for each in pod["containers"][0]["volumeMounts"]}
    assert settings.fleet == f"{mounts['fleet']}/fleet.yaml"
    assert settings.data == mounts["data"]
    assert pod["serviceAccountName"] == the("ServiceAccount", "twinkeel")["metadata"]["name"]
    assert pod["automountServiceAccountToken"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_fleet_file_names_the_servers(folder: str) -> None:
    cluster = cluster_of(folder)
    (model,) = cluster.models.values()
    deployment = the("Deployment", model.versions[model.version].deployment)
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert [each["containerPort"] for each in container["ports"]] == [model.port]
    assert f"--served-model-name={next(iter(cluster.models))}" in container["args"]
    assert f"--model={model.versions[model.version].loads}" in container["args"]
    assert cluster.scale == ("patch" if folder == "kubernetes" else "observe")
    # Whoever applies it again must not undo what was scaled.
    assert "replicas" not in deployment["spec"]


def test_a_server_that_ends_has_the_time_to() -> None:
    pod = the("Deployment", "vllm-qwen3-8b")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (timeout,) = (each for each in container["args"] if each.startswith("--shutdown-timeout="))
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert sleep_s > 0
    assert pod["terminationGracePeriodSeconds"] > sleep_s + int(timeout.partition("=")[2])


def test_who_else_scales_keeps_to_the_fleet_files_bounds() -> None:
    (model,) = cluster_of("keda").models.values()
    keda = the("ScaledObject", "vllm-qwen3-8b", "keda")["spec"]
    hpa = the("HorizontalPodAutoscaler", "vllm-qwen3-8b", "hpa")["spec"]
    bounds = (model.replicas_least, model.replicas_most)
    assert (keda["minReplicaCount"], keda["maxReplicaCount"]) == bounds
    assert (hpa["minReplicas"], hpa["maxReplicas"]) == bounds
    assert (
        keda["scaleTargetRef"]["name"]
        == hpa["scaleTargetRef"]["name"]
        == (model.versions[model.version].deployment)
    )
    (trigger,) = keda["triggers"]
    assert 'twinkeel_wanted_replicas{pool="qwen3-8b"}' in trigger["metadata"]["query"]
    assert all(isinstance(each, str) for each in trigger["metadata"].values())
    assert hpa["metrics"][0]["external"]["metric"]["name"] == "twinkeel_wanted_replicas"
    behavior = keda["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior == hpa["behavior"]


def test_the_network_lets_only_the_controller_at_the_servers() -> None:
    pods = the("Deployment", "vllm-qwen3-8b")["spec"]["template"]["metadata"]["labels"]
    policy = the("NetworkPolicy", "vllm")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    controller = the("StatefulSet", "twinkeel")["spec"]["template"]["metadata"]["labels"]
    (rule,) = policy["ingress"]
    assert rule["from"][0]["podSelector"]["matchLabels"].items() <= controller.items()
    admin = the("NetworkPolicy", "twinkeel")["spec"]["ingress"]
    (guarded,) = (each for each in admin if each["ports"][0]["port"] == 8081)
    assert guarded["from"]
