"""Azure LLM inference traces of 2023 and 2024 (AzurePublicDataset, CC BY 4.0).

CSV with `TIMESTAMP` (arrival, UTC, 100 ns), `ContextTokens` (prompt) and `GeneratedTokens`
(answer). Cite Patel et al., Splitwise, ISCA 2024, or Stojkovic et al., DynamoLLM, HPCA 2025.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.readers.common import (
    Columns,
    ReadOptions,
    Rejects,
    assemble,
    convert,
    csv_rows,
    fields,
    prompt_column,
    stamp_column,
    token_column,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pyarrow as pa

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read(path: Path, options: ReadOptions, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """Yield the requests of an Azure trace."""
    return assemble(convert(csv_rows(path, COLUMNS), _columns, rejects), options.limit)


def _columns(rows: list[list[str]]) -> Columns:
    stamps, prompts, outputs = fields(rows, len(COLUMNS))
    return {
        "stamp_ns": stamp_column("TIMESTAMP", stamps),
        "prompt_tokens": prompt_column("ContextTokens", prompts),
        "output_tokens": token_column("GeneratedTokens", outputs),
    }
