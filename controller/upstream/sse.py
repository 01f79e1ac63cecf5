"""Server-sent events as vLLM writes them, cut into whole events, and what each one says.

Only what the controller has to know is decoded; the bytes of an event are passed on as they came.
"""

from __future__ import annotations

from typing import Any

import msgspec

TEXT, FINISH, USAGE, DONE, ERROR, NOTHING, BROKEN = range(7)
"""What an event is: part of the answer; its last part; token counts; the end; an error; neither
(a role, a comment); not to be read."""


COUNT_MOST = 1 << 40


def bounded(count: int | None) -> int:
    """A number of tokens, whatever the server says."""
    return min(max(0, count or 0), COUNT_MOST)


class Usage(msgspec.Struct):
    """Token counts; vLLM gives cached tokens with ``--enable-prompt-tokens-details``."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: _Details | None = None

    @property
    def cached_tokens(self) -> int:
        details = self.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens or 0
        return min(max(0, cached), bounded(self.prompt_tokens))


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


class Metrics(msgspec.Struct):
    """vLLM's own times of a request, in ms; absent ones are None."""

    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    queue_time_ms: float | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    refusal: Any = None
    function_call: Any = None


class Choice(msgspec.Struct):
    """A part of one answer."""

    index: int = 0
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    """Read by those who want a score."""


class Event(msgspec.Struct):
    """One chunk of a streamed answer, as far as it matters here."""

    choices: list[Choice] = []
    usage: Usage | None = None
    metrics: Metrics | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Event).decode


class Splitter:
    """Cuts a stream of bytes into events, each with the blank line that ends it."""

    __slots__ = ("rest",)

    def __init__(self) -> None:
        self.rest = b""
        """The beginning of an event whose end has not come."""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now, in order."""
        if self.rest:
            data = self.rest + data
            self.rest = b""
        if b"\r" in data:
            return self._feed_any(data)
        end = data.rfind(b"\n\n")
        if end < 0:
            self.rest = data
            return []
        end += 2
        if end != len(data):
            self.rest = data[end:]
            data = data[:end]
        if data.count(b"\n\n") == 1:
            return [data]
        return [piece + b"\n\n" for piece in data[:-2].split(b"\n\n")]

    def _feed_any(self, data: bytes) -> list[bytes]:
        """The same where lines end in CRLF: the events keep their bytes."""
        events: list[bytes] = []
        start = at = 0
        while True:
            at = data.find(b"\n", at)
            if at < 0:
                break
            at += 1
            if data[at : at + 1] == b"\n":
                at += 1
            elif data[at : at + 2] == b"\r\n":
                at += 2
            else:
                continue
            events.append(data[start:at])
            start = at
        self.rest = data[start:]
        return events


def payload(event: bytes) -> bytes:
    """The event's data; empty for a comment or another field."""
    if event.startswith(b"data:"):
        body = event[5:]
        if b"\n" not in body.rstrip():
            return body.strip()
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines)


def read(event: bytes) -> tuple[int, Event | None]:
    """What an event is, and its content where it has any."""
    body = payload(event)
    if not body:
        return NOTHING, None
    if body == b"[DONE]":
        return DONE, None
    try:
        chunk = _decode(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError):
        return BROKEN, None
    if chunk.error is not None:
        return ERROR, chunk
    if not chunk.choices:
        return (USAGE if chunk.usage is not None else NOTHING), chunk
    kind = NOTHING
    for choice in chunk.choices:
        if choice.finish_reason:
            return FINISH, chunk
        if has_text(choice):
            kind = TEXT
    return kind, chunk


def says_something(chunk: Event) -> bool:
    """Whether any of its choices holds a part of the answer."""
    return any(map(has_text, chunk.choices))


def has_text(choice: Choice) -> bool:
    """Whether it holds a part of the answer."""
    delta = choice.delta
    if delta is None:
        return bool(choice.text)
    return bool(
        delta.content
        or delta.reasoning
        or delta.reasoning_content
        or delta.tool_calls
        or delta.refusal
        or delta.function_call
    )
