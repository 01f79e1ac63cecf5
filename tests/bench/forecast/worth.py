"""What a forecast is worth in GPU-hours: ``python -m tests.bench.forecast.worth``.

A day of a week of real load, and five mornings on which it rises fivefold within five minutes, are
played under every rule at several settings. Each rule so has a curve of GPU-hours against
violations (a request that is shed, or whose first token comes after 10 s), and rules are compared
where their curves have equally many. Forecasters have learned from the days before those that are
played, and are told a window's count when it is over.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.bench.forecast.worth_scenes import (
    HORIZONS,
    WINDOW_S,
    DayShapes,
    Perfect,
    ramp,
    week,
    week_day,
)
from tests.bench.ramp_forecasts import POINTS
from tests.figures import Figure, write_figures
from twin.forecast_worth import COLD_START_S, HPA, LOOP, PERFECT, Point, front, hours_at, play
from twin.forecasts import dated, write_forecasts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.forecast.contract import Forecaster
    from tests.bench.forecast.worth_scenes import Scene

DAY = 5
"""Wednesday. Settings were chosen on the Tuesday, and on another draw of the mornings' requests."""
SEED = 1
MARGIN = {"margin_ms": 60_000}
"""A forecast comes every window: more than a minute's margin only costs."""
STEADY = {"trend_least_permille": 500, "busy_permille": 1000}
"""On the week, for the loop of 5 s with and without a forecast: nothing comes suddenly there, and
whatever it takes for a rise is chance."""
OUT = Path("build/forecast/worth.json")
CHART = Path("docs/forecast/worth.svg")


class Rule(NamedTuple):
    """A rule of ``capacity``, and how it trades GPU-hours for violations."""

    title: str
    fixed: dict[str, Any]
    knobs: tuple[str, ...]
    """Set to the same value."""
    week: tuple[int, ...]
    """Values on the week, and (next) on the ramp."""
    ramp: tuple[int, ...]
    forecaster: str = ""


OURS = "LSTM forecaster"
LOOP_KNOB, FLOOR_KNOB = "work_permille", "floor_work_permille"


def _forecast(title: str, week: tuple[int, ...], ramp: tuple[int, ...]) -> Rule:
    fixed = {"rule": "forecast", **MARGIN}
    return Rule(title, fixed, (LOOP_KNOB, FLOOR_KNOB), week, ramp, title)


RULES = (
    Rule(HPA, {"rule": "hpa"}, ("hpa_target_permille",), (700, 850, 1000), (300, 400, 500, 700)),
    Rule(LOOP, {"rule": "reactive"}, (LOOP_KNOB,), (700, 850, 1000), (500, 600, 750, 900, 1000)),
    _forecast("last value", (850, 1000), (750, 900, 1000)),
    _forecast("Kalman", (850, 1000), (750, 900, 1000)),
    _forecast("ARIMA(2,1,2)", (850, 1000), (750, 900, 1000)),
    _forecast("day shapes", (850, 1000), (750, 900, 1000)),
    _forecast(OURS, (700, 850, 1000), (600, 750, 900, 1000)),
    _forecast(PERFECT, (700, 850, 1000), (600, 750, 900, 1000)),
)
LEVELS = {"week": 0.001, "ramp": 0.001}
"""Share of violations at which rules are compared."""
SHARES = (0.0005, 0.001, 0.002, 0.005)
"""Others that are told besides."""


@dataclass(frozen=True)
class Job:
    """A run."""

    scene: str
    trace: str
    lasts_s: int
    capacity: dict[str, Any]
    forecasts: str = ""


def forecasters() -> dict[str, Callable[[], Forecaster]]:
    """By name, not yet fitted."""
    from policy.forecast.baselines import Arima, Kalman, LastValue
    from policy.forecast.forecaster import LoadForecaster

    return {
        "last value": partial(LastValue, HORIZONS),
        "Kalman": partial(Kalman, HORIZONS),
        "ARIMA(2,1,2)": partial(Arima, HORIZONS),
        "day shapes": DayShapes,
        OURS: partial(LoadForecaster, HORIZONS),
        PERFECT: Perfect,
    }


def played_once(job: Job) -> tuple[float, int, int]:
    """(GPU-hours, violations, requests)."""
    return play(Path(job.trace), job.lasts_s, job.capacity, job.forecasts, SEED)


def record(
    folder: Path, scenes: Sequence[Scene], made: dict[str, Callable[[], Forecaster]]
) -> dict[tuple[str, str], str]:
    """Fit each forecaster once to what lies before the first scene; record what it says of each.

    Returns:
        The file, by scene and forecaster.
    """
    files: dict[tuple[str, str], str] = {}
    for name, make in made.items():
        fitted = make().fit([scenes[0].history()])
        for scene in scenes:
            path = folder / f"{scene.name}-{len(files)}.jsonl"
            told = dated(fitted, scene.requests, scene.tokens, scene.begin, scene.end)
            write_forecasts(path, told)
            files[scene.name, name] = str(path)
    return files


def jobs_of(
    load: str, scenes: Sequence[Scene], files: dict[tuple[str, str], str]
) -> dict[tuple[str, int, str], Job]:
    """All runs on ``load``, by (rule, setting, scene)."""
    steady = STEADY if load == "week" else {}
    fixed = {"forecast": steady, "reactive": steady, "hpa": {}}
    return {
        (rule.title, setting, scene.name): Job(
            scene.name, str(scene.trace), scene.lasts_s,
            {**fixed[rule.fixed["rule"]], **rule.fixed, **dict.fromkeys(rule.knobs, setting)},
            files[scene.name, rule.forecaster] if rule.forecaster else "",
        )
        for rule in RULES
        for setting in getattr(rule, load)
        for scene in scenes
    }  # fmt: skip


