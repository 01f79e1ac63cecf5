"""From cards to the policy: what they say becomes ``GpuRead``, how they fail ``GpuFault``.

Which Xids are the card's own is NVIDIA's to say. This follows its Xid catalogue
(docs.nvidia.com/deploy/xid-errors, as of driver 580, for A100 and newer), by the immediate action
that it gives: to reset the card or restart the machine means that the card is broken; to restart
the application, or to ignore it, that it is not.

A broken card is well again when it answers, the driver asks for nothing, no uncorrected error is
counted, and something shows that it was reset: its counter of uncorrected errors fell, it had not
answered for a while, or the driver had asked for a reset and does not any more. Where none of that
shows, somebody has to say so (``restore``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Protocol

import msgspec

from controller.gpus.apart import read_apart
from controller.gpus.asking import Asker
from controller.gpus.nvml import XID_LOST
from controller.gpus.topology import closeness_permille
from controller.gpus.view import view_of
from controller.listener import Listener
from policy.events import GpuFault, GpuRead, ReplicaUp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from controller.gpus.asking import Pairs, Readings
    from controller.gpus.nvml import Card, GoneError, Happened, Reading, Slice
    from controller.gpus.view import CardView
    from controller.upstream.replica import Replica
    from policy.events import Event, GpuErrorKind

BROKEN_XIDS = {
    46: "it stopped processing, and does not answer",
    48: "double-bit ECC error",
    62: "its micro-controller halted",
    64: "a memory row could not be remapped",
    74: "NVLink error",
    XID_LOST: "it has fallen off the bus",
    95: "uncontained memory error",
    109: "a context switch timed out",
    110: "security fault",
    119: "its system processor does not answer",
    120: "its system processor failed",
    136: "NVLink could not be trained",
    140: "unrecovered ECC error",
    143: "it could not be initialised",
    155: "NVLink error",
    156: "memory was retired",
    158: "fatal timeout",
}
"""The catalogue's action is RESET_GPU, RESTART_BM, or a workflow that ends in one of these."""
CONTAINED_XID = 94
"""Contained memory error: RESTART_APP. Whoever ran there was harmed and has to begin anew; the card
has put the bad memory aside and goes on."""
XID_RECOVERY = 154
"""The driver asks for another recovery action than before."""
WORDS = {
    13: "graphics engine exception", 31: "memory page fault", 43: "it stopped processing",
    45: "clean-up after an application", 63: "a memory row is remapped at the next reset",
    92: "many single-bit errors", CONTAINED_XID: "contained memory error",
    XID_RECOVERY: "the driver asks for a recovery", **BROKEN_XIDS,
}  # fmt: skip
PERMILLE_MOST = 2000
"""The policy takes no more: a card may be above its limits for a moment."""
NS_PER_S = 1_000_000_000
LOOK_S = 0.25
"""How often it is seen whether NVML hangs."""

LOGGER = logging.getLogger("twinkeel")


class Feeder(Protocol):
    """The driver, as the cards see it."""

    @property
    def replicas(self) -> Mapping[int, Replica]: ...

    def feed(self, event: Event) -> None: ...
    def listen(self, listener: Listener) -> None: ...
    def trouble(self, key: str, text: str) -> None: ...


class Times(msgspec.Struct, frozen=True):
    """How often, and how long."""

    read_s: float = 1.0
    hung_s: float = 5.0
    """After that long a call to NVML is told of, and the other cards are read without it."""
    recheck_s: float = 10.0
    """How often a broken card is looked at."""
    settle_s: float = 2.0
    """A card that broke is read for that long, until its counters have followed; a counter that
    rises within it rises for the error that was told."""
    begin_s: float = 10.0
    """How long the controller's start waits for the first look."""


TIMES = Times()


