"""Least squares for step times: robust to wild rows, relative to the size, never negative."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

HUBER = 1.345
MAD_TO_SIGMA = 1.4826


@dataclass(frozen=True, slots=True)
class StepTable:
    """Steps of one kind: what each held, and how many ns it took."""

    batch: Array
    kv_tokens: Array
    prefill_tokens: Array
    prefill_quad: Array
    time_ns: Array

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> StepTable:
        return StepTable(
            self.batch[rows],
            self.kv_tokens[rows],
            self.prefill_tokens[rows],
            self.prefill_quad[rows],
            self.time_ns[rows],
        )


def robust_relative_least_squares(terms: Array, time_ns: Array) -> Array:
    """Coefficients that minimise a Huber loss of the relative error, by reweighting."""
    scaled = terms / time_ns[:, None]
    ones = np.ones(len(time_ns))
    weights: Array = ones
    solution: Array = np.zeros(terms.shape[1])
    for _ in range(50):
        root = np.sqrt(weights)
        previous = solution
        solution = np.asarray(
            np.linalg.lstsq(scaled * root[:, None], root, rcond=None)[0], dtype=np.float64
        )
        residual = np.abs(scaled @ solution - 1.0)
        knee = HUBER * MAD_TO_SIGMA * float(np.median(residual))  # a robust sigma
        if knee < 1e-12 or bool(np.all(np.abs(solution - previous) <= 1e-7 * np.abs(solution))):
            break
        weights = np.minimum(1.0, knee / np.maximum(residual, 1e-12))
    return solution


def relative_error(predicted: Array, measured: Array) -> Array:
    """How far each prediction is off, as a share of what was measured."""
    return np.abs(predicted / measured - 1.0)


def non_negative_solution(gram: Array, moment: Array) -> Array:
    """The x >= 0 that minimises ``x @ gram @ x / 2 - moment @ x`` (Lawson and Hanson's way).

    ``gram`` is X'WX and ``moment`` X'Wy of a weighted least squares problem, so problems that are
    sums of parts need only the sums of these.
    """
    size = len(moment)
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram = gram / np.outer(scale, scale)
    moment = moment / scale
    plain = np.asarray(np.linalg.lstsq(gram, moment, rcond=None)[0], dtype=np.float64)
    if float(np.min(plain)) >= 0.0:  # the usual case
        return np.asarray(plain / scale, dtype=np.float64)
    x: Array = np.zeros(size)
    free = np.zeros(size, dtype=np.bool_)
    least = 1e-9 * max(float(np.max(np.abs(moment))), 1e-300)
    for _ in range(3 * size):
        slope = moment - gram @ x
        slope[free] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= least:
            break
        free[best] = True
        while True:
            trial: Array = np.zeros(size)
            trial[free] = np.linalg.lstsq(gram[np.ix_(free, free)], moment[free], rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                x = trial
                break
            step = float(np.min(x[below] / np.maximum(x[below] - trial[below], 1e-300)))
            x = x + step * (trial - x)
            free &= x > 1e-12 * max(float(np.max(x)), 1e-300)
            x[~free] = 0.0
    return x / scale
