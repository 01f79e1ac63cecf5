"""Spreading coarse stamps over the time that they stand for.

A stamp of resolution r at t says that the request came somewhere in [t, t + r). Replaying it as
it stands would make a burst of all that share the stamp, so each is moved to t + u * r, u being
uniform in [0, 1) and a function of the seed and the request's id alone: neither the batch size
nor which other rows are there changes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    Array = np.ndarray[Any, np.dtype[Any]]


def spread_ties(batches: Iterable[pa.RecordBatch], seed: int = 0) -> Iterator[pa.RecordBatch]:
    """Yield the rows with their stamps spread, sorted by the new arrival, then as they came.

    `batches` must be sorted by `arrival_s` and hold `request_id`, `arrival_s` (not null) and
    `arrival_res_s`; other columns go along. The resolution of a spread row becomes 0, so that
    spreading twice changes nothing. Batches of exact stamps pass through untouched. Memory holds
    the rows of one resolution's length.
    """
    held: list[pa.RecordBatch] = []
    for batch in batches:
        if not batch.num_rows:
            continue
        stamps = _floats(batch, "arrival_s")
        resolution = _floats(batch, "arrival_res_s")
        if not held and not resolution.any():
            yield batch
            continue
        held.append(_moved(batch, stamps, resolution, seed))
        rows = _in_order(held)
        # Later rows have later stamps, so what is before this batch's last one is final.
        ready = int(np.searchsorted(_floats(rows, "arrival_s"), stamps[-1], "left"))
        if ready:
            yield rows.slice(0, ready)
        held = [rows.slice(ready)] if ready < rows.num_rows else []
    if held:
        yield _in_order(held)


def uniforms(ids: Array, seed: int) -> Array:
    """A number in [0, 1) for each id: SplitMix64 (Steele et al., OOPSLA 2014), 53 bits."""
    mixed = ids.astype(np.uint64) + np.uint64(1)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + np.uint64((seed * 0xD1342543DE82EF95) % 2**64)
    for _ in range(2):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)) * 2.0**-53


def _floats(batch: pa.RecordBatch, name: str) -> Array:
    index = batch.schema.get_field_index(name)
    values: Array = batch.column(index).to_numpy(zero_copy_only=False)
    return values


def _moved(batch: pa.RecordBatch, stamps: Array, resolution: Array, seed: int) -> pa.RecordBatch:
    step = resolution.astype(np.float64)
    moved = stamps + step * uniforms(_floats(batch, "request_id"), seed)
    # Rounding must not carry a row up to the next stamp.
    moved = np.where(step > 0, np.minimum(moved, np.nextafter(stamps + step, -np.inf)), stamps)
    moved = np.maximum(moved, stamps)
    for name, values in (("arrival_s", moved), ("arrival_res_s", np.zeros_like(resolution))):
        index = batch.schema.get_field_index(name)
        field = batch.schema.field(index)
        batch = batch.set_column(index, field, pa.array(values, field.type))
    return batch


def _in_order(held: list[pa.RecordBatch]) -> pa.RecordBatch:
    """The held batches as one, stably sorted by arrival."""
    if len(held) == 1:
        rows = held[0]
    else:
        table = pa.Table.from_batches(held).unify_dictionaries().combine_chunks()
        rows = table.to_batches()[0]
    order = np.argsort(_floats(rows, "arrival_s"), kind="stable")
    if np.array_equal(order, np.arange(order.size)):
        return rows
    return rows.take(pa.array(order))
