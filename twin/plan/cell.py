"""One run of the plan: a day of the workload, grown or not, through a fleet, with a fault or not.

A fault strikes in the busiest minute. A lost card's replica is started anew on a spare card by a
supervisor, after ``REPLACED_S``: it loads the model (its profile's cold start) and begins with an
empty cache, while the policy moves the traffic. The fleet is of fixed size: scaling is off.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from policy.compose import build_policy
from policy.log import HashLog
from traces import open_trace
from twin.arrivals import arrivals
from twin.faults import EccUncorrectable, GpuLost, SlowCard, TrafficSpike
from twin.fleet import fleet_of, within
from twin.plan.workload import day_of
from twin.replay import rare_collections
from twin.results import Observed
from twin.summary import Summary
from twin.uncertainty import drawn_fleet
from twin.world import World, WorldSettings

if TYPE_CHECKING:
    from pathlib import Path

    from policy.parameters import Parameters
    from twin.arrivals import Chunk
    from twin.faults import Fault
    from twin.fleet import ReplicaSpec
    from twin.plan.inputs import Need, Promise
    from twin.summary import Group

    Array = np.ndarray[Any, np.dtype[Any]]

NS = 1_000_000_000
FaultName = Literal["none", "n-1", "host", "ecc", "slow", "spike"]
FAULTS: dict[str, str] = {
    "none": "nothing goes wrong",
    "n-1": "one replica's card is lost at the peak; a spare card loads the model",
    "host": "a host with all its replicas is lost at the peak; spare cards load the model",
    "ecc": "a card reports an uncorrectable memory error at the peak, its process dies 10 s later",
    "slow": "one card takes half as long again, from the peak on",
    "spike": "twice the traffic for up to a minute, at the peak",
}
REPLACED_S = 37.0
"""From a card's error to a process on another card: the figure that operators report."""
DIES_S = 10.0
SLOW_PERMILLE = 1500
SPIKE_PERMILLE = 2000
SPIKE_S = 60.0
BIN_S = 5.0
WATCH_NS = NS
SLACK_MOST = 1.0
SLACK_LEAST = -3.0


@dataclass(frozen=True, slots=True)
class Cell:
    """What is played."""

    day_0: Path
    """The recorded stretch that the day is made from."""
    window: tuple[float, float]
    """What of it is played, in seconds."""
    machine: Path
    """The profile's file."""
    replicas: int
    parameters: Parameters
    promise: Promise
    growth: float = 1.0
    fault: FaultName = "none"
    fault_s: float = 0.0
    """In the recorded stretch's time; where the fault strikes."""
    run: int = 0
    """The day. 0: as recorded, step times as the profile has them; else another one, and they are
    drawn from what it knows of its errors."""
    seed: int = 0
    whole: bool = True
    """Play to the end even if a promise is already broken."""
    cold_start_s: float | None = None
    """None: the profile's."""
    spike_permille: int = SPIKE_PERMILLE

    @property
    def day(self) -> Path:
        return day_of(self.day_0, self.run, self.growth, self.window)


@dataclass(frozen=True, slots=True)
class Seen:
    """What came of a group of requests."""

    offered: int
    good: int
    ttft_s_p95: float
    """Of those offered; infinite where more than one in twenty got none."""
    ttft_s_p99: float
    shed: int
    failed: int

    @property
    def attainment(self) -> float:
        return self.good / self.offered if self.offered else math.nan


@dataclass(frozen=True, slots=True)
class Pressure:
    """How full the fleet was."""

    kv_share_p95: float
    """Of the fullest replica's cache, over the seconds."""
    batch_most: int
    """Most sequences that one replica ran."""
    kv_tokens_most: int
    seats_share_p95: float
    queued_most: int
    """In the policy's queue."""
    engine_waiting_most: int
    preemptions: int
    late: int
    """Answered, but too late to the first token."""
    dragging: int
    """Answered, but too slow per token."""
    shed: int
    failed: int
    queue_s_mean: float
    prefill_s_mean: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell; ``stopped``: a promise was broken, and the rest was not played."""

    groups: dict[tuple[str, str], Seen]
    slack: float
    """The least of the promises': the logarithm of limit over seen; negative: one is broken."""
    broken: tuple[Need, ...]
    stopped: bool
    pressure: Pressure
    output_tokens: int
    good_tokens: int
    span_s: float
    bins: dict[tuple[str, str], Array] = field(repr=False)
    """By group: good and offered, by arrival in steps of ``BIN_S`` of the run's own time."""
    fault_s: float = 0.0
    """In the run's own time."""
    cpu_s: float = 0.0

    @property
    def holds(self) -> bool:
        return self.slack >= 0


class _Broken(Exception):
    """A promise cannot be held any more."""


