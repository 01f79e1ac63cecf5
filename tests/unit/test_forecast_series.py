"""Series of rates: what is refused, what is taken from them, how gaps are filled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from policy.forecast.contract import QUANTILES, check_origins, unrecorded
from policy.forecast.series import TARGETS, Series, filled, first_known

NAN = float("nan")


def series(mean: list[float], **more: Any) -> Series:
    return Series(600, np.array(mean), **more)


def test_means_and_peaks_are_told_apart() -> None:
    both = series([1, 2], peak=np.array([3.0, NAN]))
    assert both.of("mean").tolist() == [1, 2]
    assert both.of("peak") is both.peak
    assert len(both) == 2
    assert TARGETS == ("mean", "peak")


def test_peaks_that_nobody_counted_are_not_forecast() -> None:
    with pytest.raises(ValueError, match="'chat' has no peaks"):
        series([1, 2], name="chat").of("peak")
    with pytest.raises(ValueError, match="a series without a name has no peaks"):
        series([1, 2]).of("peak")


@pytest.mark.parametrize("rate", [-0.1, np.inf, -np.inf])
@pytest.mark.parametrize("target", TARGETS)
def test_rates_that_cannot_be_are_refused(target: str, rate: float) -> None:
    values = {"mean": np.ones(3), "peak": np.ones(3), target: np.array([1.0, NAN, rate])}
    with pytest.raises(ValueError, match=f"'chat' has a rate of {rate}"):
        Series(600, name="chat", **values)


def test_unknown_and_empty_windows_are_not_refused() -> None:
    assert np.isnan(series([0, NAN]).mean).tolist() == [False, True]
    assert len(series([])) == 0


@pytest.mark.parametrize("window_s", [0, -600, NAN, np.inf])
def test_windows_without_a_length_are_refused(window_s: float) -> None:
    with pytest.raises(ValueError, match="windows last"):
        Series(window_s, np.ones(2))


def test_peaks_of_other_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="1 peaks for 2 windows"):
        series([1, 2], peak=np.ones(1))


def test_more_than_one_row_of_rates_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(2, 3\)"):
        Series(600, np.ones((2, 3)))


def test_the_first_windows_keep_all_else() -> None:
    whole = series(
        [1, 2, 3], peak=np.array([4.0, 5, 6]), start_s=60.0, weekday_known=False, name="chat"
    )
    first = whole.until(2)
    assert (first.mean.tolist(), first.peak.tolist()) == ([1, 2], [4, 5])
    assert (first.window_s, first.start_s, first.weekday_known, first.name) == (
        600, 60.0, False, "chat",
    )  # fmt: skip
    assert len(whole.until(9)) == len(whole) == 3
    assert not len(series([1, 2]).until(1).peak)


def test_a_negative_number_of_windows_does_not_count_from_the_end() -> None:
    with pytest.raises(ValueError, match="first -1 windows of 'chat'"):
        series([1, 2], name="chat").until(-1)


@pytest.mark.parametrize(
    ("window_s", "windows"), [(600, 144), (300, 288), (433.2, 199), (86_400, 1), (604_800, 1)]
)
def test_windows_of_a_day(window_s: float, windows: int) -> None:
    assert Series(window_s, np.ones(2)).day_windows == windows


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, NAN, NAN, 2, NAN], [1, 1, 1, 2, 2]),
        ([NAN, NAN, 3, NAN], [3, 3, 3, 3]),
        ([1, 2], [1, 2]),
        ([NAN, NAN], [0, 0]),
        ([], []),
    ],
)
def test_gaps_are_filled_with_what_was_known_last(
    values: list[float], expected: list[float]
) -> None:
    given = np.array(values, float)
    assert filled(given).tolist() == expected
    assert np.array_equal(given, np.array(values, float), equal_nan=True), (
        "the argument was changed"
    )


@pytest.mark.parametrize(("values", "first"), [([NAN, NAN, 3, NAN], 2), ([1], 0), ([NAN], 1)])
def test_first_known(values: list[float], first: int) -> None:
    assert first_known(np.array(values)) == first


def test_origins_outside_are_refused() -> None:
    check_origins(series([1, 2]), np.array([0, 1]))
    check_origins(series([1, 2]), np.array([], int))
    for origins in ([0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="within the series' 2 windows"):
            check_origins(series([1, 2]), np.array(origins))


def test_origins_before_anything_was_recorded() -> None:
    late = series([NAN, 1, NAN], peak=np.array([NAN, NAN, 2]))
    origins = np.arange(3)
    assert unrecorded(late, origins, "mean").tolist() == [True, False, False]
    assert unrecorded(late, origins, "peak").tolist() == [True, True, False]
    with pytest.raises(ValueError, match="no peaks"):
        unrecorded(series([1]), origins[:1], "peak")


def test_quantiles_rise() -> None:
    assert list(QUANTILES) == sorted(set(QUANTILES))
