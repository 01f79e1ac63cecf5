"""Draws that depend on nothing but their keys, so that two runs that differ elsewhere draw alike.

SplitMix64 (Steele et al., OOPSLA 2014) is folded over the keys; the top 53 bits make the number.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from statistics import NormalDist
from typing import TYPE_CHECKING, Annotated
from zlib import crc32

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from traces.generate.lengths import Law

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_MASK = 2**64 - 1
_NORMAL = NormalDist()


class Dice:
    """Uniform numbers, each a function of the seed, the names and the ids alone."""

    __slots__ = ("_state",)

    def __init__(self, seed: int, *names: str) -> None:
        state = _mix(seed & _MASK)
        for name in names:
            state = _mix(state ^ crc32(name.encode()))
        self._state = state

    def at(self, *ids: int) -> Dice:
        """The dice of these ids: ``at(1).uniform(2)`` is ``uniform(1, 2)``."""
        dice = Dice.__new__(Dice)
        dice._state = self.number(*ids)
        return dice

    def number(self, *ids: int) -> int:
        """A whole number in [0, 2**64)."""
        state = self._state
        for key in ids:
            state = _mix(state ^ (key & _MASK))
        return state

    def uniform(self, *ids: int) -> float:
        """A number strictly between 0 and 1."""
        return ((self.number(*ids) >> 11) + 0.5) * 2.0**-53


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def quantile_of(law: Law) -> Callable[[float], float]:
    """The law's value at a uniform number: drawing it by key instead of in sequence."""
    low, high = law.low, law.high
    if law.fixed is not None:
        value = min(max(law.fixed, low), high)
        return lambda uniform: value
    if law.lognormal is not None:
        sigma = law.lognormal.sigma
        mu = math.log(law.lognormal.mean) - sigma * sigma / 2

        def lognormal(uniform: float) -> float:
            return min(max(math.exp(mu + sigma * _NORMAL.inv_cdf(uniform)), low), high)

        return lognormal
    assert law.quantiles is not None
    shares = sorted(law.quantiles)
    values = [law.quantiles[share] for share in shares]

    def between(uniform: float) -> float:
        after = bisect_right(shares, uniform)
        if after == 0 or after == len(shares):
            value = values[0 if after == 0 else -1]
        else:
            part = (uniform - shares[after - 1]) / (shares[after] - shares[after - 1])
            value = values[after - 1] + part * (values[after] - values[after - 1])
        return min(max(value, low), high)

    return between
