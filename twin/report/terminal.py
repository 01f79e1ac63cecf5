"""The comparison in a terminal of 100 columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twin.report.figures import (
    differences,
    duration_rows,
    fleet_text,
    group_name,
    group_of,
    labels_of,
    names_in,
    overall_rows,
    slo_text,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

    from twin.replay import Replay
    from twin.report.figures import Row
    from twin.summary import Group

SIDE_BY_SIDE = 3
"""Policies in one table of latencies; more go into tables below each other."""
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
    parts: list[RenderableType] = [head, _overall(replays, labels)]
    for start in range(0, len(replays), SIDE_BY_SIDE):
        some = replays[start : start + SIDE_BY_SIDE]
        names = labels[start : start + SIDE_BY_SIDE]
        parts.append(_latencies("by SLA class", "sla", some, names))
        tiered = [place for place, run in enumerate(some) if any(names_in([run], "tier"))]
        if tiered:
            with_tiers = [some[place] for place in tiered]
            parts.append(_latencies("by tier", "tier", with_tiers, [names[i] for i in tiered]))
    notes = (
        "TTFT counts from arrival at the controller. Quantiles are within 0.5 %. GPU busy: mean "
        "over replicas of the share of time in which a step was running."
    )
    if len(replays) > 1:
        notes += " Bold: better by more than 1 %."
    parts.append(Text(notes, "dim"))
    return Stack(*parts)


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
    groups: list[tuple[str, list[Group | None]]] = [
        (group_name(kind, name), [group_of(replay, kind, name) for replay in replays])
        for name in names_in(replays, kind)
    ]
    if kind == "sla":
        groups.insert(0, ("all", [replay.summary.all for replay in replays]))
    for name, members in groups:
        for place, rows in enumerate(duration_rows(members).values()):
            marked = [_marked(row) for row in rows.values()]
            cells = [column[run] for run in range(len(replays)) for column in marked]
            out.add_row(Text(name if place == 0 else ""), rows["p50"].name, *cells)
        out.add_section()
    return out


def _marked(row: Row) -> list[Text]:
    from rich.text import Text

    best = row.best()
    return [Text(text, BEST if place in best else "") for place, text in enumerate(row.texts())]


def _table(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        title=title or None, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
        pad_edge=False, padding=(0, 1, 0, 0), header_style="bold",
    )  # fmt: skip
