"""What several tests share: engines driven by a list of inputs, small fleets, traces and worlds."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pyarrow as pa

from policy.cost import TICKS_PER_NS, StepCost
from traces import TraceWriter, open_trace
from traces.schema import SCHEMA, conform
from twin.arrivals import Chunk
from twin.engine import Engine, EngineError, EngineSettings, Load, Sequence, StepRecord, Totals
from twin.fleet import ReplicaSpec, fleet_of
from twin.world import Result, World, WorldSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.events import Event
    from policy.runner import Log
    from traces import Trace

DECISIONS_MAX = 400_000
MS = 1_000_000
S = 1_000_000_000


# Engines


@dataclass(frozen=True, slots=True)
class Request:
    """A request that has not met an engine yet, so that it can be played more than once."""

    id: int
    prompt_tokens: int
    output_tokens: int = 1
    max_tokens: int = 0
    priority: int = 0
    pooling: bool = False
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 0

    def sequence(self) -> Sequence:
        return Sequence(
            self.id, self.prompt_tokens, self.output_tokens, self.max_tokens, self.priority,
            self.pooling, self.prefix, self.prefix_block_tokens,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Submit:
    """``request`` is handed over at ``at_ns``, with a stamp that may lie ahead."""

    at_ns: int
    request: Request
    ahead_ns: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    at_ns: int
    id: int
    ahead_ns: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """Observe the engine."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Slow:
    """From now on steps cost this."""

    at_ns: int
    cost: StepCost


@dataclass(frozen=True, slots=True)
class Stall:
    """The engine stands still for a while."""

    at_ns: int
    for_ns: int


Input = Submit | Abort | Look | Slow | Stall


@dataclass(slots=True)
class Played:
    """What an engine did with a list of inputs."""

    engine: Engine
    seqs: list[Sequence] = field(default_factory=list)
    calls: list[tuple[int, str, int]] = field(default_factory=list)
    """(when, "first" or "finish", id), in the order of the call-backs."""
    looks: list[tuple[int, Load]] = field(default_factory=list)
    totals: list[Totals] = field(default_factory=list)
    """At the same instants."""
    refused: list[str] = field(default_factory=list)
    wakes: list[int] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    """Of a recorded run."""

    def first_ns(self, id: int) -> int:
        return self._called("first", id)

    def finish_ns(self, id: int) -> int:
        return self._called("finish", id)

    def _called(self, kind: str, id: int) -> int:
        (at_ns,) = (at for at, what, who in self.calls if (what, who) == (kind, id))
        return at_ns

    def seq(self, id: int) -> Sequence:
        """The last one of this id."""
        return [seq for seq in self.seqs if seq.id == id][-1]

    def turns(self) -> dict[int, int]:
        """Of a recorded run: each first token's place among the outputs of its step, counted anew
        from what was scheduled. Not with cached prefixes, nor with an id used twice."""
        seqs = {seq.id: seq for seq in self.seqs}
        computed: Counter[int] = Counter()
        known: Counter[int] = Counter()
        out: dict[int, int] = {}
        for step in self.steps:
            place = 0
            for id in step.preempted:
                computed[id] = 0
            for id, tokens in step.scheduled:
                seq = seqs[id]
                computed[id] += tokens
                if computed[id] < seq.prompt_tokens + known[id] or known[id] == seq.outputs:
                    continue
                place += 1
                known[id] += 1
                if known[id] == 1:
                    out[id] = place
        return out

    def facts(self) -> dict[str, Any]:
        """Everything that must not depend on how the run was computed."""
        engine = self.engine
        return {
            "calls": self.calls,
            "looks": self.looks,
            "totals": self.totals,
            "refused": self.refused,
            "requests": [
                (seq.id, seq.state, seq.scheduled_ns, seq.turn, seq.cached_tokens, seq.preemptions)
                for seq in self.seqs
            ],
            "steps": engine.steps,
            "preemptions": engine.preemptions,
            "busy_ticks": engine.busy_ticks,
            "output_tokens": engine.output_tokens,
            "prefix_tokens_queried": engine.prefix_tokens_queried,
            "prefix_tokens_hit": engine.prefix_tokens_hit,
            "at the end": engine.observe(engine.now_ns),
        }


