"""What the readers share: options, rejected rows, opening text, converting it in chunks."""

from __future__ import annotations

import csv
import gzip
import itertools
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from traces.schema import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    Array = np.ndarray[Any, np.dtype[Any]]

Row = TypeVar("Row")
Columns = dict[str, Any]

CHUNK_ROWS = 8192
EMPTY_PROMPT = "a prompt holds at least one token"
FIRST_YEAR, LAST_YEAR = "1970", "2261"
"""Of a stamp; 64 bits of nanoseconds hold no more, and turn round without a word."""
_EXAMPLES = 3
_INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class ReadOptions:
    """How to read; a reader uses what concerns it.

    - `on_error`: "fail" at the first bad row, or "skip" and count it;
    - `limit`: stop after so many good rows;
    - `seed`: of everything that is drawn;
    - `session_rate`: session starts per second, for session-relative traces; None leaves the
      arrivals null;
    - `map_path`: the map file of the `map` format;
    - `lengths_path`, `models`, `window_s` (from, to), `rate_scale`: of ServeGen's tables;
    - `chars_per_token`: where only characters were logged.
    """

    on_error: Literal["fail", "skip"] = "fail"
    limit: int | None = None
    seed: int = 0
    session_rate: float | None = None
    map_path: Path | None = None
    lengths_path: Path | None = None
    models: tuple[str, ...] = ()
    window_s: tuple[float, float] | None = None
    rate_scale: float = 1.0
    chars_per_token: float = 4.0


@dataclass
class Rejects:
    """Counts the rows of a source and those that could not be used."""

    path: Path
    on_error: Literal["fail", "skip"]
    seen: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)

    def bad(self, row: int, why: str) -> None:
        """Skip a row, or stop with a TraceError that names it."""
        message = f"{self.path}: row {row}: {why}"
        if self.on_error == "fail":
            raise TraceError(f"{message}; correct it, or leave such rows out: --on-error skip")
        self.skipped += 1
        if len(self.examples) < _EXAMPLES:
            self.examples.append(message)

    @property
    def share(self) -> float:
        """Rejected rows as a share of all rows, 0 to 1."""
        return self.skipped / self.seen if self.seen else 0.0


class Misfit(list[str]):
    """A CSV row with another number of fields than the header."""


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a text file, gzipped or not, as UTF-8. Raises: TraceError where it cannot be read."""
    try:
        with open(path, "rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
        opener: Any = gzip.open if zipped else open
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}: not UTF-8 text: {error}") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: the gzip file is damaged or cut short: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error


def csv_rows(
    path: Path, wanted: Iterable[str], delimiter: str = ","
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line number, values) of a CSV file: its `wanted` columns, in that order.

    A row with another number of fields than the header is yielded as a `Misfit`, which `fields`
    refuses. Raises: TraceError when the header lacks a column or the file is no CSV.
    """
    with open_text(path) as file:
        reader = csv.reader(file, delimiter=delimiter)
        try:
            header = [name.strip() for name in next(reader, [])]
            if not header:
                raise TraceError(f"{path}: the file is empty; it needs a header and rows")
            missing = [name for name in wanted if name not in header]
            if missing:
                raise TraceError(
                    f"{path}: column {missing[0]!r} is not in the header, "
                    f"which has: {', '.join(header)}"
                )
            at = [header.index(name) for name in wanted]
            whole = at == list(range(len(header)))
            for row in reader:
                if not row:
                    continue
                if len(row) != len(header):
                    yield reader.line_num, Misfit(row)
                else:
                    yield reader.line_num, row if whole else [row[i] for i in at]
        except csv.Error as error:
            raise TraceError(f"{path}: row {reader.line_num}: not CSV: {error}") from error


