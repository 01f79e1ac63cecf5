"""From quantiles of windows to the event that the policy is told."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.capacity import check_forecast
from policy.decisions import Refused
from policy.facts import COUNT_MOST
from policy.forecast.contract import QUANTILES
from policy.forecast.events import forecasted
from tests.policy_support import Checked, parameters

if TYPE_CHECKING:
    from policy.events import Forecasted

S = 1_000_000_000


def told(
    *medians: float, window_s: float = 600.0, horizons: tuple[int, ...] = (1, 2), **more: Any
) -> Forecasted:
    """Requests with these medians, half as much again for the 90th percentile; a thousand tokens
    each."""
    rates = np.array(medians)[:, None] * np.array([0.5, 1.0, 1.5, 2.0])
    return forecasted(window_s, horizons, rates, 1000 * rates, **more)


def test_an_average_stands_for_its_windows_middle() -> None:
    event = told(4.0, 8.0)
    assert event.horizons_ns == (0, 300 * S, 900 * S, 1200 * S)
    assert event.requests_p50 == (4000, 4000, 8000, 8000)
    assert event.requests_p90 == (6000, 6000, 12_000, 12_000)
    assert event.tokens_p50 == (4000, 4000, 8000, 8000)
    assert event.tokens_p90 == (6000, 6000, 12_000, 12_000)


def test_now_lies_on_the_line_from_what_was_seen() -> None:
    event = told(4.0, 8.0, seen=(2.0, 1000.0))
    assert (event.requests_p50[0], event.requests_p90[0]) == (3000, 4000)
    assert (event.tokens_p50[0], event.tokens_p90[0]) == (2500, 3500)
    far = told(8.0, horizons=(4,), seen=(0.0, 0.0))  # 4 windows from middle to middle
    assert far.requests_p50[0] == 1000


def test_what_is_not_known_was_as_the_first_forecast() -> None:
    assert told(4.0, 8.0, seen=(math.nan, 2000.0)).requests_p50[0] == 4000
    assert told(4.0, 8.0, seen=(math.nan, 2000.0)).tokens_p50[0] == 3000


def test_windows_may_have_any_length_and_horizons_any_order() -> None:
    event = told(8.0, 4.0, window_s=433.2378, horizons=(3, 1))
    assert event.horizons_ns == (0, 216_618_900_000, 1_083_094_500_000, 1_299_713_400_000)
    assert event.requests_p50 == (4000, 4000, 8000, 8000)


def test_the_policy_takes_it() -> None:
    checked = Checked(parameters())
    assert not any(isinstance(each, Refused) for each in checked.feed(told(4.0, 8.0)))


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True),
    st.floats(1e-3, 1e5),
    st.data(),
)
def test_it_is_always_one_that_the_policy_can_take(
    horizons: list[int], window_s: float, data: st.DataObject
) -> None:
    rate = st.one_of(st.floats(-1e30, 1e30), st.floats(0, 100))
    rows = st.lists(rate, min_size=len(QUANTILES), max_size=len(QUANTILES))
    table = st.lists(rows, min_size=len(horizons), max_size=len(horizons)).map(np.array)
    seen = st.none() | st.tuples(st.floats(), st.floats())
    event = forecasted(window_s, horizons, data.draw(table), data.draw(table), data.draw(seen))
    check_forecast(event)
    assert event.horizons_ns[0] == 0
    for median, upper in (
        (event.requests_p50, event.requests_p90), (event.tokens_p50, event.tokens_p90),
    ):  # fmt: skip
        assert all(low <= high for low, high in zip(median, upper, strict=True))


def test_more_than_can_be_is_the_most_that_can_be() -> None:
    assert told(1e300, horizons=(1,)).requests_p90[-1] == COUNT_MOST
    rates = np.full((1, len(QUANTILES)), 1e306)  # a thousand times that is no number
    assert forecasted(600.0, (1,), rates, rates).requests_p90[-1] == COUNT_MOST


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"horizons": ()}, "horizons must be different ones from 1"),
        ({"horizons": (0, 1)}, r"horizons .* are \(0, 1\)"),
        ({"horizons": (2, 2)}, r"horizons .* are \(2, 2\)"),
        ({"window_s": 0.0}, "windows of 0.0 s"),
        ({"window_s": math.nan}, "windows of nan s"),
        ({"window_s": 1e9}, "windows of 1000000000.0 s cannot be forecast 2 ahead"),
        ({"horizons": (1,)}, "requests must be 1 horizons x 4 quantiles, but are 2 x 4"),
        ({"tokens": np.full((2, 4), np.nan)}, "the forecast of tokens has values"),
        ({"requests": np.full((2, 4), np.inf)}, "the forecast of requests has values"),
    ],
)
def test_what_is_no_forecast_is_refused(how: dict[str, Any], said: str) -> None:
    good: dict[str, Any] = {
        "window_s": 600.0, "horizons": (1, 2), "requests": np.ones((2, 4)),
        "tokens": np.ones((2, 4)),
    }  # fmt: skip
    forecasted(**good)
    with pytest.raises(ValueError, match=said):
        forecasted(**good | how)
