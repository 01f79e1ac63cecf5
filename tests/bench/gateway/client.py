"""An HTTP/1.1 client that costs little: raw protocols, kept connections, one request on each.

Every request that is begun ends with exactly one ``Answer``. Times are seconds of ``monotonic()``:
uvloop's own clock counts whole milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple, cast
from urllib.parse import urlsplit

from tests.bench.gateway.judge import judge_body, judge_stream, tells_error

if TYPE_CHECKING:
    from collections.abc import Callable


class Answer(NamedTuple):
    """What became of a request."""

    kind: str
    """``ok``, ``degraded``, ``http_429`` and so on; ``error_event`` (told in the stream); ``cut``
    (the connection ended before the answer did), ``refused`` (no connection), ``timeout``,
    ``left`` (we went away), or what is wrong with an answer that is complete (``judge``)."""
    status: int
    """0: there was none."""
    sent_s: float
    first_s: float
    """First byte of the body; 0: it never came."""
    last_s: float
    head: bytes
    body: bytes
    """Of streams: the events."""
    gap_s: float
    """Longest silence after the first byte, comments not counted as news."""

    @property
    def latency_s(self) -> float:
        return self.last_s - self.sent_s

    def header(self, name: str) -> str:
        """A header's value; empty: it is not there."""
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name.lower().encode():
                return value.strip().decode()
        return ""


class Exchange:
    """A request under way."""

    __slots__ = (
        "body", "connection", "done", "first_s", "gap_s", "head", "heard_s", "kept", "news_s",
        "on_event", "sent_s", "status", "stream", "timer",
    )  # fmt: skip

    def __init__(self, done: asyncio.Future[Answer], kept: bool) -> None:
        self.done = done
        self.kept = kept
        self.connection: Connection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.sent_s = self.first_s = self.news_s = self.gap_s = 0.0
        self.heard_s = 0.0
        """When anything came last, be it a comment."""
        self.status = 0
        self.stream = False
        self.head = b""
        self.body = bytearray()
        self.on_event: Callable[[], None] | None = None

    def leave(self, kind: str = "left") -> None:
        """Go away without a word."""
        if not self.done.done():
            connection = self.connection
            self.end(kind, monotonic())
            if connection is not None:
                connection.drop()

    def end(self, kind: str, now_s: float) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.connection = None
        if not self.done.done():
            body = bytes(self.body)
            if kind == "cut" and self.stream and tells_error(body):
                kind = "error_event"
            elif kind == "":
                judged = judge_stream(body) if self.stream else judge_body(body)
                kind = judged if self.status == 200 else f"http_{self.status}"
            if self.news_s:
                self.gap_s = max(self.gap_s, now_s - self.news_s)
            answer = Answer(
                kind, self.status, self.sent_s, self.first_s, now_s, self.head,
                body if self.kept or kind not in ("ok", "left") else b"", self.gap_s,
            )  # fmt: skip
            self.done.set_result(answer)


