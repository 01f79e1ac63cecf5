"""What the mechanisms are claimed to do, measured: ``make scenarios`` and ``make scenarios-long``.

Every shipped scenario is played with all of its runs and seeds, two at a time, each in a process of
its own. What it expects becomes figures; the whole result of each stays in ``build/scenarios``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.figures import Figure, require, write_figures
from twin.scenario import scenario_names

OUT = Path("build/scenarios")
LONG = ("soak-48h",)
"""Hours of CPU."""
HEAVY = ("soak-1h", "placement", "forecast-ramp")
"""The longest first, so that two processes end at about the same time."""
REQUIRED = (
    "p0_wait_p95_s", "p0_wait_sd_cut_pct", "batch_throughput_loss_pct", "p99_sd_ms",
    "p99_sd_vs_least_loaded", "mig_failed_outside", "ecc_replaced_s", "ecc_avoidable_errors",
    "storm_loss_pct", "budget_loss_pct", "bad_answers_cut_pct", "opens_per_incident",
    "session_wait_ratio", "mixed_contexts", "chain_useful_gain_points", "ramp_violations_cut_pct",
    "soak_1h_failed_pct",
)  # fmt: skip


def play(name: str) -> None:
    """Play a scenario; what came of it is in ``result.json``."""
    out = OUT / name
    began_s = time.perf_counter()
    command = [sys.executable, "-m", "twinkeel", "scenario", "run", name, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a claim does not hold
        raise RuntimeError(f"{name} could not be played:\n{done.stderr}")
    print(f"{name}: {time.perf_counter() - began_s:.0f} s", flush=True)


def figures_of(name: str, result: dict[str, Any]) -> list[Figure]:
    """Its expectations, with the interval over the seeds in words."""
    figures = []
    for claim in result["expect"]:
        value = claim["value"]
        if value is None or ".." in claim["goal"]:
            continue
        seeds = len(result["seeds"])
        spread = f"{seeds} seeds: {claim['low']:.4g} to {claim['high']:.4g}"
        how = "; ".join(filter(None, (claim["how"], spread if seeds > 1 else "", name)))
        goal = claim["goal"].replace("==", "=")
        figures.append(Figure(claim["name"], value, claim["unit"] or "1", goal, how))
    return figures


def last(name: str) -> dict[str, Any]:
    """What came of the last time it was played."""
    result: dict[str, Any] = json.loads((OUT / name / "result.json").read_text(encoding="utf-8"))
    return result


def main(names: list[str], again: list[str], target: str, required: tuple[str, ...]) -> int:
    """Play ``again``, and judge all of ``names``."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(play, again))
    figures = [figure for name in names for figure in figures_of(name, last(name))]
    for figure in figures:
        held = "holds" if figure.holds else "MISSED"
        print(f"{figure.name:<58}{figure.value:>12.4g} {figure.unit:<8}{figure.goal:<12}{held}")
    write_figures(Path(f"build/figures/{target}.json"), figures)
    complaints = require(figures, required)
    print("\n".join(complaints) or "all figures hold")
    return int(bool(set(required) - {figure.name for figure in figures}))


if __name__ == "__main__":
    if sys.argv[1:] == ["--long"]:
        sys.exit(main(list(LONG), list(LONG), "scenarios-long", ()))
    shipped = [name for name in scenario_names() if name not in LONG]
    ordered = [name for name in HEAVY if name in shipped]
    ordered += [name for name in shipped if name not in HEAVY]
    # With names given only these are played, and the rest is taken from the time before.
    chosen = [name for name in ordered if name in sys.argv[1:] or not sys.argv[1:]]
    sys.exit(main(ordered, chosen, "scenarios", REQUIRED))
