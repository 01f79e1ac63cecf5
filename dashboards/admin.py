"""The client of a controller's admin API: one method for each thing that the pages need.

What is wrong is an ``AdminError``. The token is in no message, follows no redirect, and is not
shown where the client itself is.
"""

from __future__ import annotations

import http.client
import ssl
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import msgspec

from controller.admin.status import Status
from controller.deployment.views import Current, Diff, Row
from controller.fleet.contract import FleetView  # noqa: TC001 - msgspec reads it
from controller.gpus.view import CardView  # noqa: TC001
from controller.store.steps import ChainLine, ChainView

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
LOOK_S_MOST = 2.0
"""A page that looks waits no longer."""
ACT_S_MOST = 120.0
"""The controller replays a log before it answers to a deployment."""
BODY_BYTES_MOST = 16 << 20
UNREACHABLE, UNAUTHORIZED, UNKNOWN = "unreachable", "unauthorized", "unknown_answer"
NOT_FOUND = 404
RELOADED = frozenset({"done", "rolled back", "given up"})
"""Phases of a reload that is over."""


class AdminError(ValueError):
    """The controller did not do it: why, each reason in a sentence."""

    def __init__(self, status: int, code: str, reasons: Sequence[str]) -> None:
        self.status = status
        """Of HTTP; 0: there was no answer."""
        self.code = code
        """In one word: unreachable, unauthorized, refused, busy, ..."""
        self.reasons = tuple(reasons)
        super().__init__("; ".join(reasons))


class Answer(NamedTuple):
    """What a path answers."""

    kind: str
    """Its content type, without parameters."""
    body: bytes


class Way(NamedTuple):
    """Something that the admin API offers."""

    method: str
    path: str
    summary: str


class FleetSeen(msgspec.Struct, frozen=True):
    """A fleet, and this machine's cards, each with its MIG slices after it."""

    fleet: FleetView
    cards: tuple[CardView, ...]


class ReloadStep(msgspec.Struct, frozen=True):
    """Something that happened to a reload."""

    after_s: float
    text: str


class Reload(msgspec.Struct, frozen=True):
    """What a page shows of ``controller.fleet.reload.ReloadView``, whose module needs the servers'
    packages."""

    model: str
    version: str
    before: str
    phase: str
    why: str
    took_s: float
    new: int
    """Replicas that take requests and have the new version."""
    old: int
    open_on_old: int
    """Requests."""
    steps: tuple[ReloadStep, ...] = ()

    @property
    def over(self) -> bool:
        return self.phase in RELOADED


class _Error(msgspec.Struct):
    code: str
    reasons: tuple[str, ...] = ()
    message: str = ""


class _Problem(msgspec.Struct):
    error: _Error


class _Rows(msgspec.Struct):
    deployments: tuple[Row, ...]


class _Now(msgspec.Struct):
    current: Current | None


class _Chains(msgspec.Struct):
    chains: tuple[ChainLine, ...]


