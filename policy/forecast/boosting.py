"""Gradient boosting on the same features as the LSTM, a model for each horizon and quantile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.ensemble import HistGradientBoostingRegressor

from policy.forecast.features import PAST, look
from policy.forecast.learned import Learned
from policy.forecast.series import TARGETS, filled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.forecast.features import View
    from policy.forecast.series import Array, Series

LAGS = 12
FITTED = (0.5, 0.95)
"""Quantiles with a model of their own; the others are read off between and beside them."""


NINETY = 0.78
"""How far the 90th percentile lies on the way from the median to the 95th; of a normal law."""
THRESHOLD_MOST = 1e300


@dataclass(frozen=True)
class Forest:
    """Trees of all models, [target, horizon, quantile of ``FITTED``, tree, node]."""

    feature: Array
    threshold: Array
    left: Array
    right: Array
    value: Array
    base: Array
    """[target, horizon, quantile]: what is added to the sum over the trees."""


class Boosting(Learned):
    """See the module.

    Args:
        horizons: windows ahead.
    """

    def __init__(
        self, horizons: Sequence[int] = (1, 2), rounds: int = 60, rate: float = 0.08,
        leaves: int = 8, seed: int = 0,
    ) -> None:  # fmt: skip
        self.horizons = horizons
        self.rounds = rounds
        self.rate = rate
        self.leaves = leaves
        self.seed = seed

    def fit(self, series: Sequence[Series]) -> Self:
        models: dict[tuple[int, int, int], Any] = {}
        for place, target in enumerate(TARGETS):
            for column, horizon in enumerate(self.horizons):
                rows, goals, weights = [], [], []
                for each in series:
                    if target == "peak" and not len(each.peak):
                        continue
                    origins = np.arange(min(PAST, len(each) // 2), len(each) - horizon)
                    view = look(each, origins, self.horizons)
                    values = each.of(target)
                    truth = values[origins + horizon]
                    unit = np.nanmean(np.abs(truth - filled(values)[origins])) + 1e-9
                    known = ~np.isnan(truth)
                    last = view.last[:, place]
                    goal = np.log((truth + view.floor) / last) / view.move
                    rows.append(_table(view)[known])
                    goals.append(np.clip(goal[known], -20, 20))
                    weights.append((last * view.move / unit)[known])
                if not rows:
                    continue
                table, goal, weight = (np.concatenate(x) for x in (rows, goals, weights))
                for quantile in FITTED:
                    model = HistGradientBoostingRegressor(
                        loss="quantile", quantile=quantile, max_iter=self.rounds,
                        learning_rate=self.rate, max_leaf_nodes=self.leaves, max_bins=64,
                        min_samples_leaf=30, l2_regularization=1.0, early_stopping=False,
                        random_state=self.seed,
                    )  # fmt: skip
                    models[TARGETS.index(target), column, FITTED.index(quantile)] = model.fit(
                        table, goal, weight
                    )
        self.forest_ = _forest(models, (len(TARGETS), len(self.horizons), len(FITTED)))
        return self

    def logs(self, view: View) -> Array:
        """See ``Learned``."""
        middle, upper = np.moveaxis(grown(self.forest_, _table(view)), 3, 0)
        spread = np.maximum(upper - middle, 1e-6)
        logs = np.stack((middle - spread, middle, middle + NINETY * spread, upper), axis=3)
        return logs * view.move[:, None, None, None]


def _forest(models: dict[tuple[int, int, int], Any], shape: tuple[int, int, int]) -> Forest:
    """Trees as plain arrays: saved without pickling, and one row is answered in no time."""
    trees = max((len(model._predictors) for model in models.values()), default=1)
    found = {
        place: [tree[0].nodes for tree in model._predictors] for place, model in models.items()
    }
    width = max((len(nodes) for each in found.values() for nodes in each), default=1)
    size = (*shape, trees, width)
    own = np.broadcast_to(np.arange(width), size)  # a leaf leads to itself
    forest = Forest(
        feature=np.zeros(size, np.int32), threshold=np.zeros(size), left=own.astype(np.int32),
        right=own.astype(np.int32), value=np.zeros(size), base=np.zeros(shape),
    )  # fmt: skip
    for place, nodes_of in found.items():
        forest.base[place] = float(np.ravel(models[place]._baseline_prediction)[0])
        for number, nodes in enumerate(nodes_of):
            at = (*place, number, slice(0, len(nodes)))
            forest.value[at] = nodes["value"]
            inner = nodes["is_leaf"] == 0
            inside = (*place, number, np.flatnonzero(inner))
            forest.feature[inside] = nodes["feature_idx"][inner]
            forest.threshold[inside] = np.minimum(nodes["num_threshold"][inner], THRESHOLD_MOST)
            forest.left[inside] = nodes["left"][inner]
            forest.right[inside] = nodes["right"][inner]
    return forest


def grown(forest: Forest, table: Array) -> Array:
    """What the trees say of each row: [row, target, horizon, quantile of ``FITTED``]."""
    size = forest.feature.shape
    width = size[-1]
    roots = np.arange(int(np.prod(size[:-1]))) * width
    feature, threshold, left, right, value = (
        each.reshape(-1)
        for each in (forest.feature, forest.threshold, forest.left, forest.right, forest.value)
    )
    node = np.broadcast_to(roots, (len(table), len(roots)))
    rows = np.arange(len(table))[:, None]
    for _ in range(width):
        goes_left = table[rows, feature[node]] <= threshold[node]
        following = roots + np.where(goes_left, left[node], right[node])
        if (following == node).all():
            break
        node = following
    total: Array = value[node].reshape(len(table), *size[:-1]).sum(axis=-1) + forest.base
    return total


def _table(view: View) -> Array:
    table: Array = np.concatenate(
        (view.steps[:, -LAGS:, 0], view.steps[:, -3:, 1], view.state), axis=1
    )
    return table
