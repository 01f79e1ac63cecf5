"""A replica whose answers are worse than its peers' is found, left alone, and tried again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

from policy.decisions import Alert, BreakerMoved, Dispatch, Rotated, Settled, Verify
from policy.events import (
    CanaryEnded,
    CanaryStarted,
    Finished,
    PolicySwitched,
    ReplicaDown,
    Ticked,
    Verified,
)
from policy.files import parse_policy
from policy.parameters import canonical
from tests.policy_support import Checked, S, arrived, parameters, up

if TYPE_CHECKING:
    from policy.decisions import Decision

SURE, UNSURE, LOST = (100, 500, 5), (900, 2500, 60), (1900, 3000, 290)
ANSWER_NS = 2 * S


class Fleet:
    """A few replicas that answer after a while, some of them with noisy weights.

    Args:
        noisy: share of doubtful answers of these replicas.
        usual: share of doubtful answers of the others.
        scored: whether the second run's answer has a score.
        lies: the noisy ones' answers look sure, all of them.
        fails: share of the answers that are server errors.
        restores: the double is brought to life again now and then.
    """

    def __init__(
        self,
        replicas: int,
        noisy: dict[int, float],
        seed: int = 1,
        usual: float = 0.1,
        stream: float = 0.0,
        scored: bool = True,
        lies: bool = False,
        fails: float = 0.0,
        restores: bool = False,
        **sections: Any,
    ) -> None:
        self.rng = random.Random(seed)  # noqa: S311
        self.noisy = dict(noisy)
        self.usual, self.stream, self.scored = usual, stream, scored
        self.lies, self.fails, self.restores = lies, fails, restores
        self.checked = Checked(parameters("tiered", **sections), snapshots=False)
        self.due: list[tuple[int, int, int, bool]] = []
        """(when, request, replica, second run)."""
        self.by: dict[int, tuple[int, bool]] = {}
        """Who answered a request, and whether that is a noisy answer."""
        self.delivered: list[tuple[int, int]] = []
        """(when, replica) of noisy answers that were given out as good."""
        self.moved: list[tuple[int, Decision]] = []
        for replica in range(replicas):
            self.checked.bring_up(up(replica))

    def take(self, decisions: tuple[Decision, ...]) -> None:
        now_ns = self.checked.now_ns
        for decision in decisions:
            if isinstance(decision, Dispatch | Verify):
                takes_ns = ANSWER_NS // 2 + self.rng.randrange(ANSWER_NS)
                second = isinstance(decision, Verify)
                self.due.append((now_ns + takes_ns, decision.request, decision.replica, second))
                if not second:
                    assert self.may_go(decision)
            elif isinstance(decision, Settled):
                by, noisy = self.by.get(decision.request, (-1, False))
                if decision.outcome == "answered" and noisy:
                    self.delivered.append((now_ns, by))
            elif isinstance(decision, BreakerMoved | Rotated | Alert):
                self.moved.append((now_ns, decision))

    def doubted(self) -> dict[int, Any]:
        policy: Any = self.checked.policy
        return policy.mechanisms["breakers"].doubted  # type: ignore[no-any-return]

    def may_go(self, decision: Dispatch) -> bool:
        """While it is doubted a replica is sent nothing, or one request that is no stream."""
        breaker = self.doubted().get(decision.replica)
        if breaker is None:
            return True
        tried = [request for request, _ in breaker.probes] == [decision.request]
        return tried and not self.checked.arrivals[decision.request].stream

    def features(self, replica: int) -> tuple[tuple[int, int, int], bool]:
        """What an answer looks like, and whether it is a noisy one."""
        noisy = replica in self.noisy
        if self.rng.random() < self.noisy.get(replica, self.usual):
            return (UNSURE if self.rng.random() < 0.7 else LOST), noisy
        return SURE, noisy

    def run(self, until_s: float, per_s: float = 5.0) -> None:
        checked = self.checked
        next_ns = checked.now_ns
        while checked.now_ns < until_s * S:
            deadline_ns = checked.policy.deadline_ns()
            self.due.sort()
            times = [next_ns, *(item[0] for item in self.due[:1])]
            times += [] if deadline_ns is None else [deadline_ns]
            checked.now_ns = max(checked.now_ns, min(times))
            if self.due and self.due[0][0] <= checked.now_ns:
                self.answer(*self.due.pop(0)[1:])
            elif next_ns <= checked.now_ns:
                next_ns += round(self.rng.expovariate(per_s) * S)
                request = checked.next_request
                checked.next_request += 1
                stream = self.rng.random() < self.stream
                self.take(checked.feed(arrived(request, stream=stream)))
            else:
                self.take(checked.feed(Ticked()))

    def answer(self, request: int, replica: int, second: bool) -> None:
        checked = self.checked
        features, noisy = self.features(replica)
        if self.restores and self.rng.random() < 0.05:
            checked.restore()
        if not second and self.rng.random() < self.fails:
            if checked.in_flight.get(request) == replica:
                self.take(checked.fail(request, "http_5xx"))
            return
        if not second:
            if checked.in_flight.get(request) == replica:
                self.by[request] = (replica, noisy)
                self.take(checked.feed(Finished(request, replica, 250, 0, 100, *features)))
            return
        if not isinstance(checked.asked.get(request), Verify):
            return
        del checked.asked[request]
        _, first_noisy = self.by[request]
        verdict = "mismatch" if noisy or first_noisy else "match"
        if not self.scored:
            features = (-1, -1, -1)
        self.take(checked.feed(Verified(request, replica, verdict, 100, *features)))  # type: ignore[arg-type]

    def opened(self) -> list[tuple[int, int]]:
        """When the breaker of which replica opened."""
        return [(at_ns, int(d.key.rpartition("=")[2])) for at_ns, d in self.moved
                if isinstance(d, BreakerMoved) and d.state == "open"
                and d.key.startswith("doubtful")]  # fmt: skip

    def rotated(self, replica: int) -> list[str]:
        return [d.state for _, d in self.moved
                if isinstance(d, Rotated) and d.replica == replica]  # fmt: skip


TEMPLATE: dict[str, Any] = {"actions": ["template"]}
RULE: dict[str, Any] = {
    "name": "doubtful", "by": ["replica"], "kinds": ["mismatch"],
    "low_confidence_below_permille": 650, "window_ms": 60_000, "share_permille": 400,
    "volume_least": 8, "failures_least": 6,
}  # fmt: skip
MISMATCHES = {
    "name": "doubtful", "by": ["replica"], "kinds": ["mismatch"], "window_ms": 300_000,
    "share_permille": 400, "volume_least": 8,
}  # fmt: skip


def made(replicas: int, noisy: dict[int, float], seed: int = 1, **fields: Any) -> Fleet:
    return Fleet(replicas, noisy, seed, **({"confidence": TEMPLATE} | fields))


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize(("stream", "most"), [(0.0, 8), (0.5, 20), (1.0, 30)])
@pytest.mark.parametrize("seed", range(6))
def test_the_noisy_one_is_found_within_seconds(
    replicas: int, stream: float, most: int, seed: int
) -> None:
    fleet = made(replicas, {1: 0.9}, seed, stream=stream)
    fleet.run(25)
    at_ns = fleet.opened()[0][0]
    assert at_ns < 20 * S
    assert {replica for _, replica in fleet.opened()} == {1}
    assert fleet.rotated(1)[0] == "ejected"
    assert len(fleet.delivered) <= most  # nearly all of them before it was found
    assert all(then_ns < at_ns + 2 * ANSWER_NS for then_ns, _ in fleet.delivered)
    (alert,) = [d for _, d in fleet.moved if isinstance(d, Alert)]
    assert (alert.key, alert.cause.split(":")[0]) == ("replica r1", "doubtful")
    assert dict(alert.figures).keys() == {"bad", "total"}


@pytest.mark.parametrize("seed", range(6))
def test_blame_comes_to_lie_on_the_noisy_one_by_mismatches_alone(seed: int) -> None:
    """One answer in ten is verified, and no score says which of two that differ is wrong."""
    fleet = Fleet(
        3, {1: 0.0}, seed, usual=0.0, scored=False, lies=True,
        confidence=TEMPLATE | {"verify_below_permille": 1001, "budget_permille": 100},
        breakers={"rules": [MISMATCHES]},
    )  # fmt: skip
    fleet.run(400)
    assert {replica for _, replica in fleet.opened()} == {1}


def test_of_two_that_always_differ_neither_is_blamed_without_scores() -> None:
    fleet = Fleet(
        2, {1: 0.0}, usual=0.0, scored=False, lies=True,
        confidence=TEMPLATE | {"verify_below_permille": 1001, "budget_permille": 100},
        breakers={"rules": [MISMATCHES]},
    )  # fmt: skip
    fleet.run(240)
    assert not fleet.opened()


@pytest.mark.parametrize("usual", [0.1, 0.5, 0.95])
def test_what_is_unsure_everywhere_is_the_model(usual: float) -> None:
    for per_s in (1.0, 5.0):
        fleet = made(3, {}, usual=usual, stream=0.5, breakers={"rules": [RULE]})
        fleet.run(400, per_s)
        assert not fleet.opened()


@pytest.mark.parametrize(("replicas", "noisy", "most"), [(1, 1, 0), (3, 2, 1), (4, 3, 2)])
def test_no_more_than_half_of_a_pool_is_out(replicas: int, noisy: int, most: int) -> None:
    fleet = made(replicas, dict.fromkeys(range(noisy), 0.95), usual=0.02)
    fleet.run(200)
    out: set[int] = set()
    for _, decision in fleet.moved:
        if isinstance(decision, Rotated):
            out.discard(decision.replica)
            if decision.state != "in":
                out.add(decision.replica)
            assert len(out) <= most
    assert len({replica for _, replica in fleet.opened()}) >= most


def test_it_is_tried_by_one_at_a_time_backs_off_and_comes_back_when_it_is_well() -> None:
    fleet = made(3, {1: 1.0}, usual=0.0, stream=0.3)
    fleet.run(130)
    waits = [d.for_ns // S for _, d in fleet.moved if isinstance(d, BreakerMoved) and d.for_ns]
    assert waits == [30, 60, 120]
    fleet.noisy.clear()
    fleet.checked.restore()
    fleet.run(280)
    assert fleet.rotated(1)[-2:] == ["probing", "in"]
    assert [d for _, d in fleet.moved if isinstance(d, BreakerMoved)][-1].why == "probe"
    before = len(fleet.by)
    fleet.run(300)
    late = [replica for replica, _ in list(fleet.by.values())[before:]]
    assert late.count(1) > len(late) // 5


def test_where_only_streams_come_nothing_tries_it_and_its_wait_still_doubles() -> None:
    fleet = made(3, {1: 1.0}, usual=0.0, stream=1.0)
    fleet.run(260)
    moved = [d for _, d in fleet.moved if isinstance(d, BreakerMoved)]
    assert [(d.state, d.why) for d in moved[:4]] == [
        ("open", "share"), ("half_open", "time"), ("closed", "quiet"), ("open", "share"),
    ]  # fmt: skip
    assert [d.for_ns // S for d in moved if d.for_ns] == [30, 60, 120]


def test_a_process_that_starts_anew_is_not_doubted_for_what_was_before() -> None:
    fleet = made(3, {1: 0.9})
    fleet.run(25)
    assert fleet.rotated(1) == ["ejected"]
    fleet.checked.feed(ReplicaDown(1, "stopped"))
    for request, where in sorted(fleet.checked.in_flight.items()):
        if where == 1:
            fleet.take(fleet.checked.fail(request, "replica_lost"))
    fleet.take(fleet.checked.feed(up(1)))
    assert fleet.rotated(1) == ["ejected", "in"]
    assert [d.why for _, d in fleet.moved if isinstance(d, BreakerMoved)] == ["share", "renewed"]


@pytest.mark.parametrize("canary", [False, True])
def test_a_policy_that_does_not_doubt_it_says_that_it_is_back(canary: bool) -> None:
    fleet = made(3, {1: 0.9})
    fleet.run(25)
    assert fleet.rotated(1) == ["ejected"]
    old = fleet.checked.params
    new = parameters("tiered", confidence=TEMPLATE, breakers={"enabled": False})
    if canary:
        fleet.take(fleet.checked.feed(CanaryStarted(canonical(old), canonical(new), 500, 1)))
        fleet.take(fleet.checked.feed(CanaryEnded("new")))
    else:
        fleet.take(fleet.checked.feed(PolicySwitched(canonical(old), canonical(new))))
    assert fleet.rotated(1) == ["ejected", "in"]


@pytest.mark.parametrize("seed", range(4))
def test_doubt_and_health_are_kept_apart(seed: int) -> None:
    """Whatever one of the two says, the other may still keep it out."""
    fleet = made(4, {1: 0.9}, seed, stream=0.4, fails=0.1, restores=True)
    fleet.run(200)
    why = {d.why for _, d in fleet.moved if isinstance(d, Rotated) and d.state == "ejected"}
    assert "doubtful" in why
    assert {replica for _, replica in fleet.opened()} == {1}
    last = {}
    for _, decision in fleet.moved:
        if isinstance(decision, Rotated):
            last[decision.replica] = decision.state
    assert last[1] != "in" or 1 not in fleet.doubted()


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("{name: x, by: [replica, line], kinds: [mismatch], share_permille: 5}", "stands alone"),
        ("{name: x, by: [replica], kinds: [oom], share_permille: 5}", "no kind but mismatch"),
    ],
)
def test_rules_by_replica_that_make_no_sense_are_refused(keys: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_policy(f"schema: 1\nbreakers: {{rules: [{keys}]}}", "mine")


def test_one_rule_at_most_is_by_replica() -> None:
    rule = "{name: %s, by: [replica], kinds: [mismatch], share_permille: 5}"
    both = ", ".join(rule % name for name in ("x", "y"))
    with pytest.raises(ValueError, match="two rules are by replica: x, y"):
        parse_policy(f"schema: 1\nbreakers: {{rules: [{both}]}}", "mine")
