"""From forecast quantiles to the event that the policy is told, the same in both worlds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from policy.events import Forecasted
from policy.facts import COUNT_MOST, NS_MOST
from policy.forecast.contract import QUANTILES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.series import Array

NS_PER_S = 1_000_000_000
MILLI = 1000
TOLD = (QUANTILES.index(0.5), QUANTILES.index(0.9))
"""Columns of the quantiles that the policy is told."""


def forecasted(
    window_s: float,
    horizons: Sequence[int],
    requests: Array,
    tokens: Array,
    seen: tuple[float, float] | None = None,
) -> Forecasted:
    """What is forecast at the end of a window, for the policy, which draws lines between points.

    An average over a window stands for that window's middle, and the last one's also for its end,
    so that something is known until then. The first point is now, where the line from the middle
    of the window that has just ended to the first forecast passes: half way up a rise to the next
    window. With the last window's own rate there, a rise would begin half a window late and a
    window that was empty by chance would look like one; with the next window's, a rise into it
    would not show at all.

    Args:
        window_s: how long a window is.
        horizons: windows ahead, from 1, in any order.
        requests: per second, [horizon, quantile of ``QUANTILES``].
        tokens: the same of prompt and output tokens.
        seen: requests and tokens per second in the window that has just ended; None, or NaN:
            nobody knows, and it is taken to have been as the first forecast.

    Raises:
        ValueError: horizons that cannot be, or rates that are no numbers or not one for each.
    """
    _check(window_s, horizons, requests, tokens)
    order = np.argsort(horizons)
    requests, tokens = requests[order], tokens[order]
    middles = [(horizon - 0.5) * window_s for horizon in sorted(horizons)]
    times_s = [0.0, *middles, max(horizons) * window_s]
    now = (math.nan, math.nan) if seen is None else seen
    share = middles[0] / (middles[0] + window_s / 2)  # of what was seen, in what is now
    return Forecasted(
        tuple(round(time_s * NS_PER_S) for time_s in times_s),
        *_points(requests, now[0], share, MILLI),
        *_points(tokens, now[1], share, 1),
    )


def _check(window_s: float, horizons: Sequence[int], requests: Array, tokens: Array) -> None:
    if not horizons or min(horizons) < 1 or len(set(horizons)) < len(horizons):
        raise ValueError(f"horizons must be different ones from 1, but are {tuple(horizons)}")
    if not 1e-3 <= window_s <= NS_MOST / NS_PER_S / max(horizons):
        raise ValueError(
            f"windows of {window_s} s cannot be forecast {max(horizons)} ahead: they must last a"
            " millisecond or more, and end within 36 years"
        )
    for name, rates in (("requests", requests), ("tokens", tokens)):
        if rates.shape != (len(horizons), len(QUANTILES)):
            raise ValueError(
                f"{name} must be {len(horizons)} horizons x {len(QUANTILES)} quantiles, but are"
                f" {' x '.join(map(str, rates.shape))}"
            )
        if not np.isfinite(rates).all():
            raise ValueError(f"the forecast of {name} has values that are no numbers: {rates}")


def _points(
    rates: Array, seen: float, seen_share: float, unit: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(median, 90th percentile) at each time. Quantiles that cross are taken to be equal."""
    median, upper = (rates[:, column] for column in TOLD)
    return _line(median, seen, seen_share, unit), _line(
        np.maximum(median, upper), seen, seen_share, unit
    )


def _line(rates: Array, seen: float, seen_share: float, unit: int) -> tuple[int, ...]:
    first = float(rates[0])
    known = seen if math.isfinite(seen) else first
    now = (1 - seen_share) * first + seen_share * known
    values = (now, *rates, rates[-1])
    bounded = (min(max(float(value), 0.0), float(COUNT_MOST)) for value in values)
    return tuple(min(round(value * unit), COUNT_MOST) for value in bounded)
