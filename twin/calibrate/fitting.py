"""The fit: step times to the coefficients of the one step-time formula.

Robust only against steps that a stall spoilt: these are left out, and what remains is fitted to
its *mean*, because a request's time is a sum of steps, and on a machine whose step times are
skewed the median promises too little. The engine's part and the gap between steps are fitted
apart and add up to the period. No coefficient is negative.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.regression import non_negative_solution

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twin.calibrate.contents import Ints
    from twin.regression import Array, StepTable

ENGINE_NAMES = (
    "decode_fixed_ns",
    "decode_per_sequence_ns",
    "decode_per_kv_token_ns",
    "prefill_fixed_ns",
    "prefill_per_token_ns",
    "prefill_per_quad_ns",
    "logprobs_per_sequence_ns",
)
HOST_NAMES = ("host_per_step_ns", "host_per_sequence_ns", "logprobs_per_sequence_ns")
STEP_NAMES = (*ENGINE_NAMES[:-1], *HOST_NAMES)
MIXED_NAMES = ("mixed_per_sequence_ns", "mixed_per_kv_token_ns")
"""What decoding costs more where the step prefills too; taken up only where it pays."""

FREE_TOKENS_GRID = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
KNOTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
KNOT_STEPS = 30
FOLDS = 5
DRAWS = 300
RIDGE = 1e-6
"""Of the padding's columns, so that what the straight line can say is not said by them."""
WORTH_SHARE = 0.1
WORTH_ERROR = 0.002
"""A refinement is kept when it lowers the held-out error by this share of it, and this much."""


@dataclass(frozen=True)
class Rows:
    """Steps to fit."""

    table: StepTable
    """Its time is the engine's part."""
    logprobs: Array
    gap_ns: Array
    """NaN where it is not known."""
    block: Ints
    stratum: Ints
    """Steps of one phase and kind; the bootstrap draws blocks within each."""
    weight: Array
    """Of the row, so that a phase with many steps does not outvote the others."""

    def __len__(self) -> int:
        return len(self.weight)


@dataclass(frozen=True)
class Shape:
    """The part of the formula that is no coefficient."""

    prefill_free_tokens: int = 0
    mixed_free_tokens: int = 0
    knots: tuple[int, ...] = ()
    """Batch sizes at which decode may bend away from its straight line."""
    mixed: bool = False
    """With the terms of ``MIXED_NAMES``."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the coefficients, whole steps."""
        return STEP_NAMES + MIXED_NAMES * self.mixed

    @property
    def first_knot(self) -> int:
        """Column of ``engine_terms`` where the padding's columns begin."""
        return len(ENGINE_NAMES) + len(MIXED_NAMES) * self.mixed


@dataclass(frozen=True)
class StepFit:
    """Coefficients in ns by the profile's key, and their covariance by the bootstrap."""

    coefficients: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    covariance_ns2: Array
    """Of ``shape.names``, in their order."""
    shape: Shape
    padding_ns: Array
    """Extra time at each knot."""
    rows: int
    refinements: dict[str, dict[str, float]] = field(default_factory=dict)
    """What each refinement did to the held-out error, kept or not."""


def engine_terms(table: StepTable, logprobs: Array, shape: Shape) -> Array:
    """The formula's terms: ``ENGINE_NAMES``, ``MIXED_NAMES`` if wanted, one for each knot."""
    decodes = table.batch > 0
    free = np.where(decodes, shape.mixed_free_tokens, shape.prefill_free_tokens)
    columns: list[Array] = [
        decodes.astype(np.float64),
        table.batch,
        table.kv_tokens,
        (~decodes).astype(np.float64),
        np.maximum(0.0, table.prefill_tokens - free),
        table.prefill_quad,
        logprobs,
    ]
    if shape.mixed:
        prefills = table.prefill_tokens > 0
        columns += [table.batch * prefills, table.kv_tokens * prefills]
    columns += hats(table.batch, shape.knots)
    return np.stack(columns, axis=1)


def hats(batch: Array, knots: Sequence[int]) -> list[Array]:
    """One column a knot: 1 at the knot, falling to 0 at its neighbours; flat outside all."""
    out: list[Array] = []
    for place in range(len(knots)):
        height = np.zeros(len(knots))
        height[place] = 1.0
        column = np.interp(batch, np.array(knots, dtype=np.float64), height)
        out.append(np.where(batch > 0, column, 0.0))
    return out


def host_terms(table: StepTable, logprobs: Array) -> Array:
    return np.stack([np.ones(len(table.batch)), table.batch, logprobs], axis=1)


