"""The H100 check: what it simulates, what it calibrates, and how it counts errors."""

from itertools import pairwise

import pytest

from policy.files import load_profile
from tests.bench.fidelity import h100
from tests.bench.fidelity.h100 import LLAMA_2, LLAMA_31, MODELS, Run, Stage


def short_run(rate_per_s: int = 8) -> Run:
    return Run("short", "predicted", 575.0, 7.0, 248, (Stage(rate_per_s, 600, 27, 2058, 37, 2402),))


def test_the_published_time_per_token_divides_by_a_recount() -> None:
    # As published: 9.7 and 19.7 ms with 210.0 and 208.6 tokens a request.
    eight, twenty = LLAMA_2.runs[2].stages
    assert (eight.e2e_ms - eight.ttft_ms) / 210.03 == pytest.approx(9.7, abs=0.05)
    assert (twenty.e2e_ms - twenty.ttft_ms) / 208.65 == pytest.approx(19.7, abs=0.05)
    assert h100.measured(eight, 248).tpot_ms == pytest.approx(8.22, abs=0.005)
    assert h100.measured(twenty, 248).tpot_ms == pytest.approx(16.62, abs=0.005)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_what_calibrates_is_not_predicted(model: h100.Model) -> None:
    by_use = {use: {run.name for run in model.runs if run.use == use} for use in ("calibrated",)}
    predicted = {run.name for run in model.runs if run.use == "predicted"}
    assert by_use["calibrated"] == {"codegen", "roleplay"}
    assert predicted == {"general"}


def test_requests_come_as_the_load_generator_sends_them() -> None:
    run = short_run()
    (stage,) = h100.asked(run, seed=1)
    assert len(stage) == 8 * 600
    assert stage[-1].at_ns == pytest.approx(600e9)
    assert [each.at_ns for each in stage] == sorted(each.at_ns for each in stage)
    assert stage[0].prefix == stage[100].prefix != stage[1].prefix
    assert len({each.prefix for each in stage}) == 100
    assert all(len(each.prefix) == (each.prompt_tokens - 1) // 16 for each in stage)
    gaps_ns = [b.at_ns - a.at_ns for a, b in pairwise(stage)]
    mean_ns = sum(gaps_ns) / len(gaps_ns)
    spread_ns = (sum((gap - mean_ns) ** 2 for gap in gaps_ns) / len(gaps_ns)) ** 0.5
    assert spread_ns / mean_ns == pytest.approx(1, abs=0.05)  # exponential


def test_all_but_the_first_of_each_prompt_are_cached() -> None:
    profile = load_profile(LLAMA_2.profile)
    (row,) = h100.simulate(LLAMA_2, short_run(), profile, seeds=(1,), seconds=100)
    assert 80 < row.cached_percent < 100 * 700 / 800
    assert row.running == pytest.approx(16, abs=2)
    assert abs(row.error_percent("e2e_ms")) < 6


def test_calibrating_finds_back_a_host_that_it_did_not_know() -> None:
    profile = load_profile(LLAMA_31.profile)
    truth = h100.with_host(profile, 900_000, 3e6)
    runs = []
    for run in LLAMA_31.runs[:2]:
        rows = h100.simulate(LLAMA_31, run, truth, seeds=(1,), seconds=40)
        stages = tuple(as_measured(stage, row) for stage, row in zip(run.stages, rows, strict=True))
        runs.append(Run(run.name, run.use, run.prompt_tokens, 5.5, run.output_tokens, stages))
    model = h100.Model(LLAMA_31.profile, 0, tuple(runs))
    found = h100.calibrate(model, profile, seeds=(2,), seconds=40)
    assert found.host_per_step_ns == pytest.approx(900_000, abs=60_000)
    assert found.request_in_ns == pytest.approx(3e6, abs=0.4e6)


def as_measured(stage: Stage, row: h100.Row) -> Stage:
    return Stage(stage.rate_per_s, stage.seconds, row.simulated.ttft_ms, row.simulated.e2e_ms, 0, 0)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_profiles_ship_what_the_calibrated_runs_give(name: str) -> None:
    # One seed and short stages; `python -m tests.bench.fidelity.h100 --calibrate` does it in full.
    model = MODELS[name]
    profile = load_profile(model.profile)
    rows = [
        row
        for run in model.runs[:2]
        for row in h100.simulate(model, run, profile, (1,), seconds=300)
    ]
    assert len(rows) == 3
    errors = [row.error_percent("tpot_ms") for row in rows]
    assert sum(errors) / 3 == pytest.approx(0, abs=0.7)
    gaps_ms = [row.measured.ttft_ms - row.simulated.ttft_ms for row in rows]
    assert sum(gaps_ms) / 3 == pytest.approx(0, abs=0.7)


def test_figures_are_named_and_say_what_was_calibrated() -> None:
    row = h100.Row(
        "llama-2-7b", "general", "predicted", 8,
        h100.Measures(27, 8, 2000, 40, 2400), h100.Measures(26, 8.2, 2100, 30, 2500), 95.0, 16.0,
    )  # fmt: skip
    other = h100.Row(
        "llama-3.1-8b", "general", "predicted", 8, row.measured, row.measured, 95.0, 15.0
    )
    figures = {figure.name: figure for figure in h100.figures_of([row, other])}
    assert figures["h100_llama2_worst_pct"].value == 5.0
    assert figures["h100_llama2_worst_pct"].goal == "<= 5"
    assert "calibrated on the runs codegen" in figures["h100_llama2_worst_pct"].how
    assert figures["h100_llama2_itl_pct"].value == 2.5
    assert figures["h100_llama2_ttft_p99_pct"].value == 25.0
    assert not figures["h100_llama2_ttft_p99_pct"].holds
    assert figures["h100_llama31_itl_pct"].value == 0.0
    assert all(figure.unit == "%" for figure in figures.values())


def test_single_requests_on_an_older_version_are_a_few_per_cent_slower() -> None:
    prefill, decode = h100.alone_errors_percent(load_profile(LLAMA_2.profile))
    assert len(prefill) == len(decode) == len(h100.PREFILL_ALONE)
    assert -8 < sum(prefill) / len(prefill) < 0
    assert -9 < sum(decode) / len(decode) < 0
    slow = h100.with_host(load_profile(LLAMA_2.profile), 1e7, 0)
    assert h100.alone_errors_percent(slow)[1][0] > 100
