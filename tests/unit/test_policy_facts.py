"""The fold of facts: what is illegal, what is only late, what is counted."""

from __future__ import annotations

import pytest

from policy.events import (
    Cancelled,
    Failed,
    Finished,
    FirstToken,
    GpuFault,
    ReplicaDown,
    Scraped,
    Standby,
    Warmed,
)
from policy.facts import Facts, Illegal, Open, Recent
from tests.policy_support import S, arrived, up


def facts(replicas: int = 2, keys_max: int = 100) -> Facts:
    made = Facts(keys_max)
    for replica in range(replicas):
        made.fleet(0, up(replica))
    return made


def sent(known: Facts, request: int = 0, replica: int = 0, **fields: object) -> Open:
    opened = known.arrive(10, arrived(request, **fields))  # type: ignore[arg-type]
    opened.kv_tokens, opened.prefill_tokens, opened.long = 500, 300, True
    known.dispatch(20, opened, known.replicas[replica])
    return opened


def test_what_is_in_flight_is_counted_per_replica() -> None:
    known = facts()
    opened = sent(known)
    replica = known.replicas[0]
    figures = (replica.in_flight, replica.kv_tokens, replica.prefill_tokens, replica.long_tokens)
    assert figures == (1, 500, 300, 300)
    known.first_token(30, FirstToken(0, 0))
    assert (replica.prefill_tokens, replica.long_tokens, replica.kv_tokens) == (0, 0, 500)
    known.settle(40, opened)
    assert (replica.in_flight, replica.kv_tokens) == (0, 0)
    assert known.open == {}


def test_a_request_taken_back_leaves_nothing_on_its_replica() -> None:
    known = facts()
    opened = sent(known)
    known.take_back(opened)
    replica = known.replicas[0]
    assert (replica.in_flight, replica.kv_tokens, replica.prefill_tokens) == (0, 0, 0)
    assert (opened.replica, opened.tried, opened.tries) == (-1, (0,), 1)


@pytest.mark.parametrize("event", [FirstToken(0, 0), Finished(0, 0, 1, 0, 1), Failed(0, 0, "oom")])
def test_events_of_an_earlier_try_come_late(event: FirstToken | Finished | Failed) -> None:
    known = facts()
    opened = sent(known)
    known.take_back(opened)
    known.dispatch(30, opened, known.replicas[1])
    if isinstance(event, FirstToken):
        assert known.first_token(40, event) is None
    elif isinstance(event, Finished):
        assert known.finished(40, event) is None
    else:
        assert known.failed(40, event) is None
    assert opened.replica == 1


def test_events_about_settled_requests_come_late() -> None:
    known = facts()
    known.settle(30, sent(known))
    assert known.finished(40, Finished(0, 0, 1, 0, 1)) is None
    assert known.cancelled(40, Cancelled(0)) is None


def test_impossible_events_say_why() -> None:
    known = facts()
    known.arrive(10, arrived(5))
    with pytest.raises(Illegal, match="5 is not above the highest seen, 5"):
        known.arrive(10, arrived(5))
    with pytest.raises(Illegal, match="prompt_bytes -4"):
        known.arrive(10, arrived(6, tokens=-1))
    with pytest.raises(Illegal, match="request 7 never arrived"):
        known.first_token(10, FirstToken(7, 0))
    with pytest.raises(Illegal, match="request 5 is in no replica's hands"):
        known.first_token(10, FirstToken(5, 0))
    with pytest.raises(Illegal, match="replica 9 never came up"):
        known.fleet(10, ReplicaDown(9, ""))
    with pytest.raises(Illegal, match="replica 1 is up already"):
        known.fleet(10, up(1))
    with pytest.raises(Illegal, match="negative figure, -3"):
        known.fleet(10, Scraped(0, -3, 0, 0, 0, 0))
    opened = sent(known, 8)
    with pytest.raises(Illegal, match="on replica 0, and was never on replica 1"):
        known.finished(10, Finished(8, 1, 1, 0, 1))
    known.first_token(10, FirstToken(8, 0))
    with pytest.raises(Illegal, match="had its first token already"):
        known.first_token(10, FirstToken(8, 0))
    with pytest.raises(Illegal, match="cached_tokens 4"):
        known.finished(10, Finished(8, 0, 3, 4, 1))
    assert opened.event.request in known.open


