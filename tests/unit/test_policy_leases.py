"""Leases: what is held of limits and sessions that several controllers share."""

from __future__ import annotations

from typing import Any

import pytest

from policy.decisions import Alert, Decision, Dispatch, Lease, Refused, Release, Settled
from policy.events import (
    CanaryEnded,
    CanaryStarted,
    Cancelled,
    Event,
    PolicySwitched,
    QuotaLeased,
    ReplicaDown,
    ReplicaShare,
    Restored,
    SessionOwned,
    StoreChanged,
)
from policy.leases import FAR_NS, Leases, Use
from policy.parameters import canonical
from tests.policy_support import MS, Checked, S, parameters, up

LEASE_NS = 1500 * MS


class Shared(Checked):
    """The whole policy, its leases answered by hand."""

    def __init__(self, state: Any = "shared", controllers: int = 2, **sections: Any) -> None:
        sections = {"health": {"enabled": False}, **sections}
        super().__init__(parameters("tiered", **sections))
        self.leases: list[Lease | Release] = []
        self.settled: list[Settled] = []
        self.bring_up(up(0))
        if state:
            self.feed(StoreChanged(state, controllers))

    def feed(self, event: Event, after_ns: int = 0) -> tuple[Decision, ...]:
        decisions = super().feed(event, after_ns)
        self.leases += [each for each in decisions if isinstance(each, (Lease, Release))]
        self.settled += [each for each in decisions if isinstance(each, Settled)]
        return decisions

    def told(self) -> list[tuple[str, str, int, int, int]]:
        """What was asked for since the last call, or ("release", session)."""
        leases, self.leases = self.leases, []
        return [
            (one.kind, one.name, one.per_s, one.in_flight, one.used)
            if isinstance(one, Lease)
            else ("release", one.session, 0, 0, 0)
            for one in leases
        ]

    def sent(self) -> list[int]:
        return [dispatch.request for dispatch in self.dispatches]

    def until(self, at_ns: int) -> None:
        """Tick by tick."""
        while (due_ns := self.policy.deadline_ns()) is not None and due_ns <= at_ns:
            self.tick()
        self.now_ns = max(self.now_ns, at_ns)

    def give(self, user: str, per_s: int, for_ns: int = LEASE_NS) -> None:
        self.feed(QuotaLeased("user", user, per_s, -1, for_ns))

    def own(self, session: str, for_ns: int = LEASE_NS, spent: tuple[int, ...] = ()) -> None:
        self.feed(SessionOwned(session, for_ns, spent))


def test_alone_nothing_is_asked_and_nothing_waits() -> None:
    shared = Shared("")
    for _ in range(5):
        shared.arrive(user="ann")
    shared.arrive(user="bob", session="s")
    shared.give("ann", 1)
    shared.own("s", 0)
    assert len(shared.sent()) == 6
    shared.until(5 * S)
    assert shared.told() == []


def test_a_request_waits_for_its_share_which_is_asked_for_once() -> None:
    shared = Shared()
    first, second = shared.arrive(user="ann"), shared.arrive(user="ann")
    assert shared.told() == [("user", "ann", 5, 0, 0)]
    assert shared.sent() == []
    shared.give("ann", 1)
    assert shared.sent() == [first]
    shared.until(1100 * MS)  # renewed meanwhile, without an answer
    assert shared.sent() == [first, second]
    assert shared.told()[0] == ("user", "ann", 5, 0, 1)


def test_it_is_renewed_after_400_ms_while_in_use_and_let_go_a_second_later() -> None:
    shared = Shared(chains={"enabled": False})
    request = shared.arrive(user="ann")
    shared.told()
    shared.give("ann", 3)
    shared.until(399 * MS)
    assert shared.told() == []
    shared.until(400 * MS)
    assert shared.told() == [("user", "ann", 5, 0, 1)]
    shared.give("ann", 3)
    shared.finish(request)
    again = shared.arrive(user="ann", after_ns=500 * MS)
    shared.until(S)
    assert shared.told() == [("user", "ann", 5, 0, 1)]
    shared.give("ann", 3)
    shared.finish(again)
    shared.until(1400 * MS)
    assert shared.told() == [("user", "ann", 5, 0, 0)]  # it counts as in use for a second
    shared.give("ann", 3)
    shared.until(9 * S)
    assert shared.told() == []  # it was not in use before it ran out


