"""The whole policy: how the mechanisms work together on a request's way."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.decisions import (
    Abort,
    Alert,
    BreakerMoved,
    Dispatch,
    LookUp,
    ReadProgress,
    Refused,
    Reset,
    Rotated,
    SaveCheckpoint,
    Settled,
    Start,
    Stop,
    Verify,
    Warm,
)
from policy.events import (
    Cancelled,
    CheckpointFailed,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    Forecasted,
    GpuFault,
    GpuRead,
    LookedUp,
    PolicySwitched,
    Progress,
    ReplicaDown,
    Restored,
    RolloutRequested,
    Standby,
    StepsRead,
    Ticked,
    Verified,
    Warmed,
)
from policy.parameters import canonical
from policy.service import Service
from tests.policy_support import MS, Checked, S, arrived, parameters, up

SURE = {"entropy_mean_millinats": 100, "entropy_worst_millinats": 500, "close_permille": 5}
UNSURE = {"entropy_mean_millinats": 900, "entropy_worst_millinats": 2500, "close_permille": 60}
LOST = {"entropy_mean_millinats": 1900, "entropy_worst_millinats": 3000, "close_permille": 290}


def service(replicas: int = 2, spec: dict[str, Any] | None = None, **sections: Any) -> Checked:
    checked = Checked(parameters("tiered", **sections))
    for replica in range(replicas):
        checked.bring_up(up(replica, **(spec or {})))
    return checked


def kinds(decisions: Any) -> list[str]:
    return [type(decision).__name__ for decision in decisions]


def answer(checked: Checked, request: int, **features: Any) -> tuple[Any, ...]:
    """The request's replica answers it."""
    checked.now_ns += MS
    replica = checked.in_flight[request]
    return checked.feed(Finished(request, replica, 250, 0, 100, **features))


def ticks(checked: Checked, until_ns: int) -> list[Any]:
    """Let every deadline up to ``until_ns`` pass; what was decided."""
    decided: list[Any] = []
    while True:
        due_ns = checked.policy.deadline_ns()
        if due_ns is None or due_ns > until_ns:
            checked.now_ns = max(checked.now_ns, until_ns)
            return decided
        before = checked.now_ns
        checked.now_ns = max(before, due_ns)
        decided += checked.feed(Ticked())


# Confidence


def test_a_sure_answer_is_delivered_with_its_score() -> None:
    checked = service()
    request = checked.arrive(stream=False)
    (settled,) = answer(checked, request, **SURE)
    assert (settled.outcome, settled.verification) == ("answered", "not_needed")
    assert settled.confidence_permille > 650


def test_an_answer_without_logprobs_has_no_score() -> None:
    checked = service()
    request = checked.arrive(stream=False)
    (settled,) = answer(checked, request)
    assert (settled.confidence_permille, settled.verification) == (-1, "")


@pytest.mark.parametrize(
    ("verdict", "outcome", "verification"),
    [("match", "answered", "match"), ("failed", "answered", "skipped_budget")],
)
def test_an_unsure_answer_is_run_again_elsewhere(
    verdict: Any, outcome: str, verification: str
) -> None:
    checked = service(confidence={"budget_permille": 1000})
    request = checked.arrive(stream=False)
    first = checked.in_flight[request]
    (verify,) = answer(checked, request, **UNSURE)
    assert isinstance(verify, Verify)
    assert verify.replica != first
    assert request not in checked.outcomes
    (settled,) = checked.feed(Verified(request, verify.replica, verdict, 100))
    assert (settled.outcome, settled.verification) == (outcome, verification)


def test_a_mismatch_is_degraded_and_says_so() -> None:
    checked = service(confidence={"budget_permille": 1000, "actions": ["template"]})
    request = checked.arrive(stream=False)
    (verify,) = answer(checked, request, **UNSURE)
    (settled,) = checked.feed(Verified(request, verify.replica, "mismatch", 100))
    assert (settled.outcome, settled.why) == ("degraded", "template")
    assert settled.verification == "mismatch"


def test_two_replicas_of_one_failure_domain_do_not_verify_each_other() -> None:
    checked = service(spec={"domain": "host0/card0"}, confidence={"budget_permille": 1000})
    request = checked.arrive(stream=False)
    decisions = answer(checked, request, **UNSURE)
    assert isinstance(decisions[0], LookUp)  # degraded at once: the first way is a cached answer


def test_a_stream_is_never_verified_behind_its_callers_back() -> None:
    checked = service(confidence={"budget_permille": 1000})
    request = checked.arrive(stream=True)
    (settled,) = answer(checked, request, **UNSURE)
    assert (settled.outcome, settled.verification) == ("answered", "skipped_stream")


