"""How long each step took, from end to end, and which steps a stalled machine spoilt.

A request's time is a sum of *periods*: the engine's own part of a step and the gap until the next
one begins. The gap is known where a step follows another directly; where its only measure are
stamps that come late now and then, it is averaged over stretches, so that lateness cancels out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twin.calibrate.contents import KINDS
from twin.regression import MAD_TO_SIGMA, non_negative_solution, robust_relative_least_squares

if TYPE_CHECKING:
    from twin.calibrate.contents import Contents, Flags, Ints
    from twin.regression import Array

STRETCH_STEPS = 16
BLOCK_STEPS = 16
BLOCK_NS = 500_000_000
PARTS = 4
WILD_RATIO = 2.5
"""A step this many times off what its like take is the machine's doing, not the step's; or ten
sigma off, on a machine whose steps differ that much."""


@dataclass(frozen=True)
class Timing:
    """One value a step, in ns."""

    total_ns: Array
    """End to end: the engine's part and the gap."""
    gap_ns: Array
    """NaN where the step followed none directly."""
    wild: Flags
    """Spoilt by a stall."""
    block: Ints
    """Consecutive steps of one visit to a phase, half a second at most; -1: not usable."""
    host_ns: tuple[float, float]
    """Mean gap: per step, and per decoding sequence."""


def time_steps(contents: Contents) -> Timing:
    """Measure the steps of a recording. Steps that are not usable get no block."""
    gap_ns = contents.period_ns - contents.engine_ns
    if not contents.exact_periods:
        gap_ns = _smoothed(gap_ns, contents.usable)
    known = contents.usable & np.isfinite(gap_ns)
    host_ns = _host(gap_ns[known], contents.batch[known])
    total_ns = contents.engine_ns + np.where(
        np.isfinite(gap_ns), gap_ns, host_ns[0] + host_ns[1] * contents.batch
    )
    # A clock that was set, or asynchronous steps that came in one piece.
    total_ns = np.where(total_ns > 0, total_ns, contents.engine_ns)
    wild = np.zeros(len(total_ns), dtype=np.bool_)
    for kind in range(len(KINDS)):
        rows = np.flatnonzero(contents.usable & (contents.kind == kind))
        if len(rows) >= 3:
            wild[rows] = _wild(contents, total_ns, rows)
    return Timing(total_ns, gap_ns, wild, _blocks(contents), host_ns)


def _smoothed(gap_ns: Array, usable: Flags) -> Array:
    """Each gap becomes the mean of its stretch of directly following steps."""
    out = np.full(len(gap_ns), np.nan)
    begin = 0
    known = np.isfinite(gap_ns)
    while begin < len(gap_ns):
        if not known[begin]:
            begin += 1
            continue
        end = begin
        while end < len(gap_ns) and end - begin < STRETCH_STEPS and known[end]:
            end += 1
        out[begin:end] = np.mean(gap_ns[begin:end])
        begin = end
    out[~usable] = np.nan
    return out


def _host(gap_ns: Array, batch: Array) -> tuple[float, float]:
    """Mean gap by a line over the batch, stalls left out."""
    if len(gap_ns) < 8:
        return 0.0, 0.0
    kept = near_most(gap_ns)
    terms = np.stack([np.ones(int(kept.sum())), batch[kept]], axis=1)
    fixed, each = non_negative_solution(terms.T @ terms, terms.T @ gap_ns[kept])
    return float(fixed), float(each)


def near_most(values: Array) -> Flags:
    """Those not grossly off the median: within ten sigma, or a few times the median."""
    middle = float(np.median(values))
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(values - middle)))
    return np.abs(values - middle) <= max(10 * sigma, WILD_RATIO * abs(middle))


def _wild(contents: Contents, total_ns: Array, rows: Ints) -> Flags:
    """Of the steps of one kind, those that took a wholly different time from their like."""
    columns = [
        np.ones(len(rows)),
        contents.batch[rows],
        contents.kv_tokens[rows],
        contents.prefill_tokens[rows],
        contents.prefill_quad[rows],
        contents.logprobs[rows],
    ]
    terms = np.stack([each for each in columns if np.ptp(each) > 0 or each is columns[0]], axis=1)
    time_ns = total_ns[rows]
    predicted = terms @ robust_relative_least_squares(terms, time_ns)
    least = float(np.min(time_ns))
    ratio = time_ns / np.maximum(predicted, least)
    middle = float(np.median(ratio))
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(ratio - middle)))
    limit = max(WILD_RATIO, 1 + 10 * sigma)
    return (ratio > limit * middle) | (ratio < middle / limit)


def _blocks(contents: Contents) -> Ints:
    """Numbers that rise along the recording; noise within a block may well be of one piece."""
    block = np.full(len(contents.batch), -1, dtype=np.int64)
    number, count, began_ns, phase = -1, BLOCK_STEPS, 0, -9
    for place in np.flatnonzero(contents.usable).tolist():
        at_ns = int(contents.at_ns[place])
        its_phase = int(contents.phase[place])
        if count >= BLOCK_STEPS or at_ns - began_ns > BLOCK_NS or its_phase != phase:
            number, count, began_ns, phase = number + 1, 0, at_ns, its_phase
        block[place] = number
        count += 1
    return block


def rounds_of(contents: Contents, ends_with: str) -> Ints:
    """The round of the load by step: a visit to the phase ``ends_with`` is the last of a round.

    Without two such visits the recording is cut into parts of equal time.
    """
    ends = contents.phase == contents.phases.index(ends_with) if (
        ends_with in contents.phases
    ) else np.zeros(len(contents.phase), dtype=np.bool_)  # fmt: skip
    named = np.flatnonzero(contents.phase >= 0)
    begins_anew = np.flatnonzero(ends[named][:-1] & ~ends[named][1:]) + 1
    out = np.zeros(len(ends), dtype=np.int64)
    if len(begins_anew):
        out[named[begins_anew]] = 1
        return np.cumsum(out)
    first_ns, last_ns = float(contents.at_ns[0]), float(contents.at_ns[-1])
    cuts = np.linspace(first_ns, last_ns + 1, PARTS + 1)[1:-1]
    return np.asarray(np.searchsorted(cuts, contents.at_ns, side="right"), dtype=np.int64)
