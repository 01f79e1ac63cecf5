"""Hundreds of connections at once are taken within a few turns of the loop."""

from __future__ import annotations

import asyncio
import errno
import socket
from typing import TYPE_CHECKING, Any

import uvloop

from controller.accepting import Acceptor

if TYPE_CHECKING:
    import pytest

CONNECTIONS = 200
TURN_S = 0.02


class Greeting(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


async def greeted(port: int, count: int) -> list[bytes]:
    async def one() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        said = await reader.read()
        writer.close()
        return said

    return await asyncio.gather(*[one() for _ in range(count)])


def test_a_crowd_is_taken_in_few_turns() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        acceptor = Acceptor(Greeting, "127.0.0.1", 0)
        crowd = [socket.create_connection(("127.0.0.1", acceptor.port)) for _ in range(CONNECTIONS)]
        for each in crowd:
            each.settimeout(20)
        busy = True

        def turn() -> None:  # a loop that has much to do in each of its turns
            end_s = loop.time() + TURN_S
            while loop.time() < end_s:
                pass
            if busy:
                loop.call_soon(turn)

        loop.call_soon(turn)
        began_s = loop.time()
        said = await loop.run_in_executor(None, lambda: [each.recv(5) for each in crowd])
        took_s = loop.time() - began_s
        busy = False
        assert said == [b"hello"] * CONNECTIONS
        for each in crowd:
            each.close()
        acceptor.stop()
        return took_s

    took_s = uvloop.run(main())
    assert took_s < CONNECTIONS * TURN_S / 4, "no more than a quarter of one a turn"


def test_it_goes_on_when_descriptors_are_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        """A socket that cannot accept a few times."""

        def __init__(self, inner: socket.socket) -> None:
            self.inner = inner
            self.failures = 3

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def accept(self) -> Any:
            if self.failures:
                self.failures -= 1
                raise OSError(errno.EMFILE, "too many open files")
            return self.inner.accept()

    async def main() -> None:
        acceptor = Acceptor(Greeting, "127.0.0.1", 0)
        short = Short(acceptor._socket)
        monkeypatch.setattr(acceptor, "_socket", short)
        assert await greeted(acceptor.port, 3) == [b"hello"] * 3
        assert short.failures == 0
        acceptor.stop()
        acceptor.stop()

    asyncio.run(main())