def test_the_ways_to_degrade_are_tried_in_order() -> None:
    checked = service(1, {"models": ("m",)}, tiers={"fallback_model": "light"})
    checked.bring_up(up(1, models=("light",)))
    request = checked.arrive(stream=False)
    (look_up,) = answer(checked, request, **LOST)
    assert look_up == LookUp(request)
    (dispatch,) = checked.feed(LookedUp(request, found=False))
    assert (dispatch.replica, dispatch.model) == (1, "light")
    (settled,) = answer(checked, request, **LOST)
    assert (settled.outcome, settled.why) == ("degraded", "model light")


def test_a_cached_answer_comes_with_its_age_and_confidence() -> None:
    checked = service()
    request = checked.arrive(stream=False)
    answer(checked, request, **LOST)
    (settled,) = checked.feed(LookedUp(request, True, 90 * S, 870))
    assert (settled.outcome, settled.why) == ("degraded", "cached")
    assert (settled.age_ns, settled.confidence_permille) == (90 * S, 870)


def test_without_any_way_a_doubtful_answer_is_better_than_none() -> None:
    checked = service(confidence={"actions": []})
    request = checked.arrive(stream=False)
    (settled,) = answer(checked, request, **LOST)
    assert (settled.outcome, settled.why) == ("degraded", "low_confidence")


# Breakers


def open_breaker(**sections: Any) -> Checked:
    rule = {
        "name": "r", "by": ["model"], "kinds": ["http_5xx"], "consecutive_least": 2,
        "consecutive_ms": 0,
    }  # fmt: skip
    breakers = {"rules": [rule]} | sections.pop("breakers", {})
    checked = service(1, retries={"tries_most": 1}, breakers=breakers, **sections)
    for _ in range(2):
        request = checked.arrive(MS)
        decisions = checked.fail(request, "http_5xx")
    assert [d.state for d in decisions if isinstance(d, BreakerMoved)] == ["open"]
    assert any(isinstance(decision, Alert) for decision in decisions)
    return checked


def test_an_open_breaker_answers_from_the_cache() -> None:
    checked = open_breaker(health={"enabled": False})
    request = checked.arrive(MS)
    assert request not in checked.in_flight
    (settled,) = checked.feed(LookedUp(request, True, S, 900))
    assert (settled.outcome, settled.why) == ("degraded", "cached")


def test_an_open_breaker_with_nothing_to_give_refuses() -> None:
    checked = open_breaker(health={"enabled": False}, breakers={"actions": []})
    request = checked.arrive(MS)
    assert checked.outcomes[request].why.startswith("breaker r")
    assert checked.outcomes[request].http_code == 503


def test_a_retried_try_does_not_count_against_the_model() -> None:
    rule = {
        "name": "r", "by": ["model"], "kinds": ["http_5xx"], "consecutive_least": 1,
        "consecutive_ms": 0,
    }  # fmt: skip
    checked = service(2, breakers={"rules": [rule]})
    request = checked.arrive()
    decisions = checked.fail(request, "http_5xx")
    assert kinds(decisions) == ["Dispatch"]
    answer(checked, request)
    assert checked.outcomes[request].outcome == "answered"


# Limits and chains


def test_a_sessions_next_request_waits_for_the_one_before() -> None:
    checked = service()
    first = checked.arrive(session="s")
    second = checked.arrive(session="s", sla="P2")
    other = checked.arrive(session="t")
    assert second in checked.waiting
    assert other in checked.in_flight
    decisions = answer(checked, first)
    assert kinds(decisions) == ["Settled", "Dispatch"]
    assert second in checked.in_flight


def test_what_a_limit_holds_back_is_shed_at_its_deadline() -> None:
    checked = service(health={"enabled": False})
    checked.arrive(session="s")
    second = checked.arrive(session="s", deadline_ns=300 * MS)
    ticks(checked, S)
    assert (checked.outcomes[second].outcome, checked.outcomes[second].why) == ("shed", "limit")


def chain(**fields: Any) -> dict[str, Any]:
    return {"chain": "c", "stream": False, "user": "ann", **fields}


def test_a_step_is_told_after_its_checkpoint_is_safe() -> None:
    checked = service()
    request = checked.arrive(**chain(step="plan"))
    decisions = answer(checked, request)
    left_ns = 8 * S - checked.now_ns
    assert decisions == (SaveCheckpoint(request, "c", "plan", left_ns),)
    (settled,) = checked.feed(CheckpointSaved(request, "k1"))
    assert (settled.checkpoint, settled.outcome) == ("k1", "answered")
    assert 0 < settled.left_ns <= 8 * S
    again = checked.arrive(**chain(step="plan"))
    assert checked.outcomes[again].why == "checkpoint"
    assert again not in [dispatch.request for dispatch in checked.dispatches]


