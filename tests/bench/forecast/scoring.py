"""Rolling-origin scores of forecasters, and what they are a share of: those of the last value.

At every split a forecaster is fitted to what came before and then goes through the windows that
follow, each forecast knowing no more than the windows before it. A forecaster without a spread of
its own, like the last value, gets bands from the same online conformal calibration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.forecast.conformal import Conformal
from policy.forecast.contract import MEDIAN, QUANTILES, pinball
from policy.forecast.features import floors
from policy.forecast.forecaster import REPLAYED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.contract import Forecaster
    from policy.forecast.series import Array, Series, Target

UPPER = QUANTILES.index(0.95)
DRAWS = 2000
BLOCKS_A_DAY = 4
"""Blocks of the bootstrap: misses come in spells."""


@dataclass(frozen=True)
class Scored:
    """One forecaster on the test windows of a series, by horizon: everything per window."""

    truth: Array
    """[window, horizon]."""
    told: Array
    """[window, horizon, quantile]."""

    @property
    def absolute(self) -> Array:
        return np.abs(self.truth - self.told[..., MEDIAN]).sum(axis=0)

    @property
    def wape(self) -> Array:
        """By horizon, a share of 1."""
        result: Array = self.absolute / self.truth.sum(axis=0)
        return result

    @property
    def upper_loss(self) -> Array:
        """Sum of the pinball loss at .95, by horizon."""
        result: Array = pinball(self.truth, self.told)[..., UPPER].sum(axis=0)
        return result

    def covered(self, column: int = 0) -> Array:
        result: Array = self.truth[:, column] <= self.told[:, column, UPPER]
        return result


def calibrated(
    forecaster: Forecaster, series: Series, first: int, last: int, target: Target
) -> Array:
    """Forecasts at origins from ``first`` to before ``last`` with online conformal bands."""
    origins = np.arange(max(0, first - REPLAYED), last)
    raw = forecaster.predict(series, origins, target)
    truth, floor = series.of(target), floors(series)
    online = Conformal(forecaster.horizons, 1)
    told = np.empty_like(raw)
    for place, origin in enumerate(origins):
        if place:
            online.observe(truth[origin])
        told[place] = online.correct(raw[None, place], floor[origin])[0]
    return told[origins >= first]


def score(
    told: Array, series: Series, horizons: Sequence[int], first: int, last: int, target: Target
) -> Scored:
    """Of forecasts at these origins. Only windows before ``last`` count, and only where all
    horizons have one that was recorded."""
    origins = np.arange(first, last)
    longest = max(horizons)
    values = np.concatenate((series.of(target)[:last], np.full(longest, np.nan)))
    truth = np.stack([values[origins + horizon] for horizon in horizons], axis=1)
    known = ~np.isnan(truth).any(axis=1)
    return Scored(truth[known], told[known])


def pooled(parts: Sequence[Scored]) -> Scored:
    """Those of all splits."""
    return Scored(
        np.concatenate([part.truth for part in parts]),
        np.concatenate([part.told for part in parts]),
    )


def coverage(scored: Scored, window_s: float) -> tuple[float, float, float]:
    """Share of windows under the upper band one step ahead, and its 95 % interval, in per cent."""
    covered = scored.covered().astype(float)
    block = max(1, round(86_400 / window_s / BLOCKS_A_DAY))
    starts_most = max(1, len(covered) - block + 1)
    dice = np.random.default_rng(0)
    sums = np.concatenate(([0.0], np.cumsum(covered)))
    count = -(-len(covered) // block)
    starts = dice.integers(0, starts_most, (DRAWS, count))
    shares = (sums[np.minimum(starts + block, len(covered))] - sums[starts]).sum(1) / (
        count * block
    )
    low, high = np.quantile(shares, (0.025, 0.975))
    return 100 * float(covered.mean()), 100 * float(low), 100 * float(high)


def mean_ratio(ratios: Sequence[Any]) -> Array:
    """Geometric mean over series."""
    result: Array = np.exp(np.log(np.array(ratios, dtype=np.float64)).mean(axis=0))
    return result
