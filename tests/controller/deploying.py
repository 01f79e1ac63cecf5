"""Deployments under load: callers, what the decision log says of who decided, and processes that
die at a chosen place.

``python -m tests.controller.deploying SETTINGS.json READY.json`` is a controller that kills itself,
as ``kill -9`` does, at the place that ``DIE_AT`` in its environment names.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import random
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from controller.deployment.asking import evidence_at
from controller.deployment.manager import Deployments
from controller.store.database import Database
from policy.decisions import Dispatch, Refused, Settled
from policy.deployment import Watcher
from policy.events import CanaryEnded, CanaryStarted, PolicySwitched, Restored
from policy.evidence import decode
from policy.files import load_policy
from policy.log import read_segment
from policy.parameters import from_canonical, policy_hash, render
from tests.controller import processes
from tests.controller.asking import Answer, ask, chat, session
from tests.controller.processes import MODEL, Controller, eventually
from tests.policy_support import parameters
from twin.validate.cli import validate_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    import aiohttp

    from controller.config import Settings
    from policy.deployment import Result, Stage
    from policy.evidence import Band, Evidence
    from policy.log import Record
    from policy.parameters import Parameters

HEADER = "x-twinkeel-policy"
DIE_AT = "DIE_AT"
USERS = 40
ENDS = ("done", "rolled_back")
QUICK: dict[str, Any] = {
    "look_s": 1, "window_s": 10, "warmup_least_s": 0, "warmup_most_s": 1,
    "miss_share_most_permille": 200, "incident_gap_s": 1, "incident_most_s": 2,
    "stages": [
        {"kind": "shadow", "share_permille": 0, "least_s": 1, "least_requests": 10},
        {"kind": "canary", "share_permille": 300, "least_s": 2, "least_requests": 10},
        {"kind": "full", "share_permille": 1000, "least_s": 2, "least_requests": 10},
    ],
}  # fmt: skip
"""A plan that a good policy is through with in seconds."""
HARMFUL = parameters(name="harmful", limits={"model_per_s": 1})
"""Someone thought that this is per user: requests wait for their turn until they are shed."""
GOOD = parameters(name="good", tiers={"turbo_max_tflop": 60})


def short(parameters: Parameters) -> str:
    return policy_hash(parameters)[:12]


# Callers


@dataclass
class Load:
    """Callers of all classes, at a steady rate."""

    url: str
    rate: float
    """Requests per second."""
    seed: int = 1
    model: str = MODEL
    answers: list[Answer] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        draw = random.Random(self.seed)  # noqa: S311
        asking: list[asyncio.Task[None]] = []
        async with session() as client:
            while not stop.is_set():
                asking.append(asyncio.create_task(self._ask(client, draw)))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(draw.expovariate(self.rate)):
                        await stop.wait()
            await asyncio.gather(*asking)

    async def _ask(self, client: aiohttp.ClientSession, draw: random.Random) -> None:
        sla = draw.choice(("P0", "P1", "P1", "P2"))
        headers = {"x-twinkeel-sla": sla, "x-twinkeel-user": f"u{draw.randrange(USERS)}"}
        document = chat(
            self.model, f"Tell me of ship {draw.randrange(10_000)}.", draw.randrange(2, 30),
            stream=draw.random() < 0.6,
        )  # fmt: skip
        self.answers.append(await ask(client, self.url, document, headers))

    def hashes(self) -> dict[str, int]:
        """Answers by the policy that they name; each names exactly one."""
        counts: dict[str, int] = {}
        for answer in self.answers:
            (named,) = answer.headers.getall(HEADER)  # type: ignore[attr-defined]
            counts[named] = counts.get(named, 0) + 1
        return counts


@contextlib.asynccontextmanager
async def load_on(url: str, rate: float, model: str = MODEL) -> AsyncIterator[Load]:
    """Callers, for as long as this goes on; then until each has its answer."""
    load, stop = Load(url, rate, model=model), asyncio.Event()
    task = asyncio.create_task(load.run(stop))
    try:
        yield load
    finally:
        stop.set()
        await task


# What the log says


@dataclass
class Ruled:
    """Who decided what, by the decision log."""

    decided: dict[str, int] = field(default_factory=dict)
    """Decisions about requests, by the policy's short hash."""
    last_s: dict[str, float] = field(default_factory=dict)
    """Time of day of the last of each."""
    split: list[int] = field(default_factory=list)
    """Requests that two policies decided about though neither took over from the other."""
    switches: list[Any] = field(default_factory=list)
    """The events that said who rules."""
    refused: list[Refused] = field(default_factory=list)


