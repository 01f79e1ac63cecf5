"""Rows of the fidelity table: errors, noise that cannot cancel, and what is not measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.fidelity.driving import Seen, prompt_ids
from tests.bench.fidelity.loads import BLOCK_TOKENS, Load, Want, flood
from tests.bench.fidelity.noise import noise_percent
from tests.bench.fidelity.rows import Result, Run, _figure, rows_of
from tests.figures import Figure
from twin.alone import Served

MS = 1_000_000


def run(real_ms: int, twin_ms: int, count: int = 20) -> Run:
    """Requests of 11 tokens that took so long, half of it before the first token."""
    want = Want(0.0, 64, 11)
    seen = [
        Seen(want, number * MS, real_ms * MS // 2, real_ms * MS, real_ms * MS // 2, 0, 0, 0)
        for number in range(count)
    ]
    half = twin_ms * MS // 2
    served = [
        Served(number * MS, first_ns=number * MS + half, last_ns=number * MS + 2 * half)
        for number in range(count)
    ]
    return Run(seen, served, 1.0, served, served)


def result(a: list[Run], b: list[Run]) -> Result:
    return Result(Load("some", "some load", "fcfs", ()), a, b)


def test_the_error_is_that_of_all_runs_together() -> None:
    rows = rows_of(result([run(100, 104), run(100, 104)], [run(100, 104), run(100, 104)]))
    assert set(rows) == {"e2e_mean", "e2e_p99", "ttft_mean", "ttft_p99", "tpot_mean"}
    for row in rows.values():
        assert row.error == pytest.approx(4.0)
        assert row.noise == 0


def test_segments_that_differ_either_way_do_not_cancel() -> None:
    rows = rows_of(result([run(120, 100), run(80, 100)], [run(80, 100), run(120, 100)]))
    assert rows["e2e_mean"].error == pytest.approx(0.0)
    assert rows["e2e_mean"].noise > 25
    assert noise_percent(100, 100, [(120, 80), (80, 120)]) == pytest.approx(28.3, abs=0.1)
    assert noise_percent(110, 90, [(100, 100)]) == pytest.approx(20.0)


def test_a_row_with_noise_above_half_its_bar_does_not_hold() -> None:
    good = _figure("x_pct", 1.0, 2.4, 5.0, "how")
    loud = _figure("x_pct", 1.0, 2.6, 5.0, "how")
    assert good.holds
    assert (loud.value, loud.holds) == (None, False)
    assert "NOT MEASURED (error 1.0 %)" in loud.how
    assert not _figure("x_pct", 5.1, 0.0, 5.0, "how").holds
    assert not Figure("x", None, "%", ">= 0", "").holds


def test_prompts_are_shared_only_as_far_as_their_blocks_are() -> None:
    want = Want(0.0, 3 * BLOCK_TOKENS, 8, prefix=(7, 9))
    one, two = prompt_ids(want, 1, 0), prompt_ids(want, 1, 1)
    assert len(one) == 3 * BLOCK_TOKENS
    assert one[: 2 * BLOCK_TOKENS] == two[: 2 * BLOCK_TOKENS]
    assert one[2 * BLOCK_TOKENS :] != two[2 * BLOCK_TOKENS :]
    other = prompt_ids(replace(want, prefix=(7, 8)), 1, 2)
    assert other[:BLOCK_TOKENS] == one[:BLOCK_TOKENS]
    assert other[BLOCK_TOKENS : 2 * BLOCK_TOKENS] != one[BLOCK_TOKENS : 2 * BLOCK_TOKENS]
    assert prompt_ids(want, 2, 0)[:BLOCK_TOKENS] != one[:BLOCK_TOKENS], "another run, other tokens"


def test_a_flood_is_the_same_at_every_call() -> None:
    assert flood(30).segments == flood(30).segments
    assert {want.at_s for want in flood(30).segments[0]} == {0.0}
