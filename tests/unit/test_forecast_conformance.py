"""One suite for all forecasters: scikit-learn's contract, what a forecast is like, no foresight."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from policy.forecast.baselines import Arima, DampedHolt, Kalman, LastValue, SeasonalNaive
from policy.forecast.boosting import Boosting
from policy.forecast.contract import QUANTILES
from policy.forecast.forecaster import LoadForecaster
from policy.forecast.lstm import Lstm
from policy.forecast.regression import Regression
from policy.forecast.series import TARGETS, Series

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from policy.forecast.series import Array, Target

NAN = float("nan")
HORIZONS = (1, 3)
DAY = 48  # windows
WINDOWS = 5 * DAY
ORIGINS = np.array([0, 1, 2, 7, 46, 47, 48, 49, 50, 95, 96, 97, 143, 144, 145, 190, 236, 239])

FORECASTERS: dict[str, Callable[[], Any]] = {
    "last": lambda: LastValue(horizons=HORIZONS),
    "seasonal": lambda: SeasonalNaive(horizons=HORIZONS),
    "holt": lambda: DampedHolt(horizons=HORIZONS),
    "arima": lambda: Arima(horizons=HORIZONS),
    "kalman": lambda: Kalman(horizons=HORIZONS),
    "boosting": lambda: Boosting(horizons=HORIZONS),
    "lstm": lambda: Lstm(horizons=HORIZONS, epochs=2, members=1, hidden=8),
    "regression": lambda: Regression(horizons=HORIZONS),
    "blend": lambda: LoadForecaster(horizons=HORIZONS, epochs=2, members=1),
}
LEARNED = sorted(set(FORECASTERS) - {"last", "seasonal"})


def load(seed: int, name: str, peaks: bool = True) -> Series:
    """A day's rhythm, a level that wanders, noise, and windows that were not recorded."""
    rng = np.random.default_rng(seed)
    logs = np.sin(np.arange(WINDOWS) * 2 * np.pi / DAY + seed)
    logs += np.cumsum(rng.normal(0, 0.03, WINDOWS)) + rng.normal(0, 0.1, WINDOWS)
    mean = 20 * np.exp(logs)
    peak = mean * rng.uniform(1.1, 1.6, WINDOWS) if peaks else np.empty(0)
    gaps = rng.random(WINDOWS) < 0.03
    mean[gaps] = NAN
    peak[gaps[: len(peak)]] = NAN
    return frozen(Series(1800, mean, peak, start_s=3600.0, name=name))


def frozen(series: Series) -> Series:
    """So that a forecaster that writes into what it is given fails."""
    series.mean.flags.writeable = False
    series.peak.flags.writeable = False
    return series


CHAT = load(1, "chat")
CODE = load(2, "code", peaks=False)
BATCH = load(3, "batch")


def coarse(**arguments: Any) -> HistGradientBoostingRegressor:
    """What is learned is no matter here, only how: few trees, which see few differences."""
    return HistGradientBoostingRegressor(**{**arguments, "max_iter": 5, "max_bins": 8})


@pytest.fixture(params=sorted(FORECASTERS), scope="module")
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    # On a busy machine threads that wait for each other take a hundred times as long.
    with pytest.MonkeyPatch.context() as patched, threadpool_limits(1):
        patched.setattr("policy.forecast.boosting.HistGradientBoostingRegressor", coarse)
        yield str(request.param)


@pytest.fixture(scope="module")
def fitted(kind: str) -> Any:
    forecaster = FORECASTERS[kind]()
    before = deepcopy(forecaster.get_params())
    assert forecaster.fit([CHAT, CODE]) is forecaster
    assert forecaster.get_params() == before
    return forecaster


def given(forecaster: Any, series: Series, origins: Any, target: Target = "mean") -> Array:
    """The forecast, once it looks like one."""
    origins = np.asarray(origins, int)
    found: Array = forecaster.predict(series, origins, target)
    assert found.shape == (len(origins), len(forecaster.horizons), len(QUANTILES))
    assert found.dtype == np.float64
    assert np.isfinite(found).all()
    assert (found >= 0).all()
    assert (np.diff(found, axis=2) >= 0).all()
    return found