def read_ruled(segments: list[bytes]) -> Ruled:
    """Who decided what. A decision without a hash is by the policy that rules alone."""
    ruled = Ruled()
    header = read_segment(segments[0]).header
    ruling = short(from_canonical(header.policy))
    era = 0
    by: dict[int, tuple[int, str]] = {}
    for record in (each for data in segments for each in read_segment(data).records):
        event = record.event
        if isinstance(event, PolicySwitched | CanaryStarted | CanaryEnded | Restored):
            ruled.switches.append(event)
            ruling, era = _after(record, ruling, era, ruled)
        for decision in record.decisions:
            if isinstance(decision, Refused):
                ruled.refused.append(decision)
            if not isinstance(decision, Dispatch | Settled):
                continue
            hash_ = decision.policy or ruling
            ruled.decided[hash_] = ruled.decided.get(hash_, 0) + 1
            ruled.last_s[hash_] = (header.wall_ns + record.now_ns) / 1e9
            before = by.get(decision.request)
            if before is not None and before[0] == era and before[1] != hash_:
                ruled.split.append(decision.request)
            by[decision.request] = (era, hash_)
    return ruled


def _after(record: Record, ruling: str, era: int, ruled: Ruled) -> tuple[str, int]:
    """Who rules alone after the event, and the number of the era: in one, nobody takes over from
    anybody, so that a request has one policy."""
    event = record.event
    if any(isinstance(each, Refused) for each in record.decisions):
        return ruling, era
    if isinstance(event, PolicySwitched):
        return short(from_canonical(event.new)), era + 1
    if isinstance(event, CanaryEnded) and event.keep == "new":
        last = [each for each in ruled.switches if isinstance(each, CanaryStarted)][-1]
        return short(from_canonical(last.new)), era + 1
    return ruling, era + (not isinstance(event, CanaryStarted))


def results_of(segments: list[bytes], live: Parameters, since_s: float) -> list[Result]:
    """What became of the requests that came since this time of day, as the judge saw it."""
    watcher = Watcher(live)
    since_ns = round(since_s * 1e9) - read_segment(segments[0]).header.wall_ns
    results: list[Result] = []
    for record in (each for data in segments for each in read_segment(data).records):
        results += watcher.step(record.now_ns, record.event, record.decisions)
    return [each for each in results if each.arrived_ns >= since_ns]


