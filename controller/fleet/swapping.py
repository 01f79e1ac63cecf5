"""``--drain-then-swap``: a new version where there is no room beside the old one.

The policy's rollout starts standbys. Where there is none, one replica is made one: it takes nothing
new, finishes what it has, and is ended, while the others serve. From there the rollout goes its
usual way, wave by wave, each replica that was drained being the next wave's standby. When it is
over, one way or the other, what is left is started, so that as many serve as before.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from controller.upstream.scrape import ANSWERLESS, read_page
from policy.decisions import Start, Stop
from policy.events import ReplicaDown
from policy.fleet import FORGOTTEN

if TYPE_CHECKING:
    from controller.fleet.contract import Feeder, Gate
    from controller.fleet.local import LocalFleet
    from controller.upstream.replica import Replica

LOOK_S = 0.5
PAGE_S_MOST = 2.0
HELD = "stopped"
"""To the policy it is as if it had been stopped: nobody looks for a replacement."""

log = logging.getLogger(__name__)


class Swap:
    """Makes room for one reload.

    Args:
        first: is drained.
        declared: replicas that the fleet file has of the model, by id.
    """

    def __init__(
        self,
        fleet: LocalFleet,
        driver: Feeder,
        gate: Gate,
        first: Replica,
        declared: frozenset[int],
    ) -> None:
        self._fleet = fleet
        self._driver = driver
        self._gate = gate
        self._first = first
        self._declared = declared
        self.healed = False
        """As many serve, or are starting, as before."""
        self._drained = False
        """The first one is ended, or serves again."""
        self._called_back = asyncio.Event()

    def call_back(self) -> None:
        """Nobody wants the room any more: the first one serves again, if it is not ended yet."""
        self._called_back.set()

    async def drain(self, s_most: float) -> str:
        """Let the first one finish, and end it: its slot becomes a standby. Why it could not be,
        and it serves again; empty: it could."""
        first = self._first
        self._gate.hold(first, HELD)
        deadline_s = time.monotonic() + s_most
        counted: int | None = None
        why = ""
        while not why and (first.attempts or not first.held):
            if not first.held:  # it died, and its fleet let it in again: what it took may finish
                self._gate.hold(first, HELD)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._called_back.wait()
            counted = await self._progress(counted)
            if self._called_back.is_set():
                why = "it was called back"
            elif first.attempts and time.monotonic() > deadline_s:
                open_ = len(first.attempts)
                why = f"{first.name} still had {open_} open requests after {s_most:g} s"
        if not why:
            self._fleet.run(Stop(first.id))
        elif self._fleet.view().slots[first.id].state == "serving":  # else its fleet sees to it
            self._gate.release(first)
        self._drained = True
        return why

    async def _progress(self, counted: int | None) -> int | None:
        """An answer in one piece shows nothing on its way, and the driver gives up what stands
        still on a replica that is down: the server's own counter says that it does not."""
        with contextlib.suppress(*ANSWERLESS):
            async with asyncio.timeout(PAGE_S_MOST):
                page = await read_page(self._first)
            if counted is not None and page.generation_tokens not in (None, counted):
                self._first.tokens += 1
            return page.generation_tokens
        return counted

    def heal(self, standbys: frozenset[int]) -> None:
        """The reload is over: start what it has left over, once it can be.

        Args:
            standbys: that the policy knows, by id.
        """
        left = [
            slot.replica
            for slot in self._fleet.view().slots
            if slot.replica in self._declared and slot.standby and slot.state != "broken"
        ]
        self.healed = self._drained and not left
        for replica in left:
            if replica in standbys:
                log.info("slot %d is started again: the reload is over", replica)
                # It was a standby for a while only: the policy must not give it up as one.
                self._driver.feed(ReplicaDown(replica, FORGOTTEN))
                self._fleet.run(Start(replica))
