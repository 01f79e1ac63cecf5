"""Whole random runs, each held to every invariant: ``python -m tests.dst --scenarios 2000``.

One integer gives a run: ``--seed`` is the first, and a failing one is told with the command that
plays it again. What the runs came by is counted, so that a run of runs that never opened a breaker
is seen to have proved nothing about breakers.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.dst.runs import Played, play, play_all
from tests.figures import Figure, require, write_figures

if TYPE_CHECKING:
    from collections.abc import Iterator

FIGURES = Path("build/figures/dst.json")
BLOCK = 20
"""Scenarios handed to a process at a time."""
SEEN = {
    "answered": "Settled answered",
    "degraded": "Settled degraded",
    "shed": "Settled shed",
    "failed": "Settled failed",
    "cancelled": "Settled cancelled",
    "aborts": "Abort",
    "breaker_opened": "BreakerMoved open",
    "breaker_half_open": "BreakerMoved half_open",
    "breaker_closed": "BreakerMoved closed",
    "looked_up": "LookedUp",
    "verified_match": "Verified match",
    "verified_mismatch": "Verified mismatch",
    "checkpoints": "CheckpointSaved",
    "ejected": "Rotated ejected",
    "probed": "Rotated probing",
    "back_in": "Rotated in",
    "isolated": "Rotated isolated",
    "drained": "Rotated draining",
    "progress_read": "Progress",
    "started": "Start",
    "stopped": "Stop",
    "warmed": "Warmed",
    "scaled": "Scaled",
    "alerts": "Alert",
    "switches": "PolicySwitched",
    "resets": "Reset",
    "crashes": "Restored",
    "replicas_lost": "Failed replica_lost",
}
"""Figures that say what the runs came by, and how ``Checker`` counts it."""


def play_in_processes(first: int, scenarios: int, jobs: int) -> Iterator[Played]:
    """The blocks, each as soon as it and those before it are done."""
    blocks = [
        range(start, min(start + BLOCK, first + scenarios))
        for start in range(first, first + scenarios, BLOCK)
    ]
    if jobs == 1:
        yield from map(play_all, blocks)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(play_all, blocks)


def figures(played: Played, goal: int) -> list[Figure]:
    """What is written down."""
    how = "random whole runs, each step checked"
    rows = [
        Figure("scenarios", played.scenarios, "1", f">= {goal}", how),
        Figure("scenarios_on_engines", played.on_engines, "1", ">= 1", "in the twin's world"),
        Figure("invariants_broken", len(played.broken), "1", "= 0", how),
        Figure("steps", played.steps, "1", f">= {goal}", "events fed to the policy"),
    ]
    rows += [
        Figure(f"seen_{name}", played.seen[counted], "1", ">= 1", f"times the runs saw {counted}")
        for name, counted in SEEN.items()
    ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dst", description=__doc__)
    parser.add_argument("--scenarios", type=int, default=0, help="how many; 0: 2000, or one --seed")
    parser.add_argument("--seed", type=int, help="of the first one; alone: play just this one")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    options = parser.parse_args()
    if options.seed is not None and not options.scenarios:
        steps = play(options.seed)
        print(f"seed {options.seed}: {steps} steps, every invariant holds")
        return 0
    scenarios = options.scenarios or 2000
    played = Played()
    begin_s = time.monotonic()
    for block in play_in_processes(options.seed or 0, scenarios, options.jobs):
        played.add(block)
        for seed, what in block.broken:
            print(f"\n{what}\n  again: python -m tests.dst --seed {seed}")
        print(f"\r{played.scenarios} of {scenarios}, {len(played.broken)} broken", end="")
    took_s = time.monotonic() - begin_s
    rows = figures(played, scenarios)
    print(f" in {took_s:.0f} s, {took_s / scenarios:.3f} s each\n")
    for row in rows:
        print(f"{row.name:<24}{row.value:>12,.0f}  {row.goal:<10}{'' if row.holds else 'missed'}")
    write_figures(FIGURES, rows)
    complaints = require(rows, ())
    print("\n".join(complaints) or "all figures hold")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
