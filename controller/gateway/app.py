"""The public HTTP server: reads a request, waits for its outcome, has its caller told."""

from __future__ import annotations

import asyncio
import logging
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from controller.call import Call
from controller.gateway import asking, errors
from controller.gateway.asking import BadRequest
from controller.gateway.slow import watch
from controller.gateway.steps import OwnSteps
from controller.gateway.streams import CallerGone
from controller.gateway.telling import JSON, Teller

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controller.driver import Driver
    from controller.gateway.answers import Answers
    from controller.gateway.chains import KnownChains
    from controller.gateway.keys import Keys
    from controller.store.chains import ChainStore
    from controller.telemetry.chains import OwnStep
    from policy.events import Endpoint

    Route = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

LOGGER = logging.getLogger("twinkeel")
NAME_MOST = 128
COMMENTS_AT_ONCE = 256
READING = ("GET", "HEAD")
SWEEPS = 5
"""How many times in the longest silence open streams are looked at."""


class Gateway:
    """The callers' side.

    Args:
        secret: key of prompt fingerprints.
        keys: whose API keys are taken; None: callers need none.
        answers: kept for degraded callers.
        chains: keeps the answers of chains' steps.
        known: tells the policy of chains that it has not heard of.
        openapi: the published document, as JSON.
        rejected: is told the status of each request that is not passed on.
        own_step: is told of clients' own steps of chains; None: they are not taken.
    """

    def __init__(
        self,
        driver: Driver,
        secret: bytes,
        answers: Answers,
        chains: ChainStore,
        known: KnownChains,
        keys: Keys | None = None,
        rejected: Callable[[int], object] = lambda status: None,
        openapi: bytes = b"{}",
        own_step: Callable[[OwnStep], object] | None = None,
    ) -> None:
        self._driver = driver
        self._rejected = rejected
        self._limits = driver.settings.limits
        self._secret = secret
        self._teller = Teller(driver, answers, chains)
        self._known_chains = known
        self._keys = keys
        self._openapi = openapi
        self._routes: dict[str, dict[str, Route]] = {
            "/v1/chat/completions": {"POST": partial(self._serve, "chat")},
            "/v1/completions": {"POST": partial(self._serve, "completions")},
            "/v1/embeddings": {"POST": partial(self._serve, "embeddings")},
            "/v1/models": dict.fromkeys(READING, self._models),
            "/health": dict.fromkeys(READING, self._health),
            "/ready": dict.fromkeys(READING, self._ready),
            "/openapi.json": dict.fromkeys(READING, self._document),
        }
        self._steps = None
        if own_step is not None:
            self._steps = OwnSteps(own_step, self._tenant, self._limits.body_s_most)
        self._reading = 0
        """Requests whose body is on its way."""
        self.closed = False
        """New requests are refused."""
        self._sweeper: asyncio.Task[None] | None = None
        self._guard: asyncio.Task[None] | None = None
        self._comments: set[asyncio.Task[None]] = set()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer any request. (aiohttp's own router costs more than the rest of this.)"""
        methods = self._routes.get(request.path)
        if methods is None and self._steps is not None:
            methods = self._steps.methods(request.path)
        if methods is None:
            return self._refuse(
                BadRequest(f"there is no {request.path[:200]}", code="not_found", status=404),
                request,
            )
        route = methods.get(request.method)
        if route is not None:
            try:
                return await route(request)
            except BadRequest as bad:
                return self._refuse(bad, request)
            except Exception:  # a fault of ours: told in the shape that callers read
                LOGGER.exception("a request to %s could not be answered", request.path)
                fault = BadRequest("the gateway failed", code="internal_error", status=500)
                return self._refuse(fault, request)
        allowed = ", ".join(methods)
        response = self._refuse(
            BadRequest(f"use {allowed}", code="method_not_allowed", status=405), request
        )
        response.headers["Allow"] = allowed
        return response

    def _refuse(self, bad: BadRequest, request: web.BaseRequest) -> web.Response:
        self._rejected(bad.status)
        return _refusal(bad, _request_name(request.headers.get("X-Request-Id")))

    def start(self) -> None:
        self._sweeper = asyncio.get_running_loop().create_task(self._sweep())

    def guard(self, runner: web.ServerRunner) -> None:
        """From now on let go of callers that open a connection and do not get their request out."""
        self._guard = asyncio.get_running_loop().create_task(
            watch(runner, self._limits.header_s_most)
        )

    async def close(self) -> None:
        for task in [self._sweeper, self._guard, *self._comments]:
            if task is not None:
                task.cancel()

    # ---- a request ----

    async def _serve(self, endpoint: Endpoint, request: web.BaseRequest) -> web.StreamResponse:
        driver = self._driver
        entered_ns = driver.now_ns()
        name = _request_name(request.headers.get("X-Request-Id"))
        try:
            tenant = self._tenant(request)
            self._admit()
            body = await self._body(request)
            read_ns = driver.now_ns()
            asked = asking.read(endpoint, request.headers, body, self._secret, tenant)
            self._known(asked.model)
        except BadRequest as bad:
            self._rejected(bad.status)
            return _refusal(bad, name)
        if asked.chain:
            await self._known_chains.look_up(asked)
        call = Call(asked, name, entered_ns, request)
        if asked.stream:
            call.response = web.StreamResponse()
            call.last_sent_ns = entered_ns
        call.read_ns = read_ns
        try:
            await driver.serve(call)
            return await self._teller.tell(call)
        except asyncio.CancelledError:
            driver.cancel(call)
            raise
        except CallerGone:
            driver.cancel(call)
            return call.response or web.Response()
        finally:
            driver.told(call)

    def _tenant(self, request: web.BaseRequest) -> tuple[str, str, str]:
        if self._keys is None:
            return "", "", ""
        tenant = self._keys.check(request.headers.get("Authorization", ""))
        if tenant is None:
            raise BadRequest("the API key is missing or not known", "", "invalid_api_key", 401)
        return tenant.name, tenant.sla, tenant.line

    def _admit(self) -> None:
        if self.closed:
            raise BadRequest("this gateway is about to stop", "", "draining", 503)
        if len(self._driver.calls) + self._reading >= self._limits.open_most:
            raise BadRequest(
                f"{self._limits.open_most} requests are open here", "", "too_many", 503
            )

    async def _body(self, request: web.BaseRequest) -> bytes:
        self._reading += 1
        try:
            return await self._read(request)
        finally:
            self._reading -= 1

    async def _read(self, request: web.BaseRequest) -> bytes:
        length = request.content_length
        if length is not None and length > self._limits.body_bytes_most:
            raise self._too_long()
        try:
            if request.content.is_eof():  # it came with the headers: nothing is waited for
                return await request.read()
            async with asyncio.timeout(self._limits.body_s_most):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise self._too_long() from None
        except web.RequestPayloadError as error:
            raise BadRequest(f"the body cannot be read: {error}", code="invalid_body") from None
        except TimeoutError:
            raise BadRequest(
                f"the body was not there after {self._limits.body_s_most:g} s", "", "slow_body", 408
            ) from None

    def _too_long(self) -> BadRequest:
        most = self._limits.body_bytes_most
        return BadRequest(f"the body has more than {most} bytes", "", "body_too_long", 413)

    def _known(self, model: str) -> None:
        """A model that no server serves is the caller's mistake; one that was never seen up since
        the start may serve it."""
        for replica in self._driver.replicas.values():
            spec = replica.spec
            if spec is None or not spec.models or model in spec.models:
                return
        raise BadRequest(
            f"the model {model[:80]!r} does not exist here", "model", "model_not_found", 404
        )

    # ---- silence ----

    async def _sweep(self) -> None:
        """Now and then, see which streams have been silent for too long."""
        silence_ns = round(self._limits.comment_s * 1e9)
        pause_s = self._limits.comment_s / SWEEPS
        while True:
            await asyncio.sleep(pause_s)
            now_ns = self._driver.now_ns() + silence_ns // SWEEPS
            for number, call in enumerate(list(self._driver.calls.values())):
                if not number % COMMENTS_AT_ONCE:
                    await asyncio.sleep(0)  # others' turn
                if call.response is not None and call.last_sent_ns + silence_ns <= now_ns:
                    task = asyncio.get_running_loop().create_task(self._comment(call))
                    self._comments.add(task)
                    task.add_done_callback(self._comments.discard)

    async def _comment(self, call: Call) -> None:
        try:
            await self._driver.streams.comment(call)
        except CallerGone:
            self._driver.cancel(call)

    # ---- the other routes ----

    async def _models(self, request: web.BaseRequest) -> web.Response:
        try:
            self._tenant(request)
        except BadRequest as bad:
            return self._refuse(bad, request)
        models: dict[str, dict[str, Any]] = {}
        for replica in self._driver.replicas.values():
            spec = replica.spec
            for model in spec.models if spec is not None else ():
                models.setdefault(
                    model,
                    {"id": model, "object": "model", "created": 0, "owned_by": "vllm",
                     "max_model_len": spec.max_model_len if spec is not None else None},
                )  # fmt: skip
        body = msgspec.json.encode({"object": "list", "data": list(models.values())})
        return web.Response(body=body, content_type=JSON)

    async def _health(self, request: web.BaseRequest) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.BaseRequest) -> web.Response:
        """Whether new requests should be sent here."""
        driver = self._driver
        up = sum(replica.up for replica in driver.replicas.values())
        ready = up > 0 and not driver.draining
        body = msgspec.json.encode({"ready": ready, "draining": driver.draining, "replicas_up": up})
        return web.Response(body=body, status=200 if ready else 503, content_type=JSON)

    async def _document(self, request: web.BaseRequest) -> web.Response:
        return web.Response(body=self._openapi, content_type=JSON)


def _request_name(given: str | None) -> str:
    """The caller's own request id, if it can stand in a header and a log; else a new one."""
    if given and len(given) <= NAME_MOST and given.isascii() and given.isprintable():
        return given
    return f"tk-{secrets.token_hex(12)}"


def _refusal(bad: BadRequest, name: str) -> web.Response:
    headers = {"x-request-id": name}
    if bad.status in (429, 503):
        headers["Retry-After"] = "1"
    if bad.status in (408, 413) or bad.code == "draining":
        headers["Connection"] = "close"  # the rest of the body is not wanted
    body = errors.document(str(bad), bad.code, bad.status, name, bad.param)
    return web.Response(body=body, status=bad.status, headers=headers, content_type=JSON)
