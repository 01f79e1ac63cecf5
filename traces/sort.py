"""Putting a stream of batches in arrival order, in bounded memory.

Batches are gathered into runs of at most `RUN_ROWS` rows or `RUN_BYTES`, each run is sorted and
written to a temporary Parquet file, and the runs are merged. The order is by `arrival_s`, then
`request_id`; it depends neither on the batch size nor on the run size.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.schema import SCHEMA
from traces.store import parquet_writer, write_group

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    Array = np.ndarray[Any, np.dtype[Any]]

RUN_ROWS = 131_072
RUN_BYTES = 48 * 2**20
_MERGE_ROWS = 8192
_MERGE_BYTES = 2**20


class Spool:
    """Takes batches of the full trace schema in any order and gives them back sorted.

    `folder` must exist; it is filled with temporary files and left for the caller to remove.
    Null arrivals sort as the start of the trace (a trace has either all or none).
    """

    rows: int
    """Rows taken so far."""
    first_s: float
    """Least arrival so far, in seconds; 0.0 before the first."""

    def __init__(
        self, folder: Path, *, run_rows: int = RUN_ROWS, run_bytes: int = RUN_BYTES
    ) -> None:
        self.rows = 0
        self.first_s = np.inf
        self._folder = folder
        self._run_rows = run_rows
        self._run_bytes = run_bytes
        self._pending: list[pa.RecordBatch] = []
        self._runs: list[_Run] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch of the full trace schema."""
        if not batch.num_rows:
            return
        self.rows += batch.num_rows
        self.first_s = min(self.first_s, float(_keys(batch)[0].min()))
        self._pending.append(batch)
        rows = sum(b.num_rows for b in self._pending)
        if rows >= self._run_rows or sum(b.nbytes for b in self._pending) >= self._run_bytes:
            self._end_run()

    def sorted(self) -> Iterator[pa.RecordBatch]:
        """Yield all rows in order, in batches of a few thousand rows."""
        self._end_run()
        runs = self._runs
        if all(a.last <= b.first for a, b in itertools.pairwise(runs)):
            for run in runs:
                yield from run.batches()
        else:
            yield from _merge(runs)

    def _end_run(self) -> None:
        if not self._pending:
            return
        table = pa.Table.from_batches(self._pending, SCHEMA).unify_dictionaries()
        table = table.combine_chunks()
        self._pending = []
        batch = table.to_batches()[0]
        arrival, ids = _keys(batch)
        order = np.lexsort((ids, arrival))
        if not np.array_equal(order, np.arange(order.size)):
            batch = batch.take(pa.array(order))
        path = self._folder / f"run-{len(self._runs):05d}.parquet"
        per_row = max(1, batch.nbytes // batch.num_rows)
        rows = max(1, min(_MERGE_ROWS, _MERGE_BYTES // per_row))
        with parquet_writer(path) as writer:
            for start in range(0, batch.num_rows, rows):
                write_group(writer, [batch.slice(start, rows)])
        arrival, ids = arrival[order], ids[order]
        first = (float(arrival[0]), int(ids[0]))
        self._runs.append(_Run(path, first, (float(arrival[-1]), int(ids[-1]))))


class _Run:
    """A sorted temporary file; `first` and `last` are its (arrival, request id) bounds."""

    def __init__(self, path: Path, first: tuple[float, int], last: tuple[float, int]) -> None:
        self.path = path
        self.first = first
        self.last = last

    def batches(self) -> Iterator[pa.RecordBatch]:
        with pq.ParquetFile(self.path, pre_buffer=False) as file:
            for group in range(file.metadata.num_row_groups):
                yield from file.iter_batches(_MERGE_ROWS, row_groups=[group])


def _keys(batch: pa.RecordBatch) -> tuple[Array, Array]:
    """(arrival_s with nulls as 0, request_id) of a batch."""
    names = batch.schema.names
    arrival = batch.column(names.index("arrival_s")).to_numpy(zero_copy_only=False)
    ids = batch.column(names.index("request_id")).to_numpy(zero_copy_only=False)
    return np.nan_to_num(arrival, nan=0.0), ids


class _Head:
    """The part of a run that is in memory."""

    def __init__(self, run: _Run) -> None:
        self._source = run.batches()
        self.batch: pa.RecordBatch | None = None
        self.refill()

    def refill(self) -> None:
        self.batch = next(self._source, None)
        if self.batch is not None:
            self.arrival, self.ids = _keys(self.batch)

    def last(self) -> tuple[float, int]:
        return float(self.arrival[-1]), int(self.ids[-1])

    def take_until(self, mark: tuple[float, int]) -> pa.RecordBatch | None:
        """Cut off and return the rows whose key is at most `mark`."""
        assert self.batch is not None
        low = np.searchsorted(self.arrival, mark[0], "left")
        high = np.searchsorted(self.arrival, mark[0], "right")
        count = int(low + np.searchsorted(self.ids[low:high], mark[1], "right"))
        if not count:
            return None
        taken = self.batch.slice(0, count)
        if count == self.batch.num_rows:
            self.refill()
        else:
            self.batch = self.batch.slice(count)
            self.arrival, self.ids = self.arrival[count:], self.ids[count:]
        return taken


def _merge(runs: list[_Run]) -> Iterator[pa.RecordBatch]:
    """Merge sorted runs: each round emits what no run can still precede."""
    heads = [_Head(run) for run in runs]
    while heads:
        mark = min(head.last() for head in heads)
        parts = [part for head in heads if (part := head.take_until(mark)) is not None]
        heads = [head for head in heads if head.batch is not None]
        table = pa.Table.from_batches(parts, SCHEMA).unify_dictionaries().combine_chunks()
        batch = table.to_batches()[0]
        arrival, ids = _keys(batch)
        yield batch.take(pa.array(np.lexsort((ids, arrival))))
