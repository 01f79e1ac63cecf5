"""What is played to see what a forecast is worth: days of a real week, and mornings with a ramp.

The traffic of a scene is written once, and every rule meets the same requests. Forecasters see its
counts, in windows of five minutes, and nothing else: they know no more than an autoscaler could.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow.parquet as pq

from policy.forecast import Rates, Seasonal
from policy.forecast.contract import QUANTILES, check_origins
from policy.forecast.series import DAY_S, Series
from tests.bench.forecast.loads import FRIDAY, azure_week
from tests.bench.ramp_forecasts import LASTS_S, LEAD_S, PAST_DAYS, POINTS, SEED
from twin.forecasts import DayShape, past_days
from twin.source import Source, write_sources

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from policy.forecast.contract import Ints
    from policy.forecast.series import Array, Target

WINDOW_S = 300
DAY_WINDOWS = DAY_S // WINDOW_S
HORIZONS = (1, 2, 3)
"""The last one's end is a cold start, a margin and a window ahead."""
WEEK_RPS = 0.5
"""Of the week on average; the service had 28."""
USUAL = DayShape(night_rps=0.35, day_rps=1.75, rise_takes_s=300.0, tokens_per_request=20_000.0)
"""The days of the scenario forecast-ramp with half its requests, which are heavier here."""
DAYS = 7
PLAYED = 900
"""Seed of the mornings' requests. Settings were chosen on other draws."""


@dataclass(frozen=True)
class Scene:
    """A stretch that is played, in windows of its series."""

    name: str
    trace: Path
    requests: Series
    """Per second, as counted: all windows before the run, and those of it."""
    tokens: Series
    begin: int
    end: int

    @property
    def lasts_s(self) -> int:
        return (self.end - self.begin) * WINDOW_S

    def history(self) -> Series:
        """What was known before the run."""
        return self.requests.until(self.begin)


class Perfect:
    """Knows the counts that are to come: the bound for everyone who forecasts averages."""

    horizons = HORIZONS

    def fit(self, series: Sequence[Series]) -> Perfect:
        return self

    def predict(self, series: Series, origins: Ints, target: Target = "mean") -> Array:
        check_origins(series, origins)
        values = series.of(target)
        ahead = origins[:, None] + np.asarray(self.horizons)
        truth = values[np.minimum(ahead, len(values) - 1)]
        return np.repeat(truth[:, :, None], len(QUANTILES), axis=2)


class DayShapes:
    """``policy.forecast.Seasonal``: today goes on like some earlier day, shifted and scaled."""

    horizons = HORIZONS

    def fit(self, series: Sequence[Series]) -> DayShapes:
        return self

    def predict(self, series: Series, origins: Ints, target: Target = "mean") -> Array:
        check_origins(series, origins)
        values = series.of(target)
        middles_s = [round((horizon - 0.5) * WINDOW_S) for horizon in self.horizons]
        rows = []
        for origin in origins.tolist():
            seen = Rates(WINDOW_S, values[: origin + 1], values[: origin + 1])
            found = Seasonal().fit(seen).predict(middles_s)
            median, upper = np.array(found.requests_p50), np.array(found.requests_p90)
            rows.append(np.stack([median, median, upper, upper], axis=1) / 1000)
        return np.stack(rows)


def week(folder: Path, traces: Path, seed: int) -> tuple[Path, Series]:
    """The traffic of the code service's week, scaled down, and its counts."""
    load = azure_week(traces, "code", FRIDAY)
    offset_s = load.start_s - FRIDAY * DAY_S
    middles = offset_s + (np.arange(len(load)) + 0.5) * load.window_s
    factors = load.mean / load.mean.mean()
    path = folder / "week.parquet"
    curve = list(zip(middles.tolist(), factors.tolist(), strict=True))
    _write(path, WEEK_RPS, curve, DAYS * DAY_S, seed)
    counts = _counts(path, DAYS * DAY_WINDOWS)
    return path, Series(WINDOW_S, counts, start_s=FRIDAY * DAY_S, name="week")


def week_day(folder: Path, whole: tuple[Path, Series], day: int) -> Scene:
    """One day of it, with the days before for history."""
    path, series = whole
    trace = folder / f"day{day}.parquet"
    write_sources(
        [Source(trace=str(path), from_s=float(day * DAY_S))], trace, duration_s=DAY_S, seed=0
    )
    requests = series.until((day + 1) * DAY_WINDOWS)
    begin = day * DAY_WINDOWS
    return Scene(f"day{day}", trace, requests, _tokens(requests), begin, begin + DAY_WINDOWS)


def ramp(folder: Path, point: str) -> Scene:
    """Two hours around the rise of a morning, with seven days and the night before for history."""
    shape = USUAL.differing(*POINTS[point])
    place = list(POINTS).index(point)
    begin_s = int(shape.rise_s) - LEAD_S
    trace = folder / f"{point}.parquet"
    curve = [(at_s - begin_s, rps / shape.night_rps) for at_s, rps in shape.curve()]
    _write(trace, shape.night_rps, curve, LASTS_S, PLAYED + place)
    night = shape.rates(np.random.default_rng((SEED, place))).requests_per_s
    counts = [
        past_days(USUAL, PAST_DAYS, SEED).requests_per_s,
        night[: begin_s // WINDOW_S],
        _counts(trace, LASTS_S // WINDOW_S),
    ]
    requests = Series(WINDOW_S, np.concatenate(counts), weekday_known=False, name="ramp")
    end = len(requests)
    return Scene(point, trace, requests, _tokens(requests), end - len(counts[-1]), end)


def _write(path: Path, rps: float, curve: Sequence[tuple[float, float]], s: int, seed: int) -> None:
    """Long prompts and short answers, so that few requests are much work.

    Poisson arrivals at this rate differ from minute to minute about as much as those of the real
    service did (by a tenth, and by a fifth at night), which was fifty times as busy.
    """
    stream: dict[str, Any] = {
        "name": "code",
        "business_line": "code",
        "sla_class": "P2",
        "model": "llama-3.1-8b",
        "endpoint": "chat",
        "arrivals": {"law": "poisson", "rate_rps": rps, "curve": curve},
        "prompt_tokens": {"lognormal": {"mean": 20000, "sigma": 0.3}, "low": 5000, "high": 30000},
        "output_tokens": {"lognormal": {"mean": 25, "sigma": 0.6}, "low": 2, "high": 200},
        "max_output_tokens": 200,
    }
    write_sources([msgspec.convert({"streams": [stream]}, Source)], path, duration_s=s, seed=seed)


def _counts(path: Path, windows: int) -> Array:
    arrival_s = pq.read_table(path, columns=["arrival_s"])["arrival_s"].to_numpy()
    window = (arrival_s // WINDOW_S).astype(np.int64)
    return np.bincount(window, minlength=windows)[:windows] / WINDOW_S


def _tokens(requests: Series) -> Series:
    """Requests are alike on average, so that one forecast does for both."""
    return replace(requests, mean=requests.mean * USUAL.tokens_per_request)
