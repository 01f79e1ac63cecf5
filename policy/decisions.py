"""What the policy decides: values that a driver carries out. Deciding does nothing by itself."""

from __future__ import annotations

from typing import Literal

import msgspec

Verification = Literal[
    "", "not_needed", "match", "mismatch", "skipped_budget", "skipped_stream"
]  # fmt: skip
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
    policy: str = ""
    """Whose decision it is, while a canary goes on: the first 12 digits of
    ``policy.parameters.policy_hash``; empty: only one policy rules."""
    candidates: int = 0
    """Logprobs to ask for, of so many likeliest candidates of each token; 0: no score is wanted."""


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
    confidence_permille: int = -1
    """-1: the answer came without logprobs."""
    verification: Verification = ""
    checkpoint: str = ""
    """The chain can be resumed after this step."""
    left_ns: int = -1
    """Of the chain's budget; -1: no chain."""
    step_ns: int = -1
    """What the client's own next step may take; -1: no chain, or no such step."""
    age_ns: int = 0
    """Of a cached answer."""
    policy: str = ""
    """As in ``Dispatch``."""


class Verify(msgspec.Struct, frozen=True, tag="verify", array_like=True, gc=False):
    """Run the answered request again on another replica and compare: ``Verified`` says how it
    went. The caller waits for it."""

    request: int
    replica: int


class SaveCheckpoint(msgspec.Struct, frozen=True, tag="save", array_like=True, gc=False):
    """Keep the chain's state after this step: ``CheckpointSaved`` or ``CheckpointFailed``."""

    request: int
    chain: str
    step: str
    left_ns: int = -1
    """Of the chain's budget; -1: not told."""


class Undo(msgspec.Struct, frozen=True, tag="undo", array_like=True, gc=False):
    """Forget what the chain saved after this checkpoint: these steps run again. Nothing answers."""

    request: int
    """Which resumed it."""
    user: str
    chain: str
    checkpoint: str


class Lease(msgspec.Struct, frozen=True, tag="lease", array_like=True, gc=False):
    """Ask the store that several controllers share for a share of a limit (``QuotaLeased``), or for
    a session (``SessionOwned``), for the first time or before what is held runs out."""

    kind: Literal["user", "model", "all", "session"]
    name: str
    per_s: int = 0
    """The whole limit, of all controllers together; 0: there is none. So for the next."""
    in_flight: int = 0
    used: int = 0
    """How much is in flight here now."""


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True, gc=False):
    """Give a session back: nothing of it is here any more. Nothing answers this."""

    session: str
    spent_ages_ns: tuple[int, ...] = ()
    """As in ``SessionOwned``."""


class LookUp(msgspec.Struct, frozen=True, tag="look_up", array_like=True, gc=False):
    """Look for a similar answer that is kept: ``LookedUp``."""

    request: int


class ReadProgress(msgspec.Struct, frozen=True, tag="read_progress", array_like=True, gc=False):
    """Say how far the replica has come: ``Progress``."""

    replica: int


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True, gc=False):
    """Start a standby, with this version of its model (empty: the one it has)."""

    replica: int
    version: str = ""


class Warm(msgspec.Struct, frozen=True, tag="warm", array_like=True, gc=False):
    """Send the replica its warm-up requests: ``Warmed``."""

    replica: int


class Stop(msgspec.Struct, frozen=True, tag="stop", array_like=True, gc=False):
    """Stop the replica; nothing is in flight there."""

    replica: int


RotationState = Literal["in", "ejected", "probing", "draining", "isolated"]


class Rotated(msgspec.Struct, frozen=True, tag="rotated", array_like=True, gc=False):
    """A replica's place in the rotation changed. ``probing``: one request at a time may try it;
    ``isolated``: its card is broken, or it is ``hung`` (``why``): whoever runs its process ends it.
    It comes back as a new ``ReplicaUp``; one that hung and was not ended is also tried again."""

    replica: int
    state: RotationState
    why: str
    for_ns: int = 0
    """Until it is tried again, where that is known."""


BreakerState = Literal["closed", "open", "half_open"]


class BreakerMoved(msgspec.Struct, frozen=True, tag="breaker", array_like=True, gc=False):
    """A circuit breaker changed its state, and the figures that caused it."""

    key: str
    state: BreakerState
    why: str
    bad: int = 0
    total: int = 0
    for_ns: int = 0


class Scaled(msgspec.Struct, frozen=True, tag="scaled", array_like=True, gc=False):
    """How many replicas ``pool`` (a model's name) should have: the scaling signal."""

    pool: str
    replicas: int
    why: str


class Alert(msgspec.Struct, frozen=True, tag="alert", array_like=True, gc=False):
    """Someone should know. Told once for a key until it has been quiet for a while."""

    key: str
    cause: str
    figures: tuple[tuple[str, int], ...] = ()
    action: str = ""
    """What was done about it."""


class Reset(msgspec.Struct, frozen=True, tag="reset", array_like=True, gc=False):
    """A policy switch gave these parts of the judgement up: their meaning has changed."""

    parts: tuple[str, ...]


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True, gc=False):
    """The event was illegal and changed nothing."""

    event: str
    why: str


Decision = (
    Dispatch | Abort | Settled | Refused | Verify | SaveCheckpoint | LookUp | ReadProgress
    | Start | Warm | Stop | Rotated | BreakerMoved | Scaled | Alert | Reset | Lease | Release
    | Undo
)  # fmt: skip
