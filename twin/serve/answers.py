"""Answers and stream events in vLLM's shapes, put together from bytes made beforehand.

vLLM leaves out of a stream's events what was not set, and writes nulls into whole answers; so here.
"""

from __future__ import annotations

from array import array
from base64 import b64encode
from hashlib import shake_128
from math import sqrt
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from twin.serve.words import LOGPROBS, TEXTS, candidate, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

DONE = b"data: [DONE]\n\n"
_NS_PER_MS = 1e6


class Usage(NamedTuple):
    """Tokens of one request."""

    prompt: int
    completion: int
    cached: int

    def json(self) -> bytes:
        return (
            b'{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,'
            b'"prompt_tokens_details":{"cached_tokens":%d}}'
        ) % (self.prompt, self.prompt + self.completion, self.completion, self.cached)


class Times(NamedTuple):
    """The engine's times of one request, in ns on its clock; -1: it has not come to that."""

    queued: int
    scheduled: int
    first: int
    last: int

    def json(self, outputs: int) -> bytes:
        """As ``--enable-per-request-metrics`` gives them; null where a time is not known."""
        if self.first < 0 or self.last < 0:
            return b"null"
        decode_ns = self.last - self.first
        gaps = outputs - 1
        busy_ns = self.last - self.scheduled
        itl = b"%.4f" % (decode_ns / gaps / _NS_PER_MS) if gaps > 0 else b"null"
        rate = b"%.3f" % (outputs * 1e9 / busy_ns) if busy_ns > 0 else b"null"
        return (
            b'{"time_to_first_token_ms":%.4f,"generation_time_ms":%.4f,"queue_time_ms":%.4f,'
            b'"mean_itl_ms":%b,"tokens_per_second":%b}'
        ) % (
            (self.first - self.scheduled) / _NS_PER_MS,
            decode_ns / _NS_PER_MS,
            (self.scheduled - self.queued) / _NS_PER_MS,
            itl,
            rate,
        )


class Piece(NamedTuple):
    """Tokens in a row, ready to be written."""

    text: bytes
    """A JSON string with its quotes, or null."""
    logprobs: bytes = b"null"


class Shape(Protocol):
    """How one endpoint writes an answer."""

    def opening(self) -> bytes:
        """Events before the first token's."""

    def event(self, piece: Piece, finish: bytes) -> bytes:
        """``finish``: the reason as JSON, or null."""

    def usage_event(self, usage: bytes, metrics: bytes) -> bytes: ...

    def whole(self, piece: Piece, finish: bytes, usage: bytes, metrics: bytes) -> bytes: ...

    def logprobs(self, codes: bytes, rows: bytes, start: int, count: int) -> bytes:
        """Of the tokens ``codes``, ``count`` candidates each. ``start``: characters before."""


def escaped(text: str) -> bytes:
    """The inside of a JSON string."""
    return msgspec.json.encode(text)[1:-1]


class ChatShape:
    """/v1/chat/completions."""

    def __init__(self, id: str, created: int, model: str) -> None:
        self._named = b'{"id":"chatcmpl-%b","object":"chat.completion' % escaped(id)
        self._rest = b'","created":%d,"model":"%b","choices":[' % (created, escaped(model))
        self._head = b"data: " + self._named + b".chunk" + self._rest

    def opening(self) -> bytes:
        return (
            self._head + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,'
            b'"finish_reason":null}],"prompt_token_ids":null}\n\n'
        )

    def event(self, piece: Piece, finish: bytes) -> bytes:
        stop = b"" if finish == b"null" else b',"stop_reason":null'
        return b'%b{"index":0,"delta":{"content":%b},"logprobs":%b,"finish_reason":%b%b}]}\n\n' % (
            self._head, piece.text, piece.logprobs, finish, stop,
        )  # fmt: skip

    def usage_event(self, usage: bytes, metrics: bytes) -> bytes:
        return b'%b],"usage":%b,"metrics":%b}\n\n' % (self._head, usage, metrics)

    def whole(self, piece: Piece, finish: bytes, usage: bytes, metrics: bytes) -> bytes:
        return (
            b'%b%b{"index":0,"message":{"role":"assistant","content":%b,"refusal":null,'
            b'"annotations":null,"audio":null,"function_call":null,"tool_calls":[],'
            b'"reasoning":null},"logprobs":%b,"finish_reason":%b,"stop_reason":null,'
            b'"token_ids":null}],"service_tier":null,"system_fingerprint":null,"usage":%b,'
            b'"prompt_logprobs":null,"prompt_token_ids":null,"kv_transfer_params":null,'
            b'"metrics":%b}'
        ) % (self._named, self._rest, piece.text, piece.logprobs, finish, usage, metrics)

    def logprobs(self, codes: bytes, rows: bytes, start: int, count: int) -> bytes:
        entries = []
        for code, number in zip(codes, rows, strict=True):
            row = LOGPROBS[number]
            top = [_chat_entry(candidate(code, rank), row[rank]) + b"}" for rank in range(count)]
            own = _chat_entry(code, row[0])
            entries.append(own + b',"top_logprobs":[' + b",".join(top) + b"]}")
        return b'{"content":[' + b",".join(entries) + b"]}"


