"""What the policy is told: frozen, tagged values, the same in the twin and live.

Every event is a fact about the world at the instant it is fed. There is no event per chunk of a
stream: drivers count. Strings such as ``sla`` or ``user`` are empty where the caller gave none;
integers such as ``max_tokens`` are 0 where they are not given.

On the wire events are arrays (``array_like``), so fields are only ever appended, together with a
new schema number of the decision log.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Endpoint = Literal["chat", "completions", "embeddings"]
ErrorKind = Literal[
    "timeout", "oom", "http_5xx", "stream_cut", "empty", "malformed", "silent",
    "replica_lost", "too_large", "rejected", "backpressure", "controller_lost",
]  # fmt: skip


class Arrived(msgspec.Struct, frozen=True, tag="arrived", array_like=True, gc=False):
    """A request reached the controller. Holds only what a gateway can know at that moment."""

    request: int
    """Id, unique in the log, rising with arrival."""
    model: str
    endpoint: Endpoint
    prompt_bytes: int
    max_tokens: int = 0
    sla: str = ""
    line: str = ""
    user: str = ""
    session: str = ""
    deadline_ns: int = 0
    """Time to first token the caller asks for, from now; 0: the class default."""
    messages: int = 1
    stream: bool = True
    prefix: tuple[int, ...] = ()
    """Fingerprints of the prompt's leading blocks of ``prefix_block_bytes`` bytes."""
    prefix_block_bytes: int = 0


class FirstToken(msgspec.Struct, frozen=True, tag="first", array_like=True, gc=False):
    """The first token of a request's answer came back from a replica."""

    request: int
    replica: int


class Finished(msgspec.Struct, frozen=True, tag="finished", array_like=True, gc=False):
    """A replica answered a request completely; token counts are the engine's ``usage``."""

    request: int
    replica: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class Failed(msgspec.Struct, frozen=True, tag="failed", array_like=True, gc=False):
    """A replica failed a request. ``rejected`` and ``too_large`` are the caller's fault (4xx)."""

    request: int
    replica: int
    kind: ErrorKind


class Cancelled(msgspec.Struct, frozen=True, tag="cancelled", array_like=True, gc=False):
    """The client of a request went away."""

    request: int


class Ticked(msgspec.Struct, frozen=True, tag="ticked", array_like=True, gc=False):
    """The deadline that the policy asked for has passed."""


class ReplicaUp(msgspec.Struct, frozen=True, tag="up", array_like=True, gc=False):
    """A replica can take work. Costs are ticks of 2**-10 ns (see ``policy.cost``)."""

    replica: int
    """Small integer, unique in the log; also the tie-break."""
    name: str
    models: tuple[str, ...]
    """Model names it serves; empty: any."""
    pooling: bool
    """Serves embeddings only."""
    kv_blocks: int
    block_tokens: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    cost: tuple[int, int, int, int, int, int]
    """decode_fixed, prefill_fixed, per_sequence, per_kv_token, per_prefill_token, per_quad."""
    active_params: int
    attention_flops_per_token_pair: int
    request_in_ns: int = 0
    prefill_free_tokens: int = 0
    """New tokens of a step that cost nothing while nothing decodes, and (next) while something
    does: they ride along with reading the weights."""
    mixed_free_tokens: int = 0


class ReplicaDown(msgspec.Struct, frozen=True, tag="down", array_like=True, gc=False):
    """A replica takes no more work; what it held is failed one by one."""

    replica: int
    reason: str


class Scraped(msgspec.Struct, frozen=True, tag="scraped", array_like=True, gc=False):
    """Metrics read from a replica, ``age_ns`` after the engine wrote them."""

    replica: int
    running: int
    waiting: int
    kv_used_permille: int
    preemptions: int
    age_ns: int


Event = (
    Arrived | FirstToken | Finished | Failed | Cancelled | Ticked | ReplicaUp | ReplicaDown
    | Scraped
)  # fmt: skip
