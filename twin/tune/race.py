"""The last round: the best trials with more seeds, and which of them it is.

The trials had one seed each. Those at the front go on with further ones, seed by seed; whoever is
clearly worse than the leader drops out, so that seeds go to those that are close.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.tune.compare import CONFIRM_LEVEL, dominated, front, paired
from twin.tune.work import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twin.tune.engines import Engine
    from twin.tune.objectives import Figure, Goals
    from twin.tune.study import Tried, Tuning
    from twin.tune.work import Played

    Array = np.ndarray[Any, np.dtype[Any]]

FINALISTS = 6
"""Trials in the last round, the parent not counted."""


@dataclass(slots=True)
class Finalist:
    """A trial in the last round."""

    tried: Tried
    by_seed: list[Array] = field(default_factory=list)
    """By block and figure."""
    values_by_seed: list[dict[str, float]] = field(default_factory=list)
    dropped: bool = False

    def __post_init__(self) -> None:
        self.by_seed.append(self.tried.blocks)
        self.values_by_seed.append(self.tried.values)

    def add(self, played: Played) -> None:
        self.by_seed.append(played.blocks)
        self.values_by_seed.append(played.values)

    @property
    def number(self) -> int:
        return self.tried.number

    @property
    def values(self) -> dict[str, float]:
        """Means over the seeds."""
        first = self.values_by_seed[0]
        return {
            name: float(np.mean([values[name] for values in self.values_by_seed])) for name in first
        }

    def blocks(self, seeds: int) -> Array:
        """To be compared by: the first ``seeds`` seeds. A trace's blocks are the same requests with
        every seed, so they are averaged; a scenario's seeds are blocks of their own."""
        parts = self.by_seed[:seeds]
        if len(parts[0]) == 1:
            return np.concatenate(parts)
        mean: Array = np.mean(parts, axis=0)
        return mean


@dataclass(frozen=True, slots=True)
class Raced:
    """What came of the last round."""

    finalists: list[Finalist]
    """The parent first."""
    best: Finalist
    front: list[Finalist]


def race(
    tuning: Tuning,
    engine: Engine,
    seeds: Sequence[int],
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Raced:
    """Play the best trials with ``seeds`` too, and choose.

    Raises: what the engine raises.
    """
    parent = tuning.parent
    assert parent is not None
    field_ = [Finalist(parent), *map(Finalist, _chosen(tuning, parent))]
    for done, seed in enumerate(seeds):
        alive = [one for one in field_ if not one.dropped]
        if len(alive) == 1:
            break
        progress(done, len(seeds))
        for one in alive:
            engine.submit(Order(one.number, tuning.policy(one.tried), seed))
        by_number = {one.number: one for one in alive}
        for _ in alive:
            order, played = engine.next()
            by_number[order.number].add(played)
        _drop(alive, tuning.goals)
    progress(len(seeds), len(seeds))
    return _judged(field_, tuning.goals)


def objective_columns(goals: Goals) -> list[int]:
    """Where the objectives stand among the figures."""
    names = [figure.name for figure in goals.figures]
    return [names.index(figure.name) for figure in goals.objectives]


def _chosen(tuning: Tuning, parent: Tried) -> list[Tried]:
    """The front, the best of the first objective first; then the next best by it. Of those that
    differ in nothing that was measured, the first."""
    first = tuning.goals.objectives[0]
    ahead = {tried.number for tried in tuning.front()}
    ranked = sorted(
        (tried for tried in tuning.tried.values() if tried.whole),
        key=lambda tried: (
            tried.violation, tried.number not in ahead, -_gain(first, tried.values), tried.number,
        ),
    )  # fmt: skip
    chosen: list[Tried] = []
    for tried in ranked:
        twins = [parent, *chosen]
        if not any(np.array_equal(tried.blocks, one.blocks, equal_nan=True) for one in twins):
            chosen.append(tried)
    return chosen[:FINALISTS]


def _drop(alive: list[Finalist], goals: Goals) -> None:
    """Whoever is clearly worse than the leader is out; the parent stays, to be compared with."""
    leader = _leader(alive, goals)
    columns = objective_columns(goals)
    better = [figure.better for figure in goals.objectives]
    for one in alive[1:]:
        seeds = min(len(one.by_seed), len(leader.by_seed))
        ours, theirs = one.blocks(seeds)[:, columns], leader.blocks(seeds)[:, columns]
        if one is not leader and dominated(ours, theirs, better):
            one.dropped = True


def _judged(field_: list[Finalist], goals: Goals) -> Raced:
    alive = [one for one in field_ if not one.dropped]
    least = min(goals.violation(one.values) for one in alive)
    able = [one for one in alive if goals.violation(one.values) <= least]
    better = [figure.better for figure in goals.objectives]
    rows = [[one.values[figure.name] for figure in goals.objectives] for one in able]
    ahead = [able[place] for place in front(rows, better)]
    parent = field_[0]
    kept = [
        one for one in able if parent not in able or not _worse_somewhere(one, parent, goals)
    ]  # fmt: skip
    return Raced(field_, _leader(kept, goals), ahead)


def _worse_somewhere(one: Finalist, parent: Finalist, goals: Goals) -> bool:
    seeds = min(len(one.by_seed), len(parent.by_seed))
    ours, theirs = one.blocks(seeds), parent.blocks(seeds)
    return any(
        paired(ours[:, column], theirs[:, column], figure.better, CONFIRM_LEVEL).worse
        for column, figure in zip(objective_columns(goals), goals.objectives, strict=True)
    )


def _leader(of: list[Finalist], goals: Goals) -> Finalist:
    """The best by the constraints and then the first objective; of equals the first."""
    first = goals.objectives[0]
    return min(of, key=lambda one: (goals.violation(one.values), -_gain(first, one.values)))


def _gain(figure: Figure, values: dict[str, float]) -> float:
    value = values[figure.name]
    return -np.inf if np.isnan(value) else value * figure.better
