"""One slot, event by event: no process, no clock."""

from __future__ import annotations

from typing import Any

import pytest

from controller.fleet.slot import (
    COLD_START_NS,
    MOVES,
    WARM_START_NS,
    Actions,
    Announce,
    Fail,
    Hold,
    Kill,
    Open,
    Role,
    Rules,
    Slot,
    Spawn,
    Tell,
    Terminate,
    WarmUp,
    Withdraw,
)

S = 1_000_000_000


def rules(**changes: Any) -> Rules:
    given: dict[str, Any] = {
        "warm": True, "start_ns_most": 100 * S, "stop_ns_most": 10 * S, "backoff_ns_first": S,
        "backoff_ns_most": 8 * S, "forgive_ns": 60 * S, "give_up_after": 0,
    }  # fmt: skip
    return Rules(**{**given, **changes})


def made(role: Role = "serve", **changes: Any) -> Slot:
    return Slot(rules(**changes), "v1", role, 0)


def up(slot: Slot, now_ns: int = 2 * S) -> Actions:
    """Its process answers, and is warmed."""
    assert slot.answered(now_ns) == [WarmUp()]
    return slot.warmed(now_ns, taken=False)


def serving(**changes: Any) -> Slot:
    slot = made(**changes)
    assert slot.begin(0) == [Spawn("v1")]
    assert up(slot) == [Open()]
    return slot


def spare(**changes: Any) -> Slot:
    slot = made("spare", **changes)
    slot.begin(0)
    if slot.rules.warm:
        assert up(slot) == [Announce("v1", WARM_START_NS)]
    return slot


def test_a_base_slot_is_started_warmed_and_opened() -> None:
    slot = serving()
    assert (slot.state, slot.starts, slot.last_start_ns) == ("serving", 1, 2 * S)
    assert slot.opens


def test_a_cold_standby_is_announced_and_started_when_asked() -> None:
    slot = made("spare", warm=False)
    assert slot.begin(0) == [Announce("v1", COLD_START_NS)]
    assert slot.start(S) == [Spawn("v1")]
    assert slot.start(S) == [], "once is enough"
    assert up(slot, 4 * S) == [Open()]
    assert slot.stop(5 * S) == [Hold("stopped"), Terminate()]
    assert slot.exited(6 * S, "exited with code 0") == [Announce("v1", 3 * S)], "as it was measured"
    assert slot.state == "cold"


def test_a_warm_standby_serves_at_once() -> None:
    slot = spare()
    assert slot.start(3 * S) == [Open()]
    assert slot.stop(4 * S) == [Hold("stopped"), Terminate()]
    assert slot.exited(5 * S, "killed by signal 15") == [Spawn("v1")], "it is had warm again"
    assert up(slot, 6 * S) == [Announce("v1", WARM_START_NS)]


def test_a_start_in_another_version_replaces_the_process() -> None:
    slot = spare()
    assert slot.start(3 * S, "v2") == [Terminate()]
    assert slot.state == "stopping"
    assert slot.exited(4 * S, "exited with code 0") == [Spawn("v2")]
    assert up(slot, 5 * S) == [Open()]
    assert slot.stop(6 * S) == [Hold("stopped"), Terminate()]
    assert slot.exited(7 * S, "exited with code 0") == [Spawn("v1")], "what its model is served in"


@pytest.mark.parametrize("how", ["exits", "another", "times out", "does not answer prompts"])
def test_a_version_that_cannot_be_had_is_said_and_the_old_one_comes_back(how: str) -> None:
    slot = spare()
    slot.start(3 * S, "v2")
    slot.exited(4 * S, "exited with code 0")
    if how == "exits":
        actions = slot.exited(5 * S, "exited with code 1")
        assert actions == [Fail("v2", "exited with code 1"), Spawn("v1")]
    else:
        if how == "another":
            actions = slot.failed(5 * S, "another version was loaded", "v0")
            assert actions == [Fail("v0", "another version was loaded"), Kill()]
        elif how == "times out":
            assert slot.deadline_ns() == 104 * S
            actions = slot.tick(104 * S)
            assert actions == [Fail("v2", "it did not answer within 100 s"), Kill()]
        else:
            slot.answered(5 * S)
            assert slot.failed(6 * S, "no")[-1] == Kill()
        assert slot.exited(105 * S, "killed by signal 9") == [Spawn("v1")]
    assert slot.failures == 0, "the old version has not failed"
    assert up(slot, 106 * S) == [Announce("v1", WARM_START_NS)]


