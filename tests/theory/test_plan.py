"""The plan's formula against queueing theory, and the twin's fleet sizes against the formula.

A step takes a fixed time and one sequence runs at a time, so a replica is a server; behind the
policy's one queue c of them are M/M/c or M/D/c (see test_queues). The fewest servers whose mean
wait is within a limit follow from Erlang's formula alone.
"""

from __future__ import annotations

import math
from functools import cache

import pytest

from tests.theory.test_queues import SERVICE_NS, Queue, erlang_c, run
from twin.plan.formula import erlang_c as plans_erlang_c
from twin.plan.formula import wait_mean_s, wait_quantile_s
from twin.plan.search import smallest

RATE = 2.6
"""Arrivals per mean service."""
COUNT = 12_000


@pytest.mark.parametrize("servers", [1, 2, 5, 40, 100])
@pytest.mark.parametrize("load", [0.1, 0.5, 0.9, 0.99])
def test_erlangs_c_is_the_sum(servers: int, load: float) -> None:
    assert plans_erlang_c(servers, load) == pytest.approx(erlang_c(servers, load), rel=1e-9)


def test_erlangs_c_of_many_servers_does_not_overflow() -> None:
    assert 0 < plans_erlang_c(5000, 0.99) < 1
    assert plans_erlang_c(3, 1.2) == 1.0


def test_one_server_is_pollaczek_and_khinchines() -> None:
    assert wait_mean_s(1, 0.6, 1.0, 1.0) == pytest.approx(0.6 / 0.4)
    assert wait_mean_s(1, 0.6, 1.0, 0.0) == pytest.approx(0.6 / (2 * 0.4))
    assert math.isinf(wait_mean_s(2, 2.1, 1.0))


def test_the_tail_of_mmc_is_exponential() -> None:
    """P(wait > t) = C exp(-(c mu - lambda) t)."""
    servers, rate = 4, 3.4
    waits = erlang_c(servers, rate / servers)
    quantile = wait_quantile_s(servers, rate, 1.0, 1.0, 0.95)
    assert waits * math.exp(-(servers - rate) * quantile) == pytest.approx(0.05)
    assert wait_quantile_s(servers, 0.4, 1.0, 1.0, 0.95) == 0.0


@cache
def mean_wait(servers: int, law: str) -> float:
    """The twin's, in mean services."""
    seen = run(Queue(RATE / servers, servers, law), seed=21, count=COUNT)  # type: ignore[arg-type]
    return float(seen.path.wait_ns.mean()) / SERVICE_NS


@pytest.mark.parametrize(("law", "variation"), [("geometric", 1.0), ("constant", 0.0)])
@pytest.mark.parametrize("expected", [4, 5])
def test_the_fleet_size_is_the_formulas(law: str, variation: float, expected: int) -> None:
    """The limit lies half way (on a log scale) between the waits of this size and the next smaller
    one, a factor of two and more from both, so chance cannot decide."""
    waits = [wait_mean_s(servers, RATE, 1.0, variation) for servers in (expected - 1, expected)]
    limit = math.sqrt(waits[0] * waits[1])
    assert waits[0] / waits[1] > 2.5
    found = smallest(lambda n: mean_wait(n, law) <= limit, guess=7, least=3, most=20)
    exhaustive = next(n for n in range(3, 20) if mean_wait(n, law) <= limit)
    assert found == exhaustive == expected
