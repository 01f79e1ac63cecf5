"""Limits pace: per user, session, model and over all, in order and fairly."""

from __future__ import annotations

import msgspec
import pytest

from policy.limits import FULL, PARKED, PASS, WEIGHTS, Limits, within
from policy.parameters import Parameters
from policy.parameters.limits import Limits as Section
from tests.policy_support import MS, S


class Gate:
    """Limits with a clock and rising ids."""

    def __init__(self, **section: int | str) -> None:
        self.limits = Limits(Section(**section))  # type: ignore[arg-type]
        self.now_ns = 0
        self.next = 0

    def ask(self, user: str = "", session: str = "", model: str = "m") -> int:
        """0 if it passed; PARKED or FULL."""
        request, self.next = self.next, self.next + 1
        return self.limits.arrive(self.now_ns, request, user, session, model)

    def after(self, ns: int) -> list[int]:
        self.now_ns += ns
        return list(self.limits.released(self.now_ns))

    def over(self, *requests: int) -> list[int]:
        for request in requests:
            self.limits.over(self.now_ns, request)
        return list(self.limits.released(self.now_ns))


UNLIMITED = {"user_per_s": 0, "session_per_s": 0, "session_in_flight_most": 0}


def test_a_user_is_paced_to_five_a_second_and_nobody_is_refused() -> None:
    gate = Gate()
    assert [gate.ask("ann") for _ in range(7)] == [PASS] * 5 + [PARKED] * 2
    assert gate.ask("bob") == PASS
    assert gate.limits.deadline_ns() == S
    assert gate.after(S - 1) == []
    assert gate.after(1) == [5, 6]
    assert gate.limits.deadline_ns() is None


def test_the_window_slides_and_gives_no_double_burst_at_its_edges() -> None:
    gate = Gate(user_per_s=2)
    gate.now_ns = 900 * MS
    assert [gate.ask("ann"), gate.ask("ann")] == [PASS, PASS]
    gate.now_ns = 1000 * MS
    assert [gate.ask("ann"), gate.ask("ann")] == [PARKED, PARKED]
    assert gate.limits.deadline_ns() == 1900 * MS
    assert gate.after(900 * MS) == [2, 3]


def test_a_sessions_turns_go_one_by_one_in_order_of_arrival() -> None:
    gate = Gate()
    assert [gate.ask("ann", "s") for _ in range(3)] == [PASS, PARKED, PARKED]
    assert gate.ask("ann", "other") == PASS
    assert gate.limits.deadline_ns() is None  # only an answer frees it
    assert gate.over(0) == [1]
    assert gate.over(2) == []  # its client went away while it waited
    assert gate.ask("ann", "s") == PARKED
    assert gate.over(1) == [4]


def test_two_turns_of_a_session_at_once_still_go_in_order() -> None:
    gate = Gate(session_in_flight_most=2)
    assert [gate.ask("", "s") for _ in range(5)] == [PASS, PASS, PARKED, PARKED, PARKED]
    assert gate.over(1) == [2]
    assert gate.over(0, 2) == [3, 4]


def test_a_sessions_rate_counts_beside_its_order() -> None:
    gate = Gate(session_per_s=1)
    assert [gate.ask("", "s"), gate.ask("", "s")] == [PASS, PARKED]
    assert gate.over(0) == []
    assert gate.limits.deadline_ns() == S
    assert gate.after(S) == [1]


def test_every_limit_is_checked_before_any_is_charged() -> None:
    gate = Gate(user_per_s=2, model_in_flight_most=1)
    assert gate.ask("ann", model="busy") == PASS
    assert gate.ask("ann", model="busy") == PARKED  # for the model: the user is not charged
    assert gate.ask("ann", model="free") == PASS
    assert gate.over(0) == []  # now it is the user's turn to wait
    assert gate.after(S) == [1]


