"""What a forecast is worth in GPU-hours: a short stretch of a load, played under rules of scaling.

The stretch is the one with the steepest rise among what the forecaster had not seen. It is scaled
to a small fleet of heavy requests, as ``docs/forecast.md`` has it, and played with what was
forecast of it, with the loop of 5 s alone, with the rule of Kubernetes' autoscaler, and by one who
knows the averages to come. Each rule has several settings, which trade GPU-hours for violations (a
request that is shed, or whose first token comes after its limit).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from policy.forecast.contract import QUANTILES
from policy.forecast.events import forecasted
from twin.forecasts import Dated, write_forecasts
from twin.scenario.files import parse_scenario
from twin.scenario.run import Recordings, run_setup
from twin.source import Source, write_sources

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Array = np.ndarray[Any, np.dtype[np.float64]]

NS = 1_000_000_000
LASTS_S = 7200.0
WARM_UP_S = 1800
"""The fleet starts with one replica; what it misses until it has grown is not counted."""
RISE_S = 900.0
"""Windows next to each other differ by chance; over so long a rise stands out."""
PEAK_RPS = 1.75
"""Of the stretch once it is scaled: some ten cards."""
TOKENS = 20_000.0
COLD_START_S = 150
OURS, LOOP, HPA, PERFECT = "forecaster", "5 s loop", "HPA", "perfect"
_FORECAST = {"rule": "forecast", "margin_ms": 60_000}
_KNOBS = ("work_permille", "floor_work_permille")
RULES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[int, ...]]] = {
    HPA: ({"rule": "hpa"}, ("hpa_target_permille",), (300, 500, 700, 900)),
    LOOP: ({"rule": "reactive"}, _KNOBS[:1], (500, 750, 1000)),
    OURS: (_FORECAST, _KNOBS, (600, 800, 1000)),
    PERFECT: (_FORECAST, _KNOBS, (600, 800, 1000)),
}  # fmt: skip
"""By name: what is fixed, which keys are set to the same value, and to which."""
LEVELS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
"""Shares of violations, at the first of which that all rules reach they are compared."""


class Point(NamedTuple):
    """A rule with a setting: what it cost, and what it missed."""

    setting: int
    gpu_hours: float
    missed: int
    offered: int

    @property
    def share(self) -> float:
        return self.missed / self.offered if self.offered else 0.0


@dataclass(frozen=True, slots=True)
class Told:
    """What was forecast of a load, and how it went on."""

    window_s: float
    horizons: tuple[int, ...]
    mean: Array
    """Per second, all windows."""
    origins: Array
    told: Array
    """[origin, horizon, quantile]."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What is played."""

    begin: int
    """The first window."""
    end: int
    scale: float
    """From the load's rate to requests per second."""


def steepest(load: Told) -> Stretch:
    """The stretch around the largest rise within ``RISE_S``, somewhat after its middle.

    Raises:
        ValueError: too little was forecast for it.
    """
    windows = max(2, round(LASTS_S / load.window_s))
    first, last = int(load.origins[0]) + 1, int(load.origins[-1]) + 1
    if last - first < windows:
        raise ValueError(
            f"{last - first} windows were forecast, and a stretch of {windows} is played: give a"
            " longer load"
        )
    values = np.nan_to_num(load.mean[first:last], nan=0.0)
    steps = max(1, round(RISE_S / load.window_s))
    rises = values[steps:] - values[:-steps]
    middle = int(np.argmax(rises)) + steps // 2
    begin = min(max(0, middle - round(0.6 * windows)), len(values) - windows)
    peak = float(values[begin : begin + windows].max())
    if not peak:
        raise ValueError("nothing was asked for in what was forecast: give another load")
    return Stretch(first + begin, first + begin + windows, PEAK_RPS / peak)


def worth(load: Told, seed: int, told: Callable[[float, str], None]) -> dict[str, list[Point]]:
    """Play every rule at every setting.

    Args:
        told: is told a share and what has been played.

    Raises:
        ValueError: too little was forecast.
    """
    stretch = steepest(load)
    curves: dict[str, list[Point]] = {name: [] for name in RULES}
    of = sum(len(settings) for *_, settings in RULES.values())
    with TemporaryDirectory(prefix="twinkeel-") as scratch:
        folder = Path(scratch)
        trace = _traffic(folder, load, stretch, seed)
        files = {
            OURS: _recorded(folder / "ours.jsonl", load, stretch, load.told),
            PERFECT: _recorded(folder / "perfect.jsonl", load, stretch, _truth(load)),
        }
        done = 0
        for name, (fixed, knobs, settings) in RULES.items():
            for setting in settings:
                capacity = {**fixed, **dict.fromkeys(knobs, setting)}
                lasts_s = (stretch.end - stretch.begin) * load.window_s
                point = play(trace, lasts_s, capacity, files.get(name, ""), seed)
                curves[name].append(Point(setting, *point))
                done += 1
                told(done / of, "playing the stretch under each rule")
    return curves


def compared(curves: dict[str, list[Point]]) -> tuple[float, dict[str, float]]:
    """(share of violations, GPU-hours of each rule that reaches it)."""
    found: dict[str, float] = {}
    for level in LEVELS:
        at = {name: hours_at(points, level) for name, points in curves.items()}
        found = {name: hours for name, hours in at.items() if hours is not None}
        if len(found) == len(curves):
            break
    return level, found


