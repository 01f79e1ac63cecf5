"""What a forecast is worth: curves, where they are compared, and what forecasters are shown."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.parquet as pq
import pytest

from policy.forecast.baselines import LastValue
from policy.forecast.contract import MEDIAN
from policy.forecast.series import Series
from tests.bench.forecast.worth import (
    LEVELS,
    OURS,
    RULES,
    STEADY,
    Job,
    closed_pct,
    figures_of,
    jobs_of,
    played_once,
    record,
    saved_pct,
)
from tests.bench.forecast.worth_scenes import HORIZONS, WINDOW_S, DayShapes, Perfect, ramp
from twin.forecast_worth import HPA, LOOP, PERFECT, WARM_UP_S, Point, front, hours_at
from twin.forecasts import read_forecasts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.bench.forecast.worth_scenes import Scene


@pytest.fixture(scope="module")
def morning(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return ramp(tmp_path_factory.mktemp("worth"), "early-quiet")


def _point(hours: float, missed: int, offered: int = 10_000) -> Point:
    return Point(700, hours, missed, offered)


def test_a_setting_that_costs_more_and_misses_no_less_is_not_on_the_front() -> None:
    points = [_point(30, 5), _point(10, 100), _point(20, 10), _point(25, 10), _point(27, 50)]
    assert front(points) == [_point(10, 100), _point(20, 10), _point(30, 5)]


def test_between_two_settings_the_logarithm_of_the_violations_is_straight() -> None:
    points = [_point(10, 1000, 10**6), _point(20, 10, 10**6)]
    assert hours_at(points, 100e-6) == pytest.approx(15, abs=0.1)
    assert hours_at(points, 1000e-6) == pytest.approx(10)
    assert hours_at(points, 10e-6) == pytest.approx(20)


def test_a_setting_without_violations_can_be_the_end() -> None:
    between = hours_at([_point(10, 100), _point(20, 0)], 0.001)
    assert between is not None
    assert 10 < between < 20


def test_outside_the_curve_nothing_is_invented() -> None:
    points = [_point(10, 100), _point(20, 10)]
    assert hours_at(points, 0.0001) is None  # nobody knows what fewer would cost
    assert hours_at(points, 0.05) == 10  # it costs at most this
    assert hours_at([], 0.001) is None


def test_savings_and_the_way_to_the_bound() -> None:
    assert saved_pct(80, 100) == pytest.approx(20)
    assert saved_pct(None, 100) is None
    assert closed_pct(80, 100, 60) == pytest.approx(50)
    assert closed_pct(110, 100, 60) == pytest.approx(-25)
    assert closed_pct(80, 100, 120) is None  # the bound is no better


def test_figures_compare_where_violations_are_equal() -> None:
    hours = {HPA: 100.0, LOOP: 90.0, OURS: 80.0, PERFECT: 70.0}
    curve = {
        title: [_point(each, round(10_000 * LEVELS["week"])), _point(2 * each, 0)]
        for title, each in hours.items()
    }
    found = {figure.name: figure for figure in figures_of({"week": curve, "ramp": curve})}
    for prefix in ("", "ramp_"):
        assert found[f"{prefix}gpu_hours_saved_pct"].value == pytest.approx(20)
        assert found[f"{prefix}gap_to_perfect_closed_pct"].value == pytest.approx(200 / 3)
        assert found[f"{prefix}gpu_hours_saved_against_loop_pct"].value == pytest.approx(100 / 9)


def test_every_rule_meets_the_same_requests_and_all_forecasters_the_same_settings(
    morning: Scene,
) -> None:
    files = {(morning.name, rule.forecaster): f"{rule.title}.jsonl" for rule in RULES}
    for load in ("week", "ramp"):
        jobs = jobs_of(load, [morning], files)
        assert {job.trace for job in jobs.values()} == {str(morning.trace)}
        for (title, setting, _), job in jobs.items():
            assert bool(job.forecasts) == (job.capacity["rule"] == "forecast")
            assert (STEADY.items() <= job.capacity.items()) == (load == "week" and title != HPA)
            if job.forecasts:
                assert job.capacity == jobs[PERFECT, setting, morning.name].capacity
                assert job.forecasts == f"{title}.jsonl"


def test_what_is_counted_is_what_is_played(morning: Scene) -> None:
    arrivals = pq.read_table(morning.trace, columns=["arrival_s"])["arrival_s"].to_numpy()
    counts = morning.requests.mean[morning.begin : morning.end] * WINDOW_S
    assert counts.sum() == pytest.approx(len(arrivals))
    assert counts[3] == pytest.approx(((arrivals >= 900) & (arrivals < 1200)).sum())
    late, early = counts[-6:].mean(), counts[:12].mean()
    assert 3.5 < late / early < 7


@pytest.mark.parametrize("make", [DayShapes, lambda: LastValue(HORIZONS)])
def test_forecasters_are_not_shown_what_comes(morning: Scene, make: type[DayShapes]) -> None:
    origins = np.array([morning.begin - 1, morning.begin + 5])
    mean = morning.requests.mean.copy()
    mean[origins[-1] + 1 :] *= 10
    changed = replace(morning.requests, mean=mean)
    before = make().predict(morning.requests, origins)
    assert (make().predict(changed, origins) == before).all()
    mean[origins[-1]] *= 10
    assert (make().predict(changed, origins)[-1] != before[-1]).any()


def test_the_perfect_one_is() -> None:
    series = Series(WINDOW_S, np.arange(10.0))
    found = Perfect().predict(series, np.array([2, 8]))
    assert found[:, :, MEDIAN].tolist() == [[3, 4, 5], [9, 9, 9]]


def test_forecasters_learn_from_what_lies_before_the_run(morning: Scene, tmp_path: Path) -> None:
    learned: list[Series] = []

    class Learner(Perfect):
        def fit(self, series: Sequence[Series]) -> Learner:
            learned.extend(series)
            return self

    files = record(tmp_path, [morning], {"one": Learner})
    (seen,) = learned
    assert len(seen) == morning.begin
    told = read_forecasts(tmp_path / files[morning.name, "one"])
    assert [dated.at_ns for dated in told] == [place * 300 * 10**9 for place in range(24)]


def test_a_run_counts_what_comes_after_the_warm_up(morning: Scene) -> None:
    capacity = {"rule": "hpa", "hpa_target_permille": 700}
    hours, missed, offered = played_once(Job("x", str(morning.trace), morning.lasts_s, capacity))
    arrivals = pq.read_table(morning.trace, columns=["arrival_s"])["arrival_s"].to_numpy()
    assert offered == (arrivals >= WARM_UP_S).sum()
    assert 0 < missed < offered / 5
    assert 2 < hours < 50
