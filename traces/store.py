"""Reading and writing the project's Parquet traces in bounded memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.schema import NON_NEGATIVE, SCHEMA, TraceError, check_schema, conform

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

ROW_GROUP_ROWS = 65_536
ROW_GROUP_BYTES = 16 * 2**20
SHIPPED_PREFIX = "shipped:"
_DENSE_IDS = 2**26
_LARGE_IDS = 2_000_000


def shipped_traces() -> list[str]:
    """Names of the traces that come with the project, for `open_trace("shipped:NAME")`."""
    return sorted(p.stem for p in _shipped_dir().glob("*.parquet"))


def _shipped_dir() -> Path:
    return Path(__file__).parent / "shipped"


def resolve_path(path: str | os.PathLike[str]) -> Path:
    """Turn a path, `shipped:NAME` or the plain name of a shipped trace into a path.

    Raises: TraceError when there is no such file or shipped trace.
    """
    text = os.fspath(path)
    name = text.removeprefix(SHIPPED_PREFIX)
    shipped = _shipped_dir() / f"{name}.parquet"
    if text.startswith(SHIPPED_PREFIX):
        if "/" not in name and shipped.is_file():
            return shipped
    elif Path(text).is_file():
        return Path(text)
    elif "/" not in name and shipped.is_file():
        return shipped
    raise TraceError(
        f"{text}: no such trace; give a Parquet file or one of the shipped ones: "
        + ", ".join(f"{SHIPPED_PREFIX}{n}" for n in shipped_traces())
    )


class Trace:
    """A trace on disk, read batch by batch; make one with `open_trace`."""

    path: Path
    """The file."""
    rows: int
    """Number of requests."""
    duration_s: float
    """Last arrival, in seconds from the trace's start; 0.0 when arrivals are null."""
    has_arrivals: bool
    """False for a session-relative trace, in which every `arrival_s` is null."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _parquet(path) as file:
            check_schema(file.schema_arrow, path)
            self.rows = file.metadata.num_rows
            if not self.rows:
                raise TraceError(f"{path}: the trace is empty; import or generate it again")
            nulls, last = _arrival_statistics(file.metadata)
        self.has_arrivals = nulls < self.rows
        self.duration_s = last

    def batches(
        self, columns: Iterable[str] | None = None, batch_rows: int = 8192
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows in arrival order, at most `batch_rows` at a time, `columns` or all.

        Memory holds one batch and the compressed pages it comes from. Dictionary columns carry
        a dictionary of their own in every batch.

        Raises: TraceError when a column is unknown, or (for the columns read) a length is
        negative or arrivals are unsorted, naming the row (1 is the first) and the value; or data
        is damaged, naming the row group (1 is the first).
        """
        names = list(columns) if columns is not None else None
        for name in names or ():
            if SCHEMA.get_field_index(name) < 0:
                raise TraceError(f"unknown trace column {name!r}; known: {', '.join(SCHEMA.names)}")
        check = _RowCheck(self.path)
        with _parquet(self.path) as file:
            for group in range(file.metadata.num_row_groups):
                for batch in _group(self.path, file, group, batch_rows, names):
                    check(batch)
                    yield batch if names is None else batch.select(names)


def open_trace(path: str | os.PathLike[str]) -> Trace:
    """Open a trace of the project's Parquet schema.

    `path` is a file, `shipped:NAME`, or the plain name of a shipped trace.

    Raises: TraceError when there is no such trace, or it is empty, no Parquet, or of an unknown
    schema; the message says what to do.
    """
    return Trace(resolve_path(path))


def _parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, pre_buffer=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise TraceError(
            f"{path}: not a readable Parquet file ({error}); for CSV and JSONL use: "
            "twinkeel trace import SOURCE -o TRACE.parquet"
        ) from error


def _group(
    path: Path, file: pq.ParquetFile, group: int, batch_rows: int, names: list[str] | None
) -> Iterator[pa.RecordBatch]:
    """The batches of a row group. Raises: TraceError where its data is damaged."""
    try:
        yield from file.iter_batches(batch_rows, row_groups=[group], columns=names)
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise TraceError(
            f"{path}: row group {group + 1}: damaged Parquet ({why}); import the source again"
        ) from error


