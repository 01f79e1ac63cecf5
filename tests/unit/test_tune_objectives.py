"""Figures: from a trace's requests, from a scenario's figures, and their constraints."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from twin.tune.objectives import UNANSWERED_S, Rows, TuneError, goals_of, parse_figure

ROWS = Rows(
    sla=np.array(["P0", "P0", "P1", "P2", "P2"]),
    line=np.array(["a", "b", "a", "b", "b"]),
    good=np.array([True, False, True, False, True]),
    ttft_s=np.array([0.2, UNANSWERED_S, 1.0, 7.0, 3.0]),
    tokens=np.array([10, 0, 20, 300, 100]),
    outcome=np.array(["answered", "shed", "answered", "degraded", "failed"]),
    span_s=4.0,
)
GROUP: dict[str, Any] = {
    "offered": 100, "cancelled": 0, "good": 90, "output_tokens_per_s": 55.0, "shed_share": 0.05,
    "failed_share": 0.01, "degraded_share": 0.1, "wrong": 3,
    "degraded_by": {"template": 6, "cached": 3, "model small": 1},
    "ttft_s": {"count": 100, "p50": 1.0, "p95": 3.0, "p99": 5.0, "most": 9.0},
}  # fmt: skip
RUN: dict[str, Any] = {
    "duration_s": 10.0, "useful_degraded": ("cached", "model"), "all": GROUP,
    "by_class": {"P0": {**GROUP, "ttft_s": {**GROUP["ttft_s"], "count": 96}}, "P2": GROUP},
    "by_line": {}, "fleet": {"gpu_hours": 1.5}, "clients": {"agents": {"useful": 7}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("goodput", 3 / 4),
        ("goodput.P2", 1 / 4),
        ("slo_attainment", 3 / 5),
        ("slo_attainment.P0", 1 / 2),
        ("slo_attainment.b", 1 / 3),
        ("p0_ttft_p95_s", UNANSWERED_S),
        ("ttft_p99_s.P2", 7.0),
        ("batch_tokens_per_s", 100.0),
        ("shed_share", 1 / 5),
        ("failed_share.P2", 1 / 2),
        ("degraded_share.P0", 0.0),
    ],
)
def test_figures_of_a_trace(name: str, value: float) -> None:
    assert parse_figure(name, trace=True).of_rows(ROWS) == pytest.approx(value)


def test_a_group_that_nobody_is_of_has_no_figure() -> None:
    assert math.isnan(parse_figure("slo_attainment.P9", trace=True).of_rows(ROWS))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("goodput", 8.4),  # templates are no answers
        ("slo_attainment.P0", 0.84),
        ("ttft_p95_s", 3.0),
        ("batch_tokens_per_s", 55.0),
        ("gpu_hours", 1.5),
        ("wrong", 3.0),
        ("shed_share.P0", 0.05),
        ("max:clients.agents.useful", 7.0),
    ],
)
def test_figures_of_a_scenario(name: str, value: float) -> None:
    assert parse_figure(name, trace=False).of_run(RUN) == pytest.approx(value)


def test_a_percentile_counts_those_without_an_answer() -> None:
    """95 of 100 are 95 of the 96 answered: 0.9896 of these."""
    found = parse_figure("p0_ttft_p95_s", trace=False).of_run(RUN)
    assert found == pytest.approx(np.interp(0.95 / 0.96, [0.95, 0.99], [3.0, 5.0]))
    few = {**RUN, "by_class": {"P0": {**GROUP, "ttft_s": {**GROUP["ttft_s"], "count": 90}}}}
    assert parse_figure("p0_ttft_p95_s", trace=False).of_run(few) == UNANSWERED_S


def test_directions() -> None:
    names = ["goodput", "p0_ttft_p95_s", "batch_tokens_per_s", "gpu_hours", "wrong", "min:all.good"]
    goals = goals_of(names, (), trace=False)
    assert [figure.better for figure in goals.objectives] == [1, -1, 1, -1, -1, -1]


def test_constraints_say_by_how_much_they_are_broken() -> None:
    goals = goals_of((), ("slo_attainment.P1 >= .95", "shed_share<=0.1"), trace=True)
    assert [figure.name for figure in goals.objectives] == ["goodput"]
    values = {"goodput": 1.0, "slo_attainment.P1": 0.9, "shed_share": 0.05}
    found = goals.excesses(values)
    assert found["slo_attainment.P1 >= 0.95"] == pytest.approx(0.05)
    assert found["shed_share <= 0.1"] == pytest.approx(-0.05)
    assert goals.violation(values) == pytest.approx(0.05)
    assert goals.violation({**values, "slo_attainment.P1": math.nan}) == 0


@pytest.mark.parametrize(
    ("objectives", "constraints", "trace", "said"),
    [
        (["goodputt"], [], True, "did you mean goodput"),
        (["gpu_hours"], [], True, "a fleet that never changes; tune it with --scenario"),
        (["wrong"], [], True, "the answers of a trace are not known"),
        (["max:all.good"], [], True, "with --scenario"),
        (["most:all.good"], [], False, "write max:PATH or min:PATH"),
        (["goodput", "goodput"], [], True, "stands twice"),
        ([], ["slo_attainment.P1 > .95"], True, "write FIGURE >= NUMBER"),
        ([], ["slo_attainment >= much"], True, "write FIGURE >= NUMBER"),
        ([], ["attainment >= 1"], True, "did you mean slo_attainment"),
    ],
)
def test_what_is_no_figure_is_refused(
    objectives: list[str], constraints: list[str], trace: bool, said: str
) -> None:
    with pytest.raises(TuneError) as error:
        goals_of(objectives, constraints, trace=trace)
    assert said in str(error.value)


def test_a_path_that_a_scenario_does_not_have_is_told() -> None:
    with pytest.raises(TuneError, match="did you mean agents"):
        parse_figure("max:clients.agent.useful", trace=False).of_run(RUN)