class _Broken:
    """A card or slice that cannot be used, and what shows whether it was reset since."""

    __slots__ = (
        "away",
        "code",
        "contained",
        "kind",
        "recovering",
        "since_ns",
        "uncorrected",
        "why",
    )

    def __init__(self, kind: GpuErrorKind, code: int, why: str, contained: bool) -> None:
        self.kind: GpuErrorKind = kind
        self.code = code
        self.why = why
        self.contained = contained
        self.since_ns = time.monotonic_ns()
        self.away = False
        """It has not answered since."""
        self.uncorrected = 0
        """The most that it counted."""
        self.recovering = False
        """The driver asked for a recovery."""

    def is_well(self, reading: Reading | None, settle_s: float) -> bool:
        """Take in how its card looks now; None: it does not answer."""
        if reading is None:
            self.away = True
            return False
        counted = reading.ecc_uncorrected
        fell = counted is not None and counted < self.uncorrected
        was_reset = self.away or fell or (self.recovering and not reading.asks)
        self.recovering |= reading.asks
        self.uncorrected = max(self.uncorrected, counted or 0)
        if self.contained:
            return not reading.asks and reading.read_ns - self.since_ns >= settle_s * NS_PER_S
        return was_reset and not reading.asks and not counted and not reading.reset_pending