@pytest.mark.parametrize("gone_ms", range(1500, 3000, 100))
def test_a_session_in_use_has_time_left_when_the_loss_of_the_store_is_told(gone_ms: int) -> None:
    """Its requests come one by one, with pauses between them: it is not idle for that."""
    shared = Shared(limits={"user_per_s": 0})
    for at_ms in range(0, gone_ms, 50):
        shared.until(at_ms * MS)
        if at_ms % 300 == 0:
            request = shared.arrive(session="s")
        if any(what == "session" for what, *_ in shared.told()):
            shared.own("s")
        if at_ms % 300 == 50:
            shared.finish(request)
    if request in shared.in_flight:
        shared.finish(request)
    shared.until(gone_ms * MS + 700 * MS)  # the store says nothing any more
    shared.feed(StoreChanged("lost", 2))
    last = shared.arrive(session="s")
    assert last in shared.sent()


def test_without_an_answer_it_is_asked_for_again() -> None:
    shared = Shared()
    shared.arrive(user="ann", deadline_ns=60 * S)
    shared.until(S)
    assert [asked[0] for asked in shared.told()] == ["user"] * 3


def test_a_share_that_ran_out_gives_nothing_more_until_it_is_renewed() -> None:
    shared = Shared()
    first = shared.arrive(user="ann", deadline_ns=60 * S)
    shared.give("ann", 5, 300 * MS)
    second = shared.arrive(user="ann", after_ns=300 * MS, deadline_ns=60 * S)
    assert shared.sent() == [first]
    shared.restore()
    shared.give("ann", 2)
    assert shared.sent() == [first, second]
    third = shared.arrive(user="ann", after_ns=10 * MS, deadline_ns=60 * S)
    shared.until(S - 1)
    assert third not in shared.sent()  # two went on within a second, whoever gave the leave
    shared.give("ann", 2)
    shared.until(S)
    assert third in shared.sent()


def test_a_smaller_share_counts_what_went_on_before() -> None:
    shared = Shared()
    for _ in range(7):
        shared.arrive(user="ann", deadline_ns=60 * S)
    shared.give("ann", 5)
    assert len(shared.sent()) == 5
    shared.now_ns += 400 * MS
    shared.give("ann", 1)
    shared.until(S - 1)
    assert len(shared.sent()) == 5
    shared.until(S)
    assert len(shared.sent()) == 6
    shared.give("ann", 5)
    assert len(shared.sent()) == 7


def test_a_share_of_nothing_is_asked_for_again_soon() -> None:
    shared = Shared()
    shared.arrive(user="ann", deadline_ns=60 * S)
    shared.told()
    shared.give("ann", 0)
    assert shared.sent() == []
    shared.until(100 * MS)
    assert shared.told() == [("user", "ann", 5, 0, 0)]


def test_every_limit_is_leased_whole_with_what_is_used() -> None:
    limits = {"model_per_s": 100, "global_in_flight_most": 50, "user_in_flight_most": 4}
    shared = Shared(limits=limits)
    shared.arrive(user="ann", session="s")
    assert shared.told() == [
        ("all", "", 0, 50, 0), ("model", "m", 100, 0, 0), ("session", "s", 0, 0, 0),
        ("user", "ann", 5, 4, 0),
    ]  # fmt: skip
    shared.feed(QuotaLeased("all", "", -1, 1, LEASE_NS))
    shared.feed(QuotaLeased("model", "m", 50, -1, LEASE_NS))
    shared.own("s")
    assert shared.sent() == []
    shared.feed(QuotaLeased("user", "ann", 3, 2, LEASE_NS))
    assert shared.sent() == [0]
    shared.arrive()  # anonymous: of all there may be only one
    assert shared.sent() == [0]
    shared.feed(QuotaLeased("all", "", -1, 2, LEASE_NS))
    assert shared.sent() == [0, 1]
    shared.until(400 * MS)
    assert ("all", "", 0, 50, 2) in shared.told()


