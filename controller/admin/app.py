"""The admin API's routes. Bad input is a 4xx with a reason; nothing here shows a prompt."""

from __future__ import annotations

import asyncio
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec
from aiohttp import web
from msgspec import Meta

from controller.admin.status import alerts_of, status_of
from controller.admin.token import Gate
from controller.deployment.papers import OVERRIDE_MOST, POLICY_MOST, Papers, Refusal, read_policy
from controller.fleet import drill
from controller.fleet.contract import FleetView
from controller.fleet.reload import Asked
from controller.openapi import published
from controller.store.database import DatabaseError
from controller.store.steps import ChainList
from policy.files import FileError
from policy.parameters import policy_hash, render

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from controller.admin.stats import Stats
    from controller.config import Settings
    from controller.deployment.manager import Deployments
    from controller.driver import Driver
    from controller.fleet.reload import Reloads
    from controller.store.steps import StepStore
    from policy.parameters import Parameters

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

BODY_BYTES_MOST = POLICY_MOST
DEPLOY_BYTES_MOST = 16 * 1024 * 1024
"""A policy, its evidence, and a packed decision log."""
OVERRIDE = "x-twinkeel-override"
_STATUS = {
    "refused": 422, "invalid_policy": 400, "invalid_plan": 400, "no_such_deployment": 404,
    "changed_meanwhile": 412, "no_such_model": 404, "no_such_reload": 404,
}  # fmt: skip
"""Of refusals; 409 of the others: the present state does not allow it."""
HISTORY_MOST = 100
BODY_S_MOST = 10.0
OPEN_PATHS = frozenset({"/live", "/ready"})
"""What a load balancer or a kubelet asks, without a token."""
HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

_NUMBER = re.compile(r"[0-9]{1,9}")
_SEGMENT = re.compile(r"decisions\.[0-9]{1,12}\.log")
LOGGER = logging.getLogger("twinkeel")