def json_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of the lines that are not blank."""
    with open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.isspace():
                yield number, line


def fields(rows: list[list[str]], count: int) -> list[tuple[str, ...]]:
    """Turn CSV rows into `count` columns. Raises: ValueError for a misfit."""
    for row in rows:
        if isinstance(row, Misfit):
            raise ValueError(f"the number of fields is not the header's: {list(row)!r:.120}")
    return list(zip(*rows, strict=True)) if rows else [()] * count


def convert(
    rows: Iterable[tuple[int, Row]],
    converter: Callable[[list[Row]], Columns],
    rejects: Rejects,
    chunk_rows: int = CHUNK_ROWS,
) -> Iterator[Columns]:
    """Convert rows chunk by chunk; where a chunk fails, find the bad rows by halving.

    `converter` turns rows into columns of equal length and raises ValueError (or OverflowError)
    with the value in its text when any row is bad.
    """
    source = iter(rows)
    while chunk := list(itertools.islice(source, chunk_rows)):
        rejects.seen += len(chunk)
        yield from _convert(chunk, converter, rejects)


def _convert(
    chunk: list[tuple[int, Row]], converter: Callable[[list[Row]], Columns], rejects: Rejects
) -> Iterator[Columns]:
    waiting = [chunk]
    while waiting:
        part = waiting.pop()
        try:
            columns = converter([row for _, row in part])
        except (ValueError, OverflowError, msgspec.DecodeError) as error:
            if len(part) == 1:
                rejects.bad(part[0][0], str(error))
            else:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
            continue
        yield columns


def token_column(name: str, values: Any) -> Array:
    """Turn text or numbers into a column of lengths. Raises: ValueError with the value."""
    try:
        column: Array = np.array(values, dtype=np.int64)
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError(f"{name}: {_first_bad(values)!r} is not a whole number") from error
    bad = np.flatnonzero((column < 0) | (column > _INT32_MAX))
    if bad.size:
        value = column[bad[0]]
        raise ValueError(f"{name} is {'negative' if value < 0 else 'too large'}: {value}")
    return column.astype(np.int32)


def prompt_column(name: str, values: Any) -> Array:
    """As `token_column`, of prompts, which hold a token at least. Raises: ValueError."""
    column = token_column(name, values)
    if not column.all():
        raise ValueError(f"{name} is 0: {EMPTY_PROMPT}")
    return column


def empty_prompts(prompts: pa.Array, endpoint: pa.Array | None) -> Array:
    """True where a prompt holds no token, which only embeddings (of an image) may."""
    empty: Array = prompts.to_numpy() == 0
    if endpoint is not None and empty.any():
        empty &= np.array([name != "embeddings" for name in endpoint.to_pylist()])
    return empty


def _first_bad(values: Any) -> Any:
    for value in values:
        try:
            int(value)
        except (ValueError, TypeError):
            return value
    return values[0]


def seconds_column(name: str, values: Any) -> Array:
    """Turn text or numbers into finite seconds. Raises: ValueError with the value."""
    try:
        column: Array = np.array(values, dtype=np.float64)
    except ValueError as error:
        raise ValueError(f"{name}: not a number: {error}") from error
    bad = np.flatnonzero(~np.isfinite(column))
    if bad.size:
        raise ValueError(f"{name} is not finite: {values[int(bad[0])]!r}")
    return column


def stamp_column(name: str, values: Iterable[str]) -> Array:
    """Turn ISO 8601 stamps, in UTC or without a zone, into ns since 1970 as int64.

    Raises: ValueError with the value for anything else.
    """
    texts = [v.strip().removesuffix("Z").removesuffix("+00:00") for v in values]
    bare = [t for t in texts if "+" in t or t[10:].count("-") or len(t) < len("2023-01-01")]
    if bare:
        raise ValueError(f"{name}: not an ISO 8601 stamp in UTC: {bare[0]!r}")
    try:
        stamps = np.array(texts, dtype="datetime64[ns]")
    except ValueError as error:
        raise ValueError(f"{name}: not an ISO 8601 stamp in UTC: {texts[0]!r}") from error
    if np.isnat(stamps).any():
        raise ValueError(f"{name}: not an ISO 8601 stamp in UTC: {texts[0]!r}")
    beyond = [t for t in texts if not FIRST_YEAR <= t[:4] <= LAST_YEAR]
    if beyond:
        raise ValueError(
            f"{name}: {beyond[0]!r} is not between the years {FIRST_YEAR} and {LAST_YEAR}"
        )
    return stamps.astype(np.int64)


class Assembler:
    """Makes batches of columns: numbers the rows and turns `stamp_ns` into seconds.

    `stamp_ns` (int64) becomes `arrival_s`, counted from the first stamp, so that the difference
    is exact. Rows beyond `limit` are cut.
    """

    def __init__(self, limit: int | None) -> None:
        self.rows = 0
        self._limit = limit
        self._base_ns: int | None = None

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return self._limit is not None and self.rows >= self._limit

    def batch(self, columns: Columns) -> pa.RecordBatch:
        """Make a batch, adding `request_id` where it is missing."""
        stamps = columns.pop("stamp_ns", None)
        if stamps is not None:
            if self._base_ns is None:
                self._base_ns = int(stamps[0])
            columns["arrival_s"] = (stamps - self._base_ns) / 1e9
        count = len(next(iter(columns.values())))
        if "request_id" not in columns:
            columns["request_id"] = np.arange(self.rows, self.rows + count, dtype=np.int64)
        batch = pa.RecordBatch.from_pydict(columns)
        if self._limit is not None:
            batch = batch.slice(0, max(0, self._limit - self.rows))
        self.rows += batch.num_rows
        return batch


def assemble(columns: Iterable[Columns], limit: int | None) -> Iterator[pa.RecordBatch]:
    """Make batches of converted columns until `limit` rows are made."""
    assembler = Assembler(limit)
    for chunk in columns:
        yield assembler.batch(chunk)
        if assembler.full:
            return
