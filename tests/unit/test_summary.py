"""Figures of a run: histogram quantiles against exact ones, and what counts as good."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.support import MS, S, bare_fleet, engine_settings, flat_cost, write_rows
from twin.arrivals import arrivals
from twin.results import HOPS, Observed
from twin.summary import Histogram, Slo, Summary
from twin.world import Result, WorldSettings

if TYPE_CHECKING:
    from pathlib import Path

DICE = np.random.default_rng(5)
SETTINGS = WorldSettings(gateway_ns=MS, network_ns=MS)


# Histograms


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0])
@pytest.mark.parametrize(
    "values",
    [
        DICE.lognormal(0, 1.5, 20_000),
        DICE.uniform(0.001, 2, 20_000),
        DICE.pareto(1.5, 20_000) + 1e-3,
        np.full(100, 0.37),
        np.array([1.0, 2.0, 3.0]),
        np.array([2.5e-6, 9e4]),
    ],
    ids=["lognormal", "uniform", "pareto", "constant", "three", "extremes"],
)
def test_quantiles_are_within_half_a_percent(values: Any, share: float) -> None:
    histogram = Histogram()
    for part in np.array_split(values, 7):
        histogram.add(part)
    exact = np.quantile(values, share, method="inverted_cdf")
    assert histogram.quantile_s(share) == pytest.approx(exact, rel=0.005)
    assert histogram.count == values.size
    assert histogram.mean_s() == pytest.approx(values.mean(), rel=1e-9)
    assert histogram.largest == values.max()


def test_no_quantile_is_above_the_largest() -> None:
    histogram = Histogram()
    histogram.add(np.array([1.0001]))
    assert histogram.quantile_s(1.0) <= 1.0001


def test_zeros_are_zeros() -> None:
    histogram = Histogram()
    histogram.add(np.array([0.0, 0.0, 0.0, 5.0]))
    assert histogram.quantile_s(0.5) == 0.0
    assert histogram.quantile_s(1.0) == pytest.approx(5.0, rel=0.005)


def test_an_empty_histogram_has_no_figures() -> None:
    histogram = Histogram()
    histogram.add(np.array([]))
    assert histogram.count == 0
    assert np.isnan([histogram.mean_s(), histogram.quantile_s(0.5)]).all()
    assert histogram.curve() == ([], [])


def test_the_curve_is_the_distribution() -> None:
    values = DICE.lognormal(0, 1, 5000)
    histogram = Histogram()
    histogram.add(values)
    seconds, shares = histogram.curve()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    for at, share in list(zip(seconds, shares, strict=True))[::50]:
        assert (values <= at).mean() == pytest.approx(share, abs=1e-9)


# Groups


def summary_of(
    tmp_path: Path, rows: list[dict[str, Any]], results: list[Result], slo: Slo | None = None
) -> Summary:
    """The summary of one chunk with these rows and results; answers are as long as the rows say."""
    (chunk,) = arrivals(write_rows(tmp_path / "t.parquet", rows))
    chunk.results = [
        result._replace(output_tokens=row["output_tokens"] if result.last_ns >= 0 else 0)
        for row, result in zip(rows, results, strict=True)
    ]
    summary = Summary(slo)
    summary.add(chunk, Observed(chunk, bare_fleet(1, engine_settings(), flat_cost()), SETTINGS))
    return summary


def row(sla: str = "", output: int = 11, **more: Any) -> dict[str, Any]:
    return {
        "arrival_s": 0.0, "prompt_tokens": 100, "output_tokens": output, "sla_class": sla or None,
        **more,
    }  # fmt: skip


def result(
    ttft_ns: int = S, e2e_ns: int = 2 * S, outcome: str = "answered", why: str = "", tier: str = ""
) -> Result:
    """Answered, unless said otherwise: first token at ``ttft_ns``, all at ``e2e_ns``."""
    if outcome in ("answered", "degraded"):
        first, last = ttft_ns - 2 * MS, e2e_ns - 2 * MS
        return Result(
            outcome,
            why,
            tier,
            200,
            0,
            1,
            0,
            e2e_ns,
            10 * MS,
            12 * MS,
            first,
            last,
            ttft_ns,
            40,
            0,
            1,
            answered_ns=e2e_ns,
        )
    return Result(outcome, why, tier, 503, -1, 0, 0, e2e_ns, -1, -1, -1, -1, -1, 0, 0, 0)


@pytest.mark.parametrize(
    ("rows", "results", "good"),
    [
        (row("P0"), result(1500 * MS), 1),
        (row("P0"), result(1501 * MS, 2 * S), 0),
        (row("P1"), result(4000 * MS, 5 * S), 1),
        (row("P1"), result(4001 * MS, 5 * S), 0),
        (row("P2"), result(10_000 * MS, 11 * S), 1),
        (row("P2"), result(10_001 * MS, 11 * S), 0),
        (row(), result(4000 * MS, 5 * S), 1),
        (row("other"), result(4001 * MS, 5 * S), 0),
        (row("P0", deadline_s=3.0), result(3 * S, 3500 * MS), 1),
        (row("P2", deadline_s=0.5), result(501 * MS, S), 0),
        (row("P0", 11), result(S, 2 * S), 1),
        (row("P0", 11), result(S, 2 * S + 1 * MS), 0),
        (row("P0", 1), result(S, 3 * S), 1),
        (row("P0"), result(outcome="degraded", why="model small"), 1),
        (row("P0"), result(outcome="shed", why="deadline"), 0),
        (row("P0"), result(outcome="failed", why="oom"), 0),
        (row("P0"), result(outcome="cancelled"), 0),
    ],
    ids=[
        "P0 just", "P0 late", "P1 just", "P1 late", "P2 just", "P2 late", "no class",
        "unknown class", "own deadline", "own shorter deadline", "100 ms a token", "101 ms a token",
        "one token", "degraded", "shed", "failed", "cancelled",
    ],
)  # fmt: skip
def test_good_is_answered_within_the_time_to_first_token_and_per_token(
    tmp_path: Path, rows: dict[str, Any], results: Result, good: int
) -> None:
    summary = summary_of(tmp_path, [rows], [results])
    assert summary.all.good == good
    assert summary.all.offered == 1
    assert summary.all.good_output_tokens == good * rows["output_tokens"]


def test_an_embedding_is_judged_by_when_its_answer_is_there(tmp_path: Path) -> None:
    rows = [row("P0", 0, endpoint="embeddings")] * 2
    results = [result(0, e2e_ns)._replace(first_ns=-1, first_out_ns=-1) for e2e_ns in (S, 2 * S)]
    assert summary_of(tmp_path, rows, results).all.good == 1


def test_goodput_and_attainment_are_of_what_was_offered(tmp_path: Path) -> None:
    rows = [row("P0")] * 5
    results = [
        result(), result(1600 * MS, 2 * S), result(outcome="shed", why="deadline"),
        result(outcome="failed", why="oom"), result(outcome="degraded", why="model small"),
    ]  # fmt: skip
    figures = summary_of(tmp_path, rows, results).all.figures(span_s=4.0)
    assert figures["offered"] == 5
    assert [figures[name] for name in ("answered", "degraded", "shed", "failed", "cancelled")] == [
        2, 1, 1, 1, 0,
    ]  # fmt: skip
    assert figures["good"] == 2
    assert figures["slo_attainment"] == pytest.approx(2 / 5)
    assert figures["slo_attainment_admitted"] == pytest.approx(2 / 3)
    assert figures["goodput_per_s"] == pytest.approx(2 / 4)
    assert figures["offered_per_s"] == pytest.approx(5 / 4)
    assert figures["output_tokens"] == 3 * 11
    assert figures["good_output_tokens"] == 2 * 11
    assert figures["preemptions"] == 3


def test_groups_add_up_to_all(tmp_path: Path) -> None:
    rows = [
        row(f"P{number % 3}", business_line=("search", "support")[number % 2])
        for number in range(30)
    ]
    results = [result(tier=("turbo", "batch", "")[number % 3 % 2]) for number in range(29)]
    results.append(result(outcome="shed", why="deadline", tier="turbo"))
    summary = summary_of(tmp_path, rows, results)
    assert sorted(summary.groups["sla"]) == ["P0", "P1", "P2"]
    assert sorted(summary.groups["line"]) == ["search", "support"]
    for groups in summary.groups.values():
        for name in ("offered", "answered", "shed", "good", "output_tokens", "preemptions"):
            total = sum(getattr(group, name) for group in groups.values())
            assert total == getattr(summary.all, name)
    assert summary.shed_why == {"shed: deadline": 1}


def test_prompt_and_cached_tokens_are_those_of_answers(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, [row()] * 2, [result(), result(outcome="shed")])
    assert (summary.prompt_tokens, summary.cached_tokens) == (100, 40)
    assert summary.last_ns == 2 * S


def test_the_limits_can_be_chosen(tmp_path: Path) -> None:
    slo = Slo(ttft_s={"P0": 0.5, "": 9.0}, tpot_s=10.0)
    summary = summary_of(tmp_path, [row("P0"), row("P1")], [result(), result()], slo)
    assert summary.groups["sla"]["P0"].good == 0
    assert summary.groups["sla"]["P1"].good == 1


def test_without_requests_there_are_no_figures_but_no_errors_either() -> None:
    figures = Summary().all.figures(0.0)
    assert figures["slo_attainment"] is None
    assert figures["ttft_s_p95"] is None
    assert figures["goodput_per_s"] is None
    assert all(figures[f"{name}_mean"] is None for name in HOPS)


def test_a_template_or_a_part_of_a_chain_is_not_good_however_fast(tmp_path: Path) -> None:
    hows = ["model small", "cached", "template", "chain_budget", "low_confidence"]
    results = [result(outcome="degraded", why=how) for how in hows]
    summary = summary_of(tmp_path, [row("P0")] * 5, results)
    assert (summary.all.degraded, summary.all.good) == (5, 2)
    assert summary.degraded_how == dict.fromkeys(hows, 1)


def test_wrong_answers_are_counted_where_they_were_given_out_as_answers(tmp_path: Path) -> None:
    results = [
        result()._replace(correct=1, verification="not_needed"),
        result()._replace(correct=0, verification="match"),
        result()._replace(correct=0, verification="match"),
        result(outcome="degraded", why="template")._replace(correct=0, verification="mismatch"),
        result(),
    ]
    summary = summary_of(tmp_path, [row("P0")] * 5, results)
    assert (summary.all.judged, summary.all.wrong) == (3, 2)
    assert summary.verification == {"not_needed": 1, "match": 2, "mismatch": 1, "": 1}
    assert summary.all.figures(1.0)["wrong"] == 2
