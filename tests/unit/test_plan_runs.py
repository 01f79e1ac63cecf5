"""Plans from runs of the twin, on small loads: sizes against every size tried, faults, gates, the
knee, sentences and the command."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from click.testing import CliRunner

from policy.files import load_policy
from tests.support import write_rows
from tests.unit.test_plan import rows
from twin.plan import questions
from twin.plan.causes import cause_of
from twin.plan.cell import BIN_S, play
from twin.plan.cli import plan as command
from twin.plan.estimates import held
from twin.plan.formula import balance, replicas_least, replicas_likely
from twin.plan.inputs import PlanError, Prices, SloFile, promise_of
from twin.plan.machines import Machine, Region, Rejected, machine_of
from twin.plan.planning import Setting, coarse, fault_cell, gates, knee_of, make_plan, size_of
from twin.plan.runs import Runs
from twin.plan.show import report, write_json
from twin.plan.words import knee_sentence, sentences
from twin.plan.workload import workload_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SPEED = 6.0
"""Growth: 20 requests a second become 120, some three H100s."""


def slo(**classes: dict[str, float]) -> Any:
    return promise_of(msgspec.convert({"schema": 1, "classes": classes}, SloFile))


@pytest.fixture(scope="module", autouse=True)
def short_stretches() -> Iterator[None]:
    """Answers here take about a second, so stretches of five say enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twin.plan.workload.WINDOW_LEAST_S", 5.0)
        yield


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    folder = tmp_path_factory.mktemp("plan")
    trace = write_rows(folder / "t.parquet", rows(700))
    load = workload_of(trace, folder / "days", model="qwen3-8b")
    promise = slo(P0={"ttft_s_p95": 0.5, "attainment_percent": 95}, P1={"attainment_percent": 90})
    return Setting(load, promise, load_policy("stable"), Prices(), draws=3)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return machine_of("h100-sxm/qwen3-8b", tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs(jobs=1) as own:
        yield own


@pytest.mark.parametrize("speed", [SPEED])
def test_the_size_is_that_of_trying_every_size(
    setting: Setting, machine: Machine, runs: Runs, speed: float
) -> None:
    size = size_of(machine, setting, runs, speed)
    exhaustive = [
        n for n in range(1, 7)
        if held(
            [runs.see(setting.cell(machine, n, speed, run, whole=False)).slack
             for run in range(setting.draws)],
            setting.promise.confidence,
        )
    ]  # fmt: skip
    assert size.count == exhaustive[0]
    plain = [n for n in range(1, 7)
             if runs.see(setting.cell(machine, n, speed, whole=False)).holds]  # fmt: skip
    assert size.replicas is not None
    assert size.replicas.low == plain[0] <= size.count


@pytest.mark.parametrize("speed", [1.0, SPEED, 9.0])
def test_the_formula_never_prunes_the_answer(
    setting: Setting, machine: Machine, runs: Runs, speed: float
) -> None:
    least = replicas_least(machine, setting.load, setting.promise, speed)
    likely = replicas_likely(machine, setting.load, setting.promise, speed)
    assert likely is not None
    assert 1 <= least <= likely
    for n in range(1, least):
        assert not runs.see(setting.cell(machine, n, speed, whole=False)).holds
    wall = balance(machine, setting.load, setting.promise).rate_most
    rate = setting.load.rate_per_s * speed
    assert likely <= 2.5 * rate / wall + 2, "nor is it far off"


def test_a_run_that_breaks_early_says_what_the_whole_run_says(
    setting: Setting, machine: Machine
) -> None:
    for n in (1, 3):
        cell = setting.cell(machine, n, SPEED)
        short, whole = play(replace(cell, whole=False)), play(cell)
        assert short.holds == whole.holds
        if short.holds:
            assert short.groups == whole.groups


def test_larger_fleets_differ_by_their_size_alone(setting: Setting, machine: Machine) -> None:
    """Paired: the same day and the same drawn step times, at every size."""
    few, many = (play(setting.cell(machine, n, SPEED, 2)) for n in (3, 6))
    assert few.groups["class", "P0"].offered == many.groups["class", "P0"].offered
    again = play(setting.cell(machine, 3, SPEED, 2))
    assert again.groups == few.groups
    assert again.pressure == few.pressure
    other = play(setting.cell(machine, 3, SPEED, 1))
    assert other.groups["class", "P0"] != few.groups["class", "P0"]


def test_figures_are_the_same_with_any_number_of_processes(
    setting: Setting, machine: Machine, runs: Runs
) -> None:
    cells = [setting.cell(machine, n, SPEED) for n in (2, 4)]
    with Runs(jobs=2) as two:
        assert [one.groups for one in two.all(cells)] == [one.groups for one in runs.all(cells)]
        two.all(cells)
        assert two.played == 2, "what was seen is kept"


def test_threads_of_one_process_make_a_day_once(
    setting: Setting, machine: Machine, tmp_path: Path
) -> None:
    copy = tmp_path / "day-0.parquet"
    copy.write_bytes(setting.load.day_0.read_bytes())
    cells = [replace(setting.cell(machine, n, SPEED, 1, whole=False), day_0=copy)
             for n in (1, 2, 3, 4)]  # fmt: skip
    with Runs(jobs=1) as one, ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(one.see, cells))) == one.played == 4