def test_a_session_elsewhere_waits_in_order_and_others_go_on() -> None:
    shared = Shared(limits={"user_per_s": 0})
    first = shared.arrive(session="s", deadline_ns=60 * S)
    second = shared.arrive(session="s", deadline_ns=60 * S)
    other = shared.arrive(session="t")
    assert shared.told() == [("session", "s", 0, 0, 0), ("session", "t", 0, 0, 0)]
    shared.own("s", 0)
    shared.own("t")
    assert shared.sent() == [other]
    shared.until(100 * MS)
    assert shared.told() == [("session", "s", 0, 0, 0)]
    shared.own("s")
    assert shared.sent() == [other, first]
    shared.restore()
    shared.finish(first)
    assert shared.sent() == [other, first, second]


def test_what_a_session_spent_elsewhere_fills_its_second_here() -> None:
    shared = Shared(limits={"user_per_s": 0, "session_per_s": 2, "session_in_flight_most": 0})
    for _ in range(3):
        shared.arrive(session="s", deadline_ns=60 * S)
    shared.own("s", spent=(2 * S, 700 * MS))
    assert shared.sent() == [0]
    shared.own("s", spent=(700 * MS,))  # a renewal: it was here
    shared.until(300 * MS)
    assert shared.sent() == [0, 1]
    shared.until(S)
    assert shared.sent() == [0, 1, 2]


def test_a_session_is_given_back_a_second_after_its_last_answer() -> None:
    shared = Shared(limits={"user_per_s": 0})
    request = shared.arrive(session="s")
    shared.own("s")
    shared.until(3 * S)
    told = shared.told()
    assert ("release", "s", 0, 0, 0) not in told  # it is in use, however long that takes
    shared.own("s")
    shared.finish(request)
    at_ns = shared.now_ns
    shared.until(at_ns + 400 * MS)
    assert shared.told() == [("session", "s", 0, 0, 0)]  # it may come back within the second
    shared.own("s")
    shared.until(at_ns + S - 1)
    told = shared.told()
    assert ("release", "s", 0, 0, 0) not in told
    shared.until(at_ns + S)
    assert shared.told() == [("release", "s", 0, 0, 0)]
    shared.own("s")  # late: it is not believed
    shared.arrive(session="s")
    assert shared.told() == [("session", "s", 0, 0, 0)]
    assert shared.sent() == [request]


def test_a_session_is_not_given_back_while_an_answer_is_awaited() -> None:
    shared = Shared(limits={"user_per_s": 0})
    request = shared.arrive(session="s")
    shared.feed(Cancelled(request))
    shared.until(shared.now_ns + 1200 * MS)
    assert shared.told() == [("session", "s", 0, 0, 0)]
    shared.own("s")
    assert shared.told() == [("release", "s", 0, 0, 0)]
    shared.until(9 * S)
    assert shared.told() == []


def test_lost_the_last_shares_stay_and_no_other_session_is_taken_over() -> None:
    shared = Shared(controllers=2)
    own = shared.arrive(user="ann", session="mine")
    shared.give("ann", 1)
    shared.own("mine")
    shared.feed(StoreChanged("lost", 2))
    shared.told()
    shared.finish(own)
    shared.until(20 * S)  # far beyond the lease
    shared.restore()
    own = [shared.arrive(user="ann", session="mine"), shared.arrive(user="ann", deadline_ns=9 * S)]
    assert shared.sent()[-1] == own[0]
    shared.until(21 * S)
    assert shared.sent()[-1] == own[1]
    new = [shared.arrive(user="bob") for _ in range(3)]
    assert shared.sent()[-2:] == new[:2]  # 5 // 2
    foreign = shared.arrive(user="eve", session="theirs")
    outcome = shared.outcomes[foreign]
    assert (outcome.outcome, outcome.why, outcome.http_code) == ("shed", "session_elsewhere", 503)
    assert outcome.retry_after_ns > 0
    assert shared.told() == []


