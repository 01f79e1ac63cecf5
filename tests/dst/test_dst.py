"""Whole random runs in the test-suite; ``python -m tests.dst`` plays many more."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.dst.random_scenarios import random_scenario
from tests.dst.runs import play, play_all

BLOCKS = [range(start, start + 20) for start in range(0, 200, 20)]


@pytest.mark.parametrize("seeds", BLOCKS, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_no_invariant_breaks(seeds: range) -> None:
    played = play_all(seeds)
    again = [f"python -m tests.dst --seed {seed}: {what}" for seed, what in played.broken]
    assert not again, "\n".join(again)


def test_a_seed_gives_one_run() -> None:
    for seed in (5, 9):  # on the light fleet, and on engines
        first, second = Counter[str](), Counter[str]()
        assert play(seed, first) == play(seed, second)
        assert first == second
        assert random_scenario(seed) == random_scenario(seed)
        assert random_scenario(seed) != random_scenario(seed + 1)
