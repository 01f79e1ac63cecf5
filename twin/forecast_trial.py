"""A forecaster and simple ones on the end of a load that none of them has seen, side by side."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.forecast.baselines import Arima, DampedHolt, Kalman, LastValue, SeasonalNaive
from policy.forecast.conformal import Conformal
from policy.forecast.contract import MEDIAN, pinball
from policy.forecast.features import floors
from policy.forecast.forecaster import REPLAYED, LoadForecaster
from policy.forecast.series import Series
from twin.forecasting import HELD_OUT, LEVEL
from twin.forecasts import DayShape, past_days

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.forecast.contract import Forecaster, Ints

    Array = np.ndarray[Any, np.dtype[np.float64]]

OURS = "forecaster"
BASELINES: dict[str, type[LastValue]] = {
    "last value": LastValue, "seasonal": SeasonalNaive, "damped Holt": DampedHolt,
    "ARIMA": Arima, "Kalman": Kalman,
}  # fmt: skip
EXAMPLE_DAYS = 7


@dataclass(frozen=True, slots=True)
class Rated:
    """How good one forecaster was at one horizon."""

    name: str
    horizon: int
    """Windows ahead."""
    windows: int
    wape: float
    """Sum of the errors of the median over the sum of the rates."""
    pinball: float
    """Loss of the 0.95 quantile, as the same share."""
    coverage: float
    """Share of windows at that quantile or below it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it."""

    origins: Ints
    """The windows after which was forecast."""
    told: dict[str, Array]
    """[origin, horizon, quantile] by forecaster."""
    rated: list[Rated]
    notes: list[str]


def example_week(seed: int, days: int = EXAMPLE_DAYS) -> Series:
    """Generated days: a quiet night, a rise in the morning, a fall in the evening; each is a little
    earlier or later and busier or quieter than the usual one."""
    rates = past_days(DayShape(), days, seed)
    return Series(
        float(rates.slot_s), np.asarray(rates.requests_per_s, float), weekday_known=False,
        name="requests",
    )  # fmt: skip


def tried(
    forecaster: LoadForecaster, series: Series, further: Sequence[Series],
    progress: Callable[[float, str], None],
) -> Trial:  # fmt: skip
    """Fit all to the first part of ``series``, and go through the rest window after window.

    Args:
        further: of the same load at other times, whole; the forecaster learns from them too.
        progress: is told a share and what is done.
    """
    split = int(len(series) * (1 - HELD_OUT))
    known = replace(series.until(split), peak=np.empty(0))
    series = replace(series, peak=np.empty(0))
    progress(0.02, "training the forecaster")
    forecaster.fit([known, *(replace(each, peak=np.empty(0)) for each in further)])
    horizons = tuple(forecaster.horizons)
    origins = np.arange(split - 1, len(series) - min(horizons))
    progress(0.7, "forecasting what it has not seen")
    told = {OURS: forecaster.predict(series, origins)}
    notes = []
    for place, (name, make) in enumerate(BASELINES.items()):
        progress(0.8 + 0.18 * place / len(BASELINES), "trying the simple ones")
        baseline = make(horizons)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # statsmodels', of fits that end early
                baseline.fit([known])
                told[name] = calibrated(baseline, series, origins)
        except ModuleNotFoundError as error:
            notes.append(f"{name} is left out: {error.name} is not installed")
    rated = [
        each for name, forecast in told.items() for each in _rated(name, forecast, series, origins,
                                                                   horizons)
    ]  # fmt: skip
    return Trial(origins, told, rated, notes)


def calibrated(forecaster: Forecaster, series: Series, origins: Ints) -> Array:
    """Forecasts of one that knows no spread, with bands learned on the way, from earlier windows
    alone: as the forecaster's own are."""
    first = int(origins[0])
    every = np.arange(max(0, first - REPLAYED), int(origins[-1]) + 1)
    raw = forecaster.predict(series, every)
    truth, floor = series.mean, floors(series)
    online = Conformal(forecaster.horizons, 1)
    told = np.empty_like(raw)
    for place, origin in enumerate(every):
        if place:
            online.observe(truth[origin])
        told[place] = online.correct(raw[None, place], floor[origin])[0]
    kept: Array = told[every >= first]
    return kept


def _rated(
    name: str, told: Array, series: Series, origins: Ints, horizons: Sequence[int]
) -> list[Rated]:
    found = []
    for column, horizon in enumerate(horizons):
        there = origins + horizon < len(series)
        truth = series.mean[origins[there] + horizon]
        known = ~np.isnan(truth)
        total = float(truth[known].sum())
        if not total:
            continue
        own = told[there][known, column]
        error = float(np.abs(truth[known] - own[:, MEDIAN]).sum())
        loss = float(pinball(truth[known], own)[:, LEVEL].sum())
        covered = float((truth[known] <= own[:, LEVEL]).mean())
        found.append(Rated(name, horizon, int(known.sum()), error / total, loss / total, covered))
    return found
