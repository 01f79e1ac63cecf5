"""Capacity under any order of events: bounds, survivors, places that are never given up, and a
restored double that agrees."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.capacity import STARTING, UP, Capacity, CapacityState, Seen, pool_of
from policy.decisions import Rotated, Start, Stop
from policy.events import Forecasted, Standby
from policy.parameters.capacity import Capacity as Section
from tests.policy_support import MS, S, up

REPLICAS = st.integers(0, 9)
POOLS = (("m",), ("n",))
SECTION = {"most_replicas": 6, "replicas_max": 8, "horizons_max": 3, "down_window_ms": 20_000}


class Capacities(RuleBasedStateMachine):
    """A capacity, and a double that is restored from snapshots now and then, fed the same."""

    def __init__(self) -> None:
        super().__init__()
        self.section = msgspec.convert(SECTION, Section)
        self.one = Capacity(self.section)
        self.two = Capacity(self.section)
        self.now_ns = 0
        self.offset_ns = 0
        """By how much the double's clock is ahead."""
        self.running: dict[int, str] = {}
        self.standbys: set[int] = set()
        self.managed: set[int] = set()

    def both(self, name: str, *arguments: Any) -> Any:
        first = getattr(self.one, name)(self.now_ns, *arguments)
        second = getattr(self.two, name)(self.now_ns + self.offset_ns, *arguments)
        assert first == second
        for decision in first or ():
            self.obey(decision)
        return first

    def obey(self, decision: object) -> None:
        if isinstance(decision, Start):
            assert decision.replica in self.standbys, "only a standby is started, and once"
            self.standbys.remove(decision.replica)
        elif isinstance(decision, Rotated):
            assert decision.replica in self.running
            if decision.state == "draining":
                assert decision.replica in self.managed, "what is not ours is not stopped"
        elif isinstance(decision, Stop):
            self.running.pop(decision.replica)

    @rule(step_ns=st.sampled_from((0, 1, MS, S, 5 * S, 90 * S)))
    def later(self, step_ns: int) -> None:
        self.now_ns += step_ns

    @rule(replica=REPLICAS, start_ns=st.integers(0, 60 * S))
    def standby(self, replica: int, start_ns: int) -> None:
        if replica not in self.running:
            models = POOLS[replica % 2]
            self.both("standby", Standby(replica, f"r{replica}", models, start_ns))
            self.standbys.add(replica)
            self.managed.add(replica)

    @rule(replica=REPLICAS)
    def up(self, replica: int) -> None:
        if replica not in self.running:
            models = POOLS[replica % 2]
            self.both("up", up(replica, models=models))
            self.running[replica] = pool_of(models, False)
            self.standbys.discard(replica)

    @rule(replica=REPLICAS, name=st.sampled_from(("down", "taken", "lost")))
    def leave(self, replica: int, name: str) -> None:
        if replica in self.running:
            self.both(name, replica)
            del self.running[replica]

    @rule(replica=REPLICAS)
    def emptied(self, replica: int) -> None:
        was_draining = self.one.draining(replica)
        assert self.both("emptied", replica) == ((Stop(replica),) if was_draining else ())

    @rule(
        horizons=st.sets(st.integers(0, 600), max_size=5).map(sorted),
        rates=st.lists(st.integers(0, 100_000), min_size=5, max_size=5),
    )
    def forecast(self, horizons: list[int], rates: list[int]) -> None:
        values = tuple(rates[: len(horizons)])
        self.both(
            "forecast",
            Forecasted(tuple(at * S for at in horizons), values, values, values, values),
        )

    @precondition(lambda self: self.one.due_loop(self.now_ns))
    @rule(
        work=st.integers(0, 9000), busy=st.integers(0, 1500), queued=st.integers(0, 2),
        wait_ns=st.integers(0, 9 * S),
    )  # fmt: skip
    def loop(self, work: int, busy: int, queued: int, wait_ns: int) -> None:
        seen = []
        for models in POOLS:
            pool = pool_of(models, False)
            serving = [
                replica
                for replica, its in self.running.items()
                if its == pool and not self.one.draining(replica)
            ]
            seen.append(Seen(pool, len(serving), busy, queued, wait_ns, 10 * work, work))
        decisions = self.both("loop", seen)
        deadline_ns = self.one.deadline_ns()
        assert deadline_ns is not None
        assert deadline_ns > self.now_ns
        for figures in seen:
            drained = sum(
                1
                for decision in decisions
                if isinstance(decision, Rotated) and decision.state == "draining"
                and self.running[decision.replica] == figures.pool
            )  # fmt: skip
            if drained:
                stay = figures.replicas_up - drained
                assert not queued
                assert stay >= 1
                assert figures.replicas_up * busy <= stay * self.section.busy_permille

    @rule(offset_ns=st.integers(-S, S))
    def restore(self, offset_ns: int) -> None:
        encoded = msgspec.msgpack.encode(self.one.state(self.now_ns))
        state = msgspec.msgpack.decode(encoded, type=CapacityState)
        self.offset_ns = offset_ns
        self.two = Capacity(self.section)
        self.two.load(state, self.now_ns + offset_ns)

    @invariant()
    def bounded_and_equal(self) -> None:
        assert self.one.size() <= self.one.size_most()
        assert self.one.turbo_extra_permille(self.now_ns) in (0, 300)
        ahead = self.now_ns + self.offset_ns
        assert self.one.state(self.now_ns) == self.two.state(ahead)


TestCapacities = Capacities.TestCase
TestCapacities.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


ALWAYS = 3


