"""Mooncake traces (kvcache-ai/Mooncake, Apache-2.0; cite Qin et al., Mooncake, FAST 2025).

JSON lines with `timestamp` (ms from the start), `input_length`, `output_length` (tokens) and
`hash_ids` (ids of the prompt's blocks of 512 tokens; an equal id is a reusable prefix block).
The conversation trace is stamped in steps of 3 s, which the importer detects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import pyarrow as pa

from traces.readers.common import (
    Columns,
    ReadOptions,
    Rejects,
    assemble,
    convert,
    json_lines,
    prompt_column,
    token_column,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMNS = ("timestamp", "input_length", "output_length", "hash_ids")
BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=0)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int]


def read(path: Path, options: ReadOptions, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """Yield the requests of a Mooncake trace, with their prefix blocks."""
    decoder = msgspec.json.Decoder(_Line)

    def columns(lines: list[str]) -> Columns:
        rows = [_decode(decoder, line) for line in lines]
        return {
            "arrival_s": np.array([row.timestamp for row in rows]) / 1000.0,
            "prompt_tokens": prompt_column("input_length", [r.input_length for r in rows]),
            "output_tokens": token_column("output_length", [r.output_length for r in rows]),
            "prefix_block_tokens": pa.array([BLOCK_TOKENS] * len(rows), pa.int16()),
            "prefix_ids": pa.array([row.hash_ids for row in rows], pa.list_(pa.int64())),
        }

    return assemble(convert(json_lines(path), columns, rejects, 2048), options.limit)


def _decode(decoder: msgspec.json.Decoder[_Line], line: str) -> _Line:
    try:
        return decoder.decode(line)
    except msgspec.DecodeError as error:
        raise ValueError(f"{error}: {line.strip()[:80]!r}") from error