def never_so_many(curves: dict[str, list[Point]], share: float) -> list[str]:
    """Rules that miss less than that at every setting: they would need fewer hours still."""
    return [
        name for name, points in curves.items() if max(point.share for point in points) < share
    ]  # fmt: skip


def front(points: Sequence[Point]) -> list[Point]:
    """Those that no other one beats in both, by rising GPU-hours."""
    kept: list[Point] = []
    for point in sorted(points, key=lambda each: (each.gpu_hours, each.missed)):
        if not kept or point.missed < kept[-1].missed:
            kept.append(point)
    return kept


def hours_at(points: Sequence[Point], share: float) -> float | None:
    """GPU-hours at this share of violations, between the two points of the front beside it:
    straight in the share's logarithm (half a request is added, so that none has one too). None:
    every point misses more. Where none misses so many, it is the cheapest point's, which is more
    than it would be."""
    kept = front(points)
    if kept and kept[0].share <= share:
        return kept[0].gpu_hours
    for cheap, dear in pairwise(kept):
        if dear.share <= share <= cheap.share:
            top, wanted, low = (
                math.log(each + 0.5 / cheap.offered) for each in (cheap.share, share, dear.share)
            )
            part = (top - wanted) / (top - low)
            return cheap.gpu_hours + part * (dear.gpu_hours - cheap.gpu_hours)
    return None


def play(
    trace: Path, lasts_s: float, capacity: dict[str, Any], forecasts: str, seed: int
) -> tuple[float, int, int]:
    """(GPU-hours, violations, requests) of ``trace`` under one rule.

    Args:
        capacity: what the policy's section of that name says.
        forecasts: a file of them; empty: none are told.
    """
    raw: dict[str, Any] = {
        "schema": 1, "name": "worth", "about": "see the module", "seeds": [seed],
        "duration_s": lasts_s, "traffic": {"open": [{"trace": str(trace)}]},
        "fleet": [{
            "profile": "rtx-4090/llama-3.1-8b", "count": 1, "standbys": 24,
            "cold_start_s": COLD_START_S,
        }],
        "policy": {"preset": "stable", "set": {"capacity": capacity}},
        "measure": {"tpot_s": 1000.0, "warm_up_s": WARM_UP_S},
    }  # fmt: skip
    if forecasts:
        raw["events"] = [{"kind": "forecasts", "file": forecasts}]
    setup = parse_scenario(raw, "worth", trace.parent).runs["base"]
    with TemporaryDirectory(prefix="twinkeel-") as scratch:
        recordings = Recordings(Path(scratch))
        result = run_setup(setup, seed, run="base", folder=trace.parent, recordings=recordings)
    served = result.figures["all"]
    return result.figures["fleet"]["gpu_hours"], served["slo_missed"], served["offered"]


def _traffic(folder: Path, load: Told, stretch: Stretch, seed: int) -> Path:
    """Requests drawn at the stretch's rates: long prompts and short answers, so that few are much
    work."""
    path = folder / "stretch.parquet"
    rates = np.nan_to_num(load.mean[stretch.begin : stretch.end], nan=0.0) * stretch.scale
    rps = float(rates.mean())
    curve = [
        ((place + 0.5) * load.window_s, max(1e-3, float(rate) / rps))
        for place, rate in enumerate(rates)
    ]
    stream: dict[str, Any] = {
        "name": "code", "business_line": "code", "sla_class": "P2", "model": "llama-3.1-8b",
        "endpoint": "chat",
        "arrivals": {"law": "poisson", "rate_rps": rps, "curve": curve},
        "prompt_tokens": {"lognormal": {"mean": TOKENS, "sigma": 0.3}, "low": 5000, "high": 30000},
        "output_tokens": {"lognormal": {"mean": 25, "sigma": 0.6}, "low": 2, "high": 200},
        "max_output_tokens": 200,
    }  # fmt: skip
    lasts_s = (stretch.end - stretch.begin) * load.window_s
    source = msgspec.convert({"streams": [stream]}, Source)
    write_sources([source], path, duration_s=lasts_s, seed=seed)
    return path


def _truth(load: Told) -> Array:
    """What came, as one who knew would have said it."""
    ahead = load.origins[:, None] + np.asarray(load.horizons)
    values = np.nan_to_num(load.mean, nan=0.0)
    truth = values[np.minimum(ahead, len(values) - 1)]
    return np.repeat(truth[:, :, None], len(QUANTILES), axis=2)


def _recorded(path: Path, load: Told, stretch: Stretch, told: Array) -> str:
    """The forecasts at the beginning of each window, as the policy is told them."""
    dated = []
    for place, window in enumerate(range(stretch.begin, stretch.end)):
        row = window - 1 - int(load.origins[0])
        rates = told[row] * stretch.scale
        seen = float(load.mean[window - 1]) * stretch.scale
        forecast = forecasted(
            load.window_s, load.horizons, rates, rates * TOKENS, (seen, seen * TOKENS)
        )
        dated.append(Dated(round(place * load.window_s * NS), forecast))
    write_forecasts(path, dated)
    return str(path)