def test_a_failed_save_does_not_cost_the_answer() -> None:
    checked = service()
    request = checked.arrive(**chain(step="plan"))
    answer(checked, request)
    (settled,) = checked.feed(CheckpointFailed(request))
    assert (settled.checkpoint, settled.outcome) == ("", "answered")


def test_a_chain_out_of_budget_ends_what_is_in_flight() -> None:
    checked = service(chains={"default": {"budget_ms": 1000}}, health={"enabled": False})
    request = checked.arrive(**chain(step="plan"))
    decided = ticks(checked, 2 * S)
    assert Abort(request, checked.dispatches[0].replica) in decided
    assert checked.outcomes[request].why == "chain_budget"
    late = checked.arrive(**chain(step="next"))
    assert (checked.outcomes[late].outcome, checked.outcomes[late].why) == (
        "degraded", "chain_budget",
    )  # fmt: skip


# The fleet


def test_a_card_with_an_uncorrectable_error_leaves_at_once_and_is_replaced() -> None:
    checked = service()
    checked.feed(Standby(7, "spare", (), 30 * S))
    request = checked.arrive()
    replica = checked.in_flight[request]
    decisions = checked.feed(GpuFault(replica, "ecc_uncorrectable"))
    assert [d.state for d in decisions if isinstance(d, Rotated)] == ["isolated"]
    assert any(d == Start(7) for d in decisions)
    assert Abort(request, replica) in decisions
    assert checked.in_flight[request] != replica
    for _ in range(5):
        assert checked.in_flight[checked.arrive()] != replica


def test_a_silent_replica_gives_its_requests_back() -> None:
    checked = service(confidence={"enabled": False})
    request = checked.arrive()
    replica = checked.in_flight[request]
    other = checked.arrive()
    assert checked.in_flight[other] != replica
    moved: list[Any] = []
    tokens = 0
    for _ in range(40):
        for decision in ticks(checked, checked.now_ns + 50 * MS):
            moved.append(decision)
            if type(decision).__name__ == "ReadProgress":
                tokens += 10  # only the other one makes any
                made = 0 if decision.replica == replica else tokens
                checked.feed(Progress(decision.replica, made))
    assert any(isinstance(d, Rotated) and d.why == "silent" for d in moved)
    assert Abort(request, replica) in moved
    assert checked.in_flight[request] == 1 - replica


def hangs(checked: Checked, replica: int) -> list[Any]:
    """Work keeps coming, and this replica never says anything again; until that is found out."""
    decided: list[Any] = []
    tokens = 0
    for _ in range(400):
        checked.arrive(stream=False)
        for decision in ticks(checked, checked.now_ns + 50 * MS):
            decided.append(decision)
            if isinstance(decision, ReadProgress):
                tokens += 10
                made = 0 if decision.replica == replica else tokens
                checked.feed(Progress(decision.replica, made))
        for request, where in list(checked.in_flight.items()):
            if where != replica:
                answer(checked, request)
        if any(isinstance(each, Rotated) and each.why == "hung" for each in decided):
            return decided
    raise AssertionError("nobody noticed")


def test_a_replica_that_hangs_is_isolated_emptied_and_replaced_at_once() -> None:
    checked = service(2, confidence={"enabled": False})
    checked.feed(Standby(7, "spare", (), 30 * S))
    decided = hangs(checked, 0)
    states = [d.state for d in decided if isinstance(d, Rotated) and d.replica == 0]
    assert states == ["ejected", "probing", "isolated"]
    assert Start(7) in decided
    assert 0 not in checked.in_flight.values()
    assert {checked.in_flight[checked.arrive()] for _ in range(4)} == {1}
    checked.restore()
    checked.feed(ReplicaDown(0, "killed by signal 9"))
    checked.bring_up(up(7))
    checked.feed(Standby(0, "r0", (), 30 * S))
    assert Start(0) in checked.feed(ReplicaDown(1, "killed by signal 9"))


def test_the_only_replica_that_hangs_gives_way_to_a_standby() -> None:
    off = {"enabled": False}  # a model that nobody serves is cut off, too
    checked = service(1, confidence=off, breakers=off)
    checked.feed(Standby(7, "spare", (), 30 * S))
    decided = hangs(checked, 0)
    assert Rotated(0, "in", "silent") in decided
    assert Start(7) in decided
    checked.restore()
    checked.bring_up(up(7))
    checked.arrive(deadline_ns=60 * S)
    assert set(checked.in_flight.values()) == {7}


