"""A scenario's outcome on the terminal: the claims, and a few figures of each run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from twin.scenario.result import ScenarioResult

SHOWN = (
    ("offered", "all.offered", "{:.0f}"),
    ("good", "all.good_share", "{:.1%}"),
    ("shed", "all.shed_share", "{:.1%}"),
    ("failed", "all.failed_share", "{:.1%}"),
    ("TTFT p50 s", "all.ttft_s.p50", "{:.2f}"),
    ("TTFT p99 s", "all.ttft_s.p99", "{:.2f}"),
    ("good/s", "all.good_per_s", "{:.1f}"),
    ("GPU h", "fleet.gpu_hours", "{:.2f}"),
)


def runs_table(result: ScenarioResult) -> Table:
    """One row a run, medians over the seeds."""
    seeds = len(result.seeds)
    title = f"{result.name}: median of {seeds} seeds" if seeds > 1 else result.name
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("run", no_wrap=True)
    for name, _, _ in SHOWN:
        table.add_column(name, justify="right")
    for run in result.runs:
        summary = result.summary(run)
        cells = [
            form.format(summary[path][0]) if path in summary else "-" for _, path, form in SHOWN
        ]
        table.add_row(run, *cells)
    return table


def claims_table(result: ScenarioResult) -> Table:
    """One row an expectation: the median, the least and greatest of the seeds, whether it holds."""
    table = Table(title="claims", title_justify="left", box=SIMPLE_HEAD)
    table.add_column("claim")
    for name in ("goal", "median", "least..greatest", "seeds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("holds")
    for verdict in result.verdicts:
        expectation = verdict.expectation
        goal = f"{expectation.goal} {expectation.unit}".strip()
        if verdict.value is None or verdict.low is None or verdict.high is None:
            figures = ("no figure", "-")
        else:
            figures = (f"{verdict.value:.4g}", f"{verdict.low:.4g}..{verdict.high:.4g}")
        seeds = f"{verdict.holds_in}/{len(verdict.by_seed)}"
        mark = "[green]yes[/green]" if verdict.holds else "[red]NO[/red]"
        table.add_row(expectation.name, goal, *figures, seeds, mark)
    for name in result.skipped:
        table.add_row(name, "-", "-", "-", "-", "not run")
    return table