def fit_steps(rows: Rows) -> StepFit:
    """Fit everything; a refinement of the formula is taken up only where it pays."""
    refinements: dict[str, dict[str, float]] = {}
    shape = Shape()
    error = _held_out_error(rows, shape)
    candidates: dict[str, list[dict[str, Any]]] = {
        "batch_padding": [{"knots": _knots(rows)}],
        "mixed_terms": [{"mixed": True}],
        "prefill_free_tokens": [{"prefill_free_tokens": free} for free in FREE_TOKENS_GRID],
        "mixed_free_tokens": [{"mixed_free_tokens": free} for free in FREE_TOKENS_GRID],
    }
    for name, changes in candidates.items():
        tried = [replace(shape, **each) for each in changes]
        errors = [_held_out_error(rows, each) for each in tried]
        best = int(np.argmin(errors))
        worth = max(WORTH_SHARE * error, WORTH_ERROR)
        kept = tried[best] != shape and error - errors[best] > worth
        refinements[name] = {
            "error_percent_without": error * 100,
            "error_percent_with": errors[best] * 100,
            "kept": float(kept),
        }
        if kept:
            shape, error = tried[best], errors[best]
    return _fit(rows, shape, refinements)


def _knots(rows: Rows) -> tuple[int, ...]:
    batch = rows.table.batch[rows.table.batch > 0]
    return tuple(
        knot
        for knot in KNOTS
        if int(np.sum((batch > knot * 0.84) & (batch < knot * 1.19))) >= KNOT_STEPS
    )


@dataclass(frozen=True)
class _Normal:
    """Normal equations by block: sums of these are the equations of any choice of blocks."""

    gram: Array
    moment: Array

    def solve(self, counts: Array, ridge: Array) -> Array:
        gram = np.tensordot(counts, self.gram, axes=1)
        gram = gram + np.diag(ridge * np.diag(gram))
        return non_negative_solution(gram, np.tensordot(counts, self.moment, axes=1))


def _normal(terms: Array, time_ns: Array, weight: Array, block: Ints, blocks: int) -> _Normal:
    size = terms.shape[1]
    gram, moment = np.zeros((blocks, size, size)), np.zeros((blocks, size))
    weighted = terms * weight[:, None]
    np.add.at(moment, block, weighted * time_ns[:, None])
    order = np.argsort(block, kind="stable")
    edges = np.searchsorted(block[order], np.arange(blocks + 1))
    for number in range(blocks):
        members = order[edges[number] : edges[number + 1]]
        gram[number] = weighted[members].T @ terms[members]
    return _Normal(gram, moment)


def _solve(terms: Array, time_ns: Array, weight: Array, ridge: Array) -> Array:
    weighted = terms * weight[:, None]
    gram = weighted.T @ terms
    return non_negative_solution(gram + np.diag(ridge * np.diag(gram)), weighted.T @ time_ns)


def _ridge(terms: Array, shape: Shape) -> Array:
    """Nothing but the padding is held back, in units of its own size."""
    ridge = np.zeros(terms.shape[1])
    ridge[shape.first_knot :] = RIDGE
    return ridge


def _relative_weights(terms: Array, time_ns: Array, weight: Array, ridge: Array) -> Array:
    """Weights of the squared error relative to what is predicted, which leaves the mean right."""
    expected = time_ns
    for _ in range(3):
        solution = _solve(terms, time_ns, weight / expected**2, ridge)
        expected = np.maximum(terms @ solution, 0.2 * time_ns)
    return np.asarray(weight / expected**2, dtype=np.float64)


def likes(table: StepTable) -> Ints:
    """Steps that hold about the same have the same number: their noise averages out, and what the
    formula is off stays."""
    sizes = [
        np.floor(2 * np.log2(table.batch + 1)),
        np.floor(2 * np.log2(table.prefill_tokens + 1)),
        np.floor(np.log2(table.kv_tokens + 1)),
    ]
    _, group = np.unique(np.stack(sizes, axis=1), axis=0, return_inverse=True)
    return np.asarray(group.reshape(-1), dtype=np.int64)