class Back(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request to roll back."""

    why: Annotated[str, Meta(max_length=OVERRIDE_MOST)] = "an operator asked for it"
    to: Annotated[int, Meta(ge=0, le=1_000_000_000)] | None = None
    """Number of the deployment whose policy is to rule; null: what ruled before."""


class History(Protocol):
    """Which policies were in force when (``controller.store.database``)."""

    def policies(self) -> Sequence[Mapping[str, object]]:
        """All of them, the youngest first."""


def _nothing() -> Mapping[str, int]:
    return {}


def _no_fleet() -> FleetView:
    return FleetView("static", ())


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
    deployments: Deployments
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
    fleet: Callable[[], FleetView] = _no_fleet
    """What runs in which slot."""
    cards: Callable[[], Sequence[object]] = tuple
    """GPUs and MIG slices, and how they are."""
    restore: Callable[[str], bool] = lambda uuid: False
    """A card or slice is well again, somebody says. False: none of that UUID is broken."""
    mend: Callable[[int], bool] = lambda replica: False
    """The same of what a slot runs on."""
    reloads: Reloads | None = None
    """Brings models into other versions."""
    chains: StepStore | None = None
    """What the steps of chains were."""


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
            web.get("/fleet", admin.fleet),
            web.post("/fleet/cards/{uuid}/restore", admin.restore_card),
            web.post("/fleet/models/{model}/reload", admin.reload),
            web.get("/fleet/models/{model}/reload", admin.reloading),
            web.post("/fleet/drill", admin.drill),
            web.delete("/fleet/drill/{replica}", admin.end_drill),
            web.get("/policy", admin.policy),
            web.put("/policy", admin.put_policy),
            web.get("/policies", admin.policies),
            web.get("/deployments", admin.deployments),
            web.post("/deployments", admin.deploy),
            web.get("/deployments/current", admin.current),
            web.post("/deployments/current/rollback", admin.roll_back),
            web.get("/deployments/{id}/diff", admin.diff),
            web.post("/drain", admin.drain),
            web.get("/log", admin.log),
            web.get("/log/{name}", admin.segment),
            web.get("/alerts", admin.alerts),
            web.get("/chains", admin.chains),
            web.get("/chains/{chain:.+}", admin.chain),
            web.get("/openapi.json", admin.openapi),
        ]
    )
    return app


class _Admin:
    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._openapi = published("controller.admin")

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
                sources.observed(), sources.shadow, sources.deployments.said(),
            )
        )  # fmt: skip

    async def fleet(self, request: web.Request) -> web.StreamResponse:
        """What runs in which slot, and the cards that it runs on."""
        sources = self._sources
        return _json({"fleet": sources.fleet(), "cards": list(sources.cards())})

    async def restore_card(self, request: web.Request) -> web.StreamResponse:
        """An operator has seen to a card: what stood still for it starts again."""
        uuid = request.match_info["uuid"]
        if not self._sources.restore(uuid):
            return _error(404, "not_broken", f"no card or slice {uuid[:80]} is broken: GET /fleet")
        return _json({"uuid": uuid, "status": "well"})

    async def reload(self, request: web.Request) -> web.StreamResponse:
        """Bring a model into another version while it serves."""
        asked = msgspec.json.decode(await _body(request), type=Asked)
        return _json(await self._reloads().begin(request.match_info["model"], asked), 202)

    async def reloading(self, request: web.Request) -> web.StreamResponse:
        """How the last reload of a model stands."""
        return _json(self._reloads().view(request.match_info["model"]))

    def _reloads(self) -> Reloads:
        if self._sources.reloads is None:
            raise Refusal("not_local", "this controller runs no servers")
        return self._sources.reloads

    async def drill(self, request: web.Request) -> web.StreamResponse:
        """Let the policy believe that a card is broken."""
        fault = drill.read(await _body(request))
        try:
            return _json({"told": drill.pretend(fault, self._sources.driver)})
        except drill.DrillRefused as refused:
            return _error(refused.status, "drill_refused", str(refused))

    async def end_drill(self, request: web.Request) -> web.StreamResponse:
        """What a slot runs on is well again."""
        number = request.match_info["replica"]
        if not _NUMBER.fullmatch(number) or not self._sources.mend(int(number)):
            return _error(404, "not_broken", f"slot {number[:20]} is not broken: GET /fleet")
        return _json({"replica": int(number), "status": "well"})

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
        """Another policy file takes over at once, whatever is known of it: only with a reason."""
        override = request.headers.get(OVERRIDE, "").strip()[:OVERRIDE_MOST]
        if not override:
            return _error(
                403, "override_needed",
                f"a policy comes into force by POST /deployments, with its evidence; the header"
                f" {OVERRIDE} with the reason puts it in force at once, and is told to everyone",
            )  # fmt: skip
        body = await _body(request)
        # A large document takes long to parse: requests pass meanwhile.
        parameters = await asyncio.to_thread(read_policy, body)
        expected = request.headers.get("If-Match", "").strip('"')
        old_hash = await self._sources.deployments.put(parameters, override, expected)
        return _json(
            {"name": parameters.name, "hash": policy_hash(parameters), "old_hash": old_hash}
        )

    async def deploy(self, request: web.Request) -> web.StreamResponse:
        """Bring a policy into force, stage by stage."""
        body = await _body(request.clone(client_max_size=DEPLOY_BYTES_MOST))
        papers = msgspec.json.decode(body, type=Papers)
        return _json(await self._sources.deployments.deploy(papers, "admin"), 202)

    async def deployments(self, request: web.Request) -> web.StreamResponse:
        """The history: each deployment with every step it took, the youngest first."""
        return _json({"deployments": await self._sources.deployments.rows(HISTORY_MOST)})

    async def current(self, request: web.Request) -> web.StreamResponse:
        """What is under way; null: nothing is."""
        return _json({"current": self._sources.deployments.current()})

    async def roll_back(self, request: web.Request) -> web.StreamResponse:
        """Let the policy from before rule again."""
        back = msgspec.json.decode(await _body(request) or b"{}", type=Back)
        return _json(await self._sources.deployments.roll_back(back.why, back.to))

    async def diff(self, request: web.Request) -> web.StreamResponse:
        """What a deployment changed, or how its policy differs from that of another, ``?from=``."""
        number, other = request.match_info["id"], request.query.get("from")
        if not _NUMBER.fullmatch(number) or not (other is None or _NUMBER.fullmatch(other)):
            return _error(404, "no_such_deployment", "a deployment's number is expected")
        before = None if other is None else int(other)
        return _json(await self._sources.deployments.diff(int(number), before))

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

    async def chains(self, request: web.Request) -> web.StreamResponse:
        """Chains, the one that was served last first."""
        store = self._sources.chains
        return _json(ChainList([] if store is None else await store.recent()))

    async def chain(self, request: web.Request) -> web.StreamResponse:
        """One of them, step by step."""
        store = self._sources.chains
        name, user = request.match_info["chain"], request.query.get("user")
        found = None if store is None else await store.chain(name, user)
        if found is None:
            of = "" if user is None else f" of the user {user[:80]!r}"
            return _error(
                404, "no_such_chain",
                f"no step of a chain {name[:80]!r}{of} is known: GET /chains lists the youngest",
            )  # fmt: skip
        return _json(found)

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._openapi, content_type="application/json")


async def _body(request: web.BaseRequest) -> bytes:
    try:
        async with asyncio.timeout(BODY_S_MOST):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout from None


def _is_segment(path: Path) -> bool:
    """By its name, so it cannot lie outside the folder; a link could."""
    return _SEGMENT.fullmatch(path.name) is not None and path.is_file() and not path.is_symlink()


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value), status=status, content_type="application/json"
    )


def _error(status: int, code: str, *reasons: str) -> web.Response:
    """The same shape as the public API's errors, and each reason by itself."""
    error = {"message": "; ".join(reasons), "type": "admin_error", "code": code}
    return _json({"error": {**error, "reasons": reasons}}, status)


@web.middleware
async def _answers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every answer has the same headers, and every error the same shape."""
    try:
        answer = await handler(request)
    except web.HTTPException as error:
        answer = _error(error.status, _code(error), error.reason)
        if "Allow" in error.headers:
            answer.headers["Allow"] = error.headers["Allow"]
    except Refusal as refusal:
        answer = _error(_STATUS.get(refusal.code, 409), refusal.code, *refusal.reasons)
    except FileError as error:
        answer = _error(400, "invalid_policy", str(error))
    except msgspec.MsgspecError as error:
        answer = _error(400, "invalid_body", str(error))
    except RecursionError:
        answer = _error(400, "invalid_body", "it is nested too deeply")
    except DatabaseError as error:
        LOGGER.error("%s", error)
        what = "written down, so it was not done" if request.method != "GET" else "read"
        answer = _error(503, "database", f"it could not be {what}: the controller's log says why")
    except asyncio.CancelledError:
        raise
    except Exception:
        LOGGER.exception("the admin API failed on %s %s", request.method, request.path)
        answer = _error(500, "internal", "a fault of the controller: its log has more")
    answer.headers.update(HEADERS)
    return answer


def _code(error: web.HTTPException) -> str:
    return error.reason.lower().replace(" ", "_")
