"""A trace, or a stretch of it, held in memory and cut into blocks: loaded once by each worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from traces import Trace, TraceError, open_trace
from traces.schema import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BLOCKS = 50
"""Stretches of as many requests each, that figures are compared by. A tenth of the trace is five of
them, which an interval can be made of."""


class HeldTrace(Trace):
    """The requests that arrive from one share of the trace's time to another, from 0 s on.

    Raises:
        TraceError: too few requests for the blocks, or no absolute arrivals.
    """

    def __init__(self, path: str, begin: float = 0.0, end: float = 1.0) -> None:
        trace = open_trace(path)
        if not trace.has_arrivals:
            raise TraceError(f"{trace.path}: arrivals are relative to their sessions: import again")
        table = pa.Table.from_batches(list(trace.batches())).unify_dictionaries()
        arrival_s = table.column("arrival_s").to_numpy()
        first, last = (
            int(np.searchsorted(arrival_s, share * trace.duration_s)) if share < 1 else len(table)
            for share in (begin, end)
        )
        stretch = table.slice(first, last - first).combine_chunks()
        if len(stretch) < 2 * BLOCKS:
            raise TraceError(
                f"{trace.path}: {len(stretch)} requests are too few to compare policies by: it "
                f"takes {2 * BLOCKS} at least"
            )
        at_s = arrival_s[first:last] - arrival_s[first]
        index = stretch.schema.get_field_index("arrival_s")
        field = SCHEMA.field("arrival_s")
        stretch = stretch.set_column(index, field, pa.array(at_s, field.type))
        self._batch = stretch.to_batches()[0]
        self._edges = np.linspace(0, len(stretch), BLOCKS + 1).round().astype(int).tolist()
        self.path = trace.path
        self.rows = len(stretch)
        self.duration_s = float(at_s[-1])
        self.has_arrivals = True

    def batches(
        self, columns: Iterable[str] | None = None, batch_rows: int = 0
    ) -> Iterator[pa.RecordBatch]:
        """One for each block, whatever ``batch_rows``."""
        names = None if columns is None else list(columns)
        for begin, end in zip(self._edges, self._edges[1:], strict=False):
            batch = self._batch.slice(begin, end - begin)
            yield batch if names is None else batch.select(names)
