"""The finished steps of chains, off the event loop: one thread works on their store."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from controller.store.checkpoints import CheckpointsError

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.store.checkpoints import Checkpoint, Checkpoints, NewCheckpoint

T = TypeVar("T")
DOWN_S = 1.0
"""How long nothing is asked of a store that has just failed: what waits for it would else wait for
a time-out each, one after the other."""
WAIT_S = 1.0
"""For how long a step waits for the store, others' turns included: its caller has a budget."""
WAITING_MOST = 1000
"""Asked for and not done yet; more are refused."""


class ChainStore:
    """A store whose methods are awaited, each done before the next.

    Raises:
        CheckpointsError: from every method, where the store did not do it.
    """

    def __init__(
        self, checkpoints: Checkpoints, monotonic_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._checkpoints = checkpoints
        self._monotonic_s = monotonic_s
        self._down_until_s = 0.0
        self._why = ""
        self._waiting = 0
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="chains")

    async def save(self, new: NewCheckpoint, wait_s: float = WAIT_S) -> str:
        """Keep a finished step; its checkpoint's id once that is committed. What was given up after
        ``wait_s`` may be committed all the same."""
        return await self._in_time(lambda: self._checkpoints.save(new), min(wait_s, WAIT_S))

    async def load(self, checkpoint: str, owner: str) -> Checkpoint | None:
        return await self._in_time(lambda: self._checkpoints.load(checkpoint, owner))

    async def chain(self, owner: str, chain: str) -> list[Checkpoint]:
        """What is kept of a chain, in the order of saving, without the answers."""
        return await self._in_time(lambda: self._checkpoints.chain(owner, chain))

    async def undo(self, checkpoint: str, owner: str) -> int:
        """Forget what its chain saved after this checkpoint; how many."""
        return await self._run(lambda: self._checkpoints.undo(checkpoint, owner))

    def close(self) -> None:
        """Finish what was asked for."""
        self._executor.shutdown()
        self._checkpoints.close()

    async def _in_time(self, work: Callable[[], T], wait_s: float = WAIT_S) -> T:
        try:
            async with asyncio.timeout(wait_s):
                return await self._run(work)
        except TimeoutError:
            raise CheckpointsError(
                f"the checkpoints' store did not answer within {wait_s:.3g} s: it is slow, or too"
                " much waits for it"
            ) from None

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= WAITING_MOST:
            raise CheckpointsError(f"{WAITING_MOST} checkpoints wait for their store already")
        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._executor.submit(self._guarded, work))
        finally:
            self._waiting -= 1

    def _guarded(self, work: Callable[[], T]) -> T:
        if self._monotonic_s() < self._down_until_s:
            raise CheckpointsError(self._why)
        try:
            return work()
        except CheckpointsError as error:
            self._why = str(error)
            self._down_until_s = self._monotonic_s() + DOWN_S
            raise
