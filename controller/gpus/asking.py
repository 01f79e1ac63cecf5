"""The thread that talks to NVML, so that a sick card holds up nobody else.

A call may take seconds, or never come back. When one does not, its thread is left alone with it and
another goes on without that card; when the call comes back after all, the card is read again.

To let go of a card, NVML is closed and opened again without it. What others tell in that moment is
lost; their counters are not.

What is read and heard is handed to a ``Hearer`` in the event loop, in the order in which it came.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from controller.gpus.nvml import GoneError, NoGpuError, Nvml

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from controller.gpus.nvml import Card, Happened, Reading, Slice

    Readings = tuple[tuple[Reading, Slice | None], ...]
    Pairs = dict[tuple[str, str], tuple[bool, int | None]]

NS_PER_S = 1_000_000_000
WAIT_MS = 100
"""How long events are waited for at a time, and what else there is to do waits with them."""
JOIN_S = 1.0

LOGGER = logging.getLogger("twinkeel")


class Hearer(Protocol):
    """Who is told, in the event loop."""

    def begun(self, cards: Sequence[Card], pairs: Pairs) -> None:
        """These cards there are; of each two, how near they are (``Nvml.near``)."""
        ...

    def none(self, why: str) -> None:
        """There is no card, and nothing more will be told."""
        ...

    def read(self, card: Card, readings: Readings) -> None:
        """A card was read, with its slices."""
        ...

    def happened(self, happened: Happened) -> None:
        """A card told an error."""
        ...

    def gone(self, error: GoneError) -> None:
        """A card does not answer any more."""
        ...

    def hung(self, uuid: str, s: float) -> None:
        """A call about it (empty: about all) has not come back for that long."""
        ...

    def answers(self, uuid: str) -> None:
        """It has, now."""
        ...


class _Turn(threading.Thread):
    """One thread's work, until it is told to end or left behind.

    Args:
        buses: PCI addresses of the cards that it looks at; None: all, for the first time.
        before: whose end it waits for, since the library lets go of a card only when nobody has it
            open any more.
    """

    def __init__(
        self, asker: Asker, buses: Sequence[str] | None, before: threading.Thread | None
    ) -> None:
        super().__init__(name="nvml", daemon=True)
        self._asker = asker
        self._buses = buses
        self._before = before
        self.current = True
        """It is the one that is listened to."""
        self.busy: tuple[str, int] | None = None
        """About which card it asks, and since when on the monotonic clock."""

    def run(self) -> None:
        self._about("")
        if self._before is not None:
            self._before.join()
            self._before = None
        nvml: Nvml | None = None
        try:
            nvml = self._open()
            if nvml is not None:
                self._go_on(nvml)
        except NoGpuError as error:
            self._asker.tell("none", str(error))
        except Exception as error:  # a fault of ours: told, and no request suffers from it
            LOGGER.exception("the cards are not read any more")
            self._asker.tell("none", f"reading them failed: {error!r}")
        finally:
            if nvml is not None:
                nvml.close()
            self.busy = None

    def _open(self) -> Nvml | None:
        """None: it is not needed any more."""
        while self.current:
            self._about("")
            try:
                nvml = Nvml(self._buses)
            except NoGpuError:
                if self._buses is None:
                    raise
                time.sleep(WAIT_MS / 1000)  # while a card is reset the driver may not be there
                continue
            if self._buses is None:
                self._begin(nvml)
            return nvml
        return None

    def _about(self, uuid: str) -> None:
        self.busy = (uuid, time.monotonic_ns())

    def _begin(self, nvml: Nvml) -> None:
        pairs: Pairs = {}
        for number, one in enumerate(nvml.cards):
            for other in nvml.cards[number + 1 :]:
                self._about(one.uuid)
                with suppress(GoneError):
                    pairs[one.uuid, other.uuid] = nvml.near(one, other)
        self._asker.tell("begun", nvml.cards, pairs)

    def _go_on(self, nvml: Nvml) -> None:
        lost = False
        while self.current:
            next_ns = time.monotonic_ns() + self._asker.read_ns
            for card in nvml.cards:
                self._read(nvml, card)
                self._hear(nvml, 0)
                if not self.current:
                    return
            if lost:
                time.sleep(WAIT_MS / 1000)  # until it is let go, NVML says so at once each time
            lost = False
            while self.current and not lost and time.monotonic_ns() < next_ns:
                lost = not self._hear(nvml, WAIT_MS)

    def _read(self, nvml: Nvml, card: Card) -> None:
        self._about(card.uuid)
        try:
            readings = nvml.read(card)
        except GoneError as error:
            self._asker.tell("gone", error)
            return
        finally:
            if not self.current:  # it came back
                self._asker.tell("answers", card.uuid)
        self._hear(nvml, 0)  # what it told itself comes before what it counted
        if self.current:
            self._asker.tell("read", card, readings)

    def _hear(self, nvml: Nvml, ms: int) -> bool:
        """Pass on what was told by itself. False: all cards are to be looked at now."""
        while self.current:
            self._about("")
            try:
                happened = nvml.wait(ms)
            except GoneError:
                return False
            finally:
                self.busy = None
            if happened is None:
                return True
            self._asker.tell("happened", happened)
            ms = 0
        return True


class Asker:
    """Keeps a thread at work; everything here is called in the event loop, if not said otherwise.

    Args:
        hearer: is told.
        read_s: how often cards are read.
        hung_s: a call that has not come back for so long hangs.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, hearer: Hearer, read_s: float, hung_s: float
    ) -> None:
        self.read_ns = round(read_s * NS_PER_S)
        self._loop = loop
        self._hearer = hearer
        self._hung_ns = round(hung_s * NS_PER_S)
        self._cards: dict[str, Card] = {}
        self._away: set[str] = set()
        """Cards that are let go."""
        self._hung: set[str] = set()
        self._stuck: tuple[_Turn, tuple[str, int]] | None = None
        """Who asks what about all cards, and has been told to hang."""
        self._turn: _Turn | None = None
        self._closed = False

    def start(self) -> None:
        self._next(None)

    async def close(self) -> None:
        """End the thread; one that hangs is left alone."""
        self._closed = True
        turn, self._turn = self._turn, None
        if turn is not None:
            turn.current = False
            await self._loop.run_in_executor(None, turn.join, JOIN_S)

    def knows(self, cards: Sequence[Card]) -> None:
        """These there are."""
        self._cards = {card.uuid: card for card in cards}

    def let_go(self, uuid: str) -> None:
        """Do not touch this card any more: whoever wants to reset it must be its only user."""
        if uuid in self._cards and uuid not in self._away:
            self._away.add(uuid)
            self._again()

    def take_back(self, uuid: str) -> None:
        """Read it again."""
        if uuid in self._away:
            self._away.discard(uuid)
            self._again()

    def look(self) -> None:
        """See whether a call hangs; to be called again and again."""
        self._look_at_stuck()
        turn = self._turn
        busy = None if turn is None else turn.busy
        if turn is None or busy is None:
            return
        uuid = busy[0] if busy[0] in self._cards else ""
        for_ns = time.monotonic_ns() - busy[1]
        if for_ns < self._hung_ns or uuid in self._hung:
            return
        self._hung.add(uuid)
        self._hearer.hung(uuid, for_ns / NS_PER_S)
        if uuid:
            self._again()
        else:  # no other thread would fare better
            self._stuck = (turn, busy)

    def _look_at_stuck(self) -> None:
        """Has the question about all cards come back?"""
        if self._stuck is None:
            return
        turn, busy = self._stuck
        if turn.busy != busy:
            self._stuck = None
            self._hung.discard("")
            self._hearer.answers("")

    def _again(self) -> None:
        """Go on with those cards that are to be read now."""
        without = self._away | self._hung
        self._next([card.bus for uuid, card in self._cards.items() if uuid not in without])

    def _next(self, buses: Sequence[str] | None) -> None:
        if self._closed:
            return
        before = self._turn
        if before is not None:
            before.current = False
            if before.busy is not None and before.busy[0] in self._hung:
                before = None  # it may never end
        self._turn = _Turn(self, buses, before)
        self._turn.start()

    def tell(self, what: str, *arguments: object) -> None:
        """Called in the thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._told, what, arguments)

    def _told(self, what: str, arguments: tuple[object, ...]) -> None:
        if self._closed:
            return
        if what != "answers":
            hear: Callable[..., None] = getattr(self._hearer, what)
            hear(*arguments)
            return
        uuid = str(arguments[0])
        if uuid in self._hung:
            self._hung.discard(uuid)
            self._hearer.answers(uuid)
            self._again()
