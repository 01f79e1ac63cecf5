"""What the learned forecasters look at: a series seen from each of its windows.

Everything is a logarithm of a ratio to the last value, in units of how much the series has moved of
late, so that one model serves a chat at night and a fleet at noon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.forecast.series import DAY_S, WEEK_S, filled, first_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.series import Array, Series

    Ints = np.ndarray[Any, np.dtype[np.int64]]

PAST = 48
STEP_FEATURES = 3
"""Windows that are looked back upon one by one."""
FLOOR_SHARE = 0.05
"""Of the last day's average: added to every rate, so that an empty window has a logarithm."""
MOVE_LEAST = 0.01
CLIP = 6.0
AVERAGES = (3, 8, 24, 144)


@dataclass(frozen=True)
class View:
    """A series seen from some of its windows, by each of which no later one was known."""

    steps: Array
    """[origin, PAST, feature], the oldest window first."""
    state: Array
    """[origin, feature]."""
    last: Array
    """[origin, target of ``TARGETS``]: the last known rate, plus the floor."""
    floor: Array
    move: Array
    """Typical step of the logarithm from one window to the next, of late."""


def look(series: Series, origins: Ints, horizons: Sequence[int]) -> View:
    """The features at these windows; nothing after each of them is used.

    Args:
        origins: indices of windows, the last that is known.
        horizons: windows ahead, for what the same times of other days were like.
    """
    mean = filled(series.mean)
    missing = np.isnan(series.mean)
    day = series.day_windows
    floor_all = floors(series)
    floor = floor_all[origins]
    moves = np.abs(np.diff(np.log(mean + floor_all), prepend=np.log(mean[0] + floor_all[0])))
    slow, quick = _trailing(moves, day)[origins], _trailing(moves, 12)[origins]
    move = np.maximum(0.5 * (slow + quick), MOVE_LEAST)
    last = mean[origins] + floor
    log_last = np.log(last)

    past = _windows(mean, origins, PAST)
    levels = (np.log(past + floor[:, None]) - log_last[:, None]) / move[:, None]
    peaks = _peaks(series, mean)
    excess = np.log((_windows(peaks, origins, PAST) + floor[:, None]) / (past + floor[:, None]))
    excess /= move[:, None]
    gaps = _windows(missing.astype(float), origins, PAST)
    steps = np.stack([np.clip(levels, -CLIP, CLIP), np.clip(excess, -CLIP, CLIP), gaps], axis=2)

    clock = (series.start_s + (origins + 1) * series.window_s) * 2 * np.pi
    columns: list[Array] = []
    for turns in (1, 2):
        columns += [np.sin(turns * clock / DAY_S), np.cos(turns * clock / DAY_S)]
    known = float(series.weekday_known)
    columns += [known * np.sin(clock / WEEK_S), known * np.cos(clock / WEEK_S)]
    columns += [
        np.log(move), np.log(quick / np.maximum(slow, 1e-6) + 0.05),
        np.full(len(origins), np.log(series.window_s / 600)),
        np.full(len(origins), float(len(series.peak) > 0)),
        (np.log(peaks[origins] + floor) - log_last) / move,
    ]  # fmt: skip
    for count in AVERAGES:
        average = _trailing(mean, count)[origins]
        columns.append((np.log(average + floor) - log_last) / move)
    for back in (day, 7 * day):
        columns += _same_time(mean, origins, horizons, back, floor, move)
    columns += _usual(mean, origins, horizons, day, floor, move)
    state = np.clip(np.stack(columns, axis=1), -CLIP, CLIP)
    lasts = np.stack((last, peaks[origins] + floor), axis=1)
    return View(steps, state, lasts, floor, move)


def _peaks(series: Series, mean: Array) -> Array:
    """The highest rates; the averages where there are none, or none yet."""
    if not len(series.peak):
        return mean
    begin = first_known(series.peak)
    result: Array = np.concatenate((mean[:begin], filled(series.peak)[begin:]))
    return result


def floors(series: Series) -> Array:
    """What is added to rates at each window before their logarithm is taken."""
    average = _trailing(filled(series.mean), series.day_windows)
    result: Array = FLOOR_SHARE * np.maximum(average, 1e-9)
    return result


def _windows(values: Array, origins: Ints, count: int) -> Array:
    """The last ``count`` values of each origin; what was before the first is like the first."""
    padded = np.concatenate((np.full(count - 1, values[0]), values))
    result: Array = np.lib.stride_tricks.sliding_window_view(padded, count)[origins]
    return result


def _trailing(values: Array, count: int) -> Array:
    """Average of up to ``count`` values, up to each."""
    sums = np.concatenate(([0.0], np.cumsum(values)))
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(0, ends - count)
    result: Array = (sums[ends] - sums[begins]) / (ends - begins)
    return result


def _same_time(
    mean: Array, origins: Ints, horizons: Sequence[int], back: int, floor: Array, move: Array
) -> list[Array]:
    """How the load went on at the same time so many windows ago, and how busy it was then; 0 where
    nothing was recorded yet, which a column of its own says."""
    usable = origins - back - 1 >= 0
    base = np.where(usable, origins - back, 0)

    def around(places: Ints) -> Array:
        """Averages of three windows, none of them after the origin."""
        before, after = np.maximum(places - 1, 0), np.minimum(places + 1, origins)
        result: Array = (mean[before] + mean[places] + mean[after]) / 3
        return result

    smooth = around(base)
    columns = [usable.astype(float)]
    for horizon in horizons:
        then = around(np.minimum(base + horizon, origins))
        columns.append(np.where(usable, np.log((then + floor) / (smooth + floor)) / move, 0.0))
    columns.append(
        np.where(usable, np.log((mean[base] + floor) / (mean[origins] + floor)) / move, 0.0)
    )
    return columns


def _usual(
    mean: Array, origins: Ints, horizons: Sequence[int], day: int, floor: Array, move: Array
) -> list[Array]:
    """How the load goes on at this time of day on average of all earlier days."""
    columns: list[Array] = []
    smooth = np.convolve(np.concatenate((mean[:1], mean, mean[-1:])), np.ones(3) / 3, "valid")
    # The smoothed value of a window holds the next one: it is used a day later at the earliest.
    days = -(-len(mean) // day) + 1
    table = np.zeros((days + 1, day))
    table[1:].reshape(-1)[: len(mean)] = smooth
    sums = np.cumsum(table, axis=0).reshape(-1)[: len(mean) + day]
    counts = np.arange(len(mean) + day) // day
    profile = sums / np.maximum(counts, 1)
    usable = counts[origins] > 0
    for horizon in horizons:
        place = origins + horizon
        within = usable & (horizon < day) & (place < len(profile))
        there = profile[np.minimum(place, len(profile) - 1)]
        ratio = np.log((there + floor) / (profile[origins] + floor)) / move
        columns.append(np.where(within & (there > 0), ratio, 0.0))
    columns.append(
        np.where(usable, np.log((profile[origins] + floor) / (mean[origins] + floor)) / move, 0.0)
    )
    return columns