class Connection(asyncio.Protocol):
    """One connection, kept for the next request where the server keeps it."""

    __slots__ = (
        "_chunk", "_chunked", "_client", "_data", "_keep", "_left", "_loop", "_transport",
        "exchange",
    )  # fmt: skip

    def __init__(self, client: Client, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop
        self._data = b""
        self.exchange: Exchange | None = None
        self._restart()

    def _restart(self) -> None:
        self._chunked = False
        self._keep = True
        self._left = -1
        """Bytes of the body, or of the chunk, still to come; -1: not known yet."""
        self._chunk = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def begin(self, exchange: Exchange, data: bytes) -> None:
        self.exchange = exchange
        exchange.connection = self
        exchange.sent_s = monotonic()
        self._transport.write(data)

    def drop(self) -> None:
        self.exchange = None
        self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._client.lost(self)
        exchange, self.exchange = self.exchange, None
        if exchange is not None:
            whole = exchange.head and not self._chunked and self._left < 0
            exchange.end("" if whole else "cut", monotonic())

    def data_received(self, data: bytes) -> None:
        exchange = self.exchange
        if exchange is None:
            self._transport.abort()  # nobody asked
            return
        if self._data:
            data = self._data + data
            self._data = b""
        if not exchange.head:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._data = data
                return
            self._headers(exchange, data[:end])
            data = data[end + 4 :]
        if self._chunked:
            self._chunks(exchange, data)
        else:
            self._take(exchange, data)
            if self._left >= 0:
                self._left -= len(data)
            if self._left == 0:
                self._complete(exchange)

    def _headers(self, exchange: Exchange, head: bytes) -> None:
        exchange.head = head
        exchange.status = int(head[9:12])
        lower = head.lower()
        exchange.stream = b"\r\ncontent-type: text/event-stream" in lower
        self._chunked = b"\r\ntransfer-encoding: chunked" in lower
        self._keep = b"\r\nconnection: close" not in lower
        at = lower.find(b"\r\ncontent-length:")
        if at >= 0:
            stop = lower.find(b"\r\n", at + 2)
            self._left = int(lower[at + 17 : stop if stop >= 0 else len(lower)])

    def _take(self, exchange: Exchange, payload: bytes) -> None:
        if not payload:
            return
        exchange.body += payload
        exchange.heard_s = now_s = monotonic()
        if payload.startswith(b":"):
            return  # a comment, which only keeps the connection open
        if not exchange.first_s:
            exchange.first_s = now_s
        else:
            exchange.gap_s = max(exchange.gap_s, now_s - exchange.news_s)
        exchange.news_s = now_s
        if exchange.on_event is not None:
            exchange.on_event()

    def _chunks(self, exchange: Exchange, data: bytes) -> None:
        at = 0
        while True:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            size = int(data[at:line].split(b";")[0], 16)
            end = line + 2 + size
            if len(data) < end + 2:
                break
            if size == 0:
                self._complete(exchange)
                return
            self._take(exchange, data[line + 2 : end])
            if self.exchange is not exchange:
                return  # ``on_event`` went away
            at = end + 2
        self._data = data[at:]

    def _complete(self, exchange: Exchange) -> None:
        self.exchange = None
        self._data = b""
        keep = self._keep
        self._restart()
        if keep:
            self._client.free(self)
        else:
            self._transport.close()
        exchange.end("", monotonic())


class Client:
    """Asks one server. Close it when done."""

    def __init__(self, url: str, timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        self.url = url
        self._host = parts.hostname or "127.0.0.1"
        self._port = parts.port or 80
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._idle: deque[Connection] = deque()
        self._all: set[Connection] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._host_line = f"\r\nHost: {self._host}:{self._port}\r\n".encode()

    def request(self, method: str, path: str, body: bytes, headers: bytes = b"") -> bytes:
        """The bytes of a request; ``headers`` are whole lines with their ends."""
        line = f"{method} {path} HTTP/1.1".encode()
        kind = b"Content-Type: application/json\r\n"
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        return b"".join((line, self._host_line, headers, kind, length, body))

    def send(
        self,
        data: bytes,
        *,
        kept: bool = False,
        timeout_s: float | None = None,
        on_event: Callable[[], None] | None = None,
    ) -> Exchange:
        """Begin a request; its ``done`` gives the answer, whatever happens. ``kept``: with its
        body, also where all is well."""
        loop = self._loop
        exchange = Exchange(loop.create_future(), kept)
        exchange.on_event = on_event
        wait_s = self._timeout_s if timeout_s is None else timeout_s
        exchange.timer = loop.call_later(wait_s, exchange.leave, "timeout")
        if self._idle:
            self._idle.pop().begin(exchange, data)
        else:
            exchange.sent_s = monotonic()
            task = loop.create_task(self._open(exchange, data))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        return exchange

    async def ask(
        self,
        path: str,
        body: bytes,
        headers: bytes = b"",
        *,
        kept: bool = True,
        timeout_s: float | None = None,
    ) -> Answer:
        """POST, and wait for the answer."""
        data = self.request("POST", path, body, headers)
        return await self.send(data, kept=kept, timeout_s=timeout_s).done

    async def get(self, path: str, headers: bytes = b"", timeout_s: float | None = None) -> Answer:
        data = self.request("GET", path, b"", headers)
        return await self.send(data, kept=True, timeout_s=timeout_s).done

    async def _open(self, exchange: Exchange, data: bytes) -> None:
        sent_s = exchange.sent_s
        try:
            _, connection = await self._loop.create_connection(
                lambda: Connection(self, self._loop), self._host, self._port
            )
        except OSError:
            exchange.end("refused", monotonic())
            return
        self._all.add(connection)
        if exchange.done.done():
            connection.drop()
            return
        connection.begin(exchange, data)
        exchange.sent_s = sent_s

    def free(self, connection: Connection) -> None:
        self._idle.append(connection)

    def lost(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def close(self) -> None:
        for task in list(self._opening):
            task.cancel()
        for connection in list(self._all):
            connection.drop()
        await asyncio.sleep(0.01)