def _arrival_statistics(metadata: Any) -> tuple[int, float]:
    """(number of null arrivals, last arrival in seconds), from the row groups' statistics."""
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    index = names.index("arrival_s")
    nulls, last = 0, 0.0
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(index).statistics
        if statistics is None:
            continue
        nulls += statistics.null_count or 0
        if statistics.has_min_max:
            last = max(last, float(statistics.max))
    return nulls, last


class _RowCheck:
    """Checks batch after batch that arrivals are sorted and lengths are not negative."""

    def __init__(self, path: object) -> None:
        self.path = path
        self.rows = 0
        self.last_s = -np.inf
        self.nulls = 0

    def __call__(self, batch: pa.RecordBatch) -> None:
        names = batch.schema.names
        for name in NON_NEGATIVE:
            if name in names:
                self._check_sign(name, batch.column(names.index(name)))
        if "arrival_s" in names:
            self._check_order(batch.column(names.index("arrival_s")))
        self.rows += batch.num_rows

    def _check_sign(self, name: str, column: pa.Array) -> None:
        if column.null_count == len(column):
            return
        values = column.to_numpy(zero_copy_only=False)
        bad = np.flatnonzero(values < 0)
        if bad.size:
            self._refuse(int(bad[0]), f"{name} is negative: {values[bad[0]]:g}; correct the source")

    def _check_order(self, column: pa.Array) -> None:
        self.nulls += column.null_count
        if column.null_count == len(column) and self.nulls == self.rows + len(column):
            return
        values = column.to_numpy(zero_copy_only=False)
        if self.nulls or not np.isfinite(values).all():
            bad = np.flatnonzero(~np.isfinite(values))
            row = int(bad[0]) if bad.size else 0
            self._refuse(row, "arrival_s must be a finite number in every row, or null in all")
        if not values.size:
            return
        before = np.concatenate(([self.last_s], values[:-1]))
        bad = np.flatnonzero(values < before)
        if bad.size:
            at = int(bad[0])
            self._refuse(
                at,
                f"arrival_s {float(values[at])} is before the row above ({float(before[at])}); "
                "sort it by importing it again: twinkeel trace import",
            )
        self.last_s = float(values[-1])

    def _refuse(self, offset: int, what: str) -> None:
        raise TraceError(f"{self.path}: row {self.rows + offset + 1}: {what}")


class _IdCheck:
    """Checks that request ids are unique, in bounded memory.

    Ids that rise are unique. Else they are compared with those remembered: all below `_DENSE_IDS`,
    at a byte each, and the first `_LARGE_IDS` larger ones.
    """

    def __init__(self, path: object) -> None:
        self.path = path
        self._seen = np.zeros(1024, bool)
        self._large: set[int] = set()
        self._top = -1

    def __call__(self, ids: np.ndarray[Any, np.dtype[np.int64]], first_row: int) -> None:
        dense = ids[(ids >= 0) & (ids < _DENSE_IDS)]
        rising = ids[0] > self._top and bool((np.diff(ids) > 0).all())
        self._grow(int(dense.max()) + 1 if dense.size else 0)
        if not rising:
            self._compare(ids, dense, first_row)
        self._seen[dense] = True
        if dense.size < ids.size and len(self._large) < _LARGE_IDS:
            self._large.update(ids[(ids < 0) | (ids >= _DENSE_IDS)].tolist())
        self._top = max(self._top, int(ids.max()))

    def _grow(self, size: int) -> None:
        if size > self._seen.size:
            grown = np.zeros(max(size, 2 * self._seen.size), bool)
            grown[: self._seen.size] = self._seen
            self._seen = grown

    def _compare(
        self,
        ids: np.ndarray[Any, np.dtype[np.int64]],
        dense: np.ndarray[Any, np.dtype[np.int64]],
        first_row: int,
    ) -> None:
        values, counts = np.unique(ids, return_counts=True)
        twice = values[counts > 1].tolist() + dense[self._seen[dense]].tolist()
        if dense.size < ids.size:
            large = values[(values < 0) | (values >= _DENSE_IDS)].tolist()
            twice += [value for value in large if value in self._large]
        if twice:
            row = first_row + int(np.flatnonzero(ids == twice[0])[-1]) + 1
            raise TraceError(
                f"{self.path}: row {row}: request_id {twice[0]} is used twice; "
                "ids are unique within a trace"
            )


