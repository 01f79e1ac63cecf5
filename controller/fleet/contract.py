"""What every kind of fleet is, so that the driver need not know which one it has.

A fleet has a fixed number of *slots*, each a ``Replica`` of the driver, by id. What runs in a slot
may change: a process is restarted, a pod has another address, a standby runs or does not. A slot
takes requests only while its gate is open; then the watcher finds out what serves there and says
``ReplicaUp``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from controller.config import Upstream
    from controller.upstream.replica import Replica
    from policy.decisions import Decision
    from policy.events import Event

SlotState = Literal[
    "cold", "starting", "warming", "warm", "serving", "stopping", "waiting", "broken", "outside",
]  # fmt: skip
"""cold: nothing runs, and it can be started. starting: a process runs and does not answer yet.
warming: it answers, and is sent its first prompts. warm: a standby that could serve at once.
serving: its gate is open. stopping: it is told to end. waiting: it failed, and is started again
when its time has come. broken: its card is, or it failed too often; somebody has to look. outside:
it is run by someone else."""


class Feeder(Protocol):
    """The driver, as a fleet sees it."""

    @property
    def replicas(self) -> Mapping[int, Replica]: ...

    def now_ns(self) -> int: ...
    def feed(self, event: Event) -> None: ...
    def trouble(self, key: str, text: str) -> None: ...


class Gate(Protocol):
    """The watcher, as a fleet sees it."""

    def hold(self, replica: Replica, reason: str) -> None:
        """Nothing new goes there, and nobody looks for it; if it was up, it is down from now on."""
        ...

    def release(self, replica: Replica) -> None:
        """Look for it at once, and say so when it is up."""
        ...

    async def prepare(self, replica: Replica) -> None:
        """Find out what it is while it is held, so that ``release`` need not wait for it."""
        ...


class Fleet(Protocol):
    """A kind of fleet. ``tests/fleet/conformance.py`` is what all of them must pass."""

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        """Every slot, by id; known before anything runs."""
        ...

    async def begin(self, driver: Feeder, gate: Gate) -> None:
        """Adopt what runs already, start what should run, and announce the standbys. Does not wait
        until servers are up."""
        ...

    def run(self, decision: Decision) -> None:
        """Carry out ``Start``, ``Stop`` and ``Rotated(isolated)``, in the background; whatever else
        is decided is none of its business. A slot that cannot do it says so with an event."""
        ...

    async def ended(self, replica: Replica) -> None:
        """A connection to it broke: return when its end has been told, or after a moment."""
        ...

    def view(self) -> FleetView:
        """How it stands, for people."""
        ...

    async def close(self) -> None:
        """The controller ends: so does everything that it started."""
        ...


class SlotView(msgspec.Struct, frozen=True):
    """A slot, and what runs in it."""

    replica: int
    name: str
    model: str
    version: str
    state: SlotState
    why: str
    """It is in this state; empty: as it should be."""
    since_s: float
    """How long it has been."""
    standby: bool
    """It waits for another's place, or took it."""
    url: str
    domain: str
    gpus: tuple[str, ...] = ()
    """UUIDs of its cards or MIG slices."""
    pid: int = 0
    """0: none, or not of this machine."""
    starts: int = 0
    """Since the controller began."""
    log: str = ""
    """File of what its process says."""


class FleetView(msgspec.Struct, frozen=True):
    """A fleet, now."""

    kind: str
    """static, local or kubernetes."""
    slots: tuple[SlotView, ...]


class FleetAnswer(msgspec.Struct, frozen=True):
    """What ``GET /fleet`` answers, for who needs no cards."""

    fleet: FleetView
