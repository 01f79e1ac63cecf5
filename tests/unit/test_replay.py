"""A whole run: its files, its memory, its figures."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

from policy.files import load_policy
from policy.log import read_segment
from tests.support import bare_fleet, engine_settings, flat_cost, write_rows
from traces import TraceError, open_trace
from traces.schema import SCHEMA
from twin.replay import ReplayOptions, replay
from twin.world import WorldSettings

if TYPE_CHECKING:
    from pathlib import Path

    from traces import Trace
    from twin.fleet import ReplicaSpec

FIFO = load_policy("fifo")
OPTIONS = ReplayOptions(world=WorldSettings(gateway_ns=1000, network_ns=100))


def fleet(replicas: int = 2, seats: int = 4) -> list[ReplicaSpec]:
    """Steps of 1 ms."""
    return bare_fleet(
        replicas, engine_settings(max_num_seqs=seats, max_model_len=20_000, kv_blocks=20_001),
        flat_cost(1_000_000, per_prefill_token_ns=100),
    )  # fmt: skip


def trace_of(tmp_path: Path, count: int = 400, **columns: Any) -> Trace:
    dice = np.random.default_rng(3)
    rows = [
        {
            "arrival_s": number * 0.004,
            "prompt_tokens": int(dice.integers(1, 60)),
            "output_tokens": int(dice.integers(1, 30)),
            "model": f"m{number % 2}",
            "user_id": number % 9,
            "sla_class": f"P{number % 3}",
            "business_line": "support",
            **{name: values[number] for name, values in columns.items()},
        }
        for number in range(count)
    ]
    return write_rows(tmp_path / "in.parquet", rows, batch_rows=150)


def read(trace: Trace) -> pa.Table:
    return pa.Table.from_batches(trace.batches(), SCHEMA)


def test_the_results_are_a_trace_again_with_the_same_rows_in_the_same_order(tmp_path: Path) -> None:
    trace = trace_of(tmp_path)
    run = replay(trace, fleet(), FIFO, OPTIONS, policy_name="fifo", out=tmp_path / "out")
    again = open_trace(tmp_path / "out" / "requests.parquet")
    assert again.rows == trace.rows == run.summary.all.offered == 400
    before, after = read(trace), read(again)
    for name in ("request_id", "arrival_s", "prompt_tokens", "output_tokens", "model", "user_id",
                 "sla_class"):  # fmt: skip
        assert after[name].to_pylist() == before[name].to_pylist()
    assert set(after["outcome"].to_pylist()) == {"answered"}
    assert not after["ttft_s"].null_count


def test_the_results_can_be_played_again(tmp_path: Path) -> None:
    """And come out as the first run did: what was observed is not looked at."""
    first = replay(trace_of(tmp_path), fleet(), FIFO, OPTIONS, out=tmp_path / "out")
    again = replay(
        open_trace(tmp_path / "out" / "requests.parquet"), fleet(), FIFO, OPTIONS,
        out=tmp_path / "again",
    )  # fmt: skip
    assert again.log_hash == first.log_hash


def test_chunks_are_written_in_order_even_if_the_first_ends_last(tmp_path: Path) -> None:
    """Row groups of 150: a request of the first lasts longer than all others together."""
    outputs = [2] * 400
    outputs[3] = 19_000
    settled: list[int] = []
    trace = trace_of(tmp_path, output_tokens=outputs)
    replay(trace, fleet(), FIFO, OPTIONS, out=tmp_path / "out", progress=settled.append)
    assert settled == [150, 150, 100]
    after = read(open_trace(tmp_path / "out" / "requests.parquet"))
    assert after["request_id"].to_pylist() == list(range(400))
    e2e_s = after["e2e_s"].to_pylist()
    assert e2e_s[3] == max(e2e_s) > 10


def test_settled_chunks_are_given_away_while_the_run_goes_on(tmp_path: Path) -> None:
    """Memory holds the chunks with open requests, not the trace: seen from the second source."""
    trace = trace_of(tmp_path, count=1500)
    settled: list[int] = []
    given_at: list[int] = []
    rows = 0

    class Watched:
        path, rows, duration_s = trace.path, trace.rows, trace.duration_s
        has_arrivals = True

        def batches(self) -> Any:
            nonlocal rows
            for batch in trace.batches():
                given_at.append(rows - sum(settled))
                rows += batch.num_rows
                yield batch

    replay(Watched(), fleet(), FIFO, OPTIONS, progress=settled.append)  # type: ignore[arg-type]
    assert sum(settled) == 1500
    assert len(given_at) == 10
    assert max(given_at) <= 3 * 150


def test_a_run_that_fails_leaves_no_results_behind(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "in.parquet", [{"prompt_tokens": 1, "session_id": 1}])
    with pytest.raises(TraceError, match="session"):
        replay(trace, fleet(), FIFO, OPTIONS, out=tmp_path / "out")
    assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_thinning_that_leaves_nothing_is_refused_with_a_reason(tmp_path: Path) -> None:
    trace = write_rows(tmp_path / "in.parquet", [{"arrival_s": 0.0, "prompt_tokens": 1}])
    with pytest.raises(TraceError, match="scale"):
        replay(trace, fleet(), FIFO, ReplayOptions(scale=1e-9))


def test_the_figures_are_plain_json_and_agree_with_the_rows(tmp_path: Path) -> None:
    run = replay(trace_of(tmp_path), fleet(), FIFO, OPTIONS, policy_name="x", out=tmp_path / "out")
    figures = json.loads(json.dumps(run.figures(), allow_nan=False))
    after = read(open_trace(tmp_path / "out" / "requests.parquet"))
    assert figures["policy"] == "x"
    assert figures["trace"] == "in.parquet"
    assert figures["all"]["offered"] == 400
    exact = np.quantile(after["ttft_s"].to_numpy(), 0.95, method="inverted_cdf")
    assert figures["all"]["ttft_s_p95"] == pytest.approx(exact, rel=0.006)
    assert figures["all"]["e2e_s_mean"] == pytest.approx(
        np.mean(after["e2e_s"].to_numpy()), rel=1e-5
    )
    assert figures["span_s"] == pytest.approx(
        np.max(after["arrival_s"].to_numpy() + after["e2e_s"].to_numpy()), rel=1e-5
    )
    assert sum(group["offered"] for group in figures["by_sla"].values()) == 400
    assert figures["refused_events"] == 0
    assert figures["decisions"] > 3 * 400
    assert 0 < figures["gpu_busy_share"][0] <= 1
    hops = sum(figures["all"][f"{name}_mean"] for name in (
        "gateway_s", "queue_s", "schedule_s", "prefill_s", "decode_s", "network_s",
    ))  # fmt: skip
    assert hops == pytest.approx(figures["all"]["e2e_s_mean"])


def test_prices_are_for_the_good_tokens_only(tmp_path: Path) -> None:
    run = replay(trace_of(tmp_path), fleet(), FIFO, OPTIONS)
    usd = run.span_s / 3600 * sum(spec.usd_per_hour for spec in run.fleet)
    tokens = run.summary.all.good_output_tokens
    assert tokens > 0
    assert run.usd_per_million_good_tokens == pytest.approx(usd / tokens * 1e6)
    assert run.gpu_hours == pytest.approx(2 * run.span_s / 3600)


def test_a_trace_of_a_day_is_timed_from_its_first_request(tmp_path: Path) -> None:
    rows = [
        {"arrival_s": 86_400.0 + number, "prompt_tokens": 5, "output_tokens": 1}
        for number in range(3)
    ]
    run = replay(write_rows(tmp_path / "in.parquet", rows), fleet(), FIFO, OPTIONS)
    assert 2 < run.span_s < 3


@pytest.mark.parametrize("mode", ["full", "sample"])
def test_a_log_is_written_beside_the_results(tmp_path: Path, mode: Any) -> None:
    options = ReplayOptions(log=mode, world=OPTIONS.world)
    run = replay(trace_of(tmp_path), fleet(), FIFO, options, out=tmp_path / "out")
    segment = read_segment((tmp_path / "out" / "decisions.0.log").read_bytes())
    assert len(list(segment.records)) == run.decisions
