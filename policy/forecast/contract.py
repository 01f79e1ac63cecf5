"""What every forecaster keeps to: scikit-learn's contract for estimators, with series for data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from policy.forecast.series import first_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.series import Array, Series, Target

    Bools = np.ndarray[Any, np.dtype[np.bool_]]
    Ints = np.ndarray[Any, np.dtype[np.int64]]

QUANTILES = (0.05, 0.5, 0.9, 0.95)
MEDIAN = QUANTILES.index(0.5)


class Forecaster(Protocol):
    """Says what comes after windows that were seen.

    What ``fit`` finds out is in attributes that end in ``_``; what it is made with is kept under
    the argument's name and not changed.
    """

    @property
    def horizons(self) -> Sequence[int]:
        """Windows ahead, in any order; 1 is the next one."""
        ...

    def fit(self, series: Sequence[Series]) -> Self:
        """Learn from series, all windows of each. What was learned before is forgotten."""
        ...

    def predict(self, series: Series, origins: Ints, target: Target = "mean") -> Array:
        """What is forecast when each of these windows was the last one known.

        Returns:
            Rates [origin, horizon, quantile of ``QUANTILES``], which do not fall from one quantile
            to the next; of a forecaster that knows no spread all are equal. Nothing in ``series``
            after an origin has a part in its forecast. Where nothing of the target was recorded up
            to the origin, all are 0.

        Raises:
            ValueError: an origin outside the series, or a target that it does not have.
        """
        ...


def check_origins(series: Series, origins: Ints) -> None:
    """Refuse origins outside the series.

    Raises:
        ValueError: there is one.
    """
    if len(origins) and not 0 <= origins.min() <= origins.max() < len(series):
        raise ValueError(
            f"origins from {origins.min()} to {origins.max()} must lie within the series'"
            f" {len(series)} windows"
        )


def unrecorded(series: Series, origins: Ints, target: Target) -> Bools:
    """Whether nothing of the target was recorded up to each origin: what is forecast then is 0.

    Raises:
        ValueError: a target that the series does not have.
    """
    before: Bools = origins < first_known(series.of(target))
    return before


def rising(forecast: Array) -> Array:
    """The same with quantiles, its last axis, that do not fall; the median stays."""
    above = np.maximum.accumulate(forecast[..., MEDIAN:], axis=-1)
    below = np.minimum.accumulate(forecast[..., MEDIAN::-1], axis=-1)[..., ::-1]
    result: Array = np.concatenate((below[..., :-1], above), axis=-1)
    return result


def pinball(truth: Array | float, forecast: Array) -> Array:
    """The loss that a quantile, on the last axis, has the least of when it is right."""
    error = np.asarray(truth)[..., None] - forecast
    levels = np.array(QUANTILES)
    result: Array = np.maximum(levels * error, (levels - 1) * error)
    return result
