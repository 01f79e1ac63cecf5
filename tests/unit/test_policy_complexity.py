"""Guesses: tokens from bytes, outputs from the past, FLOPs, prefixes."""

from __future__ import annotations

import random

import pytest

from policy.complexity import UNIT, Complexity, Quantile, flops
from policy.events import Finished
from policy.prefixes import PrefixTable, chain
from tests.policy_support import arrived, parameters, up


@pytest.mark.parametrize("permille", [100, 500, 600, 900])
@pytest.mark.parametrize("shape", ["uniform", "exponential", "two"])
def test_the_online_quantile_comes_near_the_true_one(permille: int, shape: str) -> None:
    rng = random.Random(permille)  # noqa: S311
    draw = {
        "uniform": lambda: rng.randrange(1000),
        "exponential": lambda: round(rng.expovariate(1 / 300)),
        "two": lambda: rng.choice((40, 50, 60, 800, 900, 1000)),
    }[shape]
    samples = [draw() for _ in range(4000)]
    quantile = Quantile()
    seen: list[int] = []
    for at, sample in enumerate(samples):
        quantile.add(sample, permille)
        if at > 500:
            seen.append(quantile.value // UNIT)
    below = sum(sum(sample <= value for sample in samples[:400]) for value in seen[::50])
    share = below / (len(seen[::50]) * 400)
    assert share == pytest.approx(permille / 1000, abs=0.12)


def test_the_online_quantile_forgets() -> None:
    quantile = Quantile()
    for _ in range(500):
        quantile.add(1000, 600)
    assert quantile.value // UNIT == 1000
    for _ in range(300):
        quantile.add(10, 600)
    assert quantile.value // UNIT < 20


def test_an_outlier_moves_it_by_a_step_only() -> None:
    quantile = Quantile()
    for _ in range(200):
        quantile.add(100, 600)
    quantile.add(1_000_000, 600)
    assert quantile.value // UNIT <= 103


def learned(complexity: Complexity, count: int, tokens: int, **fields: object) -> None:
    for request in range(count):
        event = arrived(request, **fields)  # type: ignore[arg-type]
        complexity.observe(event, "P1", Finished(request, 0, event.prompt_bytes // 4, 0, tokens))


def test_the_output_is_expected_by_user_then_line_then_class_then_default() -> None:
    complexity = Complexity(parameters())
    event = arrived(0, user="ann", line="search")
    assert complexity.output_tokens(event, "P1") == 256
    learned(complexity, 5, 40)
    assert complexity.output_tokens(event, "P1") == 40
    learned(complexity, 5, 80, line="search")
    assert complexity.output_tokens(event, "P1") == 80
    learned(complexity, 4, 7, user="ann")
    assert complexity.output_tokens(event, "P1") == 80  # four say too little
    learned(complexity, 1, 7, user="ann")
    assert complexity.output_tokens(event, "P1") == 7
    assert complexity.output_tokens(arrived(0, line="search"), "P1") == 80
    assert complexity.output_tokens(arrived(0), "P2") == 256


def test_max_tokens_only_ever_lowers_the_expectation() -> None:
    complexity = Complexity(parameters())
    assert complexity.output_tokens(arrived(0, max_tokens=30), "P1") == 30
    assert complexity.output_tokens(arrived(0, max_tokens=30_000), "P1") == 256


def test_embeddings_have_no_output() -> None:
    complexity = Complexity(parameters())
    learned(complexity, 9, 5, endpoint="embeddings", user="ann")
    assert complexity.output_tokens(arrived(0, endpoint="embeddings", user="ann"), "P1") == 0
    assert complexity.output_tokens(arrived(0, user="ann"), "P1") == 256


def test_bytes_become_tokens_by_each_models_own_usage() -> None:
    complexity = Complexity(parameters())
    assert complexity.prompt_tokens("m", 4000) == 1000
    for request in range(100):
        event = arrived(request, tokens=1000)
        complexity.observe(event, "P1", Finished(request, 0, 2000, 0, 5))
    assert complexity.prompt_tokens("m", 4000) == pytest.approx(2000, rel=0.02)
    assert complexity.prompt_tokens("other", 4000) == 1000


@pytest.mark.parametrize(("prompt", "cached", "output"), [(1, 0, 0), (900, 0, 100), (900, 512, 7)])
def test_flops_count_new_tokens_and_every_pair(prompt: int, cached: int, output: int) -> None:
    pair = 4 * 36 * 4096
    spec = up(0, attention_flops_per_token_pair=pair)
    last = prompt + output
    attention = sum(pair * (position + 1) for position in range(cached, last))
    expected = 2 * spec.active_params * (last - cached) + attention
    assert flops(spec, prompt, cached, output) == expected


def test_a_prefix_is_only_found_behind_the_same_beginning() -> None:
    def keys(*prefix: int) -> tuple[int, ...]:
        return chain(arrived(0, prefix=prefix, prefix_block_bytes=512), 10)

    table = PrefixTable(100)
    table.add(keys(1, 2, 3), 128)
    assert table.cached_blocks(keys(1, 2, 3, 4)) == 3
    assert table.cached_blocks(keys(1, 2, 9)) == 2
    assert table.cached_blocks(keys(2, 3)) == 0
    assert table.cached_blocks(()) == 0
    assert len(chain(arrived(0, prefix=tuple(range(20)), prefix_block_bytes=1), 10)) == 10


def test_shared_blocks_are_held_once_and_stay_cached() -> None:
    one = chain(arrived(0, prefix=(1, 2), prefix_block_bytes=512), 10)
    two = chain(arrived(0, prefix=(1, 3), prefix_block_bytes=512), 10)
    table = PrefixTable(100)
    table.add(one, 128)
    table.add(two, 130)
    assert table.held_tokens == 128 + 128 + 130
    table.remove(one)
    assert table.held_tokens == 128 + 130
    assert (table.held_blocks(one), table.cached_blocks(one)) == (1, 2)
    table.remove(two)
    assert table.held_tokens == 0
    assert table.cached_blocks(two) == 2


def test_the_table_forgets_the_oldest_but_never_what_is_in_flight() -> None:
    table = PrefixTable(4)
    kept = chain(arrived(0, prefix=(1, 2), prefix_block_bytes=1), 10)
    table.add(kept, 1)
    for number in range(10, 40):
        keys = chain(arrived(0, prefix=(number, 5), prefix_block_bytes=1), 10)
        table.add(keys, 1)
        table.remove(keys)
        assert table.cached_blocks(keys) == 2
    assert table.cached_blocks(kept) == 2
    assert len(table.entries) <= 4
    table.remove(kept)
    assert table.held_tokens == 0
