"""The floor: an aiohttp proxy that does nothing but pass on bodies and chunks.

Runs as a process of its own (``python -m tests.bench.gateway.bare URL [URL ...]``) and prints
``serving URL``. With several upstreams they are taken in turn.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import aiohttp
import uvloop
from aiohttp import web


async def serve(upstreams: list[str]) -> None:
    """Pass on until killed."""
    turn = itertools.cycle(upstreams)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def passing(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            headers = {"Content-Type": request.headers.get("Content-Type", "")}
            url = next(turn) + request.path
            try:
                answer = await session.request(request.method, url, data=body, headers=headers)
            except aiohttp.ClientConnectionError:
                return web.Response(status=502)
            async with answer:
                kind = {"Content-Type": answer.headers.get("Content-Type", "")}
                if not kind["Content-Type"].startswith("text/event-stream"):
                    text = await answer.read()
                    return web.Response(status=answer.status, body=text, headers=kind)
                response = web.StreamResponse(status=answer.status, headers=kind)
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
                return response

        server = web.Server(passing, access_log=None)
        runner = web.ServerRunner(server)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
        await site.start()
        port = runner.addresses[0][1]
        print(f"serving http://127.0.0.1:{port}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1:]))