def test_a_stream_that_has_begun_on_what_hangs_is_ended() -> None:
    checked = service(2, health={"hung_ejections": 1}, confidence={"enabled": False})
    stream = next(
        one for one in (checked.arrive() for _ in range(4)) if checked.in_flight[one] == 0
    )
    checked.first(stream, after_ns=MS)
    hangs(checked, 0)
    assert (checked.outcomes[stream].outcome, checked.outcomes[stream].why) == ("failed", "silent")


def test_what_hangs_stays_out_over_a_switch_and_comes_back_when_it_answers() -> None:
    checked = service(2, confidence={"enabled": False})
    hangs(checked, 0)
    switched(checked, health={"open_ms": 3000}, confidence={"enabled": False})
    assert {checked.in_flight[checked.arrive()] for _ in range(4)} == {1}
    checked.restore()
    decided = ticks(checked, checked.now_ns + 5 * S)
    assert Rotated(0, "probing", "retry") in decided
    probes = [request for request in (checked.arrive() for _ in range(6))
              if checked.in_flight[request] == 0]  # fmt: skip
    assert Rotated(0, "in", "probe_answered") in answer(checked, probes[0])


def test_a_throttled_card_takes_no_new_work_while_others_can() -> None:
    checked = service()
    hot = GpuRead(0, 1000, 0, 0, 1000, 1000, throttled=True, age_ns=0)
    checked.feed(hot)
    assert {checked.in_flight[checked.arrive()] for _ in range(6)} == {1}
    checked.feed(
        msgspec.structs.replace(hot, heat_permille=300, power_permille=300, throttled=False)
    )
    assert 0 in {checked.in_flight[checked.arrive()] for _ in range(6)}


def test_an_old_reading_of_a_card_says_nothing() -> None:
    checked = service(placement={"stale_ms": 1000}, health={"enabled": False})
    checked.feed(GpuRead(0, 1000, 0, 0, 1000, 1000, throttled=True, age_ns=0))
    checked.arrive(stream=False)
    ticks(checked, 3 * S)
    assert 0 in {checked.in_flight[checked.arrive()] for _ in range(6)}


def test_a_dead_replica_is_replaced_by_a_standby() -> None:
    checked = service(1)
    checked.feed(Standby(7, "spare", (), 30 * S))
    decisions = checked.feed(ReplicaDown(0, "killed"))
    assert Start(7) in decisions


def test_a_standby_that_is_withdrawn_is_started_by_nobody() -> None:
    checked = service(2, {"models": ("m",), "version": "v1"})
    checked.feed(Standby(7, "spare", ("m",), 30 * S, "v1"))
    assert kinds(checked.feed(ReplicaDown(7, "gpu_lost"))) == ["Alert"]
    assert kinds(checked.feed(RolloutRequested("m", "v2"))) == ["Alert"]
    assert not [d for d in checked.feed(GpuFault(0, "xid_fatal", 79)) if isinstance(d, Start)]
    checked.feed(Standby(7, "spare", ("m",), 30 * S, "v1"))
    assert Start(7) in checked.feed(ReplicaDown(1, "killed"))


@pytest.mark.parametrize(
    "failed_start", [ReplicaDown(7, "exited with code 1"), Warmed(7, "", ok=False)]
)
def test_a_start_that_fails_is_made_up_for_by_the_next_standby(failed_start: Any) -> None:
    checked = service(2)
    checked.feed(Standby(7, "spare", (), 10 * S))
    checked.feed(Standby(8, "spare too", (), 30 * S))
    assert Start(7) in checked.feed(ReplicaDown(0, "killed"))
    assert Start(8) in checked.feed(failed_start)


def test_what_replaces_a_broken_card_is_on_another_one() -> None:
    checked = service(1, {"domain": "host0/card0/mig0"})
    checked.feed(Standby(7, "same card", (), S, domain="host0/card0/mig1"))
    checked.feed(Standby(8, "other card", (), 30 * S, domain="host0/card1"))
    assert Start(8) in checked.feed(GpuFault(0, "xid_fatal", 79))


def test_a_fleet_that_can_grow_is_told_its_load_and_shrinks_when_idle() -> None:
    checked = service(1, capacity={"least_replicas": 1, "down_window_ms": 10_000})
    checked.feed(Standby(7, "spare", (), S))
    checked.bring_up(up(7))
    decided: list[Any] = []
    for _ in range(400):
        request = checked.arrive(stream=False)
        decided += answer(checked, request)
        decided += ticks(checked, checked.now_ns + 500 * MS)
    assert any(isinstance(d, Rotated) and d.state == "draining" for d in decided)
    assert Stop(7) in decided


# Switches and restarts


