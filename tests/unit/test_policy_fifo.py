"""The baseline: at once to the least loaded replica."""

from __future__ import annotations

import pytest

from policy.decisions import Abort, Dispatch, Refused, Settled
from policy.events import (
    Cancelled,
    Failed,
    Finished,
    FirstToken,
    PolicySwitched,
    ReplicaDown,
    Restored,
    Ticked,
)
from tests.policy_support import Checked, arrived, parameters, up


def fifo(replicas: int = 2, **spec: object) -> Checked:
    checked = Checked(parameters("fifo"))
    for replica in range(replicas):
        checked.bring_up(up(replica, **spec))
    return checked


def test_a_request_goes_its_way_in_three_events() -> None:
    checked = fifo()
    assert checked.feed(arrived(0)) == (Dispatch(0, 0, ""),)
    assert checked.feed(FirstToken(0, 0)) == ()
    assert checked.feed(Finished(0, 0, 250, 0, 9)) == (Settled(0, "answered"),)
    assert checked.policy.deadline_ns() is None


def test_the_fewest_in_flight_goes_first_and_ties_go_by_id() -> None:
    checked = fifo(3)
    for _ in range(5):
        checked.arrive()
    assert [checked.in_flight[request] for request in range(5)] == [0, 1, 2, 0, 1]
    checked.finish(1)
    checked.finish(4)
    assert checked.feed(arrived(5)) == (Dispatch(5, 1, ""),)


def test_nothing_that_can_serve_is_503() -> None:
    checked = fifo(1, models=("a",))
    (decision,) = checked.feed(arrived(0, model="b"))
    assert decision == Settled(0, "shed", "", "no_replica", 503, 10**9)
    checked.replicas.clear()
    checked.feed(ReplicaDown(0, "gone"))
    (decision,) = checked.feed(arrived(1, model="a"))
    assert isinstance(decision, Settled)
    assert decision.http_code == 503


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "fits"),
    [(2000, 0, True), (60_000, 0, True), (70_000, 0, False), (0, 32_768, True),
     (0, 32_769, False), (2000, 31_768, True), (2000, 31_769, False)],
)  # fmt: skip
def test_what_can_never_fit_is_400(tokens: int, max_tokens: int, fits: bool) -> None:
    """Judged by 8 bytes a token, kindly: the engine counts, and refuses what is left."""
    (decision,) = fifo().feed(arrived(0, tokens=tokens, max_tokens=max_tokens))
    if fits:
        assert isinstance(decision, Dispatch)
    else:
        assert decision == Settled(0, "failed", "", "too_large", 400)


def test_a_pool_smaller_than_the_context_counts_too() -> None:
    (decision,) = fifo(1, kv_blocks=11).feed(arrived(0, max_tokens=161 - 125))
    assert isinstance(decision, Dispatch)
    (decision,) = fifo(1, kv_blocks=11).feed(arrived(0, max_tokens=162 - 125))
    assert isinstance(decision, Settled)
    assert decision.why == "too_large"


@pytest.mark.parametrize(
    ("kind", "http_code"),
    [("timeout", 504), ("oom", 503), ("http_5xx", 502), ("stream_cut", 502), ("rejected", 400),
     ("backpressure", 429), ("replica_lost", 503)],
)  # fmt: skip
def test_failures_are_told_as_what_they_are(kind: str, http_code: int) -> None:
    checked = fifo()
    checked.arrive()
    decisions = checked.fail(0, kind)
    assert decisions[-1] == Settled(0, "failed", "", kind, http_code, 10**9)
    assert (decisions[0] == Abort(0, 0)) == (kind == "timeout")  # it may still be at work on it


def test_a_client_that_leaves_is_aborted_upstream_once() -> None:
    checked = fifo()
    checked.arrive()
    settled = Settled(0, "cancelled", "", "client", 499)
    assert checked.feed(Cancelled(0)) == (Abort(0, 0), settled)
    assert checked.feed(Cancelled(0)) == ()
    assert checked.feed(Finished(0, 0, 1, 0, 1)) == ()
    assert checked.feed(Failed(0, 0, "timeout")) == ()
    assert checked.feed(Ticked()) == ()


def test_an_illegal_event_is_refused_by_name() -> None:
    (decision,) = fifo().feed(FirstToken(3, 0))
    assert decision == Refused("FirstToken", "request 3 never arrived")


def test_after_a_crash_what_was_open_is_lost_and_replicas_must_come_up_anew() -> None:
    checked = fifo()
    checked.arrive()
    checked.arrive()
    checked.finish(0)
    (lost,) = checked.feed(Restored(1))
    assert lost == Settled(1, "failed", "", "controller_lost", 503, 10**9)
    (decision,) = checked.feed(arrived(2))
    assert isinstance(decision, Settled)
    assert decision.why == "no_replica"
    (refused,) = checked.feed(Restored(-1))
    assert isinstance(refused, Refused)


def test_a_switch_is_refused() -> None:
    (refused,) = fifo().feed(PolicySwitched("{}", "{}"))
    assert isinstance(refused, Refused)
    assert "restart" in refused.why
