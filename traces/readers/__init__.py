"""Readers of public trace formats, of vLLM's spans, and of anyone's CSV or JSON lines.

``import_trace`` reads a source with ``ReadOptions`` and gives an ``ImportReport``; ``formats``
lists each ``Format``, ``guess_format`` finds the one of a file.

- ``azure``, ``burstgpt``, ``mooncake``, ``servegen``, ``agents``: public traces;
- ``otlp``: vLLM's spans; ``native``: the project's own Parquet; ``mapped``: anyone's logs;
- ``common``: what they share.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from traces.pipeline import write_trace
from traces.readers import agents, azure, burstgpt, mapped, mooncake, native, otlp, servegen
from traces.readers.common import ReadOptions, Rejects, open_text
from traces.schema import SCHEMA, SLA_CLASSES, TraceError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

__all__ = ["Format", "ImportReport", "ReadOptions", "formats", "guess_format", "import_trace"]


_WARNINGS = 5


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
    """What an import did: rows written and rejected, with the first rejected rows' messages.

    `warnings` say what was imported but will not be understood, such as unknown SLA classes.
    """

    path: Path
    format: str
    rows: int
    rows_rejected: int
    rejected_share: float
    duration_s: float
    resolution_s: float
    examples: tuple[str, ...]
    warnings: tuple[str, ...] = ()


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
    classes: Counter[str] = Counter()
    own = chosen.name == "twinkeel"
    try:
        written = write_trace(
            _read(chosen, path, options, rejects, classes),
            target,
            defaults={
                "provenance": chosen.provenance,
                "trace_id": trace_id or path.name.split(".")[0],
            },
            renumber=not own and chosen.name != "map",
            resolution_s=resolution_s,
            progress=progress,
        )
    except RecursionError as error:
        raise TraceError(f"{path}: a row is nested too deeply to be a request") from error
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
        tuple(_class_warnings(classes)),
    )


def _read(
    chosen: Format, path: Path, options: ReadOptions, rejects: Rejects, classes: Counter[str]
) -> Iterator[pa.RecordBatch]:
    """Read the source, counting its SLA classes. Raises: TraceError when it has no row."""
    rows = 0
    try:
        for batch in chosen.read(path, replace(options), rejects):
            rows += batch.num_rows
            _count_classes(batch, classes)
            yield batch
    except (pa.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise TraceError(f"{path}: cannot be read as {chosen.name}: {why}") from error
    if not rows:
        raise TraceError(f"{path}: no request to import; the source has no usable row")


def _count_classes(batch: pa.RecordBatch, classes: Counter[str]) -> None:
    index = batch.schema.get_field_index("sla_class")
    if index < 0 or batch.column(index).null_count == batch.num_rows:
        return
    for entry in pc.value_counts(batch.column(index).cast(pa.string())).to_pylist():
        if entry["values"] is not None:
            classes[entry["values"]] += entry["counts"]


def _class_warnings(classes: Counter[str]) -> Iterator[str]:
    unknown = [(name, count) for name, count in classes.most_common() if name not in SLA_CLASSES]
    for name, count in unknown[:_WARNINGS]:
        yield (
            f"sla_class {name!r} of {count:,} requests is none of {', '.join(SLA_CLASSES)}; "
            "give it one in a map file: sla_class: {from: COLUMN, values: {...}}"
        )
    if len(unknown) > _WARNINGS:
        yield f"and {len(unknown) - _WARNINGS} more unknown values of sla_class"


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
    except RecursionError as error:
        raise TraceError(f"{path}: nested too deeply to be a trace") from error
    except msgspec.DecodeError:
        first = None
    if isinstance(first, dict):
        return list(first)
    return [name.strip().strip('"') for name in line.split(",")]
