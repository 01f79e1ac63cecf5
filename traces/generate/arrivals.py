"""Laws of arrival: renewal processes under a rate that may change with time.

Renewal gaps of mean 1 are drawn in *operational time* and mapped to seconds through the inverse
of the cumulative rate, so every law works with every rate curve, and the number of arrivals in
any window has the mean that the curve says. Gamma and Weibull gaps follow ServeGen
(arXiv 2505.09999), which finds them in production clients.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np

from traces.generate.lengths import NonNegative, Positive  # noqa: TC001 - msgspec reads them

if TYPE_CHECKING:
    from collections.abc import Iterator

    Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 16_384
_GRID_S = 1.0


class Bursts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Markov chain that multiplies the rate: `factors` in turn at random.

    The chain stays in state i an exponential time of mean `stay_s[i]`, then moves to one of the
    others with equal chance. Give factors whose time-weighted mean is 1 to keep the mean rate.
    """

    factors: list[NonNegative]
    stay_s: list[Positive]

    def __post_init__(self) -> None:
        if len(self.factors) != len(self.stay_s) or len(self.factors) < 2:
            raise ValueError("bursts need as many stay_s as factors, and at least two of each")


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When requests, sessions or chains start.

    `rate_rps` is the base rate in starts per second. `cv` is the coefficient of variation of the
    gaps, used by gamma and weibull. The rate is multiplied by `curve` (pairs of seconds and
    factor, straight between them, flat outside), by `diurnal` (24 factors, one an hour from the
    trace's start, repeated daily) and by `bursts`.
    """

    law: Literal["poisson", "gamma", "weibull"]
    rate_rps: Positive
    cv: Annotated[float, msgspec.Meta(gt=0, le=100)] = 1.0
    curve: list[tuple[float, NonNegative]] | None = None
    diurnal: Annotated[list[NonNegative], msgspec.Meta(min_length=24, max_length=24)] | None = None
    bursts: Bursts | None = None

    def __post_init__(self) -> None:
        if self.law == "poisson" and self.cv != 1.0:
            raise ValueError(f"poisson gaps have cv 1, not {self.cv:g}; use gamma or weibull")
        if self.curve is not None:
            times = [t for t, _ in self.curve]
            if not times or times != sorted(times):
                raise ValueError("curve needs at least one point, and its times must rise")


def gap_sampler(law: str, cv: float) -> tuple[str, float, float]:
    """(law, shape, scale) of gaps of mean 1 and coefficient of variation `cv`."""
    if law == "poisson" or (law == "gamma" and cv == 1.0):
        return "poisson", 1.0, 1.0
    if law == "gamma":
        shape = 1.0 / (cv * cv)
        return law, shape, 1.0 / shape
    shape = weibull_shape(cv)
    return law, shape, 1.0 / math.gamma(1.0 + 1.0 / shape)


def weibull_shape(cv: float) -> float:
    """The Weibull shape whose coefficient of variation is `cv`, by bisection (0.06 to 200)."""
    low, high = 0.06, 200.0
    for _ in range(200):
        middle = math.sqrt(low * high)
        ratio = math.gamma(1 + 2 / middle) / math.gamma(1 + 1 / middle) ** 2
        if math.sqrt(max(ratio - 1, 0.0)) > cv:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def draw_gaps(rng: np.random.Generator, law: str, shape: float, scale: float, count: int) -> Array:
    """Draw `count` gaps."""
    if law == "poisson":
        return rng.standard_exponential(count) * scale
    if law == "gamma":
        return rng.standard_gamma(shape, count) * scale
    return rng.weibull(shape, count) * scale


def first_gap(rng: np.random.Generator, law: str, shape: float, scale: float) -> float:
    """Draw the wait from a random moment to the next arrival of a process long under way.

    The gap that a random moment falls in is drawn with a weight of its length; the moment lies
    uniformly in it.
    """
    if law == "poisson":
        gap = float(rng.standard_gamma(2.0)) * scale
    elif law == "gamma":
        gap = float(rng.standard_gamma(shape + 1.0)) * scale
    else:
        gap = float(rng.standard_gamma(1.0 + 1.0 / shape)) ** (1.0 / shape) * scale
    return gap * float(rng.random())


def rate_grid(
    arrivals: Arrivals, start_s: float, end_s: float, rng: np.random.Generator
) -> tuple[Array, Array]:
    """(edges of one-second cells, cumulative expected starts at the edges) over a window."""
    cells = max(1, math.ceil((end_s - start_s) / _GRID_S))
    edges = start_s + np.arange(cells + 1) * _GRID_S
    middle = edges[:-1] + _GRID_S / 2
    rate = np.full(cells, arrivals.rate_rps)
    if arrivals.curve is not None:
        rate *= np.interp(middle, [t for t, _ in arrivals.curve], [f for _, f in arrivals.curve])
    if arrivals.diurnal is not None:
        rate *= np.asarray(arrivals.diurnal)[(middle // 3600).astype(np.int64) % 24]
    if arrivals.bursts is not None:
        rate *= _burst_factors(arrivals.bursts, middle, rng)
    return edges, np.concatenate(([0.0], np.cumsum(rate * _GRID_S)))


def _burst_factors(bursts: Bursts, times: Array, rng: np.random.Generator) -> Array:
    """The factor at each of the rising `times`: the state that the chain is in then."""
    states = len(bursts.factors)
    state, now = int(rng.integers(states)), float(times[0])
    starts, factors = [now], [bursts.factors[state]]
    while now < times[-1]:
        now += float(rng.standard_exponential()) * bursts.stay_s[state]
        state = (state + 1 + int(rng.integers(states - 1))) % states
        starts.append(now)
        factors.append(bursts.factors[state])
    at = np.searchsorted(starts, times, "right") - 1
    return np.asarray(factors)[at]


def start_times(
    arrivals: Arrivals, start_s: float, end_s: float, rng: np.random.Generator
) -> Iterator[Array]:
    """Yield rising start times in seconds, in [start_s, end_s), a chunk at a time."""
    edges, cumulative = rate_grid(arrivals, start_s, end_s, rng)
    law, shape, scale = gap_sampler(arrivals.law, arrivals.cv)
    total = cumulative[-1]
    now = first_gap(rng, law, shape, scale)
    while now < total:
        gaps = draw_gaps(rng, law, shape, scale, _CHUNK)
        at = now + np.concatenate(([0.0], np.cumsum(gaps)))
        now = float(at[-1])
        times = np.interp(at[:-1][at[:-1] < total], cumulative, edges)
        times = times[times < end_s]
        if times.size:
            yield times
