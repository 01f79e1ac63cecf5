"""What every kind of fleet must do, whatever runs its servers.

A test module makes a ``Bench`` of its kind and runs every check of ``CHECKS`` against a fresh one::

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_it_is_a_fleet(check: Check, tmp_path: Path) -> None:
        asyncio.run(run_check(check, lambda: MyBench(tmp_path)))

The driver and the watcher are a ``Desk``: every event goes to the real policy, which must not
refuse any, and a gate that was opened is up at once. So no server has to be reached for it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from controller import http
from controller.upstream.replica import Replica
from policy.compose import build_policy
from policy.decisions import Refused, Rotated, Scaled, Start, Stop
from policy.events import ReplicaDown, ReplicaUp, Standby, Warmed
from policy.files import load_policy

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    import aiohttp

    from controller.config import Upstream
    from controller.fleet.contract import Fleet, SlotView
    from policy.decisions import Decision
    from policy.events import Event

NS_PER_S = 1_000_000_000
T = TypeVar("T")


class Bench(Protocol):
    """A fleet under test, and what the checks need to know of it."""

    fleet: Fleet
    serving: tuple[int, ...]
    """Slots that serve without being asked, at least one."""
    spares: tuple[int, ...]
    """Slots that are announced as standbys; empty: this kind has none."""
    crashes: bool
    """What runs in a slot can end by itself, and the fleet sees to it."""
    within_s: float
    """How long a start, a stop or a restart may take here."""

    def runs(self, replica: int) -> bool:
        """Whether anything runs in the slot."""
        ...

    async def crash(self, replica: int) -> None:
        """What runs in the slot ends by itself, now. Only with ``crashes``."""
        ...

    async def clear(self) -> None:
        """The check is over: put away what the fleet's ``close`` is not meant to."""
        ...


class Desk:
    """The driver and the watcher of a fleet: keeps what it was told, and lets the policy see it."""

    def __init__(self, upstreams: Sequence[Upstream], session: aiohttp.ClientSession) -> None:
        self.replicas = {
            number: Replica(number, upstream, session) for number, upstream in enumerate(upstreams)
        }
        self.events: list[Event] = []
        self.decided: list[Decision] = []
        self.troubles: list[tuple[str, str]] = []
        self.reasons: dict[int, list[str]] = {number: [] for number in self.replicas}
        """Why each gate was shut, in order."""
        self._policy = build_policy(load_policy("stable"))

    # The driver

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def feed(self, event: Event) -> None:
        decided = self._policy.step(self.now_ns(), event)
        refused = [each for each in decided if isinstance(each, Refused)]
        assert not refused, f"{event} was refused: {refused[0].why}"
        self.events.append(event)
        self.decided += decided

    def trouble(self, key: str, text: str) -> None:
        self.troubles.append((key, text))

    # The watcher

    def hold(self, replica: Replica, reason: str) -> None:
        self.reasons[replica.id].append(reason)
        replica.held = True
        if replica.up:
            replica.up = False
            self.feed(ReplicaDown(replica.id, reason))

    def release(self, replica: Replica) -> None:
        replica.held = False
        asyncio.get_running_loop().call_soon(self._up, replica)

    async def prepare(self, replica: Replica) -> None:
        assert replica.held, "what is let in needs no preparing"

    def _up(self, replica: Replica) -> None:
        if replica.held or replica.up:
            return
        replica.up = True
        cost = (1, 1, 1, 1, 1, 1)
        version = replica.upstream.version
        replica.spec = ReplicaUp(
            replica.id, replica.name, ("m",), False, 100, 16, 8, 256, 1024, cost, 1, 1,
            version=version,
        )  # fmt: skip
        self.feed(replica.spec)

    # What the checks ask

    def up(self) -> list[int]:
        return [number for number, replica in self.replicas.items() if replica.up]

    def of(self, kind: type[T], replica: int) -> list[T]:
        """Events of a kind about one replica, in order."""
        mine = [each for each in self.events if getattr(each, "replica", None) == replica]
        return [each for each in mine if isinstance(each, kind)]


class Check(Protocol):
    """One thing that every fleet does."""

    __name__: str

    async def __call__(self, bench: Bench, desk: Desk) -> None: ...


