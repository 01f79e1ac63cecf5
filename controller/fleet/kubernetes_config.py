"""The fleet file of a cluster, schema 1: which Deployments serve which models, and how many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from controller.config import Seconds  # noqa: TC001 - msgspec reads it
from controller.fleet.config import Name  # noqa: TC001 - msgspec reads it
from policy.files import decode

if TYPE_CHECKING:
    from collections.abc import Mapping

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
"""Where a pod finds its service account's token, the cluster's CA and its namespace."""
Count = Annotated[int, Meta(ge=0, le=1000)]


class Served(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One version of a model: a Deployment whose pods are vLLM servers, one model each."""

    deployment: Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?$")]
    loads: str = ""
    """What its servers must say that they have loaded (``root`` in ``/v1/models``), before they
    take requests; empty: nobody looks."""


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is served by pods."""

    versions: dict[Name, Served]
    version: str
    """The one whose Deployment is scaled for load; another's is, while a rollout goes on."""
    replicas_most: Annotated[int, Meta(ge=1, le=1000)]
    """Pods at once, those included that a rolling update adds and those that end slowly."""
    replicas_least: Count = 1
    """Pods that are never given up; with ``scale: patch`` they are started if they are missing."""
    port: Annotated[int, Meta(ge=1, le=65_535)] = 8000
    """On which the pods serve."""
    profile: str = ""
    """Of their step times; empty: found by the model that they serve."""
    labels: tuple[str, ...] = ()
    pooling: bool = False
    """They serve embeddings only."""
    start_s: Seconds = 120.0
    """From a pod's creation to its first answer, until it was measured."""
    start_s_most: Seconds = 900.0
    """After which a pod that was asked for, and does not serve, is given up."""

    def __post_init__(self) -> None:
        if self.version not in self.versions:
            known = ", ".join(self.versions) or "none"
            raise ValueError(f"version {self.version!r} is none of versions: {known}")
        if self.replicas_least > self.replicas_most:
            raise ValueError(
                f"replicas_least {self.replicas_least} is more than replicas_most"
                f" {self.replicas_most}"
            )


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A namespace of a cluster, and what of it is ours."""

    models: dict[Name, Model]
    scale: Literal["patch", "observe"] = "patch"
    """patch: Deployments are scaled here. observe: something else does it, such as KEDA or an HPA
    by the metric ``twinkeel_wanted_replicas``; here it is only said which pods can go."""
    namespace: str = ""
    """Empty: the controller's own."""
    api: str = ""
    """Such as ``https://10.0.0.1:6443``; empty: the cluster that the controller runs in."""
    token_file: str = f"{ACCOUNT}/token"
    """Read again as it is renewed."""
    ca_file: str = f"{ACCOUNT}/ca.crt"
    """Of an ``https`` API; empty: what this machine trusts."""

    def __post_init__(self) -> None:
        if not self.models:
            raise ValueError("models is empty: a fleet serves at least one")
        versions = [served for model in self.models.values() for served in model.versions.values()]
        names = [served.deployment for served in versions]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"deployment {twice[0]!r} is given twice")


class ClusterFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A fleet file whose replicas are pods."""

    kubernetes: Cluster
    schema: Literal[1] = 1


def read_cluster(where: str, raw: Mapping[str, Any]) -> Cluster:
    """The settings in a fleet file's mapping; ``where`` is what errors call it.

    Raises:
        policy.files.FileError: they cannot be used.
    """
    return decode(raw, ClusterFile, where).kubernetes
