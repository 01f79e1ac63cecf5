"""What the features change in an answer's bytes. Everything else passes as it came."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
_decode = msgspec.json.Decoder().decode


def whole_without_logprobs(body: bytes) -> bytes:
    """An answer whose choices say ``null`` where the logprobs were."""
    document = _decode(body)
    return msgspec.json.encode(document) if _blanked(document) else body


def event_without_logprobs(event: bytes) -> bytes:
    """The same for an event of a stream."""
    if event.count(b'"logprobs"') == event.count(b'"logprobs":null'):
        return event
    document = _decode(event[event.index(b"{") :].strip())
    if not _blanked(document):
        return event
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _blanked(document: Any) -> bool:
    found = False
    for choice in document.get("choices") or ():
        if choice.get("logprobs") is not None:
            choice["logprobs"] = None
            found = True
    return found


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
