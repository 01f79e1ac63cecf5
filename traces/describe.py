"""What is in a trace: rates, burstiness, lengths, prefix hits, who asks, what is missing."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from traces.schema import SCHEMA, SLA_CLASSES

if TYPE_CHECKING:
    from collections.abc import Callable

    import pyarrow as pa
    from rich.console import Console

    from traces.store import Trace

    Array = np.ndarray[Any, np.dtype[Any]]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_LENGTHS = ("prompt_tokens", "output_tokens", "reasoning_tokens", "think_time_s")
_SHARES = (
    "business_line",
    "sla_class",
    "model",
    "endpoint",
    "tenant_id",
    "step",
    "outcome",
    "provenance",
)
_COUNTS = ("user_id", "session_id", "chain_id")
_BLOCKS_MAX = 20_000_000
_BINS = 60
_CURVE_POINTS = 60
_SECONDS_MAX = 16_000.0
_BARS = "▁▂▃▄▅▆▇█"


def describe_trace(
    trace: Trace, progress: Callable[[int], None] = lambda rows: None
) -> dict[str, Any]:
    """Summarise a trace, in one pass.

    Keys: `path`, `rows`, `duration_s`, `resolution_s` (the coarsest), `rate_rps` (mean),
    `rate_rps_busiest_minute`, `interarrival_cv` (as stamped), `minute_count_cv` (whole minutes),
    `rate_over_time` (pairs of seconds and requests per second), `lengths` (mean and quantiles of
    each length), `length_curves` (pairs of a length and the share at or below it), `prefix` (see
    `_Prefix.result`; None without prefix ids), `prefix_over_time` (pairs of seconds and the share
    of the prompts' tokens that hit, in the bins of the rate), `shares` (of rows, by value),
    `unknown_sla_classes` (values of `sla_class` that are no class), `distinct` (users, sessions,
    chains), `null_share` (of columns with any null).
    Rate figures are None where arrivals are null. `progress` is told the number of rows of each
    batch.
    """
    rate = _Rate(trace.duration_s)
    prefix = _Prefix(rate.bin_s)
    lengths = {name: _Histogram() for name in _LENGTHS}
    shares: dict[str, Counter[str]] = {name: Counter() for name in _SHARES}
    distinct: dict[str, set[int]] = {name: set() for name in _COUNTS}
    nulls: Counter[str] = Counter()
    coarsest = 0.0
    for batch in trace.batches():
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for name, column in columns.items():
            nulls[name] += column.null_count
        coarsest = max(coarsest, float(columns["arrival_res_s"].to_numpy().max()))
        if trace.has_arrivals:
            rate.add(columns["arrival_s"].to_numpy())
        for name, histogram in lengths.items():
            histogram.add(columns[name])
        for name, counter in shares.items():
            count_values(columns[name], counter)
        for name, known in distinct.items():
            known.update(columns[name].drop_null().to_pylist())
        prefix.add(columns)
        progress(batch.num_rows)
    return {
        "path": str(trace.path),
        "rows": trace.rows,
        "duration_s": trace.duration_s if trace.has_arrivals else None,
        "resolution_s": round(coarsest, 6),
        **rate.result(trace.has_arrivals),
        "lengths": {n: h.result() for n, h in lengths.items() if h.rows},
        "length_curves": {n: h.curve() for n, h in lengths.items() if h.rows},
        "prefix": prefix.result(),
        "prefix_over_time": prefix.over_time() if trace.has_arrivals else None,
        "shares": {n: _as_shares(c, trace.rows) for n, c in shares.items() if c},
        "unknown_sla_classes": [n for n in shares["sla_class"] if n not in SLA_CLASSES],
        "distinct": {n: len(known) for n, known in distinct.items() if known},
        "null_share": {n: nulls[n] / trace.rows for n in SCHEMA.names if nulls[n]},
    }


def count_values(column: pa.Array, counter: Counter[str]) -> None:
    """Add to `counter` how often each value of a dictionary column comes; nulls are left out."""
    if column.null_count == len(column):
        return
    codes = column.indices.drop_null().to_numpy()
    for name, count in zip(column.dictionary.to_pylist(), np.bincount(codes), strict=False):
        if count:
            counter[name] += int(count)


def _as_shares(counter: Counter[str], rows: int) -> dict[str, float]:
    return {name: count / rows for name, count in counter.most_common()}


class _Rate:
    """Requests per second over time, and how unevenly they come."""

    def __init__(self, duration_s: float) -> None:
        self.bin_s = max(1.0, math.ceil(duration_s / _BINS))
        self._bins: Array = np.zeros(int(duration_s / self.bin_s) + 1, np.int64)
        self._minutes: Array = np.zeros(int(duration_s / 60) + 1, np.int64)
        self._duration_s = duration_s
        self._last: float | None = None
        self._gaps = 0
        self._sum = self._squares = 0.0

    def add(self, arrival_s: Array) -> None:
        """Take a batch's arrivals, sorted."""
        for bins, width in ((self._bins, self.bin_s), (self._minutes, 60.0)):
            counts = np.bincount((arrival_s / width).astype(np.int64), minlength=bins.size)
            bins += counts[: bins.size]
        gaps = np.diff(arrival_s, prepend=arrival_s[0] if self._last is None else self._last)
        gaps = gaps[1:] if self._last is None else gaps
        self._last = float(arrival_s[-1])
        self._gaps += gaps.size
        self._sum += float(gaps.sum())
        self._squares += float((gaps * gaps).sum())

    def result(self, known: bool) -> dict[str, Any]:
        """The rate part of a description."""
        whole = self._minutes[: int(self._duration_s // 60)]
        mean = self._sum / self._gaps if self._gaps else 0.0
        spread = self._squares / self._gaps - mean * mean if self._gaps else 0.0
        counted = bool(known and whole.size and whole.sum())
        return {
            "rate_rps": float(self._bins.sum()) / self._duration_s
            if known and self._duration_s
            else None,
            "rate_rps_busiest_minute": float(whole.max()) / 60 if counted else None,
            "interarrival_cv": math.sqrt(max(spread, 0.0)) / mean if mean else None,
            "minute_count_cv": float(whole.std() / whole.mean()) if counted else None,
            "rate_over_time": [
                (index * self.bin_s, float(count) / self.bin_s)
                for index, count in enumerate(self._bins)
            ]
            if known
            else None,
        }


class _Histogram:
    """Counts of a length by whole tokens or 10 ms; memory grows with the largest."""

    def __init__(self) -> None:
        self.rows = 0
        self._sum = self._top = 0.0
        self._counts: Array = np.zeros(0, np.int64)
        self._scale = 1.0

    def add(self, column: pa.Array) -> None:
        """Take a batch's column, without its nulls."""
        if column.null_count == len(column):
            return
        values = column.drop_null().to_numpy()
        self.rows += values.size
        self._sum += float(values.sum(dtype=np.float64))
        self._top = max(self._top, float(values.max()))
        if values.dtype.kind == "f":
            # In 10 ms; all that is longer than some hours counts as that long.
            self._scale, values = 100.0, np.minimum(values, _SECONDS_MAX)
        counts = np.bincount(np.rint(values * self._scale).astype(np.int64))
        if counts.size > self._counts.size:
            self._counts = np.concatenate(
                (self._counts, np.zeros(counts.size - self._counts.size, np.int64))
            )
        self._counts[: counts.size] += counts

    def result(self) -> dict[str, float]:
        """Mean, quantiles (`p50` and so on) and maximum."""
        below = np.cumsum(self._counts)
        marks = [math.ceil(q * self.rows) for q in QUANTILES]
        found = {
            f"p{q * 100:g}": float(np.searchsorted(below, mark, "left")) / self._scale
            for q, mark in zip(QUANTILES, marks, strict=True)
        }
        return {"mean": self._sum / self.rows, **found, "max": self._top}

    def curve(self) -> list[tuple[float, float]]:
        """The distribution in some dozens of points: (length, share at or below it)."""
        below = np.cumsum(self._counts)
        marks = np.linspace(0, self.rows, _CURVE_POINTS + 1)[1:]
        places = np.unique(np.searchsorted(below, np.ceil(marks), "left"))
        return [(float(at) / self._scale, float(below[at]) / self.rows) for at in places]


class _Prefix:
    """Prefix hits of a cache that never forgets, in the order of the rows.

    A block counts as hit when it and all blocks before it were in an earlier prompt; as in all
    public traces, an id stands for a block and what is before it.
    """

    def __init__(self, bin_s: float) -> None:
        self._bin_s = bin_s
        self._bins: dict[int, list[int]] = {}
        """Tokens that hit and all tokens, by bin of time."""
        self._seen: set[int] = set()
        self._blocks = self._hits = self._rows = 0
        self._hit_tokens = self._prompt_tokens = 0

    def add(self, columns: dict[str, pa.Array]) -> None:
        """Take a batch; nothing more once the cache holds `_BLOCKS_MAX` blocks."""
        lists = columns["prefix_ids"]
        if lists.null_count == len(lists) or len(self._seen) > _BLOCKS_MAX:
            return
        prompts = columns["prompt_tokens"].to_pylist()
        sizes = columns["prefix_block_tokens"].fill_null(0).to_pylist()
        ends = np.cumsum(lists.value_lengths().fill_null(0).to_numpy()).tolist()
        flat = lists.flatten().to_numpy()
        places = columns["arrival_s"].fill_null(0.0).to_numpy() // self._bin_s
        for start, end, prompt, size, place in zip(
            [0, *ends], ends, prompts, sizes, places.astype(np.int64).tolist(), strict=False
        ):
            if start == end:
                continue
            # An id stands for its block and all blocks before it, so hits come before misses.
            ids = flat[start:end]
            hits = bisect_left(ids, True, key=lambda block: int(block) not in self._seen)
            self._seen.update(ids[hits:].tolist())
            self._rows += 1
            self._blocks += len(ids)
            self._hits += hits
            self._hit_tokens += min(hits * size, prompt)
            self._prompt_tokens += prompt
            known = self._bins.setdefault(place, [0, 0])
            known[0] += min(hits * size, prompt)
            known[1] += prompt

    def over_time(self) -> list[tuple[float, float]]:
        """Share of the prompts' tokens that hit, by the second that its bin begins with."""
        return [
            (place * self._bin_s, hits / tokens)
            for place, (hits, tokens) in sorted(self._bins.items())
            if tokens
        ]

    def result(self) -> dict[str, float] | None:
        """Hit shares: of the listed blocks, and of the prompts' tokens; and the rows used."""
        if not self._blocks:
            return None
        return {
            "hit_share_blocks": self._hits / self._blocks,
            "hit_share_tokens": self._hit_tokens / max(1, self._prompt_tokens),
            "rows": self._rows,
        }


def print_description(description: dict[str, Any], console: Console) -> None:
    """Print a description as tables."""
    from rich.table import Table

    table = Table(title=f"{description['path']}", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    table.add_row("requests", f"{description['rows']:,}")
    if description["duration_s"] is None:
        table.add_row("arrivals", "none: the trace is session-relative (import: --session-rate)")
    else:
        table.add_row("span", f"{description['duration_s']:,.1f} s")
        table.add_row("stamps", _resolution(description["resolution_s"]))
        table.add_row(
            "rate",
            f"{_number(description['rate_rps'])} req/s; busiest minute "
            f"{_number(description['rate_rps_busiest_minute'])}",
        )
        table.add_row("over time", spark([rate for _, rate in description["rate_over_time"]]))
        table.add_row(
            "burstiness",
            f"CV of gaps {_number(description['interarrival_cv'])}, "
            f"of minute counts {_number(description['minute_count_cv'])}",
        )
    if description["prefix"] is not None:
        prefix = description["prefix"]
        table.add_row(
            "prefix hits",
            f"{prefix['hit_share_blocks']:.1%} of blocks, {prefix['hit_share_tokens']:.1%} of "
            "prompt tokens, with an unlimited cache",
        )
    for name, count in description["distinct"].items():
        table.add_row(f"{name.removesuffix('_id')}s", f"{count:,}")
    for name, shares in description["shares"].items():
        unknown = description["unknown_sla_classes"] if name == "sla_class" else ()
        top = [
            f"{value}{' (unknown)' if value in unknown else ''} {share:.1%}"
            for value, share in list(shares.items())[:6]
        ]
        more = f" and {len(shares) - 6} more" if len(shares) > 6 else ""
        table.add_row(name, ", ".join(top) + more)
    empty = [name for name, share in description["null_share"].items() if share == 1]
    partly = [f"{n} {s:.1%}" for n, s in description["null_share"].items() if s < 1]
    table.add_row("partly null", ", ".join(partly) or "none")
    table.add_row("absent", ", ".join(empty) or "none")
    console.print(table)
    console.print(_length_table(description["lengths"]))


def _length_table(lengths: dict[str, dict[str, float]]) -> Any:
    from rich.table import Table

    table = Table()
    table.add_column("length", no_wrap=True)
    for heading in ("mean", *(f"p{q * 100:g}" for q in QUANTILES), "max"):
        table.add_column(heading, justify="right")
    for name, figures in lengths.items():
        table.add_row(name.removesuffix("_tokens"), *(_number(value) for value in figures.values()))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _resolution(resolution_s: float) -> str:
    if not resolution_s:
        return "exact"
    return f"in steps of up to {resolution_s:g} s; replay spreads them"


def spark(values: list[float]) -> str:
    """A line of bars, one a value, scaled to the largest."""
    top = max(values, default=0.0)
    if not top:
        return ""
    return "".join(_BARS[min(7, int(value / top * 8))] for value in values)