def switched(checked: Checked, **sections: Any) -> tuple[Any, ...]:
    assert isinstance(checked.policy, Service)
    new = parameters("tiered", **sections)
    old = canonical(checked.policy.parameters)
    checked.params = new
    return checked.feed(PolicySwitched(old, canonical(new)))


def test_a_switch_keeps_what_has_the_same_meaning_and_says_what_it_reset() -> None:
    checked = service(1, {"max_num_seqs": 1})
    running = checked.arrive()
    waiting = checked.arrive(sla="P2")
    parked = checked.arrive(session="s")
    decisions = switched(checked, limits={"user_per_s": 3}, shedding={"queue_max": 9})
    assert Reset(("limits",)) in decisions
    assert {waiting, parked} <= checked.waiting
    answer(checked, running)
    checked.drain()
    assert all(settled.outcome == "answered" for settled in checked.outcomes.values())


def test_a_switch_that_cannot_be_is_refused() -> None:
    checked = service(1)
    assert isinstance(checked.policy, Service)
    old = canonical(checked.policy.parameters)
    for event in (
        PolicySwitched("another", old), PolicySwitched(old, "{"),
        PolicySwitched(old, canonical(parameters("fifo"))),
    ):  # fmt: skip
        assert kinds(checked.feed(event)) == ["Refused"]


def test_an_isolated_card_stays_out_over_a_switch() -> None:
    checked = service(2)
    checked.feed(GpuFault(0, "ecc_uncorrectable"))
    switched(checked, health={"open_ms": 3000})
    assert {checked.in_flight[checked.arrive()] for _ in range(5)} == {1}


def test_after_a_crash_everything_open_is_settled_as_lost() -> None:
    checked = service(1, {"max_num_seqs": 1})
    requests = [checked.arrive(session="s"), checked.arrive(session="s"), checked.arrive()]
    checked.waiting |= set(checked.in_flight)  # no Abort: whoever lost them has lost the replicas
    checked.in_flight.clear()
    decisions = checked.feed(Restored())
    lost = [d for d in decisions if isinstance(d, Settled)]
    assert {settled.request for settled in lost} == set(requests)
    assert {settled.why for settled in lost} == {"controller_lost"}
    late = checked.arrive()
    assert checked.outcomes[late].why == "no_replica"


# Illegal events


@pytest.mark.parametrize(
    "event",
    [
        Verified(0, 0, "match"), CheckpointSaved(0, "k"), CheckpointFailed(0), LookedUp(0, True),
        Verified(99, 0, "match"), GpuRead(0, -1, 0, 0, 0, 0, False, 0), Progress(0, -1),
        GpuRead(9, 1, 0, 0, 0, 0, False, 0), Standby(0, "up already", (), S),
        Standby(-1, "x", (), S), Restored(-1), Forecasted((S,), (1, 2), (1,), (1,), (1,)),
        GpuFault(9, "ecc_correctable"), Failed(0, 1, "timeout"), FirstToken(0, 1),
        StepsRead(0, -1, 0, 0), StepsRead(0, 1, 1 << 41, 1), StepsRead(9, 1, 1, 1),
    ],
)  # fmt: skip
def test_what_cannot_be_changes_nothing(event: Any) -> None:
    checked = service(1)
    checked.arrive()
    (refused,) = checked.feed(event)
    assert isinstance(refused, Refused)


@pytest.mark.parametrize("stage", ["verify", "look up", "save"])
def test_a_cancelled_request_is_settled_whatever_it_waits_for(stage: str) -> None:
    checked = service(confidence={"budget_permille": 1000})
    fields = chain(step="plan") if stage == "save" else {"stream": False}
    request = checked.arrive(**fields)
    answer(checked, request, **{"verify": UNSURE, "look up": LOST, "save": SURE}[stage])
    decisions = checked.feed(Cancelled(request))
    assert checked.outcomes[request].outcome == "cancelled"
    assert (kinds(decisions)[0] == "Abort") is (stage == "verify")
    late: Any = {
        "verify": Verified(request, 1, "match"), "look up": LookedUp(request, True),
        "save": CheckpointSaved(request, "k"),
    }[stage]  # fmt: skip
    assert checked.feed(late) == ()


def test_the_score_table_shows_every_replica_and_changes_nothing() -> None:
    checked = service(2)
    checked.feed(GpuFault(1, "ecc_uncorrectable"))
    assert isinstance(checked.policy, Service)
    before = checked.policy.snapshot()
    rows = checked.policy.scores(arrived(0))
    assert [row.replica for row in rows] == [0, 1]
    assert [row.room for row in rows] == ["free", "out"]
    assert checked.policy.snapshot() == before


