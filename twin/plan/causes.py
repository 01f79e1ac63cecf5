"""What gives way first, from what was measured while it did, and what to turn next."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from twin.plan.cell import Outcome
    from twin.plan.machines import Machine

Part = Literal["KV cache", "compute", "seats", "queue", "cold start"]
FULL = 0.88
"""Of a KV cache: the policy keeps the last twentieth free, and a block of a long answer is as good
as taken."""
PREEMPTED = 0.005
STARTED = ("n-1", "host", "ecc")


@dataclass(frozen=True, slots=True)
class Cause:
    """What gave way, the figures that say so, and the next knob."""

    part: Part
    why: str
    knob: str


def cause_of(outcome: Outcome, machine: Machine, fault: str = "none") -> Cause:
    """By the first that fits: a replica that starts, the cache, the seats, the time per token, the
    prompts in front of the engine, and else the policy's own queue."""
    seen = outcome.pressure
    offered = outcome.groups["all", ""].offered
    missed = seen.late + seen.dragging + seen.shed + seen.failed
    if fault in STARTED and missed:
        share = _missed_after(outcome)
        if share > 0.5:
            cold = machine.profile.cold_start
            seconds = f" of {cold.total_s:g} s" if cold else ""
            return Cause(
                "cold start",
                f"{share:.0%} of the misses fall after the loss, while a replica loads the model",
                f"a warm spare, or a shorter cold start than the profile's{seconds}",
            )
    if seen.kv_share_p95 >= FULL or seen.preemptions > PREEMPTED * max(offered, 1):
        return Cause(
            "KV cache",
            f"the fullest cache is {seen.kv_share_p95:.0%} full for a twentieth of the time, "
            f"{seen.preemptions} pre-emptions",
            "more KV memory: gpu_memory_utilization, a card with more memory, or more cards a "
            "replica",
        )
    if seen.seats_share_p95 >= 0.95:
        return Cause(
            "seats",
            f"{seen.seats_share_p95:.0%} of max_num_seqs is taken, the cache is "
            f"{seen.kv_share_p95:.0%} full",
            "max_num_seqs",
        )
    if seen.dragging > max(seen.late + seen.shed, 1):
        return Cause(
            "compute",
            f"{seen.dragging} answers are too slow per token, with up to {seen.batch_most} "
            "sequences in a batch",
            "fewer sequences at once (max_num_seqs), smaller prefill chunks "
            "(max_num_batched_tokens), or more cards a replica",
        )
    if seen.queued_most + seen.engine_waiting_most == 0 or (
        seen.prefill_s_mean + seen.queue_s_mean > 0 and seen.engine_waiting_most > seen.queued_most
    ):
        return Cause(
            "compute",
            f"prompts wait in the engine: up to {seen.engine_waiting_most} there, "
            f"{seen.prefill_s_mean:.2g} s of prefill on average",
            "max_num_batched_tokens, prefix caching, or more replicas",
        )
    return Cause(
        "queue",
        f"up to {seen.queued_most} at a time wait in the policy's queue while the cache is "
        f"{seen.kv_share_p95:.0%} full and {seen.seats_share_p95:.0%} of the seats are taken",
        "the policy's in-flight targets (inflight), or more replicas",
    )


def _missed_after(outcome: Outcome) -> float:
    """Share of the misses among requests that came after the fault."""
    from twin.plan.cell import BIN_S

    before = after = 0
    first = int(outcome.fault_s // BIN_S)
    for (kind, _), (good, offered) in outcome.bins.items():
        if kind == "class":
            missed = offered - good
            before += int(missed[:first].sum())
            after += int(missed[first:].sum())
    return after / (before + after) if before + after else 0.0
