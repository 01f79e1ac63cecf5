"""A step that is a model call: what is sent to the gateway, and what its answer means.

A generator that does no IO: it yields what to do, and is sent what came of it and when. So both
drivers ask in the same way. A step is recognised by its name, so it may be asked for as often as
need be: a gateway that has finished it answers from its checkpoint, and the model does not run
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from controller.chains.core import NO_TIME, NS_PER_MS, ChainError, ChainOver, StepFailed

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from controller.chains.core import Course, Step

ANSWER_BYTES_MOST = 16 * 1024 * 1024
TRIES_MOST = 8
PAUSE_NS, PAUSE_NS_MOST = 100_000_000, 1_000_000_000
CHAT = "/v1/chat/completions"


class Ask(NamedTuple):
    """Send this, and give up after ``left_ns``."""

    path: str
    headers: dict[str, str]
    body: bytes
    left_ns: int


class Wait(NamedTuple):
    """Do nothing for so long."""

    for_ns: int


class Reply(NamedTuple):
    """What came back."""

    status: int
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class Unreachable(NamedTuple):
    """Nothing came back."""

    why: str


@dataclass(slots=True)
class ModelCall:
    """A model call of one step."""

    path: str
    body: bytes
    headers: dict[str, str]
    """All but the deadline and what to resume from."""
    resume: str = ""
    """The gateway's checkpoint to resume from, told from the start."""
    goes_on: bool = False
    """The run resumed its chain: where the gateway says that the chain is over, it goes on there
    from what the gateway kept last."""
    request: str = field(default="", init=False)
    """The answer's ``x-request-id``."""


Doing = Ask | Wait
Came = tuple[int, Reply | Unreachable | None]


def ask(course: Course, step: Step, call: ModelCall) -> Generator[Doing, Came, None]:
    """Ask until there is an answer, and put it into the step.

    Raises:
        StepFailed: there is none, or none of a model.
        ChainOver: the time is over, here or at the gateway.
    """
    now_ns, tries, last = step.began_ns, 0, ""
    while True:
        left_ns = course.left_ns(now_ns)
        if left_ns == 0:
            raise ChainOver(f"step {step.name!r}: {NO_TIME}{last}")
        deadline_ns = min(left_ns, step.share_ns) if tries == 0 else left_ns
        headers = {
            **call.headers, "x-twinkeel-deadline-ms": str(max(1, deadline_ns // NS_PER_MS))
        }  # fmt: skip
        if call.resume:
            headers["x-twinkeel-resume"] = call.resume
        now_ns, came = yield Ask(call.path, headers, call.body, left_ns)
        tries += 1
        if isinstance(came, Unreachable):
            if course.left_ns(now_ns) == 0:
                raise ChainOver(f"step {step.name!r}: {NO_TIME}")
            pause_ns = min(PAUSE_NS << tries - 1, PAUSE_NS_MOST)
            error = StepFailed(f"step {step.name!r}: the gateway did not answer: {came.why}")
        else:
            assert came is not None
            if _over(course, now_ns, step, call, came):
                continue
            if came.status == 200:
                _take(step, call, came)
                return
            pause_ns = _retry_after_ns(came)
            said = _said(came.body)
            error = StepFailed(f"step {step.name!r}: {came.status}{said}", came.status, came.body)
        last = f"; the last try: {error}"
        if tries >= TRIES_MOST or not 0 < pause_ns < course.left_ns(now_ns):
            raise error
        now_ns, _ = yield Wait(pause_ns)


def _over(course: Course, now_ns: int, step: Step, call: ModelCall, reply: Reply) -> bool:
    """The gateway's budget for the chain is over; true: it is asked again, to go on there.

    Raises:
        ChainOver: it is, and the run did not resume the chain.
    """
    if reply.headers.get("x-twinkeel-degraded") != "chain_budget":
        left_ms = reply.headers.get("x-twinkeel-chain-left-ms", "")
        if left_ms.isascii() and left_ms.isdigit() and len(left_ms) < 12:
            course.told_left(now_ns, int(left_ms) * NS_PER_MS)
        return False
    call.resume = call.resume or reply.headers.get("x-twinkeel-checkpoint", "")
    if call.goes_on and call.resume:  # who has been told that it is over may resume
        call.goes_on = False
        return True
    raise ChainOver(
        f"step {step.name!r}: the chain's time was over at the gateway; see that its policy gives"
        " this line's chains as long as the definition here"
    )


def _take(step: Step, call: ModelCall, reply: Reply) -> None:
    degraded = reply.headers.get("x-twinkeel-degraded", "")
    if degraded == "template":
        raise StepFailed(
            f"step {step.name!r}: the gateway had no answer of a model, only a template",
            reply.status,
            reply.body,
        )
    try:
        step.value = msgspec.json.decode(reply.body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise StepFailed(
            f"step {step.name!r}: the answer is no JSON ({error})", reply.status, reply.body
        ) from error
    step.gateway_checkpoint = reply.headers.get("x-twinkeel-checkpoint", "")
    call.request = reply.headers.get("x-request-id", "")
    told = {
        "degraded": degraded,
        "confidence": reply.headers.get("x-twinkeel-confidence", ""),
        "verification": reply.headers.get("x-twinkeel-verification", ""),
        "tier": reply.headers.get("x-twinkeel-tier", ""),
        "request": call.request,
    }
    step.attributes.update({name: value for name, value in told.items() if value})


def _retry_after_ns(reply: Reply) -> int:
    """0: it is not to be tried again."""
    after_s = reply.headers.get("retry-after", "")
    if reply.status not in (429, 503) or not (after_s.isascii() and after_s.isdigit()):
        return 0
    return max(PAUSE_NS, min(int(after_s[:6]), 3600) * 1_000_000_000)


def _said(body: bytes) -> str:
    """The message of an error in OpenAI's form."""
    try:
        document: Any = msgspec.json.decode(body)
        return f": {document['error']['message'][:300]}"
    except (msgspec.DecodeError, TypeError, KeyError, RecursionError):
        return ""


def encode_body(step: str, body: Mapping[str, Any]) -> bytes:
    """The body of a model call.

    Raises:
        ChainError: it asks for a stream, or JSON cannot hold it.
    """
    if body.get("stream"):
        raise ChainError(
            f"step {step!r} asks for a stream: a step's answer is kept whole, so leave stream out"
        )
    try:
        return msgspec.json.encode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ChainError(f"the body of step {step!r} is nothing that JSON can hold: {error}") from (
            error
        )
