"""Anyone's CSV or JSON lines, by a map file.

schema: 1
format: csv                  # or jsonl
delimiter: ","               # csv only
arrival_res_s: 1             # resolution of the stamps; left out: detected
columns:                     # trace column: source column, or what to do with it
  arrival_s: {from: start, unit: ms}              # s, ms, us, ns
  # arrival_s: {from: start, time: iso}           # or a strptime format; no zone means UTC
  prompt_tokens: usage.prompt_tokens              # jsonl: a dot goes into an object
  output_tokens: usage.completion_tokens
  user_id: {from: user, hash: true}               # text to a number
  sla_class: {from: prio, values: {high: P0, low: P2}}
constants: {model: qwen3-8b, endpoint: chat}
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
import pyarrow as pa
import yaml

from traces.hints import explain
from traces.readers.common import (
    EMPTY_PROMPT,
    Columns,
    ReadOptions,
    Rejects,
    assemble,
    convert,
    csv_rows,
    empty_prompts,
    fields,
    json_lines,
    stamp_column,
)
from traces.schema import SCHEMA, TraceError, category_column

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
_NS_PER_UNIT = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1000, "ns": 1}
_ID_COLUMNS = ("request_id", "parent_request_id", "user_id", "session_id", "chain_id")


class ColumnMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a trace column comes from and how it is converted."""

    source: str = msgspec.field(name="from")
    unit: Literal["s", "ms", "us", "ns"] = "s"
    time: str | None = None
    hash: bool = False
    values: dict[str, str | int | float] | None = None


class MapFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checked map file."""

    schema: Literal[1]
    format: Literal["csv", "jsonl"]
    columns: dict[str, str | ColumnMap]
    constants: dict[str, str | int | float] = {}
    delimiter: Annotated[str, msgspec.Meta(min_length=1, max_length=1)] = ","
    arrival_res_s: Annotated[float, msgspec.Meta(ge=0)] | None = None

    def __post_init__(self) -> None:
        for name in (*self.columns, *self.constants):
            if SCHEMA.get_field_index(name) < 0:
                raise ValueError(f"unknown trace column {name!r}; known: {', '.join(SCHEMA.names)}")
        both = set(self.columns) & set(self.constants)
        if both:
            raise ValueError(f"{min(both)!r} is both mapped and constant")
        if "prompt_tokens" not in {*self.columns, *self.constants}:
            raise ValueError("prompt_tokens must be mapped")
        for name, of in self.columns.items():
            if isinstance(of, ColumnMap):
                _check(name, of)


def _check(name: str, of: ColumnMap) -> None:
    if of.hash and name not in _ID_COLUMNS:
        raise ValueError(f"hash is for {', '.join(_ID_COLUMNS)}, not {name}")
    if of.time is not None and name != "arrival_s":
        raise ValueError(f"time is for arrival_s, not {name}")
    if of.unit != "s" and not name.endswith("_s"):
        raise ValueError(f"unit is for columns in seconds, not {name}")


def load_map(path: Path) -> MapFile:
    """Read and check a map file. Raises: TraceError naming the file and what is wrong."""
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(document, dict) or document.get("schema") != 1:
            raise TraceError(f"{path}: the map's schema is unknown here; write schema: 1")
        return msgspec.convert(document, MapFile)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    except msgspec.ValidationError as error:
        raise TraceError(f"{path}: {explain(error, MapFile)}") from error


def read(path: Path, options: ReadOptions, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a CSV or JSON lines file as its map says."""
    if options.map_path is None:
        raise TraceError(f"{path}: this format needs a map file: --map map.yaml")
    mapping = load_map(options.map_path)
    wanted = {
        name: ColumnMap(source=of) if isinstance(of, str) else of
        for name, of in mapping.columns.items()
    }
    makers = [(name, _maker(name, of)) for name, of in wanted.items()]
    sources = [of.source for of in wanted.values()]

    def columns(rows: list[Any]) -> Columns:
        values = fields(rows, len(sources)) if mapping.format == "csv" else _parsed(rows, sources)
        made: Columns = {}
        for (name, make), column in zip(makers, values, strict=True):
            made[_target(name, wanted[name])] = make(column)
        prompts = made.get("prompt_tokens")
        if mapping.constants.get("endpoint") == "embeddings" or prompts is None:
            return made
        if empty_prompts(prompts, made.get("endpoint")).any():
            raise ValueError(f"{wanted['prompt_tokens'].source} is 0: {EMPTY_PROMPT}")
        return made

    lines: Any = (
        csv_rows(path, sources, mapping.delimiter) if mapping.format == "csv" else json_lines(path)
    )
    for batch in assemble(convert(lines, columns, rejects), options.limit):
        yield _with_constants(batch, mapping)


