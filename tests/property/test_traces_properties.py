"""What must hold of any trace: spreading, sorting, writing and reading back."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from traces import SCHEMA, TraceWriter, open_trace, spread_ties
from traces.pipeline import write_trace
from traces.schema import conform
from traces.sort import Spool

SLOW = settings(max_examples=40, deadline=None)
stamps = st.lists(
    st.tuples(st.integers(0, 8), st.sampled_from([0.0, 0.5, 1.0, 3.0])), min_size=1, max_size=40
)
texts = st.one_of(st.none(), st.sampled_from(["a", "b", "c"]))
row = st.fixed_dictionaries(
    {
        "prompt_tokens": st.integers(0, 2**31 - 1),
        "output_tokens": st.one_of(st.none(), st.integers(0, 2**31 - 1)),
        "model": texts,
        "user_id": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        "prefix_ids": st.one_of(st.none(), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4)),
        "ttft_s": st.one_of(st.none(), st.floats(0, 1e6, width=32)),
    }
)


def cut(batch: pa.RecordBatch, size: int) -> list[pa.RecordBatch]:
    return [batch.slice(start, size) for start in range(0, batch.num_rows, size)]


@given(stamps, st.integers(1, 7), st.integers(1, 7), st.integers(0, 2**70))
@settings(deadline=None)
def test_spread_is_sorted_complete_and_blind_to_batches(
    rows: list[tuple[int, float]], size: int, other: int, seed: int
) -> None:
    rows = sorted(rows, key=lambda pair: pair[0])
    batch = pa.RecordBatch.from_pydict(
        {
            "request_id": np.arange(len(rows)),
            "arrival_s": pa.array([float(s) for s, _ in rows]),
            "arrival_res_s": pa.array([r for _, r in rows], pa.float32()),
        }
    )
    out = pa.Table.from_batches(spread_ties(cut(batch, size), seed))
    same = pa.Table.from_batches(spread_ties(cut(batch, other), seed))
    assert out.column(0).to_pylist() == same.column(0).to_pylist()
    assert out.column(1).to_pylist() == same.column(1).to_pylist()
    arrival = out.column(1).to_numpy()
    assert (np.diff(arrival) >= 0).all()
    ids = out.column(0).to_pylist()
    assert sorted(ids) == list(range(len(rows)))
    for at, request in zip(arrival, ids, strict=True):
        stamp, resolution = rows[request]
        assert at == stamp if resolution == 0 else stamp <= at < stamp + resolution


@given(
    st.lists(st.floats(0, 100, width=32), min_size=1, max_size=60),
    st.integers(1, 9),
    st.integers(1, 20),
)
@SLOW
def test_the_external_sort_sorts(arrival: list[float], size: int, run_rows: int) -> None:
    ids = np.random.default_rng(len(arrival)).permutation(len(arrival))
    batch = conform(
        pa.RecordBatch.from_pydict(
            {
                "request_id": ids,
                "arrival_s": pa.array(arrival, pa.float64()),
                "prompt_tokens": pa.array(np.arange(len(arrival)), pa.int32()),
                "model": [f"m{i % 3}" for i in range(len(arrival))],
            }
        ),
        {"trace_id": "t", "provenance": "generated"},
    )
    with tempfile.TemporaryDirectory() as folder:
        spool = Spool(Path(folder), run_rows=run_rows)
        for part in cut(batch, size):
            spool.add(part)
        out = [row for part in spool.sorted() for row in part.to_pylist()]
    assert out == sorted(batch.to_pylist(), key=lambda r: (r["arrival_s"], r["request_id"]))


@given(st.lists(row, min_size=1, max_size=30), st.integers(1, 9), st.integers(1, 9))
@SLOW
def test_what_is_written_is_read_back(
    rows: list[dict[str, Any]], size: int, batch_rows: int
) -> None:
    columns: dict[str, Any] = {
        name: pa.array([r[name] for r in rows], SCHEMA.field(name).type)
        for name in rows[0]
        if name != "model"
    }
    columns["model"] = pa.array([r["model"] for r in rows], pa.string())
    columns["request_id"] = np.arange(len(rows))
    columns["arrival_s"] = np.arange(len(rows)) / 3
    batch = pa.RecordBatch.from_pydict(columns)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        with TraceWriter(path, row_group_rows=7) as writer:
            for part in cut(batch, size):
                writer.write(part)
        back = [r for b in open_trace(path).batches(batch_rows=batch_rows) for r in b.to_pylist()]
    assert [{name: r[name] for name in rows[0]} for r in back] == rows
    assert [r["arrival_s"] for r in back] == columns["arrival_s"].tolist()


@given(st.lists(st.integers(0, 50), min_size=2, max_size=30), st.integers(1, 9))
@SLOW
def test_renumbering_keeps_the_parents(arrival: list[int], size: int) -> None:
    count = len(arrival)
    arrival = sorted(arrival)
    parents = [None if i == 0 else (i - 1) // 2 for i in range(count)]
    batch = pa.RecordBatch.from_pydict(
        {
            "request_id": np.arange(count),
            "arrival_s": pa.array(arrival, pa.float64()),
            "prompt_tokens": pa.array(np.arange(count), pa.int32()),
            "parent_request_id": pa.array(parents, pa.int64()),
        }
    )
    shuffled = batch.take(pa.array(np.random.default_rng(count).permutation(count)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.parquet"
        write_trace(cut(shuffled, size), path, renumber=True)
        back = [r for b in open_trace(path).batches() for r in b.to_pylist()]
    assert [r["request_id"] for r in back] == list(range(count))
    mark = {r["request_id"]: r["prompt_tokens"] for r in back}
    for r in back:
        known = r["parent_request_id"]
        assert (None if known is None else mark[known]) == parents[r["prompt_tokens"]]
