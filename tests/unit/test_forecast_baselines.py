"""The baselines: by hand, against statsmodels' own forecasts, and where nothing can be fitted."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError
from statsmodels.tsa.statespace.exponential_smoothing import ExponentialSmoothing
from statsmodels.tsa.statespace.sarimax import SARIMAX
from statsmodels.tsa.statespace.structural import UnobservedComponents

from policy.forecast.baselines import (
    FLOOR_SHARE,
    Arima,
    DampedHolt,
    Kalman,
    LastValue,
    SeasonalNaive,
)
from policy.forecast.contract import QUANTILES
from policy.forecast.series import Series, filled

if TYPE_CHECKING:
    from policy.forecast.series import Array

NAN = float("nan")
HORIZONS = (1, 2, 5)
FITTED = 200
ORIGINS = (0, 1, 2, 30, 31, 60, 199, 240, 258)
STATE_SPACE = (Arima, DampedHolt, Kalman)


def rhythm(windows: int = 260, seed: int = 0, **more: Any) -> Series:
    """Half an hour a window: a day's rhythm, a level that wanders, noise and gaps."""
    rng = np.random.default_rng(seed)
    logs = np.sin(np.arange(windows) * 2 * np.pi / 48) + np.cumsum(rng.normal(0, 0.05, windows))
    rates = 20 * np.exp(logs + rng.normal(0, 0.1, windows))
    rates[rng.random(windows) < 0.05] = NAN
    rates[[0, 30, 31, 200, 201, 202]] = rates[1], NAN, NAN, NAN, NAN, NAN
    return Series(1800, rates, **{"name": "chat", **more})


def same(found: Array, expected: Array) -> None:
    """Means of all quantiles."""
    assert found.shape == (*expected.shape, len(QUANTILES))
    np.testing.assert_allclose(found, np.repeat(expected[:, :, None], len(QUANTILES), 2), 1e-7)


def test_the_last_value_is_the_last_known_one() -> None:
    series = Series(600, np.array([1, 2, NAN, 4]), np.array([5, NAN, NAN, 6]))
    origins = np.array([3, 1, 2])
    same(LastValue().predict(series, origins), np.array([[4.0, 4], [2, 2], [2, 2]]))
    same(LastValue().predict(series, origins, "peak"), np.array([[6.0, 6], [5, 5], [5, 5]]))


def test_the_same_time_yesterday() -> None:
    series = Series(21_600, np.arange(12.0))  # four windows a day
    found = SeasonalNaive(horizons=(1, 4, 5, 9)).predict(series, np.array([3, 4, 7, 11]))
    expected = [[0, 3, 0, 0], [1, 4, 1, 1], [4, 7, 4, 4], [8, 11, 8, 8]]
    same(found, np.array(expected, float))


def test_without_a_yesterday_it_stays_as_it_is() -> None:
    series = Series(21_600, np.array([NAN, 1, 2, 3, 4, 5]))
    found = SeasonalNaive(horizons=(1,)).predict(series, np.arange(1, 6))
    # The first day's first window was not recorded: the second day's is not known from it.
    same(found, np.array([[1.0], [2], [3], [1], [2]]))


def of_statsmodels(kind: type, logs: Array, parameters: Array) -> Any:
    """The filtered model, built anew with what statsmodels offers to everyone."""
    model: Any
    if kind is Arima:
        model = SARIMAX(
            logs, order=(2, 1, 2), enforce_stationarity=False, enforce_invertibility=False
        )
    elif kind is DampedHolt:
        model = ExponentialSmoothing(
            logs, trend=True, damped_trend=True, initialization_method="known",
            initial_level=logs[0], initial_trend=0,
        )  # fmt: skip
    else:
        model = UnobservedComponents(logs, level="local linear trend")
    with np.errstate(divide="ignore", invalid="ignore"):
        return model.filter(parameters)


