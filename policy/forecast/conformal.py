"""Online conformal calibration: bands that cover what they say, whatever the forecaster is like.

A score is by how much the truth lay above a quantile's forecast, as a logarithm. The forecast is
moved by the quantile of the last scores, taken at a level that itself moves when too many or too
few truths lay above (adaptive conformal inference: Gibbs and Candes, 2021). A median is left alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policy.forecast.contract import MEDIAN, QUANTILES, rising

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.series import Array

KEPT = 450
"""Scores that count, the last ones."""
LEAST = 20
"""Scores before anything is moved."""
STEP = 0.005
"""How far the level moves at each truth."""
LEVEL_ROOM = 0.04
LEVEL_MOST = 0.999
MOVED = [place for place in range(len(QUANTILES)) if place != MEDIAN]


class Conformal:
    """Calibrates forecasts of one series, as they are made; those of several forecasters at once.

    Args:
        horizons: windows ahead.
        forecasters: how many there are.
    """

    def __init__(self, horizons: Sequence[int], forecasters: int) -> None:
        self.horizons = tuple(horizons)
        self._waiting: list[tuple[Array, Array, float]] = []
        """(raw, given, floor) of the last origins, the newest last."""
        shape = forecasters, len(self.horizons), len(QUANTILES)
        self._wanted = np.array(QUANTILES)
        self._level = np.broadcast_to(self._wanted, shape).copy()
        self._scores = np.zeros((*shape, KEPT))
        self._count = np.zeros(len(self.horizons), int)

    def observe(self, truth: float) -> None:
        """A window has ended with this rate; NaN: nobody knows."""
        if np.isnan(truth):
            return
        for column, horizon in enumerate(self.horizons):
            if horizon > len(self._waiting):
                continue
            raw, given, floor = self._waiting[-horizon]
            score = np.log((truth + floor) / (raw[:, column] + floor))
            self._scores[:, column, :, self._count[column] % KEPT] = score
            self._count[column] += 1
            level = self._level[:, column]
            level += STEP * ((truth > given[:, column]) - (1 - self._wanted))
            np.clip(level, self._wanted - LEVEL_ROOM, LEVEL_MOST, out=level)

    def correct(self, raw: Array, floor: float) -> Array:
        """Forecasts [forecaster, horizon, quantile] as they should be told.

        Args:
            floor: added to rates before their logarithm is taken.
        """
        given = raw.copy()
        for column, count in enumerate(self._count):
            if count < LEAST:
                continue
            kept = min(int(count), KEPT)
            ordered = np.sort(self._scores[:, column, :, :kept], axis=-1)
            # One score that was not seen yet counts as lying above all of them.
            place = np.ceil(self._level[:, column] * (kept + 1)).astype(int) - 1
            place = np.clip(place, 0, kept - 1)[..., None]
            shift = np.take_along_axis(ordered, place, axis=-1)[..., 0]
            moved = (raw[:, column] + floor) * np.exp(shift) - floor
            given[:, column, MOVED] = moved[:, MOVED]
        given = rising(np.maximum(given, 0.0))
        longest = max(self.horizons)
        self._waiting = [*self._waiting, (raw, given, floor)][-longest:]
        return given
