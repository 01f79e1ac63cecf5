"""The requests that a plan is made for: a stretch of the trace around its peak, other days like it,
and days with more of it.

Day 0 is the stretch as it was recorded. On the others each session, chain or single request comes
as often as a Poisson variable with mean 1 says (the bootstrap of a stream): once more or not at
all. A copy is another user's, within a few seconds of the original. So days differ as two
recordings of the same traffic do, and the same day is played in every fleet. A load that has grown
has more of them, each at its own pace, in a stretch around the peak that is that much shorter, so
that as many requests are played; but never shorter than ``WINDOW_LEAST_S``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np
import pyarrow as pa

from traces import TraceError, TraceWriter, open_trace, spread_ties
from twin.plan.inputs import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from traces import Trace

    Array = np.ndarray[Any, np.dtype[Any]]

ROWS = 10_000
"""Of a stretch, unless asked otherwise."""
ROWS_LEAST = 20
GROUP_ROWS = 1024
"""Rows that are settled together: a run that fails is seen early."""
PEAK_S = 60.0
WINDOW_LEAST_S = PEAK_S
"""Of a stretch that is played. In less, a fleet that starts empty holds too much: of the shipped
trace at four times the load 2 s ask for 8 cards, 10 s for 14, 20 s for 16 and 40 s for 20."""
COPY_SPREAD_S = 5.0
"""Copies come this long before or after the original."""
NEW_ID = 1 << 40
"""Bits of an id that tell the number of a copy: above those of small ids, and mixed into hashes."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A stretch of a trace, and what a formula needs to know of it. Times in seconds."""

    folder: Path
    trace: str
    model: str
    rows: int
    span_s: float
    peak_s: float
    """The middle of its busiest minute."""
    arrival_s: Array = field(repr=False)
    prompt_tokens: Array = field(repr=False)
    new_tokens: Array = field(repr=False)
    """Prompt tokens that no earlier request of the stretch can have left in a cache."""
    output_tokens: Array = field(repr=False)
    sla: tuple[str, ...] = field(repr=False)
    line: tuple[str, ...] = field(repr=False)
    users: int
    """Distinct ones of the whole trace; 0: it names none."""
    deadline_most_s: float = 0.0
    """The longest that a request brings of its own."""
    notes: tuple[str, ...] = ()

    @property
    def rate_per_s(self) -> float:
        return self.rows / self.span_s

    @property
    def peak_rate_per_s(self) -> float:
        half = min(PEAK_S, self.span_s) / 2
        near = np.abs(self.arrival_s - self.peak_s) <= half
        return float(near.sum()) / (2 * half)

    def counts(self, kind: str) -> dict[str, int]:
        """Requests by class or line."""
        names = self.sla if kind == "class" else self.line
        return {name: names.count(name) for name in dict.fromkeys(names)}

    @property
    def day_0(self) -> Path:
        """The file of the stretch as it was recorded; other days are made from it."""
        return self.folder / "day-0.parquet"

    def window(self, growth: float) -> tuple[float, float]:
        """From when to when the stretch goes that is played at this growth."""
        return window_of(self.span_s, self.peak_s, growth)

    def without_line(self, line: str) -> Path:
        """Day 0 without a business line."""
        table = _table(open_trace(self.day_0).batches())
        column = table.column("business_line").to_pylist()
        keep = [place for place, name in enumerate(column) if (name or "") != line]
        path = self.folder / f"day-0-without-{crc32(line.encode())}.parquet"
        _write(table.take(keep), path)
        return path


def window_of(span_s: float, peak_s: float, growth: float) -> tuple[float, float]:
    """The part of a stretch, around its peak, that is played at this growth of the load."""
    wide_s = min(span_s, max(span_s / max(1.0, growth), WINDOW_LEAST_S))
    begin_s = min(max(0.0, peak_s - wide_s / 2), span_s - wide_s)
    return begin_s, begin_s + wide_s


