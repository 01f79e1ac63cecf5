"""What a drill is, and what all of them need."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from tests.bench.gateway.load import chat, headers, kinds
from tests.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tests.bench.gateway.client import Answer, Exchange
    from tests.bench.gateway.peers import Published
    from tests.bench.gateway.yard import Stand, Twin, Yard

ANY = ">= 0"
"""The goal of a figure that is only reported."""
TOLD = frozenset({"ok", "error_event"})
"""A caller knows what it has."""


class Outcome(NamedTuple):
    """What a drill showed: in words, for the table, and in figures."""

    words: str
    figures: tuple[Figure, ...]


class Drill(NamedTuple):
    """One row of the scorecard."""

    published: Published
    run: Callable[[Yard], Awaitable[Outcome]]


def figure(name: str, value: float, unit: str, goal: str, how: str) -> Figure:
    return Figure(name, round(value, 4), unit, goal, how)


def bad(answers: Sequence[Answer]) -> int:
    return sum(answer.kind != "ok" for answer in answers)


def told(answers: Sequence[Answer]) -> str:
    """What became of them, shortest: ``38 ok, 2 error_event``."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds(answers).items()))


def user(number: int) -> bytes:
    """Callers are different users, so that no limit binds."""
    return headers(f"user-{number}")


def prompt(number: int) -> str:
    """All different from the first word on: no replica has a part of it cached already."""
    return f"{number} days from now, how high will the water rise, and when must the boat be out?"


def shorts(stand: Stand, count: int = 64, tokens: int = 16, first: int = 0) -> list[bytes]:
    """Requests for whole answers, of different users."""
    numbers = range(first, first + count)
    return [stand.post(chat(tokens, text=prompt(n)), user(n)) for n in numbers]


def streams(stand: Stand, count: int = 64, tokens: int = 16, first: int = 1000) -> list[bytes]:
    numbers = range(first, first + count)
    return [stand.post(chat(tokens, text=prompt(n), stream=True), user(n)) for n in numbers]


def both(stand: Stand, count: int = 64, tokens: int = 16) -> list[bytes]:
    """Whole answers and streams in turn."""
    pairs = zip(shorts(stand, count, tokens), streams(stand, count, tokens), strict=True)
    return [request for pair in pairs for request in pair]


async def burst(stand: Stand, requests: Sequence[bytes], timeout_s: float = 10.0) -> list[Answer]:
    """All at once."""
    exchanges = [stand.client.send(request, timeout_s=timeout_s) for request in requests]
    return [await exchange.done for exchange in exchanges]


async def begun(exchanges: Sequence[Exchange], within_s: float = 10.0) -> None:
    """Wait until every stream has brought something."""
    end_s = monotonic() + within_s
    while not all(exchange.first_s or exchange.done.done() for exchange in exchanges):
        if monotonic() > end_s:
            return
        await asyncio.sleep(0.005)


class Tries:
    """When a replica was asked, as seen every 20 ms."""

    def __init__(self, twin: Twin) -> None:
        self._twin = twin
        self.seen: list[tuple[float, int]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Tries:
        self.seen = [(monotonic(), (await self._twin.state()).requests)]
        self._task = asyncio.get_running_loop().create_task(self._watch())
        return self

    async def __aexit__(self, *args: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            count = (await self._twin.state()).requests
            if count != self.seen[-1][1]:
                self.seen.append((monotonic(), count))

    def so_far(self) -> int:
        return self.seen[-1][1] - self.seen[0][1]

    def most_within(self, window_s: float, from_s: float) -> int:
        """The most tries in any window that begins after ``from_s``."""
        times = [
            at_s
            for (at_s, count), (_, before) in zip(self.seen[1:], self.seen, strict=False)
            for _ in range(count - before)
            if at_s >= from_s
        ]
        return max(
            (sum(first <= at_s < first + window_s for at_s in times) for first in times), default=0
        )
