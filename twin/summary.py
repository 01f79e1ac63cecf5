"""The figures of a run, gathered chunk by chunk in bounded memory.

Quantiles come from histograms with 500 bins a decade, so they are within 0.5 % of the exact ones
however many requests there are.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.schema import OUTCOMES
from twin.results import HOPS

if TYPE_CHECKING:
    from twin.arrivals import Chunk
    from twin.results import Observed

    Array = np.ndarray[Any, np.dtype[Any]]

BINS_PER_DECADE = 500
LEAST_S = 1e-6
DECADES = 11
METRICS = ("ttft_s", "tpot_s", "e2e_s", "queue_s")


class Histogram:
    """Counts of a duration in seconds, in bins of equal ratio from 1 us to 100,000 s."""

    __slots__ = ("counts", "largest", "total_s")

    def __init__(self) -> None:
        self.counts = np.zeros(BINS_PER_DECADE * DECADES + 2, np.int64)
        """The first bin holds what is below 1 us, the last what is above the range."""
        self.total_s = 0.0
        self.largest = 0.0

    def add(self, values: Array) -> None:
        if not values.size:
            return
        with np.errstate(divide="ignore"):
            place = np.log10(np.maximum(values, 1e-12) / LEAST_S) * BINS_PER_DECADE
        bins = np.clip(np.floor(place).astype(np.int64) + 1, 0, self.counts.size - 1)
        self.counts += np.bincount(bins, minlength=self.counts.size)
        self.total_s += float(values.sum())
        self.largest = max(self.largest, float(values.max()))

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else float("nan")

    def quantile_s(self, share: float) -> float:
        """The value that ``share`` of all lie at or below; NaN without any."""
        if not self.count:
            return float("nan")
        rank = max(1, int(np.ceil(share * self.count)))
        place = int(np.searchsorted(np.cumsum(self.counts), rank))
        if place == 0:
            return 0.0
        return min(self.largest, float(self._edges(np.array([place - 0.5]))[0]))

    def curve(self) -> tuple[list[float], list[float]]:
        """The cumulative distribution: (seconds, share at or below)."""
        filled = np.flatnonzero(self.counts)
        if not filled.size:
            return [], []
        share = np.cumsum(self.counts)[filled] / self.count
        return self._edges(filled).tolist(), share.tolist()

    @staticmethod
    def _edges(bins: Array) -> Array:
        """Upper edges of bins, in seconds."""
        edges: Array = LEAST_S * 10.0 ** (bins / BINS_PER_DECADE)
        return edges


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer is. Time to first token from arrival at the controller."""

    ttft_s: dict[str, float] = field(
        default_factory=lambda: {"P0": 1.5, "P1": 4.0, "P2": 10.0, "": 4.0}
    )
    """By SLA class, where the request has no deadline of its own."""
    tpot_s: float = 0.1
    """Per output token after the first: ten tokens a second, faster than reading."""

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From ``P0=1.5,P1=4,tpot=0.1`` (seconds); what is not named keeps its default.

        Raises:
            ValueError: not of that form, or not above 0.
        """
        ttft_s, tpot_s = dict(cls().ttft_s), cls().tpot_s
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            try:
                seconds = float(value)
            except ValueError:
                seconds = 0.0
            if not seconds > 0:
                raise ValueError(f"SLO {part!r}: write CLASS=SECONDS or tpot=SECONDS, above 0")
            if name == "tpot":
                tpot_s = seconds
            else:
                ttft_s["" if name == "other" else name] = seconds
        return cls(ttft_s, tpot_s)

    def limit_s(self, sla: str) -> float:
        return self.ttft_s.get(sla, self.ttft_s[""])


class Group:
    """Counts and histograms of some of the requests."""

    __slots__ = (
        "answered", "cancelled", "degraded", "failed", "good", "good_output_tokens", "hops",
        "judged", "metrics", "offered", "output_tokens", "preemptions", "shed", "wrong",
    )  # fmt: skip

    def __init__(self) -> None:
        self.offered = self.answered = self.degraded = self.shed = self.failed = 0
        self.cancelled = self.good = self.preemptions = 0
        self.judged = self.wrong = 0
        """Answers given out as such of which it is known whether they were right, and those that
        were not."""
        self.output_tokens = self.good_output_tokens = 0
        self.metrics = {name: Histogram() for name in METRICS}
        self.hops = dict.fromkeys(HOPS, 0.0)

    def add(self, seen: Observed, outcome: Array, good: Array, tokens: Array, rows: Array) -> None:
        self.offered += int(rows.size)
        for name, code in OUTCOME_CODES.items():
            setattr(self, name, getattr(self, name) + int((outcome[rows] == code).sum()))
        self.good += int(good[rows].sum())
        done = rows[seen.answered[rows]]
        self.output_tokens += int(tokens[done].sum())
        self.good_output_tokens += int(tokens[rows][good[rows]].sum())
        self.preemptions += int(seen.preemptions[rows].sum())
        given = seen.correct[rows[outcome[rows] == OUTCOME_CODES["answered"]]]
        self.judged += int((given >= 0).sum())
        self.wrong += int((given == 0).sum())
        for name in METRICS:
            values = seen.columns[name][done if name == "queue_s" else rows]
            self.metrics[name].add(values[~np.isnan(values)])
        for name in HOPS:
            values = seen.columns[name][done]
            self.hops[name] += float(values[~np.isnan(values)].sum())

    def attainment(self) -> float:
        """Share of offered requests within their SLO; shed and failed ones count as missed."""
        return self.good / self.offered if self.offered else float("nan")

    def attainment_admitted(self) -> float:
        """The same among those that were answered."""
        admitted = self.answered + self.degraded
        return self.good / admitted if admitted else float("nan")

    def figures(self, span_s: float) -> dict[str, Any]:
        """As plain values for JSON; NaN becomes None."""
        out: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "offered", "answered", "degraded", "shed", "failed", "cancelled", "good",
                "preemptions", "output_tokens", "good_output_tokens", "judged", "wrong",
            )
        }  # fmt: skip
        for name, histogram in self.metrics.items():
            for label, value in (
                ("mean", histogram.mean_s()),
                ("p50", histogram.quantile_s(0.5)),
                ("p95", histogram.quantile_s(0.95)),
                ("p99", histogram.quantile_s(0.99)),
            ):
                out[f"{name}_{label}"] = _plain(value)
        answered = self.answered + self.degraded
        for name, total in self.hops.items():
            out[f"{name}_mean"] = total / answered if answered else None
        out["slo_attainment"] = _plain(self.attainment())
        out["slo_attainment_admitted"] = _plain(self.attainment_admitted())
        out["offered_per_s"] = self.offered / span_s if span_s else None
        out["goodput_per_s"] = self.good / span_s if span_s else None
        return out


OUTCOME_CODES = {name: code for code, name in enumerate(OUTCOMES)}


class Summary:
    """All groups of a run: everything, and by tier, SLA class and business line."""

    __slots__ = (
        "all", "cached_tokens", "degraded_how", "groups", "last_ns", "prompt_tokens", "shed_why",
        "slo", "verification",
    )  # fmt: skip

    def __init__(self, slo: Slo | None = None) -> None:
        self.slo = slo or Slo()
        self.all = Group()
        self.groups: dict[str, dict[str, Group]] = {"tier": {}, "sla": {}, "line": {}}
        self.shed_why: dict[str, int] = {}
        self.degraded_how: Counter[str] = Counter()
        self.verification: Counter[str] = Counter()
        """Answers by what became of checking them; empty: they were not scored."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.last_ns = 0

    def add(self, chunk: Chunk, seen: Observed) -> None:
        outcome = np.array([OUTCOME_CODES[name] for name in seen.outcome])
        tokens = seen.output_tokens
        good = seen.whole & self._within(chunk, seen)
        rows = np.arange(outcome.size)
        self.all.add(seen, outcome, good, tokens, rows)
        for kind, values in (("tier", seen.tier), ("sla", chunk.sla), ("line", chunk.line)):
            groups = self.groups[kind]
            column = np.array(values)
            for name in dict.fromkeys(values):
                group = groups.get(name)
                if group is None:
                    group = groups[name] = Group()
                group.add(seen, outcome, good, tokens, np.flatnonzero(column == name))
        for name, why in zip(seen.outcome, seen.why, strict=True):
            if name in ("shed", "failed"):
                key = f"{name}: {why}"
                self.shed_why[key] = self.shed_why.get(key, 0) + 1
            elif name == "degraded":
                self.degraded_how[why] += 1
        self.verification.update(seen.verification)
        done = seen.answered
        self.prompt_tokens += int(np.array(chunk.prompt_tokens)[done].sum())
        self.cached_tokens += int(seen.cached_tokens[done].sum())
        self.last_ns = max(self.last_ns, int(seen.settled_ns.max()))

    def _within(self, chunk: Chunk, seen: Observed) -> Array:
        limits = {name: self.slo.limit_s(name) for name in set(chunk.sla)}
        limit = np.array([
            own / 1e9 if own else limits[name]
            for own, name in zip(chunk.deadline_ns, chunk.sla, strict=True)
        ])  # fmt: skip
        tpot = seen.columns["tpot_s"]
        within: Array = (seen.columns["ttft_s"] <= limit) & ~(tpot > self.slo.tpot_s)
        return within


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
