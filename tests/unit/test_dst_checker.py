"""The checker complains: each invariant is broken here by hand, and named in the complaint.

A check that cannot fail is worth nothing. Each stream below is right but for one thing.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from policy.decisions import (
    Abort,
    Alert,
    BreakerMoved,
    Decision,
    Dispatch,
    Refused,
    Rotated,
    SaveCheckpoint,
    Settled,
    Start,
    Stop,
    Verify,
)
from policy.events import (
    Arrived,
    Cancelled,
    CheckpointSaved,
    Event,
    Failed,
    Finished,
    FirstToken,
    PolicySwitched,
    ReplicaDown,
    ReplicaUp,
    Restored,
    Standby,
    StepsRead,
    Ticked,
    Verified,
)
from policy.parameters import canonical
from tests.dst import books
from tests.dst.checker import Checker
from tests.dst.rules import Broken
from tests.policy_support import MS, S, arrived, parameters, up

if TYPE_CHECKING:
    from collections.abc import Sequence

Step = tuple[int, Event, tuple[Decision, ...]]
DEFAULTS = parameters()
UP: list[Step] = [(0, up(0), ()), (0, up(1), ())]
DONE = Finished(0, 0, 100, 0, 100)
ANSWER = Settled(0, "answered")
SHED = Settled(0, "shed", why="deadline", http_code=429)


def sent(request: int = 0, replica: int = 0, at_ns: int = 1, **fields: Any) -> Step:
    """A request arrives and goes to a replica."""
    return at_ns, arrived(request, **fields), (Dispatch(request, replica, "stable"),)


def run(steps: Sequence[Step], checker: Checker | None = None, end: bool = True) -> Checker:
    checker = checker or Checker(DEFAULTS, seed=77)
    for now_ns, event, decisions in steps:
        checker.append(now_ns, event, tuple(decisions))
    if end:
        checker.end(steps[-1][0])
    return checker


def chain(request: int, at_ns: int, **fields: Any) -> Step:
    return sent(request, 0, at_ns, chain="c", step="plan", **fields)


def switched(**sections: Any) -> PolicySwitched:
    return PolicySwitched(canonical(DEFAULTS), canonical(parameters(**sections)))


ISOLATED = Rotated(0, "isolated", "xid_fatal")
OPENED = BreakerMoved("transport model=m", "open", "consecutive")
SAVED: list[Step] = [
    chain(0, 1),
    (2, DONE, (SaveCheckpoint(0, "c", "plan"),)),
    (3, CheckpointSaved(0, "k"), (Settled(0, "answered", checkpoint="k"),)),
]

RIGHT: dict[str, list[Step]] = {
    "answered": [*UP, sent(), (2, FirstToken(0, 0), ()), (3, DONE, (ANSWER,))],
    "retried": [
        *UP, sent(), (2, Failed(0, 0, "timeout"), (Abort(0, 0), Dispatch(0, 1, "stable"))),
        (3, Finished(0, 1, 9, 0, 9), (ANSWER,)),
    ],
    "cancelled": [
        *UP, sent(), (2, Cancelled(0), (Abort(0, 0), Settled(0, "cancelled", http_code=499))),
        (3, Finished(0, 0, 9, 0, 9), ()),
    ],
    "verified": [
        *UP, sent(), (2, DONE, ()), (3, arrived(1), (Dispatch(1, 0, "stable"),)),
        (4, Finished(1, 0, 9000, 0, 9), (Verify(1, 1),)),
        (5, Verified(1, 1, "match"), (Settled(1, "answered"), ANSWER)),
    ],
    "checkpointed": [*UP, *SAVED, (4, arrived(1, chain="c", step="plan"),
                                   (Settled(1, "answered", why="checkpoint", checkpoint="k"),))],
    "moved off a broken card": [
        *UP, sent(), (2, Ticked(), (ISOLATED, Abort(0, 0), Dispatch(0, 1, "stable"))),
        (3, Finished(0, 1, 9, 0, 9), (ANSWER,)),
    ],
    "started and stopped": [
        (0, Standby(3, "r3", (), S), (Start(3),)), (S, up(3), ()), sent(0, 3, S),
        (2 * S, Finished(0, 3, 9, 0, 9), (ANSWER, Rotated(3, "draining", "scale_in"), Stop(3))),
    ],
    "one after the other": [
        *UP, sent(session="s"), (2, arrived(1, session="s"), ()),
        (3, DONE, (ANSWER, Dispatch(1, 1, "stable"))), (4, Finished(1, 1, 9, 0, 9),
                                                       (Settled(1, "answered"),)),
    ],
    "drifted": [
        *UP, (1, StepsRead(0, 1000, 6_500_000, 5_000_000),
              (Alert("drift r0", "x", (("drift_permille", 300),)),)),
        (2, StepsRead(0, 100, 525_000, 500_000),
         (Alert("drift r0", "x", (("drift_permille", 60),)),)),
    ],
    "crashed": [
        *UP, sent(), (2, Restored(), (Settled(0, "failed", why="controller_lost",
                                              http_code=503),)),
    ],
}  # fmt: skip

READ = StepsRead(0, 1000, 6_500_000, 5_000_000)
"""As many steps as it takes, 30 % too slow."""


def drifted(permille: int, name: str = "r0") -> tuple[Alert]:
    return (Alert(f"drift {name}", "x", (("drift_permille", permille),)),)


WRONG: dict[str, tuple[str, list[Step]]] = {
    "a drift out of nothing": ("DriftIsMeasured", [*UP, (1, Ticked(), drifted(300))]),
    "a drift of another": ("DriftIsMeasured", [*UP, (1, READ, drifted(300, "r1"))]),
    "a drift that is not so large": ("DriftIsMeasured", [*UP, (1, READ, drifted(301))]),
    "a drift below the alarm": (
        "DriftIsMeasured", [*UP, (1, StepsRead(0, 1000, 5_495_000, 5_000_000), drifted(99))],
    ),
    "a drift of few steps": (
        "DriftIsMeasured", [*UP, (1, StepsRead(0, 999, 6_500_000, 5_000_000), drifted(300))],
    ),
    "a drift of another life": (
        "DriftIsMeasured",
        [*UP, (1, READ, ()), (2, ReplicaDown(0, "x"), ()), (3, up(0), ()),
         (4, StepsRead(0, 1, 1300, 1000), drifted(300))],
    ),
    "a drift of one that is down": (
        "DriftIsMeasured", [*UP, (2, ReplicaDown(0, "x"), ()), (3, READ, drifted(300))],
    ),
    "never settled": ("OneOutcome", [*UP, sent()]),
    "settled twice": ("OneOutcome", [*UP, sent(), (2, DONE, (ANSWER, ANSWER))]),
    "sent after it was settled": (
        "OneOutcome", [(1, arrived(0), (SHED,)), *UP, (2, Ticked(), (Dispatch(0, 0, "x"),))],
    ),
    "never arrived": ("OneOutcome", [*UP, (1, Ticked(), (Dispatch(5, 0, "x"),))]),
    "answered by nobody": ("OneOutcome", [*UP, (1, arrived(0), (ANSWER,))]),
    "shed with success": ("OneOutcome", [*UP, (1, arrived(0), (Settled(0, "shed"),))]),
    "failed with success": ("OneOutcome", [*UP, (1, arrived(0), (Settled(0, "failed"),))]),
    "a checkpoint that was never saved": (
        "OneOutcome", [*UP, sent(), (2, DONE, (Settled(0, "answered", checkpoint="k"),))],
    ),
    "its client is gone and it stays": ("OneOutcome", [*UP, sent(), (2, Cancelled(0), ())]),
    "open after a crash": ("OneOutcome", [*UP, sent(), (2, Restored(), ())]),
    "in two places": ("OnePlace", [*UP, sent(), (2, Ticked(), (Dispatch(0, 1, "x"),))]),
    "answered and sent again": (
        "OnePlace", [*UP, sent(), (2, DONE, ()), (3, Ticked(), (Dispatch(0, 1, "x"),))],
    ),
    "verified without an answer": ("OnePlace", [*UP, sent(), (2, Ticked(), (Verify(0, 1),))]),
    "saved twice at once": (
        "OnePlace",
        [*UP, sent(), (2, DONE, (SaveCheckpoint(0, "c", ""), SaveCheckpoint(0, "c", "")))],
    ),
    "settled and still running": (
        "NothingRunsOn", [*UP, sent(), (2, Cancelled(0), (Settled(0, "cancelled", http_code=499),))]
    ),
    "aborted where it never was": (
        "NothingRunsOn", [*UP, sent(), (2, Ticked(), (Abort(0, 1),))],
    ),
    "moved after its first byte": (
        "RetriesAreSafe",
        [*UP, sent(), (2, FirstToken(0, 0), ()), (3, Failed(0, 0, "stream_cut"),
                                                 (Dispatch(0, 1, "x"),))],
    ),
    "tried again where it failed": (
        "RetriesAreSafe", [*UP, sent(), (2, Failed(0, 0, "oom"), (Dispatch(0, 0, "x"),))],
    ),
    "tried too often": (
        "RetriesAreSafe",
        [*UP, (0, up(2), ()), (0, up(3), ()), sent()]
        + [(2 + on, Failed(0, on, "oom"), (Dispatch(0, on + 1, "x"),)) for on in range(3)],
    ),
    "sent to nowhere": ("OnlyWhereItMay", [sent()]),
    "sent to the dead": ("OnlyWhereItMay", [*UP, (1, ReplicaDown(0, "dead"), ()), sent()]),
    "sent to the ejected": (
        "OnlyWhereItMay", [*UP, (1, Ticked(), (Rotated(0, "ejected", "failures"),)), sent()],
    ),
    "sent to the broken": ("OnlyWhereItMay", [*UP, (1, Ticked(), (ISOLATED,)), sent()]),
    "sent to the draining": (
        "OnlyWhereItMay", [*UP, (1, Ticked(), (Rotated(0, "draining", "scale_in"),)), sent()],
    ),
    "sent to the stopped": ("OnlyWhereItMay", [*UP, (1, Ticked(), (Stop(0),)), sent()]),
    "broken after a switch": (
        "OnlyWhereItMay",
        [*UP, (1, Ticked(), (ISOLATED,)), (2, switched(health={"failures_most": 9}), ()), sent()],
    ),
    "probed by two": (
        "OnlyWhereItMay",
        [*UP, (1, Ticked(), (Rotated(0, "probing", "retry"),)), sent(), sent(1)],
    ),
    "another model": ("OnlyWhereItMay", [(0, up(0, models=("n",)), ()), sent()]),
    "a chat to embeddings": ("OnlyWhereItMay", [(0, up(0, pooling=True), ()), sent()]),
    "verified where it was answered": (
        "VerifiedElsewhere", [*UP, sent(), (2, DONE, (Verify(0, 0),))],
    ),
    "verified on the same card": (
        "VerifiedElsewhere",
        [(0, up(0, domain="a"), ()), (0, up(1, domain="a"), ()), sent(),
         (2, DONE, (Verify(0, 1),))],
    ),
    "two of a session": ("OneOfASession", [*UP, sent(session="s"), sent(1, session="s")]),
    "a session out of order": (
        "OneOfASession", [*UP, (1, arrived(0, session="s"), ()), sent(1, session="s")],
    ),
    "started what does not stand by": ("FleetIsAsked", [(1, Ticked(), (Start(3),))]),
    "stopped with work": ("FleetIsAsked", [*UP, sent(), (2, Ticked(), (Stop(0),))]),
    "refused and decided": (
        "RefusedAlone", [*UP, (1, Ticked(), (Refused("Ticked", "x"), OPENED))],
    ),
    "a float": ("NoFloats", [*UP, (1, arrived(0), (Settled(0, "shed", retry_after_ns=1.5,  # type: ignore[arg-type]
                                                           http_code=429),))]),
    "sent past an open breaker": (
        "BreakersHold", [*UP, (1, Ticked(), (OPENED,)), sent(at_ns=2)],
    ),
    "too many probes": (
        "BreakersHold",
        [*UP, (1, Ticked(), (BreakerMoved("transport model=m", "half_open", "time"),)),
         *(sent(number, at_ns=2 + number) for number in range(3))],
    ),
    "sent during a pause": (
        "PausesHold",
        [*UP, (1, Ticked(), (Rotated(0, "probing", "backpressure", S),)), sent(at_ns=S)],
    ),
    "a chain past its end": (
        "ChainsKeepTime", [*UP, chain(0, 1), (9 * S, Ticked(), ())],
    ),
    "a step sent past the end": (
        "ChainsKeepTime",
        [*UP, (1, arrived(0, chain="c"), ()), (9 * S, Ticked(), (Dispatch(0, 0, "x"),))],
    ),
    "paid for again": ("ChainsKeepTime", [*UP, *SAVED, chain(1, 4)]),
    "too many second runs": (
        "SecondRunsKeepToBudget", [*UP, sent(), (2, DONE, (Verify(0, 1),))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_passes(name: str) -> None:
    if name == "verified":
        generous = parameters(confidence={"budget_permille": 1000})
        steps = RIGHT[name]
        steps = [*steps[:3], (2, DONE, (ANSWER,)), *steps[4:6]]
        steps.append((5, Verified(1, 1, "match"), (Settled(1, "answered"),)))
        run(steps, Checker(generous))
    else:
        run(RIGHT[name])


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name: str) -> None:
    rule, steps = WRONG[name]
    with pytest.raises(Broken, match=rf"^{rule}, seed 77, step \d+, at \d+ ns: "):
        run(steps)


class Shown:
    """A policy that shows whatever books a test gives it."""

    def __init__(self, **shown: Any) -> None:
        self.due_ns: Any = None
        self.facts: Any = None
        self.mechanisms: dict[str, Any] = {}
        self.__dict__.update(shown)

    def step(self, now_ns: int, event: Event) -> tuple[Decision, ...]:
        return ()

    def deadline_ns(self) -> int | None:
        due_ns: int | None = self.due_ns
        return due_ns

    def snapshot(self) -> bytes:
        return b""


def facts(in_flight: int, kv_tokens: int, spec: ReplicaUp, *requests: int) -> Any:
    opened = {
        request: SimpleNamespace(replica=0, kv_tokens=kv_tokens // max(1, len(requests)))
        for request in requests
    }
    replica = SimpleNamespace(spec=spec, in_flight=in_flight, kv_tokens=kv_tokens)
    return SimpleNamespace(open=opened, replicas={0: replica})


def checked(policy: Shown, **sections: Any) -> Checker:
    return Checker(parameters(**sections), policy, seed=77)


def broken(rule: str, policy: Shown, steps: Sequence[Step], **sections: Any) -> None:
    with pytest.raises(Broken, match=rule):
        run(steps, checked(policy, **sections))


def test_books_that_differ_are_named() -> None:
    def play(shown: Any) -> None:
        policy = Shown()
        checker = checked(policy)
        run([(0, up(0), ())], checker)
        policy.facts = shown
        run([sent()], checker, end=False)

    play(facts(1, 9, up(0), 0))
    with pytest.raises(Broken, match=r"BooksAgree.*open in one"):
        play(facts(1, 9, up(0), 0, 5))
    with pytest.raises(Broken, match=r"BooksAgree.*in flight"):
        play(facts(2, 9, up(0), 0))
    low = facts(1, 9, up(0), 0)
    low.open[0].kv_tokens = 10
    with pytest.raises(Broken, match=r"BooksAgree.*reserved"):
        play(low)


def test_reservations_above_the_target_are_named() -> None:
    small = up(0, kv_blocks=11)
    two: list[Step] = [(0, small, ()), sent(), sent(1)]
    rest = [(2, arrived(2), (Dispatch(2, 0, "x"),))]

    def play(kv_tokens: int, spec: ReplicaUp) -> Checker:
        policy = Shown()
        checker = checked(policy)
        run(two, checker, end=False)
        policy.facts = facts(3, kv_tokens, spec, 0, 1, 2)
        return run(rest, checker, end=False)

    play(150, small)
    with pytest.raises(Broken, match=r"Reservations.*153 KV tokens reserved: at most 152"):
        play(153, small)
    with pytest.raises(Broken, match=r"Reservations.*3 in flight: at most 2"):
        play(150, up(0, kv_blocks=11, max_num_seqs=2))


def test_rates_above_the_limit_are_named() -> None:
    limits = SimpleNamespace(parked=lambda _: False, size=lambda: 0, size_most=lambda: 1)
    policy = Shown(mechanisms={"limits": limits})

    def arrivals(gap_ns: int) -> list[Step]:
        return [*UP, *(sent(number, at_ns=number * gap_ns, user="ann") for number in range(6))]

    run(arrivals(200 * MS), checked(policy), end=False)
    broken("Rates.*number 6 of user 'ann'", policy, arrivals(199 * MS))
    parking = SimpleNamespace(parked=lambda _: True, size=lambda: 0, size_most=lambda: 1)
    broken("Rates.*hold it back", Shown(mechanisms={"limits": parking}), [*UP, sent()])


def test_tables_beyond_their_bound_are_named() -> None:
    large = SimpleNamespace(size=lambda: 3, size_most=lambda: 2)
    broken("Bounds.*alerts holds 3", Shown(mechanisms={"alerts": large}), UP)


def test_a_deadline_in_the_past_is_named() -> None:
    broken("Deadlines.*stays at 5", Shown(due_ns=5), [(5, Ticked(), ())])
    broken("Deadlines.*5.5", Shown(due_ns=5.5), [(5, Ticked(), ())])
    run([(5, Ticked(), ())], checked(Shown(due_ns=6)))


def test_work_that_waits_beside_an_idle_replica_is_named() -> None:
    waits: list[Step] = [*UP, (1, arrived(0), ())]
    broken("NothingStarves.*stands idle", Shown(), waits)
    run([(0, up(0, models=("n",)), ()), (1, arrived(0), ())], checked(Shown()), end=False)
    run([(0, up(0), ()), sent(), (2, arrived(1), ())], checked(Shown()), end=False)


def test_background_work_that_is_passed_for_ever_is_named() -> None:
    waits: list[Step] = [(0, up(0, max_num_seqs=9999), ()), sent(), (2, arrived(1, sla="P2"), ())]
    later = [sent(number, at_ns=number, tokens=2000) for number in range(2, 300)]
    broken("NothingStarves.*came later", Shown(), [*waits, *later])


class Forgetful(Shown):
    """Decides by a number that its snapshot may leave out."""

    def __init__(self, answers: tuple[Decision, ...] = (), due_ns: int | None = None) -> None:
        super().__init__(due_ns=due_ns)
        self.answers = answers

    def step(self, now_ns: int, event: Event) -> tuple[Decision, ...]:
        return self.answers

    def snapshot(self) -> bytes:
        return repr((self.answers, self.due_ns)).encode()


ALERT: tuple[Decision, ...] = (BreakerMoved("x", "open", "y"),)


@pytest.mark.parametrize(
    ("double", "told"),
    [
        (Forgetful(ALERT), "restored at once, is another"),
        (Forgetful(), "decides"),
        (Forgetful((), 5), "deadline"),
    ],
)
def test_a_snapshot_that_leaves_something_out_is_named(
    double: Forgetful, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Forgetful()
    if told != "restored at once, is another":
        double.snapshot = policy.snapshot  # type: ignore[method-assign]
    if told == "decides":
        double.answers = ALERT
    monkeypatch.setattr(books, "restore", lambda parameters, snapshot: double)
    checker = Checker(DEFAULTS, policy, snapshot_every_steps=1)
    with pytest.raises(Broken, match=f"Snapshots.*{told}"):
        run([(1, Ticked(), ()), (2, Ticked(), ())], checker)


def test_a_state_that_drifts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, double = Forgetful(), Forgetful()
    monkeypatch.setattr(books, "restore", lambda parameters, snapshot: double)
    checker = Checker(DEFAULTS, policy, snapshot_every_steps=1)
    checker.append(1, Ticked(), ())
    double.snapshot = lambda: b"else"  # type: ignore[method-assign]
    with pytest.raises(Broken, match="its state is another"):
        checker.append(2, Ticked(), ())


def test_steps_go_on_to_the_next_log() -> None:
    steps: list[Any] = []
    log = SimpleNamespace(append=lambda *step: steps.append(step))
    run(RIGHT["answered"], Checker(DEFAULTS, log=log))
    assert steps == [(now_ns, event, tuple(told)) for now_ns, event, told in RIGHT["answered"]]


def test_the_rules_draw_no_further_randomness() -> None:
    state = random.getstate()
    run(RIGHT["retried"], Checker(DEFAULTS, Shown(), snapshot_every_steps=0), end=False)
    assert random.getstate() == state


def test_events_are_what_they_say() -> None:
    """An ``Arrived`` that was refused is no arrival."""
    refused: list[Step] = [*UP, (1, Arrived(0, "m", "chat", -1), (Refused("Arrived", "negative"),))]
    run(refused)
