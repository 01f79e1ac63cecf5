"""Comparing two policies that met the same requests: block by block, in pairs.

A block is a stretch of a trace, or a seed of a scenario. What both policies share (a burst, a long
prompt, a slow card) falls out of the difference, so few blocks tell much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

FIRST_LEVEL = 0.99
LEVEL = 0.9
"""Of the two-sided intervals by which trials are stopped: at the first look, which a few blocks
make, and later. A trial that is as good as its rival is stopped in one of 20 looks."""
CONFIRM_LEVEL = 0.95
BLOCKS_LEAST = 3
"""Differences that an interval takes."""
NEGLIGIBLE = 0.002
"""A gain below this part of the rival's value is not worth the rest of the trace."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Between two policies, positive where the first is better, whatever the figure; NaN ends:
    too little was seen for an interval."""

    value: float
    low: float
    high: float

    @property
    def better(self) -> bool:
        return self.low > 0

    @property
    def worse(self) -> bool:
        return self.high < 0


def student(level: float, freedom: int) -> float:
    """How many standard errors a two-sided interval goes either way: Student's t quantile.

    Exact for 1 and 2 degrees of freedom, else by Hill (CACM 13, 1970, algorithm 396), within 0.1 %.
    """
    tail = 1 - level
    if freedom == 1:
        return math.tan(math.pi / 2 * (1 - tail))
    if freedom == 2:
        return math.sqrt(2 / (tail * (2 - tail)) - 2)
    a = 1 / (freedom - 0.5)
    b = 48 / a**2
    c = ((20700 * a / b - 98) * a - 16) * a + 96.36
    d = ((94.5 / (b + c) - 3) / b + 1) * math.sqrt(a * math.pi / 2) * freedom
    y = (d * tail) ** (2 / freedom)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(tail / 2)
        y = x * x
        if freedom < 5:
            c += 0.3 * (freedom - 4.5) * (x + 0.6)
        c += (((0.05 * d * x - 5) * x - 7) * x - 2) * x + b
        y = (((((0.4 * y + 6.3) * y + 36) * y + 94.5) / c - y - 3) / b + 1) * x
        y = math.expm1(a * y * y)
    else:
        far = 1 / (((freedom + 6) / (freedom * y) - 0.089 * d - 0.822) * (freedom + 2) * 3)
        y = ((far + 0.5 / (freedom + 4)) * y - 1) * (freedom + 1) / (freedom + 2) + 1 / y
    return math.sqrt(freedom * y)


def paired(ours: Array, theirs: Array, better: int, level: float = LEVEL) -> Difference:
    """The mean difference over blocks, with an interval from their spread.

    Args:
        ours, theirs: a figure block by block; blocks that either lacks (NaN) are left out.
        better: 1 where more is better, -1 where less is.
    """
    gains = (ours - theirs) * better
    gains = gains[~np.isnan(gains)]
    if gains.size < BLOCKS_LEAST:
        return Difference(float(gains.mean()) if gains.size else math.nan, math.nan, math.nan)
    mean = float(gains.mean())
    error = float(gains.std(ddof=1)) / math.sqrt(gains.size)
    half = student(level, gains.size - 1) * error
    return Difference(mean, mean - half, mean + half)


def dominated(ours: Array, theirs: Array, better: Sequence[int], level: float = LEVEL) -> bool:
    """Whether ours are worse in an objective, and in none possibly better by more than next to
    nothing.

    Args:
        ours, theirs: by block and objective; of ``theirs`` the blocks that ours has are looked at.
    """
    theirs = theirs[: len(ours)]
    worse = False
    for column, direction in enumerate(better):
        found = paired(ours[:, column], theirs[:, column], direction, level)
        if not found.high <= NEGLIGIBLE * _mean_size(theirs[:, column]):
            return False
        worse = worse or found.value < 0
    return worse


def front(values: Sequence[Sequence[float]], better: Sequence[int]) -> list[int]:
    """Which of them no other beats: none is as good in everything and better in something. Of
    equal ones the first."""
    gains = [
        [_gain(value, direction) for value, direction in zip(row, better, strict=True)]
        for row in values
    ]
    return [
        place
        for place, own in enumerate(gains)
        if not any(
            _beats(other, own) or (other == own and earlier < place)
            for earlier, other in enumerate(gains)
        )
    ]


def jackknife(
    blocks: int, figure: Callable[[list[int]], float], level: float = CONFIRM_LEVEL
) -> Difference:
    """A figure of some blocks together, such as a difference of percentiles, with an interval from
    leaving out one block after the other (Tukey's jackknife).

    Args:
        figure: of the blocks with these numbers; NaN where it has none.
    """
    everything = list(range(blocks))
    value = figure(everything)
    if blocks < BLOCKS_LEAST or math.isnan(value):
        return Difference(value, math.nan, math.nan)
    without = np.array([figure(everything[:out] + everything[out + 1 :]) for out in everything])
    error = math.sqrt((blocks - 1) * float(np.square(without - without.mean()).mean()))
    half = student(level, blocks - 1) * error
    return Difference(value, value - half, value + half)


def _beats(other: list[float], own: list[float]) -> bool:
    pairs = list(zip(other, own, strict=True))
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


def _gain(value: float, direction: int) -> float:
    return -math.inf if math.isnan(value) else value * direction


def _mean_size(values: Array) -> float:
    known = values[~np.isnan(values)]
    return abs(float(known.mean())) if known.size else 0.0
