"""Is an answer what a caller can use? Judged as strictly as a good client library would."""

from __future__ import annotations

import msgspec

GOOD_ENDS = frozenset({"stop", "length", "tool_calls"})


class _Words(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Words | None = None
    delta: _Words | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Ours(msgspec.Struct):
    degraded: bool | str | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] = []
    error: object = None
    twinkeel: _Ours | None = None


_DECODER = msgspec.json.Decoder(_Body)


def _words(choices: list[_Choice]) -> tuple[str, str]:
    """Text and finish reason of the first choice; empty where there is none."""
    if not choices:
        return "", ""
    choice = choices[0]
    said = choice.message or choice.delta
    text = said.content if said is not None else choice.text
    return text or "", choice.finish_reason or ""


def _verdict(text: str, end: str, degraded: bool) -> str:
    if end == "abort":
        return "abort"
    if not text:
        return "empty"
    if end not in GOOD_ENDS:
        return "no_end"
    return "degraded" if degraded else "ok"


def _degraded(body: _Body) -> bool:
    return body.twinkeel is not None and bool(body.twinkeel.degraded)


def judge_body(data: bytes) -> str:
    """``ok``, ``degraded``, ``empty``, ``abort``, ``no_end``, ``malformed``, ``error_body``."""
    if not data:
        return "empty"
    try:
        body = _DECODER.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "malformed"
    if body.error is not None:
        return "error_body"
    return _verdict(*_words(body.choices), _degraded(body))


def judge_stream(data: bytes) -> str:
    """The same for the events of a stream that ended properly as far as HTTP goes, and
    ``error_event``."""
    texts = []
    end = ""
    done = degraded = False
    *events, rest = data.split(b"\n\n")
    if rest:
        return "malformed"
    for event in events:
        for line in event.split(b"\n"):
            if not line.startswith(b"data:"):
                continue
            payload = line[5:].strip()
            if payload == b"[DONE]":
                done = True
                continue
            try:
                body = _DECODER.decode(payload)
            except (msgspec.DecodeError, UnicodeDecodeError):
                return "malformed"
            if body.error is not None:
                return "error_event"
            degraded = degraded or _degraded(body)
            text, reason = _words(body.choices)
            texts.append(text)
            end = reason or end
    verdict = _verdict("".join(texts), end, degraded)
    return "no_end" if verdict in ("ok", "degraded") and not done else verdict


def tells_error(data: bytes) -> bool:
    """Whether a stream that was cut off said that something is wrong before."""
    whole = data[: data.rfind(b"\n\n") + 2] if b"\n\n" in data else b""
    return judge_stream(whole) == "error_event"