# Faults


def test_a_lost_card_comes_back_cold_after_its_start(setting: Setting, machine: Machine) -> None:
    cell = setting.cell(machine, 3, 1.0, fault="n-1")
    quick = play(replace(cell, cold_start_s=0.0))
    slow = play(cell)
    spare = play(replace(cell, fault="none"))
    assert spare.pressure.failed == 0
    assert slow.pressure.failed + slow.pressure.shed >= quick.pressure.failed >= 0
    assert slow.pressure.batch_most >= spare.pressure.batch_most, "its traffic moved"
    assert slow.fault_s == setting.load.peak_s
    later = play(setting.cell(machine, 3, SPEED, fault="n-1"))
    assert later.fault_s == setting.load.peak_s - setting.load.window(SPEED)[0]


def test_losing_a_card_costs_points_for_a_while(
    setting: Setting, machine: Machine, runs: Runs
) -> None:
    size = size_of(machine, setting, runs, SPEED)
    found = fault_cell(size, "n-1", setting, runs)
    assert found.effects
    worst = found.effects[0]
    assert 0 < worst.points.value <= 100
    assert worst.points.low <= worst.points.value <= worst.points.high
    from_s, until_s = setting.load.window(SPEED)
    assert 0 < worst.lasts_s.value <= until_s - from_s + 2 * BIN_S
    assert found.effects[0].name in ("P0", "P1", "shop", "logs", "Turbo", "Stable", "Batch")
    if not found.holds:
        assert found.replicas is None or found.replicas.value > size.count
        assert found.cause is not None


def test_a_host_takes_its_replicas_with_it(setting: Setting, machine: Machine) -> None:
    one, all_of_it = (play(setting.cell(machine, 4, SPEED, fault=f)) for f in ("n-1", "host"))  # type: ignore[arg-type]
    assert all_of_it.groups["all", ""].good < one.groups["all", ""].good
    assert all_of_it.pressure.failed + all_of_it.pressure.shed > 0


def test_a_spike_brings_more_requests(setting: Setting, machine: Machine) -> None:
    plain, spike = (play(setting.cell(machine, 4, SPEED, fault=f)) for f in ("none", "spike"))  # type: ignore[arg-type]
    assert spike.groups["all", ""].offered > 1.1 * plain.groups["all", ""].offered


def test_a_cold_start_is_named_as_the_cause(setting: Setting, machine: Machine) -> None:
    hit = play(setting.cell(machine, 1, 1.0, fault="n-1"))
    assert cause_of(hit, machine, "n-1").part == "cold start"
    full = replace(hit, pressure=replace(hit.pressure, kv_share_p95=0.95))
    assert cause_of(full, machine).part == "KV cache"
    seats = replace(hit, pressure=replace(hit.pressure, kv_share_p95=0.1, seats_share_p95=0.99))
    assert cause_of(seats, machine).part == "seats"
    assert cause_of(seats, machine).knob == "max_num_seqs"


