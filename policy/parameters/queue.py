"""Parameters of the tiered queue: classes, tiers, what is in flight, shedding, retries."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from policy.parameters.section import Permille, Section

SlaClass = Literal["P0", "P1", "P2"]


class Line(Section, frozen=True, forbid_unknown_fields=True):
    """A business line: what its requests get where the caller says nothing."""

    sla: Annotated[SlaClass, Meta(description="Class of its requests.")] = "P1"
    deadline_ms: Annotated[
        int,
        Meta(ge=0, le=3_600_000, description="ms to first token; 0: the class's deadline."),
    ] = 0


class Classes(Section, frozen=True, forbid_unknown_fields=True):
    """SLA classes: how long a caller waits for the first token."""

    default_class: Annotated[
        SlaClass,
        Meta(description="Class of a request that names none and whose line is not listed."),
    ] = "P1"
    p0_deadline_ms: Annotated[
        int,
        Meta(ge=1, le=3_600_000, description="ms to first token, interactive: people give up."),
    ] = 1500
    p1_deadline_ms: Annotated[
        int, Meta(ge=1, le=3_600_000, description="ms to first token, standard.")
    ] = 4000
    p2_deadline_ms: Annotated[
        int,
        Meta(ge=1, le=3_600_000, description="ms to first token, background: nobody looks on."),
    ] = 10_000
    p0_answer_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400_000,
            description="ms from arrival to the whole answer, or to a stream's first token, all"
            " tries, a second run and what is given instead together: after that nobody waits."
            " A caller's own deadline counts where it is later. 0: none.",
        ),
    ] = 15_000
    p1_answer_ms: Annotated[
        int,
        Meta(ge=0, le=86_400_000, description="ms, the same; about what HTTP clients wait."),
    ] = 60_000
    p2_answer_ms: Annotated[
        int,
        Meta(ge=0, le=86_400_000, description="ms, the same; what a job's client library waits."),
    ] = 600_000
    fallback_reserve_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=60_000,
            description="ms of that kept for a kept answer or a template: without an answer by"
            " then, the request is taken off its replica.",
        ),
    ] = 300
    lines: Annotated[
        dict[str, Line], Meta(description="Business lines by name: {sla: P0, deadline_ms: 0}.")
    ] = msgspec.field(default_factory=dict[str, Line])

    def __post_init__(self) -> None:
        if not self.p0_deadline_ms <= self.p1_deadline_ms <= self.p2_deadline_ms:
            raise ValueError(
                f"deadlines must not fall from P0 to P2, but are {self.p0_deadline_ms},"
                f" {self.p1_deadline_ms} and {self.p2_deadline_ms} ms"
            )
        for answer_ms in (self.p0_answer_ms, self.p1_answer_ms, self.p2_answer_ms):
            if 0 < answer_ms <= self.fallback_reserve_ms:
                raise ValueError(
                    f"an answer in {answer_ms} ms leaves nothing beside fallback_reserve_ms,"
                    f" {self.fallback_reserve_ms}"
                )


class Tiers(Section, frozen=True, forbid_unknown_fields=True):
    """Which of Turbo, Stable, Batch and Fallback a request is taken for, and what each gets."""

    turbo_max_tflop: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="TFLOP; P0 below it is Turbo. 50 is about 3,100 tokens of an 8B model.",
        ),
    ] = 50
    stable_max_tflop: Annotated[
        int, Meta(ge=1, le=1_000_000, description="TFLOP; P1 below it is Stable, else Batch.")
    ] = 200
    turbo_promise_ms: Annotated[
        int, Meta(ge=1, le=3_600_000, description="ms, p95 of wait and prefill promised in Turbo.")
    ] = 800
    stable_promise_ms: Annotated[
        int, Meta(ge=1, le=3_600_000, description="ms, p95 of wait and prefill promised in Stable.")
    ] = 1200
    fallback_promise_ms: Annotated[
        int, Meta(ge=1, le=3_600_000, description="ms, p95 promised in Fallback.")
    ] = 3000
    stable_least_permille: Annotated[
        Permille,
        Meta(description="Per mille of the work started that Stable is sure of while it waits."),
    ] = 200
    batch_least_permille: Annotated[
        Permille,
        Meta(description="Per mille Batch is sure of, so that background work never starves."),
    ] = 100
    fallback_least_permille: Annotated[
        Permille,
        Meta(description="Per mille Fallback is sure of: a way out for those that failed twice."),
    ] = 50
    lent_least_permille: Annotated[
        Permille,
        Meta(
            description="Per mille reserved in Stable for what Turbo lends it: without slots of"
            " their own the lent would wait longer than if they had stayed."
        ),
    ] = 150
    lend_wait_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=3_600_000,
            description="ms of predicted Turbo wait from which it lends its costlier requests;"
            " half of the promise leaves time for the prefill. 0: never lends.",
        ),
    ] = 400
    lend_from_permille: Annotated[
        Permille,
        Meta(description="Per mille of turbo_max_tflop from which a request is a costlier one."),
    ] = 500
    fallback_strikes: Annotated[
        int,
        Meta(
            ge=1,
            le=100,
            description="Consecutive time-outs or out-of-memory failures of a user or request"
            " that put it into Fallback.",
        ),
    ] = 2
    fallback_model: Annotated[
        str, Meta(description="A lighter model that answers Fallback; empty: the one asked for.")
    ] = ""
    aging_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=86_400_000,
            description="ms; nothing is ordered as if its deadline lay further off than this, so"
            " what waits this long goes before everything that arrives later.",
        ),
    ] = 20_000
    boost_permille: Annotated[
        Permille,
        Meta(
            description="Per mille of its deadline by which a request is ordered earlier when its"
            " user's last 10 requests went badly."
        ),
    ] = 100
    boost_errors_permille: Annotated[
        Permille,
        Meta(description="Per mille of a user's last 10 requests failed or retried: badly."),
    ] = 300

    def __post_init__(self) -> None:
        if self.turbo_max_tflop > self.stable_max_tflop:
            raise ValueError(
                f"turbo_max_tflop is {self.turbo_max_tflop}, above stable_max_tflop,"
                f" {self.stable_max_tflop}"
            )
        shares = (
            self.stable_least_permille + self.batch_least_permille
            + self.fallback_least_permille + self.lent_least_permille
        )  # fmt: skip
        if shares > 900:
            raise ValueError(
                f"the guaranteed shares add up to {shares} per mille: leave at least 100 for what"
                " goes first by order"
            )


class Inflight(Section, frozen=True, forbid_unknown_fields=True):
    """How much is sent to a replica before its answers come back. Requests wait here, where they
    can still be ordered; the engine's own queue stays near empty."""

    sequences_permille: Annotated[
        int,
        Meta(
            ge=10,
            le=10_000,
            description="Per mille of the replica's max_num_seqs in flight at most; a little over"
            " 1000 bridges the way back of an answer.",
        ),
    ] = 1020
    kv_permille: Annotated[
        int,
        Meta(
            ge=10,
            le=10_000,
            description="Per mille of the replica's KV tokens reserved at most; the rest is for"
            " answers longer than expected, which else preempt others.",
        ),
    ] = 950
    output_reserve_permille: Annotated[
        Permille,
        Meta(
            description="Per mille of the expected output reserved: answers in flight are on"
            " average half way, so all of it would leave KV idle."
        ),
    ] = 600
    reserve_permille: Annotated[
        Permille,
        Meta(
            description="Per mille of both that only Turbo, what it lent, and guaranteed turns may"
            " fill: they find room at once when everything else is taken."
        ),
    ] = 50
    prefill_steps_milli: Annotated[
        int,
        Meta(
            ge=100,
            le=1_000_000,
            description="Thousandths of max_num_batched_tokens of prompt outstanding at most; one"
            " step's worth keeps the engine busy, since it decodes meanwhile; more would wait in"
            " its queue.",
        ),
    ] = 1000
    long_prefill_tokens: Annotated[
        int, Meta(ge=1, le=10_000_000, description="Tokens to compute from which a prompt is long.")
    ] = 4096
    long_prefill_cap_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000_000,
            description="Tokens of long prompts outstanding per replica at most (one prompt may"
            " exceed it), so that long prompts do not block short ones.",
        ),
    ] = 16_384
    engine_priority: Annotated[
        bool,
        Meta(
            description="Tell the engine each tier's priority; only for engines started with"
            " --scheduling-policy priority, others refuse it."
        ),
    ] = False


