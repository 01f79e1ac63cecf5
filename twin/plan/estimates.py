"""Figures with their kind and interval, and the statistics behind them.

A figure has been seen in a few runs that differ as one day differs from the next: other requests of
the same traffic, and step times drawn from what the profile knows of its errors. ``predicted`` is
where the next such run lies: Student's prediction interval, of durations on a log scale and of
shares on a logit scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING

from policy.evidence import Kind

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LEVEL", "Estimate", "Kind", "exact", "held", "predicted", "student", "wilson"]

LEVEL = 0.90
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number, where the next day's lies in nine cases of ten, and how it came about."""

    name: str
    value: float
    low: float
    high: float
    unit: str
    kind: Kind
    runs: int = 1

    def text(self, digits: int = 3) -> str:
        unit = f" {self.unit}" if self.unit else ""
        own = _short(self.value, digits)
        if self.low == self.high == self.value:
            return f"{own}{unit} ({self.kind})"
        ends = f"{_short(self.low, digits)} to {_short(self.high, digits)}"
        return f"{own}{unit} ({ends}, {self.kind})"


def exact(name: str, value: float, unit: str, kind: Kind) -> Estimate:
    """A figure that is computed, so it has no width."""
    return Estimate(name, value, value, value, unit, kind)


def predicted(
    name: str, values: Sequence[float], unit: str, kind: Kind, *, share: bool = False, of: int = 0
) -> Estimate:
    """Around the first value: where the next run's lies, by all of them.

    Args:
        values: by run, the plain one first. Infinite ones make the interval's end infinite.
        share: they are shares of ``of`` requests.
    """
    own = values[0]
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2 or (not share and not any(finite)):  # what is free is so every day
        low, high = wilson(round(own * of), of) if share and of else (min(values), max(values))
        return Estimate(name, own, min(low, own), max(high, own), unit, kind, len(values))
    scaled = [_logit(value, of) if share else math.log(max(value, 1e-9)) for value in finite]
    middle, wide = fmean(scaled), stdev(scaled)
    reach = student((1 + LEVEL) / 2, len(scaled) - 1) * wide * math.sqrt(1 + 1 / len(scaled))
    low, high = middle - reach, middle + reach
    low, high = (_logistic(low), _logistic(high)) if share else (math.exp(low), _exp(high))
    if share and high > 1 - 0.5 / max(of, 1):
        high = 1.0
    high = math.inf if len(finite) < len(values) else high
    return Estimate(name, own, min(low, own), max(high, own), unit, kind, len(values))


def held(slacks: Sequence[float], confidence: float) -> bool:
    """Whether the next run holds with this confidence, after runs that held by these slacks.

    Each has to have held, and so does the lower end of Student's one-sided prediction interval.
    """
    if min(slacks) < 0:
        return False
    if len(slacks) < 2:
        return True
    reach = student(confidence, len(slacks) - 1) * stdev(slacks)
    return fmean(slacks) - reach * math.sqrt(1 + 1 / len(slacks)) >= 0


def wilson(count: int, of: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's interval of a share that was seen ``count`` times in ``of``."""
    if not of:
        return 0.0, 1.0
    z = _NORMAL.inv_cdf((1 + level) / 2)
    share, weight = count / of, 1 + z * z / of
    middle = share + z * z / (2 * of)
    reach = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return max(0.0, (middle - reach) / weight), min(1.0, (middle + reach) / weight)


def student(share: float, freedom: int) -> float:
    """The quantile of Student's distribution; exact for 1 and 2 degrees of freedom, else the
    expansion around the normal one (Abramowitz and Stegun 26.7.5, within 1 % up to 97.5 %)."""
    if freedom == 1:
        return math.tan(math.pi * (share - 0.5))
    if freedom == 2:
        odds = 2 * share - 1
        return odds * math.sqrt(2 / (1 - odds * odds))
    z = _NORMAL.inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    powers = (freedom, freedom * freedom, float(freedom) ** 3, float(freedom) ** 4)
    return z + sum(term / power for term, power in zip(terms, powers, strict=True))


def _logit(share: float, of: int) -> float:
    room = 0.5 / max(of, 1) if of else 1e-6
    inside = min(max(share, room), 1 - room)
    return math.log(inside / (1 - inside))


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _short(value: float, digits: int) -> str:
    if math.isinf(value):
        return "without end"
    if abs(value) >= 10**digits:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"
