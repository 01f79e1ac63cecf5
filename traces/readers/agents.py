"""Recorded agent sessions: kv-cache-tester and LMCache's agent traces.

Both are session-relative: there is no clock that sessions share, so `arrival_s` is null unless a
session rate is given. Then sessions start as a seeded Poisson process, in the order of the file,
and their calls follow at the recorded distances.

kv-cache-tester: github.com/callanjfox/kv-cache-tester, Apache-2.0, one row per model call, with
64-token prefix blocks. LMCache: github.com/LMCache/lmcache-agent-trace, Apache-2.0, sizes in
characters, so token numbers are estimates (provenance "derived").
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.readers.common import EMPTY_PROMPT
from traces.schema import TraceError, category_column

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.readers.common import ReadOptions, Rejects

    Array = np.ndarray[Any, np.dtype[Any]]

SESSION_COLUMNS = (
    "session_id",
    "agent",
    "idx",
    "t_s",
    "model",
    "input_tokens",
    "output_tokens",
    "shared_prefix_blocks",
    "new_hash_ids",
    "api_time_s",
    "ttft_s",
    "think_time_s",
)
LMCACHE_COLUMNS = (
    "agent",
    "session_id",
    "idx",
    "timestamp_us",
    "input_chars",
    "output_chars",
    "shared_prefix_chars",
)
BLOCK_TOKENS = 64
_SESSION_SHIFT = 32
_BATCH_ROWS = 2048
_BATCH_IDS = 1 << 20
_STAMP_RES_S = 1.0  # calls are stamped in whole seconds


@dataclass
class _Starts:
    """Draws the start of each session: Poisson at `rate` per second, or none."""

    rate: float | None
    rng: np.random.Generator
    now_s: float = 0.0

    def next(self) -> float | None:
        if self.rate is None:
            return None
        self.now_s += float(self.rng.standard_exponential()) / self.rate
        return self.now_s


@dataclass
class _Session:
    """The session being read: its number, its start, and the last call of each of its agents."""

    name: str
    number: int
    start_s: float | None
    base_s: dict[str, float] = field(default_factory=dict)
    last_id: dict[str, int] = field(default_factory=dict)
    last_blocks: dict[str, Array] = field(default_factory=dict)
    end_s: float = 0.0


@dataclass
class _Rows:
    """Rows gathered for the next batch."""

    columns: dict[str, list[Any]] = field(default_factory=dict)
    blocks: list[Array] = field(default_factory=list)
    ids: int = 0

    def add(self, blocks: Array, **values: Any) -> None:
        for name, value in values.items():
            self.columns.setdefault(name, []).append(value)
        self.blocks.append(blocks)
        self.ids += blocks.size

    @property
    def ready(self) -> bool:
        return len(self.blocks) >= _BATCH_ROWS or self.ids >= _BATCH_IDS

    def batch(self) -> pa.RecordBatch:
        """The rows as a batch; empties this."""
        offsets = np.concatenate(([0], np.cumsum([b.size for b in self.blocks]))).astype(np.int32)
        values = np.concatenate(self.blocks)
        arrays: dict[str, Any] = {
            "prefix_ids": pa.ListArray.from_arrays(pa.array(offsets), pa.array(values)),
            "prefix_block_tokens": pa.array([BLOCK_TOKENS] * len(self.blocks), pa.int16()),
        }
        for name, column in self.columns.items():
            text = name in ("model", "step", "tenant_id", "endpoint", "outcome")
            kind = pa.float64() if name.endswith("_s") else pa.int64()
            arrays[name] = category_column(column) if text else pa.array(column, kind)
        self.columns, self.blocks, self.ids = {}, [], 0
        return pa.RecordBatch.from_pydict(arrays)


def _table_rows(path: Path, names: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        for batch in file.iter_batches(512, columns=list(names)):
            columns = [
                _lists(batch.column(i))
                if batch.schema.names[i] == "new_hash_ids"
                else batch.column(i).to_pylist()
                for i in range(batch.num_columns)
            ]
            for values in zip(*columns, strict=True):
                yield dict(zip(batch.schema.names, values, strict=True))


def _lists(column: pa.Array) -> list[Array]:
    """Lists of int64 as arrays, an empty one for null."""
    flat = column.flatten().to_numpy()
    if column.null_count:
        sizes = [0 if not v.is_valid else len(v) for v in column]
        return np.split(flat, np.cumsum(sizes)[:-1])
    offsets = column.offsets.to_numpy()
    return np.split(flat, offsets[1:-1] - offsets[0])


def read_sessions(path: Path, options: ReadOptions, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """Yield the calls of recorded agent sessions.

    `session_id` and `chain_id` number the sessions; `step` is the agent (`main`, or `main.7` for
    the sub-agent that stands seventh in the main agent's list); the parent is the agent's call
    before, and for a sub-agent's first call the main agent's last one before it. Prefix ids are
    made unique to the session.
    """
    return _read(path, SESSION_COLUMNS, _session_call, options, rejects)


def read_lmcache(path: Path, options: ReadOptions, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """Yield the calls of LMCache's agent runs; tokens are characters / `chars_per_token`.

    An answer of no character was a tool call, which the log leaves out: its length is null.
    """
    return _read(path, LMCACHE_COLUMNS, _lmcache_call, options, rejects)


def _read(
    path: Path,
    names: tuple[str, ...],
    call: Any,
    options: ReadOptions,
    rejects: Rejects,
) -> Iterator[pa.RecordBatch]:
    starts = _Starts(options.session_rate, np.random.Generator(np.random.PCG64(options.seed)))
    rows, session, done, made = _Rows(), None, set(), 0
    for number, row in enumerate(_table_rows(path, names), start=1):
        rejects.seen += 1
        if session is None or row["session_id"] != session.name:
            if row["session_id"] in done:
                raise TraceError(
                    f"{path}: row {number}: session {row['session_id']!r} goes on after another "
                    "one; sort the source by session first"
                )
            done.add(row["session_id"])
            session = _Session(row["session_id"], len(done), starts.next())
        why = _call_problem(row)
        if why:
            rejects.bad(number, why)
            continue
        call(rows, session, row, made, options)
        made += 1
        if rows.ready:
            yield rows.batch()
        if options.limit is not None and made >= options.limit:
            break
    if rows.blocks:
        yield rows.batch()


def _call_problem(row: dict[str, Any]) -> str:
    for name in ("input_tokens", "output_tokens", "input_chars", "output_chars", "idx", "t_s"):
        value = row.get(name, 0)
        if value is None or value < 0:
            return f"{name} is {'missing' if value is None else f'negative: {value}'}"
    if row.get("input_tokens") == 0:
        return f"input_tokens is 0: {EMPTY_PROMPT}"
    return ""


def _session_call(
    rows: _Rows, session: _Session, row: dict[str, Any], request_id: int, options: ReadOptions
) -> None:
    agent = row["agent"]
    if agent not in session.base_s:  # a sub-agent's clock starts when the call before it ended
        session.base_s[agent] = 0.0 if agent == "main" else session.end_s
        if "main" in session.last_id:
            session.last_id[agent] = session.last_id["main"]
    t_s = session.base_s[agent] + row["t_s"]
    before = session.last_blocks.get(agent, np.empty(0, np.int64))
    new = row["new_hash_ids"].astype(np.int64) + (session.number << _SESSION_SHIFT)
    blocks = np.concatenate((before[: row["shared_prefix_blocks"] or 0], new))
    parent = session.last_id.get(agent)
    api_s = row["api_time_s"]
    rows.add(
        blocks,
        request_id=request_id,
        arrival_s=None if session.start_s is None else session.start_s + t_s,
        arrival_res_s=0.0 if session.start_s is None else _STAMP_RES_S,
        prompt_tokens=row["input_tokens"],
        output_tokens=row["output_tokens"],
        model=row["model"],
        endpoint="chat",
        session_id=session.number,
        turn=row["idx"],
        chain_id=session.number,
        parent_request_id=parent,
        step=agent,
        think_time_s=None if parent is None else row["think_time_s"],
        outcome="answered",
        ttft_s=row["ttft_s"],
        e2e_s=api_s,
    )
    session.last_id[agent] = request_id
    session.last_blocks[agent] = blocks
    if agent == "main":
        session.end_s = t_s + (api_s or 0.0)


def _lmcache_call(
    rows: _Rows, session: _Session, row: dict[str, Any], request_id: int, options: ReadOptions
) -> None:
    agent, per_token = row["agent"], options.chars_per_token
    t_s = row["timestamp_us"] / 1e6
    base_s = session.base_s.setdefault("", t_s)
    prompt = max(1, round(row["input_chars"] / per_token))
    shared = int((row["shared_prefix_chars"] or 0) / per_token) // BLOCK_TOKENS
    before = session.last_blocks.get("", np.empty(0, np.int64))[:shared]
    count = max(prompt // BLOCK_TOKENS - before.size, 0)
    first = (session.number << _SESSION_SHIFT) + session.last_id.get("block", 0)
    session.last_id["block"] = session.last_id.get("block", 0) + count
    blocks = np.concatenate((before, np.arange(first, first + count, dtype=np.int64)))
    output = row["output_chars"]
    rows.add(
        blocks,
        request_id=request_id,
        arrival_s=None if session.start_s is None else session.start_s + t_s - base_s,
        arrival_res_s=0.0,
        prompt_tokens=prompt,
        output_tokens=max(1, round(output / per_token)) if output else None,
        endpoint="chat",
        tenant_id=agent,
        session_id=session.number,
        turn=row["idx"],
        chain_id=session.number,
        parent_request_id=session.last_id.get("call"),
        outcome="answered",
    )
    session.last_id["call"] = request_id
    session.last_blocks[""] = blocks