def test_a_user_without_room_is_not_let_in_when_a_model_has_some() -> None:
    gate = Gate(user_per_s=1, model_in_flight_most=1)
    assert [gate.ask("bob", model="busy"), gate.ask("ann", model="busy")] == [PASS, PARKED]
    assert gate.ask("ann", model="free") == PASS
    assert gate.over(0) == []
    assert gate.after(S) == [1]


def test_no_tick_is_asked_for_when_nobody_waits_for_it() -> None:
    gate = Gate(model_per_s=1)
    assert [gate.ask("ann"), gate.ask("ann")] == [PASS, PARKED]
    assert gate.limits.deadline_ns() == S
    assert gate.over(1) == []
    assert gate.limits.deadline_ns() is None


def test_what_waits_for_a_model_does_not_hold_up_the_users_other_requests() -> None:
    gate = Gate(model_per_s=1)
    assert gate.ask("ann", model="a") == PASS
    assert gate.ask("ann", model="a") == PARKED
    assert gate.ask("ann", model="b") == PASS
    assert gate.ask("bob", model="a") == PARKED
    assert gate.after(S) == [3]  # bob was served less
    assert gate.after(S) == [1]


def test_least_served_first_where_users_wait_for_the_same_room() -> None:
    gate = Gate(**UNLIMITED, global_in_flight_most=1)
    assert gate.ask("ann") == PASS
    gate.limits.served(0, "ann", 10_000)
    assert [gate.ask("ann"), gate.ask("ann"), gate.ask("bob"), gate.ask("eve")] == [PARKED] * 4
    assert gate.over(0) == [3]
    assert gate.over(3) == [4]  # bob's request counts at once, before its tokens do
    gate.limits.served(0, "bob", 50_000)
    assert gate.ask("bob") == PARKED
    assert gate.over(4) == [1]
    assert gate.over(1) == [2]
    assert gate.over(2) == [5]


def test_service_fades_by_half_in_a_half_life() -> None:
    gate = Gate(**UNLIMITED, global_in_flight_most=1, request_tokens=1)
    gate.ask("eve")
    gate.limits.served(0, "ann", 1)  # unknown: nothing to remember
    assert [gate.ask("ann"), gate.ask("bob")] == [PARKED, PARKED]
    gate.limits.served(0, "ann", 10_000)
    gate.now_ns = 60 * S
    gate.limits.served(gate.now_ns, "bob", 5_100)
    assert gate.over(0) == [1]
    later = Gate(**UNLIMITED, global_in_flight_most=1, request_tokens=1)
    later.ask("eve")
    assert [later.ask("ann"), later.ask("bob")] == [PARKED, PARKED]
    later.limits.served(0, "ann", 10_000)
    later.now_ns = 60 * S
    later.limits.served(later.now_ns, "bob", 4_900)
    assert later.over(0) == [2]


def test_service_stays_small_over_months_and_keeps_its_order() -> None:
    gate = Gate(**UNLIMITED, global_in_flight_most=1)
    gate.ask("eve")
    assert [gate.ask("ann"), gate.ask("bob")] == [PARKED, PARKED]
    for minute in range(0, 30_000, 19):
        gate.now_ns = minute * 60 * S
        gate.limits.served(gate.now_ns, "ann", 1 << 40)
        gate.limits.served(gate.now_ns, "bob", 1000)
    assert all(user.service < 1 << 63 for user in gate.limits.state(gate.now_ns).users)
    assert gate.over(0) == [2]


def test_order_arrival_is_a_plain_first_come_queue() -> None:
    gate = Gate(**UNLIMITED, global_in_flight_most=2, order="arrival")
    asked = [gate.ask(user, "s", model) for user, model in ("am", "am", "bm", "an", "am", "bn")]
    assert asked == [PASS, PASS] + [PARKED] * 4
    gate.limits.served(0, "a", 1_000_000)
    assert gate.over(1) == [2]
    assert gate.over(0, 2) == [3, 4]
    assert gate.over(3) == [5]


