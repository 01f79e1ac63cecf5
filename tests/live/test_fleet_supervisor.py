"""`serve --fleet` with real vLLM: one engine is killed and its warm standby takes its place; the
controller is killed, and the next one goes on with what runs; one of two engines hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from policy.events import ReplicaDown
from tests.controller.asking import Answer, ask, chat, session
from tests.controller.processes import Controller, eventually, settings_for, start_controller, stop
from tests.fleet.support import members
from tests.live.server import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MODEL, SETTINGS
from tests.live.vllm_env.ensure import environment, python_of, tiny_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.live.conftest import Ledger

pytestmark = pytest.mark.live

START_S_MOST = 900.0
UP_S_MOST = 120.0
FIRST, STEADY = 20, 60
POLICY = """\
schema: 1
name: patient
discipline: tiered
health: {first_grace_ms: 5000, stall_ms: 5000}
classes: {p0_deadline_ms: 60000, p1_deadline_ms: 60000, p2_deadline_ms: 60000}
"""


def fleet_file(folder: Path, replicas: int) -> Path:
    """One place on each of two cores; what does not serve is a standby."""
    env = environment()
    cores = sorted(os.sched_getaffinity(0))
    command = [
        python_of(env), "-m", "vllm.entrypoints.cli.main", "serve", "{weights}",
        "--served-model-name", "{model}", "--host", "{host}", "--port", "{port}",
        "--max-model-len", "8192", "--max-num-seqs", str(MAX_NUM_SEQS),
        "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), "--enforce-eager",
        "--scheduling-policy", "priority", "--num-gpu-blocks-override", "512",
        "--disable-uvicorn-access-log", "--enable-per-request-metrics",
    ]  # fmt: skip
    places = [{"env": {"VLLM_CPU_OMP_THREADS_BIND": str(core)}} for core in (cores[0], cores[-1])]
    document = {
        "schema": 1,
        "models": {
            MODEL: {
                "versions": {"v1": str(tiny_model(env))}, "version": "v1", "command": command,
                "env": SETTINGS, "profile": "cpu/tiny-qwen3", "replicas": places[:replicas],
                "standbys": places[replicas:], "start_s_most": START_S_MOST, "stop_s_most": 20.0,
            }
        },
    }  # fmt: skip
    path = folder / "fleet.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


class Site:
    """A controller with its fleet."""

    def __init__(self, controller: Controller, folder: Path) -> None:
        self.controller = controller
        self.fleet_folder = folder / "data" / "fleet"

    def slots(self) -> list[dict[str, Any]]:
        slots: list[dict[str, Any]] = json.loads(self.controller.admin("GET", "/fleet")[1])[
            "fleet"
        ]["slots"]
        return slots

    def until(self, *states: str) -> None:
        def there() -> bool:
            self.controller.check_alive()
            return tuple(each["state"] for each in self.slots()) == states

        eventually(f"the slots are {states}", there, START_S_MOST, 0.25)

    def pids(self) -> list[int]:
        return [each["pid"] for each in self.slots()]

    def up(self) -> list[int]:
        return [each["id"] for each in self.controller.status()["replicas"] if each["up"]]

    def engines(self, name: str) -> list[int]:
        """The engine core's process of a slot, and its workers'."""
        found = members(self.fleet_folder, name)
        return [pid for pid in found if _name_of(pid).startswith(("VLLM::Engine", "VLLM::Work"))]


def _name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


async def one_by_one(url: str, count: int) -> list[float]:
    """How long each of some requests takes, in seconds, first token to last included."""
    taken: list[float] = []
    async with session() as client:
        for number in range(count):
            text = " ".join(f"word{number}-{place}" for place in range(20 + 3 * (number % 20)))
            answer = await ask(client, url, chat(MODEL, text, 16))
            assert answer.good, answer
            taken.append(answer.e2e_s)
    return taken


def first_against_steady(site: Site) -> float:
    """p99 of the first requests over p99 of those after them."""
    taken = asyncio.run(one_by_one(site.controller.url, FIRST + STEADY))
    return max(taken[:FIRST]) / max(taken[FIRST:])


async def under_load(url: str, s: float, happens: Callable[[], object]) -> list[Answer]:
    """Five streams a second, and something that happens after the first of them."""
    async with session() as client:
        tasks: list[asyncio.Task[Answer]] = []
        begun_s = time.monotonic()
        happening: asyncio.Task[object] | None = None
        while time.monotonic() - begun_s < s or (happening and not happening.done()):
            document = chat(MODEL, f"{len(tasks)}", 24)
            tasks.append(asyncio.create_task(ask(client, url, document)))
            await asyncio.sleep(0.2)
            if happening is None and time.monotonic() - begun_s > 1.0:
                happening = asyncio.create_task(asyncio.to_thread(happens))
        assert happening is not None
        await happening
        return list(await asyncio.gather(*tasks))


def lost_before_their_first_token(answers: list[Answer]) -> list[Answer]:
    return [answer for answer in answers if not answer.good and not answer.text]


def test_one_is_killed_the_controller_is_and_one_hangs(tmp_path: Path, ledger: Ledger) -> None:
    policy = tmp_path / "patient.yaml"
    policy.write_text(POLICY)
    settings = settings_for([], tmp_path, fleet=str(fleet_file(tmp_path, 1)), policy=str(policy))
    controller = start_controller(settings, tmp_path)
    site = Site(controller, tmp_path)
    try:
        site.until("serving", "warm")
        eventually("it is up", lambda: site.up() == [0], UP_S_MOST)
        ratios = [first_against_steady(site)]
        print("first against steady", ratios)
        victim, core = site.pids()[0], site.engines(f"{MODEL}-0")
        assert core, "an engine core of its own"
        replaced_s = killed(site, victim)
        assert not set(core) & set(members(site.fleet_folder)), "its engine core went with it"
        ratios.append(first_against_steady(site))
        site.until("warm", "serving")
        left_over = site.pids()[0]
        controller.kill()
        fleet_file(tmp_path, 2)
        controller = site.controller = start_controller(settings, tmp_path)
        eventually("it is adopted", lambda: site.up() == [0], UP_S_MOST)
        assert site.pids()[0] == left_over
        site.until("serving", "serving")
        eventually("both are up", lambda: site.up() == [0, 1], UP_S_MOST)
        hung_s = hung(site)
        site.until("serving", "serving")
        assert site.controller.status()["refused_events"] == 0
    finally:
        code = stop(controller.process)
        left = members(site.fleet_folder)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert code == 0
    assert not left
    assert not controller.complaints()
    controller.audit()
    downs = [each.event.reason for each in controller.records()
             if isinstance(each.event, ReplicaDown)]  # fmt: skip
    assert downs[0] == "killed by signal 9"
    assert downs[-3:] == ["hung", "stopped", "stopped"]
    ledger.add("fleet_replaced_s", replaced_s, "s", "<= 37", "kill -9 of vLLM, a warm standby")
    ledger.add("fleet_hung_isolated_s", hung_s, "s", "<= 37", "its engine core stands still")
    ledger.add("first20_p99_ratio", max(ratios), "", "<= 1.2", "vLLM, after a start and a takeover")
    assert max(ratios) < 2.0, f"what a first request compiles takes seconds: {ratios}"


def killed(site: Site, victim: int) -> float:
    """Seconds until the standby serves in its place."""
    taken: list[float] = []

    def kill() -> None:
        begun_s = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        eventually("the standby serves", lambda: site.up() == [1], 37.0)
        taken.append(time.monotonic() - begun_s)

    answers = asyncio.run(under_load(site.controller.url, 4.0, kill))
    assert not lost_before_their_first_token(answers)
    return taken[0]


def hung(site: Site) -> float:
    """Seconds until an engine core that stands still, behind a server that says that it is well, is
    taken for hung and ended. It is the one to which a light load goes: one without work is not
    missed."""
    taken: list[float] = []
    victim = site.pids()[0]

    def stand_still() -> None:
        begun_s = time.monotonic()
        for pid in site.engines(f"{MODEL}-0"):
            os.kill(pid, signal.SIGSTOP)
        eventually("it is ended", lambda: site.pids()[0] != victim, 120.0)
        assert site.up() == [1]
        taken.append(time.monotonic() - begun_s)

    answers = asyncio.run(under_load(site.controller.url, 10.0, stand_still))
    assert not lost_before_their_first_token(answers)
    return taken[0]
