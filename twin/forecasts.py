"""Forecasts of a run, made before it: what a scenario feeds every few minutes.

A forecast is part of a run's input, recorded and not recomputed: floating-point sums may differ
in the last bit between machines, and a decision log must not. At every instant the forecaster is
shown only what was known by then. A daily load curve to try it on is generated here too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from policy.events import Forecasted  # noqa: TC001 - msgspec reads it
from policy.forecast import Rates, Seasonal
from policy.forecast.events import forecasted
from policy.forecast.seasonal import DAY_S, NS_PER_S

if TYPE_CHECKING:
    from pathlib import Path

    from policy.forecast.contract import Forecaster
    from policy.forecast.series import Series

    Array = np.ndarray[Any, np.dtype[np.float64]]

SLOT_S = 300
HORIZONS_S = (0, 60, 120, 180, 240, 300, 420, 600, 900, 1200, 1800, 2700, 3600)


class Dated(msgspec.Struct, frozen=True, array_like=True):
    """A forecast, and when it is fed: nanoseconds from the run's start."""

    at_ns: int
    forecast: Forecasted


def forecasts(
    history: Rates, today: Rates, begin_s: int, end_s: int, horizons_s: tuple[int, ...] = HORIZONS_S
) -> list[Dated]:
    """What is forecast at every slot of a run that lasts from ``begin_s`` to ``end_s`` of today.

    Args:
        history: whole days before today.
        today: from midnight, at least to ``end_s``; of it only what has passed is looked at.
        begin_s: seconds after midnight, a whole number of slots.
    """
    slot_s = today.slot_s
    if begin_s % slot_s or not 0 <= begin_s < end_s <= len(today) * slot_s:
        raise ValueError(
            f"a run from {begin_s} to {end_s} s must begin at a slot of {slot_s} s and lie within"
            f" the {len(today)} slots of the day"
        )
    return [
        Dated(
            (slot * slot_s - begin_s) * NS_PER_S,
            Seasonal().fit(history.then(today.until(slot))).predict(horizons_s),
        )
        for slot in range(begin_s // slot_s, math.ceil(end_s / slot_s))
    ]


def dated(
    forecaster: Forecaster,
    requests: Series,
    tokens: Series,
    begin: int,
    end: int,
    tokens_forecaster: Forecaster | None = None,
) -> list[Dated]:
    """What a fitted forecaster says at the beginning of each window of a run.

    Args:
        forecaster: of requests, and of tokens if no other is given.
        requests: per second, all windows before the run and those of it, of which only what has
            passed is looked at.
        tokens: prompt and output tokens per second, in the same windows.
        begin: the window that the run begins with, at least 1: something must be known.
        end: the one that it ends before.

    Raises:
        ValueError: windows that are not there, or two series of different windows.
    """
    if (requests.window_s, requests.start_s, len(requests)) != (
        tokens.window_s, tokens.start_s, len(tokens),
    ):  # fmt: skip
        raise ValueError(
            f"requests are known for {len(requests)} windows of {requests.window_s} s from"
            f" {requests.start_s} s and tokens for {len(tokens)} of {tokens.window_s} s from"
            f" {tokens.start_s} s: they must be the same"
        )
    if not 1 <= begin < end <= len(requests):
        raise ValueError(
            f"a run from window {begin} to {end} must begin at 1 or later and lie within the"
            f" {len(requests)} windows"
        )
    origins = np.arange(begin - 1, end - 1)
    horizons = forecaster.horizons
    of_tokens = tokens_forecaster or forecaster
    if tuple(of_tokens.horizons) != tuple(horizons):
        raise ValueError(
            f"requests are forecast for the windows {tuple(horizons)} ahead and tokens for"
            f" {tuple(of_tokens.horizons)}: they must be the same"
        )
    rates = zip(
        forecaster.predict(requests, origins),
        of_tokens.predict(tokens, origins),
        zip(requests.mean[origins], tokens.mean[origins], strict=True),
        strict=True,
    )
    return [
        Dated(
            round(place * requests.window_s * NS_PER_S),
            forecasted(requests.window_s, horizons, *each),
        )
        for place, each in enumerate(rates)
    ]


def write_forecasts(path: Path, dated: list[Dated]) -> None:
    """Record forecasts, one a line."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(dated))


def read_forecasts(path: Path) -> list[Dated]:
    """Recorded forecasts, in order."""
    return msgspec.json.Decoder(Dated).decode_lines(path.read_bytes())


@dataclass(frozen=True, slots=True)
class DayShape:
    """A day's load: a quiet night, a rise in the morning, a plateau, a fall in the evening."""

    night_rps: float = 4.0
    day_rps: float = 20.0
    rise_s: float = 9 * 3600.0
    """Seconds after midnight at which the rise begins."""
    rise_takes_s: float = 900.0
    fall_s: float = 21 * 3600.0
    fall_takes_s: float = 7200.0
    tokens_per_request: float = 1200.0

    def differing(self, shift_s: float, factor: float) -> DayShape:
        """The same day, earlier (negative) or later, and busier or less so."""
        return replace(
            self,
            night_rps=self.night_rps * factor,
            day_rps=self.day_rps * factor,
            rise_s=self.rise_s + shift_s,
            fall_s=self.fall_s + shift_s,
        )

    def curve(self) -> list[tuple[float, float]]:
        """(seconds after midnight, requests per second), straight between them."""
        return [
            (0.0, self.night_rps),
            (self.rise_s, self.night_rps),
            (self.rise_s + self.rise_takes_s, self.day_rps),
            (self.fall_s, self.day_rps),
            (min(self.fall_s + self.fall_takes_s, float(DAY_S)), self.night_rps),
        ]

    def rps(self, at_s: Array) -> Array:
        """Requests per second at these times of day."""
        times, rates = zip(*self.curve(), strict=True)
        found: Array = np.interp(at_s, times, rates)
        return found

    def rates(self, rng: np.random.Generator, slot_s: int = SLOT_S, noise: float = 0.05) -> Rates:
        """A day as it would be counted: noise by slot beside the counting's own."""
        middle = slot_s * np.arange(0.5, DAY_S // slot_s)
        expected = self.rps(middle) * np.exp(noise * rng.standard_normal(len(middle)))
        requests = rng.poisson(expected * slot_s) / slot_s
        return Rates(slot_s, requests, requests * self.tokens_per_request)


def past_days(
    shape: DayShape, days: int, seed: int, shift_spread_s: float = 600.0, spread: float = 0.1
) -> Rates:
    """Days that differ from ``shape`` a little at random: each is shifted and scaled.

    Args:
        shift_spread_s: standard deviation of a day's shift.
        spread: standard deviation of the logarithm of its factor.
    """
    rng = np.random.default_rng(seed)
    drawn = [
        shape.differing(
            shift_spread_s * rng.standard_normal(), float(np.exp(spread * rng.standard_normal()))
        ).rates(rng)
        for _ in range(days)
    ]
    history = drawn[0]
    for day in drawn[1:]:
        history = history.then(day)
    return history
