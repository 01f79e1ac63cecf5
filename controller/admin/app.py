"""The admin API's routes. Bad input is a 4xx with a reason; nothing here shows a prompt."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from aiohttp import web

from controller.admin.status import alerts_of, policy_hash, status_of
from controller.admin.token import Gate
from controller.openapi import published
from policy.files import FileError, parse_policy
from policy.parameters import render

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from controller.admin.stats import Stats
    from controller.config import Settings
    from controller.driver import Driver
    from policy.parameters import Parameters

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_BYTES_MOST = 128 * 1024
"""A policy file with all its comments has a fifth of it."""
NESTING_MOST = 32
BODY_S_MOST = 10.0
OPEN_PATHS = frozenset({"/live", "/ready"})
"""What a load balancer or a kubelet asks, without a token."""
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

_SEGMENT = re.compile(r"decisions\.[0-9]{1,12}\.log")
LOGGER = logging.getLogger("twinkeel")


class History(Protocol):
    """Which policies were in force when (``controller.store.database``)."""

    def record_policy(self, parameters: Parameters, source: str) -> object:
        """From now on this one is; returns when it is safe."""

    def policies(self) -> Sequence[Mapping[str, object]]:
        """All of them, the youngest first."""


def _nothing() -> Mapping[str, int]:
    return {}


def _not_observing() -> Mapping[str, int] | None:
    return None


@dataclass(frozen=True)
class Sources:
    """What the admin API shows, and what it may set off."""

    settings: Settings
    driver: Driver
    stats: Stats
    token: str
    metrics: Callable[[], tuple[bytes, str]]
    """Prometheus text and its content type."""
    history: History
    ready: Callable[[], str]
    """Why it is not ready to take requests; empty: it is."""
    drain: Callable[[], object]
    """Take nothing new, finish what is open, end. Asking twice is harmless."""
    waiting: Callable[[], Mapping[str, int]] = _nothing
    """Requests in the policy's queue by tier; under ``held`` those that a limit holds back."""
    observed: Callable[[], Mapping[str, int] | None] = _not_observing
    """With ``--observe``: what the policy would have done, by what and how often."""
    shadow: Parameters | None = None
    """With ``--observe``: the policy that would have."""


def make_app(sources: Sources) -> web.Application:
    """The admin API as an application of its own, to be served on a port of its own."""
    gate = Gate(sources.token)
    admin = _Admin(sources)

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        presented = request.headers.get("Authorization", "")
        if not gate.opens(presented) and request.path not in OPEN_PATHS:
            refusal = _error(401, "unauthorized", "an admin token is needed: Authorization: Bearer")
            refusal.headers["WWW-Authenticate"] = "Bearer"
            return refusal
        return await handler(request)

    app = web.Application(middlewares=[_answers, guard], client_max_size=BODY_BYTES_MOST)
    app.add_routes(
        [
            web.get("/live", admin.live),
            web.get("/ready", admin.ready),
            web.get("/metrics", admin.metrics),
            web.get("/status", admin.status),
            web.get("/policy", admin.policy),
            web.put("/policy", admin.put_policy),
            web.get("/policies", admin.policies),
            web.post("/drain", admin.drain),
            web.get("/log", admin.log),
            web.get("/log/{name}", admin.segment),
            web.get("/alerts", admin.alerts),
            web.get("/openapi.json", admin.openapi),
        ]
    )
    return app


