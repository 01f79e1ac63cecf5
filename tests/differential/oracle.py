"""Record fresh schedules with vLLM's own scheduler and hold the twin's engine against them.

    python -m tests.differential.oracle --workloads 1300

Runs in the project's environment; vLLM runs in its own (see `tests/live/vllm_env`). Prints a table
of families and of rare paths and writes `build/figures/oracle.json`. Ends with 1 if a schedule
differs, or if a figure is absent or misses its goal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.differential.compare import Difference, compare
from tests.differential.probe import RARE_PATHS
from tests.differential.workloads import Workload, dump, load, workloads
from tests.figures import Figure, require, write_figures
from tests.live.vllm_env.ensure import environment, python_of, tiny_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
SHOWN_DIFFERENCES = 5
REQUIRED = ("workloads", "schedules_equal_pct", "async_schedules_equal_pct")


@dataclass(slots=True)
class Tally:
    """What a set of comparisons came to."""

    workloads: int = 0
    requests: int = 0
    steps: int = 0
    equal: int = 0
    paths: Counter[str] = field(default_factory=Counter)
    """How many times each rare path was taken."""
    touched: Counter[str] = field(default_factory=Counter)
    """How many workloads took it."""

    def add(self, line: dict[str, Any], is_equal: bool) -> None:
        """Count one comparison."""
        self.workloads += 1
        self.requests += len(line["workload"]["requests"])
        self.steps += len(line["steps"])
        self.equal += is_equal
        self.paths.update(line["paths"])
        self.touched.update(path for path, count in line["paths"].items() if count)

    @property
    def equal_pct(self) -> float:
        """Share of equal schedules; exactly 100 only if all are."""
        return 100.0 * self.equal / self.workloads if self.workloads else 0.0


@dataclass(slots=True)
class Report:
    """All comparisons, by family and by mode."""

    families: dict[str, Tally] = field(default_factory=dict)
    modes: dict[bool, Tally] = field(default_factory=lambda: {False: Tally(), True: Tally()})
    total: Tally = field(default_factory=Tally)
    differences: list[Difference] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """Compare one recorded line."""
        workload = Workload.from_json(line["workload"])
        difference = compare(workload, line["steps"])
        if difference is not None:
            self.differences.append(difference)
        family = self.families.setdefault(workload.family, Tally())
        for tally in (self.total, self.modes[workload.async_scheduling], family):
            tally.add(line, difference is None)


def record(out: Path, chosen: Iterable[Workload]) -> None:
    """Have vLLM record these workloads into `out`."""
    env = environment()
    out.parent.mkdir(parents=True, exist_ok=True)
    listed = out.with_suffix(".workloads")
    listed.write_text("".join(f"{dump(workload)}\n" for workload in chosen), encoding="utf-8")
    command = [
        python_of(env), "-m", "tests.differential.record", "--model", str(tiny_model(env)),
        "--workloads", str(listed), "--out", str(out),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})


def recorded(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a recording."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def report_on(lines: Iterable[dict[str, Any]]) -> Report:
    """Compare every line."""
    report = Report()
    for line in lines:
        report.add(line)
    return report


def figures(report: Report) -> list[Figure]:
    """The figures of a report."""
    how = "vLLM's own scheduler and the twin's engine, step by step, on seeded random workloads"
    total = report.total
    rows = [
        Figure("workloads", total.workloads, "workloads", ">= 500", how),
        Figure("schedules_equal_pct", total.equal_pct, "%", "= 100", how),
        Figure(
            "async_schedules_equal_pct",
            report.modes[True].equal_pct,
            "%",
            "= 100",
            f"the {report.modes[True].workloads} of them with async scheduling",
        ),
        Figure("steps_compared", total.steps, "steps", ">= 50000", how),
    ]
    for path, meaning in RARE_PATHS.items():
        taken = f"{meaning}; {total.paths[path]} times, counted on vLLM's scheduler"
        rows.append(Figure(f"path_{path}", total.touched[path], "workloads", ">= 1", taken))
    return rows


def table(report: Report) -> str:
    """Families and rare paths, for people."""
    counted = f"{'workloads':>10}{'requests':>10}{'steps':>9}{'preempted':>10}{'equal':>8}"
    lines = [f"{'family':14}{counted}"]
    named = [*sorted(report.families.items()), ("sync", report.modes[False])]
    for name, tally in [*named, ("async", report.modes[True]), ("all", report.total)]:
        counts = f"{tally.workloads:>10}{tally.requests:>10}{tally.steps:>9}"
        lines.append(f"{name:14}{counts}{tally.paths['preempted']:>10}{tally.equal_pct:>7.1f}%")
    lines.append("")
    lines.append(f"{'rare path':32}{'workloads':>10}{'times':>8}")
    for path, meaning in RARE_PATHS.items():
        counts = f"{report.total.touched[path]:>10}{report.total.paths[path]:>8}"
        lines.append(f"{path:32}{counts}  {meaning}")
    return "\n".join(lines)


def show_differences(report: Report) -> None:
    """The first differences, and the workloads of all of them for a rerun."""
    for difference in report.differences[:SHOWN_DIFFERENCES]:
        print(difference)
    if report.differences:
        path = BUILD / "oracle" / "different.workloads"
        lines = [dump(difference.workload) for difference in report.differences]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{len(report.differences)} schedules differ; their workloads are in {path}")


def main() -> int:
    """Record, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", type=int, default=1300)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--rerun", type=Path, help="a file of workload lines, in place of seeds")
    parser.add_argument("--recorded", type=Path, help="compare with this recording, run no vLLM")
    options = parser.parse_args()
    started = time.monotonic()
    recording = options.recorded or BUILD / "oracle" / "recorded.jsonl"
    if options.recorded is None:
        chosen = workloads(options.workloads, options.first_seed)
        if options.rerun:
            lines = options.rerun.read_text(encoding="utf-8").splitlines()
            chosen = (load(line) for line in lines)
        record(recording, chosen)
    compared = time.monotonic()
    report = report_on(recorded(recording))
    print(table(report))
    show_differences(report)
    rows = figures(report)
    write_figures(BUILD / "figures" / "oracle.json", rows)
    complaints = require(rows, REQUIRED)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    ended = time.monotonic()
    print(f"recorded in {compared - started:.0f} s, compared in {ended - compared:.0f} s")
    return 1 if complaints or report.differences else 0


if __name__ == "__main__":
    sys.exit(main())
