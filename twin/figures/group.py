"""The figures of some of the requests: counts, shares with their bounds, distributions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from twin.figures.bounds import upper_share
from twin.figures.columns import CODES
from twin.figures.spread import Spread, Windows

if TYPE_CHECKING:
    from twin.figures.columns import Array, Columns
    from twin.figures.measure import Measure

COUNTS = (
    *CODES, "good", "useful", "useless", "wrong", "slo_missed", "refused", "dropped",
)  # fmt: skip
DURATIONS = ("ttft_s", "queue_s", "e2e_s")


class Group:
    """Some of the requests of a run.

    ``useless``: came to nothing useful, the complement of ``useful`` without the cancelled ones.
    ``wrong``: delivered as answered, and wrong. ``slo_missed``: offered and not good, cancelled
    ones aside. ``refused``: shed or failed. ``dropped``: refused after it had been sent to a
    replica, before its first token and its deadline: another try might have saved it.
    """

    __slots__ = (
        "_limit_s", "counts", "degraded_by", "durations", "first_s", "last_s", "offered",
        "output_tokens", "verifications", "why", "windows",
    )  # fmt: skip

    def __init__(self, measure: Measure, limit_s: float) -> None:
        self._limit_s = limit_s
        self.offered = 0
        self.output_tokens = 0
        self.counts = dict.fromkeys(COUNTS, 0)
        self.durations = {name: Spread() for name in DURATIONS}
        self.windows = Windows(measure.window_s, measure.window_least)
        self.degraded_by: dict[str, int] = {}
        self.verifications: dict[str, int] = {}
        self.why: dict[str, int] = {}
        self.first_s = float("inf")
        self.last_s = 0.0

    def add(self, columns: Columns, rows: Array) -> None:
        if not rows.size:
            return
        outcome = columns.outcome[rows]
        self.offered += int(rows.size)
        counts = self.counts
        for name, code in CODES.items():
            counts[name] += int((outcome == code).sum())
        kept = outcome != CODES["cancelled"]
        good, useful = columns.good[rows], columns.useful[rows]
        counts["good"] += int(good.sum())
        counts["useful"] += int(useful.sum())
        counts["useless"] += int((kept & ~useful).sum())
        counts["slo_missed"] += int((kept & ~good).sum())
        counts["wrong"] += int(columns.wrong[rows].sum())
        counts["dropped"] += int(columns.dropped[rows].sum())
        counts["refused"] = counts["shed"] + counts["failed"]
        self.output_tokens += int(columns.output_tokens[rows].sum())
        self.first_s = min(self.first_s, float(columns.arrival_s[rows].min()))
        self.last_s = max(self.last_s, float(columns.settled_s[rows].max()))
        for name, spread in self.durations.items():
            values = getattr(columns, name)[rows]
            spread.add(values[~np.isnan(values)])
        ttft_s = columns.ttft_s[rows]
        known = ~np.isnan(ttft_s)
        self.windows.add(columns.arrival_s[rows][known], ttft_s[known])
        self._add_reasons(columns, rows)

    def _add_reasons(self, columns: Columns, rows: Array) -> None:
        bad = columns.outcome[rows] != CODES["answered"]
        for row in rows[bad].tolist():
            if columns.degraded[row]:
                _count(self.degraded_by, columns.why[row])
            else:
                _count(self.why, columns.why[row])
        if any(columns.verification):
            for row in rows.tolist():
                if columns.verification[row]:
                    _count(self.verifications, columns.verification[row])

    @property
    def span_s(self) -> float:
        """First arrival to last settlement."""
        return max(0.0, self.last_s - self.first_s)

    def figures(self, span_s: float) -> dict[str, Any]:
        """As plain values; rates are per second of ``span_s``; None where there is no figure."""
        counts, offered = self.counts, self.offered
        served = counts["answered"] + counts["degraded"]
        out: dict[str, Any] = {"offered": offered, **counts}
        for name in COUNTS:
            out[f"{name}_share"] = counts[name] / offered if offered else None
        for name in ("shed", "failed", "refused", "useless", "wrong", "slo_missed"):
            out[f"{name}_share_up95"] = upper_share(counts[name], offered)
        rates = {
            "offered": offered,
            "served": served,
            "good": counts["good"],
            "useful": counts["useful"],
            "output_tokens": self.output_tokens,
        }
        for name, number in rates.items():
            out[f"{name}_per_s"] = number / span_s if span_s > 0 else None
        for name, spread in self.durations.items():
            out[name] = spread.figures()
        out["windows"] = {
            **self.windows.figures(),
            "above_slo_s": self.windows.above_s(self._limit_s),
        }
        out["degraded_by"] = dict(sorted(self.degraded_by.items()))
        out["verifications"] = dict(sorted(self.verifications.items()))
        out["why"] = dict(sorted(self.why.items()))
        return out


def _count(table: dict[str, int], key: str) -> None:
    table[key] = table.get(key, 0) + 1
