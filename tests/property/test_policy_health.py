"""Health under any order of events: bounded, capped, one probe at a time, the same after a reload.

Every machine drives two: one lives on, the other is now and then made anew from its state.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from policy.decisions import ReadProgress, Rotated
from policy.events import GpuFault, Progress, Standby
from policy.health import FAULTS, Health, HealthState
from policy.parameters.health import Health as Section
from tests.policy_support import MS, S, assert_integers, up

REPLICAS = 4
SECTION = {
    "slow_samples_least": 2, "slow_window_ms": 1000, "slow_strikes": 1, "error_volume_least": 4,
    "in_flight_max": 6,
}  # fmt: skip
NEUTRAL = ("rejected", "too_large", "backpressure", "controller_lost")
replicas = st.integers(0, REPLICAS - 1)
times_ns = st.sampled_from((0, 1, 20 * MS, 300 * MS, 2 * S, 40 * S))


class HealthMachine(RuleBasedStateMachine):
    in_flight = Bundle("in_flight")

    def __init__(self) -> None:
        super().__init__()
        section = msgspec.convert(SECTION, Section)
        self.section = section
        self.health = Health(section)
        self.double = Health(section)
        self.now_ns = 0
        self.request = 0
        self.tokens = 0
        self.probes: dict[int, int] = {}
        """The request that tries a replica, as its gate was taken."""
        for replica in range(REPLICAS):
            self.both("up", up(replica, models=("m",) if replica < 3 else ("n",)))

    def both(self, name: str, *args: Any) -> tuple[Any, ...]:
        decisions = getattr(self.health, name)(self.now_ns, *args) or ()
        assert tuple(decisions) == tuple(getattr(self.double, name)(self.now_ns, *args) or ())
        for decision in decisions:
            assert_integers(decision)
            if isinstance(decision, Rotated):
                assert decision.state == self.health.state_of(decision.replica)
                if decision.state != "probing" or decision.why == "backpressure":
                    self.probes.pop(decision.replica, None)
                if decision.why == "hung":
                    self.hangs(decision.replica)
            else:
                assert isinstance(decision, ReadProgress)
        return tuple(decisions)

    def hangs(self, replica: int) -> None:
        """It, what hung before and what is out are half of their pool at most, though some are
        down; or it is the only one."""
        if replica == 3:
            return
        state = self.health.state(self.now_ns)
        pool = {watch.replica: watch for watch, *_ in state.watches if watch.replica < 3}
        hung = {number for number, _ in state.hung if number < 3}
        assert replica in hung
        out = {number for number, watch in pool.items() if watch.state != "in" and not watch.broken}
        well = {number for number, watch in pool.items() if watch.state == "in"}
        left = [watch for watch in pool.values() if not watch.broken]
        alone = len(left) == 1 and hung == {replica}  # then a standby takes its place
        assert alone or 2 * len(out | hung) <= len(out | hung | well)

    def pass_time(self, for_ns: int, alive: bool) -> None:
        end_ns = self.now_ns + for_ns
        while (due_ns := self.health.deadline_ns()) is not None and due_ns <= end_ns:
            assert due_ns == self.double.deadline_ns()
            self.now_ns = max(due_ns, self.now_ns)
            for decision in self.both("ticked"):
                if isinstance(decision, ReadProgress):
                    self.tokens += alive
                    self.both("progress", Progress(decision.replica, self.tokens))
            again_ns = self.health.deadline_ns()
            assert again_ns is None or again_ns > self.now_ns
        self.now_ns = end_ns

    @rule(for_ns=times_ns, alive=st.booleans())
    def wait(self, for_ns: int, alive: bool) -> None:
        self.pass_time(for_ns, alive)

    @rule(target=in_flight, replica=replicas, expected_ms=st.sampled_from((0, 20, 5000)))
    def send(self, replica: int, expected_ms: int) -> tuple[int, int]:
        self.request += 1
        if self.health.takes(replica):
            if self.health.state_of(replica) != "in":
                assert replica not in self.probes
                self.probes[replica] = self.request
            self.both("dispatched", self.request, replica, expected_ms * MS)
        return self.request, replica

    @rule(sent=in_flight)
    def first(self, sent: tuple[int, int]) -> None:
        self.both("first_token", *sent)

    def over(self, sent: tuple[int, int]) -> None:
        if self.probes.get(sent[1]) == sent[0]:
            del self.probes[sent[1]]

    @rule(sent=consumes(in_flight), ttft_ms=st.sampled_from((10, 20, 3000)))
    def answer(self, sent: tuple[int, int], ttft_ms: int) -> None:
        self.over(sent)
        self.both("answered", *sent, ttft_ms * MS, 20 * MS)

    @rule(sent=consumes(in_flight), kind=st.sampled_from((*sorted(FAULTS), *NEUTRAL)))
    def fail(self, sent: tuple[int, int], kind: str) -> None:
        self.over(sent)
        before = self.health.detected
        self.both("failed", *sent, kind)
        assert kind in FAULTS or self.health.detected == before

    @rule(sent=consumes(in_flight))
    def leave(self, sent: tuple[int, int]) -> None:
        self.over(sent)
        self.both("gone", *sent)

    @rule(replica=replicas, kind=st.sampled_from(("xid_fatal", "xid_minor")))
    def fault(self, replica: int, kind: Any) -> None:
        self.both("gpu_fault", GpuFault(replica, kind))
        if kind == "xid_fatal" and replica in self.health._watches:
            assert self.health.state_of(replica) == "isolated"

    @rule(replica=replicas)
    def replace(self, replica: int) -> None:
        self.both("down", replica)
        self.probes.pop(replica, None)
        self.both("up", up(replica, models=("m",) if replica < 3 else ("n",)))
        assert self.health.takes(replica)

    @rule(replica=replicas)
    def lose(self, replica: int) -> None:
        self.both("down", replica)
        self.probes.pop(replica, None)

    @rule(replica=replicas)
    def stand_by(self, replica: int) -> None:
        if self.health._watches.get(replica) is None:
            event = Standby(replica, f"r{replica}", ("m",) if replica < 3 else ("n",), S)
            self.health.standby(event)
            self.double.standby(event)

    @rule(replica=replicas)
    def be_silent(self, replica: int) -> None:
        """It is asked and says nothing, now and when it is tried again."""
        for _ in range(2):
            if self.health.takes(replica) and replica in self.health._watches:
                request, _ = self.send(replica, 0)
                self.pass_time(4 * S, alive=False)
                self.over((request, replica))
                self.both("gone", request, replica)

    @rule()
    def reload(self) -> None:
        state = self.health.state(self.now_ns)
        wire = msgspec.msgpack.encode(state)
        assert_integers(msgspec.msgpack.decode(wire))
        self.double = Health(self.section)
        self.double.load(msgspec.msgpack.decode(wire, type=HealthState), self.now_ns)
        assert self.double.state(self.now_ns) == state

    @invariant()
    def both_agree(self) -> None:
        assert self.health.deadline_ns() == self.double.deadline_ns()
        assert self.health.size() == self.double.size() <= self.health.size_most()

    @invariant()
    def at_most_half_of_a_pool_is_out(self) -> None:
        watches = [watch for watch in self.health._watches.values() if watch.replica < 3]
        usable = [watch.state for watch in watches if not watch.broken]
        out = len(usable) - usable.count("in")
        assert out <= 1 or len(usable) < 3
        watch = self.health._watches.get(3)
        hung = {number for number, _ in self.health.state(self.now_ns).hung}
        assert watch is None or watch.state in ("in", "probing") or watch.broken or 3 in hung

    @invariant()
    def whatever_is_shut_opens_by_itself_or_has_a_probe(self) -> None:
        for watch in self.health._watches.values():
            if not self.health.takes(watch.replica) and not watch.broken:
                due_ns = self.health.deadline_ns()
                timed = watch.until_ns is not None and due_ns is not None
                assert timed or watch.probe == self.probes[watch.replica]


TestHealth = HealthMachine.TestCase
TestHealth.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
