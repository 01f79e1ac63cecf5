"""The figures of a report as tables of plain texts: the same texts as in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twin.report.figures import (
    QUANTILES,
    duration_rows,
    groups_of,
    labels_of,
    names_in,
    overall_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twin.replay import Replay
    from twin.report.figures import Row

Table = dict[str, Any]
"""``title``, ``labels``, ``quantiles`` (empty: a column a label) and ``rows``: each with ``group``
(empty: that of the row above), ``name``, ``note`` and ``cells`` of text, interval and whether it is
the better one."""


def text_tables(replays: Sequence[Replay]) -> list[Table]:
    """The whole runs, then latencies by SLA class and by tier.

    Raises:
        ReportError: there is no replay.
    """
    labels = labels_of(replays)
    overall = [
        {"group": "", "name": row.name, "note": row.note, "cells": _cells(row)}
        for row in overall_rows(replays)
    ]
    tables = [
        _table("overall", labels, overall, ()), _latencies("by SLA class", "sla", replays, labels)
    ]  # fmt: skip
    tiered = [place for place, run in enumerate(replays) if any(names_in([run], "tier"))]
    if tiered:
        some = [replays[place] for place in tiered]
        tables.append(_latencies("by tier", "tier", some, [labels[place] for place in tiered]))
    return tables


def _latencies(
    title: str, kind: str, replays: Sequence[Replay], labels: Sequence[str]
) -> Table:  # fmt: skip
    rows = []
    for name, path, members in groups_of(replays, kind):
        for place, known in enumerate(duration_rows(members, replays, path).values()):
            by_part = [_cells(row) for row in known.values()]
            rows.append({
                "group": name if place == 0 else "", "name": known["p50"].name, "note": "",
                "cells": [part[run] for run in range(len(replays)) for part in by_part],
            })  # fmt: skip
    return _table(title, labels, rows, tuple(QUANTILES))


def _table(
    title: str, labels: Sequence[str], rows: list[Table], quantiles: Sequence[str]
) -> Table:  # fmt: skip
    return {"title": title, "labels": [*labels], "quantiles": [*quantiles], "rows": rows}


def _cells(row: Row) -> list[Table]:
    """Run by run."""
    best = row.best()
    return [
        {"text": text, "between": between, "best": place in best}
        for place, (text, between) in enumerate(zip(row.texts(), row.ranges(), strict=True))
    ]
