"""Where open-loop requests come from: a trace, or a specification of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import Meta

from traces import TraceError, open_trace
from traces.generate import TraceSpec, spec_batches
from traces.generate.lengths import NonNegative, Positive  # noqa: TC001 - msgspec reads them
from traces.generate.spec import Stream  # noqa: TC001
from traces.pipeline import write_trace
from twin.arrivals import arrivals

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that arrive when they arrive, whatever becomes of those before: from a recorded
    trace, or generated from streams as in a trace's specification."""

    trace: str = ""
    """``shipped:NAME`` or a Parquet file."""
    streams: tuple[Stream, ...] = ()
    warm_up_s: NonNegative = 0.0
    """Streams begin this long before the run, so that their sessions are under way."""
    speed: Positive = 1.0
    scale: Positive = 1.0
    scale_lengths: Positive = 1.0
    """As in ``twinkeel replay``; for a trace only."""
    assume_output: Annotated[int, Meta(ge=0)] = 0
    """Answer length where the trace does not know it."""
    from_s: NonNegative = 0.0
    """What of the trace is played starts here, at its own pace, and at the run's beginning."""

    def __post_init__(self) -> None:
        if bool(self.trace) == bool(self.streams):
            given = "both" if self.trace else "neither"
            raise ValueError(f"a source is one of trace and streams, not {given}")
        if self.streams and (self.speed, self.scale, self.scale_lengths) != (1.0, 1.0, 1.0):
            raise ValueError("speed, scale and scale_lengths are for a trace, not for streams")

    def beside(self, folder: Path) -> Source:
        """A trace's file, where it is one, starts from ``folder``."""
        if not self.trace.endswith(".parquet"):
            return self
        return msgspec.structs.replace(self, trace=str(folder / self.trace))


def write_sources(
    sources: Sequence[Source], path: Path, *, duration_s: float, seed: int
) -> Path | None:
    """Write all requests of the sources within ``duration_s`` as one trace; None: there are none.

    Raises:
        TraceError: a trace that cannot be played.
    """
    if not sources:
        return None
    batches = (
        batch
        for number, source in enumerate(sources)
        for batch in _batches(source, duration_s, seed + number)
        if batch.num_rows
    )
    write_trace(batches, path, rezero=False, renumber=True, resolution_s=0.0)
    return path


def _batches(source: Source, duration_s: float, seed: int) -> Iterator[pa.RecordBatch]:
    if source.streams:
        yield from spec_batches(
            TraceSpec(
                schema=1,
                duration_s=duration_s,
                streams=list(source.streams),
                seed=seed,
                warm_up_s=source.warm_up_s,
            )
        )
        return
    trace = open_trace(source.trace)
    if source.from_s > trace.duration_s:
        raise TraceError(
            f"{source.trace}: from_s {source.from_s:g} lies after its end at {trace.duration_s:g} s"
        )
    for chunk in arrivals(
        trace, seed=seed, speed=source.speed, scale=source.scale,
        scale_lengths=source.scale_lengths, assume_output=source.assume_output,
    ):  # fmt: skip
        batch = _cut(chunk.batch, source.from_s / source.speed, duration_s)
        yield batch
        if chunk.arrival_ns[-1] / 1e9 > source.from_s / source.speed + duration_s:
            return


def _cut(batch: pa.RecordBatch, from_s: float, duration_s: float) -> pa.RecordBatch:
    """The rows of a stretch of the trace, moved to the run's beginning."""
    index = batch.schema.get_field_index("arrival_s")
    at_s = batch.column(index).to_numpy() - from_s
    rows = np.flatnonzero((at_s >= 0) & (at_s < duration_s))
    field = batch.schema.field(index)
    moved = batch.set_column(index, field, pa.array(at_s, field.type))
    return moved.take(pa.array(rows))
