"""What others use: last value, same time yesterday, damped Holt, ARIMA and Dynamo's Kalman filter.

The last three are statsmodels' state-space models: fitted once to what was recorded of a series by
then, and after that filtered through each window as it comes, with the parameters as they are.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted

from policy.forecast.contract import QUANTILES, check_origins, unrecorded
from policy.forecast.series import TARGETS, filled, first_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.contract import Ints
    from policy.forecast.series import Array, Series, Target

FLOOR_SHARE = 0.05
"""Of the average: added before a logarithm is taken."""
LEAST = 20
"""Recorded windows under which no parameters are looked for."""
ROUNDS = 60
"""Most steps of the optimiser."""
GROWTH_MOST = 1.01
"""A model that multiplies what it sees by more with each window is no forecast."""
LOG_MOST = 50.0
"""Rates are not forecast to be more than e to the 50th, so that they stay finite."""


def _certain(values: Array) -> Array:
    """The same value for every quantile."""
    return np.repeat(values[:, :, None], len(QUANTILES), axis=2)


class LastValue(BaseEstimator):  # type: ignore[misc]
    """It stays as it is.

    Args:
        horizons: windows ahead.
    """

    def __init__(self, horizons: Sequence[int] = (1, 2)) -> None:
        self.horizons = horizons

    def fit(self, series: Sequence[Series]) -> Self:
        """Nothing to learn."""
        return self

    def predict(self, series: Series, origins: Ints, target: Target = "mean") -> Array:
        """See :class:`policy.forecast.contract.Forecaster`."""
        check_origins(series, origins)
        rates = self._rates(series, origins, target)
        rates[unrecorded(series, origins, target)] = 0.0
        return _certain(rates)

    def _rates(self, series: Series, origins: Ints, target: Target) -> Array:
        """[origin, horizon]; of no matter where nothing was recorded yet."""
        last = filled(series.of(target))[origins]
        return np.repeat(last[:, None], len(self.horizons), axis=1)


class SeasonalNaive(LastValue):
    """As at the same time yesterday; as now, while there is no yesterday."""

    def _rates(self, series: Series, origins: Ints, target: Target) -> Array:
        begin, values = first_known(series.of(target)), filled(series.of(target))
        columns = []
        for horizon in self.horizons:
            days = -(-horizon // series.day_windows)
            then = origins + horizon - days * series.day_windows
            columns.append(values[np.where(then >= begin, then, origins)])
        return np.stack(columns, axis=1)


class _StateSpace(LastValue):
    """A state-space model of each series' logarithms, fitted to that series alone.

    Where no model can be fitted it is the last value, and a warning says so.
    """

    def fit(self, series: Sequence[Series]) -> Self:
        """Find each series' parameters; they are kept under the series' name.

        Raises:
            ValueError: two series of the same name.
        """
        names = [each.name for each in series]
        if len(set(names)) < len(names):
            raise ValueError(f"series are told apart by their names, and these are not: {names}")
        self.parameters_: dict[tuple[str, Target], Array | None] = {}
        self.floor_: dict[tuple[str, Target], float] = {}
        for each in series:
            for target in TARGETS if len(each.peak) else TARGETS[:1]:
                values = each.of(target)[first_known(each.of(target)) :]
                key = each.name, target
                self.floor_[key] = self._floor(values)
                self.parameters_[key] = self._fitted(np.log(values + self.floor_[key]))
                if self.parameters_[key] is None:
                    warnings.warn(
                        f"no {type(self).__name__} could be fitted to the {target} of {each.title}:"
                        " its last value is the forecast", RuntimeWarning, stacklevel=2,
                    )  # fmt: skip
        return self

    def _rates(self, series: Series, origins: Ints, target: Target) -> Array:
        check_is_fitted(self)
        values = series.of(target)
        key = series.name, target
        if key not in self.parameters_:
            raise ValueError(
                f"{type(self).__name__} was not fitted to the {target} of {series.title}, only to:"
                f" {sorted(self.parameters_)}"
            )
        parameters, floor = self.parameters_[key], self.floor_[key]
        rates = super()._rates(series, origins, target)
        begin = first_known(values)
        if parameters is None or begin == len(values):
            return rates
        # Models begin at the first known value, and not before: some start from it.
        model = self._model(np.log(values[begin:] + floor))
        # Where nothing is assumed of the state at the beginning, so many values only settle what it
        # is; statsmodels leaves them out of the likelihood for that reason.
        begun = np.cumsum(~np.isnan(values))[origins] > model.loglikelihood_burn
        ahead = self._ahead(model, parameters, origins[begun] - begin)
        chosen = ahead[:, np.array(self.horizons) - 1]
        rates[begun] = np.maximum(np.exp(np.minimum(chosen, LOG_MOST)) - floor, 0.0)
        return rates

    def _ahead(self, model: Any, parameters: Array, origins: Ints) -> Array:
        """Forecasts of the logarithm [origin, windows ahead - 1] from the filter's states.

        The filter's prediction after window ``n`` knows nothing beyond it; what comes later is
        where the transition leads with nothing more seen.
        """
        with np.errstate(divide="ignore", invalid="ignore"):  # a likelihood without any error yet
            found = model.filter(parameters).filter_results
        # None of these models changes over time: the last axis has one entry.
        transition, shift = found.transition[:, :, 0], found.state_intercept[:, 0, None]
        design, offset = found.design[0, :, 0], found.obs_intercept[0, 0]
        state = found.predicted_state[:, origins + 1]
        columns = []
        for _ in range(max(self.horizons)):
            columns.append(offset + design @ state)
            state = shift + transition @ state
        return np.stack(columns, axis=1)

    def _floor(self, values: Array) -> float:
        """Added before the logarithm is taken."""
        known = values[~np.isnan(values)]
        return FLOOR_SHARE * float(known.mean() if len(known) else 0.0) + 1e-9

    def _fitted(self, logs: Array) -> Array | None:
        """The parameters, or None if there are none that can be used."""
        known = logs[~np.isnan(logs)]
        # Where nothing moves the likelihood has no top: the variance goes to 0.
        if len(known) < LEAST or np.ptp(known) < 1e-9:
            return None
        model = self._model(logs)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of starting values, and of a fit that ends early
                fitted = model.fit(disp=False, maxiter=ROUNDS, cov_type="none")
        except (ValueError, ArithmeticError, np.linalg.LinAlgError):
            return None
        result: Array = np.asarray(fitted.params)
        if not np.isfinite(result).all():
            return None
        growth = np.abs(np.linalg.eigvals(fitted.filter_results.transition[:, :, 0])).max()
        return result if growth <= GROWTH_MOST else None

    @abstractmethod
    def _model(self, logs: Array) -> Any:
        """The model of these values, the first of which is known."""


class Arima(_StateSpace):
    """ARIMA(2,1,2) on logarithms.

    Differences are part of the state and not taken beforehand, so that the filter's forecasts are
    of the value itself and a missing window costs nothing but itself.
    """

    def _model(self, logs: Array) -> Any:
        from statsmodels.tsa.statespace.sarimax import SARIMAX

        # Unconstrained: the same optimum on real loads, in a tenth of the time.
        return SARIMAX(
            logs, order=(2, 1, 2), simple_differencing=False,
            enforce_stationarity=False, enforce_invertibility=False,
        )  # fmt: skip


class DampedHolt(_StateSpace):
    """Level and a damped trend, of logarithms: smoothed with the weights that fit best.

    It begins with the first value and no trend. A trend may be damped by more than is usual (to a
    fifth with each window, and not only to 0.8), which real loads ask for.
    """

    BOUNDS = ((1e-4, 1 - 1e-4),) * 3 + ((0.2, 0.99),)
    """Of the weights of level, trend and season, and of the damping."""

    def _model(self, logs: Array) -> Any:
        from statsmodels.tsa.statespace.exponential_smoothing import ExponentialSmoothing

        return ExponentialSmoothing(
            logs, trend=True, damped_trend=True, initialization_method="known",
            initial_level=logs[0], initial_trend=0.0, bounds=list(self.BOUNDS),
        )  # fmt: skip


class Kalman(_StateSpace):
    """A local linear trend, filtered with the noise that Dynamo's planner takes for granted.

    That is ``KalmanPredictor`` in ``components/src/dynamo/planner/core/load/predictors.py`` of
    github.com/ai-dynamo/dynamo, with the defaults of ``kalman_q_level`` and ``kalman_q_trend``
    (variances of the level's and the trend's steps) and ``kalman_r`` (variance of the measurement),
    and with ``load_predictor_log1p``, which is off by default there. As there, it begins with the
    first value, no trend, and a variance of 1,000 for both. Unlike there, several windows ahead are
    forecast and not one, a window that was not recorded is left out instead of counted as 0, and
    zeros at the beginning count.
    """

    MEASUREMENT, LEVEL, TREND = 10.0, 1.0, 0.1
    BEGINNING = 1000.0

    def _model(self, logs: Array) -> Any:
        from statsmodels.tsa.statespace.structural import UnobservedComponents

        # The first value is where the state begins: seen once more, it would be counted twice.
        model = UnobservedComponents(
            np.concatenate(([np.nan], logs[1:])), level="local linear trend"
        )
        model.ssm.initialize_known(np.array([logs[0], 0.0]), self.BEGINNING * np.eye(2))
        model.loglikelihood_burn = 0
        return model

    def _floor(self, values: Array) -> float:
        return 1.0

    def _fitted(self, logs: Array) -> Array | None:
        return np.array([self.MEASUREMENT, self.LEVEL, self.TREND])