def test_lost_a_session_elsewhere_is_waited_for_one_second() -> None:
    shared = Shared(limits={"user_per_s": 0})
    request = shared.arrive(session="s", deadline_ns=60 * S)
    short = shared.arrive(session="t", deadline_ns=500 * MS)
    shared.feed(StoreChanged("lost", 2), 100 * MS)
    later = shared.arrive(session="s", deadline_ns=60 * S, after_ns=500 * MS)
    assert shared.outcomes == {}
    shared.until(1100 * MS - 1)
    assert set(shared.outcomes) == {short}
    assert shared.outcomes[short].why == "session_elsewhere"
    shared.restore()
    shared.until(1100 * MS)
    assert set(shared.outcomes) == {short, request, later}


def test_lost_what_waits_for_sessions_elsewhere_is_told_in_order_of_arrival() -> None:
    shared = Shared(limits={"user_per_s": 0})
    for session in ("s", "s", "t"):  # the first goes on, the second waits for it
        shared.arrive(session=session, deadline_ns=60 * S)
        if session == "s":
            shared.feed(SessionOwned("s", LEASE_NS))
    shared.feed(SessionOwned("s", 0))
    shared.restore()
    shared.feed(StoreChanged("lost", 2))
    shared.until(1100 * MS)
    assert [each.request for each in shared.settled] == [1, 2]


def test_who_waits_is_remembered_in_the_same_order_after_a_restore() -> None:
    shared = Shared(state="", limits={"user_per_s": 0, "user_in_flight_most": 1})
    for user in ("fay", "eve", "dan", "cy", "bob", "ann"):
        shared.arrive(user=user, deadline_ns=60 * S)
        shared.arrive(user=user, deadline_ns=60 * S)
    shared.restore()
    shared.feed(StoreChanged("shared", 2))
    assert shared.policy.snapshot() == shared.double.snapshot()


def test_a_store_that_comes_back_is_told_first_what_is_held() -> None:
    shared = Shared(limits={"user_per_s": 0})
    mine = shared.arrive(session="mine")
    shared.own("mine")
    shared.feed(StoreChanged("lost", 2))
    waiting = shared.arrive(session="new", deadline_ns=60 * S)
    shared.told()
    shared.feed(StoreChanged("shared", 2), 500 * MS)
    assert shared.told() == [("session", "mine", 0, 0, 1)]
    fresh = shared.arrive(session="fresh", deadline_ns=60 * S)
    shared.own("mine")
    shared.until(1500 * MS - 1)
    assert {asked[1] for asked in shared.told()} == {"mine"}
    shared.own("mine")
    shared.until(1500 * MS)
    assert ("session", "fresh", 0, 0, 0) in shared.told()
    shared.own("fresh")
    assert shared.sent() == [mine, fresh]
    shared.own("new")
    assert shared.sent() == [mine, fresh, waiting]


def test_a_session_that_waited_through_a_loss_is_asked_for_when_the_store_is_back() -> None:
    shared = Shared(limits={"user_per_s": 0})
    shared.feed(StoreChanged("lost", 2))
    waiting = shared.arrive(session="new", deadline_ns=60 * S)
    shared.feed(StoreChanged("shared", 2), 500 * MS)
    shared.until(1500 * MS)
    assert shared.told() == [("session", "new", 0, 0, 0)]
    shared.own("new")
    assert shared.sent() == [waiting]


def test_alone_again_every_limit_is_whole() -> None:
    shared = Shared()
    waiting = shared.arrive(user="ann", session="s")
    shared.feed(StoreChanged("alone"))
    assert shared.sent() == [waiting]
    assert shared.policy.mechanisms["limits"].use("user", "ann").used == 1  # type: ignore[attr-defined]


