"""What the policy decides: values that a driver carries out. Deciding does nothing by itself."""

from __future__ import annotations

from typing import Literal

import msgspec

Outcome = Literal["answered", "degraded", "shed", "failed", "cancelled"]


class Dispatch(msgspec.Struct, frozen=True, tag="dispatch", array_like=True, gc=False):
    """Send the request to the replica now."""

    request: int
    replica: int
    tier: str
    priority: int = 0
    """vLLM's priority: lower runs earlier."""
    model: str = ""
    """The model to ask for instead of the caller's; empty: the caller's."""


class Abort(msgspec.Struct, frozen=True, tag="abort", array_like=True, gc=False):
    """Stop the request's work on the replica."""

    request: int
    replica: int


class Settled(msgspec.Struct, frozen=True, tag="settled", array_like=True, gc=False):
    """The one outcome of a request. ``why`` is a shed's reason, a failure's kind, or how it was
    degraded; ``http_code`` and ``retry_after_ns`` are what a refused caller is told."""

    request: int
    outcome: Outcome
    tier: str = ""
    why: str = ""
    http_code: int = 200
    retry_after_ns: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True, gc=False):
    """The event was illegal and changed nothing."""

    event: str
    why: str


Decision = Dispatch | Abort | Settled | Refused
