"""The comparison in a terminal of 100 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twin.report.figures import (
    differences,
    duration_rows,
    fleet_text,
    groups_of,
    interval_texts,
    labels_of,
    names_in,
    overall_rows,
    slo_text,
    with_intervals,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from twin.replay import Replay
    from twin.report.figures import Row

SIDE_BY_SIDE = 3
"""Policies in one table of latencies; more go into tables below each other."""
OVERALL_WITH_INTERVALS = 4
"""Policies in one table of whole runs, where figures have intervals."""
COLUMNS = 100
BEST = "bold green"


def table(replays: Sequence[Replay]) -> RenderableType:
    """All figures side by side, the better ones in bold.

    Raises:
        ReportError: there is no replay.
    """
    from rich.console import Group as Stack
    from rich.text import Text

    labels = labels_of(replays)
    first = replays[0]
    head = Text()
    head.append(first.trace, "bold")
    head.append(f" on {fleet_text(first)}, seed {first.options.seed}\n")
    head.append(f"SLO: {slo_text(first)}", "dim")
    unlike = differences(replays)
    if unlike:
        head.append(f"\nnot like with like; different: {', '.join(unlike)}", "bold yellow")
    parts: list[RenderableType] = [head]
    wide = OVERALL_WITH_INTERVALS if with_intervals(replays) else len(replays)
    parts += [_overall(some, names) for some, names in _parts(replays, labels, wide)]
    for some, names in _parts(replays, labels, _side_by_side(replays, labels)):
        parts += _latency_tables(some, names)
    notes = (
        "TTFT counts from arrival at the controller. Quantiles are within 0.5 %. GPU busy: mean "
        "over replicas of the share of time in which a step was running."
    )
    if len(replays) > 1:
        notes += " Bold: better by more than 1 %."
    parts.extend(Text(text, "dim") for text in (notes, *interval_texts(replays)))
    return Stack(*parts)


def _parts(
    replays: Sequence[Replay], labels: Sequence[str], size: int
) -> list[tuple[Sequence[Replay], Sequence[str]]]:
    """So many policies at a time, with their labels."""
    starts = range(0, len(replays), size)
    return [(replays[start : start + size], labels[start : start + size]) for start in starts]


def _side_by_side(replays: Sequence[Replay], labels: Sequence[str]) -> int:
    """How many policies fit into one table of latencies: intervals take room."""
    if not with_intervals(replays):
        return SIDE_BY_SIDE
    from rich.console import Console

    console = Console(width=1000)
    for size in range(SIDE_BY_SIDE, 1, -1):
        parts = _parts(replays, labels, size)
        tables = [table for some, names in parts for table in _latency_tables(some, names)]
        if all(console.measure(table).maximum <= COLUMNS for table in tables):
            return size
    return 1


def _latency_tables(replays: Sequence[Replay], labels: Sequence[str]) -> list[Table]:
    """By SLA class and, of the policies that have tiers, by tier."""
    tables = [_latencies("by SLA class", "sla", replays, labels)]
    tiered = [place for place, run in enumerate(replays) if any(names_in([run], "tier"))]
    if tiered:
        with_tiers = [replays[place] for place in tiered]
        tables.append(_latencies("by tier", "tier", with_tiers, [labels[i] for i in tiered]))
    return tables


def _overall(replays: Sequence[Replay], labels: Sequence[str]) -> Table:
    from rich.text import Text

    out = _table("")
    out.add_column("overall", ratio=1)
    for label in labels:
        out.add_column(Text(label), justify="right", no_wrap=True)
    for row in overall_rows(replays):
        style = "dim" if row.name.startswith(" ") else ""
        out.add_row(Text(row.name), *_marked(row), style=style)
    return out


def _latencies(title: str, kind: str, replays: Sequence[Replay], labels: Sequence[str]) -> Table:
    from rich.text import Text

    out = _table(title)
    out.add_column("", no_wrap=True)
    out.add_column("", no_wrap=True)
    for label in labels:
        for place, quantile in enumerate(("p50", "p95", "p99")):
            head = f"{label if place == 0 else ''}\n{quantile}"
            out.add_column(Text(head), justify="right", no_wrap=True)
    for name, path, members in groups_of(replays, kind):
        for place, rows in enumerate(duration_rows(members, replays, path).values()):
            marked = [_marked(row) for row in rows.values()]
            cells = [column[run] for run in range(len(replays)) for column in marked]
            out.add_row(Text(name if place == 0 else ""), rows["p50"].name, *cells)
        out.add_section()
    return out


def _marked(row: Row) -> list[Text]:
    """Run by run, the figure and below it its interval."""
    from rich.text import Text

    best = row.best()
    cells = []
    for place, (text, between) in enumerate(zip(row.texts(), row.ranges(), strict=True)):
        cell = Text(text, BEST if place in best else "")
        if between:
            cell = Text.assemble(cell, "\n", (between, "dim"))
        cells.append(cell)
    return cells


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        pad_edge=False, padding=(0, 1, 0, 0), header_style="bold",
    )  # fmt: skip
