"""Rollouts in a world where starts, warm-ups, replicas and whole versions fail: serving capacity is
never given up.

Every machine drives two: one lives on, the other is now and then made anew from its state.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policy.decisions import Alert, Rotated, Start, Stop, Warm
from policy.events import RolloutRequested, Standby, Warmed
from policy.parameters.rollout import Rollout as Section
from policy.rollout import Rollout, RolloutState
from tests.policy_support import S, assert_integers, up

REPLICAS = 6
versions = st.sampled_from(("v1", "v2", "v3"))
choices = st.integers(0, REPLICAS - 1)


class RolloutMachine(RuleBasedStateMachine):
    """A world of replicas that do as they are told, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.isolated: set[int] = set()
        self.rollout = Rollout(Section(), self.isolated.__contains__)
        self.double = Rollout(Section(), self.isolated.__contains__)
        self.now_ns = 0
        self.standbys: set[int] = set()
        self.starting: dict[int, str] = {}
        self.warming: set[int] = set()
        self.up: dict[int, str] = {}
        self.stopping: set[int] = set()
        self.crashed: dict[int, str] = {}
        """What a supervisor will start again as it was."""
        self.serving_least = 3
        for replica in range(3):
            self.come_up(replica, "v1")
        for replica in range(3, 5):
            self.stand_by(replica)

    def both(self, name: str, *args: Any) -> None:
        decisions = list(getattr(self.rollout, name)(self.now_ns, *args))
        assert decisions == list(getattr(self.double, name)(self.now_ns, *args))
        self.obey(decisions)

    def obey(self, decisions: list[Any]) -> None:
        for decision in decisions:
            assert_integers(decision)
            if isinstance(decision, Start):
                self.standbys.remove(decision.replica)
                self.starting[decision.replica] = decision.version
            elif isinstance(decision, Warm):
                self.warming.add(decision.replica)
            elif isinstance(decision, Stop):
                assert decision.replica in self.up
                assert decision.replica not in self.serving()
                self.stopping.add(decision.replica)
            elif isinstance(decision, Rotated):
                assert self.rollout.draining(decision.replica) is (decision.state == "draining")
                assert decision.state == "draining" or decision.replica not in self.isolated
            else:
                assert isinstance(decision, Alert)

    def serving(self) -> list[int]:
        """What may take a new request."""
        return [replica for replica in self.up if self.rollout.allowed(replica)]

    def come_up(self, replica: int, version: str) -> None:
        self.up[replica] = version
        self.isolated.discard(replica)
        self.both("up", up(replica, models=("m",), version=version))

    def stand_by(self, replica: int) -> None:
        self.standbys.add(replica)
        self.both("standby", Standby(replica, f"r{replica}", ("m",), 30 * S, "v1"))

    @rule(version=versions)
    def request(self, version: str) -> None:
        self.both("requested", RolloutRequested("m", version))

    @precondition(lambda self: self.starting)
    @rule(choice=choices, right=st.integers(0, 4))
    def started(self, choice: int, right: int) -> None:
        replica = sorted(self.starting)[choice % len(self.starting)]
        version = self.starting.pop(replica)
        self.come_up(replica, version if right else "wrong")

    @precondition(lambda self: self.warming)
    @rule(choice=choices, ok=st.integers(0, 4))
    def warmed(self, choice: int, ok: int) -> None:
        replica = sorted(self.warming)[choice % len(self.warming)]
        self.warming.remove(replica)
        self.both("warmed", Warmed(replica, self.up[replica], ok > 0))

    @precondition(lambda self: self.starting)
    @rule(choice=choices)
    def does_not_start(self, choice: int) -> None:
        replica = sorted(self.starting)[choice % len(self.starting)]
        self.both("warmed", Warmed(replica, self.starting.pop(replica), ok=False))
        self.stand_by(replica)

    @precondition(lambda self: self.standbys)
    @rule(choice=choices)
    def standby_breaks(self, choice: int) -> None:
        replica = sorted(self.standbys)[choice % len(self.standbys)]
        self.standbys.remove(replica)
        self.both("down", replica, True, True)

    @rule(version=versions)
    def roll_through(self, version: str) -> None:
        """All goes well until the last switch: what is kept then is looked at by other rules."""
        self.request(version)
        for _ in range(50):
            draining = [one for one in self.up if self.rollout.draining(one)]
            if self.starting:
                self.started(0, right=1)
            elif self.warming:
                self.warmed(0, ok=1)
            elif self.stopping:
                self.stopped(0)
            elif draining and not self.kept:
                for replica in draining:
                    self.emptied(replica)

    @rule()
    def all_is_emptied(self) -> None:
        kept = self.kept
        for replica in list(self.up):
            self.emptied(replica)
        assert not self.stopping.intersection(kept)

    @rule(choice=choices)
    def emptied(self, choice: int) -> None:
        self.both("emptied", choice)

    @precondition(lambda self: self.stopping)
    @rule(choice=choices)
    def stopped(self, choice: int) -> None:
        replica = sorted(self.stopping)[choice % len(self.stopping)]
        self.go_down(replica)
        self.stand_by(replica)

    def go_down(self, replica: int, *why: bool) -> None:
        del self.up[replica]
        self.stopping.discard(replica)
        self.warming.discard(replica)
        self.both("down", replica, *why)

    @precondition(lambda self: len(self.up) > 1)
    @rule(choice=choices, card=st.booleans())
    def crash(self, choice: int, card: bool) -> None:
        replica = sorted(self.up)[choice % len(self.up)]
        self.serving_least -= replica in self.serving()
        self.crashed[replica] = self.up[replica]
        self.go_down(replica, True, card)

    @precondition(lambda self: self.crashed)
    @rule(choice=choices)
    def restarted(self, choice: int) -> None:
        replica = sorted(self.crashed)[choice % len(self.crashed)]
        version = self.crashed.pop(replica)
        if version == "wrong":
            self.stand_by(replica)
            return
        self.come_up(replica, version)
        self.serving_least += replica in self.serving()

    @rule(choice=choices, why=st.sampled_from(("failures", "silent", "hung", "slow")))
    def doubt(self, choice: int, why: str) -> None:
        self.both("doubted", choice, why)

    @precondition(lambda self: self.up)
    @rule(choice=choices)
    def isolate(self, choice: int) -> None:
        """Its card breaks; whoever runs it may end it, or not."""
        replica = sorted(self.up)[choice % len(self.up)]
        self.isolated.add(replica)
        decisions = list(self.rollout.isolated(replica))
        assert decisions == list(self.double.isolated(replica))
        self.obey(decisions)

    @rule(version=versions)
    def break_circuit(self, version: str) -> None:
        before = {move.model: move for move in self.rollout.state(self.now_ns).moves}
        serving, kept = self.serving(), self.kept
        self.both("breaker_opened", "m", version, (("bad", 5), ("total", 9)))
        move = before.get("m")
        between = move is not None and move.phase != "watching" and move.replaced > 0
        if move is None or move.version != version or not (between or move.phase == "watching"):
            assert self.serving() == serving
        elif between:
            assert len(self.serving()) >= len(serving)
        else:
            well = [replica for replica in kept if replica not in self.isolated]
            assert all(self.rollout.allowed(replica) for replica in well)
            assert not self.kept

    @property
    def kept(self) -> list[int]:
        state = self.rollout.state(self.now_ns)
        return [replica for replica, drain in state.draining if drain.kept]

    @precondition(lambda self: self.standbys)
    @rule()
    def someone_else_starts(self) -> None:
        replica = min(self.standbys)
        self.standbys.remove(replica)
        self.rollout.taken(replica)
        self.double.taken(replica)
        self.come_up(replica, "v1")
        self.serving_least += 1

    @rule(for_ns=st.sampled_from((S, 600 * S)))
    def wait(self, for_ns: int) -> None:
        self.now_ns += for_ns
        due_ns = self.rollout.deadline_ns()
        if due_ns is not None and due_ns <= self.now_ns:
            self.both("ticked")
            again_ns = self.rollout.deadline_ns()
            assert again_ns is None or again_ns > self.now_ns

    @rule()
    def reload(self) -> None:
        wire = msgspec.msgpack.encode(self.rollout.state(self.now_ns))
        assert_integers(msgspec.msgpack.decode(wire))
        self.double = Rollout(Section(), self.isolated.__contains__)
        self.double.load(msgspec.msgpack.decode(wire, type=RolloutState), self.now_ns)

    @invariant()
    def both_agree(self) -> None:
        assert self.rollout.state(self.now_ns) == self.double.state(self.now_ns)
        assert self.rollout.deadline_ns() == self.double.deadline_ns()
        assert self.rollout.forgone == self.double.forgone
        assert self.rollout.size() <= self.rollout.size_most()

    @invariant()
    def no_rollout_takes_capacity_away(self) -> None:
        assert len(self.serving()) >= self.serving_least

    @invariant()
    def what_is_kept_is_watched_and_runs_on(self) -> None:
        watched = {
            move.model for move in self.rollout.state(self.now_ns).moves if move.phase == "watching"
        }
        assert not self.kept or watched == {"m"}
        assert not self.stopping.intersection(self.kept)
        assert self.up.keys() >= set(self.kept)

    @invariant()
    def nothing_unverified_serves(self) -> None:
        assert all(self.up[replica] != "wrong" for replica in self.serving())

    def teardown(self) -> None:
        """When nothing fails any more, what is wanted is what serves."""
        for _ in range(200):
            if self.crashed:
                self.restarted(0)
            elif self.starting:
                self.started(0, right=1)
            elif self.warming:
                self.warmed(0, ok=1)
            elif self.stopping:
                self.stopped(0)
            else:
                for replica in list(self.up):
                    if self.rollout.draining(replica):
                        self.emptied(replica)
                self.wait(for_ns=600 * S)
        moves = self.rollout.state(self.now_ns).moves
        assert not moves or not self.standbys
        if not moves:
            assert not any(self.rollout.holds(replica) for replica in range(REPLICAS))


TestRollout = RolloutMachine.TestCase
TestRollout.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
