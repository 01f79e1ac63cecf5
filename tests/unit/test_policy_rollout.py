"""Rollout: the new version beside the old one, verified, warmed, switched to, and the old ended."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.decisions import Alert, Rotated, Start, Stop, Warm
from policy.events import RolloutRequested, Standby, Warmed
from policy.parameters.rollout import Rollout as Section
from policy.rollout import Rollout
from tests.policy_support import S, assert_integers, up

WHY = "rollout of v2"


def standby(replica: int, **changes: Any) -> Standby:
    fields: dict[str, Any] = {"models": ("m",), "start_ns": 30 * S, "version": "v1"}
    return Standby(replica=replica, name=f"r{replica}", **(fields | changes))


def spec(replica: int, version: str = "v1") -> Any:
    return up(replica, models=("m",), version=version)


def fleet(olds: int, standbys: int, **section: Any) -> Rollout:
    rollout = Rollout(msgspec.convert(section, Section))
    for replica in range(olds):
        assert rollout.up(0, spec(replica)) == ()
    for replica in range(olds, olds + standbys):
        assert not rollout.standby(0, standby(replica))
    return rollout


def request(rollout: Rollout, version: str = "v2", now_ns: int = 0) -> list[Any]:
    return list(rollout.requested(now_ns, RolloutRequested("m", version)))


def bring_up(rollout: Rollout, replica: int, version: str = "v2") -> list[Any]:
    """Started, verified and warmed."""
    assert list(rollout.up(S, spec(replica, version))) == [Warm(replica)]
    return list(rollout.warmed(2 * S, Warmed(replica, version)))


def test_with_a_standby_each_all_new_requests_switch_at_one_instant() -> None:
    rollout = fleet(2, 3)
    assert request(rollout) == [Start(2, "v2"), Start(3, "v2")]
    assert bring_up(rollout, 2) == []
    assert (rollout.allowed(0), rollout.allowed(2)) == (True, False)
    assert bring_up(rollout, 3) == [
        Rotated(2, "in", WHY), Rotated(0, "draining", WHY),
        Rotated(3, "in", WHY), Rotated(1, "draining", WHY),
    ]  # fmt: skip
    assert [rollout.allowed(replica) for replica in range(4)] == [
        False, False, True, True,
    ]  # fmt: skip
    assert rollout.emptied(3 * S, 2) == ()
    assert rollout.emptied(3 * S, 0) == (Stop(0),)
    assert rollout.emptied(3 * S, 0) == ()
    assert list(rollout.down(3 * S, 0)) == []
    assert rollout.deadline_ns() is not None
    rollout.emptied(4 * S, 1)
    rollout.down(4 * S, 1)
    assert rollout.deadline_ns() is None
    assert not any(rollout.holds(replica) for replica in range(4))


def test_with_fewer_standbys_it_goes_in_waves_and_capacity_never_falls() -> None:
    rollout = fleet(3, 1)
    version = ["v1", "v1", "v1", ""]
    started = [decision.replica for decision in request(rollout)]
    while started:
        [new] = started
        version[new] = "v2"
        [_, leaving] = bring_up(rollout, new)
        serving = [one for one in range(4) if rollout.allowed(one)]
        assert len(serving) == 3
        rollout.emptied(3 * S, leaving.replica)
        rollout.down(3 * S, leaving.replica)
        version[leaving.replica] = ""
        said: list[Any] = list(rollout.standby(4 * S, standby(leaving.replica)))
        started = [start.replica for start in said]
    assert sorted(version) == ["", "v2", "v2", "v2"]
    assert rollout.deadline_ns() is None


def test_old_weights_kept_in_silence_are_noticed() -> None:
    rollout = fleet(1, 1)
    request(rollout)
    assert list(rollout.up(S, spec(1, "v1"))) == [
        Stop(1),
        Alert(
            "rollout m", "another version was loaded",
            (("replica", 1), ("replaced", 0), ("left", 1)),
            "given up; what served serves on",
        ),
    ]  # fmt: skip
    assert rollout.allowed(0)
    assert not rollout.allowed(1)
    rollout.down(2 * S, 1)
    assert rollout.standby(2 * S, standby(1)) == []
    assert request(rollout) == [Start(1, "v2")]


@pytest.mark.parametrize("warmed", [Warmed(2, "v2", ok=False), Warmed(2, "v1")])
def test_a_failed_warm_up_stops_all_that_is_new(warmed: Warmed) -> None:
    rollout = fleet(2, 2)
    request(rollout)
    rollout.up(S, spec(2, "v2"))
    said = list(rollout.warmed(S, warmed))
    assert said[0] == Stop(2)
    assert isinstance(said[1], Alert)
    assert list(rollout.up(2 * S, spec(3, "v2"))) == [Stop(3)]
    assert [rollout.allowed(replica) for replica in range(4)] == [True, True, False, False]
    assert not rollout.draining(0)


def test_new_replicas_that_never_come_up_are_given_up() -> None:
    rollout = fleet(1, 1, start_most_ms=60_000)
    request(rollout, now_ns=5 * S)
    assert rollout.deadline_ns() == 65 * S
    assert list(rollout.ticked(65 * S - 1)) == []
    [alert] = rollout.ticked(65 * S)
    assert isinstance(alert, Alert)
    assert "too long" in alert.cause
    assert rollout.deadline_ns() is None
    assert list(rollout.up(70 * S, spec(1, "v2"))) == [Stop(1)]


def test_a_new_replica_that_dies_ends_the_rollout() -> None:
    rollout = fleet(1, 1)
    request(rollout)
    rollout.up(S, spec(1, "v2"))
    [alert] = rollout.down(S, 1)
    assert isinstance(alert, Alert)
    assert rollout.size() == 1


def test_a_new_replica_whose_card_breaks_ends_the_rollout() -> None:
    rollout = fleet(2, 2)
    request(rollout)
    rollout.up(S, spec(2, "v2"))
    rollout.up(S, spec(3, "v2"))
    *stops, alert = rollout.isolated(3)
    assert {each.replica for each in stops if isinstance(each, Stop)} == {2, 3}
    assert isinstance(alert, Alert)
    assert alert.cause == "a new replica's card broke"
    assert rollout.isolated(0) == []
    assert rollout.allowed(0)


def test_a_drain_that_takes_long_is_told_and_not_cut_short() -> None:
    rollout = fleet(1, 1, drain_alarm_ms=60_000)
    request(rollout)
    bring_up(rollout, 1)
    [alert] = rollout.ticked(rollout.deadline_ns() or 0)
    assert isinstance(alert, Alert)
    assert alert.figures == (("replaced", 1), ("left", 1))
    assert rollout.deadline_ns() is None
    assert rollout.emptied(100 * S, 0) == (Stop(0),)


@pytest.mark.parametrize(
    ("olds", "standbys", "cause"), [(0, 1, "no replica serves"), (1, 0, "no standby")]
)
def test_what_cannot_be_done_is_said(olds: int, standbys: int, cause: str) -> None:
    rollout = fleet(olds, standbys)
    [alert] = request(rollout)
    assert isinstance(alert, Alert)
    assert cause in alert.cause
    assert rollout.deadline_ns() is None


def test_what_is_done_already_needs_nothing() -> None:
    rollout = fleet(1, 1)
    assert request(rollout, "v1") == []
    request(rollout)
    assert request(rollout) == []


def test_the_way_back_in_the_midst_of_it() -> None:
    rollout = fleet(2, 2)
    request(rollout)
    bring_up(rollout, 2)
    assert request(rollout, "v1") == [Stop(2)]
    assert rollout.allowed(0)
    rollout = fleet(2, 2)
    request(rollout)
    bring_up(rollout, 2)
    bring_up(rollout, 3)
    rollout.emptied(3 * S, 0)
    assert request(rollout, "v1", 3 * S) == [Rotated(1, "in", "rollout of v1")]
    rollout.down(4 * S, 0)
    assert list(rollout.standby(4 * S, standby(0))) == [Start(0, "v1")]
    assert Rotated(2, "draining", "rollout of v1") in bring_up(rollout, 0, "v1")


def test_only_what_can_do_the_same_takes_a_place() -> None:
    rollout = fleet(1, 0)
    rollout.standby(0, standby(1, models=("m", "n")))
    rollout.standby(0, standby(2, pooling=True))
    rollout.standby(0, standby(3))
    rollout.standby(0, standby(4))
    rollout.taken(3)
    assert request(rollout) == [Start(4, "v2")]


def test_its_tables_are_bounded() -> None:
    rollout = fleet(6, 6, replicas_max=3, rollouts_max=1)
    assert rollout.size() == 6
    request(rollout)
    [alert] = rollout.requested(0, RolloutRequested("n", "v2"))
    assert isinstance(alert, Alert)
    assert "too many" in alert.cause
    assert rollout.size() <= rollout.size_most()


def test_a_state_goes_on_with_another_clock() -> None:
    rollout = fleet(2, 2)
    request(rollout, now_ns=5 * S)
    rollout.up(6 * S, spec(2, "v2"))
    state = rollout.state(7 * S)
    assert_integers(msgspec.msgpack.decode(msgspec.msgpack.encode(state)))
    later = Rollout(Section())
    later.load(state, 100 * S)
    assert later.state(100 * S) == state
    assert later.deadline_ns() == (rollout.deadline_ns() or 0) + 93 * S
    assert not later.allowed(2)
    assert list(later.warmed(101 * S, Warmed(2, "v2"))) == []
    assert len(bring_up(later, 3)) == 4
