"""How well the forecaster predicts, and what that is worth: ``make forecast-bench``.

Seven series, three rolling-origin splits; every score is a share of the last value's. Writes
``build/figures/forecast-bench.json``, the table of all series and the curves to
``build/forecast/``, and a chart for docs/forecast.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from policy.forecast.baselines import Arima, DampedHolt, Kalman, LastValue, SeasonalNaive
from policy.forecast.forecaster import LoadForecaster, Online
from policy.forecast.series import TARGETS
from tests.bench.forecast import worth
from tests.bench.forecast.loads import all_loads
from tests.bench.forecast.scoring import calibrated, coverage, mean_ratio, pooled, score
from tests.figures import Figure, read_figures, require, show, write_figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.forecast.loads import Load
    from tests.bench.forecast.scoring import Scored

FIGURES = Path("build/figures/forecast-bench.json")
FOLDER = Path("build/forecast")
HORIZONS = (1, 2, 3, 4, 6, 8, 12)
SPLITS = ((0.55, 0.70), (0.70, 0.85), (0.85, 1.0))
"""Shares of a series: fitted to what is before the first, tested up to the second."""
REFERENCE = "last value"
OURS = "forecaster"
COVERED, WITHIN = 95.0, 1.5
STEPS = 200
"""Of which the time of one is measured."""
REQUIRED = (
    "wape1", "wape2", "pinball95_mean1", "pinball95_mean2", "pinball95_peak1", "pinball95_peak2",
    "coverage_series_held", "worst_series_wape", "azure_code_30min_wape", "train_s", "infer_ms",
    "gpu_hours_saved_pct", "gap_to_perfect_closed_pct",
)  # fmt: skip
Scores = dict[tuple[str, str, str], "Scored"]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(loads: Sequence[Load]) -> tuple[Scores, list[float], LoadForecaster]:
    """All scores by (forecaster, series, target), the seconds of each training, and the last
    forecaster that was trained."""
    parts: dict[tuple[str, str, str], list[Scored]] = {}
    train_s: list[float] = []
    for begin, end in SPLITS:
        past = [load.series.until(int(begin * len(load.series))) for load in loads]
        ours = LoadForecaster(HORIZONS)
        began_s = time.perf_counter()
        ours.fit(past)
        train_s.append(time.perf_counter() - began_s)
        others = {
            REFERENCE: LastValue(HORIZONS), "seasonal naive": SeasonalNaive(HORIZONS),
            "damped Holt": DampedHolt(HORIZONS), "ARIMA(2,1,2)": Arima(HORIZONS),
            "Kalman": Kalman(HORIZONS),
        }  # fmt: skip
        for other in others.values():
            other.fit(past)
        others |= {"boosting": ours.boosting_, "LSTM": ours.lstm_, "regression": ours.regression_}
        for load in loads:
            series = load.series
            first, last = int(begin * len(series)) - 1, int(end * len(series))
            for target in TARGETS[: 1 + bool(len(series.peak))]:
                told = {
                    name: calibrated(other, series, first, last, target)
                    for name, other in others.items()
                }
                told[OURS] = ours.predict(series, np.arange(first, last), target)
                for name, forecast in told.items():
                    scored = score(forecast, series, HORIZONS, first, last, target)
                    parts.setdefault((name, series.name, target), []).append(scored)
        _say(f"split {begin:.0%} to {end:.0%}: trained in {train_s[-1]:.1f} s")
    return {key: pooled(found) for key, found in parts.items()}, train_s, ours


def step_ms(forecaster: LoadForecaster, load: Load) -> float:
    """Median time of one window: what is known is taken in, and both targets are forecast."""
    series = load.series
    first = len(series) - STEPS
    online = Online(forecaster, series.until(first))
    taken = []
    for window in range(first, len(series)):
        began_s = time.perf_counter()
        online.observe(float(series.mean[window]), float(series.peak[window]))
        online.predict()
        taken.append(time.perf_counter() - began_s)
    return 1e3 * float(np.median(taken))


def ratios(scores: Scores, name: str, series: str, target: str) -> list[float]:
    """WAPE and pinball loss at .95, each one and two steps ahead, over those of the last value."""
    own, reference = scores[name, series, target], scores[REFERENCE, series, target]
    wape = own.absolute / reference.absolute
    loss = own.upper_loss / reference.upper_loss
    return [float(value) for value in (wape[0], wape[1], loss[0], loss[1])]


def figures(
    scores: Scores, loads: Sequence[Load], train_s: Sequence[float], infer_ms: float
) -> list[Figure]:
    """Those with goals."""
    names = [load.series.name for load in loads]
    peaked = [load.series.name for load in loads if len(load.series.peak)]
    mean = mean_ratio([ratios(scores, OURS, name, "mean") for name in names])
    peak = mean_ratio([ratios(scores, OURS, name, "peak") for name in peaked])
    arima = mean_ratio([ratios(scores, "ARIMA(2,1,2)", name, "mean") for name in names])
    arima_peak = mean_ratio([ratios(scores, "ARIMA(2,1,2)", name, "peak") for name in peaked])
    split = f"{len(SPLITS)} rolling-origin splits"
    over = f"geometric mean over {len(names)} series of the ratio to the last value, {split}"
    over_peaks = f"the same of the peaks of {len(peaked)} series"
    found = [
        Figure("wape1", round(mean[0], 4), "1", "<= 0.93", f"{over}; ARIMA {arima[0]:.3f}"),
        Figure("wape2", round(mean[1], 4), "1", "<= 0.87", f"two steps; ARIMA {arima[1]:.3f}"),
        Figure(
            "pinball95_mean1", round(mean[2], 4), "1", "<= 0.82", f"{over}; ARIMA {arima[2]:.3f}"
        ),
        Figure(
            "pinball95_mean2", round(mean[3], 4), "1", "<= 0.76", f"two steps; ARIMA {arima[3]:.3f}"
        ),
        Figure(
            "pinball95_peak1", round(peak[2], 4), "1", "<= 0.74",
            f"{over_peaks}; ARIMA {arima_peak[2]:.3f}",
        ),
        Figure(
            "pinball95_peak2", round(peak[3], 4), "1", "<= 0.71",
            f"{over_peaks}, two steps; ARIMA {arima_peak[3]:.3f}",
        ),
    ]  # fmt: skip
    held, told = 0, []
    for load in loads:
        name = load.series.name
        share, low, high = coverage(scores[OURS, name, "mean"], load.series.window_s)
        held += abs(share - COVERED) <= WITHIN or low <= COVERED <= high
        told.append(f"{name} {share:.1f} ({low:.1f} to {high:.1f})")
    found.append(
        Figure(
            "coverage_series_held", float(held), "series", f"= {len(names)}",
            "within 1.5 of 95 % one step ahead, or the block bootstrap's interval holds 95: "
            + ", ".join(told),
        )
    )  # fmt: skip
    worst = max((max(ratios(scores, OURS, name, "mean")[:2]), name) for name in names)
    found.append(
        Figure(
            "worst_series_wape", round(worst[0], 4), "1", "<= 1.02",
            f"against the last value, one or two steps: {worst[1]}",
        )
    )  # fmt: skip
    code = loads[0]
    column = HORIZONS.index(code.steps_30min)
    wape = 100 * float(scores[OURS, code.series.name, "mean"].wape[column])
    arima_wape = 100 * float(scores["ARIMA(2,1,2)", code.series.name, "mean"].wape[column])
    last_wape = 100 * float(scores[REFERENCE, code.series.name, "mean"].wape[column])
    return [
        *found,
        Figure(
            "azure_code_30min_wape", round(wape, 3), "%", "<= 6",
            f"{code.steps_30min * code.series.window_s / 60:.1f} min ahead, {code.kind};"
            f" ARIMA {arima_wape:.2f}, last value {last_wape:.2f}",
        ),
        Figure(
            "train_s", round(max(train_s), 1), "s", "<= 120",
            f"all seven series, {len(HORIZONS)} horizons, the longest of {len(train_s)} trainings"
            f" ({sum(train_s):.0f} s together)",
        ),
        Figure(
            "infer_ms", round(infer_ms, 2), "ms", "<= 5",
            f"a window taken in, mean and peak forecast {len(HORIZONS)} horizons ahead, median",
        ),
    ]  # fmt: skip


def markdown(scores: Scores, loads: Sequence[Load]) -> str:
    """Every forecaster on every series, for the documentation."""
    rows = [
        "| series | kind | forecaster | WAPE 1 | WAPE 2 | pinball 1 | pinball 2 | covered % |",
        "|---|---|---|---|---|---|---|---|",
    ]
    every = list(dict.fromkeys(name for name, _, _ in scores))
    for target in TARGETS:
        chosen = [load for load in loads if target == "mean" or len(load.series.peak)]
        for load in chosen:
            for name in every:
                scored = scores[name, load.series.name, target]
                cells = [f"{value:.3f}" for value in ratios(scores, name, load.series.name, target)]
                label = load.series.name + (" (peak)" if target == "peak" else "")
                share = 100 * scored.covered().mean()
                rows.append(
                    f"| {label} | {load.kind} | {name} | {' | '.join(cells)} | {share:.1f} |"
                )
        for name in every:
            found = mean_ratio([ratios(scores, name, load.series.name, target) for load in chosen])
            cells = [f"**{value:.3f}**" for value in found]
            rows.append(f"| **all, {target}** | | {name} | {' | '.join(cells)} | |")
    return "\n".join(rows) + "\n"


def score_all(traces: Path) -> list[Figure]:
    """The part ``scores``; the table of all series is written beside."""
    loads = all_loads(traces)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # statsmodels', of fits that end early
        scores, train_s, forecaster = measure(loads)
    found = figures(scores, loads, train_s, step_ms(forecaster, loads[0]))
    table = markdown(scores, loads)
    (FOLDER / "series.md").write_text(table, encoding="utf-8")
    print(table)
    return found


def play_all(traces: Path) -> list[Figure]:
    """The part ``worth``; the curves are written and drawn beside."""
    found, curves = worth.measure(traces, _say)
    (FOLDER / "worth.json").write_text(json.dumps(curves, indent=1), encoding="utf-8")
    worth.draw(curves, worth.CHART)
    return found


PARTS = {"scores": score_all, "worth": play_all}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", default=[*PARTS], help="scores, worth; what the other said is kept"
    )
    parts = parser.parse_args(argv).parts
    if unknown := [part for part in parts if part not in PARTS]:
        parser.error(f"no part {unknown[0]!r}: choose from {', '.join(PARTS)}")
    if not os.environ.get("TWINKEEL_DATA"):
        parser.error("set TWINKEEL_DATA to the directory that holds traces/")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for part in parts:
        found = PARTS[part](Path(os.environ["TWINKEEL_DATA"]) / "traces")
        write_figures(FOLDER / f"{part}.figures.json", found)
    every = [figure for part in PARTS for figure in read_figures(FOLDER / f"{part}.figures.json")]
    show(every)
    write_figures(FIGURES, every)
    print("\n".join(require(every, REQUIRED)) or "all figures hold")
    return int(bool(set(REQUIRED) - {figure.name for figure in every}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
