"""Laws that numbers of tokens, think times and pauses are drawn from."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]


class Law(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Exactly one of `fixed`, `lognormal` and `quantiles`, cut to [`low`, `high`].

    `quantiles` maps probabilities to values; between them the inverse distribution is straight,
    and below the first and above the last it is flat.
    """

    fixed: NonNegative | None = None
    lognormal: Lognormal | None = None
    quantiles: dict[Annotated[float, msgspec.Meta(ge=0, le=1)], NonNegative] | None = None
    low: NonNegative = 0.0
    high: Positive = 1e9

    def __post_init__(self) -> None:
        given = [n for n in ("fixed", "lognormal", "quantiles") if getattr(self, n) is not None]
        if len(given) != 1:
            raise ValueError(
                f"a law is one of fixed, lognormal or quantiles, not {given or 'none'}"
            )
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}")
        if self.quantiles is not None:
            values = [self.quantiles[p] for p in sorted(self.quantiles)]
            if not values or values != sorted(values):
                raise ValueError("quantiles must be at least one value, and rise with probability")

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """Draw `count` values as float64. One uniform or normal number is used for each."""
        if self.fixed is not None:
            values = np.full(count, self.fixed)
        elif self.lognormal is not None:
            sigma = self.lognormal.sigma
            mu = math.log(self.lognormal.mean) - sigma * sigma / 2
            values = np.exp(mu + sigma * rng.standard_normal(count))
        else:
            assert self.quantiles is not None
            points = sorted(self.quantiles)
            values = np.interp(rng.random(count), points, [self.quantiles[p] for p in points])
        clipped: Array = np.clip(values, self.low, self.high)
        return clipped

    def draw_tokens(self, rng: np.random.Generator, count: int) -> Array:
        """Draw `count` whole numbers as int64."""
        return np.rint(self.draw(rng, count)).astype(np.int64)


class Lognormal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lognormal law with this mean (not median) and this sigma of the logarithm."""

    mean: Positive
    sigma: NonNegative