def play(cell: Cell) -> Outcome:
    """Play it.

    Raises:
        TraceError, FleetError: what it names cannot be played.
    """
    began_s = time.process_time()
    fleet = _fleet(str(cell.machine), cell.replicas)
    if cell.run:
        fleet = drawn_fleet(fleet, cell.seed, cell.run)
    if cell.cold_start_s is not None:
        fleet = [replace(spec, cold_start_ns=round(cell.cold_start_s * NS)) for spec in fleet]
    parameters = fixed_size(cell.parameters)
    tally = _Tally(cell, fleet)
    at_s = max(0.0, cell.fault_s - cell.window[0])
    world = World(
        fleet, build_policy(parameters), HashLog(), tally.settled,
        WorldSettings(sample_every_ns=0), faults=_faults(cell, at_s), seed=cell.seed + cell.run,
    )  # fmt: skip
    _supervise(world, cell, at_s)
    tally.watch(world)
    stopped = False
    with rare_collections():
        try:
            world.run(arrivals(open_trace(cell.day), seed=cell.seed))
        except _Broken:
            stopped = True
    return tally.outcome(world, stopped, at_s, time.process_time() - began_s)


def fixed_size(parameters: Parameters) -> Parameters:
    """The policy without its own scaling: the size is what the plan asks about."""
    capacity = msgspec.structs.replace(parameters.capacity, enabled=False)
    return msgspec.structs.replace(parameters, capacity=capacity)


def seen_of(group: Group) -> Seen:
    return Seen(
        group.offered, group.good, _offered_quantile_s(group, 0.95),
        _offered_quantile_s(group, 0.99), group.shed, group.failed,
    )  # fmt: skip


def slack_of(need: Need, seen: Seen | None) -> float:
    """Log of limit over seen, within bounds; a group without a request holds everything."""
    if seen is None or not seen.offered:
        return SLACK_MOST
    if need.what != "attainment":
        ratio = need.limit / max(getattr(seen, need.what), 1e-9)
    else:
        missed = seen.offered - seen.good
        allowed = (1 - need.limit) * seen.offered
        if missed <= allowed < 1:  # none may be missed, and none was
            return SLACK_MOST / 10
        ratio = (allowed + 0.5) / (missed + 0.5)
        if missed > allowed:
            ratio = min(ratio, 1 - 1e-9)
    return min(SLACK_MOST, max(SLACK_LEAST, math.log(ratio) if ratio > 0 else SLACK_LEAST))


@lru_cache(maxsize=64)
def _fleet(machine: str, replicas: int) -> list[ReplicaSpec]:
    return fleet_of([(machine, replicas)])


def _faults(cell: Cell, at_s: float) -> tuple[Fault, ...]:
    name = cell.fault
    if name == "n-1":
        return (GpuLost(at_s=at_s, on=0, back_s=REPLACED_S),)
    if name == "host":
        return (GpuLost(at_s=at_s, on="host0", back_s=REPLACED_S),)
    if name == "ecc":
        return (EccUncorrectable(at_s=at_s, on=0, dies_after_s=DIES_S, reset_s=REPLACED_S),)
    if name == "slow":
        return (SlowCard(at_s=at_s, on=0, factor_permille=SLOW_PERMILLE),)
    if name == "spike":
        for_s = min(SPIKE_S, (cell.window[1] - cell.window[0]) / 5)
        return (TrafficSpike(at_s=at_s, factor_permille=cell.spike_permille, for_s=for_s),)
    return ()


def _supervise(world: World, cell: Cell, at_s: float) -> None:
    """Start again what was lost, once there is a card for it."""
    if cell.fault not in ("n-1", "host", "ecc"):
        return
    lost = [
        replica for replica in world.replicas
        if replica.id == 0 or (cell.fault == "host" and within(replica.spec.domain, "host0"))
    ]  # fmt: skip

    def start(event: object) -> None:
        for replica in lost:
            replica.start()

    world.after(round((at_s + REPLACED_S) * NS) + 1, start)