class _Admin:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._openapi = published("controller.admin")
        self._switching = asyncio.Lock()

    async def live(self, request: web.Request) -> web.StreamResponse:
        """The process answers."""
        return _json({"status": "live"})

    async def ready(self, request: web.Request) -> web.StreamResponse:
        """Whether a load balancer should send requests here."""
        why = self._sources.ready()
        if why:
            return _json({"status": "not ready", "why": why}, 503)
        return _json({"status": "ready"})

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        body, content_type = self._sources.metrics()
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def status(self, request: web.Request) -> web.StreamResponse:
        sources = self._sources
        driver = sources.driver
        why = "" if driver.draining else sources.ready()
        state = "draining" if driver.draining else f"not ready: {why}" if why else "serving"
        return _json(
            status_of(
                sources.settings, driver, sources.stats, state, sources.waiting(),
                sources.observed(), sources.shadow,
            )
        )  # fmt: skip

    async def policy(self, request: web.Request) -> web.StreamResponse:
        """The policy file in force, every key with its unit and why; its hash is the ETag."""
        parameters = self._sources.driver.parameters
        headers = {
            "Content-Type": "application/yaml; charset=utf-8",
            "ETag": f'"{policy_hash(parameters)}"',
        }
        text = render(parameters)
        shadow = self._sources.shadow
        if shadow is not None:
            text = (
                f"# Observing: this passes everything on. In shadow decides {shadow.name}"
                f" ({shadow.discipline}, {policy_hash(shadow)}).\n{text}"
            )
        return web.Response(body=text.encode(), headers=headers)

    async def put_policy(self, request: web.Request) -> web.StreamResponse:
        """Another policy file takes over: what is in flight keeps its terms, what waits is judged
        anew."""
        try:
            async with asyncio.timeout(BODY_S_MOST):
                body = await request.read()
        except TimeoutError:
            return _error(408, "body_timeout", f"the body was not there within {BODY_S_MOST:.0f} s")
        # A large document takes long to parse: requests pass meanwhile.
        parsed = await asyncio.to_thread(_parsed, body)
        if isinstance(parsed, str):
            return _error(400, "invalid_policy", parsed)
        async with self._switching:
            return await self._switch(parsed, request.headers.get("If-Match", ""))

    async def _switch(self, parameters: Parameters, expected: str) -> web.StreamResponse:
        driver = self._sources.driver
        old = driver.parameters
        old_hash, new_hash = policy_hash(old), policy_hash(parameters)
        if expected and expected.strip('"') not in ("*", old_hash):
            return _error(
                412, "changed_meanwhile", f"the policy in force is {old_hash}, not {expected}"
            )
        if self._sources.settings.observe:
            return _error(
                409,
                "observing",
                f"this controller only observes, so {parameters.name} cannot be put in force:"
                " start it without --observe",
            )
        if parameters.discipline != old.discipline:
            return _error(
                409,
                "discipline_changed",
                f"the discipline is {old.discipline} and cannot become {parameters.discipline}"
                " while requests are open: restart with the new policy file",
            )
        if new_hash != old_hash:
            try:
                driver.switch(parameters)
            except ValueError as error:
                return _error(409, "switch_refused", str(error))
            record = self._sources.history.record_policy
            await asyncio.to_thread(record, parameters, "admin")
        return _json({"name": parameters.name, "hash": new_hash, "old_hash": old_hash})

    async def policies(self, request: web.Request) -> web.StreamResponse:
        """By name and hash; the text of the one in force is at ``/policy``."""
        found = await asyncio.to_thread(self._sources.history.policies)
        rows = [{key: one[key] for key in one if key != "canonical"} for one in found]
        return _json({"policies": rows})

    async def drain(self, request: web.Request) -> web.StreamResponse:
        self._sources.drain()
        return _json({"status": "draining", "open": len(self._sources.driver.calls)}, 202)

    async def log(self, request: web.Request) -> web.StreamResponse:
        """The decision log's segments, the oldest first."""
        folder = self._sources.settings.data_path / "log"

        def listed() -> list[dict[str, object]]:
            found = [path for path in folder.glob("decisions.*.log") if _is_segment(path)]
            found.sort(key=lambda path: int(path.name.split(".")[1]))
            return [{"name": path.name, "bytes": path.stat().st_size} for path in found]

        try:
            return _json({"segments": await asyncio.to_thread(listed)})
        except FileNotFoundError:  # one was removed meanwhile
            return _json({"segments": await asyncio.to_thread(listed)})

    async def segment(self, request: web.Request) -> web.StreamResponse:
        """One of them, for ``twinkeel audit`` and ``explain``."""
        name = request.match_info["name"]
        folder = self._sources.settings.data_path / "log"
        path = folder / name
        if path.parent != folder or not await asyncio.to_thread(_is_segment, path):
            return _error(404, "no_such_segment", "there is no such segment: GET /log lists them")
        headers = {"Content-Type": "application/octet-stream"}
        return web.FileResponse(path, headers=headers)

    async def alerts(self, request: web.Request) -> web.StreamResponse:
        return _json({"alerts": alerts_of(self._sources.stats.alerts)})

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._openapi, content_type="application/json")


def _parsed(body: bytes) -> Parameters | str:
    """The policy, or what is wrong with the text."""
    try:
        text = body.decode("utf-8")
        if _nesting(text) > NESTING_MOST:  # the parser's time grows with the square of it
            return "the policy: is nested too deeply"
        return parse_policy(text, "the policy")
    except UnicodeDecodeError as error:
        return f"the policy: is no valid UTF-8 at byte {error.start}"
    except FileError as error:
        return str(error)
    except RecursionError:
        return "the policy: is nested too deeply"
    except (ValueError, TypeError, OverflowError) as error:
        # YAML's own conversions, such as of a date that no calendar has.
        return f"the policy: {error}"


def _nesting(text: str) -> int:
    """Brackets open at once, those in comments and texts included."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth = depth + 1 if bracket in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def _is_segment(path: Path) -> bool:
    """By its name, so it cannot lie outside the folder; a link could."""
    return _SEGMENT.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def _error(status: int, code: str, message: str) -> web.Response:
    """The same shape as the public API's errors."""
    return _json({"error": {"message": message, "type": "admin_error", "code": code}}, status)


@web.middleware
async def _answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer has the same headers, and every error the same shape."""
    try:
        answer = await handler(request)
    except web.HTTPException as error:
        answer = _error(error.status, _code(error), error.reason)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
    except asyncio.CancelledError:
        raise
    except Exception:
        LOGGER.exception("the admin API failed on %s %s", request.method, request.path)
        answer = _error(500, "internal", "a fault of the controller: its log has more")
    answer.headers.update(HEADERS)
    return answer


def _code(error: web.HTTPException) -> str:
    return error.reason.lower().replace(" ", "_")
