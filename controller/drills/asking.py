"""The controller under a drill, over its admin API: its fleet, its log, what it told people."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from controller.admin.status import AlertView  # noqa: TC001 - msgspec reads it
from controller.fleet.contract import FleetAnswer
from policy.log import read_segment
from policy.parameters import from_canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from controller.fleet.contract import FleetView, SlotView
    from policy.log import Header, Record
    from policy.parameters import Parameters

ASK_S_MOST = 10.0
LOOK_S = 0.1
STANDING = frozenset({"serving", "warm", "cold", "outside"})
"""States of a slot in which nothing is under way."""


class DrillError(Exception):
    """A drill that cannot be done, or whose target does not answer: why, and what to do."""


class _Alerts(msgspec.Struct):
    alerts: tuple[AlertView, ...]


class Log(NamedTuple):
    """The decision log, segment by segment as it was when asked for."""

    headers: tuple[Header, ...]
    segments: tuple[bytes, ...]

    def records(self) -> Iterator[Record]:
        """All of them, in order."""
        for data in self.segments:
            yield from read_segment(data).records

    @property
    def parameters(self) -> Parameters:
        """The policy in force when its last segment began."""
        return from_canonical(self.headers[-1].policy)

    def clock_ns(self, wall_ns: int) -> int:
        """A time of day (ns since 1970) by the log's own clock."""
        return wall_ns - self.headers[-1].wall_ns


class Admin:
    """A controller's admin API.

    Methods raise ``DrillError`` where it does not answer as it should.
    """

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._token = token

    def fleet(self) -> FleetView:
        """How its slots stand."""
        found: FleetView = self._decoded("/fleet", FleetAnswer).fleet
        return found

    def alerts(self, since_s: float) -> tuple[AlertView, ...]:
        """What it told people since then (s since 1970), the oldest first."""
        told: tuple[AlertView, ...] = self._decoded("/alerts", _Alerts).alerts
        return tuple(sorted((one for one in told if one.at_s >= since_s), key=lambda one: one.at_s))

    def log(self) -> Log:
        """Its decision log up to now."""
        listed = json.loads(self._ask("GET", "/log"))["segments"]
        segments = tuple(self._ask("GET", f"/log/{each['name']}") for each in listed)
        return Log(tuple(read_segment(data).header for data in segments), segments)

    def pretend(self, replica: int, kind: str, code: int) -> None:
        """Have it told that a replica's card has failed, though it has not."""
        body = {"replica": replica, "kind": kind, "code": code}
        self._ask("POST", "/fleet/drill", body)

    def mend(self, replica: int) -> None:
        """The end of ``pretend``: the card is well again."""
        self._ask("DELETE", f"/fleet/drill/{replica}")

    def wait(self, what: str, true: Callable[[FleetView], bool], s_most: float) -> FleetView:
        """Until it is true of its fleet.

        Raises:
            DrillError: it was not in time.
        """
        deadline_s = time.monotonic() + s_most
        while True:
            view = self.fleet()
            if true(view):
                return view
            if time.monotonic() > deadline_s:
                states = ", ".join(f"{slot.name} {slot.state} {slot.why}" for slot in view.slots)
                raise DrillError(f"after {s_most:g} s {what} is still not so: {states}")
            time.sleep(LOOK_S)

    def _decoded(self, path: str, kind: type[Any]) -> Any:
        try:
            return msgspec.json.decode(self._ask("GET", path), type=kind)
        except msgspec.DecodeError as error:
            raise DrillError(
                f"{self.url}{path}: is no admin API of this version ({error})"
            ) from error

    def _ask(self, method: str, path: str, body: object = None) -> bytes:
        url = f"{self.url}{path}"
        request = urllib.request.Request(
            url, None if body is None else json.dumps(body).encode(),
            {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
            method=method,
        )  # fmt: skip
        try:
            with urllib.request.urlopen(request, timeout=ASK_S_MOST) as answer:
                read: bytes = answer.read()
                return read
        except urllib.error.HTTPError as error:
            with error:
                said = error.read()[:500].decode(errors="replace")
            raise DrillError(f"{method} {url}: answered {error.code}: {said}") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise DrillError(
                f"{url}: no controller answers there ({reason}): give its admin API with --target"
            ) from None


def serving(view: FleetView) -> int:
    """How many slots take requests."""
    return sum(slot.state in ("serving", "outside") for slot in view.slots)


def at_rest(view: FleetView) -> bool:
    """Nothing is being started, stopped or mended."""
    return all(slot.state in STANDING for slot in view.slots)


def slot_named(view: FleetView, name: str) -> SlotView:
    """The slot to hit: by its name or number; empty: the first that serves from the beginning.

    Raises:
        DrillError: there is no such slot, or nothing runs there.
    """
    running = [slot for slot in view.slots if slot.state in ("serving", "outside")]
    if not name:
        base = [slot for slot in running if not slot.standby]
        if not base:
            raise DrillError("no slot of the fleet is serving: start its servers first")
        return base[0]
    for slot in view.slots:
        if name in (slot.name, str(slot.replica)):
            if slot not in running:
                raise DrillError(f"{slot.name} is {slot.state}: a drill hits one that serves")
            return slot
    known = ", ".join(slot.name for slot in view.slots)
    raise DrillError(f"there is no slot {name!r}: there are {known}")
