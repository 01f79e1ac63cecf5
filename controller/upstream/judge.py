"""Is it an answer? What comes back with status 200 may still be a failure.

An empty or null answer, finish reason "abort", an error in the body, JSON that ends too early: vLLM
gives each of these with a 200.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from controller.call import EngineTimes
from controller.upstream.sse import Metrics, Usage  # noqa: TC001 - msgspec reads them
from policy.signals import certainty

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policy.events import Endpoint, ErrorKind

NS_PER_MS = 1_000_000
MS_MOST = 1e9
NEVER = 1e6
"""Beyond any logprob: some servers write one as -9999."""


class _Message(msgspec.Struct):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    refusal: Any = None
    function_call: Any = None
    audio: Any = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Any = None


class _Embedding(msgspec.Struct):
    embedding: msgspec.Raw = msgspec.Raw(b"")


class Whole(msgspec.Struct):
    """An answer that came in one piece, as far as it matters here."""

    choices: list[_Choice] = []
    data: list[_Embedding] = []
    usage: Usage | None = None
    metrics: Metrics | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Whole).decode


def whole(body: bytes, endpoint: Endpoint) -> tuple[ErrorKind | None, Whole | None]:
    """What is wrong with an answer (None: nothing), and what it says."""
    if not body.strip():
        return "empty", None
    try:
        answer = _decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return "malformed", None
    if answer.error is not None:
        return of_error(answer.error), answer
    if endpoint == "embeddings":
        filled = answer.data and all(len(bytes(each.embedding)) > 2 for each in answer.data)
        return (None if filled else "empty"), answer
    if not answer.choices:
        return "empty", answer
    for choice in answer.choices:
        if not choice.finish_reason:
            return "malformed", answer
        if choice.finish_reason == "abort":
            return "stream_cut", answer
        if choice.finish_reason != "length" and not _has_content(choice):
            return "empty", answer
    return None, answer


def _has_content(choice: _Choice) -> bool:
    message = choice.message
    if message is None:
        return bool(choice.text)
    return bool(
        message.content
        or message.tool_calls
        or message.reasoning
        or message.reasoning_content
        or message.refusal
        or message.function_call
        or message.audio
    )


def text_of(answer: Whole) -> str:
    """The text of its first choice."""
    choice = answer.choices[0]
    if choice.message is None:
        return choice.text or ""
    content = choice.message.content
    return content if isinstance(content, str) else ""


def of_status(status: int, body: bytes) -> ErrorKind | None:
    """What an HTTP status other than 200 means; None: the answer is one."""
    if status < 300:
        return None
    if status in (429, 503):
        return "backpressure"
    if status < 400:
        return "malformed"  # nobody redirects an API call
    if status < 500:
        return "rejected"
    return "oom" if _out_of_memory(body) else "http_5xx"


def of_error(error: Any) -> ErrorKind:
    """What an error inside an answer means."""
    code = error.get("code") if isinstance(error, dict) else None
    if code in (429, 503):
        return "backpressure"
    if isinstance(code, int) and 400 <= code < 500:
        return "rejected"
    return "oom" if _out_of_memory(str(error).encode()) else "http_5xx"


def _out_of_memory(body: bytes) -> bool:
    lower = body[:4096].lower()
    return b"out of memory" in lower or b"outofmemory" in lower


def engine_times(metrics: Metrics | None) -> EngineTimes | None:
    """vLLM's own times, where it gave all of them."""
    if metrics is None:
        return None
    parts = (metrics.queue_time_ms, metrics.time_to_first_token_ms, metrics.generation_time_ms)
    known = [round(part * NS_PER_MS) for part in parts if part is not None and 0 <= part < MS_MOST]
    return EngineTimes(*known) if len(known) == len(parts) else None


class Certainties:
    """Gathers the logprobs of an answer."""

    __slots__ = ("tokens",)

    def __init__(self) -> None:
        self.tokens: list[list[float]] = []

    def add(self, logprobs: Any) -> None:
        """One choice's ``logprobs``, of a chat or of a completion."""
        if not isinstance(logprobs, dict):
            return
        content = logprobs.get("content")
        if isinstance(content, list):
            for token in content:
                listed = token.get("top_logprobs") if isinstance(token, dict) else None
                if isinstance(listed, list):
                    self._take(each.get("logprob") for each in listed if isinstance(each, dict))
            return
        top = logprobs.get("top_logprobs")
        if isinstance(top, list):
            for each in top:
                if isinstance(each, dict):
                    self._take(each.values())

    def _take(self, values: Iterable[Any]) -> None:
        self.tokens.append(
            [at for at in values if isinstance(at, (int, float)) and -NEVER < at < NEVER]
        )

    def features(self) -> tuple[int, int, int]:
        """Mean and worst entropy in millinats, and the share of close calls; -1: no logprobs."""
        return certainty(self.tokens) or (-1, -1, -1)