def test_a_session_of_another_controller_is_shed_at_its_deadline() -> None:
    shared = Shared(limits={"user_per_s": 0})
    request = shared.arrive(session="s", deadline_ns=300 * MS)
    shared.own("s", 0)
    shared.until(S)
    assert (shared.outcomes[request].why, shared.outcomes[request].http_code) == (
        "session_elsewhere", 503,
    )  # fmt: skip


def test_after_a_restart_nothing_is_held() -> None:
    shared = Shared()
    shared.arrive(user="ann", session="s")
    shared.give("ann", 5)
    shared.own("s")
    shared.feed(Restored(S))
    shared.bring_up(up(0))
    assert shared.arrive(user="ann", session="s") == shared.sent()[-1]  # alone, as it begins
    shared.feed(StoreChanged("shared", 2))
    waiting = shared.arrive(user="ann")
    assert shared.sent()[-1] != waiting


@pytest.mark.parametrize(
    "event",
    [
        StoreChanged("gone"),  # type: ignore[arg-type]
        StoreChanged("shared", 0),
        QuotaLeased("user", "", 1, 1, S),
        QuotaLeased("all", "x", 1, 1, S),
        QuotaLeased("user", "ann", -2, 1, S),
        QuotaLeased("user", "ann", 1, 1, -1),
        SessionOwned("s", -1),
        SessionOwned("s", S, (-1,)),
        ReplicaShare(0, 0),
        ReplicaShare(0, 1001),
        ReplicaShare(7, 500),
    ],
)
def test_what_cannot_be_changes_nothing(event: Event) -> None:
    shared = Shared()
    shared.arrive(user="ann", session="s")
    (refused,) = shared.feed(event)
    assert isinstance(refused, Refused)


def test_a_share_of_a_replica_scales_what_may_be_in_flight_there() -> None:
    shared = Shared("", limits={"enabled": False}, inflight={"sequences_permille": 1000})
    shared.bring_up(up(1, max_num_seqs=100))
    shared.feed(ReplicaDown(0, "test"))
    shared.feed(ReplicaShare(1, 30))
    for _ in range(5):
        shared.arrive(tokens=10, sla="P0", deadline_ns=60 * S)
    assert len(shared.sent()) == 3
    shared.restore()
    shared.feed(ReplicaShare(1, 40))
    assert len(shared.sent()) == 4
    shared.feed(ReplicaDown(1, "test"))
    shared.bring_up(up(1, max_num_seqs=100))  # another now, whose part is all of it
    assert shared.arrive(tokens=10, sla="P0", deadline_ns=60 * S) in shared.sent()


def test_a_switch_keeps_what_is_held() -> None:
    shared = Shared()
    shared.arrive(user="ann", session="s")
    shared.give("ann", 5)
    shared.own("s")
    shared.told()
    other = parameters("tiered", health={"enabled": False}, limits={"user_per_s": 4})
    shared.feed(PolicySwitched(canonical(shared.params), canonical(other)))
    again = shared.arrive(user="ann")
    assert again in shared.sent()  # 5 of 5 are held: 4 of 4
    assert shared.told() == [("user", "ann", 4, 0, 2)]


def test_a_share_of_the_old_limit_is_no_larger_while_the_new_one_is_asked_for() -> None:
    old = {"user_per_s": 0, "user_in_flight_most": 10}
    shared = Shared(limits=old)
    shared.arrive(user="ann", deadline_ns=60 * S)
    shared.feed(QuotaLeased("user", "ann", -1, 5, LEASE_NS))
    new = parameters("tiered", health={"enabled": False}, limits={**old, "user_in_flight_most": 4})
    shared.feed(PolicySwitched(canonical(shared.params), canonical(new)))
    for _ in range(4):
        shared.arrive(user="ann", deadline_ns=60 * S)
    assert shared.told()[-1] == ("user", "ann", 0, 4, 2)
    assert len(shared.sent()) == 2  # half of four, as it was half of ten
    shared.feed(StoreChanged("lost", 2))
    assert len(shared.sent()) == 2


