"""The trace schema: one row per model call.

Times are seconds as floating point, lengths are tokens, sizes are bytes. The schema carries a
number, `SCHEMA_VERSION`, in the Parquet metadata; a file with another number is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA_VERSION = "1"
SCHEMA_KEY = b"twinkeel.schema"


class TraceError(ValueError):
    """A trace cannot be read or written; the message names file, row, value and what to do."""


_CATEGORY = pa.dictionary(pa.int32(), pa.string())


def _fields() -> list[pa.Field]:
    required = False
    return [
        pa.field("trace_id", pa.string(), required),
        pa.field("request_id", pa.int64(), required),
        pa.field("arrival_s", pa.float64()),
        pa.field("arrival_res_s", pa.float32(), required),
        pa.field("prompt_tokens", pa.int32(), required),
        pa.field("output_tokens", pa.int32()),
        pa.field("prompt_bytes", pa.int32()),
        pa.field("max_output_tokens", pa.int32()),
        pa.field("reasoning_tokens", pa.int32()),
        pa.field("image_tokens", pa.int32()),
        pa.field("model", _CATEGORY),
        pa.field("model_version", _CATEGORY),
        pa.field("endpoint", _CATEGORY),
        pa.field("tenant_id", _CATEGORY),
        pa.field("user_id", pa.int64()),
        pa.field("session_id", pa.int64()),
        pa.field("turn", pa.int32()),
        pa.field("chain_id", pa.int64()),
        pa.field("parent_request_id", pa.int64()),
        pa.field("step", _CATEGORY),
        pa.field("think_time_s", pa.float32()),
        pa.field("prefix_block_tokens", pa.int16()),
        pa.field("prefix_ids", pa.list_(pa.int64())),
        pa.field("sla_class", _CATEGORY),
        pa.field("business_line", _CATEGORY),
        pa.field("priority", pa.int8()),
        pa.field("deadline_s", pa.float32()),
        pa.field("outcome", _CATEGORY),
        pa.field("http_code", pa.int16()),
        pa.field("error_kind", _CATEGORY),
        pa.field("retries", pa.int8()),
        pa.field("tier", _CATEGORY),
        pa.field("replica", _CATEGORY),
        pa.field("degraded_how", _CATEGORY),
        pa.field("confidence", pa.float32()),
        pa.field("verification_status", _CATEGORY),
        pa.field("gateway_s", pa.float32()),
        pa.field("queue_s", pa.float32()),
        pa.field("schedule_s", pa.float32()),
        pa.field("prefill_s", pa.float32()),
        pa.field("decode_s", pa.float32()),
        pa.field("network_s", pa.float32()),
        pa.field("ttft_s", pa.float32()),
        pa.field("e2e_s", pa.float32()),
        pa.field("tpot_s", pa.float32()),
        pa.field("weight", pa.float32(), required),
        pa.field("provenance", _CATEGORY, required),
    ]


SCHEMA: pa.Schema = pa.schema(_fields(), metadata={SCHEMA_KEY: SCHEMA_VERSION})
"""The columns of a trace, in order, with their types and nullability."""

NON_NEGATIVE = (
    "prompt_tokens",
    "output_tokens",
    "prompt_bytes",
    "max_output_tokens",
    "reasoning_tokens",
    "image_tokens",
    "arrival_res_s",
    "think_time_s",
    "deadline_s",
    "weight",
)
"""Columns in which a negative value is an error."""

SLA_CLASSES = ("P0", "P1", "P2")
"""Service classes; another value is kept, but import and description mark it as unknown."""

OUTCOMES = ("answered", "degraded", "shed", "failed", "cancelled")
"""How a request ended."""


def check_schema(schema: pa.Schema, path: object) -> None:
    """Refuse a Parquet schema that is not this trace schema.

    Raises: TraceError, naming the file and what to do, when the schema number is missing or
    unknown, or when a column is missing or has another type.
    """
    number = (schema.metadata or {}).get(SCHEMA_KEY)
    if number is None:
        raise TraceError(
            f"{path}: not a Twinkeel trace (no schema number); "
            "import it first: twinkeel trace import SOURCE -o TRACE.parquet"
        )
    if number != SCHEMA_VERSION.encode():
        raise TraceError(
            f"{path}: trace schema {number.decode(errors='replace')!r} is unknown here, "
            f"which reads schema {SCHEMA_VERSION!r}; import the source again with this version"
        )
    for field in SCHEMA:
        index = schema.get_field_index(field.name)
        if index < 0:
            raise TraceError(f"{path}: column {field.name!r} is missing; import the source again")
        found = schema.field(index).type
        if not _same_type(found, field.type):
            raise TraceError(
                f"{path}: column {field.name!r} is {found}, not {field.type}; "
                "import the source again"
            )


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(found) and found.value_type == wanted.value_type)
    return bool(found == wanted)


def constant_column(field: pa.Field, value: Any, rows: int) -> pa.Array:
    """Make a column of `rows` times `value` (None for null) in the type of `field`."""
    if value is None:
        return pa.nulls(rows, field.type)
    if pa.types.is_dictionary(field.type):
        indices = pa.array(np.zeros(rows, np.int32))
        return pa.DictionaryArray.from_arrays(indices, pa.array([str(value)], pa.string()))
    return pa.repeat(pa.scalar(value, field.type), rows)


def category_column(values: list[str | None]) -> pa.Array:
    """Dictionary-encode a list of strings, null where the string is None or empty."""
    codes: dict[str, int] = {}
    indices = [None if not v else codes.setdefault(v, len(codes)) for v in values]
    return pa.DictionaryArray.from_arrays(
        pa.array(indices, pa.int32()), pa.array(list(codes), pa.string())
    )


def conform(batch: pa.RecordBatch, defaults: Mapping[str, Any]) -> pa.RecordBatch:
    """Complete a batch to the trace schema.

    `batch` holds some of the schema's columns; a missing one is filled with its value in
    `defaults`, else 0 for `arrival_res_s`, 1 for `weight`, and null. Strings are
    dictionary-encoded where the schema says so, numbers are cast without loss.

    Raises: TraceError for a column that the schema lacks, cannot take, or that must not be null.
    """
    rows = batch.num_rows
    unknown = [name for name in batch.schema.names if SCHEMA.get_field_index(name) < 0]
    if unknown:
        raise TraceError(f"unknown trace column {unknown[0]!r}; known: {', '.join(SCHEMA.names)}")
    filled = {"arrival_res_s": 0.0, "weight": 1.0, **defaults}
    columns = []
    for field in SCHEMA:
        index = batch.schema.get_field_index(field.name)
        if index < 0:
            column = constant_column(field, filled.get(field.name), rows)
        else:
            column = _cast(batch.column(index), field)
        if not field.nullable and column.null_count:
            raise TraceError(f"column {field.name!r} must not be null in any row")
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type == field.type:
        return column
    try:
        if pa.types.is_dictionary(field.type) and not pa.types.is_dictionary(column.type):
            return column.cast(pa.string()).dictionary_encode()
        safe = not pa.types.is_floating(field.type)
        return column.cast(field.type, safe=safe)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise TraceError(f"column {field.name!r}: {error}") from error