def test_a_dispatch_goes_where_the_score_is_least() -> None:
    checked = service(3)
    for _ in range(20):
        assert isinstance(checked.policy, Service)
        rows = checked.policy.scores(arrived(checked.next_request))
        best = min(rows, key=lambda row: (row.score_ns, row.replica))
        request = checked.arrive()
        dispatch = checked.dispatches[-1]
        assert isinstance(dispatch, Dispatch)
        assert (dispatch.request, dispatch.replica) == (request, best.replica)


# What must not get lost


def test_a_new_version_takes_over_when_it_is_warm_and_not_before() -> None:
    checked = service(1, {"models": ("m",), "version": "v1"})
    checked.feed(Standby(5, "r5", ("m",), S))
    decisions = checked.feed(RolloutRequested("m", "v2"))
    assert Start(5, "v2") in decisions
    old = checked.arrive()
    new = up(5, models=("m",), version="v2")
    checked.replicas[5] = new
    assert Warm(5) in checked.feed(new)
    assert checked.in_flight[checked.arrive()] == 0
    checked.feed(Warmed(5, "v2"))
    assert checked.in_flight[checked.arrive()] == 5
    for request in [request for request, replica in checked.in_flight.items() if replica == 0]:
        decisions = answer(checked, request)
    assert checked.outcomes[old].outcome == "answered"
    assert Stop(0) not in decisions  # it runs on while the new one is watched
    assert Stop(0) not in ticks(checked, 299 * S)
    assert Stop(0) in ticks(checked, 301 * S)


def rolled_out(**sections: Any) -> Checked:
    """Replicas 0 and 1 have v1 and are drained, 2 and 3 have v2 and all new requests."""
    checked = service(2, {"models": ("m",), "version": "v1"}, **sections)
    for replica in (2, 3):
        checked.feed(Standby(replica, f"r{replica}", ("m",), S, "v1"))
    checked.feed(RolloutRequested("m", "v2"))
    for replica in (2, 3):
        checked.bring_up(up(replica, models=("m",), version="v2"))
    for replica in (2, 3):
        checked.feed(Warmed(replica, "v2"))
    assert {checked.in_flight[checked.arrive()] for _ in range(4)} == {2, 3}
    return checked


def rolled_back(checked: Checked, decisions: Any, cause: str, leaving: Any = (2, 3)) -> None:
    """All new requests go to the old version, and ``leaving`` are stopped as they empty."""
    told = [d for d in decisions if isinstance(d, Alert) and d.key == "rollout m"]
    assert [alert.cause for alert in told] == [f"rolled back: {cause}"]
    checked.restore()
    assert {checked.in_flight[checked.arrive()] for _ in range(6)} <= {0, 1}
    stopped = {d.replica for d in decisions if isinstance(d, Stop)}
    for request, replica in list(checked.in_flight.items()):
        if replica in leaving:
            stopped |= {d.replica for d in answer(checked, request) if isinstance(d, Stop)}
    assert stopped == set(leaving)


RULE = {
    "name": "errors", "kinds": ["http_5xx"], "share_permille": 500, "volume_least": 4,
    "failures_least": 2, "window_ms": 60_000,
}  # fmt: skip
DOUBT = {
    "name": "doubt", "low_confidence_below_permille": 300, "share_permille": 500,
    "volume_least": 4, "failures_least": 2, "window_ms": 60_000,
}  # fmt: skip


@pytest.mark.parametrize("by", [["model"], ["model", "version"], ["model", "version", "line"]])
@pytest.mark.parametrize("doubtful", [False, True])
def test_a_version_that_answers_badly_is_rolled_back(by: list[str], doubtful: bool) -> None:
    rule = (DOUBT if doubtful else RULE) | {"by": by}
    sections = {"breakers": {"rules": [rule]}, "retries": {"tries_most": 1}}
    checked = rolled_out(health={"enabled": False}, **sections)
    decided: list[Any] = []
    for _ in range(4):
        request = checked.arrive(stream=False, after_ns=MS)
        if doubtful:
            decided += answer(checked, request, **LOST)
        else:
            decided += checked.fail(request, "http_5xx")
    rolled_back(checked, decided, "a breaker opened")


def test_a_version_whose_replica_fails_or_dies_is_rolled_back() -> None:
    checked = rolled_out(breakers={"enabled": False})
    decided: list[Any] = []
    while not any(isinstance(d, Rotated) and d.state == "ejected" for d in decided):
        request = next(number for number, where in checked.in_flight.items() if where == 2)
        decided += checked.fail(request, "http_5xx")
        checked.arrive()
        checked.arrive()
    rolled_back(checked, decided, "a new replica is out: failures")
    checked = rolled_out(breakers={"enabled": False})
    for request in [number for number, where in checked.in_flight.items() if where == 2]:
        checked.fail(request, "replica_lost")
    decided = list(checked.feed(ReplicaDown(2, "exited with code 1")))
    rolled_back(checked, decided, "a new replica went down", leaving=(3,))
    assert Stop(2) in checked.feed(up(2, models=("m",), version="v2"))


