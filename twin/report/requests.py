"""Single requests of a replay: all of them over time, the slowest, one beside itself under another
policy. Read from ``requests.parquet``; a request is named by its row, counted from 0, which is its
number in the decision log too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from traces import TraceError
from twin.report.charts import HOP_NAMES, fault_bands, log_ticks, policy_colour, tier_colour
from twin.report.figures import TIERS, duration
from twin.results import HOPS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import pyarrow as pa

    from twin.faults import Fault
    from twin.report.charts import Chart

    Array = np.ndarray[Any, np.dtype[Any]]

POINTS_MOST = 10_000
"""Requests that are drawn one by one; of more, bands of quantiles and the slowest."""
SLOW_POINTS = 500
BINS = 150
BANDS = (0.5, 0.95, 0.99)
METRICS = {"ttft_s": "time to first token", "e2e_s": "end to end"}
NOT_ANSWERED = {"shed": ("--shed", "x"), "failed": ("--failed", "x"), "cancelled": ("--muted", "x")}
LEAST_S = 1e-3
_TEXTS = ("sla_class", "endpoint", "outcome", "tier", "replica", "error_kind", "degraded_how")
_COUNTS = ("request_id", "prompt_tokens", "output_tokens", "retries", "http_code")
_COLUMNS = ("arrival_s", *_COUNTS, *_TEXTS, *HOPS, "ttft_s", "e2e_s", "tpot_s")


class Requests:
    """What became of each request of a run, column by column."""

    def __init__(self, path: Path) -> None:
        self._table: pa.Table = pq.read_table(path, columns=list(_COLUMNS))
        self.rows = self._table.num_rows
        self.arrival_s = self.numbers("arrival_s")

    def numbers(self, name: str) -> Array:
        """As floating point; NaN where it never came to that."""
        column = self._table.column(name).to_numpy(zero_copy_only=False)
        values: Array = np.asarray(column, dtype=float)
        return values

    def texts(self, name: str) -> list[str]:
        """Empty where there is none."""
        return [value or "" for value in self._table.column(name).to_pylist()]

    def one(self, row: int) -> dict[str, Any]:
        """
        Raises:
            TraceError: there is no such row.
        """
        if not 0 <= row < self.rows:
            raise TraceError(f"request {row}: there are {self.rows}, counted from 0")
        found: dict[str, Any] = self._table.slice(row, 1).to_pylist()[0]
        return {"row": row} | found

    def some(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Several at once, which is much quicker than one by one."""
        found = self._table.take(np.array(rows, dtype=np.int64)).to_pylist()
        return [{"row": row} | one for row, one in zip(rows, found, strict=True)]

    def slowest(self, metric: str, most: int) -> list[int]:
        """Rows, the slowest first."""
        values = self.numbers(metric)
        known = np.flatnonzero(~np.isnan(values))
        order = known[np.argsort(-values[known], kind="stable")]
        return [int(row) for row in order[:most]]


def slowest(requests: Requests, metric: str = "e2e_s", most: int = 50) -> list[dict[str, Any]]:
    """The requests that took longest, as plain values."""
    return requests.some(requests.slowest(metric, most))


def requests_over_time(
    requests: Requests, place: int, metric: str, faults: Sequence[Fault] = (),
) -> Chart:  # fmt: skip
    """Every request by when it came and how long it took; each point knows its row.

    Args:
        place: of the policy, for its colour where it has no tiers.
        metric: of ``METRICS``.
    """
    seconds = np.maximum(requests.numbers(metric), LEAST_S)
    known = ~np.isnan(seconds)
    span_s = float(requests.arrival_s[-1])
    per, unit = (1, "s") if span_s <= 900 else (60, "min") if span_s <= 4 * 3600 else (3600, "h")
    at = requests.arrival_s / per
    traces: list[Chart] = []
    if requests.rows > POINTS_MOST:
        traces += _bands(at[known], seconds[known], policy_colour(place), unit)
        shown = np.zeros(requests.rows, bool)
        shown[requests.slowest(metric, SLOW_POINTS)] = True
    else:
        shown = known
    traces += _points(requests, at, seconds, shown, place)
    floor = min((min(trace["y"]) for trace in traces if trace["y"]), default=LEAST_S)
    traces += _not_answered(requests, at, floor)
    drawn = np.concatenate([np.asarray(trace["y"], float) for trace in traces] or [np.ones(1)])
    drawn = drawn[~np.isnan(drawn)]
    low, high = (float(drawn.min()), float(drawn.max())) if drawn.size else (LEAST_S, 1.0)
    low, high = low / 1.3, high * 1.3
    values, texts = log_ticks(low, high)
    layout: Chart = {
        "xaxis": {"title": {"text": f"arrival, {unit}"}, "range": [0, span_s / per]},
        "yaxis": {"type": "log", "range": [math.log10(low), math.log10(high)],
                  "tickvals": values, "ticktext": texts,
                  "title": {"text": f"{METRICS[metric]} (log)"}},
        "dragmode": "zoom",
    }  # fmt: skip
    layout |= fault_bands(faults, span_s, per)
    return {"traces": traces, "layout": layout, "height": 380}


