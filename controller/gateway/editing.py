"""What the features change in an answer's bytes. Everything else passes as it came."""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"data: [DONE]\n\n"
_decode = msgspec.json.Decoder().decode


def whole_with_logprobs(body: bytes, shown: int) -> bytes:
    """An answer with ``shown`` candidates a token, as a server gives them to one who asks for so
    many; below 0: ``null`` in place of all logprobs."""
    document = _decode(body)
    return msgspec.json.encode(document) if _trimmed(document, shown) else body


def event_with_logprobs(event: bytes, shown: int) -> bytes:
    """The same for an event of a stream."""
    if event.count(b'"logprobs"') == event.count(b'"logprobs":null'):
        return event
    document = _decode(event[event.index(b"{") :].strip())
    if not _trimmed(document, shown):
        return event
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


def _trimmed(document: Any, shown: int) -> bool:
    found = False
    for choice in document.get("choices") or ():
        logprobs = choice.get("logprobs")
        if logprobs is None:
            continue
        found = True
        if shown < 0:
            choice["logprobs"] = None
        elif isinstance(logprobs, dict):
            _trim(logprobs, shown)
    return found


def _trim(logprobs: dict[str, Any], shown: int) -> None:
    """vLLM lists the token itself first, then the likeliest others: of a chat's so many in all, of
    a completion's the likeliest so many, and the token itself where it is none of them."""
    content, top = logprobs.get("content"), logprobs.get("top_logprobs")
    for token in content if isinstance(content, list) else ():
        listed = token.get("top_logprobs") if isinstance(token, dict) else None
        if isinstance(listed, list):
            token["top_logprobs"] = listed[:shown]
    if isinstance(top, list):
        logprobs["top_logprobs"] = [
            _likeliest(each, shown) if isinstance(each, dict) else each for each in top
        ]


def _likeliest(top: dict[str, Any], shown: int) -> dict[str, Any]:
    """The likeliest so many, and the token itself, which comes first."""
    entries = list(top.items())
    known = [at for _, at in entries if isinstance(at, int | float)]
    ahead = sum(at > known[0] for at in known)  # none where there is none
    return dict(entries[: shown + (ahead >= shown)])


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