def play(
    settings: EngineSettings,
    cost: StepCost,
    inputs: Iterable[Input],
    *,
    skip: bool = True,
    record: bool = False,
    inputs_first: bool = True,
) -> Played:
    """Drive an engine through ``inputs`` until nothing is left to do.

    Args:
        record: keep every step; goes without skipping.
        inputs_first: what comes first where an input and a wake meet at the same instant.
    """
    played: Played
    engine = Engine(
        settings,
        cost,
        lambda seq, at_ns: played.calls.append((at_ns, "first", seq.id)),
        lambda seq: played.calls.append((engine.now_ns, "finish", seq.id)),
        skip and not record,
        (lambda step: played.steps.append(step)) if record else None,
    )
    played = Played(engine)
    coming = deque(sorted(inputs, key=lambda item: item.at_ns))
    for _ in range(DECISIONS_MAX):
        wake_ns = engine.next_wake_ns
        if wake_ns is None:
            if not coming:
                played.calls.sort(key=lambda call: call[0])  # first tokens are told ahead
                return played
            _input(played, coming.popleft())
        elif coming and coming[0].at_ns < wake_ns + inputs_first:
            _input(played, coming.popleft())
        else:
            played.wakes.append(wake_ns)
            engine.wake(wake_ns)
    raise AssertionError(f"no end after {DECISIONS_MAX} decisions")


def _input(played: Played, item: Input) -> None:
    engine = played.engine
    if isinstance(item, Look):
        played.looks.append((item.at_ns, engine.observe(item.at_ns)))
        played.totals.append(engine.totals(item.at_ns))
    elif isinstance(item, Slow):
        engine.slow(item.cost, item.at_ns)
    elif isinstance(item, Stall):
        engine.stall(item.at_ns, item.for_ns)
        played.calls = [  # first tokens are told ahead, so the owner has to hold them back
            (at_ns + item.for_ns if what == "first" and at_ns >= item.at_ns else at_ns, what, who)
            for at_ns, what, who in played.calls
        ]
    elif isinstance(item, Abort):
        engine.abort(item.id, item.at_ns + item.ahead_ns)
    else:
        seq = item.request.sequence()
        try:
            engine.submit(seq, item.at_ns + item.ahead_ns)
        except EngineError as error:
            played.refused.append(str(error))
        else:
            played.seqs.append(seq)


def assert_empty(engine: Engine) -> None:
    """Nobody is left, every block is free, and the free queue holds what it says."""
    blocks = engine.settings.kv_blocks - 1
    assert engine.observe(engine.now_ns) == Load(0, 0, 0)
    assert engine.next_wake_ns is None
    assert not engine._by_id
    assert engine._batch == engine._kv_tokens == sum(engine._phase) == 0
    pool = engine._pool
    assert pool.free == blocks
    queued, cell = 0, pool._head.after
    while cell is not None and cell is not pool._tail:
        assert cell.count > 0
        queued += cell.count
        cell = cell.after
    assert pool._front + queued == blocks


def flat_cost(
    step_ns: int = 1000, *, per_kv_token_ns: int = 0, per_prefill_token_ns: int = 0
) -> StepCost:
    """Every step takes the same time, plus what is asked for."""
    return StepCost(
        decode_fixed=step_ns * TICKS_PER_NS,
        prefill_fixed=step_ns * TICKS_PER_NS,
        per_sequence=0,
        per_kv_token=per_kv_token_ns * TICKS_PER_NS,
        per_prefill_token=per_prefill_token_ns * TICKS_PER_NS,
        per_prefill_quad=0,
    )


def engine_settings(**changes: Any) -> EngineSettings:
    """A small synchronous engine with plenty of room; ``changes`` by field."""
    plain = EngineSettings(
        kv_blocks=1001,
        block_tokens=4,
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_model_len=1000,
        async_scheduling=False,
    )
    return replace(plain, **changes)


# Fleets and worlds


BARE = WorldSettings(
    gateway_ns=0,
    network_ns=0,
    scrape_every_ns=0,
    scrape_age_ns=0,
    sample_every_ns=0,
    samples_max=10**9,
)
"""Nothing between client and engine."""