def _points(
    requests: Requests, at: Array, seconds: Array, shown: Array, place: int
) -> list[Chart]:  # fmt: skip
    tiers = np.array(requests.texts("tier"))
    order = {name: number for number, name in enumerate(TIERS)}
    names = sorted(set(tiers[shown].tolist()), key=lambda name: (order.get(name, 9), name))
    return [
        _scatter(
            name or "answered", np.flatnonzero(shown & (tiers == name)), at, seconds,
            tier_colour(name) if name else policy_colour(place),
        )
        for name in names
    ]  # fmt: skip


def _not_answered(requests: Requests, at: Array, floor: float) -> list[Chart]:
    """At their wait in the policy's queue, but not below ``floor``."""
    outcomes = np.array(requests.texts("outcome"))
    waited = np.maximum(requests.numbers("queue_s"), floor)
    traces = []
    for name, (colour, symbol) in NOT_ANSWERED.items():
        rows = np.flatnonzero((outcomes == name) & ~np.isnan(waited))
        if rows.size > SLOW_POINTS and requests.rows > POINTS_MOST:
            rows = rows[np.linspace(0, rows.size - 1, SLOW_POINTS).astype(int)]
        if rows.size:
            traces.append(_scatter(name, rows, at, waited, colour, symbol))
    return traces


def _scatter(
    name: str, rows: Array, at: Array, seconds: Array, colour: str, symbol: str = "circle"
) -> Chart:
    return {
        "type": "scattergl", "mode": "markers", "name": name,
        "x": _short(at[rows], 6), "y": _short(seconds[rows], 4), "customdata": rows.tolist(),
        "marker": {"color": colour, "size": 5 if symbol == "circle" else 6, "opacity": 0.75,
                   "symbol": symbol},
        "hovertemplate": f"{name} #%{{customdata}}: %{{y:.3s}}s<extra></extra>",
    }  # fmt: skip


def _bands(at: Array, seconds: Array, colour: str, unit: str) -> list[Chart]:
    """Quantiles of equal stretches of time, one line each."""
    if not at.size:
        return []
    width = float(at.max()) / BINS or 1.0
    bins = np.minimum((at / width).astype(int), BINS - 1)
    order = np.argsort(bins, kind="stable")
    cuts = np.searchsorted(bins[order], np.arange(BINS + 1))
    middles, lines = [], []
    for number in range(BINS):
        some = seconds[order[cuts[number] : cuts[number + 1]]]
        if some.size:
            middles.append(float(f"{(number + 0.5) * width:.5g}"))
            lines.append(np.quantile(some, BANDS))
    dashes = ("solid", "dash", "dot")
    return [
        {
            "type": "scatter", "mode": "lines", "name": f"p{share * 100:g}", "x": middles,
            "y": _short(np.array([line[number] for line in lines]), 4),
            "line": {"color": colour, "width": 2.4 - 0.6 * number, "dash": dashes[number]},
            "hovertemplate": f"p{share * 100:g} at %{{x:.4g}} {unit}: %{{y:.3s}}s<extra></extra>",
        }
        for number, share in enumerate(BANDS)
    ]  # fmt: skip


def waterfall(requests: Sequence[dict[str, Any]], labels: Sequence[str]) -> Chart | None:
    """Where the time of one request went, under each policy; None where it was never sent."""
    places: list[tuple[str, str, str, float, float]] = []
    longest = 0.0
    for label, request in zip(labels, requests, strict=True):
        so_far = 0.0
        for hop in HOPS_IN_ORDER:
            took = request.get(hop)
            if took is not None:
                places.append((label, hop, HOP_NAMES[hop], so_far, took))
                so_far += took
        longest = max(longest, so_far)
    if not places:
        return None
    scale, unit = (1.0, "s") if longest >= 1 else (1e3, "ms")
    traces: list[Chart] = []
    for hop in HOPS_IN_ORDER:
        some = [place for place in places if place[1] == hop]
        if some:
            traces.append({
                "type": "bar", "orientation": "h", "name": HOP_NAMES[hop],
                "y": [[place[0] for place in some], [place[2] for place in some]],
                "x": [_round(place[4] * scale) for place in some],
                "base": [_round(place[3] * scale) for place in some],
                "text": [duration(place[4]) for place in some], "textposition": "outside",
                "cliponaxis": False, "marker": {"color": f"--hop-{hop.removesuffix('_s')}"},
                "hovertemplate": f"{HOP_NAMES[hop]}: %{{text}}<extra></extra>",
            })  # fmt: skip
    layout: Chart = {
        "barmode": "overlay", "bargap": 0.25, "margin": {"l": 150, "r": 60}, "showlegend": False,
        "xaxis": {"title": {"text": f"since it arrived, {unit}"},
                  "range": [0, 1.08 * longest * scale or 1.0]},
        "yaxis": {"autorange": "reversed", "ticks": "", "showgrid": False},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": 70 + 24 * len(places)}


HOPS_IN_ORDER = ("queue_s", "gateway_s", "schedule_s", "prefill_s", "decode_s", "network_s")
"""As a request meets them; the gateway's and the network's are put together."""


def _short(values: Array, digits: int) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.tolist()]


def _round(value: float) -> float:
    return float(f"{value:.6g}")
