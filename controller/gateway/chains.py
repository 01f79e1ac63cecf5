"""What the store knows of a chain and the policy does not: told before the chain's next step.

A controller that was killed, or another one, may have saved steps that this policy never heard of.
A step that is in the store is finished, whatever else was lost, and is not run again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING

from controller.store.checkpoints import CheckpointsError
from policy.events import ChainFound

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.driver import Driver
    from controller.gateway.asking import Asked
    from controller.store.chains import ChainStore

KNOWN_MOST = 100_000


class KnownChains:
    """Looks chains up.

    Args:
        shared: others write to the store, too, so that a chain is looked up at each of its steps,
            and not only where the policy may not know it: since the start, or any more.
        wall_s: time of day.
    """

    def __init__(
        self,
        driver: Driver,
        store: ChainStore,
        shared: bool,
        wall_s: Callable[[], float] = time.time,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._store = store
        self._shared = shared
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._known: OrderedDict[tuple[str, str], float] = OrderedDict()
        """When each was looked up."""

    async def look_up(self, asked: Asked) -> None:
        """Tell the policy what is kept of the request's chain, and of the one that it resumes. A
        store that fails is told, and the step goes on by what the policy knows."""
        owner = asked.user
        try:
            if asked.resume:
                source = await self._store.load(asked.resume, owner)
                if source is not None and source.chain != asked.chain:
                    await self._tell(owner, source.chain, source.line)
            await self._tell(owner, asked.chain, asked.line)
        except CheckpointsError as error:
            self._driver.trouble("checkpoint", f"a chain was not looked up: {error}")

    async def _tell(self, owner: str, chain: str, line: str) -> None:
        key = (owner, chain)
        now_s = self._monotonic_s()
        # The policy remembers a chain for at least so long; then only the store knows it.
        since_s = now_s - self._driver.parameters.chains.keep_ms / 1000
        if self._known.get(key, -inf) > since_s and not self._shared:
            return
        kept = await self._store.chain(owner, chain)
        if not self._shared:
            self._known[key] = now_s
            self._known.move_to_end(key)
            if len(self._known) > KNOWN_MOST:
                self._known.popitem(last=False)
        if not kept:
            return
        line = kept[0].line or line
        chains = self._driver.parameters.chains
        # No more than all of it: the clock may have been put back since, or be another machine's.
        budget_s = chains.lines.get(line, chains.default).budget_ms / 1000
        left_s = min(max(one.ends_s for one in kept) - self._wall_s(), budget_s)
        done = tuple((one.step, one.id) for one in kept)
        self._driver.feed(ChainFound(owner, chain, line, done, round(max(0.0, left_s) * 1e9)))
