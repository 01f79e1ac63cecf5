"""The seasonal forecaster: level, shift, quantiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from policy.forecast import Rates, Seasonal
from policy.forecast.seasonal import quantile

if TYPE_CHECKING:
    from policy.events import Forecasted

SLOT_S = 300
SLOTS = 288
NINE = 9 * 12  # slots
HORIZONS = (0, 300, 600, 1200, 1800)


def day(rise: int = NINE, factor: float = 1.0) -> Rates:
    """Ten requests a second, and fifty from an hour after ``rise`` on."""
    slots = np.arange(SLOTS)
    requests = factor * np.interp(slots, [rise, rise + 6], [10.0, 50.0])
    requests[slots >= 21 * 12] = factor * 10
    return Rates(SLOT_S, requests, 100 * requests)


def history(*rises: int) -> Rates:
    joined = day(rises[0])
    for rise in rises[1:]:
        joined = joined.then(day(rise))
    return joined


def predicted(past: Rates, today: Rates, slot: int) -> Forecasted:
    return Seasonal().fit(past.then(today.until(slot))).predict(HORIZONS)


def test_a_day_like_the_others_is_forecast_well() -> None:
    forecast = predicted(history(NINE, NINE, NINE), day(), NINE + 2)
    expected = np.interp(NINE + 1.5 + np.asarray(HORIZONS) / SLOT_S, range(SLOTS),
                         day().requests_per_s)  # fmt: skip
    assert forecast.horizons_ns == tuple(h * 10**9 for h in HORIZONS)
    assert np.asarray(forecast.requests_p50) / 1000 == pytest.approx(expected, rel=0.1)
    assert np.asarray(forecast.tokens_p50) / 100 == pytest.approx(expected, rel=0.1)


def test_a_busier_day_is_scaled_to_what_was_seen_of_it() -> None:
    today = day(factor=1.3)
    forecast = predicted(history(NINE, NINE, NINE), today, NINE - 12)
    assert np.asarray(forecast.requests_p50) == pytest.approx(13_000, rel=0.02)


def test_a_rise_that_came_early_or_late_is_followed() -> None:
    for shift in (-6, 6):
        forecast = predicted(history(NINE, NINE, NINE), day(NINE + shift, 0.7), NINE + shift + 4)
        assert forecast.requests_p50[3] == pytest.approx(35_000, rel=0.1)


def test_before_the_rise_only_the_upper_quantile_reckons_with_an_early_one() -> None:
    forecast = predicted(history(NINE, NINE, NINE), day(), NINE - 8)
    assert forecast.requests_p50[3] == pytest.approx(10_000, rel=0.05)
    assert forecast.requests_p90[3] > 15_000


def test_the_noise_of_a_quiet_night_does_not_say_which_day_it_is_like() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):

        def noisy(rise: int) -> Rates:
            clean = day(rise).requests_per_s * np.exp(0.08 * rng.standard_normal(SLOTS)) / 10
            return Rates(SLOT_S, rng.poisson(clean * SLOT_S) / SLOT_S, 100 * clean)

        past = noisy(NINE)
        for rise in (NINE - 3, NINE + 2, NINE - 1, NINE + 3, NINE):
            past = past.then(noisy(rise))
        upper = predicted(past, noisy(NINE + 6), NINE - 3).requests_p90
        assert upper[0] < 1300
        assert upper[4] > 1700  # half an hour later an early day's rise is half done


def test_it_forecasts_only_from_enough_history() -> None:
    with pytest.raises(ValueError, match="whole day"):
        Seasonal().fit(day())


def test_a_silent_history_gives_silence() -> None:
    nothing: Any = np.zeros(2 * SLOTS)
    forecast = Seasonal().fit(Rates(SLOT_S, nothing, nothing)).predict((0, 600))
    assert forecast.requests_p90 == (0, 0)


def test_quantiles_go_by_weight() -> None:
    values = np.asarray([[3.0, 30.0], [1.0, 10.0], [2.0, 20.0]])
    weights = np.asarray([0.1, 0.5, 0.4])
    assert quantile(values, weights, 0.5).tolist() == [1.0, 10.0]
    assert quantile(values, weights, 0.9).tolist() == [2.0, 20.0]
    assert quantile(values, weights, 1.0).tolist() == [3.0, 30.0]


def test_rates_must_fit_each_other() -> None:
    ones = np.ones(3)
    with pytest.raises(ValueError, match="divide"):
        Rates(7000, ones, ones)
    with pytest.raises(ValueError, match="as many"):
        Rates(SLOT_S, ones, np.ones(2))
    with pytest.raises(ValueError, match="one length"):
        Rates(SLOT_S, ones, ones).then(Rates(600, ones, ones))
