"""The HTTP client and servers that a controller is made of."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from aiohttp import http_exceptions, web

from controller.accepting import Acceptor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controller.config import Limits

    Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

Runner = TypeVar("Runner", web.ServerRunner, web.AppRunner)

CONNECT_S = 5.0
"""A loop that is short of CPU takes seconds to see that a connection is there."""
KEEP_ALIVE_S = 3.0
"""Below the five seconds after which vLLM's server closes an idle connection: a request sent over
one that is being closed is lost."""
READ_BYTES = 1 << 18


class _Discreet(logging.Filter):
    """Leaves out what callers wrote that is no HTTP: it is theirs to mend, it may be secret, and
    anyone could fill the log with it."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, http_exceptions.HttpProcessingError)


_DISCREET = _Discreet()


def session() -> aiohttp.ClientSession:
    """What calls the servers: no bound on connections, since the policy bounds the calls."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        # The driver bounds a whole call, with one look at all of them instead of a timer for each.
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent",),
        read_bufsize=READ_BYTES,
    )


async def listen(
    handler: Handler, host: str, port: int, body_bytes_most: int, **options: Any
) -> tuple[web.ServerRunner, Acceptor]:
    """Serve ``handler``; a caller that goes away cancels it.

    Raises:
        OSError: the port cannot be had.
    """

    def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> Any:
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=body_bytes_most
        )

    loop = asyncio.get_running_loop()
    server = web.Server(
        handler, request_factory=request, handler_cancellation=True, access_log=None,
        logger=_logger(), **options,
    )  # fmt: skip
    return await _open(web.ServerRunner(server, shutdown_timeout=1.0), host, port)


async def listen_app(app: web.Application, host: str, port: int) -> tuple[web.AppRunner, Acceptor]:
    """The same for an application with its own routes, which few call.

    Raises:
        OSError: the port cannot be had.
    """
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, logger=_logger(), shutdown_timeout=1.0
    )
    return await _open(runner, host, port)


async def _open(runner: Runner, host: str, port: int) -> tuple[Runner, Acceptor]:
    await runner.setup()
    assert runner.server is not None
    return runner, Acceptor(runner.server, host, port)


def _logger() -> logging.Logger:
    logger = logging.getLogger("twinkeel.http")
    logger.addFilter(_DISCREET)
    return logger


def public_options(limits: Limits) -> dict[str, Any]:
    """Of the server that callers reach."""
    return {
        "body_bytes_most": limits.body_bytes_most,
        "keepalive_timeout": limits.idle_s_most,
        "max_line_size": limits.header_bytes_most,
        "max_field_size": limits.header_bytes_most,
    }
