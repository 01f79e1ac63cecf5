"""The fleet of pods in front of a small cluster: slots follow pods, scales follow the policy."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from controller import http
from controller.fleet.kubernetes import KubernetesFleet, kubernetes_fleet
from policy.decisions import Rotated, Start, Stop
from policy.events import ReplicaDown, ReplicaUp, Standby, Warmed
from tests.fleet.conformance import CHECKS, Desk, run_check, until
from tests.fleet.kube_api import COST, NAMESPACE, TOKEN, Deployment, KubeApi, PodServer, Refusal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.fleet.conformance import Check

WITHIN_S = 20.0
GIVEN_UP_S = 4.0
"""After that much the tests give a pod up: what is said of it has come by then."""


def fleet_of(api: KubeApi, folder: Path, scale: str = "patch", **model: Any) -> KubernetesFleet:
    """A fleet file's fleet: one model with the Deployment ``vllm``, two pods at least, three at
    most."""
    token = folder / "token"
    if not token.exists():
        token.write_text(TOKEN)
    served = {
        "versions": {"v1": {"deployment": "vllm"}}, "version": "v1", "replicas_least": 2,
        "replicas_most": 3, "port": api.pod_port,
    }  # fmt: skip
    cluster = {
        "api": api.url, "namespace": NAMESPACE, "token_file": str(token), "scale": scale,
        "models": {"m": served | model},
    }  # fmt: skip
    return kubernetes_fleet("fleet.yaml", {"schema": 1, "kubernetes": cluster})


class Bench:
    """A fleet of pods, as the conformance suite wants it."""

    serving = (0, 1)
    spares = (2,)
    crashes = True
    within_s = WITHIN_S

    def __init__(self, api: KubeApi, folder: Path) -> None:
        self._api = api
        self.fleet = fleet_of(api, folder)

    def runs(self, replica: int) -> bool:
        return bool(self.fleet.view().slots[replica].url)

    async def crash(self, replica: int) -> None:
        await self._api.vanish(self.fleet.view().slots[replica].name)

    async def clear(self) -> None:
        await self._api.stop()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_is_a_fleet(check: Check, tmp_path: Path) -> None:
    async def run() -> None:
        api = KubeApi(Deployment("vllm", 2))
        await api.start()
        await run_check(check, lambda: Bench(api, tmp_path))

    asyncio.run(run())


class Case:
    """A cluster, a fleet, and what it told."""

    def __init__(self, api: KubeApi, fleet: KubernetesFleet, desk: Desk) -> None:
        self.api, self.fleet, self.desk = api, fleet, desk

    def states(self) -> list[str]:
        return [slot.state for slot in self.fleet.view().slots]

    def names(self) -> list[str]:
        """Pods by slot."""
        return [slot.name for slot in self.fleet.view().slots]

    def addresses(self) -> dict[int, str]:
        """Of the slots that serve."""
        return {slot.replica: slot.url for slot in self.fleet.view().slots
                if slot.state == "serving"}  # fmt: skip

    def scaled(self) -> list[int]:
        """What the fleet asked for, in order."""
        return [
            body["spec"]["replicas"] for method, path, body in self.api.calls
            if method == "PATCH" and path.endswith("/scale")
        ]  # fmt: skip

    def said(self) -> str:
        return "\n".join(text for _, text in self.desk.troubles)

    async def up(self, *replicas: int) -> None:
        await until(f"{replicas} serve", lambda: self.desk.up() == list(replicas), WITHIN_S)


@contextlib.asynccontextmanager
async def running(
    folder: Path, *deployments: Deployment, scale: str = "patch", **model: Any
) -> AsyncIterator[Case]:
    api = KubeApi(*(deployments or (Deployment("vllm", 2),)))
    await api.start()
    fleet = fleet_of(api, folder, scale, **model)
    async with http.session() as session:
        desk = Desk(fleet.upstreams, session)
        try:
            await fleet.begin(desk, desk)
            yield Case(api, fleet, desk)
        finally:
            await fleet.close()
            await api.stop()


# ---- slots follow pods ----


def test_a_pod_takes_a_slot_with_its_address_node_and_version(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            for replica, name in enumerate(case.names()[:2]):
                pod = case.api.pods[name]
                found = case.desk.replicas[replica]
                assert found.url == f"http://{pod['status']['podIP']}:{case.api.pod_port}"
                assert found.upstream.domain == pod["spec"]["nodeName"]
                assert found.upstream.version == "v1"
            assert case.desk.of(Standby, 2)[-1].start_ns == 120 * 10**9
            assert not case.scaled()

    asyncio.run(run())


def test_a_new_pod_answers_its_first_prompts_before_it_takes_requests(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            adopted = [case.api.server(name) for name in case.api.ready("vllm")]
            assert not any(server.questions for server in adopted)
            case.fleet.run(Start(2))
            await case.up(0, 1, 2)
            server = case.api.server(case.names()[2])
            asked = [(path, "logprobs" in question) for path, question in server.questions]
            assert asked == [("/v1/completions", True), ("/v1/chat/completions", True)]

    asyncio.run(run())


def test_a_pod_that_answers_wrongly_gets_nothing_until_it_does(tmp_path: Path) -> None:
    def wrong(server: Any) -> None:
        server.answer = lambda path, question: _aborted(question)

    async def run() -> None:
        async with running(tmp_path, Deployment("vllm", 2)) as case:
            await case.up(0, 1)
            case.api.deployments["vllm"].answers = wrong
            case.fleet.run(Start(2))
            await until("it is told", lambda: case.states()[2] == "broken", WITHIN_S)
            assert case.desk.up() == [0, 1]
            assert "did not answer its first prompts" in case.said()

    asyncio.run(run())


def test_a_warm_up_that_a_pod_outran_says_nothing_of_the_next_one(tmp_path: Path) -> None:
    """Not ready and ready again while its first prompts hang: they fail, and others go on."""

    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            asked: list[asyncio.Event] = []

            def slow(server: Any) -> None:
                handle = server._handle

                async def answer(request: web.Request) -> web.StreamResponse:
                    if request.method != "POST":
                        return await handle(request)
                    go_on = asyncio.Event()
                    asked.append(go_on)
                    number = len(asked)
                    await go_on.wait()
                    return web.Response(status=500) if number == 1 else await handle(request)

                server._handle = answer

            case.api.deployments["vllm"].answers = slow
            case.fleet.run(Start(2))
            await until("its first prompts", lambda: len(asked) == 1, WITHIN_S)
            name = case.names()[2]
            case.api.set_ready(name, False)
            await until("it waits", lambda: case.states()[2] == "waiting", WITHIN_S)
            case.api.set_ready(name, True)
            await until("its first prompts anew", lambda: len(asked) == 2, WITHIN_S)
            asked[0].set()
            # The first warm-up goes on to the chat endpoint, and has failed after that.
            await until("it goes on", lambda: len(asked) == 3, WITHIN_S)
            asked[2].set()
            await asyncio.sleep(0.3)
            assert case.states()[2] == "warming"
            assert "first prompts" not in case.said()
            asked[1].set()
            await until("its last prompt", lambda: len(asked) == 4, WITHIN_S)
            asked[3].set()
            await case.up(0, 1, 2)

    asyncio.run(run())


def test_a_deleted_pod_is_drained_and_its_slot_follows_the_next(tmp_path: Path) -> None:
    """Nobody has to replace it: whoever deleted it meant it."""

    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            ends = asyncio.Event()
            case.api.ending = lambda pod, grace_s: ends.wait()  # type: ignore[assignment]
            # It has something in flight, so that its slot stays its own.
            busy = asyncio.create_task(ends.wait())
            case.desk.replicas[0].attempts.add(busy)  # type: ignore[arg-type]
            first = case.names()[0]
            case.api.delete(first)
            await until("it is down", lambda: case.desk.of(ReplicaDown, 0), WITHIN_S)
            assert case.desk.of(ReplicaDown, 0)[-1].reason == "stopped"
            assert case.states()[0] == "stopping"
            await case.up(1, 2)  # its Deployment's new pod
            ends.set()
            case.desk.replicas[0].attempts.clear()
            await until("it is gone", lambda: case.states()[0] == "cold", WITHIN_S)
            assert not case.scaled()

    asyncio.run(run())


def test_a_pod_that_is_not_ready_takes_nothing_and_says_why(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            name = case.names()[0]
            case.api.set_ready(name, False)
            await case.up(1)
            assert "ContainersNotReady" in case.desk.of(ReplicaDown, 0)[-1].reason
            case.api.set_ready(name, True)
            await case.up(0, 1)

    asyncio.run(run())


def test_a_container_that_crashed_is_told_by_its_signal_and_warmed_anew(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            name = case.names()[0]
            ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "t"}}
            case.api.set_ready(name, False, state=ended, started=False)
            await case.up(1)
            assert case.desk.of(ReplicaDown, 0)[-1].reason == "killed by signal 9 (OOMKilled)"
            assert case.states()[0] == "waiting"
            case.api.set_ready(
                name, True, state={"running": {"startedAt": "t"}}, lastState=ended,
                restartCount=1, started=True,
            )  # fmt: skip
            await case.up(0, 1)
            assert len(case.api.server(name).questions) == 2

    asyncio.run(run())


def test_a_base_pod_that_comes_back_beside_its_replacement_may_be_given_up(tmp_path: Path) -> None:
    """Else every crash would leave one more that is never given up."""

    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            name = case.names()[0]
            case.api.set_ready(name, False)
            await case.up(1)
            case.fleet.run(Start(2))
            await case.up(1, 2)
            case.api.set_ready(name, True)
            await case.up(0, 1, 2)
            assert len(case.desk.of(Standby, 0)) == 1

    asyncio.run(run())


def test_a_pod_of_the_same_name_is_another_pod(tmp_path: Path) -> None:
    """As a StatefulSet's: the gate shuts, and opens on the new address."""

    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            api = case.api
            name = case.names()[0]
            before = case.addresses()[0]
            pod = api.pods[name]
            await api.go_away()  # the fleet sees only the outcome
            api.gone(pod)
            api.compact()
            api.make(api.deployments["vllm"], name)
            await api.start()
            await until("it is down", lambda: case.desk.of(ReplicaDown, 0), WITHIN_S)
            await case.up(0, 1)
            assert case.names()[0] == name
            assert case.addresses()[0] not in ("", before)
            assert len(case.desk.of(ReplicaUp, 1)) == 1

    asyncio.run(run())


