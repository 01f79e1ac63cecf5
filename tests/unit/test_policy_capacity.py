"""Capacity: the forecast's floor, the loop above it, giving up slowly, replacing what is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.capacity import Capacity, CapacityState, Seen, pool_of, share_card
from policy.decisions import Rotated, Scaled, Start, Stop
from policy.events import Forecasted, Standby
from policy.facts import Illegal
from policy.parameters.capacity import Capacity as Section
from tests.policy_support import MS, S, up

if TYPE_CHECKING:
    from collections.abc import Iterable

START = 100 * S


def standby(replica: int, **changes: Any) -> Standby:
    fields: dict[str, Any] = {
        "replica": replica, "name": f"r{replica}", "models": ("m",), "start_ns": START,
    }  # fmt: skip
    return Standby(**(fields | changes))


def capacity(running: int = 1, standbys: int = 9, **section: Any) -> Capacity:
    """Replicas 0.. run, the standbys follow. Without memory, so that every look counts alone."""
    memories = {"load_memory_ms": 1, "trend_memory_ms": 1, "mix_memory_ms": 1}
    made = Capacity(msgspec.convert(memories | section, Section))
    for replica in range(running):
        made.up(0, up(replica, models=("m",)))
    for replica in range(running, running + standbys):
        made.standby(0, standby(replica))
    return made


def seen(replicas_up: int, work: int, **changes: Any) -> Seen:
    """A load of ``work`` thousandths of a replica, of 10 tokens a second each."""
    fields: dict[str, Any] = {
        "pool": "m", "replicas_up": replicas_up, "busy_permille": 100, "queued": 0, "wait_ns": 0,
        "tokens_per_s": 10 * work, "work_permille": work,
    }  # fmt: skip
    return Seen(**(fields | changes))


def forecast(*tokens: int, every_ns: int = 60 * S) -> Forecasted:
    """Tokens per second, at once and then every minute; the upper quantile is a tenth more."""
    horizons = tuple(every_ns * step for step in range(len(tokens)))
    upper = tuple(value * 11 // 10 for value in tokens)
    return Forecasted(horizons, tokens, upper, tokens, upper)


def started(decisions: object) -> list[int]:
    assert isinstance(decisions, (list, tuple))
    return [decision.replica for decision in decisions if isinstance(decision, Start)]


def drained(decisions: object) -> list[int]:
    assert isinstance(decisions, (list, tuple))
    return [
        decision.replica
        for decision in decisions
        if isinstance(decision, Rotated) and decision.state == "draining"
    ]


def run_up(made: Capacity, replicas: Iterable[int], now_ns: int = 0) -> None:
    """Standbys that someone has started."""
    for replica in replicas:
        made.up(now_ns, up(replica, models=("m",)))


# When it looks


def test_a_fleet_without_standbys_and_forecasts_has_no_loop() -> None:
    made = capacity(running=3, standbys=0)
    assert made.deadline_ns() is None
    assert not made.due_loop(10 * S)
    made.forecast(10 * S, forecast(100))
    assert made.due_loop(10 * S)


def test_it_looks_every_five_seconds() -> None:
    made = capacity()
    made.loop(3 * S, [seen(1, 100)])
    assert made.deadline_ns() == 8 * S
    assert not made.due_loop(8 * S - 1)
    assert made.due_loop(8 * S)
    assert made.ticked(8 * S) == ()


def test_a_pool_that_is_not_shown_or_not_known_is_left_alone() -> None:
    made = capacity()
    assert made.loop(0, []) == []
    assert made.loop(5 * S, [seen(1, 9000, pool="other")]) == []


# The loop above the floor


@pytest.mark.parametrize(
    ("figures", "wanted", "why"),
    [({"work": 790}, 1, "load"), ({"work": 810}, 2, "load"), ({"work": 4000}, 5, "load"),
     ({"work": 700, "wait_ns": 30 * S}, 2, "load"),
     ({"work": 100, "busy_permille": 1800, "queued": 3}, 3, "busy")],
)  # fmt: skip
def test_load_waiting_work_and_full_replicas_ask_for_more(
    figures: dict[str, int], wanted: int, why: str
) -> None:
    made = capacity()
    decisions = made.loop(0, [seen(1, **figures)])
    assert decisions[0] == Scaled("m", wanted, why)
    assert started(decisions) == list(range(1, wanted))


def test_what_was_started_is_not_started_again() -> None:
    made = capacity()
    assert started(made.loop(0, [seen(1, 3000)])) == [1, 2, 3]
    assert made.loop(5 * S, [seen(1, 3000)]) == []


def test_a_start_that_never_ends_is_not_counted_on() -> None:
    made = capacity()
    assert started(made.loop(0, [seen(1, 1000)])) == [1]
    assert made.loop(300 * S, [seen(1, 1000)]) == []
    assert started(made.loop(330 * S, [seen(1, 1000)])) == [2]


def test_a_steep_rise_is_taken_to_go_on_while_a_replica_starts() -> None:
    sections: dict[str, Any] = {"trend_memory_ms": 100_000, "rule": "reactive"}
    steep, flat = capacity(**sections), capacity(**sections, trend_least_permille=100_000)
    for made in (steep, flat):
        made.loop(0, [seen(1, 400)])
    assert made.loop(5 * S, [seen(1, 700)]) == []
    assert started(steep.loop(5 * S, [seen(1, 700)])) == [1]


def test_standbys_that_start_soonest_go_first() -> None:
    made = capacity(standbys=2)
    made.standby(0, standby(7, start_ns=START // 2))
    assert started(made.loop(0, [seen(1, 1500)])) == [7]


def test_never_more_than_the_most() -> None:
    assert len(started(capacity(most_replicas=4).loop(0, [seen(1, 50_000)]))) == 3


# The forecast's floor


def test_the_floor_is_for_what_comes_until_a_replica_is_there() -> None:
    made = capacity(margin_ms=60_000)
    made.loop(0, [seen(1, 500)])  # 5000 tokens/s take half a replica
    made.forecast(0, forecast(5000, 5000, 5000, 30_000, 90_000))
    decisions = made.loop(5 * S, [seen(1, 500)])
    # 165 s from now it is at three quarters of its way to 33,000: 26,125 tokens/s, 2.61 replicas
    # of work, at nine tenths each.
    assert decisions[0] == Scaled("m", 3, "forecast")
    assert started(decisions) == [1, 2]


def test_the_floor_never_holds_the_loop_down() -> None:
    made = capacity()
    made.forecast(0, forecast(100, 100, 100))
    assert made.loop(0, [seen(1, 3000)])[0] == Scaled("m", 4, "load")


def test_the_median_can_be_the_floor() -> None:
    made = capacity(floor_quantile_permille=0, floor_work_permille=1000)
    made.forecast(0, forecast(20_000, 20_000))
    assert made.loop(0, [seen(1, 500)])[0] == Scaled("m", 2, "forecast")


def test_a_forecast_that_has_run_out_asks_for_nothing() -> None:
    made = capacity(down_window_ms=0)
    made.forecast(0, forecast(40_000, 40_000))
    assert made.loop(0, [seen(1, 500)])[0] == Scaled("m", 5, "forecast")
    assert made.loop(61 * S, [seen(1, 500)])[0] == Scaled("m", 1, "load")


def test_pools_share_a_forecast_as_they_share_the_load() -> None:
    made = capacity(floor_quantile_permille=0, floor_work_permille=1000)
    made.up(0, up(20, models=("n",)))
    made.forecast(0, forecast(40_000, 40_000))
    both = [seen(1, 750), seen(1, 250, pool="n")]
    signals = [one for one in made.loop(0, both) if isinstance(one, Scaled)]
    assert signals == [Scaled("m", 3, "forecast"), Scaled("n", 1, "load")]


def test_a_start_that_took_longer_is_reckoned_with() -> None:
    made = capacity(margin_ms=0)
    made.loop(0, [seen(1, 1000)])
    made.up(250 * S, up(1, models=("m",)))
    made.forecast(250 * S, forecast(10_000, 10_000, 10_000, 10_000, 40_000, 40_000))
    assert made.loop(250 * S, [seen(2, 1000)])[0] == Scaled("m", 5, "forecast")


@pytest.mark.parametrize(
    "event",
    [Forecasted((0, 1), (1,), (1,), (1,), (1,)), Forecasted((5, 5), *[(1, 1)] * 4),
     Forecasted((-1,), *[(1,)] * 4), Forecasted((0,), *[(-1,)] * 4),
     Forecasted((1 << 62,), *[(1,)] * 4)],
)  # fmt: skip
def test_a_malformed_forecast_changes_nothing(event: Forecasted) -> None:
    made = capacity()
    made.forecast(0, forecast(5, 6))
    before = made.state(0)
    with pytest.raises(Illegal):
        made.forecast(0, event)
    assert made.state(0) == before


# Turbo's extra


def test_turbo_grows_a_minute_ahead_of_a_peak_until_it_has_passed() -> None:
    made = capacity()
    made.forecast(0, forecast(100, 100, 100, 100, 200, 200, 100))
    assert made.turbo_extra_permille(180 * S - 1) == 0
    assert made.turbo_extra_permille(180 * S) == 300
    made.forecast(240 * S, forecast(200, 200, 100))
    assert made.turbo_extra_permille(240 * S) == 300
    made.forecast(360 * S, forecast(100, 100, 100))
    assert made.turbo_extra_permille(360 * S) == 0


def test_a_rise_that_is_small_or_no_longer_expected_is_no_peak() -> None:
    made = capacity()
    made.forecast(0, forecast(100, 110, 119))
    assert made.turbo_extra_permille(120 * S) == 0
    made.forecast(0, forecast(100, 100, 100, 200))
    made.forecast(60 * S, forecast(100, 100, 100))
    assert made.turbo_extra_permille(180 * S) == 0
    made.forecast(0, forecast(100, 200))
    assert made.turbo_extra_permille(60 * S) == 300
    made.forecast(60 * S, forecast())
    assert made.turbo_extra_permille(60 * S) == 0


# Giving up


def busy_then_quiet(**section: Any) -> tuple[Capacity, int]:
    """Five replicas are up; from now on one is enough."""
    made = capacity(**section)
    made.loop(0, [seen(1, 4000)])
    run_up(made, range(1, 5), 100 * S)
    return made, 105 * S


def test_less_must_have_been_enough_for_a_while() -> None:
    made, now_ns = busy_then_quiet()
    made.loop(now_ns - 5 * S, [seen(5, 4000)])
    while now_ns <= 400 * S:
        assert made.loop(now_ns, [seen(5, 500)]) == []
        now_ns += 5 * S
    decisions = made.loop(now_ns, [seen(5, 500)])
    assert decisions[0] == Scaled("m", 1, "load")
    assert drained(decisions) == [4, 3, 2, 1]


def test_those_that_stay_must_bear_the_load() -> None:
    made, now_ns = busy_then_quiet(down_window_ms=0)
    assert drained(made.loop(now_ns, [seen(5, 500, queued=1)])) == []
    # Two of the five are ejected, and the three that work are nearly full.
    assert drained(made.loop(now_ns + 5 * S, [seen(3, 500, busy_permille=800)])) == []
    assert drained(made.loop(now_ns + 10 * S, [seen(5, 500, busy_permille=300)])) == [4, 3, 2]


def test_what_never_was_a_standby_is_never_given_up() -> None:
    made = capacity(running=5, standbys=1, down_window_ms=0)
    assert drained(made.loop(0, [seen(5, 100)])) == []


def test_what_was_forgotten_and_comes_up_by_itself_is_never_given_up() -> None:
    made, now_ns = busy_then_quiet(down_window_ms=0)
    for replica in (1, 2, 3, 4):
        made.down(now_ns, replica)
        made.forget(replica)
        made.up(now_ns, up(replica))
    assert drained(made.loop(now_ns, [seen(5, 500)])) == []


def test_a_draining_replica_is_stopped_when_it_is_empty() -> None:
    made, now_ns = busy_then_quiet(down_window_ms=0)
    assert made.emptied(now_ns, 4) == ()
    made.loop(now_ns, [seen(5, 3100)])
    assert made.draining(4)
    assert made.emptied(now_ns, 4) == (Stop(4),)
    assert made.emptied(now_ns, 4) == ()
    assert not made.draining(4)
    made.down(now_ns, 4)
    made.standby(now_ns, standby(4))
    assert 4 in started(made.loop(now_ns + 5 * S, [seen(4, 4000)]))


def test_what_drains_comes_back_before_a_standby_is_started() -> None:
    made, now_ns = busy_then_quiet(down_window_ms=0)
    made.loop(now_ns, [seen(5, 3100)])
    decisions = made.loop(now_ns + 5 * S, [seen(4, 4500)])
    assert decisions[1:] == [Rotated(4, "in", "needed"), Start(5)]
    assert not made.draining(4)


# Replicas that go otherwise


def test_a_standby_replaces_a_lost_replica_at_once() -> None:
    made = capacity(running=2)
    assert made.lost(7 * MS, 0) == [Start(2)]
    assert made.lost(7 * MS, 0) == ()
    assert made.lost(7 * MS, 99) == ()


def test_a_lost_replica_that_was_too_many_is_not_replaced() -> None:
    made, now_ns = busy_then_quiet(down_window_ms=0)
    made.loop(now_ns, [seen(5, 500, queued=1)])  # one would do, but nothing drains yet
    assert made.lost(now_ns, 1) == []


def test_a_replica_that_always_runs_is_replaced_even_when_fewer_would_do() -> None:
    made = capacity(running=3)
    made.loop(0, [seen(3, 500)])  # one would do
    assert made.lost(1 * S, 0) == [Start(3)]
    run_up(made, range(3, 4))
    assert not drained(made.loop(400 * S, [seen(3, 500)])), "it has the other's place"
    made.standby(401 * S, standby(0))
    assert made.lost(402 * S, 3) == [Start(0)]


def test_a_dead_replica_is_made_up_for_by_the_next_loop() -> None:
    made = capacity(running=3)
    made.loop(0, [seen(3, 2300)])
    made.down(1 * S, 2)
    assert started(made.loop(5 * S, [seen(2, 2300)])) == [3]


def test_a_start_that_fails_is_made_up_for_at_once() -> None:
    made = capacity(standbys=4)
    assert started(made.loop(0, [seen(1, 2000)])) == [1, 2]
    assert made.lost(1 * S, 1) == [Start(3)]
    assert made.lost(1 * S, 1) == ()
    made.down(1 * S, 1)
    assert made.lost(2 * S, 2) == [Start(4)]
    assert made.lost(3 * S, 4) == []  # there is no other
    made.standby(4 * S, standby(1))
    assert started(made.loop(5 * S, [seen(1, 2000)])) == [1]


def test_a_start_that_fails_in_the_place_of_a_replica_that_always_runs_is_made_up_for() -> None:
    made = capacity(running=2)
    made.loop(0, [seen(2, 500)])  # one would do
    assert made.lost(1 * S, 0) == [Start(2)]
    assert made.lost(2 * S, 2) == [Start(3)]


def test_a_start_that_takes_too_long_does_not_cost_a_place() -> None:
    made = capacity(running=2, standbys=2, down_window_ms=0)
    made.loop(0, [seen(2, 10)])
    assert made.lost(1 * S, 0) == [Start(2)]
    assert started(made.loop(1000 * S, [seen(1, 10)])) == [3]
    run_up(made, [2, 3])
    assert drained(made.loop(1005 * S, [seen(3, 10)])) == [2]


def test_a_standby_that_is_down_is_not_started() -> None:
    made = capacity(standbys=2)
    assert made.lost(0, 1) == ()
    made.down(0, 1)
    assert made.lost(1 * S, 0) == [Start(2)]
    made.standby(2 * S, standby(1))
    assert made.lost(3 * S, 2) == [Start(1)]


def test_what_hung_and_answers_again_counts_and_who_stood_for_it_may_go() -> None:
    made = capacity(running=3, down_window_ms=0)
    assert made.lost(0, 0) == [Start(3)]
    run_up(made, range(3, 4))
    assert not drained(made.loop(5 * S, [seen(3, 500)]))
    made.back(0)
    made.back(1)  # was never away
    assert drained(made.loop(10 * S, [seen(4, 500)])) == [3]


def test_what_takes_the_place_of_a_replica_that_always_runs_always_runs_too() -> None:
    made = capacity(running=2, standbys=1, down_window_ms=0)
    made.taken(0, 2)
    run_up(made, range(2, 3))
    made.succeed(2, 1)
    made.succeed(2, 99)  # of one of them nothing is known
    assert drained(made.loop(0, [seen(3, 500)])) == [1]  # if anything, what was put aside


def awaiting() -> Capacity:
    """Two always run. A rollout put 2 in the place of 0, and 2 died: it is a standby again, and so
    is 0. What takes the place is still to be told."""
    made = capacity(running=2, standbys=1, down_window_ms=0)
    made.taken(0, 2)
    run_up(made, [2])
    made.succeed(2, 0)
    made.down(1 * S, 0)
    made.awaits(1 * S, 2)
    made.down(1 * S, 2)
    for replica in (0, 2):
        made.standby(2 * S, standby(replica))
    return made


@pytest.mark.parametrize("coming", [0, 2])
def test_the_place_of_what_died_is_kept_though_it_is_a_standby_by_then(coming: int) -> None:
    made = awaiting()
    made.load(made.state(2 * S), 2 * S)
    made.taken(2 * S, coming)
    run_up(made, [coming])
    made.succeed(coming, 2)
    for at_s in (5, 10, 400):
        assert not drained(made.loop(at_s * S, [seen(2, 10)]))
    made.up(400 * S, up(2 - coming, models=("m",)))  # a standby that someone started
    assert drained(made.loop(405 * S, [seen(3, 10)])) == [2 - coming]


def test_a_place_that_nobody_takes_after_all_is_taken_by_a_standby() -> None:
    made = awaiting()
    assert made.forgone(3 * S, 2) == [Start(0)]
    assert made.forgone(3 * S, 2) == made.forgone(3 * S, 99) == ()
    run_up(made, [0])
    assert not drained(made.loop(400 * S, [seen(2, 10)]))


def test_a_place_that_nobody_can_take_is_taken_as_soon_as_somebody_can() -> None:
    made = awaiting()
    for replica in (0, 2):
        made.taken(3 * S, replica)
    made.forgo_all()
    assert not started(made.loop(5 * S, [seen(1, 10)]))
    made.standby(6 * S, standby(2))
    assert started(made.loop(10 * S, [seen(1, 10)])) == [2]
    run_up(made, [2])
    assert not drained(made.loop(400 * S, [seen(2, 10)]))
    made.standby(400 * S, standby(0))
    assert not started(made.loop(405 * S, [seen(2, 10)]))


def test_what_is_up_again_takes_the_place_that_nobody_took() -> None:
    made = awaiting()
    made.up(3 * S, up(2, models=("m",)))
    assert made.forgone(3 * S, 2) == ()
    for at_s in (5, 10, 400):
        assert not drained(made.loop(at_s * S, [seen(2, 10)]))


def test_what_hung_and_is_ended_before_anything_took_its_place_is_replaced() -> None:
    made = capacity(running=2, standbys=1, down_window_ms=0)
    made.awaits(0, 1)
    assert made.lost(1 * S, 1) == [Start(2)]
    assert made.lost(1 * S, 1) == ()
    run_up(made, [2])
    assert not drained(made.loop(5 * S, [seen(2, 10)]))
    made.up(5 * S, up(1, models=("m",)))
    assert drained(made.loop(10 * S, [seen(3, 10)])) == [1]


def test_what_hung_and_answers_before_anything_took_its_place_has_it() -> None:
    made = capacity(running=2, standbys=1, down_window_ms=0)
    made.awaits(0, 1)
    made.back(1)
    assert not drained(made.loop(5 * S, [seen(2, 10)]))
    assert made.forgone(5 * S, 1) == ()


def test_a_place_that_is_open_is_not_forgotten_for_want_of_room() -> None:
    made = capacity(running=2, standbys=1, replicas_max=3)
    made.awaits(0, 0)
    made.down(0, 1)
    made.standby(0, standby(5))  # there is room: 1 is forgotten
    assert made.forgone(0, 0) == [Start(2)]


def test_a_card_that_broke_is_not_started_on_if_there_is_another() -> None:
    made = capacity(running=0, standbys=0)
    made.up(0, up(0, models=("m",), domain="host0/card0/mig0"))
    for replica, place in enumerate(("host0/card0/mig1", "host0/card2", "host0/card0+1"), 1):
        made.standby(0, standby(replica, domain=place, start_ns=START if replica == 2 else S))
    assert made.lost(0, 0, card=True) == [Start(2)]
    made.down(0, 2)
    made.up(1 * S, up(0, models=("m",), domain="host0/card0/mig0"))
    assert made.lost(1 * S, 0, card=True) == [Start(1)]  # better than none
    made.standby(2 * S, standby(1, domain="host0/card0/mig1", start_ns=S))
    made.standby(2 * S, standby(2, domain="host0/card2"))
    made.up(2 * S, up(0, models=("m",), domain="host0/card0/mig0"))
    assert made.lost(2 * S, 0) == [Start(1)]  # it was not the card


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [("host0/card3", "host0/card3", True), ("host0/card3/mig1", "host0/card3", True),
     ("host0/card3/mig1", "host0/card3/mig2", True), ("host0/card2+3", "host0/card3/mig0", True),
     ("host0/card3", "host1/card3", False), ("host0/card1", "host0/card10", False),
     ("host0/card0+1", "host0/card2+3", False), ("host0", "host0", True),
     ("host0", "host0/card0", False), ("", "", False), ("", "host0/card0", False)],
)  # fmt: skip
def test_which_domains_share_a_card(one: str, other: str, shared: bool) -> None:
    assert share_card(one, other) is share_card(other, one) is shared


def test_a_snapshot_of_before_there_were_domains_can_be_read() -> None:
    made = capacity()
    wire = msgspec.to_builtins(made.state(0))
    wire[2] = [machine[:6] for machine in wire[2]]
    assert msgspec.convert(wire, CapacityState) == made.state(0)


def test_what_another_mechanism_took_is_left_alone() -> None:
    made = capacity(standbys=2)
    made.taken(0, 1)
    assert started(made.loop(0, [seen(1, 9000)])) == [2]


def test_a_replica_that_cannot_be_known_is_ignored() -> None:
    made = capacity(running=1, standbys=1, replicas_max=2)
    made.standby(0, standby(2))
    assert made.size() <= made.size_most()
    assert started(made.loop(0, [seen(1, 9000)])) == [1]
    made.down(0, 0)  # there is room again
    made.standby(0, standby(2))
    assert started(made.loop(5 * S, [seen(1, 9000)])) == [2]


def test_another_policy_takes_over_replicas_and_forecast_but_no_load() -> None:
    old, now_ns = busy_then_quiet(down_window_ms=0)
    old.forecast(now_ns, forecast(100, 200, 300))
    old.loop(now_ns, [seen(5, 3100)])
    old.down(now_ns, 0)
    new = capacity(running=0, standbys=0, replicas_max=9, horizons_max=2)
    new.adopt(old.state(now_ns), 0)
    assert new.draining(4)
    assert new.due_loop(0)
    assert new.size() == 9 + 2  # of the ten, the one that is away is forgotten
    assert started(new.loop(0, [seen(3, 4000)])) == [5]


def test_pools_are_named_by_what_they_serve() -> None:
    assert pool_of((), False) == ""
    assert pool_of(("a", "b"), False) == "a+b"
    assert pool_of(("a",), True) == "embeddings:a"


# Kubernetes' rule


@pytest.mark.parametrize(
    ("work", "wanted"), [(2800, 4), (3070, 4), (3090, 5), (2530, 4), (2500, 4), (5600, 8)]
)
def test_hpa_follows_the_average_outside_its_tolerance(work: int, wanted: int) -> None:
    made = capacity(running=4, rule="hpa", hpa_target_permille=700)
    assert made.loop(0, [seen(4, work)])[0] == Scaled("m", wanted, "hpa")
    assert made.deadline_ns() == 15 * S


def test_hpa_can_go_by_what_replicas_hold() -> None:
    made = capacity(running=2, rule="hpa", hpa_metric="held", hpa_target_permille=500)
    assert made.loop(0, [seen(2, 0, busy_permille=1400)])[0] == Scaled("m", 6, "hpa")
