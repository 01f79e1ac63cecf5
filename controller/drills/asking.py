"""The controller under a drill, over its admin API: its fleet, its log, what it told people."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec

from controller.admin.status import AlertView  # noqa: TC001 - msgspec reads it
from controller.drills.opening import opening
from controller.fleet.contract import FleetAnswer
from policy.log import LogError, read_segment
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
    """A drill that cannot be done, or whose target does not answer: why, and what to do.

    Args:
        status: what the target answered; 0: it is not about an answer.
    """

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


class _Alerts(msgspec.Struct):
    alerts: tuple[AlertView, ...]


class Log:
    """The decision log from its newest segment on, as that was when this was made: what came before
    is told by the segment's snapshot (``controller.drills.opening``).

    Args:
        admin: whose log it is.

    Raises:
        DrillError: it cannot be read.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._bytes: dict[str, int] = {}
        """Of each segment that was read."""
        self._headers: dict[str, Header] = {}
        self._records: dict[str, list[Record]] = {}
        self._opening: tuple[Record, ...] = ()
        why = "it has no segment"
        for name, size in reversed(admin.segments()):
            why = self._read(name, size)
            if not why:
                return
        raise DrillError(f"{admin.url}: its decision log cannot be read: {why}")

    def read(self) -> None:
        """Read on. What was read is not asked for again, but for the segment that grows."""
        listed = self._admin.segments()
        first = next(iter(self._headers))
        names = [name for name, _ in listed]
        if first not in names:
            raise DrillError(
                f"{self._admin.url}: {first}, the segment of its decision log in which the drill"
                " began, is gone: do a shorter one"
            )
        for name, size in listed[names.index(first) :]:
            if self._bytes.get(name) != size:
                self._read(name, size)

    def _read(self, name: str, size: int) -> str:
        """Why it cannot be read, such as when it has only just begun; empty: it was."""
        data = self._admin.segment(name)
        try:
            segment = read_segment(data)
        except LogError as error:
            return f"{name}: {error}"
        try:
            if not self._headers:
                self._opening = opening(segment.header, segment.snapshot)
            self._records[name] = list(segment.records)
        except (LogError, msgspec.MsgspecError) as error:
            raise DrillError(
                f"{self._admin.url}/log/{name}: {error}: use the controller's own version"
            ) from error
        self._headers[name] = segment.header
        self._bytes[name] = size
        return ""

    def records(self) -> Iterator[Record]:
        """All of them, in order; first those that tell how things stood before."""
        yield from self._opening
        for records in self._records.values():
            yield from records

    @property
    def parameters(self) -> Parameters:
        """The policy in force when its last segment began."""
        return from_canonical(self._last.policy)

    def clock_ns(self, wall_ns: int) -> int:
        """A time of day (ns since 1970) by the log's own clock."""
        return wall_ns - self._last.wall_ns

    @property
    def _last(self) -> Header:
        return self._headers[next(reversed(self._headers))]


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

    def segments(self) -> list[tuple[str, int]]:
        """(name, bytes) of what there is of its decision log, the oldest first."""
        listed = json.loads(self._ask("GET", "/log"))["segments"]
        return [(each["name"], each["bytes"]) for each in listed]

    def segment(self, name: str) -> bytes:
        """One of these, as far as it is written."""
        return self._ask("GET", f"/log/{name}")

    def pretend(self, replica: int, kind: str, code: int) -> None:
        """Have it told that a replica's card has failed, though it has not."""
        body = {"replica": replica, "kind": kind, "code": code}
        self._ask("POST", "/fleet/drill", body)

    def mend(self, replica: int) -> None:
        """The end of ``pretend``: the card is well again, or is so already."""
        try:
            self._ask("DELETE", f"/fleet/drill/{replica}")
        except DrillError as error:
            if error.status != HTTPStatus.NOT_FOUND:  # pods come back by themselves
                raise

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
            raise DrillError(f"{method} {url}: answered {error.code}: {said}", error.code) from None
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