def _chat_entry(code: int, logprob: float) -> bytes:
    text = TEXTS[code]
    parts = b",".join([b"%d" % byte for byte in text])
    return b'{"token":"%b","logprob":%.6f,"bytes":[%b]' % (text, logprob, parts)


class CompletionShape:
    """/v1/completions."""

    def __init__(self, id: str, created: int, model: str) -> None:
        self._head = (
            b'{"id":"cmpl-%b","object":"text_completion","created":%d,"model":"%b","choices":['
        ) % (escaped(id), created, escaped(model))
        self._event_head = b"data: " + self._head

    def opening(self) -> bytes:
        return b""

    def event(self, piece: Piece, finish: bytes) -> bytes:
        return (
            b'%b{"index":0,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":null}]}\n\n'
        ) % (self._event_head, piece.text, piece.logprobs, finish)

    def usage_event(self, usage: bytes, metrics: bytes) -> bytes:
        return b'%b],"usage":%b,"metrics":%b}\n\n' % (self._event_head, usage, metrics)

    def whole(self, piece: Piece, finish: bytes, usage: bytes, metrics: bytes) -> bytes:
        return self.several([(piece, finish)], usage, metrics)

    def several(
        self, answers: Sequence[tuple[Piece, bytes]], usage: bytes, metrics: bytes = b"null"
    ) -> bytes:
        """A whole answer to as many prompts; each with its finish reason."""
        choices = [
            (
                b'{"index":%d,"text":%b,"logprobs":%b,"finish_reason":%b,"stop_reason":null,'
                b'"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null}'
            )
            % (index, piece.text, piece.logprobs, finish)
            for index, (piece, finish) in enumerate(answers)
        ]
        return (
            b'%b%b],"service_tier":null,"system_fingerprint":null,"usage":%b,'
            b'"kv_transfer_params":null,"metrics":%b}'
        ) % (self._head, b",".join(choices), usage, metrics)

    def logprobs(self, codes: bytes, rows: bytes, start: int, count: int) -> bytes:
        offsets, own, names, tops = [], [], [], []
        for code, number in zip(codes, rows, strict=True):
            row = LOGPROBS[number]
            offsets.append(b"%d" % start)
            start += len(TEXTS[code])
            own.append(b"%.6f" % row[0])
            names.append(b'"%b"' % TEXTS[code])
            pairs = [
                b'"%b":%.6f' % (TEXTS[candidate(code, rank)], row[rank])
                for rank in range(max(1, count))
            ]
            tops.append(b"{" + b",".join(pairs) + b"}")
        return (b'{"text_offset":[%b],"token_logprobs":[%b],"tokens":[%b],"top_logprobs":[%b]}') % (
            b",".join(offsets),
            b",".join(own),
            b",".join(names),
            b",".join(tops),
        )


def piece_of(shape: Shape, codes: bytes, rows: bytes, start: int, end: int, wanted: int) -> Piece:
    """Tokens ``start`` to ``end`` of an answer; ``wanted``: candidates, -1 for no logprobs."""
    part = codes[start:end]
    text = b'"' + text_of(part) + b'"'
    if wanted < 0:
        return Piece(text)
    before = len(text_of(codes[:start]))
    return Piece(text, shape.logprobs(part, rows[start:end], before, wanted))


# ---- embeddings ----


def embeddings(
    id: str,
    created: int,
    model: str,
    keys: Sequence[bytes],
    width: int,
    base64: bool,
    tokens: int,
) -> bytes:
    """The answer of /v1/embeddings: a vector for each key."""
    rows = []
    for index, key in enumerate(keys):
        vector = _vector(key, width)
        if base64:
            text = b'"' + b64encode(vector.tobytes()) + b'"'
        else:
            text = msgspec.json.encode(vector.tolist())
        rows.append(b'{"index":%d,"object":"embedding","embedding":%b}' % (index, text))
    return (
        b'{"id":"embd-%b","object":"list","created":%d,"model":"%b","data":[%b],'
        b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":0,'
        b'"prompt_tokens_details":null}}'
    ) % (escaped(id), created, escaped(model), b",".join(rows), tokens, tokens)


def _vector(key: bytes, width: int) -> array[float]:
    """Of length one; about equal in all directions."""
    drawn = [byte - 127.5 for byte in shake_128(key + b"vector").digest(width)]
    scale = 1 / sqrt(sum(value * value for value in drawn))
    return array("f", [value * scale for value in drawn])
