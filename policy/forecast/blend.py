"""A blend of forecasters whose weights follow how well each has done of late.

Each is calibrated on its own first; for every horizon and quantile the weight falls with the
pinball loss of the last windows (exponential weights), so that a forecaster which has lost the
thread, be it the LSTM, is left for the others, the last value among them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from policy.forecast.conformal import Conformal
from policy.forecast.contract import QUANTILES, pinball, rising

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.series import Array

MEMORY = 100.0
"""Windows after which a loss counts 1/e."""
EAGERNESS = 20.0
"""A forecaster whose loss is a tenth above the best one's weighs 1/e to the 2nd of it."""
SURE = 20.0
"""Windows after which the losses are believed in full."""


class Blend:
    """Blends forecasts of one series, as they are made.

    Args:
        horizons: windows ahead.
        forecasters: how many there are.
    """

    def __init__(self, horizons: Sequence[int], forecasters: int) -> None:
        self.horizons = tuple(horizons)
        self._conformal = Conformal(horizons, forecasters)
        self._losses = np.zeros((forecasters, len(self.horizons), len(QUANTILES)))
        self._counts = np.zeros(len(self.horizons))
        self._waiting: list[Array] = []
        self.weights = np.full_like(self._losses, 1 / forecasters)
        """[forecaster, horizon, quantile]; they sum up to 1 over the forecasters."""

    def observe(self, truth: float) -> None:
        """A window has ended with this rate; NaN: nobody knows."""
        self._conformal.observe(truth)
        if np.isnan(truth):
            return
        kept = np.exp(-1 / MEMORY)
        for column, horizon in enumerate(self.horizons):
            if horizon > len(self._waiting):
                continue
            loss = pinball(truth, self._waiting[-horizon][:, column])
            self._losses[:, column] = self._losses[:, column] * kept + loss
            self._counts[column] = self._counts[column] * kept + 1
        least = np.maximum(self._losses.min(axis=0), 1e-12)
        trust = EAGERNESS * np.minimum(1.0, self._counts / SURE)[:, None]
        weights = np.exp(-trust * (self._losses / least - 1))
        self.weights = weights / weights.sum(axis=0)

    def blend(self, raw: Array, floor: float) -> Array:
        """Forecasts [forecaster, horizon, quantile] as one, [horizon, quantile].

        Args:
            floor: added to rates before their logarithm is taken.
        """
        calibrated = self._conformal.correct(raw, floor)
        self._waiting = [*self._waiting, calibrated][-max(self.horizons) :]
        logs = (self.weights * np.log(calibrated + floor)).sum(axis=0)
        return rising(np.maximum(np.exp(logs) - floor, 0.0))
