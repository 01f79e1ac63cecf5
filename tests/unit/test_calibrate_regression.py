"""The solver behind the fits."""

from __future__ import annotations

import numpy as np
import pytest

from twin.regression import non_negative_solution


def solve(terms: np.ndarray, values: np.ndarray) -> np.ndarray:
    return non_negative_solution(terms.T @ terms, terms.T @ values)


def test_a_solution_above_zero_is_the_plain_one() -> None:
    generator = np.random.default_rng(1)
    terms = generator.uniform(0, 1, (40, 3)) * [1, 1e4, 1e9]  # columns of any size
    true = np.array([5.0, 0.3, 2e-6])
    assert solve(terms, terms @ true) == pytest.approx(true, rel=1e-6)


@pytest.mark.parametrize("seed", range(30))
def test_no_coefficient_is_negative_and_none_could_be_better(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker hold."""
    generator = np.random.default_rng(seed)
    terms = generator.normal(size=(30, 6))
    values = generator.normal(size=30)
    found = solve(terms, values)
    slope = terms.T @ (values - terms @ found)
    assert (found >= 0).all()
    assert slope[found > 0] == pytest.approx(0, abs=1e-6)
    assert (slope[found == 0] <= 1e-6).all()


def test_columns_that_say_the_same_do_no_harm() -> None:
    terms = np.ones((10, 2))
    assert solve(terms, np.full(10, 4.0)).sum() == pytest.approx(4.0)
    assert solve(np.zeros((10, 2)), np.full(10, 4.0)) == pytest.approx(0.0)