def test_a_version_that_is_none_leaves_it_as_it_is() -> None:
    slot = spare()
    assert slot.refuse("v9", "no such") == [Fail("v9", "no such"), Announce("v1", WARM_START_NS)]
    assert slot.state == "warm"


def test_a_crash_shuts_the_gate_and_waits_longer_each_time() -> None:
    slot = serving()
    now = 10 * S
    assert slot.exited(now, "killed by signal 9") == [Hold("killed by signal 9")]
    waits = []
    for _ in range(5):
        due = slot.deadline_ns()
        assert due is not None
        assert (slot.state, slot.role) == ("waiting", "back")
        assert slot.tick(due - 1) == []
        waits.append((due - now) // S)
        assert slot.tick(due) == [Spawn("v1")]
        now = due
        assert slot.exited(now, "exited with code 1") == []
    assert waits == [1, 2, 4, 8, 8]


def test_failures_are_forgiven_after_a_while() -> None:
    slot = serving()
    slot.exited(10 * S, "exited with code 1")
    slot.tick(11 * S)
    up(slot, 12 * S)
    assert slot.deadline_ns() == 72 * S
    assert slot.tick(72 * S) == []
    slot.exited(73 * S, "exited with code 1")
    assert slot.deadline_ns() == 74 * S, "as after a first failure"


@pytest.mark.parametrize("taken", [False, True])
def test_what_crashed_serves_again_unless_its_place_is_taken(taken: bool) -> None:
    slot = serving()
    slot.exited(10 * S, "exited with code 1")
    slot.tick(11 * S)
    assert not slot.opens
    slot.answered(12 * S)
    last = slot.warmed(13 * S, taken)
    assert last == ([Announce("v1", WARM_START_NS)] if taken else [Open()])
    assert slot.role == ("spare" if taken else "serve")


def test_it_gives_up_after_as_many_failures_as_it_is_told() -> None:
    slot = made(give_up_after=3)
    slot.begin(0)
    for number in range(3):
        actions = slot.exited((10 * number + 1) * S, "exited with code 7")
        slot.tick((10 * number + 9) * S)
    assert isinstance(actions[-1], Tell)
    assert "exited with code 7" in actions[-1].text
    assert (slot.state, slot.deadline_ns()) == ("broken", None)
    assert slot.card_well(60 * S) == [Spawn("v1")], "somebody has looked"
    assert slot.failures == 0


def test_it_gives_up_on_what_is_never_what_it_should_be() -> None:
    slot = made(give_up_after=1)
    slot.begin(0)
    assert [type(each) for each in slot.failed(S, "another version")] == [Kill, Tell]
    assert slot.exited(2 * S, "killed by signal 9") == []
    assert slot.state == "broken"
    assert "another version" in slot.why


def test_one_that_hangs_is_killed_at_once() -> None:
    slot = serving()
    assert slot.hung(10 * S, "hung") == [Hold("hung"), Kill()]
    assert slot.hung(11 * S, "hung") == [], "it is under way"
    assert slot.exited(11 * S, "killed by signal 9") == []
    assert (slot.state, slot.why) == ("waiting", "hung")
    assert slot.tick(12 * S) == [Spawn("v1")]


def test_a_kill_that_does_not_end_it_is_sent_again() -> None:
    slot = serving()
    slot.hung(10 * S, "hung")
    assert slot.tick(20 * S) == [Kill()]
    assert slot.tick(30 * S) == [Kill()]


def test_one_that_does_not_hear_sigterm_is_killed() -> None:
    slot = serving()
    slot.stop(10 * S)
    assert slot.tick(19 * S) == []
    assert slot.tick(20 * S) == [Kill()]


def test_a_broken_card_keeps_it_down_until_it_is_well() -> None:
    slot = serving()
    assert slot.card_broken(10 * S, "xid_fatal") == [Hold("xid_fatal"), Kill()]
    assert slot.exited(11 * S, "killed by signal 9") == []
    assert (slot.state, slot.why, slot.deadline_ns()) == ("broken", "xid_fatal", None)
    assert slot.card_broken(12 * S, "xid_fatal") == []
    assert slot.tick(1000 * S) == []
    assert slot.card_well(1001 * S) == [Spawn("v1")]


def test_a_card_that_breaks_under_a_standby_takes_it_back() -> None:
    slot = spare()
    assert slot.card_broken(10 * S, "ecc_uncorrectable") == [Withdraw("ecc_uncorrectable"), Kill()]
    assert slot.start(11 * S) == [Withdraw("it cannot be started: ecc_uncorrectable")]
    slot.exited(12 * S, "killed by signal 9")
    assert slot.start(13 * S, "v2") == [Fail("v2", "it cannot be started: ecc_uncorrectable")]
    assert slot.card_well(14 * S) == [Spawn("v1")]
    assert up(slot, 15 * S) == [Announce("v1", WARM_START_NS)]


def test_a_card_that_breaks_under_a_new_version_says_so() -> None:
    slot = spare()
    slot.start(3 * S, "v2")
    slot.exited(4 * S, "exited with code 0")
    assert slot.card_broken(5 * S, "xid_fatal") == [Fail("v2", "xid_fatal"), Kill()]
    slot.exited(6 * S, "killed by signal 9")
    assert slot.card_well(7 * S) == [Spawn("v1")]


def test_a_card_that_is_well_again_while_its_process_still_ends() -> None:
    slot = serving()
    slot.card_broken(10 * S, "xid_fatal")
    assert slot.card_well(11 * S) == []
    assert slot.exited(12 * S, "killed by signal 9") == [Spawn("v1")]


def test_a_standby_that_ends_is_taken_back_until_it_is_warm_again() -> None:
    slot = spare()
    assert slot.exited(10 * S, "killed by signal 9") == [Withdraw("killed by signal 9")]
    assert slot.tick(11 * S) == [Spawn("v1")]
    assert up(slot, 12 * S) == [Announce("v1", WARM_START_NS)]


def test_a_start_while_a_standby_warms_opens_it_when_it_is_warm() -> None:
    slot = spare()
    slot.exited(10 * S, "exited with code 1")
    slot.tick(11 * S)
    assert slot.start(12 * S) == []
    assert up(slot, 13 * S) == [Open()]


def test_a_start_while_it_stops_starts_it_again() -> None:
    slot = serving()
    slot.stop(10 * S)
    assert slot.start(11 * S, "v2") == []
    assert slot.exited(12 * S, "exited with code 0") == [Spawn("v2")]


def test_a_stop_while_a_new_version_starts_brings_the_old_one_back() -> None:
    slot = spare()
    slot.start(3 * S, "v2")
    slot.exited(4 * S, "exited with code 0")
    assert slot.stop(5 * S) == [Terminate()]
    assert slot.exited(6 * S, "exited with code 0") == [Spawn("v1")]


def test_a_start_does_not_cut_a_wait_short_but_another_version_does() -> None:
    slot = spare()
    slot.exited(10 * S, "exited with code 1")
    assert slot.start(10 * S) == []
    assert slot.state == "waiting"
    assert slot.start(10 * S, "v2") == [Spawn("v2")]


def test_a_model_that_is_served_in_another_version_renews_its_standbys() -> None:
    warm, cold = spare(), spare(warm=False)
    assert warm.settle(10 * S, "v2") == [Terminate()]
    assert warm.exited(11 * S, "exited with code 0") == [Spawn("v2")]
    assert up(warm, 12 * S) == [Announce("v2", WARM_START_NS)]
    assert cold.settle(10 * S, "v2") == [Announce("v2", COLD_START_NS)]
    base = serving()
    assert base.settle(10 * S, "v2") == [], "it serves what it has, until it is stopped"
    assert base.stop(11 * S) == [Hold("stopped"), Terminate()]
    assert base.exited(12 * S, "exited with code 0") == [Spawn("v2")]


def test_what_is_stopped_while_the_version_changes_is_loaded_once() -> None:
    """In the new version, if it is asked for that; else in its own, when the change is over."""
    slot = serving()
    assert slot.change(3 * S, under_way=True) == []
    slot.stop(3 * S)
    assert slot.exited(4 * S, "exited with code 0") == [Announce("v1", 2 * S)]
    assert slot.start(5 * S, "v2") == [Spawn("v2")]
    assert up(slot, 6 * S) == [Open()]
    slot.stop(7 * S)
    slot.exited(8 * S, "exited with code 0")
    assert slot.change(9 * S, under_way=False) == [Spawn("v1")]
    assert slot.change(9 * S, under_way=False) == [], "once is enough"
    assert up(slot, 10 * S) == [Announce("v1", WARM_START_NS)]
    cold = spare(warm=False)
    cold.change(3 * S, under_way=True)
    assert cold.change(4 * S, under_way=False) == [], "it is loaded when it is asked for"


def test_a_new_version_that_crashes_before_it_has_taken_over_is_not_tried_again() -> None:
    slot = spare()
    slot.start(3 * S, "v2")
    slot.exited(4 * S, "exited with code 0")
    up(slot, 5 * S)
    assert slot.exited(6 * S, "exited with code 1") == [Hold("exited with code 1")]
    assert slot.tick(7 * S) == [Spawn("v1")]


def test_what_was_warm_before_a_restart_serves_at_once() -> None:
    slot = made()
    assert slot.adopt(S, "v1", warmed=True) == [Open()]
    waits = made("spare")
    assert waits.adopt(S, "v1", warmed=True) == [Announce("v1", WARM_START_NS)]
    fresh = made()
    assert fresh.adopt(S, "v1", warmed=False) == []
    assert up(fresh, 3 * S) == [Open()]
    surplus = made("spare", warm=False)
    assert surplus.adopt(S, "v1", warmed=True) == [Terminate()]
    assert surplus.exited(2 * S, "ended") == [Announce("v1", COLD_START_NS)]


@pytest.mark.parametrize("state", ["starting", "serving", "stopping", "waiting", "broken"])
def test_the_end_ends_it_wherever_it_is(state: str) -> None:
    slot = serving()
    if state != "serving":
        slot.exited(10 * S, "exited with code 1")
    if state == "starting":
        slot.tick(11 * S)
    elif state == "stopping":
        slot.tick(11 * S)
        up(slot, 12 * S)
        slot.hung(13 * S, "hung")
    elif state == "broken":
        slot.card_broken(13 * S, "xid_fatal")
    assert slot.state == state
    actions = slot.close(20 * S)
    if state in ("starting", "serving"):
        assert actions[-1] == Terminate()
    if state in ("starting", "serving", "stopping"):
        assert slot.tick(40 * S) == [Kill()]
        assert slot.exited(41 * S, "killed by signal 9") == []
    assert slot.deadline_ns() is None
    for late in (slot.start(50 * S), slot.stop(50 * S), slot.card_well(50 * S)):
        assert late == []
    assert slot.settle(50 * S, "v2") == slot.tick(99 * S) == []


def test_what_comes_too_late_changes_nothing() -> None:
    slot = made("spare", warm=False)
    slot.begin(0)
    for late in (
        slot.answered(S), slot.warmed(S, False), slot.failed(S, "?"), slot.exited(S, "?"),
        slot.hung(S, "?"), slot.tick(S), slot.card_well(S),
    ):  # fmt: skip
        assert late == []
    assert slot.state == "cold"


def test_every_state_can_be_left() -> None:
    assert all(MOVES[state] - {state} for state in MOVES)
    assert all(after in MOVES for moves in MOVES.values() for after in moves)
