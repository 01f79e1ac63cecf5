"""What is sent to a server: the caller's bytes, and what the features and the policy add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from controller.call import AS_ASKED, AS_IT_CAME, NOTHING, Logprobs

if TYPE_CHECKING:
    from controller.config import Features
    from controller.gateway.asking import Asked
    from policy.decisions import Dispatch


def logprobs(asked: Asked, features: Features, decision: Dispatch | None) -> Logprobs:
    """What the policy's wish for a score makes of the caller's own for logprobs.

    Where that cannot be read, or would be answered by something else than candidates of an
    answer's tokens (those of the prompt, of beams, of a list of tokens), the request stays as it is
    and the answer has no score.
    """
    candidates = decision.candidates if decision is not None and features.confidence else 0
    document = asked.document
    if candidates <= 0 or asked.endpoint == "embeddings":
        return AS_ASKED
    if any(document.get(name) for name in ("use_beam_search", "logprob_token_ids", "echo")):
        return AS_ASKED
    chat = asked.endpoint == "chat"
    own = _own(document, chat)
    if own is None:
        return AS_ASKED
    if own >= candidates:
        return Logprobs({}, AS_IT_CAME, scored=True, candidates=own)
    added = {"logprobs": True, "top_logprobs": candidates} if chat else {"logprobs": candidates}
    return Logprobs(added, own, scored=True, candidates=candidates)


def _own(document: dict[str, Any], chat: bool) -> int | None:
    """The candidates that the caller itself asks for; None: what it asks for makes no sense."""
    given = document.get("logprobs")
    if chat:
        most = document.get("top_logprobs") or 0
        if type(most) is not int or most < 0 or (most and given is not True):
            return None
        return most if given is True else NOTHING if given is None or given is False else None
    if given is None:
        return NOTHING
    return given if type(given) is int and given >= 0 else None


def body(
    asked: Asked, features: Features, decision: Dispatch | None, wanted: Logprobs = AS_ASKED
) -> bytes:
    """The request's body. What is only added is put in front, so the rest keeps its bytes.

    Args:
        wanted: as ``logprobs`` gave it for the same request.
    """
    document = asked.document
    added: dict[str, Any] = {}
    if asked.stream and features.usage and not asked.wants_usage:
        options = document.get("stream_options")
        options = options if isinstance(options, dict) else {}
        added["stream_options"] = {**options, "include_usage": True}
        if options.get("continuous_usage_stats"):  # without the other it says nothing
            added["stream_options"]["continuous_usage_stats"] = False
    added.update(wanted.added)
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


def plain_body(asked: Asked, wanted: Logprobs = AS_ASKED) -> bytes:
    """The request for a second run, to compare the answers: never streamed, no extras but the
    logprobs of the first, so that it is drawn and batched as that was."""
    document = {
        name: value
        for name, value in asked.document.items()
        if name not in ("stream", "stream_options", "priority")
    }
    if len(document) == len(asked.document) and not wanted.added:
        return asked.body
    return msgspec.json.encode({**document, **wanted.added})


def greedy(asked: Asked) -> bool:
    """Whether the caller wants each token's likeliest candidate. A server has a temperature of its
    own for those who name none."""
    temperature = asked.document.get("temperature")
    return type(temperature) in (int, float) and temperature == 0