def outside(results: Sequence[Result], bands: Sequence[Band]) -> tuple[list[str], list[str]]:
    """The bands' figures as they came, each in words: those above their band, and all."""
    above: list[str] = []
    told: list[str] = []
    for band in bands:
        name, _, sla = band.figure.partition("/")
        mine = [each for each in results if sla in ("", each.sla)]
        if name == "slo_miss_share":
            values = [float(each.missed) for each in mine]
            value = sum(values) / len(values) if values else 0.0
        else:
            values = sorted(each.ttft_ns / 1e9 for each in mine if each.ttft_ns >= 0)
            percent = int(name.removeprefix("ttft_s_p"))
            value = values[-(-len(values) * percent // 100) - 1] if values else 0.0
        told.append(f"{band.figure} {value:.3g} in {band.low:.3g}..{band.high:.3g}")
        if value > band.high:
            above.append(told[-1])
    return above, told


# Deployments


def validated(
    candidate: Path, live: str, trace: Path, key: Path, out: Path, profile: str, replicas: int = 2
) -> Evidence:
    """What `twinkeel validate` finds, in a minute; the decision log lies beside ``out``."""
    words = [
        str(candidate), "--against", live, "--trace", str(trace), "--profile", profile,
        "--replicas", str(replicas), "--quick", "--canary", "300", "--key", str(key), "--out",
        str(out), "--quiet",
    ]  # fmt: skip
    with contextlib.suppress(SystemExit):
        validate_command.main(words, standalone_mode=False)
    return decode(out.read_bytes(), str(out))


def sent(candidate: Parameters, evidence: Path, **more: object) -> dict[str, object]:
    """What the command sends."""
    return {"policy": render(candidate), **evidence_at(evidence), **more}


def deploy(controller: Controller, request: dict[str, object]) -> dict[str, Any]:
    status, body = controller.admin("POST", "/deployments", request)
    assert status == 202, body
    row: dict[str, Any] = json.loads(body)
    return row


def history(controller: Controller) -> list[dict[str, Any]]:
    status, body = controller.admin("GET", "/deployments")
    assert status == 200, body
    rows: list[dict[str, Any]] = json.loads(body)["deployments"]
    return rows


def stages(row: dict[str, Any]) -> list[str]:
    return [step["stage"] for step in row["steps"]]


def until(controller: Controller, number: int, *wanted: str, within_s: float = 120.0) -> Any:
    """Wait until a deployment has come to one of these stages; it."""

    def there() -> Any:
        row = next(each for each in history(controller) if each["id"] == number)
        return row if row["stage"] in (wanted or ENDS) else None

    return eventually(f"deployment {number} is in {wanted or ENDS}", there, within_s, 0.05)


def in_force(controller: Controller) -> str:
    """Short hash of the policy in force."""
    hash_: str = controller.status()["policy"]["hash"]
    return hash_[:12]


# Processes that die


PLACES = (
    "shadow:written", "shadow:done", "canary:written", "canary:done", "full:written", "full:done",
    "done:writing", "rolled_back:written",
)  # fmt: skip
"""A stage, and how far it has come: it is in the database and not done yet, or done."""


@dataclass
class Drill:
    """What was found after a controller was killed, again and again."""

    lost: int = 0
    """Deployments and steps that the history had and has no more."""
    wrong: list[str] = field(default_factory=list)
    starts: int = 0
    last: Controller | None = None
    """It runs."""


def killed_everywhere(
    settings: Settings, folder: Path, requests: dict[str, dict[str, object]], rate: float
) -> Drill:
    """Deploy under load and have the controller kill itself, at each of the places in turn; the
    next start is held against what was known before. ``requests`` by the stage: "" for the rest."""
    drill = Drill()
    before: list[dict[str, Any]] = []
    for place in (*PLACES, ""):
        controller = _start(settings, folder, place)
        drill.last, drill.starts = controller, drill.starts + 1
        controller.wait_up(len(settings.upstreams))
        after = history(controller)
        drill.lost += lost(before, after)
        if before:
            drill.wrong += _wrong(controller, after, PLACES[drill.starts - 2])
        if place:
            request = requests.get(place.partition(":")[0], requests[""])
            before = asyncio.run(_until_dead(controller, request, rate, after))
    return drill


async def _until_dead(
    controller: Controller, request: dict[str, object], rate: float, known: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The last history that was heard of."""
    async with load_on(controller.url, rate):
        with contextlib.suppress(OSError, http.client.HTTPException):
            await asyncio.to_thread(deploy, controller, request)
        while controller.process.poll() is None:
            with contextlib.suppress(OSError, http.client.HTTPException):
                known = await asyncio.to_thread(history, controller)
            await asyncio.sleep(0.05)
    code = controller.process.wait()
    assert code == -signal.SIGKILL, (code, processes.tail(controller.output))
    return known


def _wrong(controller: Controller, after: list[dict[str, Any]], place: str) -> list[str]:
    """What is not as it should be after it was killed there."""
    stage, row = place.partition(":")[0], after[0]
    alerts = controller.admin("GET", "/alerts")[1].decode()
    checks = {
        f"the last stage is {row['stage']}": row["stage"] == "rolled_back",
        f"there is no trace of the stage: {stages(row)}": stage in (*stages(row), "done"),
        f"{in_force(controller)} is in force": in_force(controller) == short(load_policy("stable")),
        "a deployment goes on": controller.admin("GET", "/deployments/current")[1]
        == b'{"current":null}',
        "nobody is told": stage == "rolled_back" or "restarted in the middle" in alerts,
    }
    return [f"killed at {place}: {what}" for what, holds in checks.items() if not holds]


def _start(settings: Settings, folder: Path, die_at: str) -> Controller:
    os.environ[DIE_AT] = die_at
    try:
        return processes.start_controller(settings, folder, "tests.controller.deploying")
    finally:
        del os.environ[DIE_AT]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def _arm(die_at: str) -> None:
    stage, _, moment = die_at.partition(":")
    enter, run = Deployments._enter, Database.run

    async def entering(self: Deployments, running: Any, to: Stage) -> None:
        if to.kind == stage and moment == "written":
            _die()
        await enter(self, running, to)
        if to.kind == stage and moment == "done":
            await asyncio.sleep(0.3)  # its first decisions are on the disk
            _die()

    async def running_(self: Database, work: Any) -> Any:
        if moment == "writing" and "finish" in work.__code__.co_names:
            _die()
        found = await run(self, work)
        if stage == "rolled_back" and "go_back" in work.__code__.co_names:
            _die()
        return found

    Deployments._enter = entering  # type: ignore[method-assign]
    Database.run = running_  # type: ignore[method-assign]


def lost(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> int:
    """Deployments and steps that a history had and has no more."""
    kept = {row["id"]: row["steps"] for row in after}
    count = 0
    for row in before:
        steps = kept.get(row["id"], [])
        count += sum(step not in steps for step in row["steps"])
    return count


if __name__ == "__main__":
    _arm(os.environ[DIE_AT])
    processes.main()
