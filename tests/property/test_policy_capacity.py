"""Capacity under any order of events: bounds, survivors, and a restored double that agrees."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.capacity import Capacity, CapacityState, Seen, pool_of
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
