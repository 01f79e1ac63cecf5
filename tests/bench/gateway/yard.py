"""Where drills take place: two twin-served replicas, A and B, and a gateway before them.

Replicas live through several drills, and every drill has a controller of its own with an empty data
folder. With ``against="bare"`` the gateway is the bare pass-through, which shows what happens
without a controller.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from tests.bench.gateway import process
from tests.bench.gateway.client import Client
from tests.bench.gateway.load import CHAT, chat

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from tests.bench.gateway.client import Answer
    from tests.bench.gateway.process import Process

FAULT = "/twin/fault"
STATE = "/twin/state"
UP_S = 10.0


class State(NamedTuple):
    """What a replica says of itself."""

    running: int
    waiting: int
    requests: int
    """Since it was started, whatever became of them."""
    finished: int


class Twin:
    """A replica, and the way to break it."""

    def __init__(self, name: str, folder: Path, more: Sequence[str] = ()) -> None:
        self.name = name
        self._log = folder / f"twin-{name}.log"
        self._more = tuple(more)
        self.server = process.twin(self._log, 0, self._more)
        self.client: Client | None = None

    @property
    def url(self) -> str:
        return self.server.said["serving"]

    async def start(self) -> None:
        """Start it, at the port it had before if it had one."""
        if self.server.said:
            port = int(self.url.rsplit(":", 1)[1])
            self.server = process.twin(self._log, port, self._more)
        await self.server.start()
        if self.client is None:
            self.client = Client(self.url, timeout_s=5.0)

    async def ensure(self) -> None:
        """Running, and without a fault."""
        if self.server.alive():
            self.server.send(signal.SIGCONT)
            await self.heal()
        else:
            await self.start()

    async def stop(self) -> None:
        if self.client is not None:
            await self.client.close()
        await self.server.stop(signal.SIGKILL)

    async def fault(
        self,
        kind: str,
        *,
        for_s: float | None = None,
        share: float = 1.0,
        after_tokens: int | None = None,
        **more: float,
    ) -> None:
        """Have it misbehave."""
        body: dict[str, object] = {"kind": kind, "share": share, **more}
        if for_s is not None:
            body["for_s"] = for_s
        if after_tokens is not None:
            body["after_tokens"] = after_tokens
        await self._ask("POST", FAULT, json.dumps(body).encode())

    async def heal(self) -> None:
        await self._ask("DELETE", FAULT)

    async def state(self) -> State:
        found = json.loads((await self._ask("GET", STATE)).body)
        return State(*(int(found.get(name, 0)) for name in State._fields))

    async def _ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        if self.client is None:
            raise RuntimeError(f"replica {self.name} was not started")
        data = self.client.request(method, path, body)
        answer = await self.client.send(data, kept=True).done
        if answer.status != 200:
            raise RuntimeError(f"replica {self.name}: {method} {path} {body!r} gave {answer}")
        return answer


class Stand:
    """One drill's gateway and the way to it."""

    def __init__(self, gateway: Process, twins: Sequence[Twin], data: Path) -> None:
        self.gateway = gateway
        self.twins = tuple(twins)
        self.a, self.b = self.twins[:2]
        self.data = data
        self.client = Client(gateway.said["serving"], timeout_s=10.0)

    @property
    def admin(self) -> str:
        """Empty: the bare pass-through has none."""
        return self.gateway.said.get("admin", "")

    @property
    def token(self) -> bytes:
        """A header line that opens the admin API."""
        token = (self.data / "admin.token").read_text(encoding="utf-8").strip()
        return f"Authorization: Bearer {token}\r\n".encode()

    def post(self, body: bytes, headers: bytes = b"") -> bytes:
        """A chat request's bytes."""
        return self.client.request("POST", CHAT, body, headers)

    async def tries(self) -> list[int]:
        """Requests that each replica has seen."""
        return [(await twin.state()).requests for twin in self.twins]

    async def busy(self) -> int:
        """Requests that the replicas work on."""
        states = [await twin.state() for twin in self.twins]
        return sum(state.running + state.waiting for state in states)

    async def up(self) -> None:
        """Wait until every replica answers through the gateway."""
        end_s = monotonic() + UP_S
        before = await self.tries()
        while True:
            await asyncio.gather(*(self.client.ask(CHAT, chat(1)) for _ in range(4)))
            now = await self.tries()
            if all(new > old for new, old in zip(now, before, strict=True)):
                return
            if monotonic() > end_s:
                raise RuntimeError(f"not every replica gets work: {before} to {now}")
            await asyncio.sleep(0.05)


class Yard:
    """Keeps the replicas, and gives each drill a gateway."""

    def __init__(
        self, out: Path, against: str = "controller", seats: int = 0, more: Sequence[str] = ()
    ) -> None:
        """``seats``: how many requests a replica runs at a time; 0: as many as the profile says.
        ``more``: options of every controller."""
        self.out = out
        self.against = against
        twin_more = ("--max-num-seqs", str(seats)) if seats else ()
        self._part = f",max_num_seqs={seats}" if seats else ""
        self.twins = [Twin(name, out, twin_more) for name in ("A", "B")]
        self._more = tuple(more)
        self.drill = "drill"
        """Names the data folders."""
        self._stands = 0

    async def start(self) -> None:
        for twin in self.twins:
            await twin.start()

    async def stop(self) -> None:
        for twin in self.twins:
            await twin.stop()

    def gateway(self, data: Path, more: Sequence[str] = ()) -> Process:
        urls = [twin.url for twin in self.twins]
        log = self.out / f"{data.name}.log"
        if self.against == "bare":
            return process.bare(log, urls)
        return process.controller(
            log, [url + self._part for url in urls], data, (*self._more, *more)
        )

    @contextlib.asynccontextmanager
    async def stand(self, *more: str) -> AsyncIterator[Stand]:
        """A fresh gateway, with both replicas well and in rotation."""
        self._stands += 1
        data = self.out / f"{self.drill}-{self._stands}"
        shutil.rmtree(data, ignore_errors=True)
        for twin in self.twins:
            await twin.ensure()
        gateway = self.gateway(data, more)
        await gateway.start()
        stand = Stand(gateway, self.twins, data)
        try:
            await stand.up()
            yield stand
        finally:
            await stand.client.close()
            await stand.gateway.stop(signal.SIGKILL)
