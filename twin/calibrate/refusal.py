"""When a fit is not good enough to be used, and what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from traces.steps import Header, Recording
    from twin.calibrate.checking import StepErrors
    from twin.calibrate.contents import Ints
    from twin.regression import StepTable

LEAST_STEPS = {"decode": 100, "prefill": 12, "mixed": 8}
LEAST_CHECK_STEPS = 50
LEAST_KIND_STEPS = 8
"""Held-out steps of one kind from which on the kind is judged by itself."""
LEAST_REQUESTS = 8
LEAST_USABLE = 0.5
WORST_STALLED_PERCENT = 10.0
LEAST_SPREAD = 4.0
"""Largest over smallest batch, and over smallest prompt part: else slopes cannot be told."""
WORST_BIAS = 0.05
WORST_MEDIAN_ERROR = 0.15
WORST_KIND_BIAS = 0.15
WORST_REQUEST_ERROR_PERCENT = 15.0
WORST_ROUNDS_APART = 0.15

NEEDED_SETTINGS = (
    "block_tokens", "kv_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len",
    "async_scheduling", "prefix_caching", "scheduling_policy",
)  # fmt: skip


def refuse_details(header: Header) -> list[str]:
    if header.details:
        return []
    return [
        "the server did not tell what each step computed: start vLLM with "
        "--enable-logging-iteration-details and record again"
    ]


def refuse_settings(missing: list[str]) -> list[str]:
    if not missing:
        return []
    return [
        f"the recording lacks the server's {', '.join(missing)}: record with the stat-logger "
        "plug-in, which writes them, or give a base profile of this server"
    ]


def refuse_coverage(table: StepTable, kind: Ints) -> list[str]:
    """Too few steps of a kind, or too much alike."""
    out: list[str] = []
    for place, (name, least) in enumerate(LEAST_STEPS.items()):
        found = int(np.sum(kind == place))
        if found < least:
            out.append(
                f"{found} usable {name} steps, at least {least} are needed: run the designed load "
                "longer, on an otherwise idle server"
            )
    for what, values, do in (
        ("decode batches", table.batch[kind == 0], "raise --max-num-seqs or the load's batches"),
        ("prompt parts", table.prefill_tokens[kind == 1], "send prompts of other lengths"),
    ):
        if len(values) and float(np.max(values)) < LEAST_SPREAD * float(np.min(values)):
            out.append(
                f"{what} from {np.min(values):.0f} to {np.max(values):.0f} only, a factor of "
                f"{LEAST_SPREAD:.0f} is needed to tell what each costs: {do}"
            )
    return out


def refuse_lost(usable: int, steps: int, stalled_percent: float) -> list[str]:
    """Too much of the load was left out before anything was judged.

    Args:
        steps: recorded ones that computed something.
        stalled_percent: of the time, in steps left out as stalls.
    """
    out: list[str] = []
    if steps and usable < LEAST_USABLE * steps:
        out.append(
            f"{usable} of {steps} steps can be used, at least {LEAST_USABLE:.0%} are needed, or "
            "what is left may not be like the rest: record without other clients, and the whole "
            "load"
        )
    if stalled_percent > WORST_STALLED_PERCENT:
        out.append(
            f"{stalled_percent:.1f} % of the time was in steps that took many times as long as "
            f"their like, at most {WORST_STALLED_PERCENT:.0f} % is taken: requests wait for them "
            "too; stop other work on the machine, or look for what makes the server stall"
        )
    return out


def preemptions(recording: Recording) -> int | None:
    """How many there were; None where the recording does not tell."""
    told = [row.preemptions for row in recording.steps if row.preemptions is not None]
    if not told and not recording.requests:
        return None
    return max(sum(told), sum(1 for _, row in recording.requests if row.preemptions))


def refuse_preemptions(count: int | None) -> list[str]:
    if not count:
        return []
    return [
        f"{count} pre-emptions in the load: its times hold work done twice; give "
        "the server more KV blocks or lower the load's batches"
    ]


def refuse_kinds(by_kind: Mapping[str, StepErrors]) -> list[str]:
    """The held-out steps of each kind, of which one may hide behind the others."""
    return [
        f"the {errors.steps} held-out {kind} steps took {_apart(errors.bias)} than predicted in "
        f"all, at most {WORST_KIND_BIAS:.0%} is taken for one kind: compare the report's residuals "
        f"of {kind} steps, and record again"
        for kind, errors in by_kind.items()
        if errors.steps >= LEAST_KIND_STEPS and abs(errors.bias) > WORST_KIND_BIAS
    ]


def refuse_requests(inside: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Whole requests of the held-out load, by the server's own clock."""
    e2e = inside.get("e2e")
    if e2e is None or e2e["requests"] < LEAST_REQUESTS:
        return []
    error = e2e["mean_error_percent"]
    if abs(error) <= WORST_REQUEST_ERROR_PERCENT:
        return []
    return [
        f"whole requests of the held-out load took {_apart(error / 100)} than predicted in the "
        f"mean, by the server's own clock, at most {WORST_REQUEST_ERROR_PERCENT:.0f} % is taken: "
        "what happens between the steps is not as the profile has it; stop other work on the "
        "machine and record again"
    ]


def refuse_check(errors: StepErrors | None) -> list[str]:
    """The held-out steps."""
    if errors is None or errors.steps < LEAST_CHECK_STEPS:
        found = 0 if errors is None else errors.steps
        return [
            f"{found} held-out steps, at least {LEAST_CHECK_STEPS} are needed to know the error: "
            "run the designed load longer"
        ]
    out: list[str] = []
    if abs(errors.bias) > WORST_BIAS:
        out.append(
            f"the held-out steps took {_apart(errors.bias)} than predicted in all, at most "
            f"{WORST_BIAS:.0%} is taken: was the machine's speed the same throughout? Stop other "
            "work on it and record again"
        )
    if errors.median > WORST_MEDIAN_ERROR:
        out.append(
            f"half of the held-out steps are off by more than {errors.median:.1%}, at most "
            f"{WORST_MEDIAN_ERROR:.0%} is taken: the formula does not fit this server; compare "
            "the report's residuals by kind"
        )
    return out


def refuse_rounds(ratios: Mapping[int, float]) -> list[str]:
    """Rounds of the same load that took different times."""
    if len(ratios) < 2:
        return []
    apart = max(ratios.values()) / min(ratios.values()) - 1
    if apart <= WORST_ROUNDS_APART:
        return []
    listed = ", ".join(f"{value:.2f}" for _, value in sorted(ratios.items()))
    return [
        f"the rounds differ by {apart:.0%} in their time (measured over fitted: {listed}), at most "
        f"{WORST_ROUNDS_APART:.0%} is taken: the machine is noisy; stop other work on it"
    ]


def _apart(bias: float) -> str:
    """``bias`` is of the prediction: below 0 the steps took longer."""
    measured = 1 / (1 + bias) - 1
    return f"{abs(measured):.1%} {'longer' if measured > 0 else 'less'}"