class Places(RuleBasedStateMachine):
    """Three replicas always run. Rollouts put others in their places, what runs dies and comes back
    as a standby or as it was: there are three places all the while, and three that serve in the
    end, though there is next to nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.section = msgspec.convert({"down_window_ms": 5000}, Section)
        self.capacity = Capacity(self.section)
        self.now_ns = 0
        self.running: set[int] = set()
        self.standbys: set[int] = set()
        self.coming: set[int] = set()
        """Started by capacity, and (next) by a rollout."""
        self.new: set[int] = set()
        self.away: set[int] = set()
        self.owed: set[int] = set()
        """Whose place a rollout has said it will fill."""
        for replica in range(ALWAYS):
            self.comes_up(replica)
        for replica in range(ALWAYS, 7):
            self.away.add(replica)
            self.stand_by(replica)

    def obey(self, decisions: Any) -> None:
        for decision in decisions:
            if isinstance(decision, Start):
                self.standbys.remove(decision.replica)
                self.coming.add(decision.replica)
            elif isinstance(decision, Rotated) and decision.state == "draining":
                self.obey(self.capacity.emptied(self.now_ns, decision.replica))
            elif isinstance(decision, Stop):
                self.goes(decision.replica)

    def comes_up(self, replica: int) -> None:
        self.capacity.up(self.now_ns, up(replica, models=("m",)))
        self.running.add(replica)

    def goes(self, replica: int) -> None:
        self.capacity.down(self.now_ns, replica)
        self.running.discard(replica)
        self.away.add(replica)

    def stand_by(self, replica: int) -> None:
        self.capacity.standby(self.now_ns, Standby(replica, f"r{replica}", ("m",), S))
        self.away.remove(replica)
        self.standbys.add(replica)

    @rule(which=REPLICAS)
    def starts(self, which: int) -> None:
        """Capacity's start comes to its end, well or not."""
        if which in self.coming:
            self.coming.remove(which)
            self.comes_up(which)

    @rule(which=REPLICAS)
    def again(self, which: int) -> None:
        if which in self.away:
            self.stand_by(which)

    @rule(which=REPLICAS)
    def as_it_was(self, which: int) -> None:
        """A supervisor starts anew what a rollout will replace."""
        if which in self.away and which in self.owed:
            self.away.remove(which)
            self.comes_up(which)

    @rule(which=REPLICAS)
    def dies_watched(self, which: int) -> None:
        if which in self.running:
            self.capacity.awaits(self.now_ns, which)
            self.owed.add(which)
            self.goes(which)

    @rule(which=REPLICAS)
    def hangs(self, which: int) -> None:
        """Nothing ends it; a rollout will."""
        if which in self.running:
            self.capacity.awaits(self.now_ns, which)
            self.owed.add(which)
            self.running.remove(which)
            self.away.add(which)

    @rule(which=REPLICAS)
    def answers(self, which: int) -> None:
        if which in self.away and self.machine(which).state not in (UP, STARTING):
            self.capacity.back(which)
            if self.machine(which).state == UP:
                self.away.remove(which)
                self.owed.discard(which)
                self.running.add(which)

    @rule(which=REPLICAS)
    def begins(self, which: int) -> None:
        if which in self.standbys:
            self.standbys.remove(which)
            self.capacity.taken(self.now_ns, which)
            self.new.add(which)

    @rule(which=REPLICAS, other=REPLICAS)
    def exchanged(self, which: int, other: int) -> None:
        """What a rollout started comes in: for what went, or for what runs, which is stopped."""
        if which not in self.new or not (other in self.owed or other in self.running):
            return
        self.new.remove(which)
        self.comes_up(which)
        leaving = other in self.running and other != which
        self.capacity.succeed(which, other, gone=not leaving)
        if leaving:
            self.goes(other)
        else:
            self.owed.discard(other)

    @rule(which=REPLICAS)
    def forgone(self, which: int) -> None:
        if which in self.owed:
            self.owed.remove(which)
            self.obey(self.capacity.forgone(self.now_ns, which))

    @rule()
    def policy_switched(self) -> None:
        state = msgspec.msgpack.encode(self.capacity.state(self.now_ns))
        self.capacity = Capacity(self.section)
        self.capacity.adopt(msgspec.msgpack.decode(state, type=CapacityState), self.now_ns)

    @rule(step_ns=st.sampled_from((0, 5 * S, 90 * S)))
    def loop(self, step_ns: int) -> None:
        self.now_ns += step_ns
        if self.capacity.due_loop(self.now_ns) and self.running:
            seen = Seen("m", len(self.running), 1, 0, 0, 10, 10)
            self.obey(self.capacity.loop(self.now_ns, [seen]))

    def machine(self, replica: int) -> Any:
        return self.capacity._machines[replica]

    @invariant()
    def no_place_is_given_up(self) -> None:
        machines = self.capacity._machines.values()
        taken = sum(not each.managed and each.state in (UP, STARTING) for each in machines)
        assert taken + sum(each.awaited + each.open for each in machines) == ALWAYS

    def teardown(self) -> None:
        """When no rollout goes on any more, as many serve as always did."""
        for replica in sorted(self.new):
            self.new.remove(replica)
            self.away.add(replica)
        for _ in range(4):
            for replica in sorted(self.away):
                self.stand_by(replica)
            for replica in sorted(self.owed):
                self.forgone(replica)
            for replica in sorted(self.coming):
                self.starts(replica)
            self.capacity.forgo_all()
            self.running = self.running or {0}  # a pool that nobody serves has no loop
            self.loop(90 * S)
            self.no_place_is_given_up()
        machines = self.capacity._machines.values()
        assert sum(not each.managed and each.state == UP for each in machines) == ALWAYS


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