def test_a_replica_that_is_down_is_kept_until_its_work_is_done() -> None:
    known = facts()
    opened = sent(known)
    known.fleet(20, ReplicaDown(0, "gone"))
    assert 0 in known.replicas
    assert [replica.spec.replica for replica in known.eligible("m", False)] == [1]
    known.fleet(21, ReplicaDown(0, "gone"))  # late
    known.settle(30, opened, "replica_lost")
    assert 0 not in known.replicas
    known.fleet(31, ReplicaDown(0, "gone"))  # late
    known.fleet(32, Scraped(0, 1, 1, 1, 1, 0))  # late


def test_a_replica_that_comes_back_still_has_its_work() -> None:
    known = facts()
    sent(known)
    known.fleet(20, ReplicaDown(0, "gone"))
    known.fleet(30, up(0, kv_blocks=11, block_tokens=10))
    assert known.replicas[0].in_flight == 1
    assert known.replicas[0].tokens_most == 101
    assert [replica.spec.replica for replica in known.eligible("m", False)] == [0, 1]


def test_what_never_came_up_may_say_that_it_does_not_start() -> None:
    known = facts()
    with pytest.raises(Illegal, match="replica 7 never came up"):
        known.fleet(0, Warmed(7, "v2", ok=False))
    known.fleet(0, Standby(7, "r7", ("m",), S))
    known.fleet(1, Warmed(7, "v2", ok=False))
    known.fleet(2, ReplicaDown(7, "exited with code 1"))
    assert (known.now_ns, known.fleet_version) == (2, 2)


def test_who_can_serve_what() -> None:
    known = facts(0)
    known.fleet(0, up(2, models=("b", "c")))
    known.fleet(0, up(1, models=("a", "b")))

    def able(model: str, embeddings: bool = False) -> list[int]:
        return [replica.spec.replica for replica in known.eligible(model, embeddings)]

    assert (able("a"), able("b"), able("x")) == ([1], [1, 2], [])
    assert able("b", embeddings=True) == [1, 2]  # nobody else does it
    known.fleet(1, up(0, pooling=True))
    assert able("b", embeddings=True) == [0]
    assert able("b") == [1, 2]


def test_the_youngest_metrics_win() -> None:
    known = facts()
    known.fleet(5 * S, Scraped(0, 1, 7, 500, 0, 1 * S))
    known.fleet(6 * S, Scraped(0, 1, 9, 500, 0, 3 * S))  # older than what is known
    assert known.replicas[0].waiting == 7
    known.fleet(7 * S, Scraped(0, 1, 8, 500, 0, 1 * S))
    assert known.replicas[0].waiting == 8


def test_a_history_holds_ten_requests() -> None:
    recent = Recent()
    assert (recent.ttft_ns_p90(), recent.failed_or_retried_permille()) == (0, 0)
    for ttft_ns in range(1, 21):
        recent.add(ttft_ns, "timeout" if ttft_ns > 17 else "", 0)
    assert recent.ttft_ns_p90() == 19
    assert recent.failed_or_retried_permille() == 300
    assert recent.strikes == 3
    recent.add(5, "http_5xx", 1)
    assert recent.strikes == 0


def test_histories_are_bounded() -> None:
    known = facts(keys_max=4)
    for request in range(50):
        known.settle(30, sent(known, request, user=f"user{request}", line="one"))
    young, old = known.users.state()
    assert [key for key, _ in old + young] == ["user46", "user47", "user48", "user49"]
    assert len(known.lines.state()[0][0][1].results) == 10


def test_times_move_with_the_clock_on_restoring() -> None:
    known = facts()
    sent(known)
    known.first_token(30, FirstToken(0, 0))
    known.fleet(50, Scraped(0, 0, 0, 0, 0, 10))
    again = Facts.restored(known.state(), 100, 1000)
    opened = again.open[0]
    assert (opened.arrived_ns, opened.dispatched_ns, opened.first_ns) == (960, 970, 980)
    assert again.replicas[0].scraped_ns == 990
    assert again.state().open == known.state().open


def test_a_fault_with_a_code_that_is_none_is_illegal() -> None:
    known = facts()
    for code in (-1, 1 << 64):
        with pytest.raises(Illegal, match=f"the code of a fault is {code}"):
            known.fleet(0, GpuFault(0, "xid_fatal", code))
