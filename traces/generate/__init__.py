"""Generated traces: from a YAML specification, or the preset `bench`.

Everything is seeded (PCG64, a child seed for each stream) and deterministic: the same
specification gives the same rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from traces.generate.bench import bench_batches, bench_load, bench_loads
from traces.generate.spec import TraceSpec, load_spec, parse_spec
from traces.generate.streams import Ids, stream_batches
from traces.pipeline import Written, write_trace

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator

    import pyarrow as pa

__all__ = [
    "TraceSpec",
    "bench_loads",
    "generate_bench",
    "generate_trace",
    "load_spec",
    "parse_spec",
    "spec_batches",
]


def spec_batches(spec: TraceSpec) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a specification, stream by stream, in no particular order in time."""
    ids = Ids()
    for number in range(len(spec.streams)):
        yield from stream_batches(spec, number, ids)


def generate_trace(
    spec: TraceSpec,
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Write the trace of a specification to `path`, in bounded memory.

    Raises: TraceError (and writes nothing) when the specification gives no request.
    """
    return write_trace(
        spec_batches(spec),
        path,
        rezero=False,
        renumber=True,
        resolution_s=0.0,
        progress=progress,
    )


def generate_bench(
    name: str,
    path: str | os.PathLike[str],
    *,
    progress: Callable[[int], None] | None = None,
) -> Written:
    """Write the bench load `name` (see `bench_loads`) to `path`.

    Raises: TraceError when there is no such load.
    """
    load = bench_load(name)
    return write_trace(
        bench_batches(load),
        path,
        defaults={"trace_id": name, "model": "qwen3-8b", "endpoint": "completions"},
        rezero=False,
        resolution_s=0.0,
        progress=progress,
    )
