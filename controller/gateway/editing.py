"""What the features change in an answer's bytes. Everything else passes as it came."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

DONE = b"data: [DONE]\n\n"
SLICE = 64
"""Tokens that are edited in one go, while all others wait."""
LONG_BYTES = 256 * 1024
"""Going over more takes so long that others may go first."""
_decode = msgspec.json.Decoder().decode
_members = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None).decode
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_NULL = msgspec.Raw(b"null")


async def whole_with_logprobs(body: bytes, shown: int) -> bytes:
    """An answer with ``shown`` candidates a token, as a server gives them to one who asks for so
    many; below 0: ``null`` in place of all logprobs. A long one is edited in slices."""
    edited = body
    for edited in _edited(body, shown):
        if not edited:
            await asyncio.sleep(0)
    return edited


def event_with_logprobs(event: bytes, shown: int) -> bytes:
    """The same for an event of a stream."""
    if event.count(b'"logprobs"') == event.count(b'"logprobs":null'):
        return event
    lines = event.splitlines()
    body = b"\n".join([line[5:] for line in lines if line.startswith(b"data:")])
    *_, edited = _edited(body, shown)
    if edited == body:
        return event
    others = [line + b"\n" for line in lines if line and not line.startswith(b"data:")]
    return b"".join([*others, b"data: ", edited, b"\n\n"])


def _edited(body: bytes, shown: int) -> Iterator[bytes]:
    """Gives nothing where it may rest, and the edited body at last. What is not edited keeps its
    bytes, and is not read either."""
    document = _members(body)
    if len(body) > LONG_BYTES:
        yield b""
    choices = _choices(document.get("choices", _NULL)) or []
    found = False
    for choice in choices:
        logprobs = choice.get("logprobs", _NULL)
        if logprobs == _NULL:
            continue
        found = True
        yield b""
        if shown < 0:
            choice["logprobs"] = _NULL
            continue
        for choice["logprobs"] in _trimmed(logprobs, shown):
            yield b""
    if found:
        document["choices"] = msgspec.Raw(msgspec.json.encode(choices))
    yield msgspec.json.encode(document) if found else body


def _trimmed(logprobs: msgspec.Raw, shown: int) -> Iterator[msgspec.Raw]:
    """vLLM lists the token itself first, then the likeliest others: of a chat's so many in all, of
    a completion's the likeliest so many, and the token itself where it is none of them. The last
    that is given is it; what has another form stays as it is."""
    parts: dict[str, msgspec.Raw] = {}
    with suppress(msgspec.ValidationError):
        parts = _members(logprobs)
    if memoryview(logprobs).nbytes > LONG_BYTES:
        yield logprobs
    for name, cut in (("content", _token_with), ("top_logprobs", _likeliest)):
        listed: list[msgspec.Raw] = []
        with suppress(msgspec.ValidationError):
            listed = _items(parts.get(name, _NULL))
        for at, each in enumerate(listed):
            with suppress(msgspec.ValidationError):
                listed[at] = cut(each, shown)
            if at % SLICE == SLICE - 1:
                yield logprobs
        if listed:
            parts[name] = msgspec.Raw(msgspec.json.encode(listed))
    yield msgspec.Raw(msgspec.json.encode(parts)) if parts else logprobs


def _token_with(raw: msgspec.Raw, shown: int) -> msgspec.Raw:
    token = _members(raw)
    if "top_logprobs" not in token:
        return raw
    listed = _items(token["top_logprobs"])[:shown]
    token["top_logprobs"] = msgspec.Raw(msgspec.json.encode(listed))
    return msgspec.Raw(msgspec.json.encode(token))


def _likeliest(raw: msgspec.Raw, shown: int) -> msgspec.Raw:
    """The likeliest so many, and the token itself, which comes first."""
    entries = list(_members(raw).items())
    read = [_decode(at) for _, at in entries]
    known = [at for at in read if isinstance(at, int | float)]
    ahead = sum(at > known[0] for at in known)  # none where there is none
    return msgspec.Raw(msgspec.json.encode(dict(entries[: shown + (ahead >= shown)])))


def with_member(body: bytes, name: str, value: object) -> bytes:
    """A JSON object with one more member at its end; its other bytes stay as they are."""
    stem = body.rstrip()
    if not stem.endswith(b"}"):
        return body
    comma = b"" if stem[:-1].rstrip().endswith(b"{") else b","
    member = msgspec.json.encode(name) + b":" + msgspec.json.encode(value)
    return stem[:-1] + comma + member + b"}"


def event_with_member(event: bytes, name: str, value: object) -> bytes:
    """The same for an event of a stream."""
    stem = event.rstrip(b"\r\n")
    return with_member(stem, name, value) + event[len(stem) :]


def as_events(body: bytes, chat: bool, usage: bool) -> list[bytes]:
    """A whole answer as the events of a stream, for a caller that wanted one; ``usage``: with its
    token counts, too."""
    document = _decode(body)
    counts = document.pop("usage", None)
    choices = document.get("choices") or ()
    if chat:
        document["object"] = "chat.completion.chunk"
        for choice in choices:
            delta = choice.pop("message", None) or {}
            calls = delta.get("tool_calls")
            for index, call in enumerate(calls if isinstance(calls, list) else ()):
                if isinstance(call, dict):
                    call.setdefault("index", index)
            choice["delta"] = delta
    events = [document]
    if usage and counts is not None:
        events.append({**document, "choices": [], "usage": counts})
    return [*(b"data: " + msgspec.json.encode(each) + b"\n\n" for each in events), DONE]


def cut_off(name: str, model: str, chat: bool) -> list[bytes]:
    """The end of a stream that has none of its own: no more was to be had."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "length"}
    choice["delta" if chat else "text"] = {} if chat else ""
    event = {
        "id": name,
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [choice],
    }
    return [b"data: " + msgspec.json.encode(event) + b"\n\n", DONE]


