"""The HTTP client and servers that a controller is made of."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import http_exceptions, web

from controller.accepting import Acceptor

if TYPE_CHECKING:
    from controller.config import Limits

CONNECT_S = 2.0
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


def session(limits: Limits) -> aiohttp.ClientSession:
    """What calls the servers: no bound on connections, since the policy bounds the calls."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=limits.call_s_most, sock_connect=CONNECT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("User-Agent",),
        read_bufsize=READ_BYTES,
    )


async def listen(
    app: web.Application, host: str, port: int, **options: Any
) -> tuple[web.AppRunner, Acceptor]:
    """Serve ``app``; a caller that goes away cancels its handler.

    Raises:
        OSError: the port cannot be had.
    """
    logger = logging.getLogger("twinkeel.http")
    logger.addFilter(_DISCREET)
    runner = web.AppRunner(
        app, logger=logger, handle_signals=False, handler_cancellation=True, access_log=None,
        shutdown_timeout=1.0, **options,
    )  # fmt: skip
    await runner.setup()
    assert runner.server is not None
    return runner, Acceptor(runner.server, host, port)


def public_options(limits: Limits) -> dict[str, Any]:
    """Of the server that callers reach."""
    return {
        "keepalive_timeout": limits.idle_s_most,
        "max_line_size": limits.header_bytes_most,
        "max_field_size": limits.header_bytes_most,
    }
