"""The project's own Parquet, read to be checked and sorted again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.pipeline import take_rows
from traces.readers.common import EMPTY_PROMPT, empty_prompts
from traces.schema import NON_NEGATIVE, check_schema

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.readers.common import ReadOptions, Rejects

_BATCH_ROWS = 8192


def read(path: Path, options: ReadOptions, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a trace in whatever order they are; bad are negative lengths
    and prompts of no token."""
    left = options.limit
    with pq.ParquetFile(path, pre_buffer=False) as file:
        check_schema(file.schema_arrow, path)
        for group in range(file.metadata.num_row_groups):
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group]):
                good = _good(batch, rejects)
                if left is not None:
                    good = good.slice(0, left)
                    left -= good.num_rows
                yield good
                if left == 0:
                    return


def _good(batch: pa.RecordBatch, rejects: Rejects) -> pa.RecordBatch:
    keep = np.ones(batch.num_rows, bool)
    for name in NON_NEGATIVE:
        column = batch.column(batch.schema.get_field_index(name))
        if column.null_count == len(column):
            continue
        values = column.to_numpy(zero_copy_only=False)
        for row in np.flatnonzero((values < 0) & keep):
            rejects.bad(rejects.seen + int(row) + 1, f"{name} is negative: {values[row]:g}")
            keep[row] = False
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    for row in np.flatnonzero(empty_prompts(columns["prompt_tokens"], columns["endpoint"]) & keep):
        rejects.bad(rejects.seen + int(row) + 1, f"prompt_tokens is 0: {EMPTY_PROMPT}")
        keep[row] = False
    rejects.seen += batch.num_rows
    return take_rows(batch, keep)
