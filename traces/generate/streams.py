"""One stream of a specification, as batches of trace rows.

Rows of a stream come chunk by chunk, in no particular order in time; the writer sorts them. Every
stream has random generators of its own, seeded from the trace's seed and the stream's name, so a
stream's rows do not depend on the other streams.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from traces.generate.arrivals import start_times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from traces.generate.spec import Chains, Prefix, Sessions, Stream, TraceSpec

    Array = np.ndarray[Any, np.dtype[Any]]
    Rows = dict[str, Array]

_GROUP = 1024  # sessions or chains laid out together
_STREAM_SHIFT = 46  # prefix ids: stream, kind bit, item, block
_KIND_BIT = 1 << 45
_ITEM_SHIFT = 20
_LINE_USERS = 1_000_000
_STREAM_SESSIONS = 1_000_000_000


@dataclass
class Ids:
    """Hands out request ids, and session or chain numbers."""

    request: int = 0
    group: int = 0

    def requests(self, count: int) -> Array:
        """The next `count` request ids."""
        self.request += count
        return np.arange(self.request - count, self.request, dtype=np.int64)

    def groups(self, count: int) -> Array:
        """The next `count` session or chain numbers."""
        self.group += count
        return np.arange(self.group - count, self.group, dtype=np.int64)


@dataclass
class _Maker:
    """What the layouts of a stream share: its spec, its number, its generators."""

    spec: TraceSpec
    stream: Stream
    number: int
    line: int
    ids: Ids
    starts: np.random.Generator = field(init=False)
    people: np.random.Generator = field(init=False)
    lengths: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        seed = np.random.SeedSequence([self.spec.seed, zlib.crc32(self.stream.name.encode())])
        self.starts, self.people, self.lengths = (
            np.random.Generator(np.random.PCG64(child)) for child in seed.spawn(3)
        )

    def start_chunks(self) -> Iterator[Array]:
        return start_times(
            self.stream.arrivals, -self.spec.warm_up_s, self.spec.duration_s, self.starts
        )

    def users(self, count: int) -> Array:
        """User ids, 0 for all when the stream has no users."""
        users = self.stream.users
        if users is None:
            return np.zeros(count, np.int64)
        rank = _zipf(self.people, users.count, users.zipf, count)
        return self.line * _LINE_USERS + 1 + rank

    def system_prompts(self, count: int) -> Array:
        """Which system prompt each of `count` starts has."""
        prefix = self.stream.prefix
        if prefix is None:
            return np.zeros(count, np.int64)
        return _zipf(self.people, prefix.prompts, prefix.zipf, count)

    @property
    def system_tokens(self) -> int:
        return 0 if self.stream.prefix is None else self.stream.prefix.system_tokens

    def outputs(self, count: int) -> Array:
        values = self.stream.output_tokens.draw_tokens(self.lengths, count)
        limit = self.stream.max_output_tokens
        return values if limit is None else np.minimum(values, limit)

    def batch(self, rows: Rows, prefix_ids: pa.Array | None) -> pa.RecordBatch | None:
        """The rows within the trace's time, as a batch; arrivals to the microsecond."""
        rows["arrival_s"] = np.round(rows["arrival_s"], 6)
        keep = (rows["arrival_s"] >= 0) & (rows["arrival_s"] < self.spec.duration_s)
        at = np.flatnonzero(keep)
        if not at.size:
            return None
        columns = {name: _column(name, values[at]) for name, values in rows.items()}
        if prefix_ids is not None and self.stream.prefix is not None:
            columns["prefix_ids"] = prefix_ids.take(pa.array(at))
            columns["prefix_block_tokens"] = pa.repeat(
                pa.scalar(self.stream.prefix.block_tokens, pa.int16()), at.size
            )
        if self.stream.prompt_bytes_per_token is not None:
            size = np.rint(rows["prompt_tokens"][at] * self.stream.prompt_bytes_per_token)
            columns["prompt_bytes"] = pa.array(size.astype(np.int32))
        return _label(pa.RecordBatch.from_pydict(columns), self.stream)


def stream_batches(spec: TraceSpec, number: int, ids: Ids) -> Iterator[pa.RecordBatch]:
    """Yield the rows of stream `number` of `spec`, in no particular order."""
    stream = spec.streams[number]
    lines = list(dict.fromkeys(s.business_line for s in spec.streams))
    line = lines.index(stream.business_line) + 1
    maker = _Maker(spec, stream, number, line, ids)
    ids.group = (number + 1) * _STREAM_SESSIONS
    for times in maker.start_chunks():
        if stream.sessions is None and stream.chains is None:
            made = iter([_singles(maker, times)])
        else:
            made = _grouped(maker, times)
        for batch in made:
            if batch is not None:
                yield batch


