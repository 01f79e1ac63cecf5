"""A canary: whose a request is, what the two may take from each other, and how it ends."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pytest

from policy.audit import replay as audit
from policy.canary import LEAD_NS, arm_of, broke, mixed
from policy.decisions import (
    Alert,
    Dispatch,
    LookUp,
    Refused,
    Reset,
    Rotated,
    SaveCheckpoint,
    Settled,
)
from policy.events import (
    Arrived,
    CanaryEnded,
    CanaryStarted,
    Failed,
    FirstToken,
    GpuFault,
    PolicySwitched,
    ReplicaDown,
    Restored,
    Ticked,
)
from policy.files import FileError, load_policy
from policy.fleet import Fleet
from policy.log import read_segment
from policy.parameters import canonical, from_canonical, policy_hash
from policy.service import Service
from policy.tiered import Tiered
from policy.tiers import Tags
from tests.core_support import core
from tests.policy_support import MS, QUEUE_ALONE, Checked, S, arrived, parameters, up
from twin.scenario.happenings import dated_events
from twin.scenario.run import Recordings, run_setup
from twin.scenario.spec import Setup

if TYPE_CHECKING:
    from pathlib import Path

    from policy.parameters import Parameters

SALT = 3
OPEN_QUEUE: dict[str, Any] = {
    **QUEUE_ALONE,
    "shedding": {"enabled": False},
    "inflight": {"reserve_permille": 0, "sequences_permille": 1000},
}  # fmt: skip


@cache
def user_of(arm: int, share_permille: int, nth: int = 0) -> str:
    """The nth user that such a canary serves (1), or does not (0)."""
    names = (f"u{number}" for number in range(10_000))
    mine = [n for n in names if (arm_of(arrived(0, user=n), SALT) < share_permille) == bool(arm)]
    return mine[nth]


class Two:
    """A stable policy and its candidate over some replicas."""

    def __init__(
        self,
        old: Parameters,
        new: Parameters | None = None,
        *,
        share: int = 500,
        spec: dict[str, Any] | None = None,
        replicas: int = 1,
        snapshots: bool = True,
    ) -> None:
        self.checked = Checked(old, snapshots)
        self.old = old
        self.new = new or msgspec.structs.replace(old, name="candidate")
        self.share = share
        for number in range(replicas):
            self.checked.bring_up(up(number, **(spec or {})))
        self.hashes = [policy_hash(each)[:12] for each in (self.old, self.new)]

    @property
    def policy(self) -> Service:
        assert isinstance(self.checked.policy, Service)
        return self.checked.policy

    def start(self, share: int | None = None) -> tuple[Any, ...]:
        share = self.share if share is None else share
        event = CanaryStarted(canonical(self.old), canonical(self.new), share, SALT)
        return self.checked.feed(event)

    def end(self, keep: Literal["old", "new"]) -> tuple[Any, ...]:
        made = self.checked.feed(CanaryEnded(keep))
        self.checked.params = self.policy.parameters
        return made

    def arrive(self, arm: int, nth: int = 0, **fields: Any) -> int:
        return self.checked.arrive(**{"user": user_of(arm, self.share, nth), **fields})

    def arm(self, request: int) -> int:
        return self.policy.facts.open[request].arm


def two(share: int = 500, seats: int = 4, old: Any = None, new: Any = None, **more: Any) -> Two:
    """With nothing but the queue, and room for ``seats`` requests on a replica."""
    stable = parameters(**{**OPEN_QUEUE, **(old or {})})
    other = parameters(**{**OPEN_QUEUE, "name": "candidate", **(new or old or {})})
    spec = {"max_num_seqs": seats, "max_num_batched_tokens": 1 << 20, "kv_blocks": 100_000}
    return Two(stable, other, share=share, spec=spec, **more)


# Whose a request is


def test_a_share_is_of_callers_and_a_larger_one_only_adds() -> None:
    places = [arm_of(arrived(0, user=f"u{n}"), SALT) for n in range(4000)]
    assert abs(sum(place < 100 for place in places) - 400) < 80
    assert min(places) == 0
    assert max(places) == 999
    assert arm_of(arrived(0, user="ann"), 7) == 493  # else a restarted controller moves callers
    assert places != [arm_of(arrived(0, user=f"u{n}"), 4) for n in range(4000)]


def test_a_caller_is_a_user_else_a_session_else_a_chain_else_the_request() -> None:
    named = arrived(0, user="a", session="b", chain="c")
    assert arm_of(named, 0) == arm_of(arrived(1, user="a", session="z"), 0)
    assert arm_of(arrived(0, session="b", chain="c"), 0) == arm_of(arrived(5, session="b"), 0)
    assert arm_of(arrived(0, chain="c"), 0) == arm_of(arrived(5, chain="c"), 0)
    assert len({arm_of(arrived(number), 0) for number in range(50)}) > 30


def test_decisions_say_whose_they_are_while_there_are_two() -> None:
    pair = two()
    before = pair.arrive(1)
    assert pair.checked.dispatches[-1].policy == ""
    pair.start()
    requests = [pair.arrive(0), pair.arrive(1)]
    assert [d.policy for d in pair.checked.dispatches[-2:]] == pair.hashes
    assert [pair.arm(request) for request in (before, *requests)] == [0, 0, 1]
    for request in (before, *requests):
        pair.checked.finish(request)
    told = [pair.checked.outcomes[request].policy for request in (before, *requests)]
    assert told == [pair.hashes[0], *pair.hashes]
    pair.end("old")
    pair.arrive(1)
    assert pair.checked.dispatches[-1].policy == ""


def test_a_larger_share_moves_callers_and_no_request() -> None:
    pair = two(share=100, seats=50)
    pair.start()
    mine = pair.arrive(1)
    moved = user_of(0, 100)
    stays = pair.checked.arrive(user=moved)
    assert pair.start(1000) == ()
    comes = pair.checked.arrive(user=moved)
    assert [pair.arm(request) for request in (mine, stays, comes)] == [1, 0, 1]
    pair.checked.finish(stays)
    assert pair.checked.outcomes[stays].policy == pair.hashes[0]


def test_a_canary_that_cannot_be_is_refused() -> None:
    pair = two()
    old, new = canonical(pair.old), canonical(pair.new)
    fifo, third = canonical(parameters("fifo")), canonical(parameters(name="third"))

    def refused(event: Any) -> str:
        (decision,) = pair.checked.feed(event)
        assert isinstance(decision, Refused)
        return decision.why

    assert "not the one in force" in refused(CanaryStarted(new, old, 50, SALT))
    assert "cannot be read" in refused(CanaryStarted(old, "{", 50, SALT))
    assert "needs a restart" in refused(CanaryStarted(old, fifo, 50, SALT))
    assert "share_permille is 0" in refused(CanaryStarted(old, new, 0, SALT))
    assert "share_permille is 1001" in refused(CanaryStarted(old, new, 1001, SALT))
    assert "salt -1" in refused(CanaryStarted(old, new, 50, -1))
    assert "the policy in force" in refused(CanaryStarted(old, old, 50, SALT))
    assert "no canary" in refused(CanaryEnded("old"))
    pair.start()
    assert "another canary" in refused(CanaryStarted(old, third, 50, SALT))
    assert "another canary" in refused(CanaryStarted(old, new, 50, SALT + 1))
    assert "a canary goes on" in refused(PolicySwitched(old, new))
    assert "must be old or new" in refused(CanaryEnded("both"))  # type: ignore[arg-type]
    assert "above the highest" not in str(pair.arrive(1))


# What they may take from each other


def test_a_small_share_may_take_all_the_room_that_nobody_else_waits_for() -> None:
    pair = two(share=2, seats=4)
    pair.start()
    requests = [pair.arrive(1) for _ in range(6)]
    assert len(pair.checked.in_flight) == 4
    stable = pair.arrive(0)
    assert stable in pair.checked.waiting
    pair.checked.finish(requests[0])
    assert len(pair.checked.in_flight) == 4
    pair.checked.drain()


def test_what_one_has_no_use_for_goes_to_the_other_at_once() -> None:
    pair = two(seats=2)
    pair.start()
    running = [pair.arrive(0), pair.arrive(0)]
    stable, candidate = pair.arrive(0), pair.arrive(1)
    assert {stable, candidate} <= pair.checked.waiting
    for request in running:
        pair.checked.finish(request)
    assert set(pair.checked.in_flight) == {stable, candidate}


def test_the_more_urgent_goes_first_whosever_it_is() -> None:
    pair = two(share=50, seats=1)
    pair.start()
    running = pair.arrive(0)
    late = [pair.arrive(arm, sla=sla) for arm, sla in ((0, "P2"), (1, "P2"), (0, "P1"), (1, "P0"))]
    order = []
    for _ in late:
        pair.checked.finish(running, after_ns=MS)
        (running,) = pair.checked.in_flight
        order.append(late.index(running))
    assert order == [3, 2, 0, 1]


def test_who_calls_everything_urgent_gets_its_share_and_a_lead() -> None:
    pair = two(
        share=200,
        seats=8,
        snapshots=False,
        new={"tiers": {"turbo_max_tflop": 9000, "stable_max_tflop": 9000}},
    )
    pair.start()
    for _ in range(110):
        pair.arrive(0, sla="P0", tokens=24_000)
        pair.arrive(1, sla="P0", tokens=24_000)
    begun = len(pair.checked.dispatches)
    work_ns = next(job.work_ns for job in pair.policy.queue.jobs.values() if job.queued)
    lead = LEAD_NS * 1000 // 800 // work_ns
    assert 8 < lead < 40, "the test needs a queue that is longer than the lead"
    for _ in range(lead + 80):
        pair.checked.finish(min(pair.checked.in_flight), after_ns=MS)
    whose = [d.policy == pair.hashes[1] for d in pair.checked.dispatches[begun:]]
    assert sum(whose[: lead - 3]) == lead - 3  # first it passes all others
    fair = whose[lead + 3 :]
    assert sum(fair) == pytest.approx(0.2 * len(fair), abs=3)


def test_the_target_is_the_mean_of_both_by_share() -> None:
    new = {"inflight": {"reserve_permille": 0, "sequences_permille": 500}}
    pair = two(share=200, seats=50, new=new, snapshots=False)
    pair.start()
    for number in range(60):
        pair.arrive(number % 2)
    assert len(pair.checked.in_flight) == 45
    pair.start(1000)
    section = mixed(pair.old.inflight, pair.old.inflight, pair.new.inflight, 500)
    assert section.sequences_permille == 750
    pair.end("old")
    assert len(pair.checked.in_flight) == 50


def test_both_learn_how_long_answers_are() -> None:
    pair = two(share=1, seats=200, snapshots=False)
    pair.start()
    for _ in range(60):
        pair.checked.finish(pair.arrive(0, user=""), output_tokens=2000)
    jobs = pair.policy.canary.candidate.queue.jobs  # type: ignore[union-attr]
    request = pair.arrive(1)
    assert jobs[request].output_tokens > 1500


def test_a_lead_is_not_forgotten_because_the_other_was_just_served() -> None:
    """One caller of the stable policy, who asks again when he is answered, beside a pile."""
    pair = two(share=50, seats=1, snapshots=False)
    pair.start()
    for _ in range(45):
        pair.arrive(1, sla="P2")
    waits = []
    for _ in range(5):
        mine = pair.arrive(0, sla="P2")
        asked_ns = pair.checked.now_ns
        while mine not in pair.checked.in_flight:
            pair.checked.finish(min(pair.checked.in_flight), after_ns=S)
        waits.append((pair.checked.now_ns - asked_ns) // S)
        pair.checked.finish(mine, after_ns=S)
    assert max(waits[1:]) <= 2, waits


def test_a_candidates_pile_fills_no_queue_but_its_own() -> None:
    old = {"shedding": {"enabled": False, "queue_max": 20}}
    pair = two(share=200, seats=1, old=old, new={"shedding": {"enabled": False}}, snapshots=False)
    pair.start()
    theirs = [pair.arrive(1) for _ in range(40)]
    shed = [pair.checked.outcomes[each].why for each in theirs if each in pair.checked.outcomes]
    assert shed == ["queue_full"] * 19  # one runs, and the stable policy's bound is the candidate's
    ours = [pair.arrive(0) for _ in range(20)]
    assert [each in pair.checked.outcomes for each in ours] == [False] * 16 + [True] * 4


def test_the_stable_policys_pile_leaves_the_candidate_its_share_of_the_queue() -> None:
    old = {"shedding": {"enabled": False, "queue_max": 20}}
    pair = two(share=200, seats=1, old=old, snapshots=False)
    pair.start()
    for _ in range(40):
        pair.arrive(0)
    theirs = [pair.arrive(1) for _ in range(6)]
    assert [each in pair.checked.outcomes for each in theirs] == [False] * 4 + [True] * 2


# Limits


@pytest.mark.parametrize("new", [{"global_in_flight_most": 400}, {"enabled": False}])
def test_a_candidates_limits_are_at_most_the_stable_policys(new: dict[str, Any]) -> None:
    most = {"global_in_flight_most": 5, "user_per_s": 0}
    pair = two(share=50, old={"limits": most}, new={"limits": {"user_per_s": 0, **new}}, seats=50)
    pair.start()
    theirs = [pair.arrive(1) for _ in range(20)]
    assert set(pair.checked.in_flight) == set(theirs[:5])
    ours = pair.arrive(0)
    pair.checked.finish(theirs[0])
    assert ours in pair.checked.in_flight  # before 15 others: it has less than half of its share
    pair.end("new")
    assert len(pair.checked.in_flight) == 20  # its limits are its own now
    pair.checked.drain()


def test_no_limit_is_exceeded_by_both_together() -> None:
    limits = {"limits": {"global_in_flight_most": 3, "user_per_s": 0}}
    pair = two(old=limits, seats=50)
    before = [pair.arrive(0), pair.arrive(1)]
    pair.start()
    requests = [pair.arrive(number % 2) for number in range(6)]
    assert set(pair.checked.in_flight) == {*before, requests[0]}
    assert pair.policy.waiting()["held"] == 5
    for request in (*before, requests[0]):
        pair.checked.finish(request)
    assert set(pair.checked.in_flight) == set(requests[1:4])  # in order of arrival
    pair.checked.drain()


def test_a_session_goes_on_where_it_waits() -> None:
    pair = two(share=1, old={"limits": {}}, seats=50)
    session = next(
        f"s{n}" for n in range(9999) if 1 <= arm_of(arrived(0, session=f"s{n}"), SALT) < 900
    )
    first, second = (pair.checked.arrive(session=session) for _ in range(2))
    pair.start()
    pair.start(900)
    third = pair.checked.arrive(session=session)
    assert pair.arm(third) == 0  # or it could go before the second
    pair.checked.finish(first)
    pair.checked.finish(second)
    pair.checked.finish(third)
    fourth = pair.checked.arrive(session=session)
    assert pair.arm(fourth) == 1


def test_a_chain_goes_on_where_it_began() -> None:
    pair = two(share=1000, old={"chains": {"default": {"budget_ms": 60_000}}})
    step = pair.checked.arrive(chain="c", step="plan")
    pair.start()
    pair.checked.finish(step)
    pair.checked.reply(step)
    again = pair.checked.arrive(chain="c", step="write")
    assert pair.arm(again) == 0
    other = pair.checked.arrive(chain="d", step="plan")
    assert pair.arm(other) == 1
    pair.checked.finish(other)
    pair.checked.reply(other)
    pair.end("old")
    repeated = pair.checked.arrive(chain="d", step="plan")
    assert pair.checked.outcomes[repeated].why == "checkpoint"  # what the candidate kept is known


def test_a_chain_whose_budget_is_over_gets_no_other_one() -> None:
    pair = two(share=1000, old={"chains": {"default": {"budget_ms": 3000}}})
    step = pair.checked.arrive(chain="c", step="plan")
    pair.checked.finish(step)
    pair.checked.reply(step)
    pair.start()
    late = pair.checked.arrive(4 * S, chain="c", step="write")
    assert pair.checked.outcomes[late].why == "chain_budget"
    assert pair.checked.outcomes[late].policy == pair.hashes[0]


def test_the_checkpoint_of_another_user_moves_nobody() -> None:
    pair = two(old={"chains": {"default": {"budget_ms": 60_000}}})
    pair.start()
    step = pair.arrive(1, chain="c", step="plan")
    pair.checked.finish(step)
    pair.checked.reply(step)
    other = pair.arrive(0, chain="d", step="plan", resume=f"c{step}")
    assert pair.arm(other) == 0
    own = pair.arrive(1, chain="d", step="write", resume=f"c{step}")
    assert pair.arm(own) == 1


# The fleet


def test_a_candidate_thinks_its_own_of_replicas_and_says_nothing() -> None:
    pair = Two(parameters(), parameters(name="c", health={"failures_most": 1}), replicas=2)
    pair.start()
    request = pair.arrive(1)
    bad = pair.checked.in_flight[request]
    decisions = pair.checked.fail(request, "http_5xx")
    assert not any(isinstance(decision, Rotated) for decision in decisions)
    theirs = {pair.checked.in_flight[pair.arrive(1, nth)] for nth in range(1, 6)}
    ours = {pair.checked.in_flight[pair.arrive(0, nth)] for nth in range(12)}
    assert (theirs, ours) == ({1 - bad}, {0, 1})


def test_a_card_that_the_stable_policy_isolated_is_out_for_both() -> None:
    new = parameters(name="c", health={"enabled": False})
    pair = Two(parameters(), new, replicas=2)
    pair.start()
    decisions = pair.checked.feed(GpuFault(0, "ecc_uncorrectable"))
    assert sum(isinstance(decision, Rotated) for decision in decisions) == 1
    assert {pair.checked.in_flight[pair.arrive(1, nth)] for nth in range(5)} == {1}


def test_load_is_what_both_have() -> None:
    pair = two(seats=1)
    pair.start()
    for number in range(6):
        pair.arrive(number % 2, sla="P1")
    assert pair.policy.waiting() == {
        "turbo": 0, "lent": 0, "stable": 5, "batch": 0, "fallback": 0, "held": 0,
    }  # fmt: skip
    assert len(pair.policy.scores(pair.checked.arrivals[1])) == 1


# Ends


def test_kept_the_old_policy_judges_anew_what_waits_for_the_candidate() -> None:
    pair = two(seats=1, new={"limits": {"user_in_flight_most": 1}})
    pair.start()
    running = pair.arrive(1)
    waiting, held = pair.arrive(1, 1), pair.arrive(1)
    assert pair.policy.waiting()["held"] == 1
    told = [d for d in pair.end("old") if isinstance(d, (Dispatch, Settled))]
    assert told == []
    assert pair.policy.waiting()["held"] == 0
    assert pair.policy.parameters == pair.old
    pair.checked.finish(running)
    pair.checked.drain()
    since = [d.policy for d in pair.checked.dispatches if d.request in (waiting, held)]
    assert since == ["", ""]
    assert {s.policy for s in pair.checked.outcomes.values()} == {""}


def test_kept_the_new_policy_rules_and_answers_what_the_old_one_sent() -> None:
    old = {"limits": {"user_in_flight_most": 1}}
    pair = two(seats=2, old=old, new={"limits": {"user_in_flight_most": 1}, "alerts": {}})
    pair.start()
    sent = [pair.arrive(0), pair.arrive(1)]
    waiting = [pair.arrive(0, 1), pair.arrive(1, 1)]
    held = [pair.arrive(0), pair.arrive(1)]
    pair.end("new")
    assert pair.policy.parameters == pair.new
    assert pair.policy.canary is None
    for request in sent:
        pair.checked.finish(request)
    assert set(pair.checked.in_flight) == set(waiting)
    assert {*held} <= pair.checked.waiting
    pair.checked.drain()
    assert {s.outcome for s in pair.checked.outcomes.values()} == {"answered"}


@pytest.mark.parametrize("keep", ["old", "new"])
def test_afterwards_it_is_as_after_a_switch(keep: Literal["old", "new"]) -> None:
    """Begun and ended with nothing open, a canary leaves what a switch, or nothing, would."""
    sections: dict[str, Any] = {"classes": {"p0_deadline_ms": 900}, "limits": {"user_per_s": 2}}
    one = Two(parameters(), parameters(name="c", **sections), replicas=2, spec={"max_num_seqs": 1})
    other = Two(one.old, one.new, replicas=2, spec={"max_num_seqs": 1})
    one.start()
    assert one.end(keep) == ()
    if keep == "new":
        other.checked.feed(PolicySwitched(canonical(one.old), canonical(one.new)))
    for number in range(60):
        fields: dict[str, Any] = {"user": f"u{number % 7}", "sla": ("P0", "P1", "P2")[number % 3]}
        assert one.checked.arrive(30 * MS, **fields) == other.checked.arrive(30 * MS, **fields)
        assert one.checked.in_flight == other.checked.in_flight
        if one.checked.in_flight and number % 3 == 0:
            for pair in (one, other):
                pair.checked.finish(min(pair.checked.in_flight))
    for pair in (one, other):
        pair.checked.drain()
    assert one.checked.outcomes == other.checked.outcomes


def test_what_begins_anew_is_told() -> None:
    new = parameters(name="c", limits={"user_per_s": 3}, history={"keys_max": 9})
    pair = Two(parameters(), new)
    assert Reset(("limits", "complexity")) in pair.start()


def test_a_crash_ends_it() -> None:
    pair = two(seats=1)
    pair.start()
    requests = [pair.arrive(number % 2) for number in range(4)]
    decisions = pair.checked.feed(Restored(S))
    lost = {d.request for d in decisions if isinstance(d, Settled) and d.why == "controller_lost"}
    assert lost == set(requests)
    assert pair.policy.canary is None
    assert pair.policy.parameters == pair.old


def test_what_is_awaited_is_answered_by_who_asked() -> None:
    new = parameters(
        name="c", chains={"default": {"budget_ms": 60_000}},
        breakers={"actions": ["cached", "template"]},
    )  # fmt: skip
    pair = Two(parameters(), new, share=1000)
    pair.start()
    request = pair.checked.arrive(chain="x", step="a")
    pair.checked.finish(request)
    asked = pair.checked.asked[request]
    assert isinstance(asked, (SaveCheckpoint, LookUp))
    pair.end("old")  # the stable policy settles it
    pair.checked.reply(request)
    assert pair.checked.outcomes[request].outcome == "answered"
    assert pair.checked.outcomes[request].policy == ""


def test_a_snapshot_has_both() -> None:
    pair = two(seats=2, replicas=2)
    pair.start()
    for number in range(12):
        pair.arrive(number % 2, prefix=(1, 2), prefix_block_bytes=512)
    pair.checked.restore()
    for number in range(12):
        pair.checked.arrive(user=user_of(number % 2, 500))
        pair.checked.first(min(pair.checked.in_flight))
    pair.checked.restore()
    pair.checked.drain()
    pair.end("new")
    assert pair.checked.policy.snapshot() == pair.checked.double.snapshot()


# A candidate that raises


class Fault(Exception):
    """In a candidate only."""


def spoil(patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    """Make a method of every candidate raise."""
    method = getattr(owner, name)

    def spoilt(mechanism: Any, *args: Any, **more: Any) -> Any:
        if mechanism.arm if owner is Service else mechanism._leader is not None:
            raise Fault
        return method(mechanism, *args, **more)

    patch.setattr(owner, name, spoilt)


def alert_of(decisions: tuple[Any, ...]) -> str:
    """Why the canary ended in this step."""
    assert broke(decisions)
    (cause,) = [each.cause for each in decisions if isinstance(each, Alert)]
    return str(cause)


def test_one_that_raises_takes_nothing_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = two(seats=2, replicas=2)
    pair.start()
    requests = [pair.arrive(number % 2) for number in range(8)]
    there = [request for request, at in pair.checked.in_flight.items() if at == 0]
    spoil(monkeypatch, Fleet, "told")
    cause = alert_of(pair.checked.feed(ReplicaDown(0, "crashed")))
    assert cause == f"the candidate {pair.hashes[1]} raised Fault in {__name__}, line {line()}"
    assert pair.policy.canary is None
    for request in there:
        pair.checked.fail(request, "replica_lost")
    pair.checked.restore()
    pair.checked.drain()
    assert {pair.checked.outcomes[each].outcome for each in requests} == {"answered"}
    assert pair.policy.parameters == pair.old


def line() -> int:
    """Where ``spoil`` raises."""
    lines, first = inspect.getsourcelines(spoil)
    return first + next(at for at, text in enumerate(lines) if "raise Fault" in text)


@pytest.mark.parametrize("name", ["admit", "_queue_or_shed", "_dispatched", "deadline_ns"])
def test_a_request_that_it_raises_about_is_served(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"limits": {"global_in_flight_most": 3, "user_per_s": 0}}
    pair = two(old=limits, seats=2)
    pair.start()
    before = [pair.arrive(0), pair.arrive(1)]
    if name == "_dispatched":
        pair.checked.finish(before.pop())
    spoil(monkeypatch, Tiered, name)
    request = pair.arrive(1)
    assert pair.policy.canary is None
    assert pair.policy.facts.open[request].arm == 0
    later = pair.arrive(0)
    pair.checked.restore()
    pair.checked.drain()
    answered = [pair.checked.outcomes[each] for each in (*before, request, later)]
    assert {(each.outcome, each.policy) for each in answered} == {("answered", "")}


def test_an_answer_that_it_raises_about_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = two()
    pair.start()
    request = pair.arrive(1)
    spoil(monkeypatch, Service, "_closed")
    pair.checked.finish(request)
    assert pair.policy.canary is None
    assert pair.checked.outcomes[request].outcome == "answered"
    assert pair.policy.facts.replicas[0].in_flight == 0


def test_a_stream_that_has_begun_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = two()
    pair.start()
    request = pair.arrive(1, stream=True)
    pair.checked.first(request)
    spoil(monkeypatch, Service, "_ticked")
    pair.checked.now_ns += 60 * S
    assert broke(pair.checked.feed(Ticked()))
    assert request in pair.checked.in_flight
    pair.checked.finish(request)
    assert pair.checked.outcomes[request].outcome == "answered"


def test_one_that_raises_as_it_begins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = two()
    request = pair.arrive(0)
    spoil(monkeypatch, Tiered, "learn")
    (refused,) = pair.start()
    assert "the candidate raised Fault in" in refused.why
    assert pair.policy.canary is None
    assert pair.policy.queue.split is None
    pair.checked.finish(request)
    pair.checked.drain()


# In the twin


STREAMS: list[dict[str, Any]] = [
    {
        "name": name, "business_line": name, "sla_class": sla, "model": "qwen3-8b",
        "endpoint": "chat", "users": {"count": 300, "zipf": 0.5},
        "arrivals": {
            "law": "poisson", "rate_rps": rate,
            "curve": [[8, 0.7], [9, 1.6], [14, 1.6], [15, 0.7], [22, 0.7], [23, 1.6], [28, 1.6],
                      [29, 0.7]],
        },
        "prompt_tokens": {"lognormal": {"mean": prompt, "sigma": 0.6}, "low": 10, "high": 12_000},
        "output_tokens": {"lognormal": {"mean": output, "sigma": 0.5}, "low": 2, "high": 600},
        "max_output_tokens": 700,
    }
    for name, sla, rate, prompt, output in (
        ("search", "P0", 24, 250, 30), ("support", "P1", 15, 900, 200),
        ("reports", "P2", 7, 5000, 200),
    )
]  # fmt: skip


def play(folder: Path, events: list[dict[str, Any]], seed: int = 1) -> list[bytes]:
    """Two bursts on one replica, more than it can bear; the decision log."""
    raw = {
        "duration_s": 36, "traffic": {"open": [{"streams": STREAMS}]},
        "fleet": [{"profile": "h100-sxm/qwen3-8b"}], "events": events,
    }  # fmt: skip
    setup = msgspec.convert(raw, Setup, str_keys=False)
    run_setup(setup, seed, run="x", folder=folder, recordings=Recordings(folder), out=folder / "l")
    return [path.read_bytes() for path in sorted((folder / "l").glob("*.log"))]


def good_by_policy(segments: list[bytes]) -> dict[str, tuple[int, int]]:
    """(good, all) by who decided; good: answered, with a first token in time."""
    arrivals: dict[int, tuple[int, Arrived]] = {}
    first_ns: dict[int, int] = {}
    counts: Counter[str] = Counter()
    good: Counter[str] = Counter()
    tags: Tags | None = None
    for segment in segments:
        header, _, records = read_segment(segment)
        rules = from_canonical(header.policy)
        tags = Tags(rules.classes, rules.tiers)
        for record in records:
            event = record.event
            if isinstance(event, Arrived):
                arrivals[event.request] = record.now_ns, event
            elif isinstance(event, FirstToken):
                first_ns.setdefault(event.request, record.now_ns)
            for decision in record.decisions:
                if isinstance(decision, Settled):
                    at_ns, asked = arrivals[decision.request]
                    most_ns = tags.deadline_ns(asked, tags.sla(asked))
                    took_ns = first_ns.get(decision.request, 1 << 62) - at_ns
                    counts[decision.policy] += 1
                    good[decision.policy] += decision.outcome == "answered" and took_ns <= most_ns
    return {policy: (good[policy], counts[policy]) for policy in counts}


def canary_at(at_s: float, share: int, **changes: Any) -> dict[str, Any]:
    policy = {"preset": "stable", "set": {"name": "other", **changes}}
    return {"kind": "canary", "at_s": at_s, "share_permille": share, "policy": policy}


def test_a_policy_is_as_good_as_itself_at_any_share(tmp_path: Path) -> None:
    (alone_good, count) = good_by_policy(play(tmp_path / "none", []))[""]
    alone = alone_good / count
    assert 0.6 < alone < 0.97, "the test needs a load that not everybody survives"
    for share in (50, 500):
        found = good_by_policy(play(tmp_path / str(share), [canary_at(0, share)]))
        assert sum(total for _, total in found.values()) == count
        both = sum(good for good, _ in found.values()) / count
        assert both == pytest.approx(alone, abs=0.03)
        rates = [good / total for good, total in found.values()]
        assert len(rates) == 2
        assert max(rates) - min(rates) < 0.06


def test_its_log_is_what_the_policy_does(tmp_path: Path) -> None:
    events = [
        canary_at(4, 50, limits={"user_per_s": 3}), canary_at(10, 500, limits={"user_per_s": 3}),
        {"kind": "canary_end", "at_s": 17, "keep": "new"},
        {"kind": "canary", "at_s": 20, "share_permille": 300, "policy": {"preset": "throughput"}},
        {"kind": "canary_end", "at_s": 26, "keep": "old"},
    ]  # fmt: skip
    logs = [play(tmp_path / name, events) for name in ("one", "other")]
    assert logs[0] == logs[1]
    assert audit(logs[0]) is None
    refused = [
        decision
        for segment in logs[0]
        for record in read_segment(segment).records
        for decision in record.decisions
        if isinstance(decision, Refused)
    ]
    assert refused == []
    assert len(good_by_policy(logs[0])) == 4  # three hashes, and none


def test_what_a_scenario_says_of_canaries_is_made_events(tmp_path: Path) -> None:
    stable = load_policy("stable")

    def made(*events: dict[str, Any]) -> list[Any]:
        raw = {"duration_s": 5, "traffic": {"open": [{"streams": STREAMS}]},
               "fleet": [{"profile": "h100-sxm/qwen3-8b"}], "events": list(events)}  # fmt: skip
        setup = msgspec.convert(raw, Setup, str_keys=False)
        return [event for _, event in dated_events(setup.events, stable, tmp_path, "f")]

    end = {"kind": "canary_end", "at_s": 3, "keep": "new"}
    switch = {"kind": "switch", "at_s": 4, "policy": {"preset": "throughput"}}
    started, ended, switched = made(switch, end, canary_at(1, 20))
    assert (started.share_permille, started.salt, ended.keep) == (20, 0, "new")
    assert from_canonical(started.old) == stable
    assert switched.old == started.new
    with pytest.raises(FileError, match="no canary goes on at 3"):
        made(end)
    with pytest.raises(FileError, match=r"at 4.* s another canary goes on"):
        made(canary_at(1, 20), switch)
    with pytest.raises(msgspec.ValidationError, match="share_permille"):
        made(canary_at(1, 0))


# Live


def test_a_driver_begins_and_ends_it() -> None:
    async def test() -> None:
        async with core(policy=QUEUE_ALONE, checked=False) as running:
            driver = running.driver
            old, new = driver.parameters, parameters(**QUEUE_ALONE, name="other")

            def rules() -> tuple[Parameters, Parameters | None]:
                return driver.parameters, driver.candidate

            switched: list[object] = []
            driver._hear["switched"].append(switched.append)
            with pytest.raises(ValueError, match="no canary goes on"):
                driver.end_canary("old")
            with pytest.raises(ValueError, match="share_permille is 0"):
                driver.canary(new, 0, 1)
            assert driver.candidate is None
            driver.canary(new, 50, 1)
            assert rules() == (old, new)
            driver.end_canary("old")
            assert (*rules(), switched) == (old, None, [])
            driver.canary(new, 50, 1)
            driver.canary(new, 500, 1)
            driver.end_canary("new")
            assert (*rules(), switched) == (new, None, [new])
            assert len(running.events(CanaryStarted)) == 4
            assert not any(isinstance(event, Failed) for event in running.events(Failed))

    asyncio.run(test())


def test_a_session_that_waited_under_both_policies_goes_on_in_order_under_one() -> None:
    """A policy without limits on sessions does not see that one of its requests belongs to one."""
    stable = parameters("tiered", limits={"session_in_flight_most": 1})
    candidate = parameters(
        "tiered",
        limits={"session_in_flight_most": 0, "session_per_s": 0, "user_in_flight_most": 1},
    )
    checked = Checked(stable)
    checked.bring_up(up(0))
    checked.feed(CanaryStarted(canonical(stable), canonical(candidate), 500, SALT))
    theirs, ours = user_of(1, 500), user_of(0, 500)
    busy = checked.arrive(user=theirs, deadline_ns=60 * S)
    first = checked.arrive(user=theirs, session="s", deadline_ns=60 * S)
    goes = checked.arrive(user=ours, session="s", deadline_ns=60 * S)
    last = checked.arrive(user=ours, session="s", deadline_ns=60 * S)
    assert set(checked.in_flight) == {busy, goes}
    checked.feed(CanaryEnded("old"))
    checked.restore()
    for request in (busy, goes, first, last):
        checked.finish(request, after_ns=MS)
    assert [sent.request for sent in checked.dispatches] == [busy, goes, first, last]