def test_what_breaks_on_the_only_new_replica_goes_to_the_old_one_that_is_kept() -> None:
    checked = service(1, {"models": ("m",), "version": "v1"})
    checked.feed(Standby(2, "r2", ("m",), S, "v1"))
    checked.feed(RolloutRequested("m", "v2"))
    checked.bring_up(up(2, models=("m",), version="v2"))
    checked.feed(Warmed(2, "v2"))
    requests = [checked.arrive() for _ in range(3)]
    decided: list[Any] = []
    for request in requests:
        assert checked.in_flight[request] == 2
        decided += checked.fail(request, "replica_lost")
        assert checked.in_flight[request] == 0
    decided += checked.feed(ReplicaDown(2, "killed by signal 9"))
    rolled_back(checked, decided, "a new replica is out: replica_lost", leaving=(2,))


def test_a_card_that_breaks_under_a_new_version_is_not_the_versions_fault() -> None:
    checked = rolled_out()
    checked.feed(Standby(7, "spare", ("m",), S, "v1"))
    decided = checked.feed(GpuFault(2, "xid_fatal", 79))
    assert Start(7, "v2") in decided
    decided += checked.feed(ReplicaDown(2, "gpu_error"))
    assert not [d for d in decided if isinstance(d, Alert) and d.key == "rollout m"]
    assert {checked.in_flight[checked.arrive()] for _ in range(4)} == {3}


def test_the_loss_of_an_old_replica_that_is_kept_needs_no_standby() -> None:
    checked = rolled_out()
    checked.feed(Standby(7, "spare", ("m",), S, "v1"))
    decided = checked.feed(GpuFault(0, "xid_fatal", 79)) + checked.feed(ReplicaDown(1, "killed"))
    assert not [d for d in decided if isinstance(d, Start)]


@pytest.mark.parametrize("kind", ["ecc_uncorrectable", "xid_fatal"])
@pytest.mark.parametrize("before", [True, False])
def test_an_old_replica_whose_card_broke_does_not_come_back_in_a_rollback(
    kind: Any, before: bool
) -> None:
    """Also after a switch, when all else that health knew is forgotten."""
    checked = service(2, {"models": ("m",), "version": "v1"}) if before else rolled_out()
    checked.feed(GpuFault(0, kind))
    if before:
        for replica in (2, 3):
            checked.feed(Standby(replica, f"r{replica}", ("m",), S, "v1"))
        checked.feed(RolloutRequested("m", "v2"))
        for replica in (2, 3):
            checked.bring_up(up(replica, models=("m",), version="v2"))
        for replica in (2, 3):
            checked.feed(Warmed(replica, "v2"))
    switched(checked, health={"open_ms": 3000})
    checked.restore()
    decided = checked.feed(RolloutRequested("m", "v1"))
    moved = [(d.replica, d.state) for d in decided if isinstance(d, Rotated)]
    assert moved == [(1, "in"), (2, "draining")]
    assert Stop(0) in decided
    assert {checked.in_flight[checked.arrive()] for _ in range(6)} == {1, 3}


def drained_while(state: str) -> tuple[Checked, int]:
    """Replica 0 is ``state``, ejected or probing, and is drained for a new version then. Returns
    its probe, too."""
    spec = {"models": ("m",), "version": "v1", "max_num_seqs": 1}
    off = {"enabled": False}
    sections = {"breakers": off, "health": {"failures_most": 1}, "retries": {"tries_most": 1}}
    checked = service(2, spec, confidence=off, **sections)
    for replica in (2, 3):
        checked.feed(Standby(replica, f"r{replica}", ("m",), S, "v1"))
    checked.feed(RolloutRequested("m", "v2"))
    for replica in (2, 3):
        checked.bring_up(up(replica, models=("m",), version="v2", max_num_seqs=1))
    checked.feed(Warmed(2, "v2"))
    requests = [checked.arrive(stream=False) for _ in range(2)]
    [request] = [each for each in requests if checked.in_flight[each] == 0]
    assert Rotated(0, "ejected", "failures", 2 * S) in checked.fail(request, "http_5xx")
    probe = -1
    if state == "probing":
        assert Rotated(0, "probing", "retry") in ticks(checked, checked.now_ns + 2 * S)
        probe = checked.arrive(stream=False)
        assert checked.in_flight[probe] == 0
    checked.feed(Warmed(3, "v2"))
    return checked, probe