@pytest.mark.parametrize("kind", STATE_SPACE)
@pytest.mark.parametrize("target", ["mean", "peak"])
def test_forecasts_are_those_of_statsmodels(kind: type, target: Any) -> None:
    series = rhythm(peak=rhythm(seed=1).mean)
    forecaster = kind(horizons=HORIZONS).fit([series.until(FITTED)])
    values = series.of(target)
    floor = 1.0 if kind is Kalman else FLOOR_SHARE * np.nanmean(values[:FITTED]) + 1e-9
    parameters, logs = forecaster.parameters_["chat", target], np.log(values + floor)
    # Dynamo's filter begins otherwise, which is forgotten after some windows, and ARIMA's state is
    # not known at once; see below.
    origins = np.array(ORIGINS[{Arima: 3, DampedHolt: 0, Kalman: 5}[kind] :])
    ahead = np.array(HORIZONS) - 1
    own = [of_statsmodels(kind, logs[: origin + 1], parameters).forecast(5) for origin in origins]
    found = forecaster.predict(series, origins, target)
    same(found, np.maximum(np.exp(np.array(own)[:, ahead]) - floor, 0))

    begun = of_statsmodels(kind, logs[:150], parameters)
    if kind is not DampedHolt:  # whose beginning is not handed on by append
        appended = [begun.append(logs[150 : o + 1]).forecast(5) for o in origins[-3:]]
        same(found[-3:], np.maximum(np.exp(np.array(appended)[:, ahead]) - floor, 0))


def test_arima_waits_until_it_has_a_state() -> None:
    """With nothing assumed of it, the first forecasts are of any size."""
    series = rhythm()
    fitted = Arima(horizons=HORIZONS).fit([series])
    late = np.where(np.isin(np.arange(260), (0, 1, 50, 60)), 20.0, NAN)
    late[100:] = series.mean[100:]
    origins = np.array([0, 1, 49, 99])
    same(fitted.predict(replace(series, mean=late), origins), np.full((4, 3), 20.0))
    assert (fitted.predict(series, np.array([9]))[0, :, 0] != series.mean[9]).all()


def test_the_kalman_filter_is_dynamos() -> None:
    """The state begins with the first value and is moved on before each later one."""
    series = rhythm()
    logs = np.log1p(series.mean)
    state, spread = np.array([logs[0], 0.0]), 1000 * np.eye(2)
    move = np.array([[1.0, 1.0], [0.0, 1.0]])
    expected = []
    for place, value in enumerate(logs):
        if place:
            state, spread = move @ state, move @ spread @ move.T + np.diag([1.0, 0.1])
        if place and not np.isnan(value):
            gain = spread[:, 0] / (spread[0, 0] + 10.0)
            state = state + gain * (value - state[0])
            spread = spread - np.outer(gain, spread[0])
        expected.append([np.expm1(state[0] + h * state[1]) for h in HORIZONS])
    found = Kalman(horizons=HORIZONS).fit([series]).predict(series, np.arange(len(series)))
    same(found, np.maximum(expected, 0))


@pytest.mark.parametrize("kind", STATE_SPACE)
def test_columns_are_in_the_order_of_the_horizons(kind: type) -> None:
    series, origins = rhythm(), np.array([40, 259])
    found = kind(horizons=(5, 1, 2)).fit([series]).predict(series, origins)
    usual = kind(horizons=HORIZONS).fit([series]).predict(series, origins)
    np.testing.assert_array_equal(found, usual[:, [2, 0, 1]])


@pytest.mark.parametrize("kind", STATE_SPACE)
def test_windows_before_the_first_recorded_one_change_nothing(kind: type) -> None:
    series = rhythm()
    late = replace(series, mean=np.concatenate((np.full(7, NAN), series.mean)))
    early = kind().fit([series]).predict(series, np.arange(260))
    found = kind().fit([late]).predict(late, np.arange(267))
    np.testing.assert_allclose(found[7:], early, 1e-6)
    assert not found[:7].any()


@pytest.mark.parametrize("kind", [Arima, DampedHolt])
def test_a_fit_is_better_than_the_last_value(kind: type) -> None:
    """On a load whose windows are noise about a slow level."""
    rng = np.random.default_rng(3)
    level = 3 + np.cumsum(rng.normal(0, 0.02, 400))
    series = Series(600, np.exp(level + rng.normal(0, 0.2, 400)), name="chat")
    origins = np.arange(300, 398)
    fitted = kind().fit([series.until(300)])

    def error(forecaster: Any) -> float:
        found = forecaster.predict(series, origins)[:, :, 1]
        return float(np.abs(found - series.mean[origins[:, None] + [1, 2]]).mean())

    assert error(fitted) < 0.85 * error(LastValue())


