"""A linear forecaster: least absolute deviations on recent differences, for each series alone.

Such a fit has the median for its aim, as the mean absolute error asks for. It is found by weighted
least squares, again and again with weights of one over the deviation (Schlossmacher, 1973).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np
from sklearn.base import BaseEstimator

from policy.forecast.contract import QUANTILES, check_origins, unrecorded
from policy.forecast.series import TARGETS, filled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.contract import Ints
    from policy.forecast.series import Array, Series, Target

LAGS = 12
AVERAGES = (24, 48)
"""Windows, beside those of a day."""
RIDGE = 0.01
ROUNDS = 25
SMALL = 0.05
"""Of the mean deviation: what is smaller weighs no more."""


class Regression(BaseEstimator):  # type: ignore[misc]
    """See the module. A series is known again by its name.

    Args:
        horizons: windows ahead.
    """

    def __init__(self, horizons: Sequence[int] = (1, 2)) -> None:
        self.horizons = horizons

    def fit(self, series: Sequence[Series]) -> Self:
        self.weights_: dict[tuple[str, Target], Array] = {}
        for each in series:
            for target in TARGETS:
                if target == "mean" or len(each.peak):
                    self.weights_[each.name, target] = self._fitted(each, target)
        return self

    def _fitted(self, series: Series, target: Target) -> Array:
        """[horizon, term]; what is not known yet weighs nothing: it stays as it is."""
        values = series.of(target)
        rows: list[Array] = []
        every = np.arange(min(LAGS, len(series)), len(series))
        tables = self._terms(series, every, target)
        for column, horizon in enumerate(self.horizons):
            origins = every[: max(0, len(every) - horizon)]
            table = tables[: len(origins), column]
            goal = values[origins + horizon] - filled(values)[origins]
            known = ~np.isnan(goal)
            rows.append(_least_deviations(table[known], goal[known]))
        return np.stack(rows)

    def predict(self, series: Series, origins: Ints, target: Target = "mean") -> Array:
        check_origins(series, origins)
        before = unrecorded(series, origins, target)
        weights = self.weights_.get((series.name, target))
        if weights is None:
            raise ValueError(f"the regression was not fitted to {series.name!r}'s {target}")
        last = filled(series.of(target))[origins]
        rates = last[:, None] + (self._terms(series, origins, target) * weights).sum(axis=2)
        rates = np.where(before[:, None], 0.0, np.maximum(rates, 0.0))
        return np.repeat(rates[:, :, None], len(QUANTILES), axis=2)

    def _terms(self, series: Series, origins: Ints, target: Target) -> Array:
        """[origin, horizon, term]: by how much each was above the last value, and a one."""
        values = filled(series.of(target))
        day, last = series.day_windows, values[origins]
        sums = np.concatenate(([0.0], np.cumsum(values)))

        def average(count: int) -> Array:
            begins = np.maximum(0, origins + 1 - count)
            result: Array = (sums[origins + 1] - sums[begins]) / (origins + 1 - begins)
            return result

        terms = [values[np.maximum(origins - lag, 0)] - last for lag in range(1, LAGS + 1)]
        terms += [average(count) - last for count in (*AVERAGES, day)]
        terms.append((filled(series.mean) if target == "peak" else values)[origins] - last)
        same = np.stack(terms, axis=1)
        found = np.empty((len(origins), len(self.horizons), same.shape[1] + 2))
        found[:, :, :-2] = same[:, None]
        for column, horizon in enumerate(self.horizons):
            found[:, column, -2] = _yesterday(values, origins, horizon, day)
        found[:, :, -1] = 1.0
        return found


def _yesterday(values: Array, origins: Ints, horizon: int, day: int) -> Array:
    """How much it rose yesterday from this time on; 0 where that is not known yet."""
    usable = (origins >= day + 1) & (horizon < day)
    base = np.where(usable, origins - day, 1)

    def around(places: Ints) -> Array:
        ends = len(values) - 1
        result: Array = (
            values[np.minimum(places - 1, ends)] + values[np.minimum(places, ends)]
            + values[np.minimum(places + 1, ends)]
        ) / 3  # fmt: skip
        return result

    return np.where(usable, around(base + np.where(usable, horizon, 0)) - around(base), 0.0)


def _least_deviations(table: Array, goal: Array) -> Array:
    terms = table.shape[1]
    scale = float(table[:, :-1].std()) if len(table) else 0.0
    if len(goal) < 2 * terms or not scale:
        return np.zeros(terms)
    scaled = np.concatenate((table[:, :-1] / scale, table[:, -1:]), axis=1)
    ridge = RIDGE * 3 * np.eye(terms)
    ridge[-1, -1] = 0.0
    least = SMALL * float(np.abs(goal).mean()) + 1e-9
    weights, found = np.ones(len(goal)), np.zeros(terms)
    for _ in range(ROUNDS):
        heavy = scaled * weights[:, None]
        found = np.linalg.solve(
            heavy.T @ scaled / len(goal) + ridge + 1e-12 * np.eye(terms),
            heavy.T @ goal / len(goal),
        )
        weights = least / np.maximum(np.abs(goal - scaled @ found), least)
    found[:-1] /= scale
    return found
