"""Passing a stream on to its caller, who may be slow, or gone."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

from controller.telemetry.timing import server_timing_so_far

if TYPE_CHECKING:
    from collections.abc import Callable

    from controller.call import Call
    from controller.upstream.replica import Replica

BUFFER_BYTES_MOST = 256 * 1024
"""What a caller that reads slowly may have waiting for it before its stream is held up."""
COMMENT = b": waiting\n\n"
VERSION = "x-twinkeel-model-version"


class CallerGone(Exception):
    """The caller does not take any more."""


class Streams:
    """Writes to callers.

    Args:
        clock: the log's.
        unread_s_most: a caller that takes nothing for that long is let go.
    """

    def __init__(self, clock: Callable[[], int], unread_s_most: float) -> None:
        self._clock = clock
        self._unread_s_most = unread_s_most
        self.blocked: dict[int, int] = {}
        """By replica: streams held up because their caller does not read."""

    async def send(self, call: Call, data: bytes, replica: Replica | None = None) -> None:
        """Pass part of a stream on; its headers go out before the first.

        Raises:
            CallerGone: the caller does not take it.
        """
        response = call.response
        transport = call.web.transport
        if response is None or transport is None or transport.is_closing():
            raise CallerGone
        call.last_sent_ns = self._clock()
        try:
            if not call.committed:
                self._begin(call)
                await response.prepare(call.web)
            if not _is_full(call, len(data)):
                await response.write(data)
            else:
                await self._send_slowly(call, data, replica)
        except (ConnectionError, RuntimeError):
            raise CallerGone from None

    async def comment(self, call: Call) -> None:
        """Say nothing, aloud: so that nothing on the way takes the connection for dead.

        Raises:
            CallerGone: the caller is.
        """
        if not (call.committed and _is_full(call, len(COMMENT))):
            await self.send(call, COMMENT)

    async def end(self, call: Call, data: bytes) -> None:
        """Send the last part, and close the stream.

        Raises:
            CallerGone: the caller did not take it.
        """
        await self.send(call, data)
        assert call.response is not None
        try:
            async with asyncio.timeout(self._unread_s_most):
                await call.response.write_eof()
        except (ConnectionError, RuntimeError):
            raise CallerGone from None
        except TimeoutError:
            let_go(call)

    def _begin(self, call: Call) -> None:
        call.committed = True
        assert call.response is not None
        if call.web.transport is not None:  # below it, writing never waits
            call.web.transport.set_write_buffer_limits(BUFFER_BYTES_MOST)
        headers = call.response.headers
        headers["x-request-id"] = call.name
        headers["x-twinkeel-request"] = str(call.request)
        if call.tier:
            headers["x-twinkeel-tier"] = call.tier
        if call.trace:
            headers["traceparent"] = call.trace
        if call.first_ns >= 0 and version_label(call.version):  # else another may answer yet
            headers[VERSION] = version_label(call.version)
        headers["Cache-Control"] = "no-cache"
        headers["Content-Type"] = "text/event-stream; charset=utf-8"
        headers["Server-Timing"] = server_timing_so_far(call, self._clock())

    async def _send_slowly(self, call: Call, data: bytes, replica: Replica | None) -> None:
        """The caller reads more slowly than the server writes: that is no fault of the server."""
        number = -1 if replica is None else replica.id
        self.blocked[number] = self.blocked.get(number, 0) + 1
        try:
            async with asyncio.timeout(self._unread_s_most):
                await call.response.write(data)  # type: ignore[union-attr]
        except TimeoutError:
            let_go(call)
        finally:
            self.blocked[number] -= 1


def version_label(version: str) -> str:
    """A model's version as callers are told it; empty: it is only known as a folder of the server,
    which is nobody's business, or cannot stand in a header."""
    fit = version.isascii() and version.isprintable() and not version.startswith("/")
    return version if fit else ""


def let_go(call: Call) -> NoReturn:
    """Cut the connection of a caller that takes nothing."""
    if call.web.transport is not None:
        call.web.transport.abort()
    raise CallerGone


def _is_full(call: Call, more: int) -> bool:
    """Whether writing ``more`` bytes would have to wait for the caller. Once the buffer was full,
    it waits until most of it is read."""
    transport = call.web.transport
    size = 0 if transport is None else transport.get_write_buffer_size()
    return call.web.protocol.writing_paused or size + more > BUFFER_BYTES_MOST
