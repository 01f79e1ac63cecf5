"""The loop, closed in one command, and the figures of each of its links: ``make loop-demo``.

    python -m tests.bench.loop                # everything: more than an hour on two cores
    python -m tests.bench.loop demo           # the loop itself: about a quarter of an hour
    python -m tests.bench.loop canary deploy  # these links' figures anew; the others' are kept

Each link leaves its figures in ``build/loop/LINK.json``; together they are
``build/figures/loop-demo.json``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tests.bench import canaries, deploying, planning, tuning
from tests.bench.loop.demo import play
from tests.figures import Figure, read_figures, require, show, write_figures

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.bench.loop.demo import Seen, Step

FIGURES = Path("build/figures/loop-demo.json")
FOLDER = Path("build/loop")
REQUIRED = (
    "tune_200_trials_s", "tuned_goodput_vs_best_pct", "heldout_gain_reported", "plan_30_cells_s",
    "plan_first_answer_s", "plan_undersized", "knee_error_pct", "interval_coverage_pct",
    "aa_false_rollback_pct", "bad5x_hurt_p95", "bad_hurt_max", "rollback_s", "split_decisions",
    "kill9_history_lost",
)  # fmt: skip


def demo() -> list[Figure]:
    """The loop on live traffic: what callers saw before and after it."""
    before, after, trail = play(FOLDER / "demo")
    _show(before, after, trail)
    how = f"requests in time, of two runs of the same load: {before.good_pct:.1f} % before the loop"
    return [Figure("demo_good_after_pct", after.good_pct, "%", f"> {before.good_pct:.2f}", how)]


def _show(before: Seen, after: Seen, trail: Sequence[Step]) -> None:
    console = Console()
    table = Table("", "before", "after", title="what callers saw")
    table.add_row("requests in time", f"{before.good_pct:.1f} %", f"{after.good_pct:.1f} %")
    table.add_row(
        "P0 TTFT p95", f"{before.p0_ttft_ms_p95:.0f} ms", f"{after.p0_ttft_ms_p95:.0f} ms"
    )
    console.print(table)
    table = Table("link", "what proves it", title="the trail")
    for step in trail:
        table.add_row(step.what, step.proof)
    console.print(table)


def canary(count: int = canaries.RUNS) -> list[Figure]:
    """How often a canary of the same policy is rolled back, and how many a worse one hurts."""
    runs = {kind: canaries.play_kind(kind, count) for kind in canaries.KINDS}
    canaries.show_runs(runs)
    return canaries.figures_of(runs)


LINKS: dict[str, Callable[[], list[Figure]]] = {
    "demo": demo,
    "tune": tuning.tuning_figures,
    "plan": planning.figures,
    "deploy": deploying.figures,
    "canary": canary,
}


def main(words: Sequence[str]) -> int:
    """The exit code: 1 if a figure is absent."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.loop", description=__doc__)
    parser.add_argument("links", nargs="*", metavar="LINK", help=", ".join(LINKS))
    parser.add_argument(
        "--runs", type=int, default=canaries.RUNS, metavar="N", help="of each kind of canary"
    )
    given = parser.parse_args(words)
    chosen = given.links or list(LINKS)
    for name in chosen:
        if name not in LINKS:
            parser.error(f"there is no link {name!r}: use {', '.join(LINKS)}")
    for name in chosen:
        print(f"== {name}", file=sys.stderr, flush=True)
        figures = canary(given.runs) if name == "canary" else LINKS[name]()
        write_figures(FOLDER / f"{name}.json", figures)
    figures = [figure for name in LINKS for figure in read_figures(FOLDER / f"{name}.json")]
    show(figures)
    write_figures(FIGURES, figures)
    print("\n".join(require(figures, REQUIRED)) or "all figures hold")
    return int(bool(set(REQUIRED) - {figure.name for figure in figures}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