async def run_check(check: Check, make: Callable[[], Bench]) -> None:
    """Run one check against a fresh fleet, and close it."""
    bench = make()
    async with http.session() as session:
        desk = Desk(bench.fleet.upstreams, session)
        try:
            await bench.fleet.begin(desk, desk)
            await check(bench, desk)
        finally:
            await bench.fleet.close()
            await bench.clear()


async def until(what: str, true: Callable[[], T], within_s: float) -> T:
    """Wait until it is; gives what it gave."""
    deadline_s = time.monotonic() + within_s
    while not (found := true()):
        assert time.monotonic() < deadline_s, f"not within {within_s} s: {what}"
        await asyncio.sleep(0.005)
    return found


async def settled(bench: Bench, desk: Desk) -> None:
    """Everything is up that serves, and announced that waits."""
    await until("all serve", lambda: set(desk.up()) >= set(bench.serving), bench.within_s)
    for spare in bench.spares:
        await announced(bench, desk, spare, 0)


async def announced(bench: Bench, desk: Desk, replica: int, before: int) -> Standby:
    """Until it has been announced more often than ``before``."""

    def last() -> Standby | None:
        found = desk.of(Standby, replica)
        return found[-1] if len(found) > before else None

    found = await until(f"replica {replica} is a standby", last, bench.within_s)
    assert found is not None
    return found


def slot(bench: Bench, replica: int) -> SlotView:
    return bench.fleet.view().slots[replica]


# ---- the checks ----


async def slots_are_fixed(bench: Bench, desk: Desk) -> None:
    """Known before anything runs, told apart, and the same ever after."""
    fleet = bench.fleet
    before = fleet.upstreams
    assert before, "a fleet has at least one slot"
    await settled(bench, desk)
    assert fleet.upstreams == before
    slots = fleet.view().slots
    assert [each.replica for each in slots] == list(range(len(before)))
    assert len({each.name for each in slots}) == len(before)
    assert set(bench.serving) | set(bench.spares) == set(range(len(before)))


async def begins_without_waiting(bench: Bench, desk: Desk) -> None:
    """A standby that was announced and a gate that was opened came later, or at once: what is not
    there yet takes nothing."""
    await settled(bench, desk)
    for spare in bench.spares:
        assert desk.replicas[spare].held
        assert slot(bench, spare).state in ("warm", "cold", "outside")
        assert slot(bench, spare).standby
    for replica in bench.serving:
        assert slot(bench, replica).state in ("serving", "outside")
        assert not slot(bench, replica).why


async def other_decisions_are_none_of_its_business(bench: Bench, desk: Desk) -> None:
    await settled(bench, desk)
    up, seen = desk.up(), len(desk.events)
    for decision in (
        Scaled("m", 3, "load"), Rotated(bench.serving[0], "ejected", "errors"),
        Rotated(bench.serving[0], "draining", "scale_in"), Rotated(bench.serving[0], "in", "well"),
    ):  # fmt: skip
        bench.fleet.run(decision)
    await asyncio.sleep(0.1)
    assert desk.up() == up
    assert len(desk.events) == seen


async def slots_that_are_not_there_are_survived(bench: Bench, desk: Desk) -> None:
    """A policy that was restored may remember more slots than there are now."""
    await settled(bench, desk)
    up = desk.up()
    beyond = len(bench.fleet.upstreams) + 3
    for decision in (Start(beyond), Stop(beyond), Rotated(beyond, "isolated", "hung")):
        bench.fleet.run(decision)
    await asyncio.sleep(0.05)
    assert desk.up() == up


async def a_standby_serves_when_asked(bench: Bench, desk: Desk) -> None:
    """Once, however often it is asked."""
    await settled(bench, desk)
    for spare in bench.spares:
        bench.fleet.run(Start(spare))
        bench.fleet.run(Start(spare))
        await until("it is up", lambda spare=spare: desk.replicas[spare].up, bench.within_s)
        assert slot(bench, spare).state == "serving"
        assert bench.runs(spare)
        assert len(desk.of(ReplicaUp, spare)) == 1
        assert not desk.of(Warmed, spare)