def saved_pct(of: float | None, against: float | None) -> float | None:
    """By how many per cent ``of`` is lower."""
    return None if of is None or against is None else 100 * (1 - of / against)


def closed_pct(of: float | None, start: float | None, end: float | None) -> float | None:
    """How far ``of`` lies on the way from ``start`` to ``end``; None: there is no way down."""
    if of is None or start is None or end is None or start <= end:
        return None
    return 100 * (start - of) / (start - end)


Curves = dict[str, list[Point]]


def played(jobs: dict[tuple[str, int, str], Job], told: Callable[[str], None]) -> Curves:
    """Play all of them on all cores, and put each rule's scenes together."""
    longest_first = sorted(jobs, key=lambda key: (-jobs[key].lasts_s, key))
    sums: dict[tuple[str, int], Point] = {}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        results = pool.map(played_once, [jobs[key] for key in longest_first])
        for (title, setting, scene), (gpu_hours, missed, offered) in zip(
            longest_first, results, strict=True
        ):
            told(f"{title} {setting}, {scene}: {gpu_hours:.1f} GPU-hours, {missed} of {offered}")
            before = sums.get((title, setting), Point(setting, 0.0, 0, 0))
            sums[title, setting] = Point(
                setting, before.gpu_hours + gpu_hours, before.missed + missed,
                before.offered + offered,
            )  # fmt: skip
    curves: Curves = {}
    for (title, _), point in sorted(sums.items()):
        curves.setdefault(title, []).append(point)
    return curves


def figures_of(curves: dict[str, Curves]) -> list[Figure]:
    """The figures, of the curves on ``week`` and ``ramp``."""
    figures = []
    for load, level in LEVELS.items():
        at = {title: hours_at(points, level) for title, points in curves[load].items()}
        prefix = "" if load == "week" else f"{load}_"
        where = f"{WHAT[load]}, at {level:.1%} violations"
        saved = saved_pct(at[OURS], at[HPA])
        closed = closed_pct(at[OURS], at[HPA], at[PERFECT])
        loop = saved_pct(at[OURS], at[LOOP])
        figures += [
            Figure(f"{prefix}gpu_hours_saved_pct", saved, "%", ">= 15",
                   f"LSTM forecaster against the rule of Kubernetes' autoscaler, {where}"),
            Figure(f"{prefix}gap_to_perfect_closed_pct", closed, "%", ">= 50",
                   f"from that rule's GPU-hours to those of one who knows the future, {where}"),
            Figure(f"{prefix}gpu_hours_saved_against_loop_pct", loop, "%", ">= 0",
                   f"LSTM forecaster against the loop of 5 s alone, {where}"),
        ]  # fmt: skip
    return figures


WHAT = {
    "week": "Wednesday of the digitised Azure code week",
    "ramp": "five mornings with a fivefold rise in five minutes",
}


def measure(traces: Path, told: Callable[[str], None]) -> tuple[list[Figure], dict[str, Any]]:
    """Play everything.

    Args:
        traces: the folder of the public traces.
        told: is told what has been done.

    Returns:
        The figures, and the curves they are read from.
    """
    made = forecasters()
    jobs: dict[str, dict[tuple[str, int, str], Job]] = {}
    with TemporaryDirectory(prefix="twinkeel-") as scratch:
        folder = Path(scratch)
        whole = week(folder, traces, SEED)
        days = [week_day(folder, whole, DAY)]
        mornings = [ramp(folder, point) for point in POINTS]
        for load, scenes in (("week", days), ("ramp", mornings)):
            files = record(folder, scenes, made)
            told(f"{load}: forecasts are recorded")
            jobs[load] = jobs_of(load, scenes, files)
        curves = {load: played(jobs[load], told) for load in jobs}
    figures = figures_of(curves)
    plain = {
        "curves": {
            load: {title: [point._asdict() for point in points] for title, points in found.items()}
            for load, found in curves.items()
        },
        "gpu_hours_at": {
            load: {
                title: {share: hours_at(points, share) for share in SHARES}
                for title, points in found.items()
            }
            for load, found in curves.items()
        },
        "violations_at": LEVELS,
        "window_s": WINDOW_S,
        "cold_start_s": COLD_START_S,
    }
    return figures, plain


def draw(plain: dict[str, Any], path: Path) -> None:
    """GPU-hours against violations, rule by rule."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    mpl.rcParams["svg.hashsalt"] = "worth"
    sheet, both = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for axes, (load, curves) in zip(both, plain["curves"].items(), strict=True):
        for rule in RULES:
            points = [Point(**point) for point in curves[rule.title]]
            kept = front(points)
            shares = [100 * max(point.share, 0.5 / point.offered) for point in kept]
            axes.plot(
                [point.gpu_hours for point in kept], shares, "o-", label=rule.title, markersize=4
            )
        axes.axhline(100 * plain["violations_at"][load], color="0.6", linewidth=0.8, zorder=0)
        axes.set_yscale("log")
        axes.set_title(WHAT[load], fontsize=9)
        axes.set_xlabel("GPU-hours", fontsize=8)
        axes.set_ylabel("violations, % of requests", fontsize=8)
        axes.tick_params(labelsize=8)
    both[0].legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.savefig(path, metadata={"Date": None})
    plt.close(sheet)


def main() -> int:
    traces = Path(os.environ.get("TWINKEEL_DATA", "../shared")) / "traces"
    figures, plain = measure(traces, lambda line: print(line, flush=True))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    write_figures(OUT.with_name("worth.figures.json"), figures)
    draw(plain, CHART)
    for figure in figures:
        value = "no value" if figure.value is None else f"{figure.value:.1f}"
        print(f"{figure.name:<40}{value:>10} {figure.unit}  goal {figure.goal}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
