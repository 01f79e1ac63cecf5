"""The scenario ``forecast-ramp`` plays the days that its recorded forecasts are about."""

from __future__ import annotations

import pytest

from policy.forecast.seasonal import NS_PER_S
from tests.bench.ramp_forecasts import LASTS_S, LEAD_S, POINTS, USUAL, path_of, recorded
from twin.forecasts import read_forecasts
from twin.scenario import load_scenario


def test_recorded_forecasts_are_what_the_forecaster_says() -> None:
    found = read_forecasts(path_of("late-quiet"))
    made = recorded("late-quiet")
    assert [dated.at_ns for dated in found] == [slot * 300 * NS_PER_S for slot in range(24)]
    for one, two in zip(found, made, strict=True):
        assert one.at_ns == two.at_ns
        for name in ("horizons_ns", "requests_p50", "requests_p90", "tokens_p50", "tokens_p90"):
            # Rounding may differ between machines, which is why they are recorded.
            assert getattr(one.forecast, name) == pytest.approx(getattr(two.forecast, name), abs=1)


@pytest.mark.parametrize("point", POINTS)
def test_the_days_that_are_played_have_the_shape_that_was_forecast(point: str) -> None:
    shift_s, factor = POINTS[point]
    begin_s = USUAL.rise_s + shift_s - LEAD_S
    runs = load_scenario("forecast-ramp").runs
    played = runs[f"{point}-forecast"]
    (event,) = played.events
    assert event.file == path_of(point).name
    assert played.duration_s == LASTS_S
    arrivals = played.traffic.open[0].streams[0].arrivals
    day = [(begin_s + at_s, arrivals.rate_rps * rate) for at_s, rate in arrivals.curve]
    assert day == [
        pytest.approx(corner) for corner in USUAL.differing(shift_s, factor).curve()[1:3]
    ]
    assert runs[f"{point}-hpa"].traffic == played.traffic
    reactive = point.partition("-")[2] or point
    assert runs[f"{reactive}-reactive"].traffic == played.traffic