def _held_out_error(rows: Rows, shape: Shape) -> float:
    """Mean relative error of like steps' summed time, each step predicted by a fit without it."""
    terms, time_ns = engine_terms(rows.table, rows.logprobs, shape), rows.table.time_ns
    ridge = _ridge(terms, shape)
    weight = _relative_weights(terms, time_ns, rows.weight, ridge)
    fold = rows.block % FOLDS
    predicted = np.zeros(len(rows))
    for number in range(FOLDS):
        unseen = fold == number
        if unseen.any() and not unseen.all():
            seen = ~unseen
            solution = _solve(terms[seen], time_ns[seen], weight[seen], ridge)
            predicted[unseen] = terms[unseen] @ solution
    group = likes(rows.table)
    measured_sum = np.bincount(group, time_ns)
    predicted_sum = np.bincount(group, predicted)
    importance = np.sqrt(np.bincount(group))
    error = np.abs(predicted_sum / measured_sum - 1.0)
    return float(np.sum(importance * error) / np.sum(importance))


def _fit(rows: Rows, shape: Shape, refinements: dict[str, dict[str, float]]) -> StepFit:
    _, block = np.unique(rows.block, return_inverse=True)
    block = np.asarray(block.reshape(-1), dtype=np.int64)
    blocks = int(block.max()) + 1
    terms, time_ns = engine_terms(rows.table, rows.logprobs, shape), rows.table.time_ns
    ridge, no_ridge = _ridge(terms, shape), np.zeros(len(HOST_NAMES))
    weight = _relative_weights(terms, time_ns, rows.weight, ridge)
    engine = _normal(terms, time_ns, weight, block, blocks)
    gaps = np.isfinite(rows.gap_ns)
    host_columns = host_terms(rows.table, rows.logprobs)[gaps]
    # By the same weights as the engine's part, so that the sum of both has its mean.
    host = _normal(host_columns, rows.gap_ns[gaps], weight[gaps], block[gaps], blocks)

    def solve(counts: Array) -> tuple[Array, Array]:
        of_engine, of_host = engine.solve(counts, ridge), host.solve(counts, no_ridge)
        size = len(ENGINE_NAMES) - 1
        of_host[-1] += of_engine[size]  # log-probabilities cost in both parts
        extra = of_engine[size + 1 : shape.first_knot]
        return np.concatenate([of_engine[:size], of_host, extra]), of_engine[shape.first_knot :]

    named, padding_ns = solve(np.ones(blocks))
    # Which share of a step the line has and which the padding is next to arbitrary, and only the
    # line is drawn by whoever uses the profile: so the padding stays as it is.
    line = slice(0, shape.first_knot)
    left_ns = time_ns - terms[:, shape.first_knot :] @ padding_ns
    engine = _normal(terms[:, line], left_ns, weight, block, blocks)
    ridge = ridge[line]
    draws = np.stack([solve(counts)[0] for counts in _resampled(rows, block, blocks)])
    low, high = np.quantile(draws, [0.025, 0.975], axis=0)
    return StepFit(
        coefficients={name: float(value) for name, value in zip(shape.names, named, strict=True)},
        intervals={
            name: (min(float(a), float(value)), max(float(b), float(value)))
            for name, a, b, value in zip(shape.names, low, high, named, strict=True)
        },
        covariance_ns2=np.cov(draws, rowvar=False),
        shape=shape,
        padding_ns=padding_ns,
        rows=len(rows),
        refinements=refinements,
    )


def _resampled(rows: Rows, block: Ints, blocks: int) -> Sequence[Array]:
    """How often each block is drawn: with replacement, within each stratum, by a fixed seed."""
    generator = np.random.default_rng(0)
    stratum = np.zeros(blocks, dtype=np.int64)
    stratum[block] = rows.stratum
    members = [np.flatnonzero(stratum == each) for each in np.unique(stratum)]
    out: list[Array] = []
    for _ in range(DRAWS):
        counts = np.zeros(blocks)
        for own in members:
            drawn = generator.integers(0, len(own), len(own))
            np.add.at(counts, own[drawn], 1.0)
        out.append(counts)
    return out


def balanced(stratum: Ints) -> Array:
    """Weights by which a stratum counts as the square root of its rows."""
    _, inverse, counts = np.unique(stratum, return_inverse=True, return_counts=True)
    weight = 1.0 / np.sqrt(counts[inverse.reshape(-1)])
    return np.asarray(weight / np.mean(weight), dtype=np.float64)


def strata(phase: Ints, kind: Ints, block: Ints, least_blocks: int = 4) -> Ints:
    """Phase and kind by row; where a phase has too few blocks to draw from, the kind alone."""
    named = np.where(phase >= 0, phase, -1) * 8 + kind
    out = named.copy()
    for each in np.unique(named):
        own = named == each
        if len(np.unique(block[own])) < least_blocks:
            out[own] = -1000 + kind[own]
    return out
