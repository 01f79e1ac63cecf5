"""BurstGPT traces (HPMLL/BurstGPT, CC BY 4.0; cite Wang et al., BurstGPT, KDD 2025).

CSV with `Timestamp` (seconds from the start), `Model`, `Request tokens`, `Response tokens`,
`Total tokens`, `Log Type`, and in later files `Session ID` and `Elapsed time`. A request with no
response token failed; what it would have answered is unknown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from traces.readers.common import (
    Columns,
    ReadOptions,
    Rejects,
    assemble,
    convert,
    csv_rows,
    fields,
    prompt_column,
    seconds_column,
    token_column,
)
from traces.schema import category_column

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens", "Log Type")


def read(path: Path, options: ReadOptions, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """Yield the requests of a BurstGPT trace; `tenant_id` is the log type."""
    return assemble(convert(csv_rows(path, COLUMNS), _columns, rejects), options.limit)


def _columns(rows: list[list[str]]) -> Columns:
    stamps, models, prompts, outputs, logs = fields(rows, len(COLUMNS))
    answers = token_column("Response tokens", outputs)
    failed = answers == 0
    return {
        "arrival_s": seconds_column("Timestamp", stamps),
        "prompt_tokens": prompt_column("Request tokens", prompts),
        "output_tokens": pa.array(answers, mask=failed),
        "model": category_column(list(models)),
        "tenant_id": category_column(list(logs)),
        "endpoint": category_column(["chat"] * len(rows)),
        "outcome": category_column(np.where(failed, "failed", "answered").tolist()),
    }