def learned(forecaster: Any) -> set[str]:
    return set(vars(forecaster)) - set(forecaster.get_params())


# scikit-learn's contract.


def test_it_is_made_with_parameters_and_nothing_else(kind: str) -> None:
    forecaster = FORECASTERS[kind]()
    assert vars(forecaster) == forecaster.get_params()
    assert forecaster.horizons == HORIZONS


def test_what_was_learned_ends_in_an_underscore(kind: str, fitted: Any) -> None:
    assert all(name.endswith("_") and not name.startswith("_") for name in learned(fitted))
    assert bool(learned(fitted)) == (kind in LEARNED)


def test_a_clone_has_the_parameters_and_not_what_was_learned(fitted: Any) -> None:
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    assert not learned(copy)


def test_parameters_can_be_set(kind: str) -> None:
    forecaster = FORECASTERS[kind]()
    for name, value in forecaster.get_params().items():
        assert getattr(forecaster.set_params(**{name: value}), name) is value
    forecaster.set_params(horizons=(2, 1, 5)).fit([CHAT, CODE])
    assert forecaster.horizons == (2, 1, 5)
    given(forecaster, CHAT, ORIGINS)
    with pytest.raises(ValueError, match="Invalid parameter"):
        forecaster.set_params(nobody=1)


def test_a_second_fit_forgets_the_first_and_an_equal_seed_learns_the_same(
    kind: str, fitted: Any
) -> None:
    first = FORECASTERS[kind]().fit([BATCH])
    before = given(first, BATCH, ORIGINS)
    again = first.fit([CHAT, CODE])
    assert learned(again) == learned(fitted)
    for target in TARGETS:
        np.testing.assert_array_equal(
            given(again, CHAT, ORIGINS, target), given(fitted, CHAT, ORIGINS, target)
        )
    try:
        assert kind in ("last", "seasonal") or (given(again, BATCH, ORIGINS) != before).any()
    except ValueError as error:  # of those that know only the series that they were fitted to
        assert "not fitted" in str(error)  # noqa: PT017


def test_a_forecast_changes_nothing(fitted: Any) -> None:
    first = given(fitted, CHAT, ORIGINS)
    given(fitted, CODE, ORIGINS[::-1])
    given(fitted, CHAT, ORIGINS, "peak")
    np.testing.assert_array_equal(given(fitted, CHAT, ORIGINS), first)


# What a forecast is like.


@pytest.mark.parametrize("target", TARGETS)
def test_origins_may_come_in_any_order(fitted: Any, target: Target) -> None:
    every = given(fitted, CHAT, np.arange(WINDOWS), target)
    chosen = np.array([200, 3, 3, 97])
    np.testing.assert_allclose(given(fitted, CHAT, chosen, target), every[chosen], 1e-5)


def test_no_origins_no_forecasts(fitted: Any) -> None:
    for target in TARGETS:
        given(fitted, CHAT, [], target)


@pytest.mark.parametrize("origins", [[-1], [WINDOWS], [0, WINDOWS + 7], [-WINDOWS]])
def test_origins_outside_are_refused(fitted: Any, origins: list[int]) -> None:
    with pytest.raises(ValueError, match="origins from"):
        fitted.predict(CHAT, np.array(origins))


def test_peaks_of_a_series_without_are_refused(fitted: Any) -> None:
    with pytest.raises(ValueError, match="'code' has no peaks"):
        fitted.predict(CODE, np.array([50]), "peak")


def test_one_window_is_enough(fitted: Any) -> None:
    for target in TARGETS:
        given(fitted, CHAT.until(1), [0], target)
        given(fitted, CHAT.until(2), [0, 1], target)


