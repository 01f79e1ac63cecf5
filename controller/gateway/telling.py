"""Telling a caller how its request ended: an answer, something less, or why there is none.

Headers go out with the first part of an answer, so what fails before is told by a status. After
that an error is told inside the stream, and the stream does not end as if it were whole.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from controller.gateway import asking, editing, errors
from controller.gateway.answers import keeps
from controller.gateway.streams import VERSION, CallerGone, let_go, version_label
from controller.store.checkpoints import CheckpointsError
from controller.telemetry.timing import server_timing, timing_object
from policy.canary import HASH_DIGITS
from policy.parameters import policy_hash

if TYPE_CHECKING:
    from controller.call import Call
    from controller.driver import Driver
    from controller.gateway.answers import Answers
    from controller.store.chains import ChainStore
    from policy.decisions import Settled
    from policy.parameters import Parameters

JSON = "application/json"
POLICY = "x-twinkeel-policy"
SMALL_BYTES = 32 * 1024


class Teller:
    """Tells outcomes.

    Args:
        answers: good ones are kept here, for degraded callers.
        chains: keeps the answers of chains' steps.
    """

    def __init__(self, driver: Driver, answers: Answers, chains: ChainStore) -> None:
        self._driver = driver
        self._unread_s_most = driver.settings.limits.unread_s_most
        self._extras = driver.features.extras
        self._answers = answers
        self._chains = chains
        self._ruling = driver.parameters
        self._ruling_hash = short_hash(driver.parameters)

    async def tell(self, call: Call) -> web.StreamResponse:
        """Tell the caller of a settled request; the response, all of it sent.

        Raises:
            CallerGone: it does not take it.
        """
        settled = call.settled
        assert settled is not None
        if settled.outcome == "answered" or settled.outcome == "degraded":
            return await self._tell_answer(call, settled)
        if settled.outcome == "cancelled":
            raise CallerGone
        if call.committed:
            return await self._tell_error_inside(call, settled)
        if call.served_status and settled.why == "rejected":
            headers = self._headers(call, settled)
            return await self._send_whole(call, call.served_status, call.body, headers)
        headers = self._headers(call, settled)
        if settled.outcome == "shed" or settled.http_code in (429, 503):
            headers["Retry-After"] = errors.retry_after_s(settled)
        body = errors.of(settled, call.name)
        return await self._send_whole(call, settled.http_code, body, headers)

    async def _tell_answer(self, call: Call, settled: Settled) -> web.StreamResponse:
        if settled.why == "checkpoint":
            body = await self._stored(call, settled)
            if not body:  # it is not kept any more, and the caller must not take this for it
                settled = msgspec.structs.replace(settled, outcome="degraded", why="template")
                body = _template(call)
        else:
            body = self._body_of(call, settled)
        if call.response is None:
            whole = body
            if self._extras:
                whole = editing.with_member(body, "twinkeel", self._extra(call, settled))
            told = await self._send_whole(call, 200, whole, self._headers(call, settled))
            if settled.why == "":
                self._keep(call, settled, body)
            return told
        events = (
            call.tail
            if not body
            else editing.as_events(body, call.asked.endpoint == "chat", call.asked.wants_usage)
        )
        if not events:  # its time was over before it had said all
            events = editing.cut_off(call.name, call.asked.model, call.asked.endpoint == "chat")
        if not call.committed:
            call.response.headers.update(self._headers(call, settled))
        if self._extras:
            events = _with_extra(events, self._extra(call, settled))
        await self._driver.streams.end(call, b"".join(events))
        if call.raw and not body:
            self._keep(call, settled, b"".join([*call.raw, *call.tail]))
        return call.response

    def _body_of(self, call: Call, settled: Settled) -> bytes:
        """What is delivered in one piece; empty: the stream's own end."""
        if settled.why == "cached":
            return call.body
        if settled.why == "template" or not (call.body or call.tail):
            return b"" if call.events_sent else _template(call)
        return call.body

    async def _stored(self, call: Call, settled: Settled) -> bytes:
        """The answer that this step of the chain had before; empty: it is not there any more."""
        try:
            stored = await self._chains.load(settled.checkpoint, call.asked.user)
        except CheckpointsError as error:
            self._driver.trouble("checkpoint", str(error))
            return b""
        return b"" if stored is None else stored.answer

    async def _tell_error_inside(self, call: Call, settled: Settled) -> web.StreamResponse:
        """The stream has begun: an error event, and no ``[DONE]``."""
        assert call.response is not None
        event = b"data: " + errors.of(settled, call.name) + b"\n\n"
        await self._driver.streams.end(call, event)
        return call.response

    async def _send_whole(
        self, call: Call, status: int, body: bytes, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.Response(body=body, status=status, headers=headers, content_type=JSON)
        try:
            if len(body) < SMALL_BYTES:  # it fits into the socket's buffer: nothing is waited for
                await response.prepare(call.web)
                await response.write_eof()
                return response
            async with asyncio.timeout(self._unread_s_most):
                await response.prepare(call.web)
                await response.write_eof()
        except (ConnectionError, RuntimeError):
            raise CallerGone from None
        except TimeoutError:
            let_go(call)
        return response

    def _headers(self, call: Call, settled: Settled) -> dict[str, str]:
        headers = {
            "x-request-id": call.name,
            "x-twinkeel-request": str(call.request),
            "x-twinkeel-outcome": settled.outcome,
            POLICY: self._policy(call, settled),
        }
        if settled.tier:
            headers["x-twinkeel-tier"] = settled.tier
        if call.trace:
            headers["traceparent"] = call.trace
        version = _version(call, settled)
        if version:
            headers[VERSION] = version
        if settled.outcome == "degraded":
            headers["x-twinkeel-degraded"] = settled.why
            if settled.why == "cached":
                headers["x-twinkeel-age-s"] = f"{settled.age_ns / 1e9:.3f}"
                headers["x-twinkeel-similarity"] = f"{call.similarity:.3f}"
        if _is_scored(settled):
            headers["x-twinkeel-confidence"] = f"{settled.confidence_permille / 1000:.3f}"
        if settled.verification:
            headers["x-twinkeel-verification"] = settled.verification
        if settled.checkpoint:
            headers["x-twinkeel-checkpoint"] = settled.checkpoint
        if settled.left_ns >= 0:
            headers["x-twinkeel-chain-left-ms"] = str(settled.left_ns // 1_000_000)
        if call.response is None:
            call.settled_ns = self._driver.now_ns()
            headers["Server-Timing"] = server_timing(call.hops())
        return headers

    def _policy(self, call: Call, settled: Settled) -> str:
        """Who decided: the policy that sent it, else the one that would not, else what rules."""
        if self._driver.parameters is not self._ruling:
            self._ruling = self._driver.parameters
            self._ruling_hash = short_hash(self._ruling)
        return call.policy or settled.policy or self._ruling_hash

    def _extra(self, call: Call, settled: Settled) -> dict[str, Any]:
        """The ``twinkeel`` object of an answer."""
        extra: dict[str, Any] = {
            "request_id": call.name, "tier": settled.tier or call.tier,
            "policy": self._policy(call, settled),
        }  # fmt: skip
        version = _version(call, settled)
        if version:
            extra["model_version"] = version
        if _is_scored(settled):
            extra["confidence_score"] = settled.confidence_permille / 1000
        if settled.verification:
            extra["verification_status"] = settled.verification
        if settled.outcome == "degraded":
            extra["degraded"] = settled.why
            if settled.why == "cached":
                extra["age_s"] = settled.age_ns / 1e9
                extra["similarity"] = round(call.similarity, 3)
        if settled.checkpoint:
            extra["checkpoint_id"] = settled.checkpoint
        if call.response is not None:
            call.settled_ns = self._driver.now_ns()
            extra["timing"] = timing_object(call.hops())
        return extra

    def _keep(self, call: Call, settled: Settled, body: bytes) -> None:
        """For callers that will have to be content with it."""
        if worth_keeping(self._driver.parameters, settled):
            self._answers.keep(call.asked, body, settled.confidence_permille, call.version)


def short_hash(parameters: Parameters) -> str:
    """A policy's hash, as decisions and answers carry it."""
    return policy_hash(parameters)[:HASH_DIGITS]


def worth_keeping(parameters: Parameters, settled: Settled) -> bool:
    """An answer that somebody may get later: no lesser one, and none that was in doubt."""
    if settled.outcome != "answered" or settled.why or not keeps(parameters):
        return False
    sure = settled.confidence_permille >= parameters.confidence.verify_below_permille
    return settled.confidence_permille < 0 or sure or settled.verification == "match"


def _is_scored(settled: Settled) -> bool:
    """Whether the score is that of what its caller gets: not of what a template is given for."""
    return settled.confidence_permille >= 0 and settled.why != "template"


def _version(call: Call, settled: Settled) -> str:
    """Of the model that made what its caller gets; empty: none did, or it is not known which."""
    if settled.outcome not in ("answered", "degraded") or settled.why in ("template", "checkpoint"):
        return ""
    made = settled.why == "cached" or call.body or call.tail or call.events_sent
    return version_label(call.version) if made else ""


def _with_extra(events: list[bytes], extra: dict[str, Any]) -> list[bytes]:
    """The ``twinkeel`` object goes into the last event that holds an object."""
    for at in range(len(events) - 1, -1, -1):
        if b"{" in events[at]:
            edited = editing.event_with_member(events[at], "twinkeel", extra)
            return [*events[:at], edited, *events[at + 1 :]]
    return events


def _template(call: Call) -> bytes:
    """The answer when there is none: it says so, in the shape that was asked for."""
    asked = call.asked
    said = (
        f"The service has no answer of its own for request {call.name} at present."
        " Please try again later."
    )
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    if asked.endpoint == "embeddings":
        return msgspec.json.encode(
            {"object": "list", "data": [], "model": asked.model, "usage": usage}
        )
    if asking.wants_json(asked):
        told = {"error": "no_answer", "message": said, "request_id": call.name}
        said = msgspec.json.encode(told).decode()
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if asked.endpoint == "chat":
        choice["message"] = {"role": "assistant", "content": said}
    else:
        choice["text"] = said
    return msgspec.json.encode(
        {
            "id": call.name,
            "object": "chat.completion" if asked.endpoint == "chat" else "text_completion",
            "created": 0,
            "model": asked.model,
            "choices": [choice],
            "usage": usage,
        }
    )
