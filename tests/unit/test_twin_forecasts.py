"""Forecasts made before a run, and the daily load curve to try them on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from twin.forecasts import (
    SLOT_S,
    DayShape,
    forecasts,
    past_days,
    rates_of,
    read_forecasts,
    write_forecasts,
)

if TYPE_CHECKING:
    from pathlib import Path

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


def test_rates_are_counted_by_slot() -> None:
    rates = rates_of(np.asarray([0.0, 299.0, 300.0, 9999.0]), np.asarray([10, 20, 30, 40]), 3)
    assert (rates.requests_per_s * SLOT_S).round(9).tolist() == [2, 1, 0]
    assert (rates.tokens_per_s * SLOT_S).round(9).tolist() == [30, 30, 0]


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
