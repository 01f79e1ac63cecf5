"""How many replicas run: a floor from the forecast, and a quick loop that moves above it.

A replica takes minutes to start, so the load that counts is the highest one expected until a
replica asked for now would be there. The forecast is slow, so it is only a floor: every few seconds
the load that is seen may ask for more, never for less. Load is counted in *work*: thousandths of
one full replica's time. How much of its in-flight target a replica holds says little about it
(half of the target is four fifths of the throughput), and finished tokens lag behind a rise.

A replica is given up only when less was enough for a while and those that stay can bear the load:
it takes no new requests, and is stopped when its last one is done. Only replicas that were
announced as a standby are ever given up. A fleet without standbys and without forecasts is left
in peace: there is no loop.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from policy.decisions import Rotated, Scaled, Start, Stop
from policy.facts import COUNT_MOST, NS_MOST, Illegal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from policy.events import Forecasted, ReplicaUp, Standby
    from policy.parameters.capacity import Capacity as Section

NS_PER_MS = 1_000_000
SCALE = 256  # averages keep 8 bits behind the point
START_PATIENCE = 3  # times its start time, after which a starting replica is not counted on
STANDBY, STARTING, UP, DRAINING, AWAY = range(5)
"""AWAY: down, isolated, stopping, or in another mechanism's hands."""


def pool_of(models: tuple[str, ...], pooling: bool) -> str:
    """The name of the pool of all replicas that serve these models: they bear load together."""
    return ("embeddings:" if pooling else "") + "+".join(models)


class Seen(NamedTuple):
    """A pool as it was since the last loop."""

    pool: str
    replicas_up: int
    """In rotation, and not draining."""
    busy_permille: int
    """In flight and queued, of the in-flight target; above 1000 when work waits."""
    queued: int
    wait_ns: int
    """Predicted for a request queued now: the queued work on all replicas together."""
    tokens_per_s: int
    """Of what arrived: prompt and expected output, as judged then."""
    work_permille: int
    """Of what arrived: thousandths of one full replica's time, per time passed."""


class Machine(msgspec.Struct, array_like=True, gc=False):
    """A replica, running or not."""

    replica: int
    pool: str
    state: int
    start_ns: int = 0
    """From ``Start`` to ``ReplicaUp``, as announced; where it took longer, the last time."""
    managed: bool = False
    """It may be stopped: it was a standby once, so it can be started again, or another takes its
    place."""
    started_ns: int = 0
    domain: str = ""
    """What fails together with it; empty: the replica alone."""
    stands_for: int = -1
    """The replica, never given up, whose place it took; -1: none."""
    awaited: int = 0
    """Places that it had and that were never to be given up: another mechanism will say who takes
    them; and (next) nobody was there to take them. More than one: it took another's meanwhile."""
    open: int = 0

    @property
    def holds(self) -> bool:
        """Is it itself in a place that is never given up?"""
        return not self.managed and self.state in (STARTING, UP)

    @property
    def owes(self) -> bool:
        """Is there a place that it had, and that is to be taken?"""
        return self.awaited + self.open > 0

    def paid(self) -> None:
        """One of these is taken."""
        if self.awaited:
            self.awaited -= 1
        else:
            self.open -= 1


class Pool(msgspec.Struct, array_like=True):
    """What is remembered of a pool's load. Averages are multiplied by ``SCALE``."""

    name: str
    desired: int = 0
    load: int = 0
    """Work per mille, averaged over seconds, and (next) over a minute or two: what it rises by."""
    base: int = 0
    work: int = 0
    """The same over minutes, and (next) tokens per second: their ratio is the mix."""
    tokens: int = 0
    wants: list[tuple[int, int]] = []
    """(when, replicas) asked for within the window: falling, later ones after."""


class CapacityState(msgspec.Struct, array_like=True):
    """Canonical: by id and name, times relative to now."""

    next_loop_ns: int
    awake: bool
    machines: list[Machine]
    pools: list[Pool]
    points: list[tuple[int, int, int]]
    """(when, median, floor's quantile) of the forecast, in tokens per second."""
    peak: tuple[int, int] | None
    """(when it begins, its highest median)."""