class GpuWatch(Listener):
    """Watches this machine's cards for the replicas that sit on them, until ``close``.

    Args:
        seats: UUIDs of cards or MIG slices, by replica.
        on_broken: a card or slice cannot be used from now on, and why; called after the policy was
            told, for a card and then for each of its slices.
        on_well: it can, again; in the same order.
    """

    def __init__(
        self,
        driver: Feeder,
        seats: Mapping[int, Sequence[str]],
        on_broken: Callable[[str, str], object] = lambda uuid, why: None,
        on_well: Callable[[str], object] = lambda uuid: None,
        times: Times = TIMES,
    ) -> None:
        self._driver = driver
        self._seats = {number: tuple(gpus) for number, gpus in seats.items()}
        self._on_broken = on_broken
        self._on_well = on_well
        self._times = times
        self._loop = asyncio.get_running_loop()
        self._asker = Asker(self._loop, self, times.read_s, times.hung_s)
        self._cards: dict[str, Card] = {}
        self._pairs: Pairs = {}
        self._slices: dict[str, tuple[Card, Slice]] = {}
        """As they were last seen: a card that is lost takes its slices with it."""
        self._readings: dict[str, Reading] = {}
        self._before: dict[str, Reading] = {}
        """The last of each card, from which its counters go on, also when it was away."""
        self._broken: dict[str, _Broken] = {}
        self._told: set[int] = set()
        """Replicas that are up, and whose policy knows that their card is broken."""
        self._excused_ns: dict[str, int] = {}
        """Until when a card's counter may rise for an error that was told already."""
        self._last_xid: dict[str, int] = {}
        self._unread: set[str] = set()
        self._begun = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Look at all cards once, or find that there is none, and say so. To be called before
        anybody looks for the replicas: ``Replica.placed`` is set then."""
        self._driver.listen(self)
        self._asker.start()
        self._tasks = [
            asyncio.create_task(self._look(), name="watch NVML"),
            asyncio.create_task(self._recheck_all(), name="look at broken cards"),
        ]
        try:
            async with asyncio.timeout(self._times.begin_s):
                await self._begun.wait()
        except TimeoutError:
            LOGGER.warning("NVML has not answered yet: the cards are watched when it does")

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._asker.close()

    # What others ask

    def views(self) -> tuple[CardView, ...]:
        """Every card, with its slices after it."""
        return tuple(self._views())

    def placed(self, gpus: Sequence[str]) -> tuple[int, int] | None:
        """How near they are to each other (``closeness_permille``), and their memory in MB
        together; None: they are not known."""
        readings = [self._readings.get(uuid) for uuid in gpus]
        totals_mb = [None if each is None else each.memory_total_mb for each in readings]
        known_mb = [total_mb for total_mb in totals_mb if total_mb is not None]
        if not gpus or len(known_mb) < len(gpus):
            return None
        cards = [self._card_of(uuid) for uuid in gpus]
        return closeness_permille(cards, self._pairs), sum(known_mb)

    def broken(self, gpus: Sequence[str]) -> str:
        """Why what sits on these cannot run now; empty: it can."""
        for uuid in gpus:
            found = self._broken.get(uuid) or self._broken.get(self._card_of(uuid))
            if found is not None:
                return found.why
        return ""

    def restore(self, uuid: str) -> bool:
        """Somebody says that a card or slice is well. False: it is not broken by itself (a slice of
        a broken card comes back with the card)."""
        if uuid not in self._broken:
            return False
        self._well(uuid, "somebody says so")
        return True

    # What the thread tells: see ``asking.Hearer``

    def begun(self, cards: Sequence[Card], pairs: Pairs) -> None:
        self._cards = {card.uuid: card for card in cards}
        self._pairs = pairs
        self._asker.knows(cards)
        self._unread = set(self._cards)
        LOGGER.info("GPUs: %s", ", ".join(f"{card.name} {card.uuid}" for card in cards))

    def none(self, why: str) -> None:
        LOGGER.info("no GPU here: %s", why)
        if self._cards:
            self._driver.trouble("gpu", f"the cards are not watched any more: {why}")
        self._begun.set()

    def read(self, card: Card, readings: Readings) -> None:
        whole = readings[0][0]
        before = self._before.get(card.uuid)
        parts = {part.uuid: part for _, part in readings if part is not None}
        for uuid in self._parts(card.uuid):
            if uuid not in parts:
                del self._slices[uuid]
                self._readings.pop(uuid, None)
        self._slices |= {uuid: (card, part) for uuid, part in parts.items()}
        self._readings |= {reading.uuid: reading for reading, _ in readings}
        self._before[card.uuid] = whole
        self._compare(card, before, whole)
        for uuid in [card.uuid, *parts]:
            found = self._broken.get(uuid)
            if found is not None and found.is_well(whole, self._times.settle_s):
                self._well(uuid, "it was reset" if not found.contained else "it goes on")
        self._tell_readings({card.uuid, *parts})
        self._is_read(card.uuid)

    def happened(self, happened: Happened) -> None:
        card = happened.uuid
        uuid = self._slice_of(card, happened.instance) or card
        if uuid != card or happened.code == CONTAINED_XID:
            settle_ns = round(self._times.settle_s * NS_PER_S)
            self._excused_ns[card] = time.monotonic_ns() + settle_ns
        if happened.kind == "ecc_uncorrectable":
            self._break(uuid, "ecc_uncorrectable", 0, "uncorrectable ECC error")
            return
        code = happened.code
        self._last_xid[uuid] = self._last_xid[card] = code
        why = f"Xid {code}" + (f": {WORDS[code]}" if code in WORDS else "")
        if code in BROKEN_XIDS or code == CONTAINED_XID:
            self._break(uuid, "xid_fatal", code, why, contained=code == CONTAINED_XID)
        else:
            LOGGER.warning("%s: %s", uuid, why)
            self._tell(uuid, "xid_minor", code)

    def gone(self, error: GoneError) -> None:
        uuid = error.uuid
        if uuid not in self._cards:
            return
        code = XID_LOST if error.lost else XID_RECOVERY
        if uuid not in self._broken or self._broken[uuid].contained:
            self._last_xid[uuid] = code
        self._break(uuid, "xid_fatal", code, str(error))
        self._broken[uuid].away = True
        for each in (uuid, *self._parts(uuid)):
            self._readings.pop(each, None)
        self._asker.let_go(uuid)
        self._is_read(uuid)

    def hung(self, uuid: str, s: float) -> None:
        what = f"a question about {uuid}" if uuid else "a question"
        self._driver.trouble(
            f"gpu {uuid}".strip(), f"NVML has not answered {what} for {s:.0f} s: see dmesg"
        )
        self._is_read(uuid)

    def answers(self, uuid: str) -> None:
        LOGGER.info("NVML answers again%s", f" about {uuid}" if uuid else "")

    # The driver's listener

    def fed(self, now_ns: int, event: Event) -> None:
        if isinstance(event, ReplicaUp):
            self._told.discard(event.replica)
            # The policy is told of the event after its listeners are.
            self._loop.call_soon(self._tell_again, event.replica)

    def _tell_again(self, replica: int) -> None:
        """It came up on a card that is broken."""
        for uuid, found in self._broken.items():
            if replica in self._on(uuid):
                self._tell_broken(replica, found)

    # What follows

    def _is_read(self, uuid: str) -> None:
        """The first look is over when every card has had its turn."""
        self._unread.discard(uuid)
        if self._begun.is_set() or not self._cards or self._unread:
            return
        self._begun.set()
        for number, gpus in self._seats.items():
            name = self._driver.replicas[number].name
            for each in gpus:
                if each not in self._cards and each not in self._slices:
                    self._driver.trouble(
                        f"gpu {each}",
                        f"{name} is to sit on it, and this machine has no such card or slice:"
                        " nvidia-smi -L lists those it has",
                    )

    def _compare(self, card: Card, before: Reading | None, now: Reading) -> None:
        """What its counters say that it did not tell, or not yet."""
        uuid = card.uuid
        counted = now.ecc_uncorrected or 0
        if before is None:
            if now.wrong:
                kind: GpuErrorKind = "ecc_uncorrectable" if counted else "xid_fatal"
                self._break(uuid, kind, 0 if counted else XID_RECOVERY, now.wrong)
            return
        if before.ecc_uncorrected is not None and counted > before.ecc_uncorrected:
            if now.read_ns >= self._excused_ns.get(uuid, 0):
                why = f"{counted - before.ecc_uncorrected} uncorrectable ECC errors were counted"
                self._break(uuid, "ecc_uncorrectable", 0, why)
        elif now.asks and not before.asks:
            self._break(uuid, "xid_fatal", XID_RECOVERY, now.wrong)
        corrected = (before.ecc_corrected, now.ecc_corrected)
        if None not in corrected and (now.ecc_corrected or 0) > (before.ecc_corrected or 0):
            self._tell(uuid, "ecc_correctable", 0)

    def _break(
        self, uuid: str, kind: GpuErrorKind, code: int, why: str, contained: bool = False
    ) -> None:
        """It cannot be used from now on; told once."""
        known = self._broken.get(uuid) or self._broken.get(self._card_of(uuid))
        if known is not None and (contained or not known.contained):
            return
        if uuid not in self._cards and uuid not in self._slices:
            LOGGER.warning("an unknown card told an error: %s", why)
            return
        made = self._broken[uuid] = _Broken(kind, code, why, contained)
        reading = self._readings.get(self._card_of(uuid))
        if reading is not None:
            made.is_well(reading, self._times.settle_s)
        for replica in self._on(uuid):
            self._tell_broken(replica, made)
        names = ", ".join(self._driver.replicas[number].name for number in self._on(uuid))
        self._driver.trouble(f"gpu {uuid}", f"{why}; on it: {names or 'nothing of ours'}")
        if uuid in self._cards and not contained:
            self._loop.call_later(self._times.settle_s, self._let_go, uuid)
        for each in (uuid, *self._parts(uuid)):
            self._on_broken(each, why)

    def _let_go(self, uuid: str) -> None:
        found = self._broken.get(uuid)
        if found is not None and not found.contained:
            self._asker.let_go(uuid)

    def _well(self, uuid: str, why: str) -> None:
        LOGGER.info("%s can be used again: %s", uuid, why)
        parts = self._parts(uuid)
        for each in (uuid, *parts):
            self._broken.pop(each, None)
        self._told.difference_update(self._on(uuid))
        self._asker.take_back(uuid)
        for each in (uuid, *parts):
            self._on_well(each)

    def _tell_broken(self, replica: int, found: _Broken) -> None:
        if replica not in self._told and self._driver.replicas[replica].up:
            self._told.add(replica)
            self._driver.feed(GpuFault(replica, found.kind, found.code))

    def _tell(self, uuid: str, kind: GpuErrorKind, code: int) -> None:
        for replica in self._on(uuid):
            if self._driver.replicas[replica].up:
                self._driver.feed(GpuFault(replica, kind, code))

    def _tell_readings(self, uuids: set[str]) -> None:
        """Of the replicas whose first card was just read."""
        for number, gpus in self._seats.items():
            replica = self._driver.replicas[number]
            if not uuids.isdisjoint(gpus):
                replica.placed = self.placed(gpus) or replica.placed
            if gpus and gpus[0] in uuids and replica.up:
                readings = [self._readings[uuid] for uuid in gpus if uuid in self._readings]
                self._driver.feed(event_of(number, readings, time.monotonic_ns()))

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._asker.look()

    async def _recheck_all(self) -> None:
        """See whether what is broken is well again."""
        while True:
            await asyncio.sleep(self._times.recheck_s)
            for uuid in [each for each in self._broken if each in self._cards]:
                await self._recheck(uuid)

    async def _recheck(self, uuid: str) -> None:
        try:
            reading = await read_apart(self._cards[uuid].bus)
        except (OSError, TimeoutError) as error:
            LOGGER.warning("%s could not be looked at: %s", uuid, error or "no answer")
            return
        found = self._broken.get(uuid)
        if reading is not None:
            self._before[uuid] = reading
        if found is not None and found.is_well(reading, self._times.settle_s):
            self._well(uuid, "it was reset")

    # Which is which

    def _card_of(self, uuid: str) -> str:
        found = self._slices.get(uuid)
        return uuid if found is None else found[0].uuid

    def _parts(self, card: str) -> list[str]:
        return [uuid for uuid, (parent, _) in self._slices.items() if parent.uuid == card]

    def _slice_of(self, card: str, instance: int | None) -> str:
        if instance is None:
            return ""
        for uuid, (parent, part) in self._slices.items():
            if parent.uuid == card and part.instance == instance:
                return uuid
        return ""

    def _on(self, uuid: str) -> list[int]:
        """The replicas that sit on a card or on one of its slices, or on a slice."""
        return [
            number
            for number, gpus in self._seats.items()
            if uuid in gpus or any(self._card_of(each) == uuid for each in gpus)
        ]

    def _views(self) -> Iterator[CardView]:
        for card in self._cards.values():
            yield self._view(card, card.uuid, None)
            for uuid in self._parts(card.uuid):
                yield self._view(card, uuid, self._slices[uuid][1])

    def _view(self, card: Card, uuid: str, part: Slice | None) -> CardView:
        found = self._broken.get(uuid) or self._broken.get(card.uuid)
        replicas = tuple(number for number, gpus in self._seats.items() if uuid in gpus)
        return view_of(
            card, part, self._readings.get(uuid),
            uuid=uuid,
            pairs=self._pairs,
            replicas=replicas,
            last_xid=self._last_xid.get(uuid),
            broken="" if found is None else found.why,
        )  # fmt: skip


def event_of(replica: int, readings: Sequence[Reading], now_ns: int) -> GpuRead:
    """What the policy is told of a replica's cards: of several, the worst of each figure. A figure
    that a card does not tell counts as no load: nothing is held against it."""

    def worst(figures: Sequence[int | None]) -> int:
        known = [figure for figure in figures if figure is not None]
        return min(max(known, default=0), PERMILLE_MOST)

    free_mb = [each.memory_free_mb for each in readings if each.memory_free_mb is not None]
    oldest_ns = min((each.read_ns for each in readings), default=now_ns)
    return GpuRead(
        replica,
        min(free_mb, default=0),
        worst([each.pcie_permille for each in readings]),
        worst([each.memory_busy_permille for each in readings]),
        worst([each.heat_permille for each in readings]),
        worst([each.power_permille for each in readings]),
        any(each.throttled for each in readings),
        max(0, now_ns - oldest_ns),
    )
