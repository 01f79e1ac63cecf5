"""The forecaster's parts: bands, blend, trees, regression, LSTM, and a series as it goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import HistGradientBoostingRegressor

from policy.forecast.blend import Blend
from policy.forecast.boosting import FITTED, Boosting, _forest, grown
from policy.forecast.conformal import Conformal
from policy.forecast.contract import QUANTILES, pinball, rising
from policy.forecast.forecaster import MEMBERS, LoadForecaster, Online
from policy.forecast.lstm import Lstm
from policy.forecast.regression import Regression
from policy.forecast.series import DAY_S, Series
from tests.bench.forecast.scoring import Scored, coverage, pooled

UPPER = QUANTILES.index(0.95)
HORIZONS = (1, 3)
DAY = 48


def daily(days: int, seed: int, noise: float = 0.05, name: str = "daily") -> Series:
    """Two busy hours of each day, with noise, and peaks above the average."""
    dice = np.random.default_rng(seed)
    clock = np.arange(days * DAY) / DAY * 2 * np.pi
    mean = 100 * np.exp(np.sin(clock)) * np.exp(noise * dice.standard_normal(len(clock)))
    return Series(DAY_S / DAY, mean, mean * dice.uniform(1.1, 1.4, len(mean)), name=name)


@pytest.fixture(scope="module")
def fitted() -> LoadForecaster:
    return LoadForecaster(HORIZONS, members=1, epochs=2).fit([daily(6, 1)])


def test_quantiles_rise_from_the_median_on_both_sides() -> None:
    np.testing.assert_array_equal(rising(np.array([5.0, 4.0, 3.0, 6.0])), [4.0, 4.0, 4.0, 6.0])


def test_a_pinball_loss_weighs_what_was_missed() -> None:
    loss = pinball(10.0, np.array([8.0, 8.0, 12.0, 12.0]))
    np.testing.assert_allclose(loss, [0.05 * 2, 0.5 * 2, 0.1 * 2, 0.05 * 2])


def told_of(truth: Any, conformal: Conformal) -> Any:
    """What is told, one window ahead, by a forecaster that always says 100."""
    told = []
    for value in truth:
        told.append(conformal.correct(np.full((1, 1, len(QUANTILES)), 100.0), 5.0)[0, 0])
        conformal.observe(value)
    return np.array(told)


def test_bands_cover_what_they_say_of_a_forecaster_that_knows_no_spread() -> None:
    dice = np.random.default_rng(3)
    truth = 100 * np.exp(0.3 * dice.standard_t(3, 3000))
    told = told_of(truth, Conformal((1,), 1))
    for place, quantile in enumerate(QUANTILES):
        if quantile != 0.5:
            share = (truth <= told[:, place])[300:].mean()
            assert share == pytest.approx(quantile, abs=0.012), quantile
    assert (told[:, QUANTILES.index(0.5)] == 100).all()


def test_bands_follow_when_it_becomes_less_certain() -> None:
    dice = np.random.default_rng(4)
    spread = np.where(np.arange(3000) < 1500, 0.1, 0.4)
    truth = 100 * np.exp(spread * dice.standard_normal(3000))
    covered = truth <= told_of(truth, Conformal((1,), 1))[:, UPPER]
    assert covered[1500:1600].mean() < 0.9
    assert covered[2200:].mean() == pytest.approx(0.95, abs=0.02)


def test_unrecorded_windows_teach_nothing() -> None:
    one, other = Conformal((1,), 1), Conformal((1,), 1)
    truth = 100 + np.arange(60.0)
    told_of(truth, one)
    told_of(np.concatenate((truth, np.full(30, np.nan))), other)
    raw = np.full((1, 1, len(QUANTILES)), 100.0)
    np.testing.assert_array_equal(one.correct(raw, 5.0), other.correct(raw, 5.0))


def test_the_blend_listens_to_whoever_is_right_and_leaves_who_is_not_any_more() -> None:
    blend = Blend((1,), 2)
    dice = np.random.default_rng(5)
    middle = QUANTILES.index(0.5)
    weights, errors = [], []
    for window in range(400):
        truth = 100 + dice.normal(0, 5)
        good, bad = truth + dice.normal(0, 1), truth + dice.normal(0, 20)
        said = (good, bad) if window < 200 else (bad, good)
        raw = np.array(said).reshape(2, 1, 1).repeat(len(QUANTILES), axis=2)
        told = blend.blend(np.maximum(raw, 1.0), 5.0)[0, middle]
        blend.observe(truth)
        weights.append(blend.weights[0, 0, middle])
        errors.append(abs(told - truth))
    assert weights[199] > 0.99
    assert weights[399] < 0.01
    assert np.mean(errors[100:200]) < 2
    assert np.mean(errors[350:]) < 2


def test_the_trees_as_arrays_say_what_the_library_says() -> None:
    dice = np.random.default_rng(6)
    table = dice.normal(size=(400, 5))
    goal = table[:, 0] * np.where(table[:, 1] > 0, 2, -1) + dice.normal(0, 0.1, 400)
    models = {
        (0, 0, column): HistGradientBoostingRegressor(
            loss="quantile", quantile=quantile, max_iter=20, early_stopping=False
        ).fit(table, goal)
        for column, quantile in enumerate(FITTED)
    }
    said = grown(_forest(models, (1, 1, len(FITTED))), table)
    for column in range(len(FITTED)):
        expected = models[0, 0, column].predict(table)
        np.testing.assert_allclose(said[:, 0, 0, column], expected, rtol=1e-12)
    assert np.ptp(said) > 1


def test_boosting_and_lstm_beat_the_last_value_on_a_daily_rhythm() -> None:
    past, whole = daily(8, 7), daily(10, 7)
    origins = np.arange(8 * DAY, 10 * DAY - 3)
    truth = whole.mean[origins + 3]
    last = np.abs(whole.mean[origins] - truth).mean()
    for model in (Boosting(HORIZONS, rounds=40), Lstm(HORIZONS, members=1, epochs=60)):
        told = model.fit([past]).predict(whole, origins)[:, 1, QUANTILES.index(0.5)]
        assert np.abs(told - truth).mean() < 0.6 * last, type(model).__name__


def test_the_regression_finds_what_made_the_series_and_aims_at_the_median() -> None:
    dice = np.random.default_rng(8)
    values = np.full(3000, 100.0)
    for window in range(1, len(values)):
        # Noise whose mean is 3, and whose median is 0.
        jump = dice.choice((0.0, 30.0), p=(0.9, 0.1)) + dice.normal(0, 0.5)
        values[window] = 100 + 0.5 * (values[window - 1] - 100) + jump
    series, origins = Series(600.0, values, name="a"), np.arange(2000, 2999)
    told = Regression((1,)).fit([series]).predict(series, origins)[:, 0, 0]
    expected = 100 + 0.5 * (values[origins] - 100)
    assert np.abs(told - expected).mean() < 1.5
    assert abs(np.mean(told - expected)) < 1.0


def test_a_series_that_goes_on_is_told_what_a_look_back_would_say(fitted: LoadForecaster) -> None:
    series = daily(8, 1)
    first = 6 * DAY
    expected = {
        "mean": fitted.predict(series, np.arange(first, len(series))),
        "peak": fitted.predict(series, np.arange(first, len(series)), "peak"),
    }
    online = Online(fitted, series.until(first + 1))
    for window in range(first, len(series)):
        if window > first:
            online.observe(series.mean[window], series.peak[window])
        for target, told in online.predict().items():
            np.testing.assert_allclose(told, expected[target][window - first], rtol=1e-5)
    weights = online.weights["mean"]
    assert weights.shape[0] == len(MEMBERS)
    np.testing.assert_allclose(weights.sum(axis=0), 1)


def test_a_series_that_nobody_was_fitted_to_is_forecast_too(fitted: LoadForecaster) -> None:
    told = fitted.predict(daily(3, 9, name="another"), np.array([DAY, 2 * DAY]))
    assert np.isfinite(told).all()
    assert (told[..., UPPER] > told[..., QUANTILES.index(0.5)]).all()


def test_what_was_learned_comes_back_and_nothing_else(fitted: LoadForecaster) -> None:
    series, origins = daily(7, 2), np.arange(6 * DAY, 7 * DAY)
    parameters, state = fitted.get_params(), fitted.state()
    again = LoadForecaster.from_state(parameters, state)
    np.testing.assert_array_equal(again.predict(series, origins), fitted.predict(series, origins))
    with pytest.raises(ValueError, match="'lstm/state_gain' is missing"):
        LoadForecaster.from_state(
            parameters, {key: each for key, each in state.items() if key != "lstm/state_gain"}
        )
    with pytest.raises(ValueError, match="no place for the array 'other'"):
        LoadForecaster.from_state(parameters, {**state, "other": np.zeros(1)})
    with pytest.raises(ValueError, match="network 0 does not fit"):
        LoadForecaster.from_state(
            parameters, {**state, "lstm/net0/heads.bias": np.zeros(3, np.float32)}
        )


def test_coverage_comes_with_an_interval_that_knows_of_spells() -> None:
    dice = np.random.default_rng(1)
    covered = np.ones(1000)
    alone, spell = covered.copy(), covered.copy()
    alone[dice.choice(1000, 50, replace=False)] = 0
    spell[100:150] = 0

    def of(shares: Any) -> tuple[float, float, float]:
        told = np.ones((1000, 1, len(QUANTILES)))
        return coverage(Scored((2 - shares)[:, None], told), DAY_S / DAY)

    assert of(alone)[0] == of(spell)[0] == pytest.approx(95)
    assert of(spell)[2] - of(spell)[1] > 2 * (of(alone)[2] - of(alone)[1])
    assert len(pooled([Scored(np.ones((3, 1)), np.ones((3, 1, 4)))] * 2).truth) == 6
