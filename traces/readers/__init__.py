"""Readers of public trace formats, of vLLM's spans, and of anyone's CSV or JSON lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from traces.pipeline import write_trace
from traces.readers import agents, azure, burstgpt, mapped, mooncake, native, otlp, servegen
from traces.readers.common import ReadOptions, Rejects, open_text
from traces.schema import SCHEMA, TraceError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

__all__ = ["Format", "ImportReport", "ReadOptions", "formats", "guess_format", "import_trace"]


class Reader(Protocol):
    """Yields the rows of a source as batches with `request_id`, in any order."""

    def __call__(
        self, path: Path, options: ReadOptions, rejects: Rejects
    ) -> Iterator[pa.RecordBatch]: ...


class Format(NamedTuple):
    """A source format: it is guessed where the source has all `columns` (None: never)."""

    name: str
    about: str
    columns: tuple[str, ...] | None
    provenance: str
    read: Reader


def formats() -> tuple[Format, ...]:
    """The known formats; the first whose columns a source has is taken."""
    return (
        Format("twinkeel", "the project's own Parquet", tuple(SCHEMA.names), "real", native.read),
        Format("azure", "Azure 2023/2024 CSV", azure.COLUMNS, "real", azure.read),
        Format("burstgpt", "BurstGPT CSV", burstgpt.COLUMNS, "real", burstgpt.read),
        Format("mooncake", "Mooncake JSON lines", mooncake.COLUMNS, "real", mooncake.read),
        Format("otlp", "vLLM spans, OTLP JSON lines", otlp.COLUMNS, "real", otlp.read),
        Format(
            "agent-sessions",
            "agent sessions of kv-cache-tester as Parquet",
            agents.SESSION_COLUMNS,
            "real",
            agents.read_sessions,
        ),
        Format(
            "lmcache-sessions",
            "LMCache agent runs as Parquet",
            agents.LMCACHE_COLUMNS,
            "derived",
            agents.read_lmcache,
        ),
        Format("servegen", "ServeGen's client rates", servegen.COLUMNS, "derived", servegen.read),
        Format("map", "any CSV or JSON lines, by --map", None, "real", mapped.read),
    )


@dataclass(frozen=True)
class ImportReport:
    """What an import did: rows written and rejected, with the first rejected rows' messages."""

    path: Path
    format: str
    rows: int
    rows_rejected: int
    rejected_share: float
    duration_s: float
    resolution_s: float
    examples: tuple[str, ...]


def import_trace(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str | None = None,
    options: ReadOptions | None = None,
    trace_id: str | None = None,
    resolution_s: float | None = None,
    progress: Callable[[int], None] | None = None,
) -> ImportReport:
    """Read `source` in a public format and write it as a trace to `target`.

    The rows are sorted by arrival in bounded memory, the first arrival becomes 0, and the stamps'
    resolution is detected unless `resolution_s` gives it. `format` is a name of `formats()`; None
    guesses it from the header. `progress` is called with the number of rows read.

    Raises: TraceError, naming the file, the row and the value, at the first bad row (unless
    `options.on_error` is "skip"), or when nothing is left. Nothing is written then.
    """
    path, options = Path(source), options or ReadOptions()
    if not path.is_file():
        raise TraceError(f"{path}: no such file")
    if format is None and options.map_path is not None:
        format = "map"
    chosen = _format_named(format) if format is not None else guess_format(path)
    rejects = Rejects(path, options.on_error)
    own = chosen.name == "twinkeel"
    try:
        written = write_trace(
            _read(chosen, path, options, rejects),
            target,
            defaults={
                "provenance": chosen.provenance,
                "trace_id": trace_id or path.name.split(".")[0],
            },
            renumber=not own and chosen.name != "map",
            resolution_s=resolution_s,
            progress=progress,
        )
    except TraceError as error:
        if not rejects.skipped:
            raise
        more = f"{error}; {rejects.skipped} of {rejects.seen} rows were rejected"
        raise TraceError(f"{more}, the first: {rejects.examples[0]}") from error
    return ImportReport(
        written.path,
        chosen.name,
        written.rows,
        rejects.skipped,
        rejects.share,
        written.duration_s,
        written.resolution_s,
        tuple(rejects.examples),
    )


def _read(
    chosen: Format, path: Path, options: ReadOptions, rejects: Rejects
) -> Iterator[pa.RecordBatch]:
    try:
        yield from chosen.read(path, replace(options), rejects)
    except pa.ArrowInvalid as error:
        raise TraceError(f"{path}: cannot be read as {chosen.name}: {error}") from error


def _format_named(name: str) -> Format:
    for known in formats():
        if known.name == name:
            return known
    names = ", ".join(known.name for known in formats())
    raise TraceError(f"unknown format {name!r}; known: {names}")


def guess_format(path: Path) -> Format:
    """Guess a source's format from its columns. Raises: TraceError when none fits."""
    names = _column_names(path)
    for known in formats():
        if known.columns is not None and set(known.columns) <= set(names):
            return known
    raise TraceError(
        f"{path}: no known format has these columns: {', '.join(names[:12]) or '(none)'}; "
        "name one with --format, or describe the columns in a map file: --map map.yaml"
    )


def _column_names(path: Path) -> list[str]:
    with open(path, "rb") as raw:
        parquet = raw.read(4) == b"PAR1"
    if parquet:
        try:
            with pq.ParquetFile(path) as file:
                return list(file.schema_arrow.names)
        except (pa.ArrowInvalid, OSError) as error:
            raise TraceError(f"{path}: a damaged Parquet file: {error}") from error
    with open_text(path) as file:
        line = next((line for line in file if not line.isspace()), "")
    if not line:
        raise TraceError(f"{path}: the file is empty")
    try:
        first = msgspec.json.decode(line)
    except msgspec.DecodeError:
        first = None
    if isinstance(first, dict):
        return list(first)
    return [name.strip().strip('"') for name in line.split(",")]
