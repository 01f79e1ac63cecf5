"""vLLM's OpenTelemetry spans, as OTLP JSON lines (the collector's `file` exporter).

vLLM writes one span `llm_request` a request, with `gen_ai.usage.*` (tokens) and
`gen_ai.latency.*` (seconds). Other spans are passed over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from traces.readers.common import (
    Assembler,
    ReadOptions,
    Rejects,
    json_lines,
    prompt_column,
    token_column,
)
from traces.schema import category_column

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMNS = ("resourceSpans",)
_CHUNK = 4096
_ERROR = 2

_SECONDS = {
    "queue_s": "gen_ai.latency.time_in_queue",
    "schedule_s": "gen_ai.latency.time_in_scheduler",
    "prefill_s": "gen_ai.latency.time_in_model_prefill",
    "decode_s": "gen_ai.latency.time_in_model_decode",
    "ttft_s": "gen_ai.latency.time_to_first_token",
    "e2e_s": "gen_ai.latency.e2e",
}


class _Value(msgspec.Struct):
    stringValue: str | None = None
    intValue: str | int | None = None
    doubleValue: float | None = None

    def get(self) -> str | int | float | None:
        if self.intValue is not None:
            return int(self.intValue)
        return self.doubleValue if self.stringValue is None else self.stringValue


class _Attribute(msgspec.Struct):
    key: str
    value: _Value = msgspec.field(default_factory=_Value)


class _Status(msgspec.Struct):
    code: int | str = 0


class _Span(msgspec.Struct):
    name: str
    startTimeUnixNano: str | int
    endTimeUnixNano: str | int = 0
    attributes: list[_Attribute] = msgspec.field(default_factory=list)
    status: _Status = msgspec.field(default_factory=_Status)


class _Scope(msgspec.Struct):
    spans: list[_Span] = msgspec.field(default_factory=list)


class _Resource(msgspec.Struct):
    scopeSpans: list[_Scope] = msgspec.field(default_factory=list)


class _Export(msgspec.Struct):
    resourceSpans: list[_Resource]


def read(path: Path, options: ReadOptions, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """Yield one request for each `llm_request` span; a row in errors is a line of the file."""
    assembler = Assembler(options.limit)
    rows: list[dict[str, Any]] = []
    for number, line in json_lines(path):
        for row in _line_rows(number, line, rejects):
            rows.append(row)
            if len(rows) == _CHUNK:
                yield assembler.batch(_columns(rows))
                rows = []
        if assembler.full:
            return
    if rows:
        yield assembler.batch(_columns(rows))


def _line_rows(number: int, line: str, rejects: Rejects) -> Iterator[dict[str, Any]]:
    try:
        export = msgspec.json.decode(line, type=_Export)
    except msgspec.DecodeError as error:
        rejects.seen += 1
        rejects.bad(number, f"not an OTLP trace export: {error}: {line.strip()[:80]!r}")
        return
    for resource in export.resourceSpans:
        for scope in resource.scopeSpans:
            for span in scope.spans:
                if span.name != "llm_request":
                    continue
                rejects.seen += 1
                try:
                    row = _row(span)
                except (ValueError, TypeError) as error:
                    rejects.bad(number, str(error))
                    continue
                yield row


def _row(span: _Span) -> dict[str, Any]:
    """The trace columns of a span. Raises: ValueError with what is wrong in it."""
    values = {attribute.key: attribute.value.get() for attribute in span.attributes}
    prompt = _first(values, "gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens")
    if prompt is None:
        raise ValueError("span llm_request lacks gen_ai.usage.prompt_tokens")
    output = _first(values, "gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens")
    limit = values.get("gen_ai.request.max_tokens")
    start, end = int(span.startTimeUnixNano), int(span.endTimeUnixNano)
    row: dict[str, Any] = {
        "stamp_ns": start,
        "prompt_tokens": int(prompt_column("prompt_tokens", [prompt])[0]),
        "output_tokens": _tokens("completion_tokens", output),
        "max_output_tokens": _tokens("max_tokens", limit),
        "model": _first(values, "gen_ai.response.model", "gen_ai.request.model"),
        "outcome": "failed" if span.status.code in (_ERROR, "STATUS_CODE_ERROR") else "answered",
    }
    for name, key in _SECONDS.items():
        value = values.get(key)
        row[name] = None if value is None else float(value)
    if row["e2e_s"] is None and end > start:
        row["e2e_s"] = (end - start) / 1e9
    return row


def _first(values: dict[str, Any], *keys: str) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _tokens(name: str, value: Any) -> int | None:
    return None if value is None else int(token_column(name, [value])[0])


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "stamp_ns": np.array([row["stamp_ns"] for row in rows], np.int64),
        "arrival_res_s": np.zeros(len(rows), np.float32),
    }
    for name in ("prompt_tokens", "output_tokens", "max_output_tokens"):
        columns[name] = pa.array([row[name] for row in rows], pa.int32())
    for name in ("model", "outcome"):
        columns[name] = category_column([row[name] for row in rows])
    for name in _SECONDS:
        columns[name] = pa.array([row[name] for row in rows], pa.float32())
    return columns
