"""The distribution of a duration in bounded memory: as a whole, and by window of time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.summary import Histogram

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[Any]]


class Spread(Histogram):
    """A histogram that also knows the standard deviation."""

    __slots__ = ("_squares",)

    def __init__(self) -> None:
        super().__init__()
        self._squares = 0.0

    def add(self, values: Array) -> None:
        super().add(values)
        self._squares += float(np.square(values).sum())

    def sd_s(self) -> float:
        """Of all values, not of a sample; NaN without any."""
        mean = self.mean_s()
        return math.sqrt(max(0.0, self._squares / self.count - mean * mean)) if self.count else mean

    def figures(self) -> dict[str, float | int | None]:
        """Seconds; None without any value."""
        if not self.count:
            names = ("mean", "sd", "p50", "p95", "p99", "most")
            return {"count": 0, **dict.fromkeys(names, None)}
        return {
            "count": self.count,
            "mean": self.mean_s(),
            "sd": self.sd_s(),
            "p50": self.quantile_s(0.5),
            "p95": self.quantile_s(0.95),
            "p99": self.quantile_s(0.99),
            "most": self.largest,
        }


class Trickle:
    """A spread whose values come one by one."""

    __slots__ = ("_held", "_spread")

    HELD_MAX = 4096

    def __init__(self) -> None:
        self._spread = Spread()
        self._held: list[float] = []

    def add(self, value_s: float) -> None:
        self._held.append(value_s)
        if len(self._held) >= self.HELD_MAX:
            self._flush()

    def figures(self) -> dict[str, float | int | None]:
        self._flush()
        return self._spread.figures()

    def _flush(self) -> None:
        self._spread.add(np.array(self._held))
        self._held.clear()


class Windows:
    """Histograms of a duration, one for each window of arrival time.

    200 bins of equal ratio a decade from 1 ms to 1000 s, so a window's quantile is within 0.6 %;
    5 kB a window.
    """

    __slots__ = ("_counts", "_least", "_window_s")

    BINS_PER_DECADE = 200
    LEAST_S = 1e-3
    DECADES = 6

    def __init__(self, window_s: float, least: int) -> None:
        """``least``: answers that a window needs to count at all."""
        self._window_s = window_s
        self._least = least
        self._counts: Array = np.zeros((16, self.BINS_PER_DECADE * self.DECADES + 2), np.uint32)

    def add(self, at_s: Array, values: Array) -> None:
        if not values.size:
            return
        window = np.maximum(at_s // self._window_s, 0).astype(np.int64)
        place = np.log10(np.maximum(values, 1e-12) / self.LEAST_S) * self.BINS_PER_DECADE
        bins = np.clip(np.floor(place).astype(np.int64) + 1, 0, self._counts.shape[1] - 1)
        rows = int(window.max()) + 1
        if rows > self._counts.shape[0]:
            shape = (max(rows, 2 * self._counts.shape[0]), self._counts.shape[1])
            grown: Array = np.zeros(shape, np.uint32)
            grown[: self._counts.shape[0]] = self._counts
            self._counts = grown
        np.add.at(self._counts, (window, bins), 1)

    def quantiles(self, share: float) -> Array:
        """In seconds, of each window with answers enough."""
        totals = self._counts.sum(axis=1)
        kept = totals >= max(1, self._least)
        sums = np.cumsum(self._counts[kept], axis=1)
        ranks = np.ceil(share * totals[kept])
        places = (sums < ranks[:, None]).sum(axis=1)
        values: Array = self.LEAST_S * 10.0 ** ((places - 0.5) / self.BINS_PER_DECADE)
        return values

    def figures(self) -> dict[str, float | int | None]:
        """The 99th percentile window by window: how far it swings."""
        values = self.quantiles(0.99)
        if not values.size:
            return {"count": 0, "p99_mean": None, "p99_sd": None, "p99_most": None}
        return {
            "count": int(values.size),
            "p99_mean": float(values.mean()),
            "p99_sd": float(values.std()),
            "p99_most": float(values.max()),
        }

    def above_s(self, limit_s: float) -> float:
        """For how long the 99th percentile of the window lay above ``limit_s``."""
        return float((self.quantiles(0.99) > limit_s).sum() * self._window_s)
