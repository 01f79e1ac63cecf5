"""How a request that was not answered is told so: HTTP codes and outcomes by cause."""

from __future__ import annotations

from policy.decisions import Settled

FAILURE_HTTP = {
    "timeout": 504,
    "oom": 503,
    "http_5xx": 502,
    "stream_cut": 502,
    "empty": 502,
    "malformed": 502,
    "silent": 504,
    "replica_lost": 503,
    "too_large": 400,
    "rejected": 400,
    "backpressure": 429,
    "controller_lost": 503,
}
CALLERS_FAULT = frozenset({"too_large", "rejected"})
MAYBE_RUNNING = frozenset({"timeout", "silent"})  # the replica may still be at work on it


def failed(request: int, kind: str, tier: str = "", retry_after_ns: int = 0) -> Settled:
    """A failure of ``kind``, as the caller hears of it."""
    return Settled(request, "failed", tier, kind, FAILURE_HTTP[kind], retry_after_ns)


def unserved(request: int, tier: str, retry_after_ns: int) -> Settled:
    """Nothing can serve it: 503, where 429 would say that others are served before it."""
    return Settled(request, "shed", tier, "no_replica", 503, retry_after_ns)


def too_large(request: int, tier: str = "") -> Settled:
    """It fits no replica that serves its model, however long it waits."""
    return Settled(request, "failed", tier, "too_large", 400)
