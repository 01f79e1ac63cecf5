"""A controller with a fleet of served twins, a steady load on it, and a reload."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import yaml

from policy.decisions import Dispatch, Rotated
from policy.events import ReplicaUp
from tests.controller.deploying import load_on
from tests.controller.processes import (
    Controller,
    eventually,
    records,
    settings_for,
    start_controller,
)
from tests.fleet.loaded import COMMAND, PROFILE, weights
from tests.fleet.support import patient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

    from tests.controller.asking import Answer

MODEL = "m"
OLD, NEW = "v1.0", "v1.1"
LABEL = "x-twinkeel-model-version"
OVER = ("done", "rolled back", "given up")
SENT_LEAST = 3
"""Requests before a reload is asked for, and again once it is over."""


@dataclass
class Fleet:
    """What a reload is played on."""

    folder: Path
    replicas: int = 1
    standbys: Sequence[dict[str, Any]] = ({"warm": False},)
    watch_ms: int = 1000
    model: dict[str, Any] = field(default_factory=dict)
    """What its entry in the fleet file has beside."""
    profile: str = PROFILE
    """Of the version that serves."""
    policy: str = ""
    """What the policy file has beside."""
    settings: dict[str, Any] = field(default_factory=dict)
    start_s_most: float = 120.0

    def start(self) -> Controller:
        """The controller, once all of it is up. It serves ``OLD``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if "versions" not in self.model:
            weights(self.folder / OLD, OLD, profile=self.profile)
        given = {
            "versions": {OLD: str(self.folder / OLD)}, "version": OLD,
            "replicas": [{}] * self.replicas, "standbys": list(self.standbys),
            "command": list(COMMAND), "start_s_most": 60.0, "stop_s_most": 5.0,
        }  # fmt: skip
        fleet = self.folder / "fleet.yaml"
        document = {"schema": 1, "models": {MODEL: {**given, **self.model}}}
        fleet.write_text(yaml.safe_dump(document))
        more = f"rollout: {{watch_ms: {self.watch_ms}}}\n{self.policy}"
        how = {"fleet": str(fleet), "policy": patient(self.folder, more=more), **self.settings}
        controller = start_controller(settings_for([], self.folder, **how), self.folder)
        try:
            wanted = self.replicas, len(self.standbys)
            eventually("all is up", lambda: _ready(controller) == wanted, self.start_s_most, 0.1)
        except BaseException:
            controller.stop()
            raise
        return controller


def slots(controller: Controller) -> list[dict[str, Any]]:
    status, body = controller.admin("GET", "/fleet")
    assert status == 200, body
    found: list[dict[str, Any]] = json.loads(body)["fleet"]["slots"]
    return found


def _ready(controller: Controller) -> tuple[int, int]:
    """Replicas that are up, and standbys that can be started."""
    controller.check_alive()
    up = sum(each["up"] for each in controller.status()["replicas"])
    return up, sum(each["state"] in ("cold", "warm") for each in slots(controller))


def ask_for(controller: Controller, version: str, folder: str, **more: Any) -> tuple[int, Any]:
    """Ask for a reload; the status, and what it says."""
    document = {"version": version, "weights": folder, **more}
    status, body = controller.admin("POST", f"/fleet/models/{MODEL}/reload", document)
    return status, json.loads(body)


def begun(controller: Controller, version: str, folder: str, **more: Any) -> tuple[int, Any]:
    """Ask for a reload, as soon as what the last one had left over is started again."""

    def asked() -> tuple[int, Any] | None:
        status, said = ask_for(controller, version, folder, **more)
        waits = status == 409 and "is being started again" in said["error"]["message"]
        return None if waits else (status, said)

    found: tuple[int, Any] = eventually("it can be asked for", asked, 60.0, 0.1)
    return found


def view(controller: Controller) -> dict[str, Any]:
    """How the reload stands."""
    status, body = controller.admin("GET", f"/fleet/models/{MODEL}/reload")
    assert status == 200, body
    found: dict[str, Any] = json.loads(body)
    return found