class Shedding(Section, frozen=True, forbid_unknown_fields=True):
    """When a request is refused rather than kept waiting."""

    enabled: Annotated[
        bool, Meta(description="Refuse what cannot meet its deadline; false: it waits regardless.")
    ] = True
    queue_max: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Requests waiting at most; every queue has a bound."),
    ] = 20_000
    retry_after_least_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="ms, the shortest retry-after a caller is told.")
    ] = 1000
    retry_after_most_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="ms, the longest retry-after a caller is told.")
    ] = 30_000

    def __post_init__(self) -> None:
        if self.retry_after_least_ms > self.retry_after_most_ms:
            raise ValueError(
                f"retry_after_least_ms is {self.retry_after_least_ms}, above retry_after_most_ms,"
                f" {self.retry_after_most_ms}"
            )


class Retries(Section, frozen=True, forbid_unknown_fields=True):
    """Trying another replica when one failed before its first token."""

    tries_most: Annotated[
        int, Meta(ge=1, le=10, description="Tries of a request at most, the first included.")
    ] = 3
    budget_permille: Annotated[
        Permille,
        Meta(description="Per mille of open requests that may be retries: no retry storms."),
    ] = 200
    budget_least: Annotated[
        int, Meta(ge=0, le=1000, description="Retries always allowed at once, on a quiet system.")
    ] = 3
    grace_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=3_600_000,
            description="ms that a request which a replica failed still has from then on, where"
            " its deadline is its class's and not its caller's own: silence is noticed about when"
            " a P0's time is over, and late is better than lost.",
        ),
    ] = 1500


