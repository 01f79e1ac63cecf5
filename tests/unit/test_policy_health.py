"""Health: failures, slowness and silence take a replica out, and probes bring it back."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest

from policy.decisions import ReadProgress, Rotated
from policy.events import GpuFault, Progress, Standby
from policy.health import Health, HealthState
from policy.parameters.health import Health as Section
from tests.policy_support import MS, S, assert_integers, up

PREFILL = 100 * MS


class Ward:
    """Replicas under ``Health``, with a clock. A replica that is not ``hung`` makes a token a ms
    while anything is under way there."""

    def __init__(self, replicas: int = 2, **section: Any) -> None:
        self.health = Health(msgspec.convert(section, Section))
        self.now_ns = 0
        self.requests = 0
        self.hung_since_ns: dict[int, int] = {}
        self.said: list[tuple[int, Rotated]] = []
        self.readings = 0
        for replica in range(replicas):
            self.health.up(0, up(replica))

    def take(self, decisions: Any) -> list[Rotated]:
        rotated: list[Rotated] = []
        for decision in decisions:
            if isinstance(decision, ReadProgress):
                self.readings += 1
                at_ns = self.hung_since_ns.get(decision.replica, self.now_ns)
                tokens = min(at_ns, self.now_ns) // MS
                self.health.progress(self.now_ns, Progress(decision.replica, tokens))
            else:
                assert isinstance(decision, Rotated)
                rotated.append(decision)
                self.said.append((self.now_ns, decision))
        return rotated

    def wait(self, for_ns: int) -> list[Rotated]:
        """Let time pass, and serve what is due."""
        end_ns = self.now_ns + for_ns
        rotated: list[Rotated] = []
        while (due_ns := self.health.deadline_ns()) is not None and due_ns <= end_ns:
            self.now_ns = max(self.now_ns, due_ns)
            rotated += self.take(self.health.ticked(self.now_ns))
            again_ns = self.health.deadline_ns()
            assert again_ns is None or again_ns > self.now_ns
        self.now_ns = end_ns
        return rotated

    def send(self, replica: int, expected_ns: int = PREFILL) -> int:
        self.requests += 1
        self.health.dispatched(self.now_ns, self.requests, replica, expected_ns)
        return self.requests

    def first(self, request: int, replica: int) -> list[Rotated]:
        return self.take(self.health.first_token(self.now_ns, request, replica))

    def answer(self, replica: int, ttft_ns: int = PREFILL) -> list[Rotated]:
        """A request and its answer, at once."""
        request = self.send(replica)
        said = self.first(request, replica)
        return said + self.take(
            self.health.answered(self.now_ns, request, replica, ttft_ns, PREFILL)
        )

    def fail(self, replica: int, kind: Any = "http_5xx", times: int = 1) -> list[Rotated]:
        rotated: list[Rotated] = []
        for _ in range(times):
            request = self.send(replica)
            rotated += self.take(self.health.failed(self.now_ns, request, replica, kind))
        return rotated


# Failures


def test_a_replica_that_answers_500_wastes_few_tries_then_a_probe_in_two_seconds() -> None:
    ward = Ward()
    tries: list[int] = []
    while ward.now_ns < 40 * S:
        if ward.health.takes(0):
            ward.fail(0)
            tries.append(ward.now_ns)
        else:
            ward.answer(1)
        ward.wait(50 * MS)
    assert sum(at_ns < 2 * S for at_ns in tries) == 3
    gaps = [later - earlier for earlier, later in pairwise(tries[2:])]
    assert gaps[0] >= 2 * S
    assert gaps == sorted(gaps)
    assert gaps[3] >= 16 * S


@pytest.mark.parametrize("kind", ["http_5xx", "timeout", "oom", "stream_cut", "empty", "malformed"])
def test_failures_in_a_row_eject_and_a_success_between_them_does_not(kind: str) -> None:
    ward = Ward()
    assert ward.fail(0, kind, 2) == []
    ward.answer(0)
    assert ward.fail(0, kind, 2) == []
    assert ward.fail(0, kind) == [Rotated(0, "ejected", "failures", 2 * S)]
    assert ward.health.state_of(0) == "ejected"
    assert not ward.health.takes(0)
    assert ward.health.takes(1)


def test_client_errors_change_nothing() -> None:
    ward = Ward()
    for kind in ("rejected", "too_large"):
        assert ward.fail(0, kind, 60) == []
    for _ in range(40):
        assert ward.health.takes(0)
        assert ward.answer(0) == []
    assert (ward.health.detected, ward.health.version) == (0, 2)


def test_a_share_of_failures_ejects_if_the_peers_do_better() -> None:
    ward = Ward(2)
    said: list[Rotated] = []
    for number in range(60):
        ward.answer(1)
        said += ward.fail(0) if number % 4 == 3 else ward.answer(0)
    assert said[0] == Rotated(0, "ejected", "error_share", 2 * S)


def test_a_share_of_failures_that_all_have_is_nobodys_fault() -> None:
    ward = Ward(2)
    for number in range(60):
        for replica in (0, 1):
            ward.fail(replica) if number % 4 == 3 else ward.answer(replica)
    assert ward.said == []


def test_old_failures_are_forgotten() -> None:
    ward = Ward(2)
    for number in range(40):
        ward.answer(1)
        ward.fail(0) if number % 10 < 2 and number < 18 else ward.answer(0)
        ward.wait(4 * S)
    assert ward.said == []


# Back again


def test_a_probe_goes_alone_and_its_success_brings_the_replica_back() -> None:
    ward = Ward()
    ward.fail(0, times=3)
    assert ward.wait(2 * S) == [Rotated(0, "probing", "retry")]
    assert ward.health.takes(0)
    probe = ward.send(0)
    assert not ward.health.takes(0)
    assert ward.first(probe, 0) == []
    said = ward.take(ward.health.answered(ward.now_ns, probe, 0, PREFILL, PREFILL))
    assert said == [Rotated(0, "in", "probe_answered")]
    assert ward.health.takes(0)


def test_a_probe_without_a_verdict_frees_its_slot() -> None:
    ward = Ward()
    ward.fail(0, times=3)
    ward.wait(2 * S)
    ward.health.gone(ward.now_ns, ward.send(0), 0)
    assert ward.health.takes(0)
    assert ward.fail(0, "rejected") == []
    assert ward.health.takes(0)
    assert ward.health.state_of(0) == "probing"
    assert ward.fail(0, "backpressure") == []
    assert not ward.health.takes(0)
    ward.wait(500 * MS)
    assert ward.health.takes(0)
    assert ward.fail(0) == [Rotated(0, "ejected", "probe_failed", 4 * S)]


def test_what_was_sent_before_the_ejection_neither_brings_it_back_nor_counts_again() -> None:
    ward = Ward()
    early = [ward.send(0) for _ in range(4)]
    ward.fail(0, times=3)
    ward.first(early[0], 0)
    assert ward.take(ward.health.answered(ward.now_ns, early[0], 0, PREFILL, PREFILL)) == []
    assert ward.take(ward.health.failed(ward.now_ns, early[1], 0, "http_5xx")) == []
    ward.wait(2 * S)
    assert ward.health.state_of(0) == "probing"
    assert ward.take(ward.health.failed(ward.now_ns, early[2], 0, "http_5xx")) == []
    assert ward.health.state_of(0) == "probing"


def test_the_time_out_doubles_up_to_a_most_and_begins_anew_after_a_good_while() -> None:
    ward = Ward()
    for seconds in (2, 4, 8, 16, 30, 30):
        [said] = ward.fail(0, times=3 if ward.health.state_of(0) == "in" else 1)
        assert said.for_ns == seconds * S
        ward.wait(seconds * S)
    ward.answer(0)
    ward.wait(59 * S)
    assert ward.fail(0, times=3)[0].for_ns == 30 * S
    ward.wait(30 * S)
    ward.answer(0)
    ward.wait(60 * S)
    assert ward.fail(0, times=3)[0].for_ns == 2 * S


# The pool


@pytest.mark.parametrize(("replicas", "out"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_at_most_half_a_pool_is_out(replicas: int, out: int) -> None:
    ward = Ward(replicas)
    for replica in range(replicas):
        ward.fail(replica, times=3)
    assert sum(not ward.health.takes(replica) for replica in range(replicas)) == out
    assert (ward.health.detected, ward.health.enforced) == (replicas, out)


def test_a_pool_is_who_serves_the_same() -> None:
    ward = Ward(0)
    for replica, models in enumerate((("a",), ("b",), ("b",))):
        ward.health.up(0, up(replica, models=models))
    ward.health.up(0, up(3, models=("a",), pooling=True))
    assert ward.fail(0, times=3) == []
    assert len(ward.fail(1, times=3)) == 1


def test_in_shadow_everything_is_detected_and_nothing_done() -> None:
    ward = Ward(enforce=False)
    ward.fail(0, times=3)
    ward.fail(0, "backpressure")
    ward.take(ward.health.gpu_fault(0, GpuFault(1, "xid_fatal", 79)))
    assert ward.said == []
    assert ward.health.takes(0)
    assert (ward.health.detected, ward.health.enforced) == (2, 0)


# Silence


def test_a_hang_before_the_first_byte_is_noticed_at_prediction_and_grace() -> None:
    ward = Ward()
    ward.hung_since_ns[0] = 0
    ward.send(0)
    assert ward.wait(1600 * MS - 1) == []
    assert ward.wait(1) == [Rotated(0, "ejected", "silent", 2 * S)]


@pytest.mark.parametrize("served", [0, 1, 100])
def test_a_hang_after_good_service_is_noticed_as_soon(served: int) -> None:
    ward = Ward()
    for _ in range(served):
        ward.answer(0)
        ward.wait(10 * MS)
    ward.hung_since_ns[0] = hung_ns = ward.now_ns
    for _ in range(8):
        ward.send(0)
    while not ward.wait(MS):
        pass
    assert ward.now_ns == hung_ns + 1600 * MS


def test_a_stall_in_mid_stream_is_noticed_after_two_seconds() -> None:
    ward = Ward()
    ward.first(ward.send(0), 0)
    assert ward.wait(60 * S) == []
    ward.hung_since_ns[0] = hung_ns = ward.now_ns
    [said] = ward.wait(3 * S)
    assert said == Rotated(0, "ejected", "silent", 2 * S)
    assert 2 * S <= ward.said[0][0] - hung_ns <= 2250 * MS


def test_a_slow_first_token_is_no_silence_while_others_get_tokens() -> None:
    ward = Ward()
    ward.first(ward.send(0), 0)
    ward.send(0)
    assert ward.wait(30 * S) == []


def test_a_long_prefill_is_no_silence() -> None:
    ward = Ward()
    ward.hung_since_ns[0] = 0
    ward.send(0, 20 * S)
    assert ward.wait(21 * S) == []
    assert len(ward.wait(S)) == 1


def test_no_work_is_no_silence_and_needs_no_ticks() -> None:
    ward = Ward()
    ward.hung_since_ns[0] = 0
    ward.answer(0)
    ward.wait(10 * S)
    assert ward.health.deadline_ns() is None
    ward.send(0)
    assert ward.wait(S) == []


def test_without_an_answer_to_its_question_health_does_not_guess() -> None:
    ward = Ward()
    ward.first(ward.send(0), 0)
    asked = 0
    for _ in range(40):
        ward.now_ns = ward.health.deadline_ns() or 0
        decisions = ward.health.ticked(ward.now_ns)
        assert all(isinstance(decision, ReadProgress) for decision in decisions)
        asked += len(decisions)
    assert asked >= 39


def test_busy_replicas_are_not_asked() -> None:
    ward = Ward()
    ward.first(ward.send(0), 0)
    for _ in range(100):
        ward.answer(0)
        ward.wait(100 * MS)
    assert ward.readings == 0


def test_a_probe_that_hangs_has_failed() -> None:
    ward = Ward(hung_ejections=0)
    assert be_silent(ward, 0) == Rotated(0, "ejected", "silent", 2 * S)
    ward.wait(2 * S)
    assert ward.health.state_of(0) == "probing"
    assert be_silent(ward, 0) == Rotated(0, "ejected", "silent", 4 * S)


def test_stuck_work_on_a_replica_that_is_out_is_told_of_too() -> None:
    ward = Ward()
    ward.hung_since_ns[0] = 0
    ward.send(0)
    ward.fail(0, times=3)
    assert Rotated(0, "ejected", "silent") in ward.wait(1700 * MS)


def test_if_all_are_silent_half_stay() -> None:
    ward = Ward(2)
    ward.hung_since_ns = {0: 0, 1: 0}
    ward.send(0)
    ward.send(1)
    told = ward.wait(2 * S)
    assert [(said.replica, said.state) for said in told] == [(0, "ejected"), (1, "in")]
    assert ward.health.takes(1)


def test_what_hangs_on_the_only_replica_is_told_of_though_it_stays() -> None:
    ward = Ward(1)
    ward.hung_since_ns[0] = 0
    ward.send(0)
    assert ward.wait(1700 * MS) == [Rotated(0, "in", "silent")]
    assert ward.health.takes(0)


def test_a_first_token_that_is_late_is_no_silence_while_others_are_answered() -> None:
    ward = Ward()
    ward.hung_since_ns[0] = 0  # as between two answers that are not streamed
    ward.send(0)
    for _ in range(20):
        assert ward.wait(700 * MS) == []
        ward.answer(0)


def test_a_request_that_hangs_on_a_paused_replica_does_not_shut_it_for_good() -> None:
    ward = Ward(1)
    ward.hung_since_ns[0] = 0
    ward.fail(0, "backpressure")
    ward.wait(500 * MS)
    ward.send(0)
    assert not ward.health.takes(0)
    ward.wait(2 * S)
    assert ward.health.takes(0)


# Hanging


def be_silent(ward: Ward, replica: int) -> Rotated:
    """A request hangs there, until health says something of it; then it is taken off."""
    ward.hung_since_ns[replica] = 0
    request = ward.send(replica)
    said = ward.wait(1600 * MS)
    ward.health.gone(ward.now_ns, request, replica)
    return said[-1]


def test_what_is_silent_when_it_is_tried_again_hangs() -> None:
    ward = Ward()
    assert be_silent(ward, 0) == Rotated(0, "ejected", "silent", 2 * S)
    assert ward.wait(2 * S) == [Rotated(0, "probing", "retry")]
    assert be_silent(ward, 0) == Rotated(0, "isolated", "hung", 4 * S)
    assert not ward.health.takes(0)
    assert ward.health.state_of(0) == "isolated"
    ward.health.down(ward.now_ns, 0)
    ward.health.up(ward.now_ns, up(0))
    assert ward.health.takes(0)
    assert be_silent(ward, 0).state == "ejected"  # it counts anew


@pytest.mark.parametrize(("ejections", "hangs_at"), [(0, None), (1, 1), (2, 2), (4, 4)])
def test_how_often_is_a_parameter(ejections: int, hangs_at: int | None) -> None:
    ward = Ward(hung_ejections=ejections)
    for number in range(1, 6):
        said = be_silent(ward, 0)
        assert (said.why == "hung") is (hangs_at is not None and number >= hangs_at)
        ward.wait(said.for_ns)


def test_an_answer_or_another_failure_between_them_breaks_the_row() -> None:
    ward = Ward()
    be_silent(ward, 0)
    ward.wait(2 * S)
    assert ward.fail(0) == [Rotated(0, "ejected", "probe_failed", 4 * S)]
    ward.wait(4 * S)
    assert be_silent(ward, 0) == Rotated(0, "ejected", "silent", 8 * S)
    ward.wait(8 * S)
    assert ward.answer(0) == [Rotated(0, "in", "probe_answered")]
    assert be_silent(ward, 0).state == "ejected"


def test_what_nobody_restarts_is_tried_again_and_comes_back() -> None:
    ward = Ward()
    be_silent(ward, 0)
    ward.wait(2 * S)
    be_silent(ward, 0)
    assert ward.wait(4 * S) == [Rotated(0, "probing", "retry")]
    assert be_silent(ward, 0) == Rotated(0, "isolated", "hung", 8 * S)
    ward.wait(8 * S)
    del ward.hung_since_ns[0]
    assert ward.answer(0) == [Rotated(0, "in", "probe_answered")]
    assert ward.health.state(ward.now_ns).hung == []


def hang_all(ward: Ward, replicas: int) -> list[int]:
    """Nobody answers, whoever is said to hang is ended at once, and none can be reached again."""
    ended: list[int] = []
    for _ in range(60):
        for replica in range(replicas):
            if replica not in ended and ward.health.takes(replica):
                ward.hung_since_ns[replica] = 0
                ward.send(replica)
        for said in ward.wait(1700 * MS):
            if said.why == "hung":
                ended.append(said.replica)
                ward.health.down(ward.now_ns, said.replica)
    return ended


@pytest.mark.parametrize(("replicas", "ended"), [(1, 0), (2, 1), (3, 1), (4, 2), (7, 3)])
def test_a_network_that_is_down_does_not_end_more_than_half_of_a_pool(
    replicas: int, ended: int
) -> None:
    assert len(hang_all(Ward(replicas), replicas)) == ended


def standby(replica: int, models: tuple[str, ...] = ()) -> Standby:
    return Standby(replica, f"r{replica}", models, 30 * S)


def test_the_only_one_hangs_where_a_standby_can_take_its_place() -> None:
    ward = Ward(1)
    ward.health.standby(standby(1, ("other",)))
    assert hang_all(ward, 1) == []
    ward.health.standby(standby(1))
    ward.answer(0)
    assert be_silent(ward, 0) == Rotated(0, "in", "silent")
    ward.answer(0)
    assert be_silent(ward, 0) == Rotated(0, "in", "silent")
    assert be_silent(ward, 0) == Rotated(0, "isolated", "hung", 2 * S)
    ward.health.down(ward.now_ns, 0)
    ward.health.up(ward.now_ns, up(1))
    ward.health.standby(standby(2))
    for _ in range(4):
        assert be_silent(ward, 1) == Rotated(1, "in", "silent")  # the first is not back


def test_one_that_is_a_standby_again_makes_room_for_another() -> None:
    ward = Ward(2)
    assert hang_all(ward, 2) == [0]
    ward.health.standby(standby(0))
    ward.health.up(ward.now_ns, up(2))
    assert hang_all(ward, 2)[-1:] == [1]


def test_a_candidate_and_a_shadow_end_nobody() -> None:
    for ward in (Ward(enforce=False), Ward()):
        ward.health.leads = False
        for _ in range(4):
            ward.hung_since_ns[0] = 0
            ward.send(0)
            assert all(said.why != "hung" for said in ward.wait(20 * S))


def test_a_card_that_breaks_under_what_hangs_is_not_tried_again() -> None:
    ward = Ward()
    be_silent(ward, 0)
    ward.wait(2 * S)
    be_silent(ward, 0)
    said = ward.take(ward.health.gpu_fault(ward.now_ns, GpuFault(0, "xid_fatal", 79)))
    assert said == [Rotated(0, "isolated", "xid_fatal")]
    assert ward.wait(3600 * S) == []
    assert ward.health.state(ward.now_ns).hung == []


# Slowness


def test_a_replica_slower_than_its_peers_leaves_after_two_comparisons() -> None:
    ward = Ward(3)
    while not ward.said:
        for replica in range(3):
            ward.answer(replica, 600 * MS if replica == 1 else 120 * MS)
        ward.wait(20 * MS)
    assert ward.said == [(ward.said[0][0], Rotated(1, "ejected", "slow", 2 * S))]
    assert 10 * S <= ward.said[0][0] <= 10 * S + 20 * MS


def test_a_slow_probe_fails_and_a_fast_one_passes() -> None:
    ward = Ward(2)
    while not ward.said:
        ward.answer(0, 600 * MS)
        ward.answer(1)
        ward.wait(20 * MS)
    ward.wait(2 * S)
    assert ward.answer(0, 600 * MS) == [Rotated(0, "ejected", "slow", 4 * S)]
    ward.wait(4 * S)
    assert ward.answer(0) == [Rotated(0, "in", "probe_answered")]


def test_what_is_slow_everywhere_or_only_a_little_is_not_slow() -> None:
    ward = Ward(3)
    for _ in range(1000):
        for replica in range(3):
            ward.answer(replica, (1000 + 400 * replica) * MS)
        ward.wait(20 * MS)
    assert ward.said == []


def test_a_single_slow_window_is_let_pass() -> None:
    ward = Ward(2)
    for number in range(1000):
        ward.answer(0, 600 * MS if number < 240 else PREFILL)
        ward.answer(1)
        ward.wait(20 * MS)
    assert ward.said == []


# Backpressure


def test_both_full_for_three_seconds_are_paused_never_ejected_and_back_within_one() -> None:
    ward = Ward()
    wasted = 0
    back_ns = 0
    while not back_ns:
        for replica in (0, 1):
            if not ward.health.takes(replica):
                continue
            if ward.now_ns < 3 * S:
                ward.fail(replica, "backpressure")
                wasted += 1
            else:
                ward.answer(replica)
                back_ns = ward.now_ns
        ward.wait(10 * MS)
    assert back_ns <= 4 * S
    assert wasted <= 14
    assert all(said.state != "ejected" for _, said in ward.said)
    assert ward.health.detected == 0


def test_a_pause_ends_with_the_first_token_of_one_request() -> None:
    ward = Ward()
    assert ward.fail(0, "backpressure") == [Rotated(0, "probing", "backpressure", 500 * MS)]
    assert ward.health.state_of(0) == "probing"
    ward.wait(500 * MS)
    probe = ward.send(0)
    assert not ward.health.takes(0)
    assert ward.first(probe, 0) == [Rotated(0, "in", "accepted")]
    assert ward.health.takes(0)


def test_a_paused_replica_can_still_be_ejected() -> None:
    ward = Ward()
    early = [ward.send(0) for _ in range(3)]
    ward.fail(0, "backpressure")
    for request in early[:2]:
        assert ward.take(ward.health.failed(ward.now_ns, request, 0, "http_5xx")) == []
    said = ward.take(ward.health.failed(ward.now_ns, early[2], 0, "http_5xx"))
    assert said == [Rotated(0, "ejected", "failures", 2 * S)]


def test_a_paused_replica_whose_probe_fails_takes_the_next_one() -> None:
    ward = Ward()
    ward.fail(0, "backpressure")
    ward.wait(500 * MS)
    assert ward.fail(0) == []
    assert ward.health.takes(0)


# GPUs


@pytest.mark.parametrize("kind", ["ecc_uncorrectable", "xid_fatal"])
def test_a_broken_gpu_leaves_at_once_and_for_good(kind: Any) -> None:
    ward = Ward(1)
    assert ward.take(ward.health.gpu_fault(0, GpuFault(0, kind))) == [Rotated(0, "isolated", kind)]
    assert ward.take(ward.health.gpu_fault(0, GpuFault(0, kind))) == []
    ward.wait(3600 * S)
    assert not ward.health.takes(0)
    assert ward.health.state_of(0) == "isolated"
    ward.health.down(ward.now_ns, 0)
    ward.health.up(ward.now_ns, up(0))
    assert ward.health.takes(0)


@pytest.mark.parametrize("kind", ["ecc_correctable", "xid_minor"])
def test_a_minor_error_is_none(kind: Any) -> None:
    ward = Ward()
    assert ward.take(ward.health.gpu_fault(0, GpuFault(0, kind))) == []


def test_a_broken_gpu_does_not_count_in_its_pool() -> None:
    ward = Ward(3)
    ward.take(ward.health.gpu_fault(0, GpuFault(0, "xid_fatal", 79)))
    assert len(ward.fail(1, times=3)) == 1
    assert ward.fail(2, times=3) == []


# Memory


def test_an_unknown_replica_is_healthy_and_late_events_do_nothing() -> None:
    ward = Ward(1)
    health = ward.health
    health.down(0, 0)
    ward.fail(0, times=5)
    assert ward.answer(0) == []
    health.progress(0, Progress(0, 5))
    assert health.gpu_fault(0, GpuFault(0, "xid_fatal")) == ()
    assert (health.takes(0), health.state_of(0), health.size()) == (True, "in", 0)


def test_its_tables_are_bounded() -> None:
    ward = Ward(5, replicas_max=3, in_flight_max=4, slow_samples_least=1, slow_samples_most=2)
    for replica in range(5):
        for _ in range(10):
            ward.first(ward.send(replica), replica)
            ward.answer(replica)
    assert ward.health.size() == 3 * (1 + 4 + 2)
    # As many may have hung before, and as many stand by.
    assert ward.health.size_most() == 3 * (1 + 1 + 1 + 4 + 2)


def test_what_hung_and_never_came_back_is_forgotten_at_last() -> None:
    ward = Ward(2, replicas_max=2, hung_ejections=1)
    for replica in range(40):
        ward.health.down(ward.now_ns, replica - 2)
        ward.health.up(ward.now_ns, up(replica))
        be_silent(ward, replica)
        assert ward.health.size() <= ward.health.size_most()
        assert len(ward.health.state(ward.now_ns).hung) <= 2


def test_a_snapshot_has_relative_times_and_no_floats() -> None:
    ward = Ward(4)
    ward.wait(7 * S)
    be_silent(ward, 2)
    ward.wait(2 * S)
    be_silent(ward, 2)
    ward.health.down(ward.now_ns, 2)
    ward.fail(0, times=3)
    ward.send(1)
    state = ward.health.state(ward.now_ns)
    assert [replica for replica, _ in state.hung] == [2]
    assert_integers(msgspec.msgpack.decode(msgspec.msgpack.encode(state)))
    later = Health(Section())
    later.load(state, 100 * S)
    assert later.state(100 * S) == state
    assert later.deadline_ns() == (ward.health.deadline_ns() or 0) + 100 * S - ward.now_ns
    assert not later.takes(0)


def test_a_snapshot_of_before_there_was_hanging_can_be_read() -> None:
    ward = Ward()
    ward.fail(0, times=3)
    wire = msgspec.to_builtins(ward.health.state(0))
    *before, hung, standbys = wire
    assert hung == standbys == []
    before[0] = [(watch[:-1], *rest) for watch, *rest in before[0]]
    assert msgspec.convert(before, HealthState) == ward.health.state(0)


@pytest.mark.parametrize(
    ("section", "told"),
    [({"open_ms": 40_000}, "40000, above open_most_ms"), ({"ask_ms": 800}, "800, above half"),
     ({"slow_samples_least": 100}, "100, above slow_samples_most")],
)  # fmt: skip
def test_sections_that_contradict_themselves_are_refused(
    section: dict[str, int], told: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=told):
        msgspec.convert(section, Section)
