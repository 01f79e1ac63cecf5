"""A load as it was counted, window by window: what forecasters learn from and go on from."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:
    Array = np.ndarray[Any, np.dtype[np.float64]]

DAY_S, WEEK_S = 86_400, 604_800
Target = Literal["mean", "peak"]
TARGETS: tuple[Target, ...] = ("mean", "peak")


@dataclass(frozen=True, eq=False)  # arrays have no single answer to ==
class Series:
    """Rates (of requests, or of tokens) of consecutive windows of one length.

    Raises:
        ValueError: windows without a length, rates that are not in one row, negative or infinite,
            or peaks for other windows than the means.
    """

    window_s: float
    mean: Array
    """Average rate in each window; NaN: it was not recorded."""
    peak: Array = field(default_factory=lambda: np.empty(0))
    """Highest rate within each window, over whatever shorter time it was counted; NaN: it was not
    recorded; empty: there are none."""
    start_s: float = 0.0
    """When the first window begins: seconds after midnight on a Monday, local time."""
    weekday_known: bool = True
    """False: ``start_s`` only says the time of day."""
    name: str = ""

    def __post_init__(self) -> None:
        if not 0 < self.window_s < np.inf:
            raise ValueError(
                f"windows last {self.window_s} s, which must be more than 0 and finite"
            )
        if len(self.peak) not in (0, len(self.mean)):
            raise ValueError(f"there are {len(self.peak)} peaks for {len(self.mean)} windows")
        for values in (self.mean, self.peak):
            if values.ndim != 1:
                raise ValueError(f"rates of {self.title} have shape {values.shape}, not one row")
            wrong = values[np.isinf(values) | (values < 0)]
            if len(wrong):
                raise ValueError(
                    f"{self.title} has a rate of {wrong[0]}: none can be below 0 or infinite"
                )

    def __len__(self) -> int:
        return len(self.mean)

    @property
    def title(self) -> str:
        """What messages call it."""
        return repr(self.name) if self.name else "a series without a name"

    def of(self, target: Target) -> Array:
        """The values that are forecast.

        Raises:
            ValueError: there are none.
        """
        if target == "peak" and not len(self.peak):
            raise ValueError(f"{self.title} has no peaks")
        return self.mean if target == "mean" else self.peak

    def until(self, windows: int) -> Series:
        """The first ``windows`` of them; all, if there are no more.

        Raises:
            ValueError: fewer than 0.
        """
        if windows < 0:
            raise ValueError(f"the first {windows} windows of {self.title} were asked for")
        return replace(self, mean=self.mean[:windows], peak=self.peak[:windows])

    @property
    def day_windows(self) -> int:
        """Windows after which the same time of day comes again, to the nearest whole one."""
        return max(1, round(DAY_S / self.window_s))


def filled(values: Array) -> Array:
    """Each unknown value replaced by the last known one; those before the first known by that.

    Up to an origin before the first known value there is nothing to go by: what stands there
    then is from after it, see :func:`first_known`.
    """
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return np.zeros_like(values)
    place = np.searchsorted(known, np.arange(len(values)), side="right") - 1
    result: Array = values[known[np.maximum(place, 0)]]
    return result


def first_known(values: Array) -> int:
    """Index of the first known value; the number of values where none is."""
    known = np.flatnonzero(~np.isnan(values))
    return int(known[0]) if len(known) else len(values)