def day_of(day_0: Path, number: int, growth: float, window: tuple[float, float]) -> Path:
    """The file of a day with ``growth`` times the load, written when it is first asked for."""
    if number == 0 and growth == 1.0:
        return day_0
    path = day_0.with_name(f"{day_0.stem}-{number}-x{growth:.6g}.parquet")
    if not path.exists():
        _write(_other_day(day_0, number, growth, window), path)
    return path


def workload_of(
    trace: Trace, folder: Path, *, model: str = "", rows: int = ROWS, assume_output: int = 0
) -> Workload:
    """The busiest stretch of ``rows`` requests, written to ``folder`` as day 0.

    Args:
        model: what is planned for. Where the trace asks for it, only those requests count; else
            all of them.
        assume_output: tokens of an answer of unknown length; 0: refuse those.

    Raises:
        PlanError: too few requests are left, or lengths are not known.
        TraceError: the trace cannot be read.
    """
    if rows < ROWS_LEAST:
        raise PlanError(f"{rows} requests make no stretch: give --rows {ROWS_LEAST} or more")
    if not trace.has_arrivals:
        raise TraceError(f"{trace.path}: arrivals are relative to their sessions: no plan")
    wanted, left_out = _wanted(trace, model)
    arrival_s, tokens, users = _load(trace, wanted, assume_output)
    if arrival_s.size < ROWS_LEAST:
        raise PlanError(
            f"{trace.path.name}: {arrival_s.size} requests for {model or 'any model'}: a plan takes"
            f" {ROWS_LEAST} or more"
        )
    first, last = _stretch(arrival_s, tokens, rows)
    from_s, until_s = float(arrival_s[first]), float(arrival_s[last])
    taken = (_between(batch, from_s, until_s, wanted) for batch in trace.batches())
    table = _table(batch for batch in spread_ties(taken) if batch.num_rows)
    start_s = float(table.column("arrival_s")[0].as_py())
    at_s = np.asarray(table.column("arrival_s").to_numpy()) - start_s
    table = _set(_set(table, "arrival_s", at_s), "arrival_res_s", np.zeros(at_s.size))
    table = _set(table, "output_tokens", _outputs(table, assume_output, trace))
    folder.mkdir(parents=True, exist_ok=True)
    _write(table, folder / "day-0.parquet")
    notes = [f"{left_out} requests for other models or embeddings are left out"] if left_out else []
    if arrival_s.size > at_s.size:
        notes.append(f"the busiest {at_s.size:,} of {arrival_s.size:,} requests")
        if at_s[-1] < WINDOW_LEAST_S:
            notes.append("less than a minute: sizes may come out too small, give more --rows")
    outputs = table.column("output_tokens").to_numpy().astype(float)
    prompts = table.column("prompt_tokens").to_numpy().astype(float)
    return Workload(
        folder, trace.path.name, model, at_s.size, max(float(at_s[-1]), 1e-3),
        _peak_s(at_s, prompts + 4 * outputs), at_s, prompts, _new_tokens(table, prompts), outputs,
        _words(table, "sla_class"), _words(table, "business_line"),
        users,
        max((own for own in table.column("deadline_s").to_pylist() if own), default=0.0),
        tuple(notes),
    )  # fmt: skip


