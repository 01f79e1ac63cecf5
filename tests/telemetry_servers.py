"""Servers that telemetry is sent to, in the test's own loop and on ports of their own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Takes spans as the OpenTelemetry collector does, on a port of its own."""

    def __init__(self, answer: Callable[[], Awaitable[web.Response]] | None = None) -> None:
        self.bodies: list[bytes] = []
        self.spans: list[Span] = []
        self.resource: dict[str, Any] = {}
        self._answer = answer
        self.url = ""

    async def __aenter__(self) -> Collector:
        app = web.Application()
        app.router.add_post("/v1/traces", self._traces)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def _traces(self, request: web.Request) -> web.Response:
        body = await request.read()
        if self._answer is not None:
            return await self._answer()
        assert request.content_type == "application/x-protobuf"
        self.bodies.append(body)
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = attributes(of_resource.resource)
            for of_scope in of_resource.scope_spans:
                self.spans += of_scope.spans
        return web.Response(
            body=ExportTraceServiceResponse().SerializeToString(),
            content_type="application/x-protobuf",
        )

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def attributes(of: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in of.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        if kind == "array_value":
            value = [each.string_value for each in value.values]
        found[pair.key] = value
    return found


class Pager:
    """Answers posts with what it is told to, in turn; then with 204."""

    def __init__(self, *answers: int, wait: asyncio.Event | None = None) -> None:
        self.got: list[tuple[dict[str, Any], str]] = []
        self._answers = list(answers)
        self._wait = wait

    async def __aenter__(self) -> Pager:
        app = web.Application()
        app.router.add_post("/hook", self._post)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}/hook".format(*self._runner.addresses[0][:2])
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()

    async def _post(self, request: web.Request) -> web.Response:
        self.got.append((await request.json(), request.headers["Idempotency-Key"]))
        if self._wait is not None:
            await self._wait.wait()
        return web.Response(status=self._answers.pop(0) if self._answers else 204)


async def until(said: Callable[[], bool]) -> None:
    for _ in range(2000):
        if said():
            return
        await asyncio.sleep(0.005)
    raise TimeoutError("what was waited for did not come in 10 s")