# Gates


@pytest.mark.parametrize(
    ("gate", "promised", "region", "why"),
    [
        ("latency", {"tpot_s": 0.001}, None, "one answer alone takes"),
        ("region", {}, Region(256, 10**6, 300, "a test"), "calibrate there"),
        ("context", {}, None, "max_model_len of 200"),
    ],
)
def test_an_empty_plan_names_the_gate(
    setting: Setting, machine: Machine, runs: Runs, gate: str, promised: dict[str, float],
    region: Region | None, why: str,
) -> None:  # fmt: skip
    if promised:
        hard = replace(setting.promise, slo=replace(setting.promise.slo, **promised))
        setting = replace(setting, promise=hard)
    if region is not None:
        machine = replace(machine, region=region)
    if gate == "context":
        engine = msgspec.structs.replace(machine.profile.engine, max_model_len=200)
        machine = replace(machine, profile=msgspec.structs.replace(machine.profile, engine=engine))
    rejected = gates(machine, setting)
    assert rejected is not None
    assert rejected.gate == gate
    empty = make_plan([machine], [], [1.0], ["n-1"], setting, runs)
    (text,) = sentences(empty)
    assert text.startswith(f"No plan: the gate {gate} rejected everything.")
    assert why in text
    assert empty.knee is None
    assert coarse([machine], [1.0], setting)[0].refused == rejected


def test_outside_of_the_region_there_is_no_answer(
    setting: Setting, machine: Machine, runs: Runs
) -> None:
    narrow = replace(machine, region=Region(3, 10**7, 10**5, "a test with 3 sequences"))
    size = size_of(narrow, setting, runs, SPEED)
    assert size.replicas is None
    assert size.refused is not None
    assert size.refused.gate == "region"
    assert "its profile knows 3 (a test with 3 sequences): calibrate there" in size.refused.why


def test_what_no_fleet_holds_is_refused(setting: Setting, machine: Machine, runs: Runs) -> None:
    hard = replace(setting, promise=slo(P0={"ttft_s_p95": 0.001}), most=4)
    size = size_of(machine, hard, runs, SPEED)
    assert size.refused is not None
    assert size.refused.gate == "rate"
    assert "not even 4 replicas hold: P0 p95 0.001 s" in size.refused.why


def test_days_that_differ_too_much_are_told(setting: Setting, machine: Machine) -> None:
    class Fickle(Runs):
        def all(self, cells: Any) -> Any:
            seen = super().all(cells)
            return [
                replace(one, slack=-1.0) if cell.run == 2 else one
                for one, cell in zip(seen, cells, strict=True)
            ]

    with Fickle(jobs=1) as fickle:
        size = size_of(machine, setting, fickle, SPEED)
    assert size.refused is not None
    assert size.refused.gate == "confidence"
    assert "hold on the recorded day" in size.refused.why


# The whole


@pytest.fixture(scope="module")
def planned(setting: Setting, machine: Machine, runs: Runs) -> Any:
    rejected = [Rejected("l40s/x", "memory", "too small")]
    return make_plan([machine], rejected, [SPEED], ["n-1"], setting, runs)


def test_every_figure_has_a_kind_and_an_interval(planned: Any, tmp_path: Path) -> None:
    write_json(planned, tmp_path / "plan.json")
    told = json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    figures: list[dict[str, Any]] = []

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            if {"value", "low", "high", "kind"} <= set(part):
                figures.append(part)
            for inner in part.values():
                walk(inner)
        elif isinstance(part, list):
            for inner in part:
                walk(inner)

    walk(told)
    assert len(figures) > 12
    for figure in figures:
        assert figure["kind"] in ("measured", "fitted", "extrapolated", "estimated")
        if None not in (figure["value"], figure["high"]):
            assert figure["low"] <= figure["value"] <= figure["high"]
    assert told["sentences"] == sentences(planned)