class Capacity:
    """Starts, drains and stops replicas; says how many there should be."""

    __slots__ = (
        "_awake", "_down_ns", "_loop_ns", "_machines", "_next_loop_ns", "_peak", "_points",
        "_pools", "_section",
    )  # fmt: skip

    def __init__(self, section: Section) -> None:
        self._section = section
        loop_ms = section.hpa_sync_ms if section.rule == "hpa" else section.loop_ms
        self._loop_ns = loop_ms * NS_PER_MS
        self._down_ns = section.down_window_ms * NS_PER_MS
        self._next_loop_ns = 0
        self._awake = False
        """There is something to scale, or a forecast whose signal someone wants."""
        self._machines: dict[int, Machine] = {}
        self._pools: dict[str, Pool] = {}
        self._points: list[tuple[int, int, int]] = []
        self._peak: tuple[int, int] | None = None

    # Replicas

    def standby(self, now_ns: int, event: Standby) -> None:
        """A replica can be started."""
        pool = pool_of(event.models, event.pooling)
        machine = self._known(event.replica, pool)
        if machine is None or machine.state in (UP, DRAINING):
            return
        self._awake = True
        machine.state = STANDBY
        machine.start_ns = max(event.start_ns, machine.start_ns)
        machine.managed = True
        if not machine.owes:
            machine.stands_for = -1
        machine.domain = event.domain

    def up(self, now_ns: int, spec: ReplicaUp) -> None:
        """A replica can take work, whoever started it."""
        machine = self._known(spec.replica, pool_of(spec.models, spec.pooling))
        if machine is None:
            return
        if machine.state == STARTING:
            machine.start_ns = max(machine.start_ns, now_ns - machine.started_ns)
        machine.state = UP
        machine.domain = spec.domain

    def back(self, replica: int) -> None:
        """A replica that was lost, and not ended, answers again: who stands for it may go."""
        machine = self._machines.get(replica)
        if machine is None or machine.state != AWAY:
            return
        machine.state = UP
        if machine.managed and machine.owes:
            machine.paid()
            machine.managed = False
        for other in self._machines.values():
            if other.stands_for == replica:
                other.stands_for = -1
                if not other.managed:
                    machine.managed, other.managed = False, True
                elif other.owes:
                    machine.managed = False
                    other.paid()

    def down(self, now_ns: int, replica: int) -> None:
        """A replica is gone; the next loop makes up for it if it is needed."""
        self.taken(now_ns, replica)

    def succeed(self, coming: int, leaving: int, gone: bool = False) -> None:
        """A rollout puts one replica in another's place: if that was never given up, it is not
        either. ``gone``: the other went before, whatever it is by now."""
        new, old = self._machines.get(coming), self._machines.get(leaving)
        if new is None or old is None:
            return
        if old.owes and (gone or not old.holds):
            old.paid()
            old.open += not new.managed  # that one has a place: another is to take this one
            if new.managed and new is not old:
                new.stands_for = -1 if old.stands_for == coming else old.stands_for
            new.managed = False
        elif not gone:
            new.managed, old.managed = old.managed, new.managed
            new.stands_for, old.stands_for = old.stands_for, new.stands_for

    def taken(self, now_ns: int, replica: int) -> None:
        """Another mechanism starts or stops this replica: it is left alone until it is a standby
        or up again."""
        machine = self._machines.get(replica)
        if machine is not None:
            machine.state = AWAY

    def awaits(self, now_ns: int, replica: int) -> None:
        """As ``taken``, of a running replica that is lost. Who takes its place is told by
        ``succeed``, later, when it may be a standby itself; or nobody does: ``forgone``."""
        machine = self._machines.get(replica)
        if machine is not None:
            machine.awaited += machine.holds
            machine.managed |= machine.holds
            machine.state = AWAY

    def forgone(self, now_ns: int, replica: int) -> Sequence[Decision]:
        """Nobody takes its place after all: a standby does, as soon as there is one."""
        machine = self._machines.get(replica)
        if machine is None or not machine.awaited:
            return ()
        machine.awaited -= 1
        machine.open += 1
        return () if machine.state in (STARTING, UP) else self._fill(now_ns, machine)

    def forget(self, replica: int) -> None:
        """Nobody knows what became of it: it is what it says that it is from now on. One that comes
        up by itself is never given up."""
        self._machines.pop(replica, None)
        for machine in self._machines.values():
            if machine.stands_for == replica:
                machine.stands_for = -1

    def forgo_all(self) -> None:
        """Whoever would have said who takes a place is not there any more."""
        for machine in self._machines.values():
            machine.open += machine.awaited
            machine.awaited = 0

    def _fill(self, now_ns: int, machine: Machine) -> Sequence[Decision]:
        """A standby, it may be the same, takes a place that this one had."""
        decisions = self._grow(now_ns, machine.pool, 1)
        if decisions:
            machine.open -= 1
            self._hand_over(machine, decisions)
        return decisions

    def _hand_over(self, machine: Machine, decisions: list[Rotated | Start]) -> None:
        """What takes the place of a replica that is never given up is not given up either."""
        stood_for = machine.stands_for
        for decision in decisions:
            taking = self._machines[decision.replica]
            taking.managed = False
            stands_for = machine.replica if stood_for < 0 else stood_for
            taking.stands_for = -1 if stands_for == taking.replica else stands_for

    def lost(self, now_ns: int, replica: int, card: bool = False) -> Sequence[Decision]:
        """A running replica is out for good, or one that was started does not come up: a standby
        replaces it at once, unless fewer would do. Who takes the place of a replica that is never
        given up is not given up either.

        Args:
            card: its card broke: a standby on another one goes first.
        """
        machine = self._machines.get(replica)
        if machine is not None and machine.awaited and machine.state == AWAY:
            return self.forgone(now_ns, replica)  # it hung, and before anything came it was ended
        if machine is None or machine.state not in (STARTING, UP, DRAINING):
            return ()
        pool = self._pool(machine.pool)
        have = self._have(machine.pool)
        kept = sum(not other.managed for other in self._in(machine.pool, UP))
        kept += machine.state == STARTING and not machine.managed
        machine.state = AWAY
        wanted = min(have, max(pool.desired, kept)) if pool.desired else have
        missing = wanted - self._have(pool.name)
        decisions = self._grow(now_ns, pool.name, missing, machine.domain if card else "")
        if not machine.managed:
            self._hand_over(machine, decisions)
        return decisions

    def emptied(self, now_ns: int, replica: int) -> Sequence[Decision]:
        """Nothing is in flight on the replica: if it is draining, it can be stopped."""
        if not self.draining(replica):
            return ()
        self._machines[replica].state = AWAY
        return (Stop(replica),)

    def draining(self, replica: int) -> bool:
        """It takes no new requests, because fewer replicas are needed."""
        machine = self._machines.get(replica)
        return machine is not None and machine.state == DRAINING

    def _known(self, replica: int, pool: str) -> Machine | None:
        """The replica's entry, made if there is room for it."""
        machine = self._machines.get(replica)
        if machine is None:
            if len(self._machines) >= self._section.replicas_max and not self._forget_one():
                return None
            machine = self._machines[replica] = Machine(replica, pool, AWAY)
            self._machines = dict(sorted(self._machines.items()))
        machine.pool = pool
        return machine

    def _forget_one(self) -> bool:
        """Make room: of the replicas that are away, the oldest; last of all what had a place that
        is to be taken."""
        away = [machine for machine in self._machines.values() if machine.state == AWAY]
        if away:
            del self._machines[min(away, key=_owes).replica]
        return bool(away)

    def _pool(self, name: str) -> Pool:
        pool = self._pools.get(name)
        if pool is None:
            names = {machine.pool for machine in self._machines.values()}
            self._pools = {old: pool for old, pool in self._pools.items() if old in names}
            pool = self._pools[name] = Pool(name)
            self._pools = dict(sorted(self._pools.items()))
        return pool

    def _in(self, pool: str, state: int) -> list[Machine]:
        """By id."""
        return [
            machine
            for machine in self._machines.values()
            if machine.pool == pool and machine.state == state
        ]

    def _start_ns(self, pool: str) -> int:
        """How long the pool's slowest replica takes to start."""
        machines = self._machines.values()
        return max([machine.start_ns for machine in machines if machine.pool == pool])

    def _have(self, pool: str) -> int:
        """Replicas that take work, or will."""
        return len(self._in(pool, UP)) + len(self._in(pool, STARTING))

    # The forecast

    def forecast(self, now_ns: int, event: Forecasted) -> None:
        """What is expected, until the next one comes."""
        check_forecast(event)
        self._awake = True
        between = self._section.floor_quantile_permille
        rows = zip(event.horizons_ns, event.tokens_p50, event.tokens_p90, strict=True)
        self._points = [
            (now_ns + horizon, median, median + (upper - median) * between // 1000)
            for horizon, median, upper in rows
        ][: self._section.horizons_max]
        self._peak = self._next_peak(now_ns)

    def _next_peak(self, now_ns: int) -> tuple[int, int] | None:
        section, points = self._section, self._points
        if not points:
            return None
        level = _at(points, now_ns, 1)
        highest = max(point[1] for point in points)
        if highest * 1000 > level * (1000 + section.peak_rise_permille):
            near = highest * section.peak_near_permille // 1000
            return next((when, highest) for when, median, _ in points if median >= near)
        peak = self._peak
        if peak is None or now_ns < peak[0] - section.turbo_ahead_ms * NS_PER_MS:
            return None
        # It has begun, and lasts as long as the load stays near its highest point.
        return peak if level * 1000 >= peak[1] * section.peak_near_permille else None

    def turbo_extra_permille(self, now_ns: int) -> int:
        """By how much Turbo's capacity is larger now: from shortly ahead of a forecast peak until
        it has passed."""
        peak = self._peak
        if peak is None or now_ns < peak[0] - self._section.turbo_ahead_ms * NS_PER_MS:
            return 0
        if now_ns > self._points[-1][0]:  # no forecast came since: nothing is known
            return 0
        return self._section.turbo_extra_permille

    # The loop

    def deadline_ns(self) -> int | None:
        """When the next loop is due; None while there is nothing to scale and nobody to tell."""
        return self._next_loop_ns if self._awake else None

    def due_loop(self, now_ns: int) -> bool:
        """Is it time for ``loop``?"""
        return self._awake and now_ns >= self._next_loop_ns

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        """Only ``loop`` has something to do, and it must be told the load."""
        return ()

    def loop(self, now_ns: int, seen: Sequence[Seen]) -> Sequence[Decision]:
        """Look at the load of these pools, and start or drain replicas. Others are left alone."""
        self._next_loop_ns = now_ns + self._loop_ns
        for machine in self._machines.values():
            patience_ns = START_PATIENCE * (machine.start_ns + self._loop_ns)
            if machine.state == STARTING and now_ns - machine.started_ns > patience_ns:
                machine.state = AWAY
                machine.open += not machine.managed  # what it was to stand for is not forgotten
                machine.managed = True
        known = {machine.pool for machine in self._machines.values()}
        seen = [pool_seen for pool_seen in seen if pool_seen.pool in known]
        self._learn(seen)
        decisions = self._settle({pool_seen.pool for pool_seen in seen}, now_ns)
        for pool_seen in seen:
            pool = self._pool(pool_seen.pool)
            wanted, why = self._wanted(now_ns, pool, pool_seen)
            if wanted != pool.desired:
                pool.desired = wanted
                decisions.append(Scaled(pool.name, wanted, why))
            missing = wanted - self._have(pool.name)
            if missing > 0:
                decisions += self._grow(now_ns, pool.name, missing)
            elif missing < 0:
                decisions += self._shrink(pool_seen, -missing)
        return decisions

    def _settle(self, pools: set[str], now_ns: int) -> list[Decision]:
        """Places that nobody was there to take: perhaps now."""
        decisions: list[Decision] = []
        for machine in self._machines.values():
            if machine.pool not in pools:
                continue
            if machine.open and machine.managed and machine.state in (STARTING, UP):
                machine.open -= 1  # it is back itself
                machine.managed = False
            while machine.open and (started := self._fill(now_ns, machine)):
                decisions += started
        return decisions

    def _learn(self, seen: Sequence[Seen]) -> None:
        section = self._section
        loop_ms = self._loop_ns // NS_PER_MS
        for pool_seen in seen:
            pool = self._pool(pool_seen.pool)
            work, tokens = pool_seen.work_permille * SCALE, pool_seen.tokens_per_s * SCALE
            if not pool.tokens:  # nothing is known yet: the first look is the average
                pool.load, pool.base, pool.work, pool.tokens = work, work, work, tokens
                continue
            pool.load = _averaged(pool.load, work, loop_ms, section.load_memory_ms)
            pool.base = _averaged(pool.base, work, loop_ms, section.trend_memory_ms)
            pool.work = _averaged(pool.work, work, loop_ms, section.mix_memory_ms)
            pool.tokens = _averaged(pool.tokens, tokens, loop_ms, section.mix_memory_ms)

    def _wanted(self, now_ns: int, pool: Pool, seen: Seen) -> tuple[int, str]:
        """How many replicas the pool should have, and what asks for them."""
        section = self._section
        if section.rule == "hpa":
            now, why = self._hpa(pool, seen), "hpa"
        else:
            now, why = self._reactive(pool, seen)
            floor = self._floor(now_ns, pool) if section.rule == "forecast" else 0
            if floor > now:
                now, why = floor, "forecast"
        now = min(max(now, section.least_replicas), section.most_replicas)
        wants = pool.wants
        while wants and wants[-1][1] <= now:
            wants.pop()
        wants.append((now_ns, now))
        while wants[0][0] < now_ns - self._down_ns:
            del wants[0]
        wanted = wants[0][1]
        return wanted, why if wanted == now else "recent"

    def _reactive(self, pool: Pool, seen: Seen) -> tuple[int, str]:
        """For the load seen now, a rise that is too steep to be chance, and what waits."""
        section = self._section
        load = pool.load
        if load * 1000 > pool.base * (1000 + section.trend_least_permille):
            start_ms = self._start_ns(pool.name) // NS_PER_MS
            load += (load - pool.base) * start_ms // section.trend_memory_ms
        waiting = seen.replicas_up * 1000 * seen.wait_ns // (section.drain_ms * NS_PER_MS)
        by_load = _ceil(load + waiting * SCALE, section.work_permille * SCALE)
        by_busy = _ceil(seen.replicas_up * seen.busy_permille, section.busy_permille)
        return (by_busy, "busy") if by_busy > by_load else (by_load, "load")

    def _floor(self, now_ns: int, pool: Pool) -> int:
        """For the highest load expected until a replica asked for now has come up."""
        all_tokens = sum(other.tokens for other in self._pools.values())
        if not (self._points and all_tokens):
            return 0
        until_ns = now_ns + self._start_ns(pool.name) + self._section.margin_ms * NS_PER_MS
        tokens = _highest(self._points, now_ns, until_ns)
        return _ceil(tokens * pool.work, all_tokens * self._section.floor_work_permille)

    def _hpa(self, pool: Pool, seen: Seen) -> int:
        """Kubernetes' rule on an average value: what all replicas have to do, over what one shall
        have to do; no change while that is within the tolerance of what there is."""
        section = self._section
        have = self._have(pool.name)
        if section.hpa_metric == "work":
            total = pool.load // SCALE
        else:
            total = seen.replicas_up * seen.busy_permille
        target = have * section.hpa_target_permille
        if abs(total - target) * 1000 <= section.hpa_tolerance_permille * target:
            return have
        return _ceil(total, section.hpa_target_permille)

    def _grow(
        self, now_ns: int, pool: str, missing: int, broken: str = ""
    ) -> list[Rotated | Start]:
        """First those that were draining, then the standbys that start soonest; those on the card
        of ``broken``, a failure domain, last of all."""
        decisions: list[Rotated | Start] = []
        for machine in self._in(pool, DRAINING)[: max(0, missing)]:
            machine.state = UP
            decisions.append(Rotated(machine.replica, "in", "needed"))
        standbys = sorted(self._in(pool, STANDBY), key=_soonest)
        standbys.sort(key=lambda machine: share_card(machine.domain, broken))
        for machine in standbys[: max(0, missing - len(decisions))]:
            machine.state = STARTING
            machine.started_ns = now_ns
            decisions.append(Start(machine.replica))
        return decisions

    def _shrink(self, seen: Seen, surplus: int) -> list[Decision]:
        """Drain as many as are too many, the last first, if those that stay can bear the load."""
        if seen.queued:
            return []
        needed = _ceil(seen.replicas_up * seen.busy_permille, self._section.busy_permille)
        spare = min(surplus, seen.replicas_up - max(1, needed))
        decisions: list[Decision] = []
        for machine in reversed(self._in(seen.pool, UP)):
            if len(decisions) >= spare:
                break
            if machine.managed:
                machine.state = DRAINING
                decisions.append(Rotated(machine.replica, "draining", "scale_in"))
        return decisions

    # Snapshots

    def size(self) -> int:
        wants = sum(len(pool.wants) for pool in self._pools.values())
        return len(self._machines) + len(self._pools) + wants + len(self._points)

    def size_most(self) -> int:
        section = self._section
        wants = self._down_ns // self._loop_ns + 2
        return section.replicas_max * (2 + wants) + section.horizons_max

    def state(self, now_ns: int) -> CapacityState:
        return CapacityState(
            self._next_loop_ns - now_ns,
            self._awake,
            [_shifted(machine, -now_ns) for machine in self._machines.values()],
            [_moved(pool, -now_ns) for pool in self._pools.values()],
            [(when - now_ns, median, floor) for when, median, floor in self._points],
            None if self._peak is None else (self._peak[0] - now_ns, self._peak[1]),
        )

    def load(self, state: CapacityState, now_ns: int) -> None:
        self._next_loop_ns = state.next_loop_ns + now_ns
        self._awake = state.awake
        self._machines = {machine.replica: _shifted(machine, now_ns) for machine in state.machines}
        self._pools = {pool.name: _moved(pool, now_ns) for pool in state.pools}
        self._points = [(when + now_ns, median, floor) for when, median, floor in state.points]
        self._peak = None if state.peak is None else (state.peak[0] + now_ns, state.peak[1])

    def adopt(self, state: CapacityState, now_ns: int) -> None:
        """Go on after another policy's capacity: its replicas and forecast are facts, what it made
        of the load is not."""
        section = self._section
        self.load(state, now_ns)
        self._next_loop_ns = now_ns
        self._pools = {}
        self._points = self._points[: section.horizons_max]
        kept = sorted(self._machines.values(), key=_least_away)[: section.replicas_max]
        self._machines = {machine.replica: machine for machine in sorted(kept, key=_id)}


def check_forecast(event: Forecasted) -> None:
    horizons = event.horizons_ns
    rates = (event.requests_p50, event.requests_p90, event.tokens_p50, event.tokens_p90)
    if any(len(rate) != len(horizons) for rate in rates):
        raise Illegal("a forecast needs as many rates of each kind as horizons")
    if any(later <= earlier for earlier, later in pairwise((-1, *horizons))):
        raise Illegal("a forecast's horizons must rise, from 0 or later")
    if any(not 0 <= value <= COUNT_MOST for rate in rates for value in rate) or (
        horizons and horizons[-1] > NS_MOST
    ):
        raise Illegal(f"a forecast's rates must lie within 0..{COUNT_MOST}")


def _at(points: list[tuple[int, int, int]], when_ns: int, column: int) -> int:
    """The forecast at an instant, straight between its points; 0 after the last one."""
    later = bisect_left(points, (when_ns,))
    if later == len(points):
        return 0
    if not later or points[later][0] == when_ns:
        return points[later][column]
    before, after = points[later - 1], points[later]
    rise = after[column] - before[column]
    return before[column] + rise * (when_ns - before[0]) // (after[0] - before[0])


def _highest(points: list[tuple[int, int, int]], from_ns: int, until_ns: int) -> int:
    """The floor's highest value within a stretch of time."""
    inside = points[bisect_left(points, (from_ns,)) : bisect_right(points, (until_ns,))]
    ends = _at(points, from_ns, 2), _at(points, until_ns, 2)
    return max(*ends, *(point[2] for point in inside))


def _averaged(average: int, value: int, step_ms: int, memory_ms: int) -> int:
    return average + (value - average) * step_ms // (memory_ms + step_ms)


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def share_card(one: str, other: str) -> bool:
    """Are two failure domains on one card? ``host0/card3/mig1`` and ``host0/card2+3`` are; what
    names no card is as a whole one."""
    if not (one and other):
        return False
    (host, *rest), (other_host, *other_rest) = one.split("/"), other.split("/")
    if host != other_host or not (rest and other_rest):
        return one == other
    cards, others = (set(part[0].removeprefix("card").split("+")) for part in (rest, other_rest))
    return not cards.isdisjoint(others)


def _soonest(machine: Machine) -> tuple[int, int]:
    return machine.start_ns, machine.replica


def _least_away(machine: Machine) -> tuple[bool, int]:
    return machine.state == AWAY, machine.replica


def _owes(machine: Machine) -> bool:
    return machine.owes


def _id(machine: Machine) -> int:
    return machine.replica


def _shifted(machine: Machine, by_ns: int) -> Machine:
    started_ns = machine.started_ns + by_ns if machine.state == STARTING else 0
    return msgspec.structs.replace(machine, started_ns=started_ns)


def _moved(pool: Pool, by_ns: int) -> Pool:
    wants = [(when + by_ns, replicas) for when, replicas in pool.wants]
    return msgspec.structs.replace(pool, wants=wants)