def _grouped(maker: _Maker, times: Array) -> Iterator[pa.RecordBatch | None]:
    for first in range(0, times.size, _GROUP):
        starts = times[first : first + _GROUP]
        if maker.stream.sessions is not None:
            yield from _session_turns(maker, maker.stream.sessions, starts)
        elif maker.stream.chains is not None:
            yield from _chain_calls(maker, maker.stream.chains, starts)


def _singles(maker: _Maker, times: Array) -> pa.RecordBatch | None:
    """Requests that stand alone."""
    count = times.size
    new = np.maximum(maker.stream.prompt_tokens.draw_tokens(maker.lengths, count), 1)
    which = maker.system_prompts(count)
    rows: Rows = {
        "request_id": maker.ids.requests(count),
        "arrival_s": times,
        "prompt_tokens": maker.system_tokens + new,
        "output_tokens": maker.outputs(count),
        "user_id": maker.users(count),
    }
    prefix = maker.stream.prefix
    blocks = None
    if prefix is not None:
        shared = np.full(count, prefix.system_tokens // prefix.block_tokens)
        blocks = _prefix_lists(maker, prefix, which, np.zeros(count, np.int64), shared)
    return maker.batch(rows, blocks)


def _session_turns(
    maker: _Maker, sessions: Sessions, starts: Array
) -> Iterator[pa.RecordBatch | None]:
    """Turn after turn of a group of sessions: the prompt is the whole conversation so far."""
    count = starts.size
    groups, users = maker.ids.groups(count), maker.users(count)
    which = maker.system_prompts(count)
    turns = np.maximum(sessions.turns.draw_tokens(maker.lengths, count), 1)
    context = np.full(count, maker.system_tokens, np.int64)
    now, think = starts.copy(), np.zeros(count)
    parent, parent_s = np.full(count, -1, np.int64), np.full(count, -1.0)
    live = np.arange(count)
    turn = 0
    while live.size:
        new = np.maximum(maker.stream.prompt_tokens.draw_tokens(maker.lengths, live.size), 1)
        prompt = context[live] + new
        fits = prompt <= sessions.prompt_tokens_max
        live, prompt = live[fits], prompt[fits]
        if not live.size:
            return
        output = maker.outputs(live.size)
        request = maker.ids.requests(live.size)
        known = parent_s[live] >= 0
        rows: Rows = {
            "request_id": request,
            "arrival_s": now[live],
            "prompt_tokens": prompt,
            "output_tokens": output,
            "user_id": users[live],
            "session_id": groups[live],
            "turn": np.full(live.size, turn),
            "parent_request_id": np.where(known, parent[live], -1),
            "think_time_s": np.where(known, think[live], np.nan),
        }
        prefix = maker.stream.prefix
        blocks = None
        if prefix is not None:
            full = prompt // prefix.block_tokens
            blocks = _prefix_lists(maker, prefix, which[live], groups[live], full)
        yield maker.batch(rows, blocks)
        pause = sessions.think_s.draw(maker.lengths, live.size)
        service = sessions.service_s + sessions.service_s_per_token * output
        parent[live], parent_s[live] = request, np.round(now[live], 6)
        think[live] = pause
        now[live] += service + pause
        context[live] = prompt + output
        turn += 1
        live = live[(turns[live] > turn) & (now[live] < maker.spec.duration_s)]


@dataclass
class _Chain:
    """Where a group of chains stands: one entry a chain in every array."""

    number: Array
    user: Array
    prompt: Array  # which system prompt
    context: Array
    ready_s: Array  # end of the last call of the round before
    parent: Array
    parent_s: Array


def _chain_calls(maker: _Maker, chains: Chains, starts: Array) -> Iterator[pa.RecordBatch | None]:
    """Plan, rounds of tool calls, answer, for a group of chains."""
    count = starts.size
    chain = _Chain(
        maker.ids.groups(count),
        maker.users(count),
        maker.system_prompts(count),
        np.full(count, maker.system_tokens, np.int64),
        starts.copy(),
        np.full(count, -1, np.int64),
        np.full(count, -1.0),
    )
    task = np.maximum(maker.stream.prompt_tokens.draw_tokens(maker.lengths, count), 1)
    rounds = chains.rounds.draw_tokens(maker.lengths, count)
    everyone = np.arange(count)
    yield from _chain_round(maker, chains, chain, everyone, "plan", [(everyone, task)])
    for number in range(int(rounds.max(initial=0))):
        live = everyone[rounds > number]
        width = 1 + maker.lengths.integers(chains.parallel, size=live.size)
        calls = []
        for call in range(int(width.max(initial=0))):
            who = live[width > call]
            calls.append((who, chains.tool_tokens.draw_tokens(maker.lengths, who.size)))
        yield from _chain_round(maker, chains, chain, live, "tool", calls)
    none = np.zeros(count, np.int64)
    yield from _chain_round(maker, chains, chain, everyone, "answer", [(everyone, none)])


def _chain_round(
    maker: _Maker,
    chains: Chains,
    chain: _Chain,
    live: Array,
    step: str,
    calls: list[tuple[Array, Array]],
) -> Iterator[pa.RecordBatch | None]:
    """One round: `calls` are (chains that make this call, its new tokens), started together."""
    gap = np.zeros(chain.number.size)
    if step != "plan":
        gap[live] = chains.gap_s.draw(maker.lengths, live.size)
    start = chain.ready_s + gap
    base, parent, known = chain.context.copy(), chain.parent.copy(), chain.parent_s >= 0
    for index, (who, new) in enumerate(calls):
        prompt = base[who] + new
        fits = prompt <= chains.prompt_tokens_max
        who, prompt, new = who[fits], prompt[fits], new[fits]
        if not who.size:
            continue
        output, request = maker.outputs(who.size), maker.ids.requests(who.size)
        rows: Rows = {
            "request_id": request,
            "arrival_s": start[who].copy(),
            "prompt_tokens": prompt,
            "output_tokens": output,
            "user_id": chain.user[who],
            "chain_id": chain.number[who],
            "parent_request_id": np.where(known[who], parent[who], -1),
            "think_time_s": np.where(known[who], gap[who], np.nan),
        }
        prefix, blocks = maker.stream.prefix, None
        if prefix is not None:
            # The first call's tokens come next in the context; a sibling shares the context only.
            full = (prompt if index == 0 else base[who]) // prefix.block_tokens
            blocks = _prefix_lists(maker, prefix, chain.prompt[who], chain.number[who], full)
        batch = maker.batch(rows, blocks)
        if batch is not None:
            yield batch.append_column("step", _repeat(step, batch.num_rows))
        end = start[who] + chains.service_s + chains.service_s_per_token * output
        later = end > chain.ready_s[who]
        chain.parent[who] = np.where(later, request, chain.parent[who])
        chain.parent_s[who] = np.where(later, np.round(start[who], 6), chain.parent_s[who])
        chain.ready_s[who] = np.maximum(end, chain.ready_s[who])
        chain.context[who] += new + output


def _prefix_lists(
    maker: _Maker, prefix: Prefix, which: Array, group: Array, blocks: Array
) -> pa.Array:
    """Block ids of each prompt: those of its system prompt, then those of its session or chain."""
    system = prefix.system_tokens // prefix.block_tokens
    ends = np.cumsum(blocks)
    index = np.arange(int(ends[-1]), dtype=np.int64) - np.repeat(ends - blocks, blocks)
    stream = (maker.number + 1) << _STREAM_SHIFT
    shared = stream + (which << _ITEM_SHIFT)
    item = group % _STREAM_SESSIONS
    own = stream + _KIND_BIT + (item << _ITEM_SHIFT)
    values = index + np.where(index < system, np.repeat(shared, blocks), np.repeat(own, blocks))
    offsets = np.concatenate(([0], ends)).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _zipf(rng: np.random.Generator, count: int, power: float, draws: int) -> Array:
    """`draws` ranks in [0, count), rank k with weight (k + 1) ** -power."""
    weights = np.arange(1, count + 1, dtype=np.float64) ** -power
    cumulative = np.cumsum(weights)
    picked = np.searchsorted(cumulative / cumulative[-1], rng.random(draws), "right")
    return np.minimum(picked, count - 1).astype(np.int64)


_TYPES = {
    "prompt_tokens": pa.int32(),
    "output_tokens": pa.int32(),
    "turn": pa.int32(),
    "think_time_s": pa.float32(),
}


def _column(name: str, values: Array) -> pa.Array:
    """An Arrow column; -1 is null in ids, NaN in think times, 0 in users."""
    mask = None
    if name == "parent_request_id":
        mask = values < 0
    elif name == "think_time_s":
        mask = np.isnan(values)
    elif name == "user_id":
        mask = values == 0
    return pa.array(values, _TYPES.get(name), mask=mask)


def _repeat(value: str, rows: int) -> pa.Array:
    zeros = pa.array(np.zeros(rows, np.int32))
    return pa.DictionaryArray.from_arrays(zeros, pa.array([value], pa.string()))


def _label(batch: pa.RecordBatch, stream: Stream) -> pa.RecordBatch:
    """Add the columns that are the same in all rows of a stream."""
    rows = batch.num_rows
    for name in ("business_line", "sla_class", "model", "endpoint", "tenant_id"):
        value = getattr(stream, name)
        if value is not None:
            batch = batch.append_column(name, _repeat(value, rows))
    for name, kind in (
        ("priority", pa.int8()),
        ("deadline_s", pa.float32()),
        ("max_output_tokens", pa.int32()),
    ):
        value = getattr(stream, name)
        if value is not None:
            batch = batch.append_column(name, pa.repeat(pa.scalar(value, kind), rows))
    return batch.append_column("arrival_res_s", pa.repeat(pa.scalar(0.0, pa.float32()), rows))