async def a_stopped_slot_is_a_standby_again(bench: Bench, desk: Desk) -> None:
    """Its gate shuts at once, with the reason that needs no replacement."""
    await settled(bench, desk)
    for spare in bench.spares:
        bench.fleet.run(Start(spare))
        await until("it is up", lambda spare=spare: desk.replicas[spare].up, bench.within_s)
        before = len(desk.of(Standby, spare))
        bench.fleet.run(Stop(spare))
        assert not desk.replicas[spare].up
        assert desk.of(ReplicaDown, spare)[-1].reason == "stopped"
        await announced(bench, desk, spare, before)
        bench.fleet.run(Start(spare))
        await until("it is up again", lambda spare=spare: desk.replicas[spare].up, bench.within_s)


async def a_base_slot_can_be_stopped(bench: Bench, desk: Desk) -> None:
    """A rollout stops what served; it comes back as a standby. Only where slots can be stopped."""
    if not bench.spares:
        return
    await settled(bench, desk)
    replica = bench.serving[0]
    bench.fleet.run(Stop(replica))
    assert not desk.replicas[replica].up
    await announced(bench, desk, replica, 0)
    assert desk.replicas[replica].held


async def a_version_that_cannot_be_is_said(bench: Bench, desk: Desk) -> None:
    """And the slot is a standby again."""
    await settled(bench, desk)
    for spare in bench.spares:
        before = len(desk.of(Standby, spare))
        bench.fleet.run(Start(spare, "no-such-version"))
        told = await until("it is said", lambda spare=spare: desk.of(Warmed, spare), bench.within_s)
        assert (told[-1].version, told[-1].ok) == ("no-such-version", False)
        await announced(bench, desk, spare, before)
        assert not desk.replicas[spare].up


async def a_crash_is_told_and_mended(bench: Bench, desk: Desk) -> None:
    """The gate shuts with the reason; with nobody in its place the slot serves again."""
    if not bench.crashes:
        return
    await settled(bench, desk)
    replica = bench.serving[0]
    await bench.crash(replica)
    down = await until("it is down", lambda: desk.of(ReplicaDown, replica), bench.within_s)
    assert down[-1].reason not in ("stopped", "controller_lost", "")
    await until("it is back", lambda: desk.replicas[replica].up, bench.within_s)
    assert len(desk.of(ReplicaUp, replica)) == 2
    assert slot(bench, replica).state == "serving"


async def a_place_that_was_taken_stays_so(bench: Bench, desk: Desk) -> None:
    """What crashed comes back as a standby of the one that took its place."""
    if not (bench.crashes and bench.spares):
        return
    await settled(bench, desk)
    replica, spare = bench.serving[0], bench.spares[0]
    await bench.crash(replica)
    await until("it is down", lambda: desk.of(ReplicaDown, replica), bench.within_s)
    bench.fleet.run(Start(spare))
    await until("the other serves", lambda: desk.replicas[spare].up, bench.within_s)
    await announced(bench, desk, replica, 0)
    assert desk.replicas[replica].held
    assert slot(bench, replica).standby


async def a_hung_one_is_replaced(bench: Bench, desk: Desk) -> None:
    """Whatever it says of itself, it is ended and started again."""
    if not bench.crashes:
        return
    await settled(bench, desk)
    replica = bench.serving[0]
    bench.fleet.run(Rotated(replica, "isolated", "hung"))
    assert not desk.replicas[replica].up, "nothing may go there from now on"
    await until("it is back", lambda: desk.replicas[replica].up, bench.within_s)


async def closing_leaves_nothing(bench: Bench, desk: Desk) -> None:
    """Nothing that it started runs on, and closing twice does no harm."""
    await settled(bench, desk)
    for spare in bench.spares[:1]:
        bench.fleet.run(Start(spare))  # in the midst of something
    await bench.fleet.close()
    if bench.crashes:
        running = [each for each in desk.replicas if bench.runs(each)]
        assert not running
        assert not desk.up()
    bench.fleet.run(Start(bench.serving[0]))
    await bench.fleet.close()


CHECKS: tuple[Callable[[Bench, Desk], Awaitable[None]], ...] = (
    slots_are_fixed,
    begins_without_waiting,
    other_decisions_are_none_of_its_business,
    slots_that_are_not_there_are_survived,
    a_standby_serves_when_asked,
    a_stopped_slot_is_a_standby_again,
    a_base_slot_can_be_stopped,
    a_version_that_cannot_be_is_said,
    a_crash_is_told_and_mended,
    a_place_that_was_taken_stays_so,
    a_hung_one_is_replaced,
    closing_leaves_nothing,
)
