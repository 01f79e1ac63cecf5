"""What is sent to a server: the caller's bytes, and what the features and the policy add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from controller.config import Features
    from controller.gateway.asking import Asked
    from policy.decisions import Dispatch


def body(asked: Asked, features: Features, decision: Dispatch | None) -> bytes:
    """The request's body. What is only added is put in front, so the rest keeps its bytes."""
    document = asked.document
    added: dict[str, Any] = {}
    if asked.stream and features.usage and not asked.wants_usage:
        options = document.get("stream_options")
        added["stream_options"] = {
            **(options if isinstance(options, dict) else {}), "include_usage": True,
        }  # fmt: skip
    if features.confidence and asked.endpoint != "embeddings":
        added.update(_logprobs(asked, features.logprobs))
    if decision is not None:
        if decision.priority or "priority" in document:  # it is not the caller's to choose
            added["priority"] = decision.priority
        if decision.model:
            added["model"] = decision.model
    if not added:
        return asked.body
    if any(name in document for name in added):
        return msgspec.json.encode({**document, **added})
    head = msgspec.json.encode(added)[:-1]
    rest = asked.body.lstrip()[1:]
    return head + (b"," if document else b"") + rest


def wants_logprobs(asked: Asked) -> bool:
    """Whether the caller asked for logprobs itself, and so is to see them."""
    given = asked.document.get("logprobs")
    return given is not None and given is not False


def _logprobs(asked: Asked, candidates: int) -> dict[str, Any]:
    document = asked.document
    if asked.endpoint == "completions":
        return {} if wants_logprobs(asked) else {"logprobs": candidates}
    if document.get("logprobs") is True and document.get("top_logprobs"):
        return {}
    # A caller that wants logprobs without candidates sees more than it asked for.
    return {"logprobs": True, "top_logprobs": candidates}


def plain_body(asked: Asked) -> bytes:
    """The request for a second run, to compare the answers: never streamed, no extras."""
    document = {
        name: value
        for name, value in asked.document.items()
        if name not in ("stream", "stream_options", "priority")
    }
    return msgspec.json.encode(document) if len(document) < len(asked.document) else asked.body
