"""What goes wrong during a soak: one thing at a time, drawn by a seed, each undone again."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.gateway.yard import Twin

TOKENS = 16


class Mishap(NamedTuple):
    """Something that can go wrong with a replica."""

    name: str
    kind: str = ""
    """Of the twin's faults; empty: a signal to its process."""
    share: float = 1.0
    for_s: float = 3.0
    delay_s: float = 0.0
    factor: float = 0.0


MISHAPS = (
    Mishap("kill", for_s=3.0),
    Mishap("freeze", for_s=4.0),
    Mishap("hang", "hang", for_s=4.0),
    Mishap("reset", "reset", share=0.3),
    Mishap("cut", "cut", share=0.3),
    Mishap("no_end", "no_end", share=0.3),
    Mishap("stall", "stall", share=0.1),
    Mishap("latency", "latency", share=0.5, delay_s=0.3, for_s=4.0),
    # What is lost on the way TCP sends again, later and later.
    Mishap("loss", "latency", share=0.05, delay_s=0.9, for_s=4.0),
    Mishap("slow", "slow", factor=4.0, for_s=4.0),
    Mishap("http_500", "http_500", share=0.5),
    Mishap("http_503", "http_503", share=0.5),
    Mishap("empty", "empty", share=0.5),
    Mishap("null", "null", share=0.5),
    Mishap("blank", "blank", share=0.5),
    Mishap("abort", "abort", share=0.3),
    Mishap("truncated", "truncated", share=0.3),
)


def plan(seed: int) -> list[Mishap]:
    """All of them in a random order."""
    order = list(MISHAPS)
    random.Random(seed).shuffle(order)  # noqa: S311
    return order


class Chaos:
    """Breaks one of the replicas every ``every_s``, and mends it."""

    def __init__(self, twins: Sequence[Twin], seed: int, every_s: float) -> None:
        self._twins = twins
        self._dice = random.Random(seed)  # noqa: S311
        self._seed = seed
        self._every_s = every_s
        self.now = ""
        """What is broken at present."""
        self.done: Counter[str] = Counter()

    async def run(self) -> None:
        """Go on until cancelled; then everything is mended."""
        round_ = 0
        try:
            while True:
                for mishap in plan(self._seed + round_):
                    await asyncio.sleep(self._every_s * self._dice.uniform(0.4, 0.6))
                    await self._strike(mishap, self._dice.choice(self._twins))
                round_ += 1
        finally:
            self.now = ""
            await self.mend()

    async def mend(self) -> None:
        for twin in self._twins:
            await twin.ensure()

    async def _strike(self, mishap: Mishap, twin: Twin) -> None:
        self.now = f"{mishap.name} {twin.name}"
        self.done[mishap.name] += 1
        if mishap.name == "kill":
            twin.server.send(signal.SIGKILL)
            await asyncio.sleep(mishap.for_s)
            await twin.start()
        elif mishap.name == "freeze":
            twin.server.send(signal.SIGSTOP)
            await asyncio.sleep(mishap.for_s)
            twin.server.send(signal.SIGCONT)
        else:
            more = {"delay_s": mishap.delay_s} if mishap.delay_s else {}
            if mishap.factor:
                more["factor"] = mishap.factor
            after = self._dice.randrange(TOKENS)
            await twin.fault(mishap.kind, share=mishap.share, after_tokens=after, **more)
            await asyncio.sleep(mishap.for_s)
            await twin.heal()
        self.now = ""
