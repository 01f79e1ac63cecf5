"""Is it an answer? What comes back with status 200 may still be a failure.

An empty or null answer, finish reason "abort", an error in the body, JSON that ends too early: vLLM
gives each of these with a 200.
"""

from __future__ import annotations

import asyncio
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
LIKELIEST_LEAST = -20.0
"""Of any token some candidate is likelier: a list with none is none of the likeliest."""
ROUNDING = 0.05
"""So much more than all of the probability may be listed."""
SLICE = 32
"""Tokens of an answer that are read in one go, while all others wait."""
LONG_BYTES = 256 * 1024
"""Going over more takes so long that others may go first."""
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
    logprobs: msgspec.Raw = msgspec.Raw(b"null")


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

    __slots__ = ("_candidates", "_chunk", "_close", "_count", "_sum", "_unread", "_worst")

    def __init__(self, candidates: int = 0) -> None:
        self._candidates = candidates
        self._chunk: list[list[float]] = []
        """Of tokens that are not summed up yet."""
        self._count = self._sum = self._worst = self._close = self._unread = 0

    def add(self, logprobs: Any) -> bool:
        """One choice's ``logprobs``, of a chat or of a completion; were there any?"""
        before = self._count + len(self._chunk) + self._unread
        for _, values in _tokens(logprobs):
            self.token(_sane(values))
        return self._count + len(self._chunk) + self._unread > before

    def token(self, listed: list[float]) -> None:
        """One token's; empty: they are none."""
        if not listed:
            self._unread += 1
            return
        self._chunk.append(listed)
        if len(self._chunk) == CHUNK:
            self._sum_up()

    def missed(self) -> None:
        """A part of the answer came without."""
        self._unread += 1

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

    def features(self, tokens: int = 0) -> Certainty:
        """Entropies and the share of close calls; each -1: there were no logprobs, or more than a
        tenth of the tokens (and more than one: the end has none at some servers) had none.

        Args:
            tokens: of the whole answer, as the server counts them; 0: not known.
        """
        self._sum_up()
        whole = max(tokens, self._count + (0 if tokens else self._unread))
        if not self._count or whole - self._count > max(1, whole // 10):
            return Certainty(-1, -1, -1)
        mean = (self._sum + self._count // 2) // self._count
        return Certainty(mean, self._worst, 1000 * self._close // self._count)


def _tokens(logprobs: Any) -> Iterator[tuple[str, Iterable[Any]]]:
    """Each token's string and its candidates' logprobs, of a chat or of a completion; what has
    another form is passed over."""
    if isinstance(logprobs, msgspec.Raw):
        logprobs = _apart(logprobs)
    if not isinstance(logprobs, dict):
        return
    content = _items(logprobs.get("content"))
    if content is not None:
        for each in content:
            token = _read(each)
            listed = token.get("top_logprobs") if isinstance(token, dict) else None
            if isinstance(listed, list):
                yield (
                    str(token.get("token", "")),
                    [each.get("logprob") for each in listed if isinstance(each, dict)],
                )
        return
    strings = _read(logprobs.get("tokens"))
    strings = strings if isinstance(strings, list) else []
    for at, each in enumerate(_items(logprobs.get("top_logprobs")) or ()):
        token = _read(each)
        if isinstance(token, dict):
            yield str(strings[at]) if at < len(strings) else "", token.values()


def _apart(raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    """A choice's logprobs with their parts unread; empty: they have no parts."""
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | None) or {}
    except (msgspec.DecodeError, RecursionError):
        return {}


def _items(part: Any) -> list[Any] | None:
    """A list's items unread, so that they can be read a few at a time; None: it is no list."""
    if not isinstance(part, msgspec.Raw):
        return part if isinstance(part, list) else None
    try:
        return msgspec.json.decode(part, type=list[msgspec.Raw] | None)
    except (msgspec.DecodeError, RecursionError):
        return None


def _read(part: Any) -> Any:
    """What is still unread; None: it cannot be."""
    if not isinstance(part, msgspec.Raw):
        return part
    try:
        return msgspec.json.decode(part)
    except (msgspec.DecodeError, RecursionError):
        return None


def _sane(values: Iterable[Any]) -> list[float]:
    """A token's logprobs; empty: they are none (a server may write logits there)."""
    listed = [at for at in values if isinstance(at, (int, float)) and -NEVER < at < NEVER]
    if not listed or not LIKELIEST_LEAST < max(listed) < ROUNDING:
        return []
    return listed if sum([exp(at) for at in listed]) < 1.0 + ROUNDING else []


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


async def measured(answer: Whole, candidates: int) -> tuple[Certainties, Said]:
    """How sure all choices are, and the first one, to be compared with another run's. A long answer
    is read in slices: nobody else waits for more than one of them."""
    certainties = Certainties(candidates)
    tokens: list[str] = []
    gaps: list[int] = []
    count = 0
    for index, choice in enumerate(answer.choices):
        apart = _apart(choice.logprobs)
        if memoryview(choice.logprobs).nbytes > LONG_BYTES:
            await asyncio.sleep(0)
        for token, values in _tokens(apart):
            listed = _sane(values)
            certainties.token(listed)
            if index == 0:
                tokens.append(token)
                gaps.append(_gap_permille(listed))
            count += 1
            if count % SLICE == 0:
                await asyncio.sleep(0)
    first = answer.choices[0] if answer.choices else _Choice()
    cut = first.finish_reason == "length"
    return certainties, Said(_spoken(first), tuple(tokens), tuple(gaps), cut)


def _gap_permille(listed: list[float]) -> int:
    likely = sorted(listed, reverse=True)[:2]
    return round(1000 * (_share(likely[0]) - _share(likely[1]))) if len(likely) == 2 else -1


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
