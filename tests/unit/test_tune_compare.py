"""Comparisons in pairs: intervals, who is stopped, fronts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from twin.tune.compare import dominated, front, jackknife, paired, student

TABLE = {
    (0.9, 1): 6.314, (0.9, 4): 2.132, (0.9, 14): 1.761, (0.95, 2): 4.303, (0.95, 9): 2.262,
    (0.95, 49): 2.010, (0.99, 3): 5.841, (0.99, 4): 4.604, (0.99, 30): 2.750,
}  # fmt: skip


@pytest.mark.parametrize(("level", "freedom"), TABLE)
def test_students_quantiles_are_those_of_the_tables(level: float, freedom: int) -> None:
    assert student(level, freedom) == pytest.approx(TABLE[level, freedom], abs=6e-4)


def test_what_both_share_falls_out_of_a_pair() -> None:
    shared = np.array([10.0, 50.0, 3.0, 80.0, 22.0])
    found = paired(shared + 1.0, shared, 1)
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1))
    assert found.better
    assert paired(shared + 1.0, shared, -1).worse


def test_a_block_that_one_lacks_is_left_out_and_few_give_no_interval() -> None:
    ours = np.array([1.0, np.nan, 2.0, 3.0])
    theirs = np.array([0.0, 5.0, 1.0, np.nan])
    found = paired(ours, theirs, 1)
    assert found.value == 1
    assert math.isnan(found.low)
    assert not found.better


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(2000):
        gains = rng.normal(0.3, 1.0, 8)
        found = paired(gains, np.zeros(8), 1, 0.9)
        held += found.low <= 0.3 <= found.high
    assert held / 2000 == pytest.approx(0.9, abs=0.02)


def test_only_what_is_worse_and_nowhere_possibly_better_is_dominated() -> None:
    rival = np.array([[100.0, 1.0]] * 10) + np.arange(10)[:, None] * [1.0, 0.0]
    worse = rival - [5.0, 0.0]
    assert dominated(worse, rival, (1, -1))
    assert dominated(worse[:4], rival, (1, -1)), "a prefix is compared with the rival's"
    assert not dominated(worse - [0.0, 0.5], rival, (1, -1)), "its second objective is better"
    assert not dominated(rival, rival, (1, -1)), "equal is not worse"
    noisy = worse + np.array([[40.0, 0.0], [-40.0, 0.0]] * 5)
    assert not dominated(noisy, rival, (1, -1)), "not certain"


def test_a_front_holds_what_no_other_beats_and_equal_ones_once() -> None:
    rows = [(1.0, 9.0), (2.0, 9.0), (3.0, 4.0), (3.0, 4.0), (2.0, 8.0), (math.nan, 1.0)]
    assert front(rows, (1, -1)) == [2, 5]
    assert front([(1.0,), (3.0,), (2.0,)], (1,)) == [1]


def test_a_jackknife_of_a_mean_is_students_interval() -> None:
    values = np.array([3.0, 5.0, 4.0, 8.0, 1.0, 6.0])
    by_hand = paired(values, np.zeros(6), 1, 0.95)
    found = jackknife(6, lambda places: float(values[places].mean()), 0.95)
    assert (found.low, found.high) == pytest.approx((by_hand.low, by_hand.high))
