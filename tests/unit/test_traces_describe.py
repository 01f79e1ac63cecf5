"""Describing and slicing."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from rich.console import Console

from traces import Trace, TraceError, TraceWriter, open_trace
from traces.describe import describe_trace, print_description, spark
from traces.slicing import slice_trace

if TYPE_CHECKING:
    from pathlib import Path


def trace_of(path: Path, rows: int, **columns: Any) -> Trace:
    base = {
        "request_id": np.arange(rows),
        "arrival_s": np.arange(rows, dtype=float),
        "prompt_tokens": pa.array([100] * rows, pa.int32()),
    }
    with TraceWriter(path) as writer:
        writer.write(pa.RecordBatch.from_pydict(base | columns))
    return open_trace(path)


def test_figures(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path / "t.parquet",
        121,
        output_tokens=pa.array([None, *range(1, 121)], pa.int32()),
        sla_class=["P0"] * 60 + ["P1"] * 61,
        user_id=[i % 7 for i in range(121)],
    )
    figures = describe_trace(trace)
    assert figures["rows"] == 121
    assert figures["duration_s"] == 120.0
    assert figures["rate_rps"] == pytest.approx(121 / 120)
    assert figures["rate_rps_busiest_minute"] == 1.0
    assert figures["interarrival_cv"] == pytest.approx(0.0, abs=1e-6)
    assert figures["minute_count_cv"] == 0.0
    assert figures["lengths"]["output_tokens"]["p50"] == 60
    assert figures["lengths"]["output_tokens"]["max"] == 120
    assert figures["lengths"]["output_tokens"]["mean"] == 60.5
    assert figures["shares"]["sla_class"] == {"P1": 61 / 121, "P0": 60 / 121}
    assert figures["distinct"] == {"user_id": 7}
    assert figures["null_share"]["output_tokens"] == 1 / 121
    assert figures["null_share"]["turn"] == 1.0
    assert figures["prefix"] is None


def test_prefix_hits_are_leading_blocks(tmp_path: Path) -> None:
    lists = [[1, 2, 3, 4], [1, 2, 5], None, [9, 8], [1, 2, 5, 6], []]
    trace = trace_of(
        tmp_path / "t.parquet",
        6,
        prefix_ids=pa.array(lists, pa.list_(pa.int64())),
        prefix_block_tokens=pa.array([16] * 6, pa.int16()),
    )
    prefix = describe_trace(trace)["prefix"]
    assert prefix["hit_share_blocks"] == pytest.approx((0 + 2 + 0 + 3) / 13)
    assert prefix["hit_share_tokens"] == pytest.approx(5 * 16 / 400)
    assert prefix["rows"] == 4


@pytest.mark.parametrize("name", ["demo", "agents"])
def test_tables_of_shipped_traces(name: str) -> None:
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    print_description(describe_trace(open_trace(name)), console)
    console.file.close()
    text = console.export_text()
    assert "prefix hits" in text
    assert "qwen3-8b" in text


def test_a_session_relative_trace_is_described(tmp_path: Path) -> None:
    trace = trace_of(tmp_path / "t.parquet", 3, arrival_s=pa.array([None] * 3, pa.float64()))
    figures = describe_trace(trace)
    assert figures["rate_rps"] is None
    assert figures["rate_over_time"] is None
    console = Console(record=True, width=100, quiet=True)
    print_description(figures, console)


def test_a_single_request_is_described(tmp_path: Path) -> None:
    figures = describe_trace(trace_of(tmp_path / "t.parquet", 1))
    assert figures["rate_rps"] is None
    assert figures["interarrival_cv"] is None
    assert figures["minute_count_cv"] is None


def test_spark() -> None:
    assert spark([0.0, 1.0, 2.0]) == "▁▅█"
    assert spark([0.0]) == spark([]) == ""


def test_slice_by_time_and_filter(tmp_path: Path) -> None:
    trace = trace_of(
        tmp_path / "t.parquet", 100, sla_class=["P0", None] * 50, model=["m"] * 50 + ["n"] * 50
    )
    out = tmp_path / "o.parquet"
    rows = slice_trace(trace, out, start_s=40, end_s=60, keep={"sla_class": ["P0"]})
    assert rows == 10
    got = open_trace(out)
    assert got.duration_s == 18.0
    ids = [i for b in got.batches(["request_id"]) for i in b.column(0).to_pylist()]
    assert ids == list(range(40, 60, 2))
    slice_trace(trace, out, start_s=40, keep={"model": ["n"]}, keep_times=True)
    assert open_trace(out).duration_s == 99.0


def test_a_sample_keeps_whole_sessions(tmp_path: Path) -> None:
    trace = open_trace("sessions")
    out = tmp_path / "o.parquet"
    rows = slice_trace(trace, out, sample=0.3, seed=1)
    assert rows == pytest.approx(0.3 * trace.rows, rel=0.25)

    def sizes(of: Trace) -> dict[int, int]:
        ids = [i for b in of.batches(["session_id"]) for i in b.column(0).to_pylist()]
        return {i: ids.count(i) for i in set(ids)}

    whole = sizes(trace)
    assert all(whole[session] == size for session, size in sizes(open_trace(out)).items())
    weights = next(open_trace(out).batches(["weight"])).column(0).to_pylist()
    assert weights == pytest.approx([1 / 0.3] * len(weights))


def test_slices_that_cannot_be(tmp_path: Path) -> None:
    trace, out = trace_of(tmp_path / "t.parquet", 10), tmp_path / "o.parquet"
    relative = trace_of(tmp_path / "r.parquet", 2, arrival_s=pa.array([None] * 2, pa.float64()))
    with pytest.raises(TraceError, match="at most 1, not 2"):
        slice_trace(trace, out, sample=2)
    with pytest.raises(TraceError, match="the slice is empty"):
        slice_trace(trace, out, start_s=5, end_s=5)
    with pytest.raises(TraceError, match="no request is left"):
        slice_trace(trace, out, start_s=50)
    with pytest.raises(TraceError, match="no filter by 'step'"):
        slice_trace(trace, out, keep={"step": ["x"]})
    with pytest.raises(TraceError, match="cannot be cut by time"):
        slice_trace(relative, out, start_s=1)
    assert slice_trace(relative, out) == 2
    assert sorted(os.listdir(tmp_path)) == ["o.parquet", "r.parquet", "t.parquet"]
