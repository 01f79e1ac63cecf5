"""The loads that a real server and its twin are both given.

A load has segments, each of which begins with an idle server. Lengths and arrivals are drawn once;
both runs of a segment ask for the same, with other token ids so that nothing is cached by accident.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

import numpy as np
import pyarrow.parquet as pq

from traces.readers import ReadOptions, import_trace

if TYPE_CHECKING:
    from collections.abc import Callable

ServerName = Literal["fcfs", "priority", "tight"]
BLOCK_TOKENS = 32
SEGMENTS = 2
SEGMENT_S = 9.0
MOONCAKE_SCALE = 16
"""A block of 512 tokens becomes one of the engine's blocks."""
AZURE_SCALE = 8


@dataclass(frozen=True, slots=True)
class Want:
    """A request to be sent ``at_s`` after its segment began."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    prefix: tuple[int, ...] = ()
    """Ids of its first blocks of ``BLOCK_TOKENS`` tokens, as far as others may share them."""


@dataclass(frozen=True)
class Load:
    """``stretch_twin``: the twin is given its own share of its own saturation."""

    name: str
    what: str
    server: ServerName
    segments: tuple[tuple[Want, ...], ...]
    stretch_twin: bool = False


def _lengths(dice: np.random.Generator) -> tuple[int, int]:
    """Prompts of 16 to 512 tokens, about 130 in the mean, and answers of 8 to 96, about 34."""
    prompt = int(np.clip(dice.lognormal(4.6, 0.7), 16, 512))
    return prompt, int(np.clip(dice.lognormal(3.35, 0.6), 8, 96))


def _drawn(
    seed: int,
    rate: float,
    cv: float = 1.0,
    want: Callable[[np.random.Generator], Want] | None = None,
) -> tuple[tuple[Want, ...], ...]:
    """Segments of Gamma arrivals; a coefficient of variation of 1 is Poisson."""
    segments = []
    shape = 1 / cv**2
    for number in range(SEGMENTS):
        dice = np.random.default_rng((seed, number))
        at_s, wants = 0.0, []
        while (at_s := at_s + float(dice.gamma(shape, 1 / (rate * shape)))) < SEGMENT_S:
            made = want(dice) if want else Want(0.0, *_lengths(dice))
            wants.append(replace(made, at_s=at_s))
        segments.append(tuple(wants))
    return tuple(segments)


def flood(requests: int) -> Load:
    """All at once: how fast the server can be."""
    dice = np.random.default_rng(99)
    wants = tuple(Want(0.0, *_lengths(dice)) for _ in range(requests))
    return Load("flood", f"{requests} requests at once", "fcfs", (wants,))


def _from_trace(
    source: Path, limit: int, scale: int, prompt_most: int, output_most: int, output_scale: int
) -> list[Want]:
    """The first requests of a public trace, with lengths scaled."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "slice.parquet"
        import_trace(source, path, options=ReadOptions(limit=limit))
        rows = pq.read_table(path).to_pylist()
    wants = []
    for row in rows:
        prompt = int(np.clip(row["prompt_tokens"] // scale, 16, prompt_most))
        ids = row["prefix_ids"] or ()
        shared = tuple(ids[: prompt // BLOCK_TOKENS])
        output = int(np.clip((row["output_tokens"] or 1) // output_scale, 4, output_most))
        wants.append(Want(row["arrival_s"], prompt, output, prefix=shared))
    return wants


def _paced(wants: list[Want], seconds: float) -> tuple[tuple[Want, ...], ...]:
    """Arrivals at the trace's own pattern, in segments that take ``seconds`` each."""
    size = len(wants) // SEGMENTS
    segments = []
    for number in range(SEGMENTS):
        part = wants[number * size : (number + 1) * size]
        first_s, last_s = part[0].at_s, part[-1].at_s
        factor = seconds / max(last_s - first_s, 1e-9)
        spread = np.random.default_rng(number).random(len(part))
        times = [(each.at_s - first_s) * factor for each in part]
        if len(set(times)) < len(times) // 2:  # stamped coarsely: spread ties over their step
            step_s = min((b - a for a, b in pairwise(times) if b > a), default=seconds)
            times = sorted(at_s + step_s * u for at_s, u in zip(times, spread, strict=True))
        segments.append(
            tuple(replace(each, at_s=at_s) for each, at_s in zip(part, times, strict=True))
        )
    return tuple(segments)


def all_loads(saturation: float, traces: Path, seqs: int) -> list[Load]:
    """The loads, for a server that saturates at ``saturation`` requests a second."""

    def poisson(percent: int) -> Load:
        rate = saturation * percent / 100
        return Load(
            f"poisson{percent}",
            f"Poisson, {'each at its own ' if percent == 95 else ''}{percent} % of saturation",
            "fcfs", _drawn(percent, rate), stretch_twin=percent == 95,
        )  # fmt: skip

    def prioritised(dice: np.random.Generator) -> Want:
        return Want(0.0, *_lengths(dice), priority=int(dice.choice([0, 5, 10])))

    def growing(dice: np.random.Generator) -> Want:
        return Want(0.0, int(dice.integers(16, 96)), int(dice.integers(32, 96)))

    def prefixed(dice: np.random.Generator) -> Want:
        which = int(dice.zipf(1.6)) % 12
        blocks = 4 + which % 5
        tail = int(dice.integers(8, 64))
        prefix = tuple(1000 * which + place for place in range(blocks))
        output = _lengths(dice)[1]
        return Want(0.0, blocks * BLOCK_TOKENS + tail, output, prefix=prefix)

    azure = _from_trace(
        traces / "azure2023_conv.csv.gz", round(saturation * 0.6 * SEGMENT_S) * SEGMENTS,
        AZURE_SCALE, 512, 96, AZURE_SCALE,
    )  # fmt: skip
    mooncake = _from_trace(
        traces / "mooncake_conversation.jsonl.gz", round(saturation * 0.3 * SEGMENT_S) * SEGMENTS,
        MOONCAKE_SCALE, 2048, 64, MOONCAKE_SCALE,
    )  # fmt: skip
    return [
        *(poisson(percent) for percent in (30, 60, 80, 95, 110)),
        Load("gamma", "Gamma arrivals, CV 3, 60 %", "fcfs", _drawn(3, saturation * 0.6, 3.0)),
        Load("azure", "Azure 2023 conversation, lengths / 8", "fcfs", _paced(azure, SEGMENT_S)),
        Load(
            "mooncake", "Mooncake conversation, lengths / 16, its shared blocks", "fcfs",
            _paced(mooncake, SEGMENT_S),
        ),
        Load(
            "prefixes", "12 shared prefixes of 128 to 256 tokens, 80 %", "fcfs",
            _drawn(12, saturation * 0.8, want=prefixed),
        ),
        Load(
            "priority", "three priorities, 90 %", "priority",
            _drawn(5, saturation * 0.9, want=prioritised),
        ),
        Load(
            "tight", f"a pool that {seqs} growing sequences do not fit into, 80 %", "tight",
            _drawn(7, saturation * 0.8, want=growing),
        ),
    ]  # fmt: skip
