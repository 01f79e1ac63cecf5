"""The forecaster: LSTM, gradient boosting, a linear regression and the last value, blended.

What is learned from history is fitted once; the blend's weights and the bands' scores are learned
on the way, window by window, by each series for itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np
from sklearn.base import BaseEstimator
from threadpoolctl import threadpool_limits

from policy.forecast.baselines import LastValue
from policy.forecast.blend import Blend
from policy.forecast.boosting import Boosting, Forest
from policy.forecast.contract import QUANTILES, check_origins, unrecorded
from policy.forecast.features import floors, look
from policy.forecast.lstm import Lstm
from policy.forecast.regression import Regression
from policy.forecast.series import TARGETS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from policy.forecast.contract import Ints
    from policy.forecast.series import Array, Series, Target

REPLAYED = 600
"""Windows before the first forecast over which weights and bands are learned."""
DAYS_KEPT = 29
"""Of what was seen, the last four weeks and today are looked at."""
Model = TypeVar("Model", Lstm, Boosting)
MEMBERS = ("lstm", "boosting", "regression", "last")


class LoadForecaster(BaseEstimator):  # type: ignore[misc]
    """See the module.

    Args:
        horizons: windows ahead.
        members: networks of the LSTM.
        epochs: of its training.
    """

    def __init__(
        self, horizons: Sequence[int] = (1, 2), members: int = 2, epochs: int = 25, seed: int = 0
    ) -> None:
        self.horizons = horizons
        self.members = members
        self.epochs = epochs
        self.seed = seed

    def fit(self, series: Sequence[Series]) -> Self:
        lstm = Lstm(self.horizons, members=self.members, epochs=self.epochs, seed=self.seed)
        boosting = Boosting(self.horizons, seed=self.seed)
        with ThreadPoolExecutor(2) as threads:
            one = threads.submit(_fitted_alone, lstm, series)
            other = threads.submit(_fitted_alone, boosting, series)
            self.lstm_, self.boosting_ = one.result(), other.result()
        self.regression_ = Regression(self.horizons).fit(series)
        return self

    def predict(self, series: Series, origins: Ints, target: Target = "mean") -> Array:
        check_origins(series, origins)
        before = unrecorded(series, origins, target)
        if not len(origins):
            return np.empty((0, len(self.horizons), len(QUANTILES)))
        start = max(0, int(origins.min()) - REPLAYED)
        wanted = np.arange(start, int(origins.max()) + 1)
        raw, floor = self.raw(series, wanted)[target], floors(series)[wanted]
        truth = series.of(target)
        blend = Blend(self.horizons, len(MEMBERS))
        told = np.empty(raw.shape[1:])
        for place, origin in enumerate(wanted):
            if place:
                blend.observe(truth[origin])
            told[place] = blend.blend(raw[:, place], floor[place])
        return np.where(before[:, None, None], 0.0, told[origins - start])

    def raw(self, series: Series, origins: Ints) -> dict[Target, Array]:
        """What each of ``MEMBERS`` says, [member, origin, horizon, quantile], not yet calibrated.

        A series that the regression was not fitted to has the last value in its place.
        """
        view = look(series, origins, self.horizons)
        learned = self.lstm_.rates(view), self.boosting_.rates(view)
        found: dict[Target, Array] = {}
        for place, target in enumerate(TARGETS[: 1 + bool(len(series.peak))]):
            last = LastValue(self.horizons).predict(series, origins, target)
            fitted = (series.name, target) in self.regression_.weights_
            own = self.regression_.predict(series, origins, target) if fitted else last
            found[target] = np.stack([*(rates[:, place] for rates in learned), own, last])
        return found

    def state(self) -> dict[str, Array]:
        """All that was learned, as arrays by name."""
        found = {f"boosting/{name}": getattr(self.boosting_.forest_, name) for name in FOREST}
        found["lstm/state_mean"] = self.lstm_.state_mean_.numpy()
        found["lstm/state_gain"] = self.lstm_.state_gain_.numpy()
        for number, net in enumerate(self.lstm_.nets_):
            for name, tensor in net.state_dict().items():
                found[f"lstm/net{number}/{name}"] = tensor.numpy()
        for (name, target), weights in self.regression_.weights_.items():
            found[f"regression/{target}/{name}"] = weights
        return found

    @classmethod
    def from_state(
        cls, parameters: Mapping[str, Any], state: Mapping[str, Array]
    ) -> LoadForecaster:
        """A fitted forecaster from what ``get_params`` and ``state`` gave.

        Raises:
            ValueError: arrays are missing, too many, or of other shapes than the parameters say.
        """
        made = cls(**parameters)
        rest = dict(state)

        def take(name: str) -> Array:
            if name not in rest:
                raise ValueError(f"the array {name!r} is missing")
            return rest.pop(name)

        made.boosting_ = Boosting(made.horizons, seed=made.seed)
        made.boosting_.forest_ = Forest(**{name: take(f"boosting/{name}") for name in FOREST})
        made.lstm_ = Lstm(
            made.horizons, members=made.members, epochs=made.epochs, seed=made.seed
        ).restored(take)
        made.regression_ = Regression(made.horizons)
        made.regression_.weights_ = {
            (name, target): take(f"regression/{target}/{name}")
            for target in TARGETS
            for name in [
                key.removeprefix(f"regression/{target}/")
                for key in rest
                if key.startswith(f"regression/{target}/")
            ]
        }
        if rest:
            raise ValueError(f"there is no place for the array {min(rest)!r}")
        return made


def _fitted_alone(model: Model, series: Sequence[Series]) -> Model:
    """In one thread: models this small gain nothing from more, which wait for each other in a spin
    where the machine has other work. (How many there are is set for each thread.)"""
    with threadpool_limits(1):
        return model.fit(series)


FOREST = tuple(Forest.__dataclass_fields__)


class Online:
    """One series as it goes on.

    Args:
        history: what was counted so far, at least one window; its last 600 windows are replayed.
    """

    def __init__(self, forecaster: LoadForecaster, history: Series) -> None:
        if not len(history):
            raise ValueError("a forecast needs at least one window of history")
        self._forecaster = forecaster
        targets: list[Target] = ["mean", "peak"] if len(history.peak) else ["mean"]
        self._blends = {target: Blend(forecaster.horizons, len(MEMBERS)) for target in targets}
        self._series = history
        self._trim()
        history = self._series
        origins = np.arange(max(0, len(history) - REPLAYED - 1), len(history))
        floor = floors(history)[origins]
        self._told: dict[Target, Array] = {}
        for target, raw in forecaster.raw(history, origins).items():
            for place, origin in enumerate(origins):
                self._go_on(target, raw[:, place], floor[place], history.of(target)[origin])

    def observe(self, mean: float, peak: float = float("nan")) -> None:
        """A window has ended with these rates; NaN: they were not recorded."""
        old = self._series
        self._series = replace(
            old,
            mean=np.append(old.mean, mean),
            peak=np.append(old.peak, peak) if len(old.peak) else old.peak,
        )
        self._trim()
        series = self._series
        origins = np.array([len(series) - 1])
        floor = floors(series)[-1]
        for target, raw in self._forecaster.raw(series, origins).items():
            self._go_on(target, raw[:, 0], floor, series.of(target)[-1])

    def predict(self) -> dict[Target, Array]:
        """What is forecast now, [horizon, quantile], by target."""
        return dict(self._told)

    @property
    def weights(self) -> dict[Target, Array]:
        """[member of ``MEMBERS``, horizon, quantile]: who is listened to, by target."""
        return {target: blend.weights for target, blend in self._blends.items()}

    def _go_on(self, target: Target, raw: Array, floor: float, truth: float) -> None:
        blend = self._blends[target]
        if target in self._told:
            blend.observe(truth)
        told = blend.blend(raw, floor)
        nothing = unrecorded(self._series, np.array([len(self._series) - 1]), target)[0]
        self._told[target] = np.zeros_like(told) if nothing else told

    def _trim(self) -> None:
        """Forget whole days before the last weeks: the time of day stays what it is."""
        series = self._series
        too_many = len(series) // series.day_windows - DAYS_KEPT
        if too_many > 0:
            cut = too_many * series.day_windows
            self._series = replace(
                series,
                mean=series.mean[cut:],
                peak=series.peak[cut:],
                start_s=series.start_s + cut * series.window_s,
            )