def test_sentences_are_made_from_the_figures(planned: Any) -> None:
    best = planned.best(SPEED)
    first = sentences(planned)[0]
    knee = f"{planned.knee.multiple.value:.2g}x today's peak"
    assert first.startswith(f"With {best.count} H100 SXM you hold P0 p95 0.5 s")
    assert knee in first
    assert "losing one card at the peak" in first
    month = best.usd_per_month
    assert month.value == best.count * 2.5 * 730
    assert month.kind == "estimated", "the price is an assumption"
    assert any(f"USD {month.value:,.0f}" in text for text in sentences(planned))


def test_a_knee_lies_between_a_load_that_holds_and_one_that_does_not(
    planned: Any, setting: Setting, machine: Machine, runs: Runs
) -> None:
    knee = planned.knee
    holding = [point.multiple for point in knee.curve if point.holds]
    breaking = [point.multiple for point in knee.curve if not point.holds]
    assert max(holding) <= knee.multiple.value <= min(breaking)
    assert min(breaking) / max(holding) < 1.06
    assert knee.broken
    twice = knee_of(machine, 2 * knee.replicas, setting, runs, known=SPEED, draws=1, curve=())
    assert twice.multiple.value > 1.5 * knee.multiple.value


def test_the_report_shows_all(planned: Any) -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(report(planned))
    text = captured.get()
    for part in ("Fewest replicas", "Faults at the size found", "Knee", "l40s/x: gate memory"):
        assert part in text


# Questions


@pytest.fixture
def asking(setting: Setting, machine: Machine, runs: Runs, tmp_path: Path) -> questions.Asking:
    return questions.Asking(replace(setting, draws=2), (machine,), runs, tmp_path, have=1)


def test_users_scale_the_load(asking: questions.Asking) -> None:
    answer = questions.gpus_for_users(asking, 300)
    assert answer.sentences[0].startswith("300 users are 6x the 50 of the trace: they take ")
    bears = questions.users_on_fleet(asking, 0.5)
    assert bears.figures[0].value == pytest.approx(50 * bears.figures[1].value)


def test_questions_about_the_fleet(asking: questions.Asking) -> None:
    grown = questions.doubled(asking, 9.0)
    assert "1 H100 SXM breaks" in grown.sentences[0]
    price = questions.cost(asking)
    assert price.figures[0].value == 2.5 * 730
    assert "assumption" in price.sentences[0]
    start = questions.cold_start(replace(asking, have=3))
    assert [figure.name for figure in start.figures][-1] == "missed_at_0_s"
    assert start.figures[0].value >= start.figures[-1].value - 5


def test_a_stretch_that_ends_before_the_replica_is_back_is_told(
    asking: questions.Asking,
) -> None:
    told = questions.cold_start(replace(asking, have=3)).sentences[-1]
    assert told.startswith("The stretch ends ")
    assert "Give more --rows" in told


def test_one_day_says_nothing_of_how_days_differ(
    setting: Setting, machine: Machine, runs: Runs
) -> None:
    knee = knee_of(machine, 1, setting, runs, draws=1, curve=())
    assert knee.multiple.low < knee.multiple.value < knee.multiple.high
    assert "on the recorded day alone" in knee_sentence(knee)


def test_the_line_that_does_least_harm(asking: questions.Asking) -> None:
    answer = questions.least_harm(asking, 4.0)
    assert "Shedding logs" in answer.sentences[0] or "Shedding shop" in answer.sentences[0]
    assert {figure.name for figure in answer.figures} == {
        "attainment_without/logs", "attainment_without/shop",
    }  # fmt: skip


def test_a_flag_that_limits_is_found(asking: questions.Asking, tmp_path: Path) -> None:
    """Two seats a replica: max_num_seqs is what limits it, and doubling it helps."""
    tight = machine_of("h100-sxm/qwen3-8b", tmp_path, max_num_seqs=4)
    answer = questions.limiting_flag(replace(asking, machines=(tight,)))
    assert answer.figures[0].name == "gain/max_num_seqs=8"
    assert answer.figures[0].low > 0
    assert "max_num_seqs=8 gives" in answer.sentences[1]


