"""Forecasts made before a run, and the daily load curve to try them on."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from policy.capacity import check_forecast
from policy.forecast.contract import QUANTILES
from policy.forecast.series import Series
from twin.forecasts import (
    SLOT_S,
    DayShape,
    dated,
    forecasts,
    past_days,
    read_forecasts,
    write_forecasts,
)

if TYPE_CHECKING:
    from pathlib import Path

    from policy.forecast.series import Array

HOUR = 3600
SHAPE = DayShape()


def test_a_forecast_is_fed_at_every_slot_of_the_run() -> None:
    today = SHAPE.rates(np.random.default_rng(9))
    dated = forecasts(past_days(SHAPE, 3, seed=1), today, 8 * HOUR, 8 * HOUR + 700)
    assert [one.at_ns for one in dated] == [0, 300 * 10**9, 600 * 10**9]
    assert all(len(one.forecast.tokens_p90) == 13 for one in dated)


def test_only_what_has_passed_is_looked_at() -> None:
    past = past_days(SHAPE, 3, seed=1)
    today = SHAPE.rates(np.random.default_rng(9))
    other = today.until(98).then(SHAPE.differing(0, 3.0).rates(np.random.default_rng(8)).until(2))
    until = 98 * SLOT_S
    begin = until - 2 * SLOT_S
    first = forecasts(past, today.until(100), begin, until + 1)
    assert first == forecasts(past, other, begin, until + 1)
    assert first[-1].at_ns == 600 * 10**9


def test_recorded_forecasts_are_read_back_the_same(tmp_path: Path) -> None:
    today = SHAPE.rates(np.random.default_rng(9))
    dated = forecasts(past_days(SHAPE, 2, seed=1), today, 9 * HOUR, 9 * HOUR + 600)
    write_forecasts(tmp_path / "forecasts.jsonl", dated)
    assert read_forecasts(tmp_path / "forecasts.jsonl") == dated


@pytest.mark.parametrize(("begin_s", "end_s"), [(7, 900), (900, 900), (-300, 900), (0, 86_401)])
def test_a_run_must_lie_within_the_day(begin_s: int, end_s: int) -> None:
    today = SHAPE.rates(np.random.default_rng(9))
    with pytest.raises(ValueError, match="must begin at a slot"):
        forecasts(past_days(SHAPE, 2, seed=1), today, begin_s, end_s)


def test_a_day_that_differs_is_shifted_and_scaled() -> None:
    other = SHAPE.differing(-1800, 1.3)
    at_s = np.arange(0, 86_400, 600.0)
    later = at_s[(at_s > 2 * HOUR) & (at_s < 20 * HOUR)]
    assert other.rps(later) == pytest.approx(1.3 * SHAPE.rps(later + 1800))
    assert max(seconds for seconds, _ in other.curve()) <= 86_400


def test_history_is_the_same_for_the_same_seed() -> None:
    first, again = past_days(SHAPE, 3, seed=4), past_days(SHAPE, 3, seed=4)
    assert len(first) == 3 * 288
    assert np.array_equal(first.tokens_per_s, again.tokens_per_s)
    assert not np.array_equal(first.tokens_per_s, past_days(SHAPE, 3, seed=5).tokens_per_s)


# Of any forecaster


class Rising:
    """By one a window above the last, and a factor for the quantile; sees all that is before."""

    horizons = (1, 3)

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def predict(self, series: Series, origins: Any) -> Array:
        last = self.factor * series.mean[origins]
        steps = np.array(self.horizons) * np.array([[0.5], [1.0], [2.0], [3.0]])
        found: Array = last[:, None, None] + steps.T
        assert found.shape == (len(origins), 2, len(QUANTILES))
        return found


REQUESTS = Series(300.0, np.arange(1.0, 11.0))
TOKENS = Series(300.0, np.arange(1.0, 11.0) * 500)


def test_a_forecast_is_fed_at_the_beginning_of_each_window() -> None:
    fed = dated(Rising(), REQUESTS, TOKENS, 4, 7)
    assert [each.at_ns for each in fed] == [0, 300 * 10**9, 600 * 10**9]
    first = fed[0].forecast  # window 3, of 4 requests/s, is the last that is known
    assert first.horizons_ns == (0, 150 * 10**9, 750 * 10**9, 900 * 10**9)
    assert first.requests_p50 == (4500, 5000, 7000, 7000)
    assert first.requests_p90 == (5000, 6000, 10_000, 10_000)
    assert first.tokens_p50 == (2000, 2001, 2003, 2003)
    for each in fed:
        check_forecast(each.forecast)
    other = dated(Rising(), REQUESTS, TOKENS, 4, 7, tokens_forecaster=Rising(2.0))
    assert other[0].forecast.tokens_p50 == (3000, 4001, 4003, 4003)
    assert other[0].forecast.requests_p50 == first.requests_p50


def test_what_comes_later_has_no_part_in_it() -> None:
    until = dated(Rising(), REQUESTS, TOKENS, 4, 7)
    later = np.where(np.arange(10) < 6, REQUESTS.mean, 99.0)
    assert dated(Rising(), replace(REQUESTS, mean=later), TOKENS, 4, 7) == until


def test_such_forecasts_are_a_scenarios(tmp_path: Path) -> None:
    fed = dated(Rising(), REQUESTS, TOKENS, 1, 10)
    write_forecasts(tmp_path / "forecasts.jsonl", fed)
    assert read_forecasts(tmp_path / "forecasts.jsonl") == fed


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"begin": 0}, "a run from window 0 to 7 must begin at 1"),
        ({"begin": 7}, "from window 7 to 7"),
        ({"end": 11}, "the 10 windows"),
        ({"tokens": TOKENS.until(9)}, "they must be the same"),
        ({"tokens": replace(TOKENS, window_s=600.0)}, "they must be the same"),
    ],
)
def test_a_run_that_cannot_be_is_refused(how: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {"requests": REQUESTS, "tokens": TOKENS, "begin": 4, "end": 7}
    with pytest.raises(ValueError, match=said):
        dated(Rising(), **good | how)


def test_two_forecasters_must_look_equally_far_ahead() -> None:
    other = Rising()
    other.horizons = (1, 2)
    with pytest.raises(ValueError, match=r"\(1, 3\) ahead and tokens for \(1, 2\)"):
        dated(Rising(), REQUESTS, TOKENS, 4, 7, tokens_forecaster=other)
