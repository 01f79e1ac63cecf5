"""The workload on which simulators are timed.

Poisson arrivals; prompts lognormal with mean 1000 (sigma 0.6, 16 to 3000 tokens), answers
lognormal with mean 200 (sigma 0.6, 4 to 1000). The random sequence is that of the standard
library's `random.Random(seed)`, drawn as gap, prompt, answer for each request, so that every
simulator can be given the same rows.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pyarrow as pa

from traces.schema import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

_CHUNK = 8192
_SIGMA = 0.6


class BenchLoad(NamedTuple):
    """Rows, arrivals per second and seed."""

    rows: int
    rate_rps: float
    seed: int


def bench_loads() -> dict[str, BenchLoad]:
    """The named loads."""
    return {
        "w10k_r8": BenchLoad(10_000, 8.0, 7),
        "w10k_r32": BenchLoad(10_000, 32.0, 7),
        "w100k_r32": BenchLoad(100_000, 32.0, 7),
    }


def bench_load(name: str) -> BenchLoad:
    """The load called `name`. Raises: TraceError when there is none."""
    loads = bench_loads()
    if name not in loads:
        raise TraceError(f"no bench load {name!r}; known: {', '.join(loads)}")
    return loads[name]


def bench_batches(load: BenchLoad) -> Iterator[pa.RecordBatch]:
    """Yield the load's rows: request_id, arrival_s, prompt_tokens, output_tokens, and labels."""
    draw = random.Random(load.seed)  # noqa: S311 - a workload, no secret
    now_s = 0.0
    for first in range(0, load.rows, _CHUNK):
        count = min(_CHUNK, load.rows - first)
        rows = []
        for _ in range(count):
            now_s += draw.expovariate(load.rate_rps)
            prompt = _lognormal(draw, 1000, 16, 3000)
            rows.append((round(now_s, 6), prompt, _lognormal(draw, 200, 4, 1000)))
        arrival, prompts, outputs = zip(*rows, strict=True)
        yield pa.RecordBatch.from_pydict(
            {
                "request_id": pa.array(np.arange(first, first + count, dtype=np.int64)),
                "arrival_s": pa.array(arrival, pa.float64()),
                "arrival_res_s": pa.array(np.zeros(count, np.float32)),
                "prompt_tokens": pa.array(prompts, pa.int32()),
                "output_tokens": pa.array(outputs, pa.int32()),
            }
        )


def _lognormal(draw: random.Random, mean: float, low: int, high: int) -> int:
    mu = math.log(mean) - _SIGMA * _SIGMA / 2
    return max(low, min(high, round(draw.lognormvariate(mu, _SIGMA))))