def test_more_cards_a_replica_or_more_replicas(asking: questions.Asking) -> None:
    with pytest.raises(PlanError, match="must be a multiple"):
        questions.tensor_parallel(asking, 3, 2)


# The command


def run_command(*given: str) -> Any:
    return CliRunner().invoke(command, given, catch_exceptions=False)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "--trace is missing"),
        (("--trace", "shipped:demo"), "--slo is missing"),
        (("--trace", "nope", "--slo", "SLO"), "no such trace"),
        (("--trace", "shipped:demo", "--slo", "nope.yaml"), "cannot be read"),
        (("--trace", "shipped:demo", "--slo", "SLO", "--grow", "1,x"), "write numbers"),
        (
            ("--trace", "shipped:demo", "--slo", "SLO", "--grow", "0"),
            "--grow 0: each must be above",
        ),
        (("--trace", "shipped:demo", "--slo", "SLO", "--gpus", ","), "--gpus: write names"),
        (("ask", "double", "--factor", "nan"), "--factor nan: write a number"),
        (("--trace", "shipped:demo", "--slo", "SLO", "--faults", "flood"), "use none, n-1"),
        (("--trace", "shipped:demo", "--slo", "SLO", "--model", "qwen3-9b"), "did you mean"),
        (("--trace", "shipped:demo", "--slo", "SLO", "--tp", "1.5"), "whole numbers"),
        (("--trace", "shipped:demo", "--slo", "SLO", "--rows", "3"), "make no stretch"),
        (("ask", "fit", "h100-sxm/qwen3-9b"), "no such profile"),
    ],
)
def test_what_was_wrong_is_one_line(tmp_path: Path, given: tuple[str, ...], message: str) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text("schema: 1\nclasses: {P0: {attainment_percent: 90}}", encoding="utf-8")
    result = run_command(*(str(path) if part == "SLO" else part for part in given))
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


def test_the_command_prints_a_coarse_answer_then_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text("schema: 1\nclasses: {P0: {attainment_percent: 90}}", encoding="utf-8")
    trace = write_rows(tmp_path / "t.parquet", rows(200))
    result = run_command(
        "--trace", str(trace.path), "--slo", str(path), "--grow", "2", "--faults", "n-1",
        "--draws", "2", "--jobs", "1", "--out", str(tmp_path / "p.json"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    first, then = (result.output.index(text) for text in ("First, by formula", "Fewest replicas"))
    assert first < then
    assert "On the busiest 200 requests 1 H100 SXM hold" in result.output
    assert (tmp_path / "p.json").exists()


def test_an_empty_plan_ends_with_code_1(tmp_path: Path) -> None:
    path = tmp_path / "slo.yaml"
    path.write_text(
        "schema: 1\ntpot_s: 0.0001\nclasses: {P0: {attainment_percent: 90}}", encoding="utf-8"
    )
    trace = write_rows(tmp_path / "t.parquet", rows(100))
    result = run_command("--trace", str(trace.path), "--slo", str(path), "--jobs", "1", "--quiet")
    assert result.exit_code == 1
    assert "the gate latency rejected everything" in " ".join(result.output.split())


def test_whether_it_fits_needs_no_trace() -> None:
    result = run_command("ask", "fit", "h100-sxm/qwen3-8b", "--context", "8192")
    assert result.exit_code == 0
    assert "45 such requests at once" in " ".join(result.output.split())


def test_n_plus_one_is_confirmed_on_all_days(asking: questions.Asking) -> None:
    grown = replace(asking.setting, promise=slo(P0={"attainment_percent": 97}))
    answer = questions.n_plus_one(replace(asking, setting=grown))
    counts = [figure.value for figure in answer.figures if figure.unit == "replicas"]
    assert counts == sorted(counts)
    assert len(answer.sentences) == 3