def as_whole(payloads: list[bytes], chat: bool) -> bytes:
    """The first choice of a stream as an answer in one piece; ``payloads`` are its events' data."""
    whole: dict[str, Any] = {}
    text: list[str] = []
    calls: dict[str, dict[str, Any]] = {}
    finish: Any = None
    usage: Any = None
    for payload in payloads:
        if not payload.startswith(b"{"):
            continue
        document = _decode(payload)
        whole = whole or document
        usage = document.get("usage") or usage
        for choice in document.get("choices") or ():
            if choice.get("index", 0) == 0:
                delta = choice.get("delta") or {}
                text.append((delta.get("content") if chat else choice.get("text")) or "")
                _add_calls(calls, delta.get("tool_calls"))
                finish = choice.get("finish_reason") or finish
    said = "".join(text)
    choice = {"index": 0, "finish_reason": finish}
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if calls:
        message |= {"content": said or None, "tool_calls": list(calls.values())}
    choice |= {"message": message} if chat else {"text": said}
    whole |= {"choices": [choice], "usage": usage}
    if chat:
        whole["object"] = "chat.completion"
    return msgspec.json.encode(whole)


def _add_calls(calls: dict[str, dict[str, Any]], parts: Any) -> None:
    """Put the parts of tool calls together, as they come in a stream: by their index."""
    for part in parts if isinstance(parts, list) else ():
        if not isinstance(part, dict):
            continue
        own = part.get("function")
        own = own if isinstance(own, dict) else {}
        call = calls.setdefault(
            str(part.get("index", 0)),
            {"id": None, "type": "function", "function": {"arguments": ""}},
        )
        call["id"] = part.get("id") or call["id"]
        function = call["function"]
        function["name"] = own.get("name") or function.get("name")
        arguments = own.get("arguments")
        function["arguments"] += arguments if isinstance(arguments, str) else ""
