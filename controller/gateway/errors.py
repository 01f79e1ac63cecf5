"""What a refused or failed caller is told, in OpenAI's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from policy.decisions import Settled

NS_PER_S = 1_000_000_000
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_SAID = {
    "queue_full": "too many requests are waiting",
    "deadline": "it cannot be answered within its deadline under the present load",
    "limit": "the caller's rate limit kept it waiting past its deadline",
    "limit_full": "too many requests of this caller are waiting",
    "no_replica": "no server can serve it at present",
    "too_large": "prompt and answer together fit no server of this model",
    "timeout": "the server took too long",
    "oom": "the server ran out of memory",
    "http_5xx": "the server failed",
    "stream_cut": "the server broke its answer off",
    "empty": "the server gave an empty answer",
    "malformed": "the server's answer could not be read",
    "silent": "the server fell silent",
    "replica_lost": "the server went away",
    "rejected": "the server rejected the request",
    "backpressure": "the servers are full",
    "controller_lost": "the gateway was restarted",
    "breaker": "its model is cut off, and there is nothing to give instead",
    "low_confidence": "its answer cannot be trusted, and there is nothing to give instead",
    "mismatch": "two runs of it disagree, and there is nothing to give instead",
    "draining": "the gateway is about to stop",
    "too_many": "too many requests are open",
}


def document(message: str, code: str, status: int, name: str = "", param: str = "") -> bytes:
    """The body of an error answer; ``code`` is the reason as one word for machines."""
    type_ = _TYPES.get(status, "upstream_error" if status >= 500 else "invalid_request_error")
    error: dict[str, object] = {
        "message": message, "type": type_, "param": param or None, "code": code,
    }  # fmt: skip
    whole: dict[str, object] = {"error": error}
    if name:
        whole["twinkeel"] = {"request_id": name}
    return msgspec.json.encode(whole)


def of(settled: Settled, name: str) -> bytes:
    """The same for an outcome that is no answer."""
    reason = settled.why.partition(" ")[0]  # a breaker's key stands behind the word
    said = _SAID.get(reason, reason.replace("_", " "))
    verb = "was not taken" if settled.outcome == "shed" else "failed"
    return document(f"request {name} {verb}: {said}", reason, settled.http_code, name)


def retry_after_s(settled: Settled) -> str:
    """Whole seconds for ``Retry-After``, at least 1."""
    return str(max(1, -(-settled.retry_after_ns // NS_PER_S)))