def canary(shared: Shared, **limits: Any) -> None:
    new = parameters("tiered", health={"enabled": False}, limits=limits)
    shared.feed(CanaryStarted(canonical(shared.params), canonical(new), 500, 1))


def test_a_canary_asks_once_and_both_policies_keep_to_it() -> None:
    shared = Shared(limits={"model_per_s": 10, "user_per_s": 0})
    canary(shared, model_per_s=10, user_per_s=0, half_life_s=30)
    first = [shared.arrive(user=f"u{n}", deadline_ns=60 * S) for n in range(8)]
    assert shared.told() == [("model", "m", 10, 0, 0)]
    shared.feed(QuotaLeased("model", "m", 3, -1, LEASE_NS))
    assert len(shared.sent()) == 3
    assert len({each.policy for each in shared.dispatches}) == 2
    shared.restore()
    shared.until(400 * MS)
    assert shared.told() == [("model", "m", 10, 0, 3)]
    shared.feed(QuotaLeased("model", "m", 5, -1, LEASE_NS))
    assert len(shared.sent()) == 5
    shared.until(S + 401 * MS)  # by now the first five count no more, and the share still holds
    shared.feed(CanaryEnded("new"))
    shared.feed(QuotaLeased("model", "m", 5, -1, LEASE_NS))
    shared.until(3 * S)
    assert sorted(shared.sent()) == first
    assert not [each for each in shared.leases if isinstance(each, Alert)]


def test_a_canary_with_a_tighter_limit_has_that_part_of_the_share() -> None:
    shared = Shared(limits={"user_per_s": 0, "model_per_s": 10})
    canary(shared, user_per_s=0, model_per_s=5)
    requests = [shared.arrive(user=f"u{n}", deadline_ns=60 * S) for n in range(12)]
    shared.feed(QuotaLeased("model", "m", 8, -1, LEASE_NS))
    by_policy = [each.policy for each in shared.dispatches]
    assert len(by_policy) == 8
    assert len(requests) == 12
    candidates = [each for each in by_policy if each != by_policy[0]]
    assert min(len(candidates), 8 - len(candidates)) <= 4  # 8 of 10 are 4 of 5


def test_a_canarys_session_is_owned_by_the_controller_not_by_a_policy() -> None:
    shared = Shared(limits={"user_per_s": 0})
    canary(shared, user_per_s=0, half_life_s=30)
    for name in ("s", "t", "u", "v"):
        shared.arrive(session=name)
        shared.own(name)
    assert len(shared.sent()) == 4
    assert len({each.policy for each in shared.dispatches}) == 2
    for request in list(shared.in_flight):
        shared.finish(request)
    shared.told()
    at_ns = shared.now_ns
    shared.until(at_ns + 400 * MS)
    for name in ("s", "t", "u", "v"):
        shared.own(name)
    shared.until(at_ns + S)
    released = [name for what, name, *_ in shared.told() if what == "release"]
    assert sorted(released) == ["s", "t", "u", "v"]


def test_keys_are_bounded_and_those_in_use_stay() -> None:
    leases = Leases(2)
    leases.changed(0, StoreChanged("shared", 2))
    in_use = ("user", "ann")
    leases.use = lambda kind, name: Use(int((kind, name) == in_use), 0, -FAR_NS)
    leases.want(0, "user", "ann", 5, 0)
    for number in range(50):
        leases.want(0, "user", f"u{number}", 5, 0)
        assert leases.size() <= leases.size_most() == 7
    assert [lease.name for lease in leases.ticked(0) if isinstance(lease, Lease)] == ["ann"]


def test_dispatches_are_counted_here() -> None:
    shared = Shared()
    shared.arrive()
    assert isinstance(shared.dispatches[0], Dispatch)  # anonymous: nothing to lease
    assert shared.told() == []
