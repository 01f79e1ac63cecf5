"""A client's own step of a chain, such as a query or a tool, that it tells of afterwards.

    POST /v1/chains/CHAIN/steps
    {"step": "db_query", "took_ms": 812.5, "began_ago_ms": 820, "outcome": "done",
     "attributes": {"rows": 42, "similarity": 0.83}}

It is shown and traced with the chain's requests. The policy is not told: it sees what such a step
took by when the next request arrives.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from aiohttp import web
from msgspec import Meta

from controller.gateway import asking
from controller.gateway.asking import BadRequest
from controller.telemetry.chains import OwnStep

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

BEFORE, AFTER = "/v1/chains/", "/steps"
BODY_BYTES_MOST = 16 * 1024
ATTRIBUTES_MOST = 64
NAME_MOST = 64
"""Characters of an attribute's name."""
TEXT_MOST = 256
INTEGER_MOST = (1 << 63) - 1
NS_PER_MS = 1_000_000

Ms = Annotated[float, Meta(ge=0.0, le=86_400_000.0)]
Text = Annotated[str, Meta(max_length=TEXT_MOST)]


class Told(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body."""

    step: Annotated[str, Meta(min_length=1, max_length=TEXT_MOST)]
    took_ms: Ms
    began_ago_ms: Ms | None = None
    """Before now; null: it has just ended."""
    outcome: Literal["done", "failed", "late"] = "done"
    attributes: dict[str, Any] = {}
    checkpoint: Text = ""


_decode = msgspec.json.Decoder(Told).decode


class OwnSteps:
    """The route.

    Args:
        tell: who is told of a step.
        tenant: name, service class and business line of who asks; raises ``BadRequest``.
        body_s_most: until the whole body has to be there.
    """

    def __init__(
        self,
        tell: Callable[[OwnStep], object],
        tenant: Callable[[web.BaseRequest], tuple[str, str, str]],
        body_s_most: float,
    ) -> None:
        self._tell = tell
        self._tenant = tenant
        self._body_s_most = body_s_most

    def methods(
        self, path: str
    ) -> dict[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] | None:
        """What may be done at this path; None: it is another."""
        chain = path.startswith(BEFORE) and path.endswith(AFTER)
        return {"POST": self.take} if chain and len(path) > len(BEFORE) + len(AFTER) else None

    async def take(self, request: web.BaseRequest) -> web.StreamResponse:
        """Take a step in.

        Raises:
            BadRequest: it cannot be understood, or its caller has no key.
        """
        tenant = self._tenant(request)
        chain = asking.name(request.path[len(BEFORE) : -len(AFTER)], "the chain in the path")
        user, line = asking.caller(request.headers, tenant)
        told = read(await self._body(request))
        took_ns = round(told.took_ms * NS_PER_MS)
        ago_ns = took_ns if told.began_ago_ms is None else round(told.began_ago_ms * NS_PER_MS)
        traceparent = asking.sendable(request.headers.get("traceparent"))
        self._tell(
            OwnStep(
                user, chain, line, told.step, ago_ns, took_ns, told.outcome, told.attributes,
                told.checkpoint, traceparent,
            )
        )  # fmt: skip
        return web.Response(status=204)

    async def _body(self, request: web.BaseRequest) -> bytes:
        found = bytearray()
        try:
            async with asyncio.timeout(self._body_s_most):
                while len(found) <= BODY_BYTES_MOST and (part := await request.content.readany()):
                    found += part
        except web.RequestPayloadError as error:
            raise BadRequest(f"the body cannot be read: {error}", code="invalid_body") from None
        except TimeoutError:
            raise BadRequest(
                f"the body was not there after {self._body_s_most:g} s", "", "slow_body", 408
            ) from None
        if len(found) > BODY_BYTES_MOST:
            raise BadRequest(
                f"the body has more than {BODY_BYTES_MOST} bytes", "", "body_too_long", 413
            )
        return bytes(found)


def read(body: bytes) -> Told:
    """Read the body.

    Raises:
        BadRequest: it is not as it should be.
    """
    try:
        told = _decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the step cannot be understood: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}", code="invalid_json") from None
    asking.name(told.step, "step")
    asking.name(told.checkpoint, "checkpoint")
    if told.began_ago_ms is not None and told.began_ago_ms < told.took_ms:
        raise BadRequest(
            f"began_ago_ms is {told.began_ago_ms:g}, and took_ms {told.took_ms:g}: the step would"
            " end in the future",
            "began_ago_ms",
        )
    if len(told.attributes) > ATTRIBUTES_MOST:
        raise BadRequest(
            f"attributes has {len(told.attributes)} of them: at most {ATTRIBUTES_MOST}",
            "attributes",
        )
    for name, value in told.attributes.items():
        _check(name, value)
    return told


def _check(name: str, value: object) -> None:
    """An attribute, of what a span can hold."""
    if not name or len(name) > NAME_MOST:
        raise BadRequest(
            f"attributes has a name of {len(name)} characters: 1 to {NAME_MOST}", "attributes"
        )
    asking.name(name, "a name in attributes")
    param = f"attributes.{name}"
    if isinstance(value, str):
        if len(value) > TEXT_MOST:
            raise BadRequest(f"{param} has {len(value)} characters: at most {TEXT_MOST}", param)
    elif isinstance(value, dict | list):
        raise BadRequest(f"{param} must be a text, a number, true, false or null", param)
    elif isinstance(value, int):
        if abs(value) > INTEGER_MOST:
            raise BadRequest(f"{param} does not fit into 64 bits", param)
    elif isinstance(value, float) and not math.isfinite(value):
        raise BadRequest(f"{param} is no finite number", param)
