"""Scenario files: what is accepted, how runs differ, what is claimed, what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from policy.events import Forecasted, PolicySwitched, RolloutRequested
from policy.files import FileError, load_policy
from policy.parameters import from_canonical
from traces import TraceError, open_trace
from twin.faults import kind_of
from twin.fleet import FleetError
from twin.scenario import load_scenario, parse_scenario, run_scenario, scenario_names
from twin.scenario.drill import Drill, drawn
from twin.scenario.expect import Expectation, figure_at, judge
from twin.scenario.files import SETUP, policy_of
from twin.scenario.happenings import dated_events
from twin.scenario.merge import merged
from twin.scenario.rack import rack_of
from twin.scenario.result import spans
from twin.scenario.run import fault_times, world_settings
from twin.scenario.spec import Setup
from twin.source import Source, write_sources

STREAM = {
    "name": "s", "business_line": "search", "sla_class": "P0", "model": "qwen3-8b",
    "endpoint": "completions", "arrivals": {"law": "poisson", "rate_rps": 4},
    "prompt_tokens": {"fixed": 200}, "output_tokens": {"fixed": 20},
}  # fmt: skip
SMALL: dict[str, Any] = {
    "schema": 1,
    "name": "small",
    "about": "a test",
    "seeds": [1, 2],
    "duration_s": 5,
    "traffic": {"open": [{"streams": [STREAM]}]},
    "fleet": [{"profile": "h100-sxm/qwen3-8b"}],
}
TWO_RUNS = {"runs": {"a": {"policy": "fifo"}, "b": {"fleet": {0: {"count": 2}}}}}


def parse(tmp_path: Path, **changes: Any) -> Any:
    return parse_scenario({**SMALL, **changes}, "small.yaml", tmp_path)


def setup(**changes: Any) -> Setup:
    raw = {key: value for key, value in SMALL.items() if key in Setup.__struct_fields__}
    return msgspec.convert({**raw, **changes}, Setup, str_keys=False)


# Files


def test_every_shipped_scenario_is_valid() -> None:
    assert {"peak", "retries"} <= set(scenario_names())
    for name in scenario_names():
        assert load_scenario(name).head.name == name


def test_the_documented_example_is_valid(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()
    example = tmp_path / "example.yaml"
    example.write_text(text.partition("```yaml")[2].partition("```")[0])
    scenario = load_scenario(example)
    assert set(SETUP) <= set(yaml.safe_load(example.read_text()))
    assert scenario.runs["stable"].faults[0].on == "host0/card0"
    assert len(rack_of(scenario.runs["bigger"].fleet, tmp_path)[0]) == 6


def test_a_scenario_without_runs_has_one(tmp_path: Path) -> None:
    scenario = parse(tmp_path)
    assert list(scenario.runs) == ["base"]
    assert scenario.runs["base"].policy.preset == "stable"


def test_runs_change_what_they_name_and_nothing_else(tmp_path: Path) -> None:
    policy = {"preset": "stable", "set": {"shedding": {"queue_max": 7}}}
    runs = {
        "plain": {},
        "other": {"policy": "fifo"},
        "more": {"policy": {"set": {"shedding": {"enabled": False}}}},
        "unfaulted": {"faults": None, "fleet": {0: {"count": 3}}},
    }
    fault = {"kind": "gpu_lost", "at_s": 1, "on": 0}
    made = parse(tmp_path, policy=policy, faults=[fault], runs=runs).runs
    assert made["plain"].policy.set == {"shedding": {"queue_max": 7}}
    assert (made["other"].policy.preset, made["other"].policy.set) == ("fifo", {})
    assert made["more"].policy.set == {"shedding": {"queue_max": 7, "enabled": False}}
    assert [len(run.faults) for run in made.values()] == [1, 1, 1, 0]
    assert [run.fleet[0].count for run in made.values()] == [1, 1, 1, 3]
    assert made["plain"].traffic == made["unfaulted"].traffic


def test_a_mapping_on_a_list_changes_entries_by_name_or_number() -> None:
    base = {"list": [{"name": "a", "x": 1, "y": 1}, {"name": "b", "x": 1}, 5], "keep": 1, "go": 2}
    over = {"list": {"b": {"x": 2}, 0: {"y": 3}, 2: None}, "go": None}
    assert merged(base, over, "f") == {
        "list": [{"name": "a", "x": 1, "y": 3}, {"name": "b", "x": 2}], "keep": 1,
    }  # fmt: skip
    assert merged(base, {"list": [1]}, "f")["list"] == [1]
    assert base["go"] == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schema": 2}, "schema 2 is not known"),
        ({"duration": 5}, "duration: unknown key (hint: did you mean duration_s"),
        ({"duration_s": 0}, "duration_s: Expected `float` > 0.0"),
        ({"traffic": {}}, "nobody asks"),
        ({"traffic": {"open": [{}]}}, "a source is one of trace and streams, not neither"),
        ({"fleet": []}, "fleet"),
        ({"fleet": [{"profile": "x", "count": 0}]}, "count and standbys are both 0"),
        ({"policy": "stabel"}, "no such policy (hint: did you mean stable"),
        ({"policy": {"set": {"sheding": {}}}}, "policy.set: sheding: unknown key"),
        ({"policy": {"set": {"shedding": {"queue_max": -1}}}}, "shedding.queue_max"),
        ({"runs": {"a": {"seeds": [1]}}}, "runs.a: seeds: unknown key"),
        ({"runs": {"a": {"fleet": {3: {}}}}}, "there is no entry 3 (hint: 0 to 0)"),
        ({"runs": {"a": {"fleet": {"x": {}}}}}, "there is no entry 'x'"),
        ({"faults": [{"kind": "gpu_lost", "at_s": 1}]}, "on"),
        ({"expect": [{"name": "x", "goal": "~ 3", "value": {"of": "base/x"}}]}, "goal '~ 3'"),
        ({"expect": [{"name": "x", "goal": "< 3", "value": {"of": "x"}}]}, "RUN/PATH"),
        (
            {"expect": [{"name": "x", "goal": "< 3", "value": {"of": "bse/x"}}]},
            "there is no run 'bse' (hint: did you mean base",
        ),
        (
            {"expect": [{"name": "x", "goal": "< 3", "value": {"of": "base/x", "as": "ratio"}}]},
            "needs a figure in against",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(FileError) as caught:
        parse(tmp_path, **changes)
    assert said in str(caught.value)


def test_a_policy_file_is_looked_for_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("schema: 1\nname: mine\ndiscipline: fifo\n")
    scenario = parse(tmp_path, policy="mine.yaml")
    assert policy_of(scenario.runs["base"].policy, tmp_path, "").name == "mine"


# The parts of a set-up


def test_the_rack_is_dealt_out(tmp_path: Path) -> None:
    fleet = [
        {"profile": "h100-sxm/qwen3-8b", "count": 3, "standbys": 1, "version": "v1",
         "domains": ["host0/card0", "host1/card0"], "closeness_permille": [1000, 700, 900],
         "labels": ["vllm=0.32"], "cold_start_s": 30, "kv_blocks": 500},
        {"profile": "h100-sxm/qwen3-embedding-0.6b", "serves": ["embed"]},
    ]  # fmt: skip
    up, standbys = rack_of(setup(fleet=fleet).fleet, tmp_path)
    assert [spec.id for spec in (*up, *standbys)] == [0, 1, 2, 3, 4]
    assert [spec.domain for spec in up[:3]] == ["host0/card0", "host1/card0", "host0/card0"]
    assert standbys[0].domain == "host1/card0"
    assert [spec.closeness_permille for spec in up[:3]] == [1000, 700, 900]
    assert (up[0].settings.kv_blocks, up[0].version, up[0].labels) == (500, "v1", ("vllm=0.32",))
    assert (standbys[0].cold_start_ns, up[3].serves) == (30 * 10**9, ("embed",))
    assert up[0].serves == ("qwen3-8b",)


def test_a_card_is_cut_into_slices(tmp_path: Path) -> None:
    fleet = [{"profile": "h100-sxm/qwen3-8b", "count": 2, "slices": ["3g", "3g"]}]
    up, _ = rack_of(setup(fleet=fleet).fleet, tmp_path)
    assert [spec.id for spec in up] == [0, 1, 2, 3]
    assert up[0].domain.rpartition("/")[0] == up[1].domain.rpartition("/")[0]
    assert len({spec.domain for spec in up}) == 4


def test_somebody_must_be_up_at_the_start(tmp_path: Path) -> None:
    fleet = [{"profile": "h100-sxm/qwen3-8b", "count": 0, "standbys": 2}]
    with pytest.raises(FleetError, match="no replica is up at the start"):
        rack_of(setup(fleet=fleet).fleet, tmp_path)


def test_faults_are_named_by_kind_and_numbered_in_time() -> None:
    faults = [
        {"kind": "gpu_lost", "at_s": 30, "on": 0},
        {"kind": "slow_card", "at_s": 20, "on": 0, "factor_permille": 2000},
        {"kind": "gpu_lost", "at_s": 10, "on": 0},
    ]
    second = 10**9
    assert fault_times(setup(faults=faults)) == {
        "gpu_lost": 10 * second, "slow_card": 20 * second, "gpu_lost-2": 30 * second,
    }  # fmt: skip


def test_the_world_has_its_settings() -> None:
    assert world_settings({"network_ns": 5}, "f").network_ns == 5
    with pytest.raises(FileError, match=r"world\.netwrk_ns: unknown key .*network_ns"):
        world_settings({"netwrk_ns": 5}, "f")
    with pytest.raises(FileError, match="must not be negative"):
        world_settings({"network_ns": -5}, "f")


def test_events_are_made_in_order_of_time(tmp_path: Path) -> None:
    events = [
        {"kind": "switch", "at_s": 9, "policy": {"preset": "fifo"}},
        {"kind": "rollout", "at_s": 3, "model": "m", "version": "v2"},
        {"kind": "forecast", "at_s": 1, "horizons_s": [60, 300], "requests_p50": [1.5, 2],
         "requests_p90": [2, 3], "tokens_p50": [10, 20], "tokens_p90": [30, 40]},
    ]  # fmt: skip
    stable = load_policy("stable")
    made = dated_events(setup(events=events).events, stable, tmp_path, "f")
    assert [at_ns // 10**9 for at_ns, _ in made] == [1, 3, 9]
    forecast, rollout, switch = (event for _, event in made)
    assert isinstance(forecast, Forecasted)
    assert forecast.horizons_ns == (60 * 10**9, 300 * 10**9)
    assert forecast.requests_p50 == (1500, 2000)
    assert rollout == RolloutRequested("m", "v2")
    assert isinstance(switch, PolicySwitched)
    assert from_canonical(switch.old) == stable
    assert from_canonical(switch.new).discipline == "fifo"


def test_a_missing_file_of_forecasts_is_named(tmp_path: Path) -> None:
    events = setup(events=[{"kind": "forecasts", "file": "none.jsonl"}]).events
    with pytest.raises(FileError, match=r"none\.jsonl: cannot be read"):
        dated_events(events, load_policy("fifo"), tmp_path, "f")


# Sources


def test_sources_are_merged_in_order_of_arrival(tmp_path: Path) -> None:
    streams = Source(streams=setup().traffic.open[0].streams)
    trace = Source(trace="shipped:demo", from_s=100, speed=2)
    path = write_sources([streams, trace], tmp_path / "t.parquet", duration_s=20, seed=1)
    assert path is not None
    made = open_trace(path)
    alone = [
        open_trace(one).rows
        for number, source in enumerate((streams, trace))
        if (one := write_sources([source], tmp_path / f"{number}", duration_s=20, seed=1 + number))
    ]
    assert made.rows == sum(alone)
    assert 0 < made.duration_s < 20  # arrivals are sorted, or they could not be written
    demo = [
        at
        for batch in open_trace("shipped:demo").batches(["arrival_s"])
        for at in batch.column(0).to_pylist()
    ]
    assert alone[1] == sum(100 <= at < 140 for at in demo)


def test_a_trace_that_is_too_short_is_named(tmp_path: Path) -> None:
    source = Source(trace="shipped:demo", from_s=100_000)
    with pytest.raises(TraceError, match="lies after its end"):
        write_sources([source], tmp_path / "t.parquet", duration_s=20, seed=1)


# Claims


def claim(goal: str = ">= 0", **value: Any) -> Expectation:
    return msgspec.convert({"name": "n", "goal": goal, "value": value}, Expectation)


FIGURES = {
    "a": [{"x": 10, "n": 100, "m": {"qwen3-0.6b": {"p": 1.5}}}, {"x": 20, "n": 100}],
    "b": [{"x": 40, "n": 100}, {"x": 40, "n": 100}],
}


@pytest.mark.parametrize(
    ("how", "by_seed"),
    [
        ("ratio", (0.25, 0.5)),
        ("cut_pct", (75, 50)),
        ("loss_pct", (75, 50)),
        ("gain_points", (-3000, -2000)),
    ],
)
def test_a_figure_against_another(how: str, by_seed: tuple[float, float]) -> None:
    verdict = judge(claim(of="a/x", against="b/x", **{"as": how}), FIGURES, "f")
    assert verdict.by_seed == by_seed
    assert verdict.value == sum(by_seed) / 2
    assert (verdict.low, verdict.high) == (min(by_seed), max(by_seed))


def test_seconds_can_be_claimed_as_milliseconds() -> None:
    verdict = judge(claim("<= 15000", of="a/x", **{"as": "milli"}), FIGURES, "f")
    assert verdict.by_seed == tuple(1000 * tree["x"] for tree in FIGURES["a"])
    assert verdict.holds
    with pytest.raises(msgspec.ValidationError, match="as milli needs nothing in against"):
        claim(of="a/x", against="b/x", **{"as": "milli"})


def test_several_figures_are_added_up() -> None:
    verdict = judge(claim(of=["a/x", "a/n"], against=["b/x"], **{"as": "ratio"}), FIGURES, "f")
    rows = zip(FIGURES["a"], FIGURES["b"], strict=True)
    assert verdict.by_seed == tuple((one["x"] + one["n"]) / two["x"] for one, two in rows)
    assert judge(claim(of=["a/x", "a/z"], missing=0), FIGURES, "f").value == 15
    assert not judge(claim(of=["a/x", "a/z"]), {"a": [{"x": 1, "z": None}]}, "f").holds
    with pytest.raises(msgspec.ValidationError, match="of names no figure"):
        claim(of=[])


def test_the_bound_of_a_share_is_over_all_seeds_together() -> None:
    verdict = judge(claim(of="a/x", against="a/n", **{"as": "share_up95"}), FIGURES, "f")
    assert verdict.value == pytest.approx(0.1979, abs=0.0001)  # of 30 in 200


@pytest.mark.parametrize(
    ("goal", "holds", "holds_in"),
    [("<= 15", True, 1), ("< 15", False, 1), ("== 15", True, 0), ("10..20", True, 2),
     (">= 15.5", False, 1), ("> 1e-3", True, 2)],
)  # fmt: skip
def test_the_median_decides_whether_a_claim_holds(goal: str, holds: bool, holds_in: int) -> None:
    verdict = judge(claim(goal, of="a/x"), FIGURES, "f")
    assert verdict.value == 15
    assert (verdict.holds, verdict.holds_in) == (holds, holds_in)


def test_a_figure_that_is_not_there_is_named_or_has_a_meaning() -> None:
    with pytest.raises(FileError, match="the run 'a' has no figure 'y'"):
        judge(claim(of="a/y"), FIGURES, "f")
    assert judge(claim("== 0", of="a/y", missing=0), FIGURES, "f").holds
    assert not judge(claim(of="a/z"), {"a": [{"z": None}]}, "f").holds


def test_names_in_paths_may_hold_dots() -> None:
    tree = FIGURES["a"][0]
    assert figure_at(tree, "m.qwen3-0.6b.p") == 1.5
    for path in ("m", "x.y", "m.qwen3"):
        with pytest.raises(KeyError):
            figure_at(tree, path)


def test_medians_are_of_what_all_seeds_have() -> None:
    trees = [{"a": {"b": 1}, "c": 2}, {"a": {"b": 5}}, {"a": {"b": 2}, "c": None}]
    assert spans(trees) == {"a.b": [2, 1, 5]}


# Runs


def test_a_scenario_is_the_same_every_time_and_runs_share_their_traffic(tmp_path: Path) -> None:
    expect = [
        {"name": "faster", "goal": "< 1",
         "value": {"of": "b/all.e2e_s.mean", "against": "a/all.e2e_s.mean", "as": "ratio"}},
        {"name": "all", "goal": "== 1", "value": {"of": "a/all.answered_share"}},
    ]  # fmt: skip
    scenario = parse(tmp_path, expect=expect, **TWO_RUNS)
    first, second = run_scenario(scenario), run_scenario(scenario)
    assert list(first.runs) == ["a", "b"]
    for run in first.runs:
        for one, two in zip(first.runs[run], second.runs[run], strict=True):
            assert one.log_hash == two.log_hash
            assert one.figures == two.figures
    offered = {run: first.summary(run)["all.offered"] for run in first.runs}
    assert offered["a"] == offered["b"]
    assert first.runs["a"][0].figures["all"] != first.runs["a"][1].figures["all"]
    assert [verdict.holds for verdict in first.verdicts] == [True, True]
    assert first.holds
    assert first.summary("b")["fleet.gpu_hours"][0] == pytest.approx(2 * 5 / 3600, rel=0.2)


def test_a_drill_draws_its_faults_by_seed(tmp_path: Path) -> None:
    faults = [
        {"kind": "engine_killed", "at_s": 0.5, "on": "?", "restart_s": 1},
        {"kind": "slow_card", "at_s": 0, "on": "?", "factor_permille": 2000, "for_s": 1},
    ]
    drill = msgspec.convert({"every_s": 2, "first_s": 1, "faults": faults}, Drill)
    assert [fault.at_s for fault in drawn(drill, 1.0, 3)] == []
    for seed in range(20):
        found = drawn(drill, 6.0, seed)
        assert found == drawn(drill, 6.0, seed)
        late = [0.5 * (kind_of(fault) == "engine_killed") for fault in found]
        assert [fault.at_s for fault in found] == [1 + late[0], 3 + late[1], 5 + late[2]]
    assert len({str(drawn(drill, 20.0, seed)) for seed in range(5)}) == 5
    result = run_scenario(parse(tmp_path, drill={"every_s": 2, "faults": faults}), seeds=[1])
    assert sum(result.runs["base"][0].figures["drill"].values()) == 3


def test_some_runs_and_seeds_only(tmp_path: Path) -> None:
    expect = [
        {"name": "a", "goal": "> 0", "value": {"of": "a/all.offered"}},
        {"name": "b", "goal": "> 0", "value": {"of": "b/all.offered"}},
    ]
    scenario = parse(tmp_path, expect=expect, **TWO_RUNS)
    told: list[tuple[str, int]] = []
    result = run_scenario(scenario, seeds=[7], runs=["a"], progress=lambda *what: told.append(what))
    assert (result.seeds, list(result.runs), result.skipped) == ((7,), ["a"], ["b"])
    assert told == [("a", 7)]
    with pytest.raises(FileError, match="there is no run 'c'"):
        run_scenario(scenario, runs=["c"])


def test_seeds_can_be_played_at_the_same_time(tmp_path: Path) -> None:
    scenario = parse(tmp_path, **TWO_RUNS)
    told: list[tuple[str, int]] = []
    both = run_scenario(scenario, jobs=2, progress=lambda *what: told.append(what))
    alone = run_scenario(scenario)
    for run in alone.runs:
        pairs = zip(both.runs[run], alone.runs[run], strict=True)
        assert all(one.log_hash == two.log_hash for one, two in pairs)
    assert told == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_answers_faults_and_clients_come_together(tmp_path: Path) -> None:
    kind = {
        "share": 1, "entropy_mean": {"fixed": 300}, "entropy_worst": {"fixed": 900},
        "close_permille": {"fixed": 10}, "correct": 1,
    }  # fmt: skip
    client = {
        "kind": "sessions", "name": "chat", "model": "qwen3-8b", "users": 5,
        "turns": {"fixed": 9}, "think_s": {"fixed": 0.2}, "prompt_tokens": {"fixed": 50},
        "output_tokens": {"fixed": 20}, "start_within_s": 1,
    }  # fmt: skip
    scenario = parse(
        tmp_path,
        policy="fifo",
        traffic={"clients": [client], "open": SMALL["traffic"]["open"]},
        fleet=[{"profile": "h100-sxm/qwen3-8b", "count": 2}],
        answers={"rules": [{"kinds": [kind], "bad": {**kind, "correct": 0}}]},
        faults=[
            {"kind": "bad_weights", "at_s": 0, "shift_permille": 400},
            {"kind": "engine_killed", "at_s": 2, "on": 1},
        ],
    )
    result = run_scenario(scenario, seeds=[1])
    (run,) = result.runs["base"]
    figures = run.figures
    assert figures["all"]["wrong"] / figures["all"]["answered"] == pytest.approx(0.4, abs=0.15)
    assert figures["faults"]["engine_killed"]["down_s"] == pytest.approx(0, abs=1)
    assert figures["clients"]["chat"]["messages"] > 20
    assert figures["refused_events"] == 0
    again = run_scenario(scenario, seeds=[1]).runs["base"][0]
    assert again.log_hash == run.log_hash