@dataclass
class Story:
    """How a reload went."""

    controller: Controller
    last: dict[str, Any]
    """What was said of it at the end."""
    answers: list[Answer]
    seconds: float

    @property
    def bad(self) -> list[str]:
        """Answers that are none, in words."""
        return [
            f"{each.status} {each.trouble} {each.body[-200:]!r}"
            for each in self.answers
            if not each.good
        ]

    @property
    def errors(self) -> int:
        """Answers with 5xx, or broken off."""
        return sum(each.status >= 500 or each.status == 0 or not each.clean
                   or bool(each.error) for each in self.answers)  # fmt: skip

    @property
    def wrong(self) -> list[str]:
        """Labels that are not the version of the replica that the last try went to."""
        return wrong_labels(self.answers, self.controller.data, self.last["version"])


def wrong_labels(answers: Sequence[Answer], data: Path, new: str) -> list[str]:
    """What is labelled otherwise than the decision log says, and what was sent to another version
    than ``new`` after the last switch to it, unless it was rolled back."""
    version: dict[int, str] = {}
    sent: dict[int, tuple[int, str]] = {}
    switched = -1
    for number, record in enumerate(records(data)):
        if isinstance(record.event, ReplicaUp):
            version[record.event.replica] = record.event.version
        for decision in record.decisions:
            if isinstance(decision, Dispatch):
                sent[decision.request] = number, version[decision.replica]
            elif isinstance(decision, Rotated) and decision.why == f"rollout of {new}":
                switched = number
            elif isinstance(decision, Rotated) and decision.why == f"rollback of {new}":
                switched = 1 << 60
    found: list[str] = []
    for answer in answers:
        if answer.status != 200:
            continue
        request = int(answer.headers["x-twinkeel-request"])
        at, made_by = sent[request]
        labels = (answer.headers.get(LABEL), answer.extras.get("model_version"))
        if not answer.good and labels == (made_by, None):  # it was broken off
            continue
        if labels != (made_by, made_by):
            found.append(f"request {request}, answered by {made_by}, is labelled {labels}")
        if 0 <= switched < at and made_by != new:
            found.append(f"request {request} went to {made_by} after the switch")
    return found


async def play(
    controller: Controller,
    folder: str,
    version: str = NEW,
    rate: float = 6.0,
    before_s: float = 1.0,
    after_s: float = 1.0,
    meanwhile: Callable[[], Awaitable[None]] | None = None,
    within_s: float = 180.0,
    **more: Any,
) -> Story:
    """Reload under load, to its end, and some load more.

    Args:
        before_s: of load, at least; so is ``after_s``.
        meanwhile: done once the reload has begun.
    """
    async with load_on(controller.url, rate, MODEL) as load:

        async def sent(since_s: float, for_s: float) -> None:
            """Requests that came since then have their answers."""
            deadline_s = time.monotonic() + within_s
            await asyncio.sleep(for_s)
            while sum(each.sent_s > since_s for each in load.answers) < SENT_LEAST:
                assert time.monotonic() < deadline_s, f"nobody was answered for {within_s} s"
                await asyncio.sleep(0.05)

        await sent(0.0, before_s)
        began_s = time.monotonic()
        status, said = await asyncio.to_thread(begun, controller, version, folder, **more)
        assert status == 202, said
        doing = None if meanwhile is None else asyncio.ensure_future(meanwhile())
        last = await asyncio.to_thread(until, controller, OVER, within_s)
        seconds = time.monotonic() - began_s
        if doing is not None:
            await doing
        await sent(time.monotonic(), after_s)
    return Story(controller, last, load.answers, seconds)


def until(controller: Controller, phases: Sequence[str], within_s: float = 120.0) -> dict[str, Any]:
    """Wait until a reload is in one of these; how it stands then."""

    def there() -> dict[str, Any]:
        controller.check_alive()
        now = view(controller)
        return now if now["phase"] in phases else {}

    found: dict[str, Any] = eventually(f"the reload is {phases}", there, within_s, 0.1)
    return found