def test_nobody_overtakes_those_whose_window_slides_at_this_very_instant() -> None:
    gate = Gate(user_per_s=1)
    assert [gate.ask("ann"), gate.ask("ann")] == [PASS, PARKED]
    gate.now_ns = S
    assert gate.ask("ann") == PARKED
    assert gate.limits.deadline_ns() == S
    assert gate.after(0) == [1]
    assert gate.after(S) == [2]


def test_anonymous_requests_have_no_limit_of_their_own() -> None:
    gate = Gate()
    assert [gate.ask() for _ in range(100)] == [PASS] * 100


def test_bounds_are_kept_by_refusing() -> None:
    gate = Gate(parked_max=1, open_max=4, keys_max=5)
    assert [gate.ask("", "s") for _ in range(3)] == [PASS, PARKED, FULL]
    assert [gate.ask("", "t"), gate.ask("", "u"), gate.ask("", "v")] == [PASS, PASS, FULL]
    assert gate.over(0) == [1]
    assert gate.ask("", "v") == PASS


def test_more_keys_than_may_be_remembered() -> None:
    gate = Gate(keys_max=3, open_max=2)
    for key in range(100):
        assert gate.ask(f"u{key}", f"s{key}") == PASS
        assert gate.limits.size() <= gate.limits.size_most()
        gate.over(key)
    assert gate.limits.size() <= 12


def test_quiet_keys_are_forgotten_by_themselves() -> None:
    gate = Gate()
    for key in range(1000):
        gate.ask(f"u{key}", f"s{key}")
        gate.now_ns += 10 * S
        gate.over(key)
    assert gate.limits.size() < 120  # users for 8 half-lives, sessions for a second


def test_adopted_requests_count_as_in_flight_and_may_exceed_every_limit() -> None:
    gate = Gate(user_in_flight_most=1, open_max=3, keys_max=4)
    for request in (0, 1, 1, 2, 3):
        gate.limits.adopt(request, "ann", "s", "m")
    gate.next = 4
    gate.over(2)
    assert gate.ask("ann") == PARKED
    gate.over(1)
    assert gate.over(3, 99) == []  # 3 was one too many, 99 never came
    assert gate.over(0) == [4]


@pytest.mark.parametrize("bad", [{"open_max": 5, "keys_max": 5}, {"order": "random"}])
def test_bad_sections_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"limits": bad}, Parameters)


def test_the_weights_double_in_a_half_life() -> None:
    assert WEIGHTS[0] == 1024
    assert WEIGHTS[32] == 1448  # 1024 * sqrt(2)
    assert 2024 < WEIGHTS[63] < 2048


def test_limits_within_others_leave_no_more_room() -> None:
    other = Section(global_in_flight_most=20, model_per_s=9, open_max=500)
    own = within(Section(global_in_flight_most=50, model_in_flight_most=7, user_per_s=2), other)
    assert (own.global_in_flight_most, own.model_in_flight_most, own.model_per_s) == (20, 7, 9)
    assert (own.user_per_s, own.open_max) == (2, 500)
    off = within(Section(enabled=False, global_in_flight_most=3), other)
    assert (off.enabled, off.global_in_flight_most, off.user_per_s) == (True, 20, 0)
    assert within(off, Section(enabled=False, global_in_flight_most=1)) == off
    assert not within(Section(enabled=False), Section()).enabled


def test_other_limits_know_what_is_in_flight_and_was_of_late() -> None:
    gate = Gate(user_per_s=1)
    assert [gate.ask("ann"), gate.ask("ann")] == [PASS, PARKED]
    gate.limits = gate.limits.bounded_by(gate.now_ns, Section(user_per_s=2))
    assert gate.limits.passed(0)
    assert not gate.limits.passed(1)
    assert [gate.ask("ann"), gate.ask("ann")] == [PASS, PARKED]
    assert gate.after(S) == [3]