def test_two_pods_that_change_addresses_never_share_one(tmp_path: Path) -> None:
    """What goes to a slot goes to its own pod, whichever is told first."""

    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            before = case.addresses()
            one, two = (case.api.pods[name] for name in case.names()[:2])
            seen: list[tuple[str, ...]] = []
            release = case.desk.release

            def watched(replica: Any) -> None:
                release(replica)
                open_now = [each.url for each in case.desk.replicas.values() if not each.held]
                seen.append(tuple(open_now))

            case.desk.release = watched  # type: ignore[method-assign]
            ips = one["status"]["podIP"], two["status"]["podIP"]
            one["status"]["podIP"], two["status"]["podIP"] = ips[1], ips[0]
            case.api.changed(one)
            await until("the first is seen", lambda: case.states()[1] == "waiting", WITHIN_S)
            case.api.changed(two)
            swapped = {0: before[1], 1: before[0]}
            await until("they are swapped", lambda: case.addresses() == swapped, WITHIN_S)
            assert seen
            assert all(len(set(urls)) == len(urls) for urls in seen)

    asyncio.run(run())


def test_more_pods_than_slots_are_told(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            case.api.scale("vllm", 4)
            await case.up(0, 1, 2)
            await until("it is told", lambda: "raise replicas_most" in case.said(), WITHIN_S)

    asyncio.run(run())


def test_pods_that_have_ended_or_were_evicted_take_no_slot(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            name = case.names()[0]
            case.api.pods[name]["status"] = {"phase": "Failed", "reason": "Evicted"}
            case.api.changed(case.api.pods[name])
            await until("it is down", lambda: case.desk.of(ReplicaDown, 0), WITHIN_S)
            case.api.reconcile(case.api.deployments["vllm"])
            await case.up(0, 1)
            assert case.names()[0] != name

    asyncio.run(run())


# ---- scales follow the policy ----


def test_start_scales_up_and_stop_removes_exactly_that_pod(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            case.fleet.run(Start(2))
            await case.up(0, 1, 2)
            assert case.scaled() == [3]
            assert case.desk.of(Standby, 2)[-1].start_ns == 120 * 10**9
            chosen = case.names()[1]
            case.fleet.run(Stop(1))
            await until("it is a standby", lambda: case.states()[1] == "cold", WITHIN_S)
            assert case.scaled() == [3, 2]
            assert chosen not in case.api.pods
            assert len(case.api.living(case.api.deployments["vllm"])) == 2
            assert [body["metadata"]["annotations"] for method, path, body in case.api.calls
                    if path.endswith(f"/pods/{chosen}")] == [{COST: "-1000"}]  # fmt: skip
            measured = case.desk.of(Standby, 1)[-1].start_ns
            assert 0 < measured < 10 * 10**9

    asyncio.run(run())


def test_what_a_deployment_replaces_by_itself_is_not_asked_for_twice(tmp_path: Path) -> None:
    """The policy replaces a lost pod, too: the Deployment's own is the one it gets."""

    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            go = asyncio.Event()

            async def later(ip: str, port: int) -> PodServer:
                await go.wait()
                server = PodServer(ip, port)
                await server.start()
                return server

            case.api.deployments["vllm"].serve = later
            await case.api.vanish(case.names()[0])
            await until("it is down", lambda: case.desk.of(ReplicaDown, 0), WITHIN_S)
            case.fleet.run(Start(2))
            go.set()
            await case.up(1, 2)
            await asyncio.sleep(0.2)
            assert not case.scaled()
            assert len(case.api.pods) == 2

    asyncio.run(run())


def test_changes_of_others_are_not_overwritten(tmp_path: Path) -> None:
    """Somebody scales between our look and our change: 409, and it is counted from theirs."""

    async def run() -> None:
        async with running(tmp_path, replicas_most=8) as case:
            await case.up(0, 1)
            meddled: list[int] = []

            def meddle(method: str, path: str) -> None:
                if method == "PATCH" and path.endswith("/scale") and not meddled:
                    meddled.append(5)
                    case.api.scale("vllm", 5)

            case.api.before = meddle
            case.fleet.run(Stop(1))
            await until("both are done", lambda: len(case.api.pods) == 4, WITHIN_S)
            assert case.scaled() == [1, 4]
            assert case.api.deployments["vllm"].replicas == 4

    asyncio.run(run())


def test_a_change_whose_answer_is_lost_is_not_made_twice(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, replicas_most=4) as case:
            await case.up(0, 1)
            case.api.scale("vllm", 4)
            await case.up(0, 1, 2, 3)
            lost: list[str] = []
            hold = asyncio.Event()
            case.api.ending = lambda pod, grace_s: hold.wait()  # type: ignore[assignment]

            def lose(method: str, path: str) -> None:
                if path.endswith("/scale") and not lost:
                    lost.append(path)
                    raise Refusal(504, "Timeout", "the server was unable to return a response")

            case.api.after = lose
            case.fleet.run(Stop(3))
            await until("it was lost", lambda: lost, WITHIN_S)
            await asyncio.sleep(1.0)
            hold.set()
            await until("it is gone", lambda: len(case.api.pods) == 3, WITHIN_S)
            assert case.api.deployments["vllm"].replicas == 3

    asyncio.run(run())


@pytest.mark.parametrize("code", [409, 422])
def test_a_pod_that_someone_else_changes_is_removed_all_the_same(code: int, tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            case.fleet.run(Start(2))
            await case.up(0, 1, 2)
            refused: list[str] = []

            def refuse(method: str, path: str) -> None:
                if method == "PATCH" and "/pods/" in path and not refused:
                    refused.append(path)
                    raise Refusal(code, "Conflict", "the object has been modified")

            case.api.before = refuse
            case.fleet.run(Stop(1))
            await until("it is a standby", lambda: case.states()[1] == "cold", WITHIN_S)
            assert refused
            assert case.scaled() == [3, 2]

    asyncio.run(run())


def test_kubectl_scales_and_the_slots_follow(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            case.api.scale("vllm", 3)
            await case.up(0, 1, 2)
            case.api.scale("vllm", 1)
            await until("two went", lambda: len(case.desk.up()) == 1, WITHIN_S)
            downs = [event.reason for event in case.desk.events if isinstance(event, ReplicaDown)]
            assert downs == ["stopped", "stopped"]
            assert not case.scaled()

    asyncio.run(run())


def test_what_should_always_run_is_started(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, Deployment("vllm", 0)) as case:
            await case.up(0, 1)
            assert case.scaled() == [2]

    asyncio.run(run())


def test_an_isolated_pod_is_deleted_and_its_node_is_named(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            name = case.names()[0]
            node = case.api.pods[name]["spec"]["nodeName"]
            case.fleet.run(Rotated(0, "isolated", "ecc_uncorrectable"))
            assert not case.desk.replicas[0].up
            case.fleet.run(Rotated(0, "isolated", "ecc_uncorrectable"))
            await case.up(0, 1)
            assert name not in case.api.pods
            deleted = [body for method, _, body in case.api.calls if method == "DELETE"]
            assert len(deleted) == 1
            assert deleted[0]["gracePeriodSeconds"] == 1
            assert f"kubectl taint nodes {node} twinkeel.dev/broken-card=" in case.said()

    asyncio.run(run())


def test_a_pod_that_no_node_takes_is_given_up_and_the_scale_goes_back(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, start_s_most=GIVEN_UP_S) as case:
            await case.up(0, 1)
            case.api.deployments["vllm"].schedules = False
            case.fleet.run(Start(2))
            await until("it is given up", lambda: case.desk.of(ReplicaDown, 2), WITHIN_S)
            assert "Insufficient nvidia.com/gpu" in case.desk.of(ReplicaDown, 2)[-1].reason
            await until("it went", lambda: len(case.api.pods) == 2, WITHIN_S)
            assert case.scaled() == [3, 2]
            assert case.desk.up() == [0, 1]

    asyncio.run(run())


def test_a_pod_that_a_quota_forbids_is_given_up_and_not_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, start_s_most=GIVEN_UP_S) as case:
            await case.up(0, 1)
            case.api.deployments["vllm"].creates = False
            case.fleet.run(Start(2))
            await until("it is given up", lambda: case.scaled() == [3, 2], WITHIN_S)

    asyncio.run(run())


# ---- versions ----

TWO: dict[str, Any] = {
    "versions": {
        "v1": {"deployment": "vllm"},
        "v2": {"deployment": "vllm-two", "loads": "weights-2"},
    },
    "replicas_most": 4,
}


def test_a_rollout_starts_the_other_versions_deployment(tmp_path: Path) -> None:
    def loads(server: Any) -> None:
        server.cards[0]["root"] = "weights-2"

    async def run() -> None:
        new = Deployment("vllm-two", 0, answers=loads)
        async with running(tmp_path, Deployment("vllm", 2), new, **TWO) as case:
            await case.up(0, 1)
            case.fleet.run(Start(2, "v2"))
            await case.up(0, 1, 2)
            assert case.desk.of(ReplicaUp, 2)[-1].version == "v2"
            case.fleet.run(Stop(0))
            await until("v1 went down by one", lambda: len(case.api.ready("vllm")) == 1, WITHIN_S)
            assert (case.api.deployments["vllm"].replicas, new.replicas) == (1, 1)

    asyncio.run(run())


def test_what_was_rolled_out_is_what_is_started_from_then_on(tmp_path: Path) -> None:
    """Also by a controller that begins later: most pods say what serves."""

    def loads(server: Any) -> None:
        server.cards[0]["root"] = "weights-2"

    async def run() -> None:
        old, new = Deployment("vllm", 2), Deployment("vllm-two", 0, answers=loads)
        async with running(tmp_path, old, new, **TWO) as case:
            await case.up(0, 1)
            for replica in (2, 3):
                case.fleet.run(Start(replica, "v2"))
            await case.up(0, 1, 2, 3)
            for replica in (2, 3):
                case.fleet.run(Rotated(replica, "in", "rollout of v2"))
            for replica in (0, 1):
                case.fleet.run(Stop(replica))
            await case.up(2, 3)
            await until("v1 is gone", lambda: case.states()[:2] == ["cold"] * 2, WITHIN_S)
            assert case.desk.of(Standby, 0)[-1].version == "v2"
            case.fleet.run(Start(0))
            await case.up(0, 2, 3)
            assert (old.replicas, new.replicas) == (0, 3)
            await case.fleet.close()
            later = fleet_of(case.api, tmp_path, **TWO)
            async with http.session() as session:
                desk = Desk(later.upstreams, session)
                await later.begin(desk, desk)
                after = Case(case.api, later, desk)
                await after.up(0, 1, 2)
                after.fleet.run(Start(3))
                await after.up(0, 1, 2, 3)
                await later.close()
            assert (old.replicas, new.replicas) == (0, 4)

    asyncio.run(run())


def test_a_pod_that_loaded_something_else_is_not_the_version(tmp_path: Path) -> None:
    async def run() -> None:
        new = Deployment("vllm-two", 0)
        async with running(tmp_path, Deployment("vllm", 2), new, **TWO) as case:
            await case.up(0, 1)
            case.fleet.run(Start(2, "v2"))
            told = await until("it is told", lambda: case.desk.of(Warmed, 2), WITHIN_S)
            assert (told[-1].version, told[-1].ok) == ("m", False)
            assert "it has loaded m, and version v2 is weights-2" in case.said()
            await until("it is stopped", lambda: new.replicas == 0, WITHIN_S)
            assert case.desk.up() == [0, 1]

    asyncio.run(run())


# ---- somebody else scales ----


def test_observing_it_says_which_pod_can_go_and_changes_no_scale(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, Deployment("vllm", 2), scale="observe") as case:
            await case.up(0, 1)
            case.fleet.run(Start(2))
            await asyncio.sleep(0.2)
            case.api.scale("vllm", 3)  # KEDA, by our metric
            await case.up(0, 1, 2)
            gone, kept = case.names()[0], case.names()[1:]
            case.fleet.run(Stop(0))
            await until("it may go", lambda: case.states()[0] == "warm", WITHIN_S)
            assert case.desk.of(Standby, 0)[-1].start_ns == 10**9
            case.api.scale("vllm", 2)
            await until("it is gone", lambda: gone not in case.api.pods, WITHIN_S)
            assert sorted(case.api.ready("vllm")) == sorted(kept)
            assert not case.scaled()

    asyncio.run(run())


def test_observing_a_pod_that_may_go_serves_again_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path, Deployment("vllm", 3), scale="observe") as case:
            await case.up(0, 1, 2)
            name = case.names()[2]
            case.fleet.run(Stop(2))
            await until("it may go", lambda: case.states()[2] == "warm", WITHIN_S)
            case.fleet.run(Start(2))
            await case.up(0, 1, 2)
            notes = case.api.pods[name]["metadata"]["annotations"]
            await until("it costs nothing special", lambda: not notes, WITHIN_S)

    asyncio.run(run())


# ---- the API server ----


def test_while_the_api_server_is_away_serving_goes_on(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            await case.api.go_away()
            await until("it is told", lambda: "of them stays" in case.said(), WITHIN_S)
            lost = case.names()[0]
            case.api.delete(lost)  # the cluster goes on meanwhile
            await asyncio.sleep(0.1)
            assert case.desk.up() == [0, 1]
            await case.api.start()
            await until("all is made up for", lambda: lost not in case.names(), WITHIN_S)
            await case.up(0, 1)
            assert not case.scaled()

    asyncio.run(run())


def test_what_was_decided_while_the_api_server_was_away_is_done_after(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            await case.api.go_away()
            case.fleet.run(Start(2))
            await until("it is told", lambda: "not scaled up" in case.said(), WITHIN_S)
            await case.api.start()
            await case.up(0, 1, 2)
            gone = case.names()[1]
            await case.api.go_away()
            case.fleet.run(Stop(1))
            assert case.desk.up() == [0, 2]
            await until("it is told", lambda: "mark it as the one" in case.said(), WITHIN_S)
            await case.api.start()
            await until("it is gone", lambda: gone not in case.api.pods, WITHIN_S)
            assert case.scaled() == [3, 2]

    asyncio.run(run())


def test_a_watch_that_is_too_old_lists_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            lists = [each for each in case.api.gets if "watch" not in each and "/pods" in each]
            gone = case.api.pods[case.names()[0]]
            case.api.pods.pop(gone["metadata"]["name"])  # nobody is told
            case.api.compact()
            await until("it is noticed", lambda: case.desk.of(ReplicaDown, 0), WITHIN_S)
            again = [each for each in case.api.gets if "watch" not in each and "/pods" in each]
            assert len(again) == len(lists) + 1
            assert not case.desk.troubles

    asyncio.run(run())


def test_a_watch_that_ends_goes_on_where_it_was(tmp_path: Path) -> None:
    """No list again, and nothing is lost in between."""

    async def run() -> None:
        api = KubeApi(Deployment("vllm", 2))
        api.watch_s_most = 0.1
        api.bookmark_s = 0.03
        await api.start()
        fleet = fleet_of(api, tmp_path)
        async with http.session() as session:
            desk = Desk(fleet.upstreams, session)
            await fleet.begin(desk, desk)
            case = Case(api, fleet, desk)
            await case.up(0, 1)
            lists = len([each for each in api.gets if "watch" not in each])
            for name in case.names()[:2] * 2:
                ready = name in api.ready("vllm")
                api.set_ready(name, not ready)
                replica = case.names().index(name)
                await until(
                    "it is seen",
                    lambda replica=replica, ready=ready: (replica in desk.up()) is not ready,
                    WITHIN_S,
                )
            assert len([each for each in api.gets if "watch" not in each]) == lists
            await fleet.close()
            await api.stop()

    asyncio.run(run())


def test_lists_come_in_pages(tmp_path: Path) -> None:
    async def run() -> None:
        api = KubeApi(Deployment("vllm", 5))
        api.page_most = 2
        await api.start()
        fleet = fleet_of(api, tmp_path, replicas_most=5)
        async with http.session() as session:
            desk = Desk(fleet.upstreams, session)
            await fleet.begin(desk, desk)
            await Case(api, fleet, desk).up(0, 1, 2, 3, 4)
            assert len([each for each in api.gets if "continue=" in each]) == 2
            await fleet.close()
            await api.stop()

    asyncio.run(run())


def test_a_renewed_token_is_read_again(tmp_path: Path) -> None:
    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            (tmp_path / "token").write_text("the-second-token\n")
            case.api.tokens = {"the-second-token"}
            case.fleet.run(Start(2))  # within the seconds in which the old one is remembered
            await case.up(0, 1, 2)
            assert case.scaled() == [3]
            assert not case.desk.troubles

    asyncio.run(run())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("token", "its token is not taken"),
        ("role", "give the controller's service account the Role"),
        ("name", "is the name in the fleet file that of a Deployment"),
        ("selector", "names no selector of its pods"),
    ],
)
def test_what_is_forbidden_or_not_there_is_said_with_a_hint(
    change: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        api = KubeApi(Deployment("other" if change == "name" else "vllm", 1))
        if change == "role":
            api.role.remove(("get", "deployments/scale"))
        if change == "token":
            api.tokens = {"another"}
        if change == "selector":  # an empty one would be every pod of the namespace
            monkeypatch.setattr(Deployment, "selector", {})
        await api.start()
        fleet = fleet_of(api, tmp_path)
        async with http.session() as session:
            desk = Desk(fleet.upstreams, session)
            await fleet.begin(desk, desk)
            case = Case(api, fleet, desk)
            await until("it is said", lambda: said in case.said(), WITHIN_S)
            assert desk.up() == []
            await fleet.close()
            await api.stop()

    asyncio.run(run())


def _aborted(question: dict[str, Any]) -> Any:
    part = {"index": 0, "finish_reason": "abort", "text": ""}
    return web.json_response({"model": question["model"], "choices": [part]})


def test_the_role_allows_what_is_done_and_no_more(tmp_path: Path) -> None:
    """The fixture refuses what the Role does not allow: here everything is used."""

    async def run() -> None:
        async with running(tmp_path) as case:
            await case.up(0, 1)
            case.fleet.run(Start(2))
            await case.up(0, 1, 2)
            case.fleet.run(Stop(2))
            case.fleet.run(Rotated(0, "isolated", "hung"))
            await until("all is done", lambda: case.api.used == case.api.role, WITHIN_S)

    asyncio.run(run())


def certificate(folder: Path, number: int) -> ssl.SSLContext:
    """A new one, with a key of its own, that signs itself."""
    key, cert = folder / f"key{number}", folder / f"cert{number}"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=kubernetes", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key),
         "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context


def trust(folder: Path, number: int) -> None:
    making = folder / "making"
    making.write_bytes((folder / f"cert{number}").read_bytes())
    making.rename(folder / "ca.crt")


def test_over_tls_by_the_clusters_ca_also_when_that_is_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a pod finds its cluster: environment, token, CA and namespace."""
    first, second = (certificate(tmp_path, number) for number in (1, 2))
    trust(tmp_path, 1)
    (tmp_path / "namespace").write_text(NAMESPACE)
    (tmp_path / "token").write_text(TOKEN)

    async def run() -> None:
        api = KubeApi(Deployment("vllm", 2))
        await api.start(first)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", api.url.rpartition(":")[2])
        model = {"versions": {"v1": {"deployment": "vllm"}}, "version": "v1", "replicas_most": 3,
                 "port": api.pod_port}  # fmt: skip
        cluster = {
            "models": {"m": model}, "token_file": str(tmp_path / "token"),
            "ca_file": str(tmp_path / "ca.crt"),
        }  # fmt: skip
        fleet = kubernetes_fleet("fleet.yaml", {"schema": 1, "kubernetes": cluster})
        async with http.session() as session:
            desk = Desk(fleet.upstreams, session)
            await fleet.begin(desk, desk)
            case = Case(api, fleet, desk)
            await case.up(0, 1)
            await api.go_away()
            await api.start(second)
            await until("it is not trusted", lambda: "CERTIFICATE_VERIFY" in case.said(), WITHIN_S)
            trust(tmp_path, 2)
            api.scale("vllm", 3)
            await case.up(0, 1, 2)
            await fleet.close()
            await api.stop()

    asyncio.run(run())
