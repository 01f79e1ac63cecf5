"""A seasonal forecaster: today will go on like some earlier day, a little shifted and scaled.

Every earlier day, moved by up to ``SHIFT_SLOTS`` slots and scaled to the level of the last hours,
is a candidate for today. A candidate counts by how well it fits the last hours and by how little it
is moved. The forecast's quantiles are those of the candidates' values, by weight: wide while
nobody can know whether the morning's rise comes early or late, narrow once it has begun.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.events import Forecasted

if TYPE_CHECKING:
    from collections.abc import Sequence

    Array = np.ndarray[Any, np.dtype[np.float64]]

DAY_S = 86_400
NS_PER_S = 1_000_000_000
SHIFT_SLOTS = 9
"""A day's rise comes at most three quarters of an hour early or late, in slots of 5 minutes."""
SHIFT_SPREAD_SLOTS = 6.0
"""Standard deviation of how far days are shifted against each other, before today is seen."""
FIT_SLOTS = 18
"""The last hour and a half is what candidates must fit."""
LEVEL_MOST = 2.0
"""A day is at most twice, or half, as busy as another."""
NOISE = 0.15
"""Standard deviation of a slot's rate around the day's curve, as a share of it, beside what
counting adds. Taken too small, a quiet night's noise seems to say which day today is like."""
DAYS_MOST = 28


@dataclass(frozen=True, slots=True)
class Rates:
    """Average rates of consecutive slots of ``slot_s``, the first of which begins at midnight."""

    slot_s: int
    requests_per_s: Array
    tokens_per_s: Array
    """Prompt and output tokens."""

    def __post_init__(self) -> None:
        if DAY_S % self.slot_s:
            raise ValueError(f"slots of {self.slot_s} s do not divide a day")
        if len(self.requests_per_s) != len(self.tokens_per_s):
            raise ValueError("there must be as many token rates as request rates")

    def __len__(self) -> int:
        return len(self.requests_per_s)

    def until(self, slots: int) -> Rates:
        """The first ``slots`` of them."""
        return Rates(self.slot_s, self.requests_per_s[:slots], self.tokens_per_s[:slots])

    def then(self, later: Rates) -> Rates:
        """These, and others after them."""
        if later.slot_s != self.slot_s:
            raise ValueError("rates that follow each other must have slots of one length")
        return Rates(
            self.slot_s,
            np.concatenate((self.requests_per_s, later.requests_per_s)),
            np.concatenate((self.tokens_per_s, later.tokens_per_s)),
        )


class Seasonal:
    """Forecasts what follows a history of rates that holds at least one whole earlier day."""

    def fit(self, history: Rates) -> Seasonal:
        """Take everything up to now as known."""
        self.day_slots_ = DAY_S // history.slot_s
        first = max(0, len(history) // self.day_slots_ - DAYS_MOST) * self.day_slots_
        self.history_ = history
        self.first_ = first
        if len(history) < self.day_slots_ + FIT_SLOTS + SHIFT_SLOTS:
            raise ValueError("a forecast needs a whole day of history, and two hours and a half")
        return self

    def predict(self, horizons_s: Sequence[int]) -> Forecasted:
        """The rates at these times from now; each within a day."""
        requests = self._candidates(self.history_.requests_per_s, horizons_s)
        tokens = self._candidates(self.history_.tokens_per_s, horizons_s)
        return Forecasted(
            tuple(horizon * NS_PER_S for horizon in horizons_s),
            _whole(quantile(*requests, 0.5) * 1000),
            _whole(quantile(*requests, 0.9) * 1000),
            _whole(quantile(*tokens, 0.5)),
            _whole(quantile(*tokens, 0.9)),
        )

    def _candidates(self, rates: Array, horizons_s: Sequence[int]) -> tuple[Array, Array]:
        """(value of each candidate at each horizon, weight of each candidate)."""
        now = len(rates)
        recent = rates[now - FIT_SLOTS :]
        counts = np.maximum(self.history_.requests_per_s * self.history_.slot_s, 1.0)
        variances = NOISE**2 + 1 / counts  # of today's slots, and of the candidate's
        centres = np.arange(len(rates)) + 0.5  # of each slot, in slots
        ahead = now + np.asarray(horizons_s) / self.history_.slot_s
        values: list[Array] = []
        penalties: list[float] = []
        for days_ago in range(1, (now - self.first_) // self.day_slots_ + 1):
            for shift in range(-SHIFT_SLOTS, SHIFT_SLOTS + 1):
                moved = now - days_ago * self.day_slots_ - shift
                if moved - FIT_SLOTS < self.first_:
                    continue
                then = rates[moved - FIT_SLOTS : moved]
                level = _level(recent, then)
                values.append(level * np.interp(ahead + moved - now, centres, rates))
                variance = variances[now - FIT_SLOTS :] + variances[moved - FIT_SLOTS : moved]
                misfit = _misfit(recent, level * then, variance)
                penalties.append(misfit + (shift / SHIFT_SPREAD_SLOTS) ** 2)
        misfits: Array = np.asarray(penalties)
        return np.asarray(values), np.exp((misfits.min() - misfits) / 2)


def _whole(values: Array) -> tuple[int, ...]:
    return tuple(round(float(value)) for value in values)


def _level(recent: Array, then: Array) -> float:
    """By how much today is busier than the candidate was, over the hours that both are known."""
    before = float(then.sum())
    if not before:
        return 1.0
    return min(max(float(recent.sum()) / before, 1 / LEVEL_MOST), LEVEL_MOST)


def _misfit(recent: Array, candidate: Array, variance: Array) -> float:
    """Sum of squared deviations, in standard deviations; ``variance`` is of deviations as a share
    of the larger one."""
    larger = np.maximum(np.maximum(recent, candidate), 1e-9)
    return float((((recent - candidate) / larger) ** 2 / variance).sum())


def quantile(values: Array, weights: Array, share: float) -> Array:
    """Of each column of ``values``, by weight: the first value that this share lies at or below."""
    order = np.argsort(values, axis=0, kind="stable")
    reached = np.cumsum(weights[order], axis=0)
    rows = np.argmax(reached >= share * reached[-1], axis=0)
    found: Array = np.take_along_axis(values, order, axis=0)[rows, np.arange(values.shape[1])]
    return found
