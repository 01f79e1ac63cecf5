"""Whether a server still takes the time that its profile says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from policy.cost import TICKS_PER_NS
from twin.calibrate.client import key_of
from twin.calibrate.contents import KINDS, read_contents
from twin.calibrate.errors import CalibrationError
from twin.calibrate.material import WARM_PHASE
from twin.calibrate.timing import time_steps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policy.cost import StepCost
    from traces.steps import Recording
    from twin.calibrate.client import ClientRow
    from twin.calibrate.contents import Contents, Flags, Ints
    from twin.regression import Array

LEAST_STEPS = 50
LOGPROBS_PHASES = ("logprobs-", WARM_PHASE)
DRAWS = 400
PIECES = 40
"""Pieces of a recording that are drawn for the interval: a spell of noise is in one of them."""


@dataclass(frozen=True)
class Drift:
    """Measured over predicted time of the usable steps: 1.1 is a server 10 % slower."""

    ratio: float
    interval: tuple[float, float]
    """95 %, from drawing pieces of the recording."""
    steps: int
    by_kind: dict[str, dict[str, float]]
    """``ratio``, ``low``, ``high`` and ``steps`` of decode, prefill and mixed steps."""
    stalled_percent: float = 0.0
    """Share of the time that was in steps left out because the machine stalled."""


def drift(cost: StepCost, recording: Recording, client: Iterable[ClientRow] = ()) -> Drift:
    """Compare a recording with a profile, step by step. Stalls are left out.

    Args:
        client: of a designed load, who tell which requests asked for log-probabilities; without
            them the phases with such requests are left out.

    Raises:
        CalibrationError: too few steps can be used.
    """
    rows = tuple(client)
    contents = read_contents(recording, {key_of(row.id) or row.id for row in rows if row.logprobs})
    timing = time_steps(contents)
    predicted_ns = predict_ns(cost, contents)
    kept = np.flatnonzero(
        contents.usable & ~timing.wild & (predicted_ns > 0) & (bool(rows) | ~_dear(contents))
    )
    if len(kept) < LEAST_STEPS:
        why = ", ".join(f"{count} x {reason}" for reason, count in contents.unusable.items())
        raise CalibrationError(
            f"{len(kept)} of {len(predicted_ns)} steps can be compared, at least {LEAST_STEPS} are "
            f"needed{': ' + why if why else ''}; record longer"
        )
    piece = pieces(len(kept))
    measured = timing.total_ns[kept]
    expected = predicted_ns[kept]
    kind = contents.kind[kept]
    by_kind: dict[str, dict[str, float]] = {}
    for place, name in enumerate(KINDS):
        own = kind == place
        if own.any():
            ratio, low, high = sums_ratio(measured[own], expected[own], piece[own])
            steps = float(own.sum())
            by_kind[name] = {"ratio": ratio, "low": low, "high": high, "steps": steps}
    ratio, low, high = sums_ratio(measured, expected, piece)
    stalled = float(np.sum(timing.total_ns[contents.usable & timing.wild]))
    return Drift(
        ratio=ratio,
        interval=(low, high),
        steps=len(kept),
        by_kind=by_kind,
        stalled_percent=100 * stalled / (stalled + float(np.sum(measured))),
    )


def _dear(contents: Contents) -> Flags:
    """Steps with requests of the designed load that asked for log-probabilities, or may have."""
    return contents.in_phases(
        {name for name in contents.phases if name.startswith(LOGPROBS_PHASES)}
    )


def predict_ns(cost: StepCost, contents: Contents) -> Array:
    """What a profile says of each step; 0 for an empty one."""
    out = np.zeros(len(contents.batch))
    each_logprobs = cost.per_logprobs_sequence
    rows = zip(
        contents.batch.astype(np.int64).tolist(),
        np.rint(contents.kv_tokens).astype(np.int64).tolist(),
        contents.prefill_tokens.astype(np.int64).tolist(),
        np.rint(contents.prefill_quad).astype(np.int64).tolist(),
        contents.logprobs.tolist(),
        strict=True,
    )
    for place, (batch, kv, tokens, quad, logprobs) in enumerate(rows):
        if batch or tokens:
            ticks = cost.step_ticks(batch, kv, tokens, quad) + each_logprobs * logprobs
            out[place] = ticks / TICKS_PER_NS
    return out


def pieces(steps: int) -> Ints:
    """The piece that each of so many steps is in."""
    return np.arange(steps, dtype=np.int64) * min(PIECES, steps) // max(1, steps)


def sums_ratio(measured: Array, expected: Array, piece: Ints) -> tuple[float, float, float]:
    """Measured over expected, and its 95 % interval."""
    _, number = np.unique(piece, return_inverse=True)
    number = number.reshape(-1)
    above, below = np.bincount(number, measured), np.bincount(number, expected)
    ratio = float(np.sum(above) / np.sum(below))
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, len(above), (DRAWS, len(above)))
    ratios = np.sum(above[drawn], axis=1) / np.sum(below[drawn], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return ratio, min(float(low), ratio), max(float(high), ratio)