def bare_fleet(
    count: int,
    settings: EngineSettings,
    cost: StepCost,
    *,
    overhead_ns: tuple[int, int, int] = (0, 0, 0),
) -> list[ReplicaSpec]:
    """Replicas with the given engines; ``overhead_ns`` is request in, request out, token out."""
    specs = []
    for spec in fleet_of([("h100-sxm/qwen3-8b", count)]):
        overheads = msgspec.structs.replace(
            spec.profile.overheads,
            **{
                name: msgspec.structs.replace(
                    getattr(spec.profile.overheads, name), value=float(value), interval=None
                )
                for name, value in zip(
                    ("request_in_ns", "request_out_ns", "token_out_ns"), overhead_ns, strict=True
                )
            },
        )
        profile = msgspec.structs.replace(spec.profile, overheads=overheads)
        specs.append(replace(spec, profile=profile, settings=settings, cost=cost))
    return specs


class ListLog:
    """A decision log that is a list."""

    def __init__(self) -> None:
        self.records: list[tuple[int, Event, tuple[Decision, ...]]] = []

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        self.records.append((now_ns, event, decisions))


class NoLog:
    """Forgets everything."""

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        pass


class ScriptedPolicy:
    """A policy that is one function of (now, event)."""

    def __init__(self, decide: Callable[[int, Event], Iterable[Decision]]) -> None:
        self._decide = decide

    def step(self, now_ns: int, event: Event) -> tuple[Decision, ...]:
        return tuple(self._decide(now_ns, event))

    def deadline_ns(self) -> int | None:
        return None

    def snapshot(self) -> bytes:
        return b""


def chunk_of(rows: dict[str, Any]) -> Chunk:
    """A chunk of these columns; ids are counted and lengths are 1 where they are not given."""
    count = len(rows["arrival_s"])
    ones = np.ones(count, int)
    table = {
        "request_id": np.arange(count), "prompt_tokens": ones, "output_tokens": ones, **rows
    }  # fmt: skip
    columns = [_column(name, part) for name, part in table.items()]
    batch = pa.RecordBatch.from_arrays(columns, list(table))
    return Chunk(conform(batch, {"trace_id": "test", "provenance": "generated"}))


def play_rows(
    rows: dict[str, Any],
    fleet: list[ReplicaSpec],
    policy: Policy,
    *,
    settings: WorldSettings = BARE,
    log: Log | None = None,
    skip: bool = True,
    chunk_rows: int = 8192,
    **more: Any,
) -> tuple[World, list[Result]]:
    """Play a table of requests, given by column, and return what became of each, in order.

    ``arrival_s`` must rise; ids are counted and lengths are 1 where they are not given. ``more`` is
    for the world: faults, standbys and the like.
    """
    count = len(rows["arrival_s"])
    table = {"request_id": np.arange(count), **rows}
    chunks = (
        chunk_of({name: part[start : start + chunk_rows] for name, part in table.items()})
        for start in range(0, count, chunk_rows)
    )
    results: list[Result] = []
    world = World(
        fleet, policy, log or NoLog(), lambda chunk: results.extend(chunk.results), settings, skip,
        **more,
    )  # fmt: skip
    world.run(chunks)
    return world, results


# Traces


def write_rows(path: Path, rows: list[dict[str, Any]], batch_rows: int = 0) -> Trace:
    """A trace of these rows, in this order; missing columns are null, but ids are counted."""
    complete = [{"request_id": number, **row} for number, row in enumerate(rows)]
    names = [name for name in SCHEMA.names if any(name in row for row in complete)]
    size = batch_rows or len(rows)
    with TraceWriter(path, row_group_rows=size) as writer:
        for start in range(0, len(rows), size):
            part = complete[start : start + size]
            writer.write(
                pa.RecordBatch.from_arrays(
                    [_column(name, [row.get(name) for row in part]) for name in names], names
                )
            )
    return open_trace(path)


def _column(name: str, values: Any) -> pa.Array:
    kind = SCHEMA.field(name).type
    return pa.array(values, kind.value_type if pa.types.is_dictionary(kind) else kind)