class Admin:
    """A controller's admin API.

    Args:
        url: where it is, such as http://127.0.0.1:8081.
        token: the admin token; empty: none is known.
    """

    def __init__(self, url: str, token: str = "") -> None:
        self.url = url.rstrip("/")
        self._token = token.strip()

    def __repr__(self) -> str:
        return f"Admin({self.url})"

    # Looking

    def status(self) -> Status:
        """Replicas, tiers, breakers, hops, outcomes, alerts."""
        return self._decoded("GET", "/status", Status)

    def fleet(self) -> FleetSeen:
        """Slots and cards."""
        return self._decoded("GET", "/fleet", FleetSeen)

    def reload(self, model: str) -> Reload | None:
        """The last hot reload of a model; None: there was none since the controller began."""
        try:
            return self._decoded("GET", f"/fleet/models/{quote(model, safe='')}/reload", Reload)
        except AdminError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def current(self) -> Current | None:
        """The deployment that is under way; None: nothing is."""
        return self._decoded("GET", "/deployments/current", _Now).current

    def deployments(self) -> tuple[Row, ...]:
        """The history, the youngest first."""
        return self._decoded("GET", "/deployments", _Rows).deployments

    def diff(self, number: int, before: int | None = None) -> Diff:
        """What deployment ``number`` changed, or differs in from deployment ``before``."""
        query = "" if before is None else "?" + urlencode({"from": before})
        return self._decoded("GET", f"/deployments/{number}/diff{query}", Diff)

    def chains(self) -> tuple[ChainLine, ...]:
        """Chains, the one that was served last first. Earlier controllers have no such path."""
        return self._decoded("GET", "/chains", _Chains).chains

    def chain(self, name: str, user: str = "") -> ChainView | None:
        """The youngest chain of that name, of ``user`` where one is given; None: none is known."""
        query = "?" + urlencode({"user": user}) if user else ""
        try:
            return self._decoded("GET", f"/chains/{quote(name, safe='')}{query}", ChainView)
        except AdminError as error:
            if error.status == NOT_FOUND:
                return None
            raise

    def ways(self) -> tuple[Way, ...]:
        """All that the admin API offers, as it says itself."""
        document: Any = self._decoded("GET", "/openapi.json", Any)
        methods = ("get", "put", "post", "delete", "patch")
        try:
            return tuple(
                Way(method.upper(), str(path), str(operations[method].get("summary", "")))
                for path, operations in document["paths"].items()
                for method in methods if method in operations
            )  # fmt: skip
        except (AttributeError, KeyError, TypeError):
            raise self._unknown("/openapi.json", "it has no paths") from None

    def get(self, path: str) -> Answer:
        """Whatever a path answers."""
        return self._asked("GET", path, None, LOOK_S_MOST)

    # Acting

    def deploy(self, request: dict[str, Any]) -> Row:
        """Begin a deployment; ``request`` is as ``controller.deployment.asking`` builds it."""
        return self._decoded("POST", "/deployments", Row, request, ACT_S_MOST)

    def roll_back(self, why: str, to: int | None = None) -> Row:
        """End what is under way, or let an earlier policy rule again."""
        path = "/deployments/current/rollback"
        return self._decoded("POST", path, Row, {"why": why, "to": to}, ACT_S_MOST)

    def _decoded(
        self, method: str, path: str, kind: type[T], document: object = None,
        timeout_s: float = LOOK_S_MOST,
    ) -> T:  # fmt: skip
        answer = self._asked(method, path, document, timeout_s)
        try:
            return msgspec.json.decode(answer.body, type=kind)
        except msgspec.MsgspecError as error:
            raise self._unknown(path, str(error)) from None

    def _asked(self, method: str, path: str, document: object, timeout_s: float) -> Answer:
        headers = {"Accept-Encoding": "identity"}
        if self._token:
            # Else http.client would tell of a header that cannot be, and what is in it.
            if not self._token.isascii() or not self._token.isprintable() or " " in self._token:
                raise self._unauthorized(401)
            headers["Authorization"] = f"Bearer {self._token}"
        body = None
        if document is not None:
            body = msgspec.json.encode(document)
            headers["Content-Type"] = "application/json"
        try:
            parts = urlsplit(self.url)
            connection = _connection(parts.scheme, parts.hostname or "", parts.port, timeout_s)
            try:
                connection.request(method, f"{parts.path}{path}", body, headers)
                answer = connection.getresponse()
                status = answer.status
                data = answer.read(BODY_BYTES_MOST + 1)
                kind = (answer.getheader("Content-Type") or "").partition(";")[0].strip()
            finally:
                connection.close()
        except (OSError, http.client.HTTPException, ValueError) as error:
            why = str(error) or type(error).__name__
            reason = f"no controller answers at {self.url} ({why})"
            raise AdminError(0, UNREACHABLE, [reason]) from None
        if len(data) > BODY_BYTES_MOST:
            raise self._unknown(path, f"it has more than {BODY_BYTES_MOST} bytes")
        if status >= 300 and not (path == "/ready" and status == 503):
            raise self._told(path, status, data)
        return Answer(kind, data)

    def _told(self, path: str, status: int, body: bytes) -> AdminError:
        if status == 401:
            return self._unauthorized(status)
        try:
            error = msgspec.json.decode(body, type=_Problem).error
        except msgspec.MsgspecError:
            return AdminError(status, UNKNOWN, [f"{self.url}{path} answered {status}"])
        return AdminError(status, error.code, error.reasons or (error.message or error.code,))

    def _unauthorized(self, status: int) -> AdminError:
        return AdminError(
            status, UNAUTHORIZED, [f"the admin token is not that of the controller at {self.url}"]
        )

    def _unknown(self, path: str, why: str) -> AdminError:
        return AdminError(
            200, UNKNOWN, [f"{self.url}{path} is no admin API of this version: {why}"]
        )


def _connection(
    scheme: str, host: str, port: int | None, timeout_s: float
) -> http.client.HTTPConnection:
    if scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)
    return http.client.HTTPConnection(host, port, timeout=timeout_s)
