"""The fault scorecard: ``make scorecard``.

Every drill runs against the controller with two twin-served replicas, and its row is printed beside
what other gateways showed in the same drill. ``--against bare`` runs them against a plain
pass-through, which shows that the drills can fail.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from tests.bench.gateway import drills_faults, drills_load, drills_own
from tests.bench.gateway.yard import Yard
from tests.figures import require, write_figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.gateway.drill import Drill, Outcome
    from tests.figures import Figure

OUT = Path("build/scorecard")
FIGURES = Path("build/figures/scorecard.json")
REQUIRED = (
    "a500_errors", "a500_tries", "killed_errors", "killed_steady_s", "overload_tries",
    "overload_recovery_s", "storm400_ok", "hang_lost", "stall_timeouts", "reset_cut",
    "empty_passed", "sigterm_cut", "upstream_busy_after_1s", "jain", "lowest_tier_share_pct",
    "p0_over_3s",
)  # fmt: skip
GROUPS: tuple[tuple[tuple[Drill, ...], int], ...] = (
    (drills_faults.DRILLS, 0),
    (drills_own.DRILLS, 0),
    (drills_load.DRILLS, drills_load.SEATS),
)
"""Drills, and how many requests their replicas run at a time (0: as many as they can)."""
WIDTHS = (58, 16, 14, 26, 34)


def row(cells: Sequence[str]) -> str:
    return "  ".join(cell[:width].ljust(width) for cell, width in zip(cells, WIDTHS, strict=True))


def held(figures: Sequence[Figure]) -> str:
    missed = [figure.name for figure in figures if not figure.holds]
    return "holds" if not missed else "MISSED " + ", ".join(missed)


async def drills(
    names: Sequence[str], against: str, more: Sequence[str]
) -> list[tuple[Drill, Outcome]]:
    """Run those whose name is given, or all."""
    found = []
    for group, seats in GROUPS:
        chosen = [drill for drill in group if not names or drill.run.__name__ in names]
        if not chosen:
            continue
        yard = Yard(OUT, against, seats, more)
        try:
            await yard.start()
            for drill in chosen:
                began_s = time.monotonic()
                yard.drill = drill.run.__name__
                try:
                    outcome = await drill.run(yard)
                except Exception:  # the others shall still run; what is absent is complained of
                    print(f"{drill.run.__name__} broke off:\n{traceback.format_exc()}", flush=True)
                    continue
                found.append((drill, outcome))
                took_s = time.monotonic() - began_s
                known = drill.published
                cells = (known.drill, known.best, known.most, known.bar, outcome.words)
                print(f"{row(cells)}  {held(outcome.figures)} ({took_s:.0f} s)", flush=True)
        finally:
            await yard.stop()
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="The fault scorecard.")
    parser.add_argument("names", nargs="*", help="drills to run; all if none is given")
    parser.add_argument("--against", choices=("controller", "bare"), default="controller")
    parser.add_argument("--option", action="append", default=[], help="of `twinkeel serve`")
    parser.add_argument("--list", action="store_true", help="name the drills")
    chosen = parser.parse_args(argv)
    if chosen.list:
        for group, _ in GROUPS:
            for drill in group:
                print(f"{drill.run.__name__:<14}{drill.published.drill}")
        return 0
    shutil.rmtree(OUT, ignore_errors=True)
    print(row(("drill", "best peer", "most peers", "our bar", chosen.against)))
    found = uvloop.run(drills(chosen.names, chosen.against, chosen.option))
    figures = [figure for _, outcome in found for figure in outcome.figures]
    print()
    for figure in figures:
        kept = "holds" if figure.holds else "MISSED"
        print(f"{figure.name:<26}{figure.value:>10.4g} {figure.unit:<4}{figure.goal:<8}{kept:<7}")
        print(f"    {figure.how}")
    if chosen.names or chosen.against != "controller":
        return 0
    write_figures(FIGURES, figures)
    print("\n".join(require(figures, REQUIRED)) or "all figures hold")
    return int(bool(set(REQUIRED) - {figure.name for figure in figures}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
