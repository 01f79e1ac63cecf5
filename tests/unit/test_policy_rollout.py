"""Rollout: the new version beside the old one, verified, warmed, switched to, and the old ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.decisions import Alert, Rotated, Start, Stop, Warm
from policy.events import RolloutRequested, Standby, Warmed
from policy.parameters.rollout import Rollout as Section
from policy.rollout import Rollout, RolloutState
from tests.policy_support import S, assert_integers, up

if TYPE_CHECKING:
    from collections.abc import Sequence

WHY = "rollout of v2"


def standby(replica: int, **changes: Any) -> Standby:
    fields: dict[str, Any] = {"models": ("m",), "start_ns": 30 * S, "version": "v1"}
    return Standby(replica=replica, name=f"r{replica}", **(fields | changes))


def spec(replica: int, version: str = "v1") -> Any:
    return up(replica, models=("m",), version=version)


def fleet(olds: int, standbys: int, isolated: Sequence[int] = (), **section: Any) -> Rollout:
    """Nothing is watched unless ``watch_ms`` is given."""
    section = {"watch_ms": 0} | section
    rollout = Rollout(msgspec.convert(section, Section), isolated.__contains__)
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


# What does not start


@pytest.mark.parametrize(
    ("warmed", "cause"),
    [(Warmed(2, "v2", ok=False), "the new replica did not start"),
     (Warmed(2, "v1", ok=False), "another version was loaded")],
)  # fmt: skip
def test_a_new_replica_that_does_not_start_ends_the_rollout_at_once(
    warmed: Warmed, cause: str
) -> None:
    rollout = fleet(2, 2)
    request(rollout)
    assert rollout.warmed(S, Warmed(2, "v2")) == ()  # of an earlier life
    [alert] = rollout.warmed(S, warmed)
    assert isinstance(alert, Alert)
    assert alert.cause == cause
    assert alert.figures == (("replica", 2), ("replaced", 0), ("left", 2))
    assert rollout.deadline_ns() is None
    assert list(rollout.up(2 * S, spec(3, "v2"))) == [Stop(3)]
    rollout.standby(2 * S, standby(2))  # its old version again
    assert request(rollout) == [Start(2, "v2")]


def test_a_standby_that_cannot_be_started_any_more_is_not() -> None:
    rollout = fleet(2, 2)
    assert list(rollout.down(0, 2, died=True)) == []
    assert request(rollout) == [Start(3, "v2")]
    rollout.down(S, 3, died=True)
    [alert] = request(rollout, "v3")
    assert isinstance(alert, Alert)
    assert alert.cause == "no standby to start"
    rollout.standby(2 * S, standby(2))
    assert request(rollout) == [Start(2, "v2")]


def test_a_standby_that_someone_else_starts_comes_up_with_what_is_served() -> None:
    rollout = fleet(0, 0)
    for replica, version in enumerate(("v1", "v2", "v2", "v1", "v2")):
        rollout.up(0, spec(replica, version))
    for replica, version in enumerate(("v1", "v3", ""), 5):
        rollout.standby(0, standby(replica, version=version))
    rollout.standby(0, standby(8, version="v3", pooling=True))
    assert [rollout.taken(replica) for replica in range(5, 10)] == ["", "v2", "", "", ""]


# Watched

BACK = "rollback of v2"


def watched(olds: int = 2, standbys: int = 2, **section: Any) -> Rollout:
    """All new requests went to the new version 2 s ago."""
    rollout = fleet(olds, standbys, **({"watch_ms": 60_000} | section))
    request(rollout)
    for replica in range(olds, 2 * olds):
        bring_up(rollout, replica)
    return rollout


def doubt(rollout: Rollout, how: str, replica: int = 2) -> list[Any]:
    if how == "breaker":
        return list(rollout.breaker_opened(3 * S, "m", "v2", (("bad", 5), ("total", 9))))
    if how == "down":
        return list(rollout.down(3 * S, replica, died=True))
    return list(rollout.doubted(3 * S, replica, how))


def test_a_good_version_lets_the_old_one_go_when_it_was_watched() -> None:
    rollout = watched()
    assert rollout.deadline_ns() == 62 * S
    assert [rollout.draining(replica) for replica in range(4)] == [True, True, False, False]
    assert rollout.emptied(3 * S, 0) == ()
    assert list(rollout.ticked(62 * S - 1)) == []
    assert list(rollout.ticked(62 * S)) == []
    assert rollout.emptied(62 * S, 0) == (Stop(0),)
    assert rollout.emptied(62 * S, 1) == (Stop(1),)
    for replica in (0, 1):
        rollout.down(63 * S, replica)
        rollout.standby(63 * S, standby(replica))
    assert rollout.deadline_ns() is None
    assert doubt(rollout, "silent") == doubt(rollout, "breaker") == []


@pytest.mark.parametrize(
    ("how", "cause", "figures"),
    [
        ("failures", "a new replica is out: failures", (("replica", 2),)),
        ("silent", "a new replica is out: silent", (("replica", 2),)),
        ("hung", "a new replica is out: hung", (("replica", 2),)),
        ("down", "a new replica went down", (("replica", 2),)),
        ("breaker", "a breaker opened", (("bad", 5), ("total", 9))),
    ],
)
def test_a_bad_version_is_rolled_back_at_one_instant(
    how: str, cause: str, figures: tuple[tuple[str, int], ...]
) -> None:
    rollout = watched()
    *moved, alert = doubt(rollout, how)
    leaving = [2, 3] if how != "down" else [3]
    assert [each for each in moved if each.state == "in"] == [
        Rotated(0, "in", BACK), Rotated(1, "in", BACK),
    ]  # fmt: skip
    assert [each for each in moved if each.state == "draining"] == [
        Rotated(replica, "draining", BACK) for replica in leaving
    ]
    assert alert == Alert(
        "rollout m", f"rolled back: {cause}", (*figures, ("back", 2), ("left", 0)),
        "back to v1: it serves again",
    )  # fmt: skip
    assert [rollout.allowed(replica) for replica in range(4)] == [True, True, False, False]
    for replica in leaving:
        assert rollout.emptied(4 * S, replica) == (Stop(replica),)
        rollout.down(4 * S, replica)
        rollout.standby(4 * S, standby(replica, version="v2"))
    assert rollout.deadline_ns() is None  # a rollback is not watched
    if how == "down":
        assert list(rollout.up(5 * S, spec(2, "v2"))) == [Stop(2)]


@pytest.mark.parametrize("how", ["slow", "retry", "xid_fatal", "backpressure"])
def test_what_says_nothing_about_the_version_changes_nothing(how: str) -> None:
    rollout = watched()
    assert doubt(rollout, how) == []
    assert doubt(rollout, "silent", replica=0) == []  # an old one
    assert list(rollout.breaker_opened(3 * S, "m", "v1", ())) == []
    assert list(rollout.breaker_opened(3 * S, "n", "v2", ())) == []
    assert list(rollout.down(3 * S, 3, died=True, card=True)) == []
    assert list(rollout.down(3 * S, 2)) == []
    assert rollout.deadline_ns() == 62 * S


def test_a_breaker_of_the_whole_model_counts_while_nothing_else_serves_it() -> None:
    rollout = watched()
    *_, alert = rollout.breaker_opened(3 * S, "m", "", ())
    assert alert.cause == "rolled back: a breaker opened"


def test_the_worst_replica_leaves_first_and_the_rest_is_a_rollout_in_reverse() -> None:
    """Three waves of one: two old replicas are stopped, and started again as they were."""
    rollout = fleet(3, 1, watch_ms=60_000)
    [start] = request(rollout)
    for leaving in (0, 1):
        bring_up(rollout, start.replica)
        assert rollout.emptied(3 * S, leaving) == (Stop(leaving),)
        rollout.down(3 * S, leaving)
        [start] = rollout.standby(3 * S, standby(leaving))
    bring_up(rollout, start.replica)
    rollout.standby(3 * S, standby(5, version="v2"))
    assert sorted(replica for replica in range(6) if rollout.allowed(replica)) == [0, 1, 3, 4, 5]
    assert rollout.emptied(3 * S, 2) == ()
    first, second, third, alert = doubt(rollout, "hung", replica=1)
    assert [first, second] == [Rotated(2, "in", BACK), Rotated(1, "draining", BACK)]
    assert third == Start(5, "v1")
    assert alert.figures == (("replica", 1), ("back", 1), ("left", 2))
    assert alert.action == "back to v1: standbys are started with it"
    assert bring_up(rollout, 5, "v1") == [
        Rotated(5, "in", "rollout of v1"), Rotated(0, "draining", "rollout of v1"),
    ]  # fmt: skip
    for replica in (1, 0):
        rollout.emptied(4 * S, replica)
        rollout.down(4 * S, replica)
    [start] = rollout.standby(5 * S, standby(1, version="v2"))
    assert start == Start(1, "v1")
    assert Rotated(3, "draining", "rollout of v1") in bring_up(rollout, 1, "v1")
    rollout.emptied(6 * S, 3)
    rollout.down(6 * S, 3)
    assert rollout.deadline_ns() is None


@pytest.mark.parametrize("how", ["breaker", "failures", "hung", "down"])
def test_a_version_that_is_bad_after_the_first_wave_goes_no_further(how: str) -> None:
    """What it replaced still ends what it had: it takes requests again."""
    rollout = fleet(3, 1, watch_ms=60_000)
    request(rollout)
    bring_up(rollout, 3)
    assert rollout.covers(3)
    first, *_, alert = doubt(rollout, how, replica=3)
    assert first == Rotated(0, "in", BACK)
    assert alert.cause.startswith("rolled back: ")
    assert alert.figures[-2:] == (("back", 1), ("left", 0))
    assert [one for one in range(4) if rollout.allowed(one)][:3] == [0, 1, 2]
    assert rollout.undone == ["m"]


@pytest.mark.parametrize("how", ["breaker", "failures"])
@pytest.mark.parametrize("stage", ["starting", "warming"])
def test_a_version_that_is_bad_in_a_later_wave_is_replaced_in_reverse(how: str, stage: str) -> None:
    """What it replaced has ended: the wave that had begun is not put to use, but for going back."""
    rollout = fleet(3, 1, watch_ms=60_000)
    request(rollout)
    bring_up(rollout, 3)
    rollout.emptied(3 * S, 0)
    rollout.down(3 * S, 0)
    assert list(rollout.standby(3 * S, standby(0))) == [Start(0, "v2")]
    if stage == "warming":
        rollout.up(3 * S, spec(0, "v2"))
    *stopped, alert = doubt(rollout, how, replica=3)
    assert alert.figures[-2:] == (("back", 0), ("left", 1))
    if stage == "starting":
        stopped = list(rollout.up(3 * S, spec(0, "v2")))
    assert stopped == [Stop(0)]
    assert list(rollout.warmed(3 * S, Warmed(0, "v2"))) == []
    assert list(rollout.breaker_opened(3 * S, "m", "v2", ())) == []  # it is on its way back
    rollout.down(4 * S, 0)
    assert list(rollout.standby(4 * S, standby(0, version="v2"))) == [Start(0, "v1")]
    assert bring_up(rollout, 0, "v1") == [
        Rotated(0, "in", "rollout of v1"), Rotated(3, "draining", "rollout of v1"),
    ]  # fmt: skip
    rollout.emptied(5 * S, 3)
    rollout.down(5 * S, 3)
    assert rollout.deadline_ns() is None
    assert [one for one in range(4) if rollout.allowed(one) and one != 3] == [0, 1, 2]


def test_the_place_of_a_new_replica_that_dies_between_waves_is_taken() -> None:
    """Nothing can take it at once: the next standby does, with the version from before."""
    rollout = fleet(3, 1, watch_ms=60_000)
    request(rollout)
    bring_up(rollout, 3)
    rollout.emptied(3 * S, 0)
    rollout.down(3 * S, 0)
    assert rollout.covers(3)
    [alert] = doubt(rollout, "down", replica=3)
    assert alert.cause == "rolled back: a new replica went down"
    assert alert.figures[-2:] == (("back", 0), ("left", 0))
    assert rollout.deadline_ns() is not None
    rollout.load(msgspec.convert(msgspec.to_builtins(rollout.state(3 * S)), RolloutState), 3 * S)
    assert list(rollout.standby(4 * S, standby(0))) == [Start(0, "v1")]
    assert list(rollout.up(4 * S, spec(3, "v2"))) == [Stop(3)]
    assert bring_up(rollout, 0, "v1") == [Rotated(0, "in", "rollout of v1")]
    assert rollout.exchanged[-1] == (0, 3)
    assert rollout.deadline_ns() is None
    assert [one for one in range(4) if rollout.allowed(one)] == [0, 1, 2]


def owing() -> Rollout:
    """Going back to v1; the place of 3, which is gone, is to be taken."""
    rollout = fleet(3, 1, watch_ms=60_000)
    request(rollout)
    bring_up(rollout, 3)
    rollout.emptied(3 * S, 0)
    rollout.down(3 * S, 0)
    doubt(rollout, "down", replica=3)
    assert rollout.forgone == []
    return rollout


def test_whose_place_nothing_of_a_rollout_takes_is_told() -> None:
    rollout = owing()
    assert list(rollout.standby(4 * S, standby(0))) == [Start(0, "v1")]
    rollout.warmed(5 * S, Warmed(0, "v1", ok=False))
    assert rollout.forgone == [3]
    rollout = owing()
    rollout.down(4 * S, 1)
    rollout.down(4 * S, 2)
    rollout.requested(4 * S, RolloutRequested("m", "v3"))
    assert rollout.forgone == [3]


def test_another_rollout_takes_over_which_place_is_to_be_taken() -> None:
    rollout = owing()
    assert request(rollout, "v3", 4 * S) == []
    assert list(rollout.standby(4 * S, standby(0))) == [Start(0, "v3")]
    rollout.exchanged.clear()
    assert Rotated(0, "in", "rollout of v3") in bring_up(rollout, 0, "v3")
    assert rollout.exchanged == [(0, 3)]
    assert [one for one in range(3) if rollout.allowed(one)] == [0, 1, 2]
    assert rollout.forgone == []


@pytest.mark.parametrize("how", ["breaker", "failures", "down"])
def test_between_waves_nothing_is_watched_where_nothing_is_to_be(how: str) -> None:
    rollout = fleet(3, 1)
    request(rollout)
    bring_up(rollout, 3)
    assert doubt(rollout, how, replica=3) == []
    assert list(rollout.breaker_opened(3 * S, "m", "", ())) == []


def test_what_is_kept_takes_the_place_of_what_died() -> None:
    """As many serve as before."""
    rollout = fleet(3, 1, watch_ms=60_000)
    [start] = request(rollout)
    for leaving in (0, 1):
        bring_up(rollout, start.replica)
        rollout.emptied(3 * S, leaving)
        rollout.down(3 * S, leaving)
        [start] = rollout.standby(3 * S, standby(leaving))
    bring_up(rollout, start.replica)
    assert [one for one in range(4) if rollout.allowed(one)] == [0, 1, 3]
    first, alert = doubt(rollout, "down", replica=3)
    assert first == Rotated(2, "in", BACK)
    assert alert.figures[-2:] == (("back", 1), ("left", 2))
    assert [one for one in (0, 1, 2) if rollout.allowed(one)] == [0, 1, 2]
    assert rollout.exchanged[-1] == (2, 3), "what is never given up is not the dead one any more"


def test_whoever_asks_for_the_old_version_while_it_is_kept_has_it_at_once() -> None:
    rollout = watched()
    assert request(rollout, "v1", 3 * S) == [
        Rotated(0, "in", BACK), Rotated(2, "draining", BACK),
        Rotated(1, "in", BACK), Rotated(3, "draining", BACK),
    ]  # fmt: skip
    assert request(rollout, "v1", 3 * S) == []


@pytest.mark.parametrize("how", ["breaker", "failures", "down", ""])
def test_an_old_replica_that_is_isolated_by_then_does_not_come_back(how: str) -> None:
    """What it replaced serves on until a standby takes its place."""
    isolated: list[int] = []
    rollout = fleet(2, 2, isolated, watch_ms=60_000)
    request(rollout)
    for replica in (2, 3):
        bring_up(rollout, replica)
    isolated.append(0)
    assert rollout.covers(2)
    decided = doubt(rollout, how) if how else request(rollout, "v1", 3 * S)
    moved = [(each.replica, each.state) for each in decided if isinstance(each, Rotated)]
    assert moved[0] == (1, "in")
    assert moved[1:] == ([] if how == "down" else [(2, "draining")])
    assert [one for one in (0, 1, 3) if rollout.allowed(one)] == [1, 3]
    assert rollout.emptied(4 * S, 0) == (Stop(0),), "it is kept no longer"
    rollout.down(4 * S, 0)
    if how != "down":
        rollout.emptied(4 * S, 2)
        rollout.down(4 * S, 2)
    assert list(rollout.standby(5 * S, standby(7))) == [Start(7, "v1")]
    assert Rotated(3, "draining", "rollout of v1") in bring_up(rollout, 7, "v1")


def test_where_all_that_is_kept_is_isolated_nothing_of_it_makes_up_for_a_loss() -> None:
    isolated: list[int] = []
    rollout = fleet(1, 1, isolated, watch_ms=60_000)
    request(rollout)
    bring_up(rollout, 1)
    assert rollout.covers(1)
    isolated.append(0)
    assert not rollout.covers(1)
    *_, alert = doubt(rollout, "failures", replica=1)
    assert alert.figures[-2:] == (("back", 0), ("left", 1))
    assert rollout.allowed(1)


def test_what_drains_and_is_isolated_does_not_come_back_for_another_rollout() -> None:
    isolated: list[int] = []
    rollout = fleet(3, 1, isolated)
    request(rollout)
    bring_up(rollout, 3)
    assert rollout.draining(0)
    isolated.append(0)
    request(rollout, "v1", 3 * S)
    assert rollout.draining(0)
    isolated.clear()
    request(rollout, "v2", 3 * S)
    assert Rotated(0, "in", "rollout of v1") in request(rollout, "v1", 3 * S)


def test_another_version_ends_the_watch_and_the_old_ones_go() -> None:
    rollout = watched()
    assert request(rollout, "v3", 3 * S) == []  # it waits for standbys
    assert rollout.emptied(3 * S, 0) == (Stop(0),)
    rollout.down(4 * S, 0)
    assert rollout.emptied(4 * S, 1) == (Stop(1),)
    rollout.down(4 * S, 1)
    assert list(rollout.standby(4 * S, standby(0))) == [Start(0, "v3")]
    assert doubt(rollout, "silent") == []


def test_an_old_replica_that_dies_while_it_is_kept_must_not_serve_again() -> None:
    rollout = watched()
    assert list(rollout.down(3 * S, 0, died=True)) == []
    assert list(rollout.up(4 * S, spec(0))) == [Stop(0)]
    rollout.down(5 * S, 0)
    rollout.standby(5 * S, standby(0))
    *moved, alert = doubt(rollout, "silent", replica=3)
    assert [(each.replica, each.state) for each in moved if isinstance(each, Rotated)] == [
        (1, "in"), (3, "draining"),
    ]  # fmt: skip
    assert Start(0, "v1") in moved
    assert alert.figures[-1] == ("left", 1)


def test_whose_loss_a_rollout_makes_up_for() -> None:
    rollout = watched()
    assert [rollout.covers(replica) for replica in range(5)] == [True, True, True, True, False]
    rollout.down(3 * S, 0)
    rollout.down(3 * S, 1)
    assert not rollout.covers(2)
    assert not watched(watch_ms=0).covers(2)


def test_a_rollback_may_fail_and_then_goes_no_further() -> None:
    rollout = watched()
    for replica in (0, 1):
        rollout.down(2 * S, replica)
        rollout.standby(2 * S, standby(replica))
    *starts, alert = doubt(rollout, "breaker")
    assert starts == [Start(0, "v1"), Start(1, "v1")]
    assert alert.figures[-2:] == (("back", 0), ("left", 2))
    [alert] = rollout.warmed(4 * S, Warmed(0, "v1", ok=False))
    assert alert.cause == "the new replica did not start"
    assert [rollout.allowed(replica) for replica in (2, 3)] == [True, True]
    assert rollout.deadline_ns() is None


def test_a_watch_goes_on_with_another_clock() -> None:
    rollout = watched()
    state = rollout.state(7 * S)
    later = Rollout(Section())
    later.load(msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RolloutState), 100 * S)
    assert later.state(100 * S) == state
    assert later.deadline_ns() == 155 * S
    assert later.emptied(100 * S, 0) == ()
    assert doubt(later, "silent")[0] == Rotated(0, "in", BACK)


def test_a_snapshot_of_before_anything_was_watched_can_be_read() -> None:
    rollout = fleet(2, 2)
    request(rollout)
    bring_up(rollout, 2)
    bring_up(rollout, 3)
    state = rollout.state(0)
    wire = msgspec.to_builtins(state)
    wire[3] = [(replica, drain[:2]) for replica, drain in wire[3]]
    wire[5] = [move[:5] for move in wire[5]]
    read = msgspec.convert(wire, RolloutState)
    assert (read.draining, read.moves[0].undoes) == (state.draining, None)


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
