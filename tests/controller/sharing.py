"""Callers of two controllers that share a Redis, and what they were told.

``python -m tests.controller.sharing SETTINGS.json READY.json`` is a controller with the times that
``PATIENCE`` in its environment gives to what it has of the store, as a JSON document.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from controller.sharing import leases, store
from controller.sharing.store import Store
from tests.controller import processes
from tests.controller.arrivals import mark
from tests.controller.asking import Answer, ask, chat, session
from tests.controller.processes import MODEL

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    import aiohttp

    from tests.controller.processes import Controller

TOKENS = 4
DEADLINE_MS = 6_000
PATIENCE = "PATIENCE"
PAUSE_S = 0.05
"""Before a caller who was refused, or cut off, tries again."""
SHED = (429, 503)


class Told(NamedTuple):
    """An answer, and who was asked for whom."""

    user: str
    session: str
    number: int
    asked: int
    """Which of the controllers."""
    answer: Answer


@dataclass
class Crowd:
    """Asks controllers, side by side, until it is stopped."""

    urls: Sequence[str]
    told: list[Told] = field(default_factory=list)
    over: bool = False

    async def __aenter__(self) -> Crowd:
        self._client: aiohttp.ClientSession = session()
        self._tasks: set[asyncio.Task[None]] = set()
        return self

    async def __aexit__(self, *error: object) -> None:
        """What is open is waited for."""
        self.over = True
        if any(error):
            for task in self._tasks:
                task.cancel()
        done = await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._client.close()
        for each in done:
            if isinstance(each, Exception) and not any(error):
                raise each

    async def ask(self, at: int, user: str, session: str, number: int, **headers: str) -> Answer:
        """One request."""
        head = {"x-twinkeel-user": user, "x-twinkeel-session": session, "x-twinkeel-sla": "P2"}
        head["x-twinkeel-deadline-ms"] = str(DEADLINE_MS)
        document = chat(MODEL, mark(user, session, number), TOKENS, stream=False)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        answer = await ask(self._client, self.urls[at], document, head | given)
        self.told.append(Told(user, session, number, at, answer))
        return answer

    def flood(self, user: str, open_most: int = 3) -> None:
        """So many requests of the user are open at each controller, always; without a session."""
        for at in range(len(self.urls)):
            for _ in range(open_most):
                self._spawn(self._again(at, user))

    async def _again(self, at: int, user: str) -> None:
        number = 0
        while not self.over:
            number += 1
            answer = await self.ask(at, user, "", number)
            if not answer.good:
                await asyncio.sleep(2 * PAUSE_S)

    def speak(self, user: str, session: str, at: int, *, turns: bool = False) -> None:
        """One request of the session after the other, at one controller, or with ``turns`` at
        another each time. Where one is refused or cut off, it goes to the next controller."""
        self._spawn(self._speak(user, session, at, turns))

    async def _speak(self, user: str, session: str, at: int, turns: bool) -> None:
        number = 0
        while not self.over:
            number += 1
            while not (await self.ask(at, user, session, number)).good:
                if self.over:
                    return
                at = (at + 1) % len(self.urls)
                await asyncio.sleep(PAUSE_S)
            if turns:
                at = (at + 1) % len(self.urls)
            await asyncio.sleep(PAUSE_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.add(asyncio.create_task(work))

    # ---- what was told ----

    def good(self, since_s: float = 0.0, until_s: float = float("inf")) -> list[Told]:
        """Whole answers that came in that time."""
        return [
            each for each in self.told
            if each.answer.good and since_s <= each.answer.ended_s < until_s
        ]  # fmt: skip

    def last_at(self, session: str) -> int:
        """Which controller answered it last."""
        return [each.asked for each in self.told if each.session == session and each.answer.good][
            -1
        ]

    def back_s(self, session: str, since_s: float) -> float:
        """How long after that the next request of the session was answered; inf: it was not."""
        ended = [
            each.answer.ended_s for each in self.told
            if each.session == session and each.answer.good and each.answer.ended_s > since_s
        ]  # fmt: skip
        return min(ended) - since_s if ended else float("inf")


async def settled(controllers: Sequence[Controller], within_s: float = 30.0) -> None:
    """Until each of them knows of all, and the calm of the start is over."""
    until_s = time.monotonic() + within_s
    want = f"twinkeel_store_controllers {float(len(controllers))}"
    for each in controllers:
        while want not in await asyncio.to_thread(each.metrics):
            assert time.monotonic() < until_s, f"{each.url} does not know of {len(controllers)}"
            await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)


# ---- a store on a busy machine ----


def patient_store(url: str) -> Store:
    """One whose shares may be made to last for a minute: else the server takes them for what a
    clock that was put back has left."""
    made = Store(url)
    source = made._sources["quota"]
    made._sources["quota"] = source.replace(", 3000, 2500\n", ", 3000, 250000\n")
    assert made._sources["quota"] != source
    return made


if __name__ == "__main__":
    for name, value in json.loads(os.environ[PATIENCE]).items():
        for module in (store, leases):
            if hasattr(module, name):
                setattr(module, name, value)
    processes.main()
