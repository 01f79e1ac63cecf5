"""A small server with vLLM's API, whose every answer a test decides, and what a driver would be."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from controller.config import Upstream
from controller.upstream.replica import Replica

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from policy.events import Event

NOISE = "".join(
    f'vllm:{name}_seconds_bucket{{engine="0",le="{edge}",model_name="tiny"}} {edge}\n'
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
    for edge in range(300)
)
"""Most of a real page are lines that nobody needs."""


def page(
    running: float = 3.0,
    waiting: float = 1.0,
    usage: float = 0.25,
    generated: float = 1234.0,
    started: float = 1.7959917904e09,
) -> str:
    """Metrics as vLLM 0.32 writes them, in part."""
    own = '{engine="0",model_name="tiny"}'
    return (
        "# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.\n"
        "# TYPE process_start_time_seconds gauge\n"
        f"process_start_time_seconds {started!r}\n"
        "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
        "# TYPE vllm:num_requests_running gauge\n"
        f"vllm:num_requests_running{own} {running}\n"
        f"vllm:num_requests_waiting{own} {waiting}\n"
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0\n'
        f"{NOISE}"
        f"vllm:kv_cache_usage_perc{own} {usage}\n"
        f"vllm:num_preemptions_total{own} 7.0\n"
        f"vllm:num_preemptions_created{own} 1.7959918423556755e+09\n"
        f"vllm:prompt_tokens_total{own} 17.0\n"
        f"vllm:generation_tokens_total{own} {generated!r}\n"
        f"vllm:generation_tokens_created{own} 1.7959918423559813e+09\n"
        'vllm:cache_config_info{_block_size_resolved="True",block_size="128",engine="0",'
        'hash_block_size="None",num_cpu_blocks="None",num_gpu_blocks="256",'
        'num_gpu_blocks_override="999",user_specified_block_size="False"} 1.0\n'
    )


def card(id: str = "tiny", **more: object) -> dict[str, object]:
    """An entry of ``/v1/models``, as vLLM writes it."""
    return {
        "id": id, "object": "model", "created": 1, "owned_by": "vllm", "root": id, "parent": None,
        "max_model_len": 8192, "permission": [{"id": "modelperm-1"}],
    } | more  # fmt: skip


class Server:
    """Answers as its attributes say; ``port`` stays the same over ``stop`` and ``start``."""

    def __init__(self) -> None:
        self.port = 0
        self.cards: list[dict[str, object]] = [card()]
        self.metrics: str | None = page()
        """None: it has no metrics."""
        self.version: str | None = "0.32.0"
        self.health = 200
        self.asleep_s = 0.0
        """Before every answer."""
        self.models_status = 200
        self.questions: list[tuple[str, dict[str, Any]]] = []
        self.answer: Callable[[str, dict[str, Any]], web.Response] = answered
        self.asked: dict[str, int] = {}
        """How often each path was."""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        self.asked[request.path] = self.asked.get(request.path, 0) + 1
        if self.asleep_s:
            await asyncio.sleep(self.asleep_s)
        if request.method == "POST":
            question = await request.json()
            self.questions.append((request.path, question))
            return self.answer(request.path, question)
        if request.path == "/v1/models":
            return web.json_response({"data": self.cards}, status=self.models_status)
        if request.path == "/metrics" and self.metrics is not None:
            response = web.Response(text=self.metrics)
            response.enable_compression(web.ContentCoding.gzip)  # as vLLM does where it may
            return response
        if request.path == "/version" and self.version is not None:
            return web.json_response({"version": self.version})
        if request.path == "/health":
            return web.Response(status=self.health)
        return web.json_response({"detail": "Not Found"}, status=404)


def answered(path: str, question: dict[str, Any]) -> web.Response:
    """A good answer of the model that was asked for, with every endpoint served."""
    part = {"index": 0, "finish_reason": "length", "text": "a"}
    what = "data" if path.endswith("embeddings") else "choices"
    text = json.dumps({"model": question["model"], what: [part]})
    return web.Response(text=text, content_type="application/json")


class Driver:
    """Keeps what it is fed."""

    def __init__(self, *replicas: Replica) -> None:
        self.replicas = {replica.id: replica for replica in replicas}
        self.events: list[Event] = []

    def feed(self, event: Event) -> None:
        self.events.append(event)

    async def until(self, true: Callable[[], bool], within_s: float = 8.0) -> None:
        """Wait until something has come true."""
        async with asyncio.timeout(within_s):
            while not true():  # noqa: ASYNC110 - anything may be waited for
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def served(
    *, decompress: bool = True, profile: str = "cpu/tiny-qwen3", **said: Any
) -> AsyncIterator[tuple[Server, Replica]]:
    """A server that runs, and the replica that stands for it; ``said`` is for ``Upstream``."""
    server = Server()
    await server.start()
    try:
        async with aiohttp.ClientSession(auto_decompress=decompress) as session:
            upstream = Upstream(server.url, profile=profile, **said)
            yield server, Replica(0, upstream, session)
    finally:
        await server.stop()