class Estimates(Section, frozen=True, forbid_unknown_fields=True):
    """First guesses of what only the engine knows; usage corrects them."""

    bytes_per_token_milli: Annotated[
        int,
        Meta(
            ge=100,
            le=100_000,
            description="Thousandths of a byte per prompt token until a model's usage says it.",
        ),
    ] = 4000
    bytes_per_token_most: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Bytes per token at most; a prompt is refused as too large only if it"
            " would not fit even so.",
        ),
    ] = 8
    output_tokens: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Output tokens expected before anything was seen."),
    ] = 256
    output_quantile_permille: Annotated[
        int,
        Meta(
            ge=10,
            le=990,
            description="Per mille: which quantile of past outputs is expected; above the median,"
            " since too little KV reserved costs more than too much.",
        ),
    ] = 600
    least_samples: Annotated[
        int,
        Meta(
            ge=1, le=1000, description="Outputs seen before a user's or line's own figure counts."
        ),
    ] = 5
    optimism_permille: Annotated[
        int,
        Meta(
            ge=10,
            le=990,
            description="Per mille: quantile of observed over predicted waits and prefills used to"
            " shed; low, so that only the hopeless are refused.",
        ),
    ] = 100


class History(Section, frozen=True, forbid_unknown_fields=True):
    """Bounds of what is remembered."""

    keys_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Users (and lines) remembered; the one quiet longest is forgotten.",
        ),
    ] = 10_000
    prefix_blocks_max: Annotated[
        int,
        Meta(ge=0, le=100_000, description="Leading blocks of a prompt looked up in the tables."),
    ] = 64
    prefix_entries_max: Annotated[
        int,
        Meta(ge=1, le=100_000_000, description="Blocks remembered per replica at most."),
    ] = 50_000
