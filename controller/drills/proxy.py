"""A link that can be made bad: a TCP proxy between the controller and one engine.

``python -m controller.drills.proxy --port P --state FILE -- COMMAND`` starts the engine's command
(``{inner}`` in it is the port that it is to listen on), takes connections on P, and passes bytes on
both ways. How bad the link is stands in FILE, which is looked at every 20 ms: it outlives the
engine, so an engine that is started again finds the link as bad as it was. With ``--to PORT`` in
place of a command it stands before a server that runs already.

A lost packet does not lose a message of TCP's: it comes later, when it is sent again. So ``loss``
stalls a connection, by 0.2 s at first, and twice as long each time the same packet is lost again.
``blackhole`` still takes connections, since the kernel does that, and passes nothing on.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import struct
import sys
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOOK_S = 0.02
READ_BYTES = 64 * 1024
WAITING_MOST = 256
"""Pieces on their way in one direction of a connection; then no more is read."""
RESEND_S = 0.2
"""Linux sends again no sooner."""
RESEND_DOUBLINGS_MOST = 6
_RESET = struct.pack("ii", 1, 0)

LinkKind = Literal["clear", "delay", "loss", "reset", "blackhole"]


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a link is."""

    kind: LinkKind = "clear"
    delay_ms: Annotated[float, Meta(ge=0.0, le=60_000.0)] = 0.0
    """One way, with ``delay`` and ``loss``."""
    loss_permille: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Of the pieces of a stream, with ``loss``."""


CLEAR = Link()
NOTHING_PASSES = Link("blackhole")


def write_link(path: Path, link: Link) -> None:
    """From now on the link whose state ``path`` holds is like that."""
    making = path.with_name(path.name + ".new")
    making.write_bytes(msgspec.json.encode(link))
    making.replace(path)


def read_link(path: Path) -> Link:
    """How it is; no file, or one that cannot be read: clear."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Link)
    except (OSError, msgspec.DecodeError):
        return CLEAR


class _Piece(NamedTuple):
    data: bytes
    """Empty: the sender has closed its side."""
    due_s: float


class Proxy:
    """Takes connections and passes them on to ``port`` of this machine."""

    def __init__(self, host: str, port: int, seed: int = 0) -> None:
        self._host = host
        self._port = port
        self._draw = random.Random(seed)  # noqa: S311
        self.link = CLEAR
        self._passes = asyncio.Event()
        self._passes.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; the port, where any would do (0)."""
        self._server = await asyncio.start_server(self._taken, host, port, limit=READ_BYTES)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def become(self, link: Link) -> None:
        """From now on the link is like that. What a black hole held back goes on when it ends."""
        self.link = link
        if link.kind == "blackhole":
            self._passes.clear()
        else:
            self._passes.set()
        if link.kind == "reset":
            for writer in list(self._open):
                _reset(writer)

    async def close(self) -> None:
        """Take no more, and break what is open."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        there: asyncio.StreamWriter | None = None
        try:
            if self.link.kind == "reset":
                _reset(writer)
                return
            await self._passes.wait()
            back, there = await asyncio.open_connection(self._host, self._port, limit=READ_BYTES)
            self._open.add(there)
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._way(reader, there))
                ways.create_task(self._way(back, writer))
        except* (OSError, asyncio.CancelledError):  # one side is gone, so is the other
            pass
        finally:
            for each in (writer, there):
                if each is not None:
                    self._open.discard(each)
                    each.transport.abort()
            self._tasks.discard(task)

    async def _way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One direction of a connection, in order."""
        pieces: asyncio.Queue[_Piece] = asyncio.Queue(WAITING_MOST)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._read(reader, pieces))
            both.create_task(self._write(pieces, writer))

    async def _read(self, reader: asyncio.StreamReader, pieces: asyncio.Queue[_Piece]) -> None:
        clock = asyncio.get_running_loop().time
        due_s = 0.0
        while True:
            data = await reader.read(READ_BYTES)
            due_s = max(due_s, clock() + self._late_s())  # nothing overtakes
            await pieces.put(_Piece(data, due_s))
            if not data:
                return

    async def _write(self, pieces: asyncio.Queue[_Piece], writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            data, due_s = await pieces.get()
            await asyncio.sleep(max(0.0, due_s - clock()))
            await self._passes.wait()
            if not data:
                if writer.can_write_eof():
                    writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    def _late_s(self) -> float:
        """How much later than usual what was just sent arrives."""
        link = self.link
        if link.kind == "delay":
            return link.delay_ms / 1000
        if link.kind != "loss":
            return 0.0
        late_s, resend_s = link.delay_ms / 1000, RESEND_S
        for _ in range(RESEND_DOUBLINGS_MOST):
            if self._draw.random() * 1000 >= link.loss_permille:
                break
            late_s += resend_s
            resend_s *= 2
        return late_s


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close it as a host does that knows nothing of it."""
    held: socket.socket | None = writer.get_extra_info("socket")
    if held is not None:
        with contextlib.suppress(OSError):
            held.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


# The process


def _stamp(path: Path) -> tuple[int, int] | None:
    """It changes when the file does."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino


async def _follow(proxy: Proxy, path: Path) -> None:
    """Let the link be as the file says, again and again."""
    seen: tuple[int, int] | None = None
    while True:
        now = _stamp(path)
        if now != seen:
            seen = now
            link = read_link(path)
            if link != proxy.link:
                proxy.become(link)
        await asyncio.sleep(LOOK_S)


async def _run(host: str, port: int, path: Path, to: int, command: Sequence[str]) -> int:
    inner = to or free_port(host)
    proxy = Proxy(host, inner, seed=port)
    proxy.become(read_link(path))
    engine = None
    if command:
        filled = [each.replace("{inner}", str(inner)) for each in command]
        engine = await asyncio.create_subprocess_exec(*filled)
    await proxy.start(host, port)
    following = asyncio.create_task(_follow(proxy, path))
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _told, number, engine, told)
    try:
        if engine is None:
            await told.wait()
            return 0
        return await engine.wait()
    finally:
        following.cancel()
        await proxy.close()


def _told(number: int, engine: asyncio.subprocess.Process | None, told: asyncio.Event) -> None:
    """Whoever ends the proxy means the engine."""
    told.set()
    if engine is not None and engine.returncode is None:
        engine.send_signal(number)


def free_port(host: str) -> int:
    with socket.socket() as held:
        held.bind((host, 0))
        port: int = held.getsockname()[1]
        return port


def main() -> None:
    """Run until the engine ends, and then end as it did."""
    from pathlib import Path

    parser = argparse.ArgumentParser(prog="controller.drills.proxy", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--to", type=int, default=0)
    parser.add_argument("command", nargs="*")
    asked = parser.parse_args()
    if bool(asked.to) == bool(asked.command):
        parser.error("give one of --to PORT and, after --, the engine's command")
    code = asyncio.run(_run(asked.host, asked.port, asked.state, asked.to, asked.command))
    if code < 0:  # a signal ended it: end by the same one, so that whoever watches sees it
        with contextlib.suppress(OSError):  # SIGKILL has no other meaning anyway
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
