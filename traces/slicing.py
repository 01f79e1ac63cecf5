"""Cutting a part out of a trace: a stretch of time, some of its traffic, a sample."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from traces.describe import count_values
from traces.pipeline import take_rows
from traces.schema import SCHEMA, TraceError
from traces.spread import uniforms
from traces.store import TraceWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from traces.store import Trace

    Array = np.ndarray[Any, np.dtype[Any]]

FILTERS = ("business_line", "sla_class", "model", "endpoint", "tenant_id")
_LISTED = 12


def slice_trace(
    trace: Trace,
    target: str | os.PathLike[str],
    *,
    start_s: float = 0.0,
    end_s: float = np.inf,
    keep: Mapping[str, Sequence[str]] | None = None,
    sample: float = 1.0,
    seed: int = 0,
    keep_times: bool = False,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write the rows of `trace` that arrive in [start_s, end_s) and pass the filters; count them.

    `keep` maps a column (one of `FILTERS`) to the values that pass. `sample` keeps that share,
    whole sessions and chains at a time, and divides it into the weights. The new trace's time
    starts at `start_s` unless `keep_times`. Ids stay.

    Raises: TraceError (and writes nothing) when no row is left or an argument is out of range.
    """
    if not 0 < sample <= 1:
        raise TraceError(f"the sampled share must be above 0 and at most 1, not {sample:g}")
    if not start_s < end_s:
        raise TraceError(f"the slice is empty: it would go from {start_s:g} s to {end_s:g} s")
    timed = start_s > 0 or np.isfinite(end_s)
    if timed and not trace.has_arrivals:
        raise TraceError(f"{trace.path}: arrivals are null, so it cannot be cut by time")
    shift_s = 0.0 if keep_times or not trace.has_arrivals else start_s
    with TraceWriter(target) as writer:
        for batch in _until(trace, end_s, timed):
            chosen = take_rows(batch, _chosen(batch, start_s, end_s, timed, keep or {}))
            if sample < 1:
                chosen = _sampled(chosen, sample, seed)
            if shift_s:
                arrival = chosen.column("arrival_s").to_numpy() - shift_s
                chosen = _replaced(chosen, "arrival_s", np.round(arrival, 9))
            writer.write(chosen)
            if progress is not None:
                progress(writer.rows)
        if not writer.rows:
            raise TraceError(_nothing_left(trace, keep or {}))
    return writer.rows


def _nothing_left(trace: Trace, keep: Mapping[str, Sequence[str]]) -> str:
    """Say what there is in the columns that were filtered."""
    found: dict[str, Counter[str]] = {name: Counter() for name in keep}
    for batch in trace.batches(list(keep)) if keep else ():
        for name, counter in found.items():
            count_values(batch.column(name), counter)
    text = f"{trace.path}: no request is left; widen the slice or the filters"
    for name, counter in found.items():
        values = [value for value, _ in counter.most_common()]
        more = f" and {len(values) - _LISTED} more" if len(values) > _LISTED else ""
        text += f"; {name} has: {', '.join(values[:_LISTED]) or 'no value'}{more}"
    return text


def _until(trace: Trace, end_s: float, timed: bool) -> Iterator[pa.RecordBatch]:
    for batch in trace.batches():
        if timed and batch.column("arrival_s")[0].as_py() >= end_s:
            return
        yield batch


def _chosen(
    batch: pa.RecordBatch,
    start_s: float,
    end_s: float,
    timed: bool,
    keep: Mapping[str, Sequence[str]],
) -> Array:
    passes: Array = np.ones(batch.num_rows, bool)
    if timed:
        arrival = batch.column("arrival_s").to_numpy()
        passes &= (arrival >= start_s) & (arrival < end_s)
    for name, values in keep.items():
        if name not in FILTERS:
            raise TraceError(f"no filter by {name!r}; filters: {', '.join(FILTERS)}")
        column = batch.column(name)
        wanted = np.array([v in values for v in column.dictionary.to_pylist()] + [False])
        codes = column.indices.fill_null(len(wanted) - 1).to_numpy()
        passes &= wanted[codes]
    return passes


def _sampled(batch: pa.RecordBatch, sample: float, seed: int) -> pa.RecordBatch:
    ids = batch.column("request_id").to_numpy()
    for name in ("session_id", "chain_id"):
        column = batch.column(name)
        if column.null_count < len(column):
            known = column.is_valid().to_numpy(zero_copy_only=False)
            # Negative, so that a session is not drawn with the request of the same number.
            ids = np.where(known, ~column.fill_null(0).to_numpy(), ids)
    batch = take_rows(batch, uniforms(ids, seed) < sample)
    return _replaced(batch, "weight", batch.column("weight").to_numpy() / sample)


def _replaced(batch: pa.RecordBatch, name: str, values: Any) -> pa.RecordBatch:
    field = SCHEMA.field(name)
    return batch.set_column(SCHEMA.get_field_index(name), field, pa.array(values, field.type))