def _target(name: str, of: ColumnMap) -> str:
    return "stamp_ns" if name == "arrival_s" and (of.time or of.unit != "s") else name


def _with_constants(batch: pa.RecordBatch, mapping: MapFile) -> pa.RecordBatch:
    constants = dict(mapping.constants)
    if mapping.arrival_res_s is not None:
        constants["arrival_res_s"] = mapping.arrival_res_s
    for name, value in constants.items():
        kind = SCHEMA.field(name).type
        text = pa.types.is_dictionary(kind) or pa.types.is_string(kind)
        try:
            scalar = pa.scalar(str(value) if text else value, pa.string() if text else kind)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise TraceError(f"constant {name}: {error}") from error
        batch = batch.append_column(name, pa.repeat(scalar, batch.num_rows))
    return batch


def _parsed(lines: list[str], sources: list[str]) -> list[list[Any]]:
    """Columns of values out of JSON lines; a missing one is None."""
    columns: list[list[Any]] = [[] for _ in sources]
    paths = [source.split(".") for source in sources]
    for line in lines:
        row = msgspec.json.decode(line)
        if not isinstance(row, dict):
            raise ValueError(f"not a JSON object: {line.strip()[:80]!r}")
        for column, source, path in zip(columns, sources, paths, strict=True):
            value = row.get(source)
            if value is None and len(path) > 1:
                value = row
                for key in path:
                    value = value.get(key) if isinstance(value, dict) else None
            column.append(value)
    return columns


def _maker(name: str, of: ColumnMap) -> Callable[[Any], Any]:
    """The function that makes trace column `name` of a column of source values."""
    if name == "arrival_s" and of.time is not None:
        return lambda values: _stamps(values, of)
    if name == "arrival_s" and of.unit != "s":
        return lambda values: np.array(
            [_whole_ns(v, _NS_PER_UNIT[of.unit], of.source) for v in values], np.int64
        )
    field = SCHEMA.field(name)

    def make(values: Any) -> pa.Array:
        cells = [_cell(value, name, of, field) for value in values]
        if pa.types.is_dictionary(field.type):
            return category_column(cells)
        return pa.array(cells, field.type)

    return make


def _whole_ns(value: Any, per_unit: int, source: str) -> int:
    text = str(value).strip()
    try:
        return int(text) * per_unit
    except ValueError:
        seconds = float(text)
        if not np.isfinite(seconds):
            raise ValueError(f"{source} is not finite: {value!r}") from None
        return round(seconds * per_unit)


def _stamps(values: Any, of: ColumnMap) -> Any:
    texts = [str(v) for v in values]
    if of.time == "iso":
        return stamp_column(of.source, texts)
    stamps = []
    for text in texts:
        at = datetime.strptime(text, of.time or "")  # noqa: DTZ007 - the zone is set next
        at = at.replace(tzinfo=UTC) if at.tzinfo is None else at
        whole = int(at.replace(microsecond=0).timestamp())
        stamps.append(whole * 1_000_000_000 + at.microsecond * 1000)
    return np.array(stamps, np.int64)


def _cell(value: Any, name: str, of: ColumnMap, field: pa.Field) -> Any:
    """One value of a trace column. Raises: ValueError with the value when it does not fit."""
    if value is None or value == "":
        if not field.nullable or name == "arrival_s":
            raise ValueError(f"{of.source} is missing")
        return None
    if of.values is not None:
        if str(value) not in of.values:
            raise ValueError(f"{of.source}: {value!r} is not among {', '.join(of.values)}")
        value = of.values[str(value)]
    if of.hash:
        digest = hashlib.blake2b(str(value).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1
    kind = field.type
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        return str(value)
    if pa.types.is_list(kind):
        if not isinstance(value, list):
            raise ValueError(f"{of.source}: {value!r} is not a list")
        return value
    try:
        number = float(value) / _UNITS[of.unit] if pa.types.is_floating(kind) else int(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{of.source}: {value!r} is not a number for {name}") from error
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(f"{of.source} is not finite: {value!r}")
    if number < 0 and (name.endswith(("_tokens", "_bytes"))):
        raise ValueError(f"{of.source} is negative: {value!r}")
    return number