def models_of(trace: Trace) -> dict[str, int]:
    """Requests by the model that they ask for, embeddings left out; the most first."""
    counts: dict[str, int] = {}
    for batch in trace.batches(["model", "endpoint"]):
        for model, endpoint in zip(*(column.to_pylist() for column in batch), strict=True):
            if endpoint != "embeddings":
                counts[model or ""] = counts.get(model or "", 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def _wanted(trace: Trace, model: str) -> tuple[Callable[[pa.RecordBatch], Array], int]:
    """Which rows count, and how many do not."""
    counts = models_of(trace)
    only = model if model in counts else None

    def wanted(batch: pa.RecordBatch) -> Array:
        named = batch.column(batch.schema.names.index("model")).to_pylist()
        asked = batch.column(batch.schema.names.index("endpoint")).to_pylist()
        return np.array([
            kind != "embeddings" and (only is None or name == only)
            for name, kind in zip(named, asked, strict=True)
        ], bool)  # fmt: skip

    return wanted, trace.rows - (sum(counts.values()) if only is None else counts[only])


def _load(trace: Trace, wanted: Any, assume_output: int) -> tuple[Array, Array, int]:
    """Arrivals, the tokens of each (an output token takes about as long as four of a prompt), and
    how many users there are."""
    times, tokens = [np.zeros(0)], [np.zeros(0)]
    users: set[int] = set()
    names = ["arrival_s", "model", "endpoint", "prompt_tokens", "output_tokens", "user_id"]
    for batch in trace.batches(names):
        keep = wanted(batch)
        outputs = batch.column(4).fill_null(assume_output).to_numpy()
        times.append(batch.column(0).to_numpy()[keep])
        tokens.append((batch.column(3).to_numpy() + 4 * outputs)[keep])
        users.update(batch.column(5).filter(pa.array(keep)).drop_null().unique().to_pylist())
    return np.concatenate(times), np.concatenate(tokens), len(users)


def _stretch(arrival_s: Array, tokens: Array, rows: int) -> tuple[int, int]:
    """First and last row: so many around the busiest minute."""
    if arrival_s.size <= rows:
        return 0, arrival_s.size - 1
    middle = int(np.searchsorted(arrival_s, _peak_s(arrival_s, tokens)))
    first = min(max(0, middle - rows // 2), arrival_s.size - rows)
    return first, first + rows - 1


def _peak_s(arrival_s: Array, tokens: Array) -> float:
    """The middle of the minute in which the most tokens arrive."""
    half = min(PEAK_S, max(float(arrival_s[-1] - arrival_s[0]), 1e-3)) / 2
    total = np.concatenate([[0.0], np.cumsum(tokens)])
    ends = np.searchsorted(arrival_s, arrival_s + 2 * half, "right")
    begin = int(np.argmax(total[ends] - total[:-1]))
    return float(min(arrival_s[begin] + half, arrival_s[-1]))


def _between(batch: pa.RecordBatch, from_s: float, until_s: float, wanted: Any) -> pa.RecordBatch:
    at_s = batch.column(batch.schema.names.index("arrival_s")).to_numpy()
    inside = (at_s >= from_s) & (at_s <= until_s)
    if not inside.any():
        return batch.slice(0, 0)
    return batch.take(pa.array(np.flatnonzero(inside & wanted(batch))))


def _new_tokens(table: pa.Table, prompts: Array) -> Array:
    """What cannot have been cached: blocks that no earlier request has, and at least one token."""
    column = table.column("prefix_ids")
    if column.null_count == len(column):
        return prompts
    blocks = table.column("prefix_block_tokens").to_pylist()
    seen: set[int] = set()
    new = prompts.copy()
    for place, (ids, block) in enumerate(zip(column.to_pylist(), blocks, strict=True)):
        known = 0
        for number in ids or ():
            if number not in seen:
                break
            known += 1
        seen.update(ids or ())
        new[place] = max(1.0, new[place] - known * (block or 0))
    return new


def _other_day(day_0: Path, number: int, growth: float, window: tuple[float, float]) -> pa.Table:
    table = _table(open_trace(day_0).batches())
    unit = _units(table)
    generator = np.random.default_rng([number, 7])
    chance = generator.uniform(size=int(unit.max()) + 1)
    times = _poisson(chance, growth) if number else np.floor(growth + chance).astype(int)
    most = max(1, int(times.max()))
    shift_s = np.random.default_rng([number, 8]).uniform(
        -COPY_SPREAD_S, COPY_SPREAD_S, (most, times.size)
    )
    shift_s[0] = 0.0  # the first stands where it stood
    from_s, until_s = window
    recorded_s = np.asarray(table.column("arrival_s").to_numpy())
    inside = (recorded_s >= from_s) & (recorded_s <= until_s)
    each = np.where(inside, times[unit], 0)
    order = np.repeat(np.arange(unit.size), each)
    copy = np.arange(order.size) - np.repeat(np.cumsum(each) - each, each)
    at_s = recorded_s[order] + shift_s[copy, unit[order]]
    at_s = np.clip(at_s - from_s, 0.0, until_s - from_s)
    sort = np.argsort(at_s, kind="stable")
    order, copy, at_s = order[sort], copy[sort], at_s[sort]
    own = _own_blocks(table, unit)
    out = table.take(pa.array(order))
    out = _set(_set(out, "arrival_s", at_s), "request_id", np.arange(order.size))
    for name in ("session_id", "chain_id", "user_id"):
        out = _shifted(out, name, copy)
    if own:
        ids = out.column("prefix_ids").to_pylist()
        fresh = [
            [one ^ (int(more) * NEW_ID) if more and one in own else one for one in some or ()]
            for some, more in zip(ids, copy, strict=True)
        ]
        out = _set(out, "prefix_ids", fresh)
    return out


def _poisson(chance: Array, mean: float) -> Array:
    """How often each comes, by inversion: with a larger mean none comes less often."""
    out = np.zeros(chance.size, int)
    term = total = math.exp(-mean)
    for count in range(1, int(mean + 12 * math.sqrt(mean) + 20)):
        out += chance > total
        term *= mean / count
        total += term
    return out


def _units(table: pa.Table) -> Array:
    """What comes or stays away together: the number of each row's session, chain, or of itself."""
    numbers: dict[tuple[str, int], int] = {}
    sessions, chains = table.column("session_id").to_pylist(), table.column("chain_id").to_pylist()
    keys = [
        ("s", s) if s is not None else ("c", c) if c is not None else ("r", place)
        for place, (s, c) in enumerate(zip(sessions, chains, strict=True))
    ]
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys])


def _own_blocks(table: pa.Table, unit: Array) -> frozenset[int]:
    """Prefix blocks that only one unit has: a copy of it brings its own."""
    column = table.column("prefix_ids")
    if column.null_count == len(column):
        return frozenset()
    owner: dict[int, int] = {}
    shared: set[int] = set()
    for ids, whose in zip(column.to_pylist(), unit.tolist(), strict=True):
        for one in ids or ():
            if owner.setdefault(one, whose) != whose:
                shared.add(one)
    return frozenset(owner) - shared


def _shifted(table: pa.Table, name: str, copy: Array) -> pa.Table:
    column = table.column(name)
    if column.null_count == len(column):
        return table
    values = [
        None if value is None else value ^ (int(more) * NEW_ID)
        for value, more in zip(column.to_pylist(), copy, strict=True)
    ]
    return _set(table, name, values)


def _outputs(table: pa.Table, assume_output: int, trace: Trace) -> Array:
    column = table.column("output_tokens")
    if column.null_count and not assume_output:
        raise PlanError(
            f"{trace.path.name}: {column.null_count} answers have no output_tokens: give "
            "--assume-output TOKENS"
        )
    values: Array = column.fill_null(assume_output).to_numpy()
    return values


def _words(table: pa.Table, name: str) -> tuple[str, ...]:
    return tuple(value or "" for value in table.column(name).to_pylist())


def _table(batches: Iterator[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(list(batches)).unify_dictionaries().combine_chunks()


def _set(table: pa.Table, name: str, values: Any) -> pa.Table:
    index = table.schema.get_field_index(name)
    field = table.schema.field(index)
    return table.set_column(index, field, pa.array(values, field.type))


def _write(table: pa.Table, path: Path) -> None:
    if not table.num_rows:
        raise PlanError(f"{path.name}: no request is left")
    with TraceWriter(path, row_group_rows=GROUP_ROWS) as writer:
        for batch in table.combine_chunks().to_batches(GROUP_ROWS):
            writer.write(batch)