class _Tally:
    """Counts as chunks settle, and stops a run that cannot hold its promises any more."""

    def __init__(self, cell: Cell, fleet: list[ReplicaSpec]) -> None:
        self._cell = cell
        self._fleet = fleet
        self._summary = Summary(cell.promise.slo)
        self._bins: dict[tuple[str, str], dict[int, list[int]]] = {}
        self._kv: list[float] = []
        self._seats: list[float] = []
        self._most = dict.fromkeys(("batch", "kv", "queued", "waiting"), 0)
        self._late = self._dragging = 0
        self._last_arrival_ns = 0
        self._allowed = {} if cell.whole else _allowed(cell)

    def settled(self, chunk: Chunk) -> None:
        seen = Observed(chunk, self._fleet, WorldSettings())
        self._summary.add(chunk, seen)
        slo = self._cell.promise.slo
        limit = np.array([
            own / NS if own else slo.limit_s(name)
            for own, name in zip(chunk.deadline_ns, chunk.sla, strict=True)
        ])  # fmt: skip
        late = seen.whole & ~(seen.columns["ttft_s"] <= limit)
        dragging = seen.whole & ~late & (seen.columns["tpot_s"] > slo.tpot_s)
        self._late += int(late.sum())
        self._dragging += int(dragging.sum())
        good = seen.whole & ~late & ~dragging
        at = (np.array(chunk.arrival_ns) // round(BIN_S * NS)).tolist()
        self._last_arrival_ns = max(self._last_arrival_ns, chunk.arrival_ns[-1])
        for kind, names in (("class", chunk.sla), ("tier", seen.tier), ("line", chunk.line)):
            for name, place, fine in zip(names, at, good.tolist(), strict=True):
                cells = self._bins.setdefault((kind, name), {}).setdefault(place, [0, 0])
                cells[0] += fine
                cells[1] += 1
        self._stop_if_broken()

    def _stop_if_broken(self) -> None:
        for need, allowed in self._allowed.items():
            group = self._summary.groups[_SUMMARY[need.kind]].get(need.group)
            if group is None:
                continue
            if need.what == "attainment":
                missed = group.offered - group.good
            else:
                within_limit = _count_within(group, need.limit)
                missed = group.offered - within_limit
            if missed > allowed:
                raise _Broken

    def watch(self, world: World) -> None:
        def look(event: object) -> None:
            now_ns = world.now_ns
            fullest = seats = 0.0
            waiting = 0
            for replica in world.replicas:
                settings = replica.spec.settings
                load = replica.engine.observe(now_ns)
                fullest = max(fullest, load.kv_blocks_used / (settings.kv_blocks - 1))
                seats = max(seats, load.running / settings.max_num_seqs)
                waiting += load.waiting
                self._raise("batch", load.running)
                self._raise("kv", load.kv_blocks_used * settings.block_tokens)
            self._kv.append(fullest)
            self._seats.append(seats)
            self._raise("queued", world.queued)
            self._raise("waiting", waiting)
            if world.alive:
                world.after(WATCH_NS, look)

        world.after(WATCH_NS, look)

    def _raise(self, name: str, value: int) -> None:
        self._most[name] = max(self._most[name], value)

    def outcome(self, world: World, stopped: bool, at_s: float, cpu_s: float) -> Outcome:
        summary, promise = self._summary, self._cell.promise
        groups = {
            (kind, name): seen_of(group)
            for kind, own in _SUMMARY.items()
            for name, group in summary.groups[own].items()
        }
        groups["all", ""] = seen_of(summary.all)
        slacks = [slack_of(need, groups.get((need.kind, need.group))) for need in promise.needs]
        slack = min(slacks)
        if stopped:
            slack = min(slack, -1e-6)
        every = summary.all
        done = max(every.answered + every.degraded, 1)
        span_ns = max(self._last_arrival_ns, 1)
        pressure = Pressure(
            float(np.quantile(self._kv or [0.0], 0.95)), self._most["batch"], self._most["kv"],
            float(np.quantile(self._seats or [0.0], 0.95)), self._most["queued"],
            self._most["waiting"], sum(replica.preemptions for replica in world.replicas),
            self._late, self._dragging, every.shed, every.failed,
            every.hops["queue_s"] / done, every.hops["prefill_s"] / done,
        )  # fmt: skip
        last = span_ns // round(BIN_S * NS) + 1
        bins = {key: _filled(cells, last) for key, cells in self._bins.items()}
        broken = tuple(need for need, own in zip(promise.needs, slacks, strict=True) if own < 0)
        return Outcome(
            groups, slack, broken, stopped, pressure, every.output_tokens,
            every.good_output_tokens, summary.last_ns / NS, bins, at_s, cpu_s,
        )  # fmt: skip


_SUMMARY = {"class": "sla", "tier": "tier", "line": "line"}


def _allowed(cell: Cell) -> dict[Need, float]:
    """By need of a class or line: how many requests of the day may miss it. With a spike more
    arrive than are in the day."""
    if cell.fault == "spike":
        return {}
    counts = _counts(str(cell.day))
    return {
        need: need.missed_most * count + 1e-9
        for need in cell.promise.needs
        if (count := counts.get((need.kind, need.group)))
    }


@lru_cache(maxsize=64)
def _counts(day: str) -> dict[tuple[str, str], int]:
    counts: dict[tuple[str, str], int] = {}
    for batch in open_trace(day).batches(["sla_class", "business_line"]):
        for kind, column in (("class", batch.column(0)), ("line", batch.column(1))):
            for name in column.to_pylist():
                key = kind, name or ""
                counts[key] = counts.get(key, 0) + 1
    return counts


def _count_within(group: Group, limit_s: float) -> int:
    """At least so many had their first token by then: bins are 0.5 % wide."""
    histogram = group.metrics["ttft_s"]
    edges, shares = histogram.curve()
    place = int(np.searchsorted(edges, limit_s * 1.01, "right"))
    return round(shares[place - 1] * histogram.count) if place else 0


def _offered_quantile_s(group: Group, share: float) -> float:
    """Over all that were offered: one without a first token waits without end."""
    histogram = group.metrics["ttft_s"]
    count = histogram.count
    rank = max(1, math.ceil(share * group.offered - 1e-9))
    if not group.offered:
        return math.nan
    if rank > count:
        return math.inf
    return histogram.quantile_s((rank - 0.5) / count)


def _filled(cells: dict[int, list[int]], last: int) -> Array:
    out = np.zeros((2, max(last, max(cells) + 1)), np.int64)
    for place, (good, offered) in cells.items():
        out[:, place] = good, offered
    return out
