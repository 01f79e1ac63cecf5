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
    chain: str = ""
    """Id of the agent chain it is a step of."""
    step: str = ""
    """Which step, by name: also what makes a second run of it recognisable."""
    resume: str = ""
    """Checkpoint after which the chain goes on, as an earlier answer gave it."""


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
    entropy_mean_millinats: int = -1
    """Of the answer's tokens; -1: the answer came without logprobs."""
    entropy_worst_millinats: int = -1
    close_permille: int = -1
    """Share of tokens whose two likeliest candidates lie within 0.03 of each other."""
    contradiction: bool = False
    """The answer turns something the prompt forbids into something allowed, or the reverse."""


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
    version: str = ""
    """Of the model, as the engine says it loaded it."""
    domain: str = ""
    """What fails together: a host, a card, or one MIG slice of it. Empty: the replica alone."""
    labels: tuple[str, ...] = ()
    """For affinity, such as ``vllm=0.32``."""
    closeness_permille: int = 1000
    """How near its parts are (NVLink, PCIe switch, CPU socket); 1000: as near as can be."""
    memory_mb: int = 0
    """Of its card or slice; 0: unknown."""


class ReplicaDown(msgspec.Struct, frozen=True, tag="down", array_like=True, gc=False):
    """A replica takes no more work; what it held is failed one by one. Of a standby, or one that is
    starting: it cannot be started any more, until it is a ``Standby`` again."""

    replica: int
    reason: str
    """Begins with ``gpu`` where its card is to blame."""


class Scraped(msgspec.Struct, frozen=True, tag="scraped", array_like=True, gc=False):
    """Metrics read from a replica, ``age_ns`` after the engine wrote them."""

    replica: int
    running: int
    waiting: int
    kv_used_permille: int
    preemptions: int
    age_ns: int


class Standby(msgspec.Struct, frozen=True, tag="standby", array_like=True, gc=False):
    """A replica that is not running can be started; ``Start`` asks for it."""

    replica: int
    name: str
    models: tuple[str, ...]
    start_ns: int
    """From ``Start`` to ``ReplicaUp``: weights, graph capture, warm-up."""
    version: str = ""
    domain: str = ""
    pooling: bool = False


class Progress(msgspec.Struct, frozen=True, tag="progress", array_like=True, gc=False):
    """What a replica has done so far: the answer to ``ReadProgress``."""

    replica: int
    output_tokens: int
    """Seen from it since it came up, over all streams."""


class StepsRead(msgspec.Struct, frozen=True, tag="steps", array_like=True, gc=False):
    """A replica's own record of its engine's steps was read: what those since the last reading
    took, and what the replica's profile says that they should have. Only steps of which both are
    known are in it."""

    replica: int
    steps: int
    measured_us: int
    """From each step's end to the next one's, while the engine was busy: the host's part is in."""
    predicted_us: int


class GpuRead(msgspec.Struct, frozen=True, tag="gpu", array_like=True, gc=False):
    """Counters of a replica's card, ``age_ns`` after they were read."""

    replica: int
    free_mb: int
    pcie_permille: int
    """Of the link's bandwidth in use."""
    memory_permille: int
    """Memory utilisation, as NVML gives it."""
    heat_permille: int
    """Where its temperature lies between idle (0) and the slow-down threshold (1000)."""
    power_permille: int
    """Of the power limit."""
    throttled: bool
    """The card has lowered its clocks for heat or power."""
    age_ns: int


GpuErrorKind = Literal["ecc_uncorrectable", "ecc_correctable", "xid_fatal", "xid_minor"]


class GpuFault(msgspec.Struct, frozen=True, tag="gpu_fault", array_like=True, gc=False):
    """A replica's card reported an error."""

    replica: int
    kind: GpuErrorKind
    code: int = 0
    """The Xid."""


class Verified(msgspec.Struct, frozen=True, tag="verified", array_like=True, gc=False):
    """The second run that ``Verify`` asked for is over, and its answer compared."""

    request: int
    replica: int
    verdict: Literal["match", "mismatch", "failed"]
    output_tokens: int = 0
    entropy_mean_millinats: int = -1
    """Of the second answer, as in ``Finished``; so for the next."""
    entropy_worst_millinats: int = -1
    close_permille: int = -1
    contradiction: bool = False


class CheckpointSaved(msgspec.Struct, frozen=True, tag="saved", array_like=True, gc=False):
    """The chain's state after this request is safe under the id ``checkpoint``."""

    request: int
    checkpoint: str


class CheckpointFailed(msgspec.Struct, frozen=True, tag="save_failed", array_like=True, gc=False):
    """The store did not take the chain's state."""

    request: int


class LookedUp(msgspec.Struct, frozen=True, tag="looked_up", array_like=True, gc=False):
    """The answer to ``LookUp``: whether a similar answer of the same tenant and model is kept."""

    request: int
    found: bool
    age_ns: int = 0
    confidence_permille: int = -1


