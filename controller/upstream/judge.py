"""Is it an answer? What comes back with status 200 may still be a failure.

An empty or null answer, finish reason "abort", an error in the body, JSON that ends too early: vLLM
gives each of these with a 200.
"""

from __future__ import annotations

import json
from contextlib import suppress
from math import exp
from typing import TYPE_CHECKING, Any

import msgspec

from controller.call import EngineTimes
from controller.upstream.sse import Metrics, Usage  # noqa: TC001 - msgspec reads them
from policy.signals import Certainty, Said, certainty

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.upstream import sse
    from policy.events import Endpoint, ErrorKind

NS_PER_MS = 1_000_000
MS_MOST = 1e9
NEVER = 1e6
"""Beyond any logprob: some servers write one as -9999."""
CHUNK = 256
"""Tokens whose candidates are kept at a time: an answer may have any number of them."""
TEXT_MOST = 64 * 1024
"""Characters of a stream that are looked at for a contradiction."""


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
    """Gathers the logprobs of an answer.

    Args:
        candidates: how many the server was asked for; 0: not known.
    """

    __slots__ = ("_candidates", "_chunk", "_close", "_count", "_sum", "_worst")

    def __init__(self, candidates: int = 0) -> None:
        self._candidates = candidates
        self._chunk: list[list[float]] = []
        """Of tokens that are not summed up yet."""
        self._count = self._sum = self._worst = self._close = 0

    def add(self, logprobs: Any) -> None:
        """One choice's ``logprobs``, of a chat or of a completion."""
        for _, values in _tokens(logprobs):
            listed = _sane(values)
            if listed:
                self._chunk.append(listed)
                if len(self._chunk) == CHUNK:
                    self._sum_up()

    def _sum_up(self) -> None:
        chunk = self._chunk
        found = certainty(chunk, candidates=self._candidates)
        if found is None:
            return
        self._chunk = []
        count = len(chunk)
        self._count += count
        self._sum += found.entropy_mean_millinats * count
        self._worst = max(self._worst, found.entropy_worst_millinats)
        self._close += -(-found.close_permille * count // 1000)  # up: exact below 1000 tokens

    def features(self) -> Certainty:
        """Entropies and the share of close calls; each -1: there were no logprobs."""
        self._sum_up()
        if not self._count:
            return Certainty(-1, -1, -1)
        mean = (self._sum + self._count // 2) // self._count
        return Certainty(mean, self._worst, 1000 * self._close // self._count)


def _tokens(logprobs: Any) -> Iterator[tuple[str, Iterable[Any]]]:
    """Each token's string and its candidates' logprobs, of a chat or of a completion; what has
    another form is passed over."""
    if not isinstance(logprobs, dict):
        return
    content = logprobs.get("content")
    if isinstance(content, list):
        for token in content:
            listed = token.get("top_logprobs") if isinstance(token, dict) else None
            if isinstance(listed, list):
                yield (
                    str(token.get("token", "")),
                    [each.get("logprob") for each in listed if isinstance(each, dict)],
                )
        return
    top, strings = logprobs.get("top_logprobs"), logprobs.get("tokens")
    if isinstance(top, list):
        strings = strings if isinstance(strings, list) else []
        for at, each in enumerate(top):
            if isinstance(each, dict):
                yield str(strings[at]) if at < len(strings) else "", each.values()


def _sane(values: Iterable[Any]) -> list[float]:
    return [at for at in values if isinstance(at, (int, float)) and -NEVER < at < NEVER]


class Text:
    """What the first choice of a stream says, up to a bound."""

    __slots__ = ("_left", "_parts")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._left = TEXT_MOST

    def add(self, choice: sse.Choice) -> None:
        if choice.index or self._left <= 0:
            return
        part = choice.text if choice.delta is None else choice.delta.content
        if part:
            self._parts.append(part[: self._left])
            self._left -= len(part)

    def so_far(self) -> str:
        return "".join(self._parts)


def said(answer: Whole) -> Said:
    """The first choice, to be compared with another run's."""
    choice = answer.choices[0] if answer.choices else _Choice()
    tokens: list[str] = []
    gaps: list[int] = []
    for token, values in _tokens(choice.logprobs):
        tokens.append(token)
        likely = sorted(_sane(values), reverse=True)[:2]
        known = len(likely) == 2
        gaps.append(round(1000 * (_share(likely[0]) - _share(likely[1]))) if known else -1)
    return Said(_spoken(choice), tuple(tokens), tuple(gaps), choice.finish_reason == "length")


def _share(logprob: float) -> float:
    return exp(min(logprob, 0.0))


def _spoken(choice: _Choice) -> str:
    """Its text; with calls of tools it is JSON, so that their arguments are compared as such."""
    message = choice.message
    if message is None:
        return choice.text or ""
    content = message.content if isinstance(message.content, str) else ""
    calls = message.tool_calls if isinstance(message.tool_calls, list) else []
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    called = [_called(each) for each in functions if isinstance(each, dict)]
    if called:
        return json.dumps({"content": content, "calls": called})
    reasoning = message.reasoning or message.reasoning_content
    return content or (reasoning if isinstance(reasoning, str) else "")


def _called(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # then it is compared as the text that it is
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}
