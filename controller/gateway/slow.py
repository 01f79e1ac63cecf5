"""Callers that open a connection and take their time over the request."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from aiohttp import web

LOOKS = 4
"""In the time that a caller has."""


async def watch(runner: web.ServerRunner, header_s_most: float) -> None:
    """Cut connections that were opened that long ago and have not brought a request.

    aiohttp bounds the time between two requests of a connection, and not that before the first.
    """
    loop = asyncio.get_running_loop()
    since: WeakKeyDictionary[object, float] = WeakKeyDictionary()
    while True:
        await asyncio.sleep(header_s_most / LOOKS)
        server = runner.server
        if server is None:
            return
        now_s = loop.time()
        for connection in server.connections:
            begun = connection._current_request is not None or connection._keepalive_handle
            if begun:
                since[connection] = float("inf")
            elif since.setdefault(connection, now_s) + header_s_most <= now_s:
                connection.force_close()