class ChainFound(msgspec.Struct, frozen=True, tag="chain_found", array_like=True, gc=False):
    """What the store has of a chain that may have been begun elsewhere, or before the controller
    was killed: told before the first of its steps arrives here. Where the chain is known, steps
    that are not are added, but for those that run here now: what is safe in the store is done."""

    user: str
    chain: str
    line: str
    done: tuple[tuple[str, str], ...]
    """Steps that are safe in the store, in order, each with its checkpoint."""
    left_ns: int
    """Of its budget; 0: it is over, and may be resumed. A known chain's is not changed."""


class StoreChanged(msgspec.Struct, frozen=True, tag="store", array_like=True, gc=False):
    """How this controller stands to the store that several share."""

    state: Literal["alone", "shared", "lost"]
    """``alone`` (as it begins): every limit is all its own. ``shared``: of limits only what is
    leased may be spent. ``lost``: it goes on with its last shares, and takes over no sessions."""
    controllers: int = 1
    """How many share it, this one among them, as far as it is known."""


class QuotaLeased(msgspec.Struct, frozen=True, tag="quota", array_like=True, gc=False):
    """This controller's share of a limit: the answer to ``Lease``."""

    kind: Literal["user", "model", "all"]
    name: str
    """Of the user or model; empty for ``all``."""
    per_s: int
    """Requests that may go on in any second; -1: the limit is none, or not shared."""
    in_flight: int
    """Requests that may be in flight; -1: the limit is none, or not shared."""
    for_ns: int
    """Until it has run out: then nothing more may go on, but with the store lost."""


class SessionOwned(msgspec.Struct, frozen=True, tag="session", array_like=True, gc=False):
    """Whose a session is: the answer to ``Lease``. Its requests go on where it is owned."""

    session: str
    for_ns: int
    """How long it is this controller's; 0: another has it."""
    spent_ages_ns: tuple[int, ...] = ()
    """How long ago, within the last second, its requests went on elsewhere; the oldest first."""


class ReplicaShare(msgspec.Struct, frozen=True, tag="share", array_like=True, gc=False):
    """This controller's part of what may be in flight on a replica that several send to."""

    replica: int
    permille: int


class Forecasted(msgspec.Struct, frozen=True, tag="forecast", array_like=True, gc=False):
    """Load expected, by horizon. All tuples have the same length; horizons rise."""

    horizons_ns: tuple[int, ...]
    requests_p50: tuple[int, ...]
    """Thousandths of a request per second."""
    requests_p90: tuple[int, ...]
    tokens_p50: tuple[int, ...]
    """Prompt and output tokens per second."""
    tokens_p90: tuple[int, ...]


class RolloutRequested(msgspec.Struct, frozen=True, tag="rollout", array_like=True, gc=False):
    """Someone wants ``model`` served by ``version`` from now on."""

    model: str
    version: str


class Warmed(msgspec.Struct, frozen=True, tag="warmed", array_like=True, gc=False):
    """A replica has answered its warm-up requests: the answer to ``Warm``. Not ``ok`` where it was
    started with a version and is not up: it will not come up."""

    replica: int
    version: str
    """What it says it has loaded."""
    ok: bool = True


class PolicySwitched(msgspec.Struct, frozen=True, tag="switched", array_like=True, gc=False):
    """From now on another policy file rules. Both are in ``policy.parameters.canonical`` form."""

    old: str
    new: str


class CanaryStarted(msgspec.Struct, frozen=True, tag="canary", array_like=True, gc=False):
    """From now on a share of the callers is served by another policy file, beside the one that
    rules. Both are in ``policy.parameters.canonical`` form. Told again of the same two, only the
    share changes."""

    old: str
    new: str
    share_permille: int
    """Of the callers, 1..1000, and of every replica's in-flight target."""
    salt: int
    """Mixed into the choice of callers, so that another canary falls on others."""


class CanaryEnded(msgspec.Struct, frozen=True, tag="canary_ended", array_like=True, gc=False):
    """The canary is over: from now on the policy that is kept serves everyone."""

    keep: Literal["old", "new"]


class Restored(msgspec.Struct, frozen=True, tag="restored", array_like=True, gc=False):
    """The controller came back after a crash: what was open is lost."""

    down_ns: int = 0


Event = (
    Arrived | FirstToken | Finished | Failed | Cancelled | Ticked | ReplicaUp | ReplicaDown
    | Scraped | Standby | Progress | GpuRead | GpuFault | Verified | CheckpointSaved
    | CheckpointFailed | LookedUp | Forecasted | RolloutRequested | Warmed | PolicySwitched
    | Restored | StepsRead | CanaryStarted | CanaryEnded | ChainFound | StoreChanged
    | QuotaLeased | SessionOwned | ReplicaShare
)  # fmt: skip
