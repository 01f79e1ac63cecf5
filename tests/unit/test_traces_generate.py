"""Generators: laws, specifications, the bench preset, the shipped traces."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

import traces
from traces import TraceError, open_trace, shipped_traces
from traces.generate import (
    bench_loads,
    generate_bench,
    generate_trace,
    load_spec,
    parse_spec,
    spec_batches,
)
from traces.generate.arrivals import (
    Arrivals,
    Bursts,
    draw_gaps,
    first_gap,
    gap_sampler,
    start_times,
    weibull_shape,
)
from traces.generate.bench import bench_batches
from traces.generate.lengths import Law, Lognormal

if TYPE_CHECKING:
    from traces.generate import TraceSpec

SPEC = """
schema: 1
duration_s: 300
streams:
  - name: one
    business_line: a
    sla_class: P0
    model: m
    endpoint: chat
    arrivals: {law: poisson, rate_rps: 4}
    prompt_tokens: {fixed: 100}
    output_tokens: {fixed: 10}
"""
SHIPPED = Path(traces.__file__).parent / "shipped"


def generator(seed: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def with_lines(*lines: str) -> TraceSpec:
    return parse_spec(SPEC + "".join(f"    {line}\n" for line in lines), "spec")


def rows_of(spec: TraceSpec, path: Path) -> list[dict[str, Any]]:
    generate_trace(spec, path)
    return [row for batch in open_trace(path).batches() for row in batch.to_pylist()]


@pytest.mark.parametrize("cv", [0.3, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("law", ["gamma", "weibull"])
def test_gaps_have_mean_one_and_the_cv(law: str, cv: float) -> None:
    gaps = draw_gaps(generator(1), *gap_sampler(law, cv), 400_000)
    assert gaps.mean() == pytest.approx(1.0, abs=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.12)


def test_weibull_shape_inverts_the_cv() -> None:
    assert weibull_shape(1.0) == pytest.approx(1.0)
    shape = weibull_shape(2.5)
    ratio = math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2
    assert math.sqrt(ratio - 1) == pytest.approx(2.5)


@pytest.mark.parametrize(("law", "cv"), [("poisson", 1.0), ("gamma", 3.0), ("weibull", 2.0)])
def test_the_first_gap_is_the_wait_from_a_random_moment(law: str, cv: float) -> None:
    rng = generator(2)
    gaps = gap_sampler(law, cv)
    waits = [first_gap(rng, *gaps) for _ in range(40_000)]
    assert np.mean(waits) == pytest.approx((1 + cv * cv) / 2, rel=0.08)


def test_rates_follow_curve_and_day() -> None:
    curve = Arrivals(law="poisson", rate_rps=50.0, curve=[(100.0, 1.0), (200.0, 3.0)])
    times = np.concatenate(list(start_times(curve, 0.0, 300.0, generator(3))))
    assert (np.diff(times) >= 0).all()
    counts = np.histogram(times, bins=[0, 100, 200, 300])[0]
    for count, expected in zip(counts, (5000, 10_000, 15_000), strict=True):
        assert abs(count - expected) < 5 * math.sqrt(expected)
    day = Arrivals(law="gamma", cv=2.0, rate_rps=0.2, diurnal=[1.0] * 12 + [3.0] * 12)
    times = np.concatenate(list(start_times(day, 0.0, 86_400.0, generator(4))))
    night, noon = np.histogram(times, bins=[0, 43_200, 86_400])[0]
    assert noon / night == pytest.approx(3.0, rel=0.15)


def test_bursts_make_the_rate_uneven_and_keep_the_mean() -> None:
    bursts = Bursts(factors=[0.5, 3.0], stay_s=[40.0, 10.0])
    arrivals = Arrivals(law="poisson", rate_rps=5.0, bursts=bursts)
    times = np.concatenate(list(start_times(arrivals, 0.0, 50_000.0, generator(5))))
    assert times.size == pytest.approx(250_000, rel=0.06)
    counts = np.bincount((times // 10).astype(int))
    assert counts.std() / counts.mean() > 3 / math.sqrt(counts.mean())


def test_lengths() -> None:
    lognormal = Law(lognormal=Lognormal(mean=500.0, sigma=0.8)).draw(generator(), 200_000)
    assert lognormal.mean() == pytest.approx(500, rel=0.02)
    quantiles = Law(quantiles={0.1: 10.0, 0.5: 50.0, 0.9: 500.0}).draw(generator(), 100_000)
    assert np.quantile(quantiles, [0.25, 0.5, 0.7]) == pytest.approx([25, 50, 275], rel=0.06)
    cut = Law(quantiles={0.0: 0.0, 1.0: 100.0}, low=20.0, high=30.0).draw_tokens(generator(), 99)
    assert (cut.min(), cut.max()) == (20, 30)


def test_streams_do_not_depend_on_each_other(tmp_path: Path) -> None:
    one = rows_of(parse_spec(SPEC, "spec"), tmp_path / "t.parquet")
    two = parse_spec(SPEC + SPEC.split("streams:")[1].replace("one", "two"), "spec")
    both = rows_of(two, tmp_path / "t.parquet")
    assert len(both) > 1.5 * len(one)
    assert {r["arrival_s"] for r in one} <= {r["arrival_s"] for r in both}
    assert [r["request_id"] for r in both] == list(range(len(both)))


def test_the_seed_decides(tmp_path: Path) -> None:
    spec = parse_spec(SPEC, "spec")
    path = tmp_path / "t.parquet"
    one, again = rows_of(spec, path), rows_of(spec, path)
    other = rows_of(parse_spec(SPEC.replace("duration", "seed: 1\nduration"), "spec"), path)
    assert one == again != other
    assert abs(len(one) - 1200) < 5 * math.sqrt(1200)
    assert max(r["arrival_s"] for r in one) < 300


def test_sessions_carry_the_conversation(tmp_path: Path) -> None:
    spec = with_lines(
        "prefix: {system_tokens: 200, block_tokens: 64}",
        "sessions: {turns: {fixed: 3}, think_s: {fixed: 5}, service_s: 1, service_s_per_token: 0}",
        "users: {count: 50}",
        "deadline_s: 2.5",
        "priority: 4",
        "prompt_bytes_per_token: 4",
    )
    rows = rows_of(spec, tmp_path / "t.parquet")
    by_id = {row["request_id"]: row for row in rows}
    followed = [row for row in rows if row["turn"]]
    assert followed
    for row in followed:
        parent = by_id[row["parent_request_id"]]
        assert row["prompt_tokens"] == parent["prompt_tokens"] + 110
        assert row["arrival_s"] == pytest.approx(parent["arrival_s"] + 6, abs=1e-5)
        assert row["prefix_ids"][: len(parent["prefix_ids"])] == parent["prefix_ids"]
        assert (row["session_id"], row["user_id"]) == (parent["session_id"], parent["user_id"])
        assert row["think_time_s"] == 5
    first = [row for row in rows if row["turn"] == 0]
    assert {tuple(row["prefix_ids"][:3]) for row in first} == {tuple(first[0]["prefix_ids"][:3])}
    assert len({row["prefix_ids"][3] for row in first}) == len(first)
    assert {(r["prompt_bytes"], r["priority"], r["deadline_s"]) for r in first} == {(1200, 4, 2.5)}


def test_sessions_are_under_way_at_the_start(tmp_path: Path) -> None:
    lines = ["sessions: {turns: {fixed: 3}, think_s: {fixed: 5}}"]
    text = SPEC.replace("duration_s", "warm_up_s: 60\nduration_s") + f"    {lines[0]}\n"
    rows = rows_of(parse_spec(text, "spec"), tmp_path / "t.parquet")
    early = [row for row in rows if row["arrival_s"] < 4]
    orphans = [row for row in early if row["turn"] and row["parent_request_id"] is None]
    assert orphans
    assert {row["think_time_s"] for row in orphans} == {None}


def test_chains_have_a_plan_rounds_and_an_answer(tmp_path: Path) -> None:
    spec = with_lines(
        "prefix: {system_tokens: 128}",
        "chains: {rounds: {fixed: 2}, tool_tokens: {fixed: 30}, gap_s: {fixed: 1}, parallel: 3}",
    )
    rows = rows_of(spec, tmp_path / "t.parquet")
    by_id = {row["request_id"]: row for row in rows}
    whole = {row["chain_id"] for row in rows if row["step"] == "answer"}
    assert len(whole) > 500
    for chain in list(whole)[:20]:
        calls = [row for row in rows if row["chain_id"] == chain]
        assert calls[0]["step"] == "plan"
        assert calls[-1]["step"] == "answer"
        tools = [row for row in calls if row["step"] == "tool"]
        assert 2 <= len(tools) <= 6
        assert len({row["arrival_s"] for row in tools}) == 2
        for row in calls[1:]:
            assert row["arrival_s"] > by_id[row["parent_request_id"]]["arrival_s"]
            assert row["think_time_s"] == 1
            assert len(row["prefix_ids"]) * 64 <= row["prompt_tokens"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("schema: 1", "schema: 7"), "schema 7 is unknown here; write schema: 1"),
        (("schema: 1", "schema: {"), "not valid YAML"),
        (("duration_s: 300", "duration_s: -1"), "Expected `float` > 0"),
        (("rate_rps: 4", "rate_rps: 4, cv: 2"), "poisson gaps have cv 1, not 2"),
        (("rate_rps: 4", "rate_rps: 0"), r"streams\[0\].arrivals.rate_rps"),
        (
            ("rate_rps: 4", "rat_rps: 4"),
            r"unknown key 'rat_rps' in .*arrivals; did you mean rate_rps\?",
        ),
        (("rate_rps: 4", "rate_rps: 4, curve: [[9, 1], [3, 1]]"), "its times must rise"),
        (("rate_rps: 4", "rate_rps: 4, diurnal: [1]"), "length >= 24"),
        (("rate_rps: 4", "rate_rps: 4, bursts: {factors: [1], stay_s: [1]}"), "at least two"),
        (("{fixed: 100}", "{}"), "one of fixed, lognormal or quantiles, not none"),
        (("{fixed: 100}", "{fixed: 1, low: 9, high: 2}"), "low 9 is above high 2"),
        (("{fixed: 100}", "{quantiles: {0.1: 9, 0.5: 3}}"), "rise with probability"),
        (("P0", "P3"), "Invalid enum value 'P3'"),
        (("endpoint: chat", "endpoint: talk"), "Invalid enum value 'talk'"),
        (
            (
                "endpoint: chat",
                "endpoint: chat\n    sessions: {turns: {fixed: 1}, think_s: {fixed: 1}}\n    "
                "chains: {rounds: {fixed: 1}, tool_tokens: {fixed: 1}, gap_s: {fixed: 1}}",
            ),
            "has both sessions and chains",
        ),
    ],
)
def test_bad_specifications(change: tuple[str, str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        parse_spec(SPEC.replace(*change), "load.yaml")


def test_other_specification_errors(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        load_spec(tmp_path / "none.yaml")
    twice = SPEC + SPEC.split("streams:")[1]
    with pytest.raises(TraceError, match="two streams have the same name"):
        parse_spec(twice, "load.yaml")
    never = parse_spec(SPEC.replace("rate_rps: 4", "rate_rps: 1.0e-9"), "load.yaml")
    with pytest.raises(TraceError, match="no request to write"):
        generate_trace(never, tmp_path / "t.parquet")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["demo", "bursts", "sessions", "agents"])
def test_shipped_traces_are_what_their_specifications_make(tmp_path: Path, name: str) -> None:
    spec = load_spec(SHIPPED / f"{name}.yaml")
    path = tmp_path / f"{name}.parquet"
    generate_trace(spec, path)
    made = pa.Table.from_batches(open_trace(path).batches())
    kept = pa.Table.from_batches(open_trace(f"shipped:{name}").batches())
    assert made.unify_dictionaries().equals(kept.unify_dictionaries())
    limit = 700_000 if name == "demo" else 300_000
    assert (SHIPPED / f"{name}.parquet").stat().st_size < limit
    assert {s.stem for s in SHIPPED.glob("*.yaml")} == set(shipped_traces())


def test_the_demo_has_a_peak_in_the_middle() -> None:
    trace = open_trace("shipped:demo")
    assert 12_000 <= trace.rows <= 20_000
    assert 595 < trace.duration_s < 600
    arrival = np.concatenate([b.column(0).to_numpy() for b in trace.batches(["arrival_s"])])
    counts = np.bincount((arrival // 30).astype(int))
    base, peak = counts[:7].mean(), counts[10:12].mean()
    assert 2.0 < peak / base < 3.0
    assert counts[-4:].mean() < 1.25 * base


def test_bench_rows_are_stable(tmp_path: Path) -> None:
    assert list(bench_loads()) == ["w10k_r8", "w10k_r32", "w100k_r32"]
    written = generate_bench("w10k_r8", tmp_path / "w.parquet")
    assert written.rows == 10_000
    batch = next(open_trace(written.path).batches(["arrival_s", "prompt_tokens", "output_tokens"]))
    first = batch.slice(0, 2).to_pydict()
    assert first == {
        "arrival_s": [0.048914, 0.105816],
        "prompt_tokens": [298, 332],
        "output_tokens": [65, 72],
    }
    with pytest.raises(TraceError, match="no bench load 'w'; known: w10k_r8"):
        generate_bench("w", tmp_path / "x.parquet")


def test_the_long_bench_load_begins_as_the_short_one() -> None:
    short = pa.Table.from_batches(bench_batches(bench_loads()["w10k_r32"]))
    long = pa.Table.from_batches(bench_batches(bench_loads()["w100k_r32"]))
    assert long.num_rows == 100_000
    assert long.slice(0, 10_000).equals(short)
    assert long.column("arrival_s")[-1].as_py() == 3115.533459


@pytest.mark.skipif(
    "TWINKEEL_DATA" not in os.environ, reason="TWINKEEL_DATA is not set: no script to compare with"
)
@pytest.mark.parametrize("name", ["w10k_r8", "w10k_r32"])
def test_bench_equals_the_script(tmp_path: Path, name: str) -> None:
    script = Path(os.environ["TWINKEEL_DATA"]) / "bench" / "gen_workload.py"
    load = bench_loads()[name]
    sizes = [str(load.rows), str(load.rate_rps), str(load.seed)]
    command = [sys.executable, str(script), str(tmp_path), name, *sizes]
    subprocess.run(command, check=True, capture_output=True)
    with open(tmp_path / f"{name}.vidur.csv", newline="") as file:
        wanted = [(float(a), int(p), int(o)) for a, p, o in list(csv.reader(file))[1:]]
    generate_bench(name, tmp_path / "w.parquet")
    columns = ["arrival_s", "prompt_tokens", "output_tokens"]
    got: list[tuple[Any, ...]] = []
    for batch in open_trace(tmp_path / "w.parquet").batches(columns):
        got += zip(*(column.to_pylist() for column in batch.columns), strict=True)
    assert got == wanted


def test_a_large_trace_is_made_in_bounded_memory() -> None:
    text = SPEC.replace("duration_s: 300", "duration_s: 1.0e+5")
    largest = max(batch.num_rows for batch in spec_batches(parse_spec(text, "spec")))
    assert largest <= 16_384
