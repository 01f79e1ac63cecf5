"""HTTP on the wire: whole answers in one write, streams chunk by chunk, and connections that break.

A handler writes to the transport itself and returns ``Sent``, so that aiohttp only parses requests
and keeps connections: that saves most of its cost, and lets faults be exact to the byte.
"""

from __future__ import annotations

import os
import socket
import struct
from email.utils import formatdate
from time import time
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.http import HttpVersion11

if TYPE_CHECKING:
    import asyncio

    from aiohttp.abc import AbstractStreamWriter

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"
TEXT = b"text/plain; version=0.0.4; charset=utf-8"
_REASONS = {
    200: b"OK", 400: b"Bad Request", 404: b"Not Found", 405: b"Method Not Allowed",
    415: b"Unsupported Media Type", 500: b"Internal Server Error", 503: b"Service Unavailable",
}  # fmt: skip


class Sent(web.StreamResponse):
    """What a handler returns that has written its answer itself."""

    def __init__(self, keep_alive: bool) -> None:
        super().__init__()
        self._kept = keep_alive

    @property
    def keep_alive(self) -> bool | None:
        return self._kept

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter | None:
        return None

    async def write_eof(self, data: bytes = b"") -> None:
        return None


class Dates:
    """The ``date`` header, made once a second."""

    def __init__(self) -> None:
        self._second = 0
        self._line = b""

    def line(self) -> bytes:
        second = int(time())
        if second != self._second:
            self._second = second
            self._line = b"date: " + formatdate(second, usegmt=True).encode() + b"\r\n"
        return self._line


class Connection:
    """The way back to one caller."""

    __slots__ = ("_dates", "_extra", "_framed", "_transport", "kept")

    def __init__(self, request: web.BaseRequest, dates: Dates, extra: bytes = b"") -> None:
        """``extra``: header lines for the answer."""
        transport = request.transport
        self._transport: asyncio.Transport | None = transport
        self._dates = dates
        self._framed = request.version >= HttpVersion11
        self.kept = bool(request.keep_alive) and self._framed
        self._extra = extra

    def _write(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)

    def _head(self, status: int, content_type: bytes, rest: bytes) -> bytes:
        closing = b"" if self.kept else b"connection: close\r\n"
        return b"HTTP/1.1 %d %b\r\n%bserver: uvicorn\r\ncontent-type: %b\r\n%b%b%b\r\n" % (
            status, _REASONS.get(status, b"Error"), self._dates.line(), content_type,
            self._extra, closing, rest,
        )  # fmt: skip

    def answer(self, status: int, body: bytes, content_type: bytes = JSON) -> None:
        """A whole answer."""
        length = b"content-length: %d\r\n" % len(body)
        self._write(self._head(status, content_type, length) + body)

    def open_stream(self) -> None:
        """The headers of a stream."""
        rest = b"transfer-encoding: chunked\r\n" if self._framed else b""
        self._write(self._head(200, EVENTS, rest))

    def chunk(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._framed else data)

    def last_chunk(self, data: bytes) -> None:
        """The end of a stream, with ``data`` in front of it."""
        if not self._framed:
            self._write(data)
        elif data:
            self._write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            self._write(b"0\r\n\r\n")

    # ---- what breaks ----

    def part_of(self, body: bytes) -> None:
        """Headers that promise ``body``, and its first half."""
        length = b"content-length: %d\r\n" % len(body)
        self._write(self._head(200, JSON, length) + body[: len(body) // 2])

    def cut(self) -> None:
        """Close the connection in good order (FIN), whatever the caller still waits for."""
        if self._transport is not None:
            self._transport.close()

    def reset(self) -> None:
        """Break the connection off (RST)."""
        transport = self._transport
        if transport is None:
            return
        given = transport.get_extra_info("socket")
        if given is not None and given.fileno() >= 0:
            # uvloop's stand-in for the socket takes no options, so a copy of it does.
            with socket.socket(fileno=os.dup(given.fileno())) as copy:
                copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
