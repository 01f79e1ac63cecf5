"""What forecasters that look through ``policy.forecast.features`` have in common."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np
from sklearn.base import BaseEstimator

from policy.forecast.contract import QUANTILES, check_origins, rising, unrecorded
from policy.forecast.features import look
from policy.forecast.series import TARGETS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.contract import Ints
    from policy.forecast.features import View
    from policy.forecast.series import Array, Series, Target

LOG_MOST = 3.0
"""A rate is not forecast to be more than e to the 3rd, twenty, times the last one."""


class Learned(BaseEstimator):  # type: ignore[misc]
    """One model for all series, which says by how much the logarithm will differ."""

    horizons: Sequence[int]

    @abstractmethod
    def logs(self, view: View) -> Array:
        """Logarithm of each rate over the last one, [origin, target, horizon, quantile]."""

    def rates(self, view: View) -> Array:
        """The rates themselves, of all targets, whether there are peaks or not."""
        logs = rising(np.clip(self.logs(view), -LOG_MOST, LOG_MOST))
        rates = view.last[:, :, None, None] * np.exp(logs) - view.floor[:, None, None, None]
        result: Array = np.maximum(rates, 0.0)
        return result

    def predict(self, series: Series, origins: Ints, target: Target = "mean") -> Array:
        """See ``Forecaster``."""
        check_origins(series, origins)
        before = unrecorded(series, origins, target)
        if not len(origins):
            return np.empty((0, len(self.horizons), len(QUANTILES)))
        rates = self.rates(look(series, origins, self.horizons))[:, TARGETS.index(target)]
        return np.where(before[:, None, None], 0.0, rates)