def test_a_forecast_is_of_the_size_of_the_load(fitted: Any) -> None:
    """Of a load that does not move: no forecaster can be far off."""
    steady = replace(CHAT, mean=np.full(WINDOWS, 20.0), peak=np.full(WINDOWS, 30.0))
    for target, rate in (("mean", 20.0), ("peak", 30.0)):
        median = given(fitted, steady, np.arange(DAY, WINDOWS), target)[:, :, 1]  # type: ignore[arg-type]
        assert np.abs(np.log(median / rate)).max() < 0.5


# Nobody looks ahead.


def changed(series: Series, origin: int, after: float) -> Series:
    """What comes after the origin multiplied, or not recorded."""
    parts = {}
    for target in TARGETS:
        values = getattr(series, target).copy()
        values[origin + 1 :] *= after
        parts[target] = values
    return replace(series, **parts)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("origin", [0, 1, 7, 47, 48, 49, 97, 144, 200])
def test_what_comes_later_has_no_part_in_it(fitted: Any, origin: int, target: Target) -> None:
    known = ORIGINS[origin >= ORIGINS]
    expected = given(fitted, CHAT, known, target)
    for other in (
        CHAT.until(origin + 1), changed(CHAT, origin, 7.0), changed(CHAT, origin, 0.0),
        changed(CHAT, origin, NAN),
    ):  # fmt: skip
        np.testing.assert_allclose(given(fitted, other, known, target), expected, 1e-9, 1e-9)


@pytest.mark.parametrize("target", TARGETS)
def test_what_is_known_has_a_part_in_it(fitted: Any, target: Target) -> None:
    """The test before would hold for a forecaster that looks at nothing."""
    last = changed(CHAT, 199, 3.0).until(201)
    moved = given(fitted, last, [200], target) / given(fitted, CHAT, [200], target)
    if not isinstance(fitted, SeasonalNaive):
        assert (moved > 1.05).all()


# Windows that were not recorded.


@pytest.mark.parametrize("target", TARGETS)
def test_gaps_do_no_harm(fitted: Any, target: Target) -> None:
    gaps = {"one": slice(100, 101), "hours": slice(100, 110), "more than a day": slice(70, 130)}
    for missing in gaps.values():
        values = {each: getattr(CHAT, each).copy() for each in TARGETS}
        for each in TARGETS:
            values[each][missing] = NAN
        found = given(fitted, replace(CHAT, **values), np.arange(WINDOWS), target)
        # Not one forecast is out of all proportion.
        assert found.max() < 20 * np.nanmax(CHAT.of(target))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("late", [1, 10, 60])
def test_before_anything_is_recorded_nothing_is_forecast(
    fitted: Any, late: int, target: Target
) -> None:
    """Above all not what was recorded first: that comes later."""
    values = {each: getattr(CHAT, each).copy() for each in TARGETS}
    for each in TARGETS:
        values[each][:late], values[each][late] = NAN, 5.0
    found = given(fitted, replace(CHAT, **values), np.arange(WINDOWS), target)
    assert not found[:late].any()
    assert (found[late:, :, 1:] > 0).any(axis=(1, 2)).all()


def test_peaks_that_begin_late_are_not_known_before(fitted: Any) -> None:
    peak = CHAT.peak.copy()
    peak[:60] = NAN
    late = replace(CHAT, peak=peak)
    origins = np.arange(60)
    assert not given(fitted, late, origins, "peak").any()
    np.testing.assert_allclose(
        given(fitted, replace(late, peak=7 * peak), origins),
        given(fitted, late, origins),
        1e-9,
    )


@pytest.mark.parametrize("rate", [NAN, 0.0])
def test_nothing_recorded_and_nothing_asked(fitted: Any, rate: float) -> None:
    nothing = replace(CHAT, mean=np.full(WINDOWS, rate), peak=np.full(WINDOWS, rate))
    for target in TARGETS:
        found = given(fitted, nothing, ORIGINS, target)
        assert found.max() < (1e-6 if rate == 0 else 1e-300)
