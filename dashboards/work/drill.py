"""The job ``drill``: what ``twinkeel drill`` does.

At SIGTERM, which cancels it, it takes back what it has broken, as the command does at Ctrl-C.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from controller.drills.asking import Admin, DrillError
from controller.drills.cli import DemoTarget, LiveFleet, run_demo, run_live
from policy.drills import DrillKind  # noqa: TC001 - msgspec reads it
from twin.report.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from controller.drills.measure import DrillResult

    Tell = Callable[[float | None, str], None]

RESULT, TAKEN_BACK, DEMO = "drill.json", "taken-back", "demo"
AROUND_S = 20.0
"""What a drill takes beside its own time: the fleet's start, its rest, the twin."""
TICK_S = 0.5


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request. The admin token is no part of it: it comes by standard input."""

    kind: DrillKind
    for_s: float
    on: str
    """Name or number of the slot; empty: the first."""
    target: str
    """``demo``, or the address of a controller's admin API."""
    data: str
    """Of a controller: its data folder, if it is on this machine."""
    profile: str
    """Of a controller: its step times, for the prediction."""
    asked_s: float
    """Since 1970: no drill is another one's repetition."""


def run(request: dict[str, Any], folder: Path, tell: Tell) -> None:
    asked = msgspec.convert(request, Asked)
    signal.signal(signal.SIGTERM, _end)
    try:
        with _telling(asked.for_s + AROUND_S, tell) as say:
            result = _drilled(asked, folder, say)
    except DrillError as error:
        raise ValueError(str(error)) from error
    except SystemExit:
        (folder / TAKEN_BACK).touch()
        raise
    write_whole(folder / RESULT, msgspec.json.encode(result).decode())


def _end(number: int, frame: FrameType | None) -> None:
    """Let every ``finally`` do its work, once."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit(128 + number)


def _drilled(asked: Asked, folder: Path, say: Callable[[str], None]) -> DrillResult:
    from twinkeel import play_drill  # all commands: not for who only wants the files' names

    if asked.target == DemoTarget.name:
        return run_demo(asked.kind, asked.for_s, asked.on, folder / DEMO, play_drill, say)
    token = sys.stdin.read().strip()
    if not token:
        raise ValueError("the admin token of the target is not known any more: begin a new drill")
    data = Path(asked.data) if asked.data else folder / "no-data"  # nothing is recorded there
    fleet = LiveFleet(asked.target, Admin(asked.target, token), data, asked.profile)
    return run_live(asked.kind, fleet, asked.for_s, asked.on, True, play_drill, say)


@contextmanager
def _telling(expected_s: float, tell: Tell) -> Iterator[Callable[[str], None]]:
    """Tells how far it is by the clock, with what was said last."""
    began_s = time.monotonic()
    over = threading.Event()
    last = "starting"

    def say(text: str) -> None:
        nonlocal last
        last = text

    def tick() -> None:
        while not over.wait(TICK_S):
            tell(min(0.99, (time.monotonic() - began_s) / expected_s), last)

    thread = threading.Thread(target=tick, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        over.set()
        thread.join()
