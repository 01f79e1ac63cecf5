"""The schema, the writer and `open_trace`."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces import (
    SCHEMA,
    SCHEMA_VERSION,
    TraceError,
    TraceWriter,
    open_trace,
    shipped_traces,
)
from traces.schema import SCHEMA_KEY

if TYPE_CHECKING:
    from pathlib import Path


def rows(arrival: list[float | None], first_id: int = 0, **more: Any) -> pa.RecordBatch:
    count = len(arrival)
    columns = {
        "request_id": list(range(first_id, first_id + count)),
        "arrival_s": pa.array(arrival, pa.float64()),
        "prompt_tokens": pa.array([10] * count, pa.int32()),
        **more,
    }
    return pa.RecordBatch.from_pydict(columns)


def write(path: Path, *batches: pa.RecordBatch, **options: Any) -> None:
    with TraceWriter(path, **options) as writer:
        for batch in batches:
            writer.write(batch)


def test_the_schema_is_the_one_agreed() -> None:
    assert SCHEMA.metadata == {SCHEMA_KEY: b"1"}
    assert SCHEMA_VERSION == "1"
    assert len(SCHEMA.names) == 47
    kinds = {field.name: str(field.type) for field in SCHEMA}
    assert kinds["arrival_s"] == "double"
    assert kinds["prompt_tokens"] == "int32"
    assert kinds["prefix_ids"].startswith("list<")
    assert kinds["model"] == "dictionary<values=string, indices=int32, ordered=0>"
    required = {field.name for field in SCHEMA if not field.nullable}
    assert required == {
        "trace_id", "request_id", "arrival_res_s", "prompt_tokens", "weight", "provenance",
    }  # fmt: skip


def test_round_trip_fills_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write(
        path,
        rows([0.0, 1.0], model=["a", None], prefix_ids=[[1, 2], None]),
        rows([1.0, 2.5], 2, model=["b", "a"], prefix_ids=[[], [3]]),
        defaults={"endpoint": "chat"},
    )
    trace = open_trace(path)
    assert (trace.rows, trace.duration_s, trace.has_arrivals) == (4, 2.5, True)
    back = [row for batch in trace.batches(batch_rows=3) for row in batch.to_pylist()]
    assert [row["model"] for row in back] == ["a", None, "b", "a"]
    assert [row["prefix_ids"] for row in back] == [[1, 2], None, [], [3]]
    assert {row["trace_id"] for row in back} == {"t"}
    assert {row["provenance"] for row in back} == {"generated"}
    assert {row["endpoint"] for row in back} == {"chat"}
    assert {row["weight"] for row in back} == {1.0}
    assert {row["output_tokens"] for row in back} == {None}


def test_columns_come_in_the_order_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write(path, rows([0.0, 1.0]))
    names = ["prompt_tokens", "arrival_s"]
    batch = next(open_trace(path).batches(names))
    assert batch.schema.names == names
    with pytest.raises(TraceError, match="unknown trace column 'tokens'"):
        next(open_trace(path).batches(["tokens"]))


def test_a_session_relative_trace_has_null_arrivals(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write(path, rows([None, None]), rows([None], 2))
    trace = open_trace(path)
    assert not trace.has_arrivals
    assert trace.duration_s == 0.0
    assert sum(batch.num_rows for batch in trace.batches()) == 3


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([rows([0.0, 2.0]), rows([1.0], 2)], r"row 3: arrival_s 1.0 is before .* \(2.0\)"),
        ([rows([0.0, float("nan")])], "row 2: arrival_s must be a finite number"),
        ([rows([0.0]), rows([None], 1)], "row 2: arrival_s must be a finite number"),
        ([rows([0.0, 1.0], output_tokens=[3, -4])], "row 2: output_tokens is negative: -4"),
        ([rows([0.0, 1.0]), rows([2.0], 1)], "row 3: request_id 1 is used twice"),
        ([rows([0.0, 1.0], 2**40), rows([2.0], 2**40)], "is used twice"),
        ([rows([0.0], tokens=[1])], "row 1: unknown trace column 'tokens'"),
        ([rows([0.0]), rows([1.0], 1, weight=[None])], "row 2: column 'weight' must not be null"),
        ([rows([0.0], output_tokens=[2**40])], "column 'output_tokens'"),
        ([], "a trace is never empty"),
    ],
)
def test_bad_rows_are_refused_and_leave_nothing(
    tmp_path: Path, batches: list[pa.RecordBatch], message: str
) -> None:
    with pytest.raises(TraceError, match=message):
        write(tmp_path / "t.parquet", *batches)
    assert os.listdir(tmp_path) == []


def interrupted(writer: TraceWriter) -> None:
    writer.write(rows([0.0, 1.0]))
    raise KeyboardInterrupt


def test_an_interrupted_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write(path, rows([0.0]))
    with pytest.raises(KeyboardInterrupt), TraceWriter(path) as writer:
        interrupted(writer)
    assert open_trace(path).rows == 1
    assert os.listdir(tmp_path) == ["t.parquet"]


def test_writer_misuse(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="use it in a with block"):
        TraceWriter(tmp_path / "t.parquet").write(rows([0.0]))
    with pytest.raises(TraceError, match="folder does not exist"):
        write(tmp_path / "no" / "t.parquet", rows([0.0]))


def test_unknown_schema_is_refused_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write(path, rows([0.0]))
    table = pq.read_table(path)
    other = tmp_path / "other.parquet"
    pq.write_table(table.replace_schema_metadata({SCHEMA_KEY: b"2"}), other)
    with pytest.raises(TraceError, match=r"schema '2' is unknown .*import the source again"):
        open_trace(other)
    pq.write_table(table.replace_schema_metadata({}), other)
    with pytest.raises(TraceError, match=r"not a Twinkeel trace .*twinkeel trace import"):
        open_trace(other)
    pq.write_table(table.drop_columns(["weight"]), other)
    with pytest.raises(TraceError, match="column 'weight' is missing"):
        open_trace(other)
    index = table.schema.get_field_index("turn")
    wrong = table.set_column(index, "turn", pa.array(["x"]))
    pq.write_table(wrong.replace_schema_metadata(table.schema.metadata), other)
    with pytest.raises(TraceError, match="column 'turn' is string, not int32"):
        open_trace(other)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    text = tmp_path / "t.csv"
    text.write_text("a,b\n1,2\n")
    with pytest.raises(TraceError, match=r"not a readable Parquet file .*trace import"):
        open_trace(text)
    with pytest.raises(TraceError, match=r"no such trace; .*shipped:demo"):
        open_trace("nowhere")
    with pytest.raises(TraceError, match="no such trace"):
        open_trace("shipped:../demo")
    empty = tmp_path / "e.parquet"
    pq.write_table(SCHEMA.empty_table(), empty)
    with pytest.raises(TraceError, match="the trace is empty"):
        open_trace(empty)


def test_reading_checks_files_of_other_writers(tmp_path: Path) -> None:
    path, bad = tmp_path / "t.parquet", tmp_path / "bad.parquet"
    write(path, rows([0.0, 1.0, 2.0]))
    table = pq.read_table(path)
    index = SCHEMA.get_field_index("arrival_s")
    shuffled = table.set_column(index, SCHEMA.field(index), pa.array([0.0, 2.0, 1.0]))
    pq.write_table(shuffled, bad)
    with pytest.raises(TraceError, match=r"row 3: arrival_s 1\.0 is before"):
        list(open_trace(bad).batches(batch_rows=2))


def test_row_groups_are_small(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    count = 25
    write(path, rows(list(np.arange(count) * 0.5)), row_group_rows=10)
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [10, 10, 5]
    sizes = [batch.num_rows for batch in open_trace(path).batches()]
    assert sizes == [10, 10, 5]


def test_shipped_names() -> None:
    assert {"demo", "bursts", "sessions", "agents"} <= set(shipped_traces())
    assert open_trace("shipped:demo").rows == open_trace("demo").rows


def test_reading_stays_light() -> None:
    code = (
        # Where pandas is installed, pyarrow itself imports it with its first array.
        "import sys; sys.modules['pandas'] = None; from traces import open_trace\n"
        "n = sum(b.num_rows for b in open_trace('shipped:demo').batches(batch_rows=4096))\n"
        "heavy = {'pyarrow.dataset', 'rich', 'yaml', 'click'} & set(sys.modules)\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "peak = next(int(t.split()[1]) for t in lines if t.startswith('VmHWM'))\n"
        "print(n, sorted(heavy), peak // 1024)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert int(out[0]) > 10_000
    assert out[1] == "[]"
    assert int(out[2]) < 140


def test_damaged_data_names_the_file_and_row_group(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write(path, rows([0.0] * 4), rows([1.0] * 4, 4), row_group_rows=4)
    metadata = pq.read_metadata(path)
    column = metadata.row_group(1).column(SCHEMA.get_field_index("prompt_tokens"))
    data = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + column.total_compressed_size] = b"\xab" * column.total_compressed_size
    path.write_bytes(data)
    message = r"t\.parquet: row group 2: damaged Parquet \(.+\); import the source again"
    with pytest.raises(TraceError, match=message):
        for _ in open_trace(path).batches():
            pass
    assert len(list(open_trace(path).batches(["arrival_s"]))) == 2
