"""A fleet file whose replicas are pods: what it takes, and how it says what is wrong."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from controller import http
from controller.fleet.kubernetes import kubernetes_fleet
from controller.fleet.kubernetes_config import read_cluster
from policy.files import FileError
from tests.fleet.conformance import Desk

if TYPE_CHECKING:
    from pathlib import Path

MODEL: dict[str, Any] = {
    "versions": {"v1": {"deployment": "vllm-a"}}, "version": "v1", "replicas_most": 4,
}  # fmt: skip


def document(cluster: dict[str, Any] | None = None, **model: Any) -> dict[str, Any]:
    return {"schema": 1, "kubernetes": {"models": {"a": MODEL | model}, **(cluster or {})}}


def test_the_least_that_must_be_said() -> None:
    cluster = read_cluster("fleet.yaml", document())
    assert (cluster.scale, cluster.api, cluster.namespace) == ("patch", "", "")
    model = cluster.models["a"]
    assert (model.replicas_least, model.port, model.start_s_most) == (1, 8000, 900.0)


def test_slots_are_known_before_any_pod_is() -> None:
    two = {"models": {"a": MODEL, "b": MODEL | {
        "versions": {"v1": {"deployment": "vllm-b"}, "v2": {"deployment": "vllm-b2"}},
        "version": "v2", "replicas_most": 2, "port": 9000,
    }}}  # fmt: skip
    fleet = kubernetes_fleet("fleet.yaml", {"schema": 1, "kubernetes": two})
    assert [each.url for each in fleet.upstreams] == [
        *(f"http://slot-{number}.vllm-a:8000" for number in range(4)),
        *(f"http://slot-{number}.vllm-b2:9000" for number in range(2)),
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (document({"scale": "off"}), "kubernetes.scale"),
        (document({"scales": "patch"}), "scales"),
        (document(version="v3"), "version 'v3' is none of versions: v1"),
        (document(replicas_least=5), "replicas_least 5 is more than replicas_most 4"),
        (document(replicas_most=0), "replicas_most"),
        (document(versions={"v1": {"deployment": "Vllm_A"}}), "deployment"),
        (document({"models": {}}), "models is empty"),
        (document({"models": {"a": MODEL, "b": MODEL}}), "deployment 'vllm-a' is given twice"),
        ({"kubernetes": {"models": {"a": MODEL}}}, "schema"),
        ({**document(), "models": {}}, "models"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(FileError) as raised:
        kubernetes_fleet("fleet.yaml", given)
    assert str(raised.value).startswith("fleet.yaml")
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ({"namespace": "n"}, "this is no pod: KUBERNETES_SERVICE_HOST is not set"),
        ({"api": "http://127.0.0.1:1"}, "say namespace: in the fleet file"),
    ],
)
def test_a_cluster_that_cannot_be_found_is_said_at_the_start(
    cluster: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    given = document({**cluster, "token_file": str(tmp_path / "token")})

    async def run() -> None:
        fleet = kubernetes_fleet("fleet.yaml", given)
        async with http.session() as session:
            desk = Desk(fleet.upstreams, session)
            try:
                with pytest.raises(FileError, match=said):
                    await fleet.begin(desk, desk)
            finally:
                await fleet.close()

    asyncio.run(run())
