"""All requests of a run, by tier, class, line, failure domain and stretch of time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.figures.columns import CODES, Columns, Row
from twin.figures.group import Group
from twin.summary import Slo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twin.arrivals import Chunk
    from twin.figures.columns import Array
    from twin.figures.measure import Measure

HELD_ROWS = 8192
KINDS = {"tier": "by_tier", "sla": "by_class", "line": "by_line"}


class Requests:
    """Gathers settled requests, whatever order they come in, in bounded memory.

    ``domains``: the failure domain of each replica, by its id.
    """

    def __init__(self, measure: Measure, domains: Sequence[str]) -> None:
        plain = Slo()
        ttft_s = {**plain.ttft_s, **measure.ttft_s}
        self._slo = replace(plain, ttft_s=ttft_s, tpot_s=measure.tpot_s)
        self._measure = measure
        self._domains = domains
        self._held: list[Row] = []
        self._all = self._group("")
        self._groups: dict[str, dict[str, Group]] = {name: {} for name in KINDS.values()}
        self._spans = {name: {"all": self._group("")} for name in measure.spans}
        self._settled_in = dict.fromkeys(measure.spans, 0)
        self._by_domain = {name: {"sent": 0, "failed": 0} for name in domains}

    def add_chunk(self, chunk: Chunk) -> None:
        """A chunk of open-loop requests, all of them settled."""
        columns = (chunk.sla, chunk.line, chunk.deadline_ns, chunk.results)
        self._held.extend(Row(*row) for row in zip(*columns, strict=True))
        if len(self._held) >= HELD_ROWS:
            self._flush()

    def add(self, row: Row) -> None:
        """One request of a closed-loop client."""
        self._held.append(row)
        if len(self._held) >= HELD_ROWS:
            self._flush()

    @property
    def last_s(self) -> float:
        """The last settlement that ``figures`` knows of."""
        return self._all.last_s

    def figures(self) -> dict[str, Any]:
        """Everything, as nested plain values."""
        self._flush()
        span_s = self._all.span_s
        out: dict[str, Any] = {"span_s": span_s, "all": self._all.figures(span_s)}
        for kind, groups in self._groups.items():
            out[kind] = {name: group.figures(span_s) for name, group in sorted(groups.items())}
        out["by_domain"] = self._by_domain
        out["spans"] = {name: self._span_figures(name) for name in self._spans}
        out["above_s"] = {name: self._above_s(name) for name in self._measure.above}
        return out

    def _flush(self) -> None:
        if not self._held:
            return
        columns = Columns(self._held, self._slo, self._measure)
        self._held = []
        rows = np.flatnonzero(columns.arrival_s >= self._measure.warm_up_s)
        self._all.add(columns, rows)
        for attribute, kind in KINDS.items():
            names = getattr(columns, attribute)
            for name, part in _parts(names, rows):
                self._of(self._groups[kind], name).add(columns, part)
        for name, span in self._measure.spans.items():
            at_s = columns.arrival_s
            inside = np.flatnonzero((at_s >= span.from_s) & (at_s < span.to_s))
            groups = self._spans[name]
            groups["all"].add(columns, inside)
            for sla, part in _parts(columns.sla, inside):
                self._of(groups, sla).add(columns, part)
            served = columns.settled_s[~np.isnan(columns.e2e_s)]
            self._settled_in[name] += int(((served >= span.from_s) & (served < span.to_s)).sum())
        self._count_domains(columns, rows)

    def _count_domains(self, columns: Columns, rows: Array) -> None:
        replica = columns.replica[rows]
        failed = columns.outcome[rows] == CODES["failed"]
        for number, name in enumerate(self._domains):
            here = replica == number
            self._by_domain[name]["sent"] += int(here.sum())
            self._by_domain[name]["failed"] += int((here & failed).sum())

    def _span_figures(self, name: str) -> dict[str, Any]:
        span = self._measure.spans[name]
        length_s = span.to_s - span.from_s
        figures = {group: made.figures(length_s) for group, made in self._spans[name].items()}
        return {**figures, "served_within_per_s": self._settled_in[name] / length_s}

    def _above_s(self, name: str) -> float:
        above = self._measure.above[name]
        kind, _, value = above.group.partition(".")
        group = self._groups[kind].get(value) if value else self._all
        return group.windows.above_s(above.limit_s) if group is not None else 0.0

    def _of(self, groups: dict[str, Group], name: str) -> Group:
        group = groups.get(name)
        if group is None:
            group = groups[name] = self._group(name)
        return group

    def _group(self, name: str) -> Group:
        return Group(self._measure, self._slo.limit_s(name))


def _parts(names: tuple[str, ...], rows: Array) -> list[tuple[str, Array]]:
    """The rows of each name, names in order; rows without a name belong to none."""
    column = np.array(names)[rows]
    return [(name, rows[column == name]) for name in sorted(set(column.tolist())) if name]