def test_a_trend_goes_on_and_is_damped() -> None:
    noise = np.random.default_rng(0).normal(0, 1e-3, 100)
    series = Series(600, np.exp(0.05 * np.arange(100) + noise), name="chat")
    found = DampedHolt(horizons=(1, 2, 3)).fit([series]).predict(series, np.array([99]))[0, :, 0]
    steps = np.diff(np.log([series.mean[99], *found]))
    assert (steps > 0.03).all()
    assert (np.diff(steps) < 0).all()


@pytest.mark.parametrize("kind", STATE_SPACE)
def test_a_series_that_was_not_fitted_is_refused(kind: type) -> None:
    series, origins = rhythm(), np.array([50])
    with pytest.raises(NotFittedError):
        kind().predict(series, origins)
    fitted = kind().fit([series])
    with pytest.raises(ValueError, match=r"not fitted to the mean of 'code', only to:.*'chat'"):
        fitted.predict(replace(series, name="code"), origins)
    with pytest.raises(ValueError, match="not fitted to the peak of 'chat'"):
        fitted.predict(replace(series, peak=series.mean), origins, "peak")


@pytest.mark.parametrize("kind", STATE_SPACE)
def test_series_of_one_name_are_refused(kind: type) -> None:
    with pytest.raises(ValueError, match="told apart by their names"):
        kind().fit([rhythm(), rhythm(seed=1)])


@pytest.mark.parametrize("kind", [Arima, DampedHolt])
@pytest.mark.parametrize(
    "mean",
    [
        np.full(100, 7.0), np.zeros(100), np.full(100, NAN), np.ones(1), rhythm().mean[:12],
        np.empty(0),
    ],
    ids=["constant", "nothing", "unknown", "one", "short", "empty"],
)  # fmt: skip
def test_where_nothing_can_be_fitted_it_is_the_last_value(kind: type, mean: Array) -> None:
    with pytest.warns(RuntimeWarning, match=f"no {kind.__name__} could be fitted to the mean of"):
        forecaster = kind().fit([Series(1800, mean, name="chat")])
    series = rhythm()
    found = forecaster.predict(series, np.arange(260))
    same(found, np.repeat(filled(series.mean)[:, None], 2, 1))


class Broken:
    """A model whose fit ends as it is told."""

    def __init__(self, outcome: Any) -> None:
        self.outcome = outcome

    def fit(self, **_: Any) -> Any:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def explosive() -> Any:
    return SARIMAX(np.arange(9.0), order=(2, 1, 2), enforce_stationarity=False).filter(
        [1.5, 0, 0, 0, 1]
    )


def unknown() -> Any:
    found = of_statsmodels(Arima, np.arange(9.0), np.array([0.5, 0, 0, 0, 1]))
    found.params = np.full(5, NAN)
    return found


@pytest.mark.parametrize(
    "outcome",
    [np.linalg.LinAlgError("singular"), ValueError("infs"), unknown(), explosive()],
    ids=["singular", "refused", "unknown", "explosive"],
)
def test_a_fit_that_fails_is_not_used(outcome: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    series = rhythm()
    with monkeypatch.context() as patched:
        patched.setattr(Arima, "_model", lambda *_: Broken(outcome))
        with pytest.warns(RuntimeWarning, match="no Arima could be fitted to the mean of 'chat'"):
            forecaster = Arima().fit([series])
    same(
        forecaster.predict(series, np.array([9, 259])),
        np.repeat(filled(series.mean)[[9, 259], None], 2, 1),
    )


def test_a_fit_that_only_ends_early_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policy.forecast.baselines.ROUNDS", 2)
    assert Arima().fit([rhythm()]).parameters_["chat", "mean"] is not None


@pytest.mark.parametrize("kind", STATE_SPACE)
def test_rates_stay_finite_whatever_comes(kind: type) -> None:
    series = rhythm()
    fitted = kind(horizons=(1, 400)).fit([series])
    rates = np.where(np.arange(60) < 50, 1.0, 1e15 ** (np.arange(60) - 49.0).clip(0, 2))
    found = fitted.predict(replace(series, mean=rates), np.arange(60))
    assert np.isfinite(found).all()
    assert (found >= 0).all()
