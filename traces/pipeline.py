"""From a reader's or generator's batches, in any order, to a finished trace file."""

from __future__ import annotations

import math
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from traces.schema import TraceError, conform
from traces.sort import Spool
from traces.store import TraceWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping

    Progress = Callable[[int], None]
    Array = np.ndarray[Any, np.dtype[Any]]

_FINEST_RES_S = 0.05
_COARSEST_RES_S = 3600.0
_GRAIN_S = 0.01
_GRAIN_EXACT = 1e-4
_MANY_ROWS = 100


@dataclass(frozen=True)
class Written:
    """What was written: rows, the trace's length and the stamps' resolution, in seconds."""

    path: Path
    rows: int
    duration_s: float
    resolution_s: float


def write_trace(
    batches: Iterable[pa.RecordBatch],
    path: str | os.PathLike[str],
    *,
    defaults: Mapping[str, Any] | None = None,
    rezero: bool = True,
    renumber: bool = False,
    resolution_s: float | None = None,
    progress: Progress | None = None,
) -> Written:
    """Sort batches by arrival and write them as a trace, in bounded memory.

    `batches` hold some of the schema's columns, with `request_id`, in any order; `defaults` fills
    the rest. `rezero` moves the first arrival to 0. `renumber` gives the rows new ids in arrival
    order, in `parent_request_id` too, which takes some 8 bytes of memory a row.
    `resolution_s` is the resolution of the stamps when the batches do not say it; None detects
    it (stamps that are all multiples of, say, 3 s). `progress` is called with the rows read.

    Raises: TraceError (and writes nothing) when there is no row or a row is bad.
    """
    target = Path(path)
    if not target.parent.is_dir():
        raise TraceError(f"{target}: the folder does not exist; create it first")
    fill = {"trace_id": target.stem, "provenance": "generated", **(defaults or {})}
    folder = Path(tempfile.mkdtemp(prefix=".twinkeel-", dir=target.parent))
    try:
        spool, step = Spool(folder), _Step()
        for batch in batches:
            if "arrival_res_s" not in batch.schema.names and batch.num_rows:
                step.add(batch)
            spool.add(conform(batch, fill))
            if progress is not None:
                progress(spool.rows)
        if not spool.rows:
            raise TraceError(f"{target}: no request to write; the source has no usable row")
        found = step.resolution_s() if resolution_s is None else resolution_s
        result = _finish(
            spool, target, spool.first_s if rezero else 0.0, renumber, found if step.rows else None
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def _finish(
    spool: Spool, path: Path, start_s: float, renumber: bool, resolution_s: float | None
) -> Written:
    ids = _Renumber() if renumber else None
    last, coarsest = 0.0, 0.0
    with TraceWriter(path) as writer:
        for sorted_batch in spool.sorted():
            batch = sorted_batch
            if start_s:
                batch = _shift(batch, start_s)
            if resolution_s is not None:
                batch = _replace(
                    batch, "arrival_res_s", np.full(batch.num_rows, resolution_s, np.float32)
                )
            if ids is not None:
                batch = ids(batch)
            writer.write(batch)
            end = batch.column("arrival_s")[-1].as_py()
            last = last if end is None else end
            coarsest = max(coarsest, float(batch.column("arrival_res_s").to_numpy().max()))
    return Written(path, writer.rows, last, coarsest)


def _replace(batch: pa.RecordBatch, name: str, values: Any) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    field = batch.schema.field(index)
    return batch.set_column(index, field, pa.array(values, field.type))


def _shift(batch: pa.RecordBatch, start_s: float) -> pa.RecordBatch:
    """Take `start_s` off the arrivals, keeping nulls; rounded to a nanosecond."""
    column = batch.column("arrival_s")
    if column.null_count:
        return batch
    return _replace(batch, "arrival_s", np.round(column.to_numpy() - start_s, 9))


class _Renumber:
    """New ids in arrival order.

    Any later row may name an earlier one as its parent, so all ids are remembered: 8 bytes for
    each up to the largest (readers number rows from 0), and more for a moment while this grows.
    """

    def __init__(self) -> None:
        self.next = 0
        self._new: Array = np.full(1024, -1, np.int64)

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        old = batch.column("request_id").to_numpy()
        new = np.arange(self.next, self.next + old.size, dtype=np.int64)
        self.next += old.size
        top = int(old.max()) + 1
        if top > self._new.size:
            grown = np.full(max(top, 2 * self._new.size), -1, np.int64)
            grown[: self._new.size] = self._new
            self._new = grown
        self._new[old] = new
        parents = batch.column("parent_request_id")
        if parents.null_count < len(parents):
            ids = parents.to_numpy(zero_copy_only=False)
            known = np.isfinite(ids)
            mapped = np.zeros(ids.size, np.int64)
            at = ids[known].astype(np.int64)
            mapped[known] = np.where(at < self._new.size, self._new[at % self._new.size], -1)
            missing = ~known | (mapped < 0)
            batch = _replace(batch, "parent_request_id", pa.array(mapped, mask=missing))
        return _replace(batch, "request_id", new)


class _Step:
    """Finds the step of the stamps: the greatest common divisor of their distances.

    Stamps may stray from their step by up to 5 ms, as Mooncake's do.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._step = 0  # in units of _GRAIN_S
        self._exact = True
        self._first: float | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Take a batch with `arrival_s`, or without."""
        self.rows += batch.num_rows
        index = batch.schema.get_field_index("arrival_s")
        if index < 0 or batch.column(index).null_count or self._step == 1:
            return
        stamps = batch.column(index).to_numpy()
        self._first = float(stamps[0]) if self._first is None else self._first
        grains = (stamps - self._first) / _GRAIN_S
        whole = np.rint(grains)
        self._exact &= bool(np.abs(grains - whole).max() < _GRAIN_EXACT)
        self._step = math.gcd(self._step, int(np.gcd.reduce(np.abs(whole).astype(np.int64))))

    def resolution_s(self) -> float:
        """The resolution in seconds; 0.0 (exact) for a step under 50 ms or no step at all.

        Under 100 rows a step may be chance: then only exact whole seconds count, as 1 s.
        """
        step_s = self._step * _GRAIN_S
        if self.rows < _MANY_ROWS:
            return 1.0 if self._exact and self._step and not self._step % 100 else 0.0
        return round(step_s, 2) if _FINEST_RES_S <= step_s <= _COARSEST_RES_S else 0.0


def take_rows(batch: pa.RecordBatch, keep: Array) -> pa.RecordBatch:
    """The rows of `batch` where the boolean array `keep` is true."""
    if keep.all():
        return batch
    return batch.take(pa.array(np.flatnonzero(keep)))