def test_what_comes_back_and_is_ejected_is_told_to_be() -> None:
    checked, _ = drained_while("ejected")
    checked.now_ns += S
    decided = checked.feed(RolloutRequested("m", "v1"))
    assert Rotated(0, "ejected", "rollback of v2", S) in decided
    assert Rotated(1, "in", "rollback of v2") in decided
    assert not [d for d in decided if isinstance(d, Alert) and d.key == "replica r0"]
    assert 0 not in {checked.in_flight.get(checked.arrive()) for _ in range(4)}
    assert Rotated(0, "probing", "retry") in ticks(checked, checked.now_ns + S)


def test_what_answers_its_probe_while_it_drains_still_drains() -> None:
    checked, probe = drained_while("probing")
    decided = answer(checked, probe)
    assert Rotated(0, "draining", "probe_answered") in decided
    decided = checked.feed(RolloutRequested("m", "v1"))
    assert Rotated(0, "in", "rollback of v2") in decided


def test_a_rollback_is_told_though_the_rollout_was_in_trouble_just_before() -> None:
    checked = rolled_out(health={"enabled": False}, rollout={"watch_ms": 60_000})
    policy = checked.policy
    for each in (policy, checked.double):
        assert isinstance(each, Service)
        alerts = each.mechanisms["alerts"]
        alerts.raised(checked.now_ns, "rollout m", "the rollout is not over yet")  # type: ignore[attr-defined]
    decided = checked.feed(ReplicaDown(2, "exited with code 1"))
    rolled_back(checked, decided, "a new replica went down", leaving=(3,))


def test_a_rollout_that_cannot_be_is_told_once() -> None:
    checked = service(1, {"models": ("m",)})
    first = checked.feed(RolloutRequested("m", "v2"))
    again = checked.feed(RolloutRequested("m", "v2"))
    assert kinds(first) == ["Alert"]
    assert again == ()


def lighter_service(**spec: Any) -> tuple[Checked, int]:
    """A doubted answer that the lighter model is to better; the request."""
    checked = service(
        1, {"models": ("m",)}, tiers={"fallback_model": "light"},
        confidence={"actions": ["lighter"]},
    )  # fmt: skip
    checked.bring_up(up(1, models=("light",), **spec))
    return checked, checked.arrive(stream=False, tokens=3000)


def test_the_answer_at_hand_is_kept_when_the_lighter_model_fails() -> None:
    checked, request = lighter_service()
    answer(checked, request, **LOST)
    assert checked.in_flight[request] == 1
    decisions = checked.fail(request, "http_5xx")
    assert (checked.outcomes[request].outcome, checked.outcomes[request].why) == (
        "degraded", "low_confidence",
    )  # fmt: skip
    assert not any(isinstance(decision, BreakerMoved) for decision in decisions)


def test_the_answer_at_hand_is_kept_when_the_lighter_model_cannot_take_it() -> None:
    checked, request = lighter_service(max_model_len=100)
    answer(checked, request, **LOST)
    assert (checked.outcomes[request].outcome, checked.outcomes[request].why) == (
        "degraded", "low_confidence",
    )  # fmt: skip


def test_an_answer_being_verified_is_returned_when_its_chains_budget_ends() -> None:
    checked = service(
        chains={"default": {"budget_ms": 1000}}, confidence={"budget_permille": 1000},
        health={"enabled": False},
    )  # fmt: skip
    request = checked.arrive(**chain(step="plan"))
    (verify,) = answer(checked, request, **UNSURE)
    decided = ticks(checked, 2 * S)
    assert Abort(request, verify.replica) in decided
    settled = checked.outcomes[request]
    assert (settled.outcome, settled.why) == ("degraded", "chain_budget")
    assert settled.confidence_permille > 0


def test_a_forecast_counts_load_though_no_standby_is_known() -> None:
    checked = service(1)
    before = checked.policy.snapshot()
    (refused,) = checked.feed(Forecasted((S, S), (1, 1), (1, 1), (1, 1), (1, 1)))
    assert isinstance(refused, Refused)
    assert checked.policy.snapshot() == before
    checked.feed(Forecasted((600 * S,), (9000,), (9000,), (90_000,), (90_000,)))
    decided: list[Any] = []
    for _ in range(20):
        request = checked.arrive(stream=False)
        decided += answer(checked, request)
        decided += ticks(checked, checked.now_ns + S)
    assert any(type(decision).__name__ == "Scaled" for decision in decided)


@pytest.mark.parametrize(
    "changes",
    [{"kv_blocks": 1}, {"closeness_permille": 1001}, {"request_in_ns": -1}],
)
def test_a_replica_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    checked = service(1)
    (refused,) = checked.feed(up(7, **changes))
    assert isinstance(refused, Refused)