class TraceWriter:
    """Writes a trace in bounded memory; nothing is left behind unless it ends well.

    Use it as a context manager: rows go to a temporary file beside `path`, which takes the
    name `path` when the block ends without an error and is removed otherwise.

    `defaults` gives the value of columns that the batches lack (for example `trace_id`,
    `provenance`, `model`); without one they are null. `trace_id` defaults to the file's stem and
    `provenance` to "generated".
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        defaults: Mapping[str, Any] | None = None,
        row_group_rows: int = ROW_GROUP_ROWS,
    ) -> None:
        self.path = Path(path)
        self.rows = 0
        self._defaults = {
            "trace_id": self.path.stem,
            "provenance": "generated",
            **(defaults or {}),
        }
        self._group_rows = row_group_rows
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._pending: list[pa.RecordBatch] = []
        self._check_rows = _RowCheck(self.path)
        self._check_ids = _IdCheck(self.path)
        self._writer: Any = None

    def __enter__(self) -> TraceWriter:
        if not self.path.parent.is_dir():
            raise TraceError(f"{self.path}: the folder does not exist; create it first")
        self._writer = parquet_writer(self._temporary)
        return self

    def write(self, batch: pa.RecordBatch) -> None:
        """Append rows: some or all of the schema's columns, in arrival order.

        Raises: TraceError for unsorted arrivals, negative lengths, repeated ids (with the row
        and the value), unknown columns, and nulls where the schema has none.
        """
        if self._writer is None:
            raise TraceError(f"{self.path}: the writer is not open; use it in a with block")
        if not batch.num_rows:
            return
        try:
            full = conform(batch, self._defaults)
        except TraceError as error:
            raise TraceError(f"{self.path}: from row {self.rows + 1}: {error}") from error
        self._check_rows(full)
        self._check_ids(full.column(1).to_numpy(), self.rows)
        self.rows += full.num_rows
        for start in range(0, full.num_rows, self._group_rows):
            self._pending.append(full.slice(start, self._group_rows))
            self._flush(least=self._group_rows)

    def _flush(self, least: int) -> None:
        rows = sum(b.num_rows for b in self._pending)
        size = sum(b.nbytes for b in self._pending)
        if rows and (rows >= least or size >= ROW_GROUP_BYTES):
            write_group(self._writer, self._pending)
            self._pending = []

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                if not self.rows:
                    raise TraceError(f"{self.path}: no request to write; a trace is never empty")
                self._flush(least=1)
                self._writer.close()
                os.replace(self._temporary, self.path)
        finally:
            if self._writer is not None and self._writer.is_open:
                self._writer.close()
            self._writer = None
            self._temporary.unlink(missing_ok=True)


def parquet_writer(path: Path) -> Any:
    """Open a Parquet writer for the trace schema: zstd, delta coding of the prefix ids."""
    lists = "prefix_ids.list.element"
    plain = {"request_id", "arrival_s", "prefix_ids"}
    return pq.ParquetWriter(
        path,
        SCHEMA,
        compression="zstd",
        use_dictionary=[name for name in SCHEMA.names if name not in plain],
        column_encoding={lists: "DELTA_BINARY_PACKED", "request_id": "DELTA_BINARY_PACKED"},
        write_statistics=["arrival_s"],
    )


def write_group(writer: Any, batches: list[pa.RecordBatch]) -> None:
    """Write batches of the trace schema as one row group."""
    table = pa.Table.from_batches(batches, SCHEMA).unify_dictionaries()
    writer.write_table(table, row_group_size=max(1, table.num_rows))
