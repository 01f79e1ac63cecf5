"""Replicas come, hang, die and come back; each caller and the policy hear of it in order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from policy.decisions import (
    Abort,
    Decision,
    Dispatch,
    ReadProgress,
    Rotated,
    Settled,
    Start,
    Stop,
    Warm,
)
from policy.events import (
    Arrived,
    Event,
    Failed,
    Finished,
    FirstToken,
    Progress,
    ReplicaDown,
    ReplicaUp,
    Standby,
    Warmed,
)
from policy.outcomes import failed
from tests.support import (
    BARE,
    MS,
    ListLog,
    S,
    ScriptedPolicy,
    bare_fleet,
    engine_settings,
    flat_cost,
    play_rows,
)
from twin.faults import ColdStart, EngineHung, EngineKilled, GpuLost, SlowCard, StartFails
from twin.fleet import numbered
from twin.world import WorldError, WorldSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from twin.faults import Fault
    from twin.fleet import ReplicaSpec

STEP_NS = 1000
WAY_NS = 300
WAYS = replace(BARE, network_ns=WAY_NS)


def fleet(count: int = 1, **changes: Any) -> list[ReplicaSpec]:
    specs = bare_fleet(count, engine_settings(**changes), flat_cost(STEP_NS))
    return [replace(spec, cold_start_ns=50_000, version="v1") for spec in specs]


def served(
    more: Callable[[int, Event], list[Decision]] | None = None, to: int = 0
) -> ScriptedPolicy:
    """Every request goes to one replica at once; what fails is settled so; and ``more``."""

    def decide(now_ns: int, event: Event) -> list[Decision]:
        decisions: list[Decision] = []
        if isinstance(event, Arrived):
            decisions.append(Dispatch(event.request, to, ""))
        elif isinstance(event, Finished):
            decisions.append(Settled(event.request, "answered"))
        elif isinstance(event, Failed):
            decisions.append(failed(event.request, event.kind))
        return decisions + (more(now_ns, event) if more else [])

    return ScriptedPolicy(decide)


def told(log: ListLog, *kinds: type) -> list[tuple[int, Event]]:
    return [(now_ns, event) for now_ns, event, _ in log.records if isinstance(event, kinds)]


def seconds(ns: int) -> float:
    return ns / 1e9


# Death


def test_the_work_of_a_killed_engine_fails_one_by_one_and_then_it_is_down() -> None:
    """The third request is in the engine's queue, the first was answered before."""
    log = ListLog()
    rows = {"arrival_s": [0.0, 1e-5, 1e-5, 1e-5], "output_tokens": [2, 50, 50, 50]}
    kill = EngineKilled(at_s=seconds(20_500), on=0)
    _, results = play_rows(
        rows, fleet(max_num_seqs=2), served(), settings=WAYS, log=log, faults=[kill]
    )
    at_ns = 20_500 + WAY_NS
    after = [(now_ns, event) for now_ns, event, _ in log.records if now_ns >= 20_500]
    assert after[:4] == [
        (at_ns, Failed(1, 0, "replica_lost")),
        (at_ns, Failed(2, 0, "replica_lost")),
        (at_ns, Failed(3, 0, "replica_lost")),
        (at_ns, ReplicaDown(0, "killed")),
    ]
    assert isinstance(after[4][1], Standby)
    assert [result.outcome for result in results] == ["answered", *["failed"] * 3]
    assert results[1].scheduled_ns > 0
    assert results[1].output_tokens == 0


def test_an_answer_that_is_on_its_way_when_the_engine_dies_is_lost() -> None:
    log = ListLog()
    rows = {"arrival_s": [0.0], "output_tokens": [1]}
    kill = EngineKilled(at_s=seconds(WAY_NS + STEP_NS + 100), on=0)
    _, (result,) = play_rows(rows, fleet(), served(), settings=WAYS, log=log, faults=[kill])
    assert (result.outcome, result.why) == ("failed", "replica_lost")
    assert not told(log, FirstToken, Finished)


def test_a_supervised_engine_loads_its_model_again_and_works_with_an_empty_cache() -> None:
    log = ListLog()
    rows = {
        "arrival_s": [0.0, seconds(200_000), seconds(210_000)],
        "prompt_tokens": [9] * 3,
        "prefix_ids": [[1, 2]] * 3,
        "prefix_block_tokens": [4] * 3,
    }
    kill = EngineKilled(at_s=seconds(100_000), on="*", restart_s=seconds(7000))
    world, results = play_rows(rows, fleet(), served(), log=log, faults=[kill])
    ups = told(log, ReplicaUp)
    assert [now_ns for now_ns, _ in ups] == [0, 100_000 + 7000 + 50_000]
    assert not told(log, Standby)
    assert [result.cached_tokens for result in results] == [0, 0, 8]
    assert world.replicas[0].steps == 3  # over both lives


def test_a_request_sent_to_a_replica_that_is_gone_is_refused_after_a_way_there_and_back() -> None:
    log = ListLog()
    kill = EngineKilled(at_s=0.0, on=0)
    rows = {"arrival_s": [seconds(9000)]}
    _, (result,) = play_rows(rows, fleet(), served(), settings=WAYS, log=log, faults=[kill])
    assert (result.why, result.settled_ns) == ("replica_lost", 9000 + 2 * WAY_NS)


def test_what_the_policy_closed_itself_does_not_fail_afterwards() -> None:
    """It aborts request 0 between the death of its engine and the news of it."""
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived) and event.request == 1:
            return [Abort(0, 0), Settled(0, "cancelled", "", "client", 499)]
        return []

    rows = {"arrival_s": [0.0, seconds(5100)], "output_tokens": [50, 1]}
    kill = EngineKilled(at_s=seconds(5000), on=0)
    _, results = play_rows(rows, fleet(), served(more), settings=WAYS, log=log, faults=[kill])
    assert [result.outcome for result in results] == ["cancelled", "failed"]
    assert [event.request for _, event in told(log, Failed)] == [1]  # type: ignore[union-attr]


def test_a_lost_request_may_go_to_another_replica_before_the_first_one_is_known_to_be_down() -> (
    None
):
    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            return [Dispatch(event.request, 0, "")]
        if isinstance(event, Failed):
            return [Dispatch(event.request, 1, "")]
        return [Settled(event.request, "answered")] if isinstance(event, Finished) else []

    rows = {"arrival_s": [0.0] * 3, "output_tokens": [5] * 3}
    kill = EngineKilled(at_s=seconds(2500), on=0)
    world, results = play_rows(rows, fleet(2), ScriptedPolicy(decide), faults=[kill])
    assert [(result.outcome, result.replica, result.tries) for result in results] == [
        ("answered", 1, 2)
    ] * 3
    assert world.queued == world.refused == 0
    assert results[0].dispatched_ns == 2500


# Standing still


def test_an_engine_that_hangs_goes_on_where_it_stopped() -> None:
    """Everything after 2,500 is 10,000 late: the first token of 1 too, which was told ahead."""
    rows = {"arrival_s": [0.0, seconds(2300)], "output_tokens": [6, 2]}
    hang = EngineHung(at_s=seconds(2500), on=0, for_s=seconds(10_000))
    _, quiet = play_rows(rows, fleet(), served())
    _, results = play_rows(rows, fleet(), served(), faults=[hang])
    assert results[0].first_out_ns == quiet[0].first_out_ns
    assert results[0].settled_ns == quiet[0].settled_ns + 10_000
    assert results[1].first_out_ns == quiet[1].first_out_ns + 10_000
    assert results[1].first_ns == quiet[1].first_ns + 10_000
    assert results[1].settled_ns == quiet[1].settled_ns + 10_000


@pytest.mark.parametrize("skip", [False, True])
def test_a_first_token_that_is_already_on_its_way_comes_although_the_engine_hangs(
    skip: bool,
) -> None:
    log = ListLog()
    rows = {"arrival_s": [0.0], "output_tokens": [6]}
    at_ns = WAY_NS + 1 + STEP_NS + 100
    hang = EngineHung(at_s=seconds(at_ns), on=0)
    settings = replace(WAYS, call_timeout_ns=100_000)
    _, (result,) = play_rows(
        rows, fleet(), served(), settings=settings, log=log, faults=[hang], skip=skip
    )
    assert [now_ns for now_ns, _ in told(log, FirstToken)] == [at_ns - 100 + WAY_NS]
    assert (result.outcome, result.why, result.settled_ns) == ("failed", "timeout", 100_000)


def test_an_engine_that_hangs_for_good_is_given_up_call_by_call() -> None:
    """Each call has its whole time, whenever it began; time-outs need no timer of their own."""
    log = ListLog()
    settings = replace(BARE, call_timeout_ns=1_000_000)
    arrivals = [0, 300_000, 499_999, 500_000, 500_001, 900_000]
    rows = {"arrival_s": [seconds(at) for at in arrivals], "output_tokens": [4] * 6}
    hang = EngineHung(at_s=seconds(2500), on=0)
    _, results = play_rows(rows, fleet(), served(), settings=settings, log=log, faults=[hang])
    assert [result.settled_ns for result in results] == [at + 1_000_000 for at in arrivals]
    assert {result.why for result in results} == {"timeout"}


def test_a_hanging_engine_shows_no_progress_and_a_working_one_does() -> None:
    """Its server answers all the same."""
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        return [ReadProgress(0)] if isinstance(event, Arrived) else []

    asked = [0, 3000, 9000, 20_000]
    rows = {"arrival_s": [seconds(at) for at in asked], "output_tokens": [40, 1, 1, 1]}
    hang = EngineHung(at_s=seconds(8000), on=0)
    settings = replace(WAYS, call_timeout_ns=10 * MS)
    play_rows(rows, fleet(), served(more), settings=settings, log=log, faults=[hang])
    seen = [(now_ns, event.output_tokens) for now_ns, event in told(log, Progress)]  # type: ignore[union-attr]
    assert [now_ns for now_ns, _ in seen] == [at + 2 * WAY_NS for at in asked]
    tokens = [count for _, count in seen]
    assert 0 == tokens[0] < tokens[1] < tokens[2] == tokens[3]


def test_a_hanging_engine_can_be_stopped_and_started_again() -> None:
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived) and event.request == 1:
            return [Stop(0)]
        return [Start(0)] if isinstance(event, Standby) else []

    rows = {"arrival_s": [0.0, seconds(9000), seconds(100_000)], "output_tokens": [9] * 3}
    hang = EngineHung(at_s=seconds(2500), on=0)
    _, results = play_rows(rows, fleet(), served(more), settings=WAYS, log=log, faults=[hang])
    assert [result.outcome for result in results] == ["failed", "failed", "answered"]
    assert [event.reason for _, event in told(log, ReplicaDown)] == ["stopped"]  # type: ignore[union-attr]


def test_a_slow_card_changes_the_pace_between_two_steps() -> None:
    """Steps of 1,000 until 3,500; the one that runs then ends, the next three take 2,500 each."""
    rows = {"arrival_s": [0.0], "output_tokens": [9]}
    slow = SlowCard(at_s=seconds(3500), on=0, factor_permille=2500, for_s=seconds(6000))
    for skip in (False, True):
        _, (result,) = play_rows(rows, fleet(), served(), faults=[slow], skip=skip)
        assert result.last_ns == 1 + 4 * 1000 + 3 * 2500 + 2 * 1000


def isolates(replica: int = 0, at_request: int = 1, then: Decision | None = None) -> ScriptedPolicy:
    """It is said to hang when that request arrives; lost requests are failed."""

    def more(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived) and event.request == at_request:
            return [Rotated(replica, "isolated", "hung"), *([then] if then else [])]
        return []

    return served(more, to=replica)


def test_a_supervisor_ends_what_hangs_and_starts_it_again() -> None:
    log = ListLog()
    settings = replace(WAYS, hung_restart_ns=7000)
    rows = {"arrival_s": [0.0, seconds(9000), seconds(100_000)], "output_tokens": [9] * 3}
    hang = EngineHung(at_s=seconds(2500), on=0)
    _, results = play_rows(rows, fleet(), isolates(), settings=settings, log=log, faults=[hang])
    assert told(log, ReplicaDown) == [(9000 + WAY_NS, ReplicaDown(0, "hung"))]
    assert [now_ns for now_ns, _ in told(log, ReplicaUp)] == [0, 9000 + 7000 + 50_000]
    assert not told(log, Standby)
    assert [result.outcome for result in results] == ["failed", "failed", "answered"]


@pytest.mark.parametrize("restart_ns", [0, 7000])
def test_without_a_supervisor_it_hangs_on_and_a_broken_card_is_not_started_on(
    restart_ns: int,
) -> None:
    log = ListLog()
    settings = replace(WAYS, hung_restart_ns=restart_ns, call_timeout_ns=200_000)
    rows = {"arrival_s": [0.0, seconds(9000), seconds(100_000)], "output_tokens": [9] * 3}
    faults: list[Fault] = [EngineHung(at_s=seconds(2500), on=0)]
    if restart_ns:
        faults.append(GpuLost(at_s=seconds(10_000), on=0))
    play_rows(rows, fleet(), isolates(), settings=settings, log=log, faults=faults)
    assert len(told(log, ReplicaUp)) == 1
    assert bool(told(log, ReplicaDown)) is bool(restart_ns)
    assert not told(log, Standby)


@pytest.mark.parametrize("then", [Start(1), Stop(0), None])
def test_what_was_ended_stands_by_if_another_took_its_place_or_it_is_not_wanted(
    then: Decision | None,
) -> None:
    log = ListLog()
    settings = replace(BARE, hung_restart_ns=7000)
    rows = {"arrival_s": [0.0, seconds(9000), seconds(100_000)]}
    main, spare = numbered([*fleet(), *fleet()])
    play_rows(rows, [main], isolates(then=then), settings=settings, log=log, standbys=[spare])
    again = [(now_ns, event.replica) for now_ns, event in told(log, Standby) if now_ns]  # type: ignore[union-attr]
    ups = [(now_ns, event.replica) for now_ns, event in told(log, ReplicaUp) if now_ns]  # type: ignore[union-attr]
    if then == Start(1):
        assert (again, ups) == ([(16_000, 0)], [(59_000, 1)])
    elif then == Stop(0):
        assert (again, ups) == ([(9000, 0)], [])
    else:
        assert (again, ups) == ([], [(66_000, 0)])


# Coming up


def test_a_standby_is_told_at_the_start_and_comes_up_after_its_cold_start() -> None:
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Standby):
            return [Start(event.replica, "v2")]
        return [Warm(event.replica)] if isinstance(event, ReplicaUp) and now_ns else []

    main, spare = numbered([*fleet(), *fleet()])
    rows = {"arrival_s": [0.0, seconds(90_000)]}
    settings = replace(BARE, warm_ns=4000)
    world, results = play_rows(
        rows, [main], served(more, to=0), settings=settings, log=log, standbys=[spare]
    )
    assert told(log, Standby) == [(0, Standby(1, spare.name, (), 50_000, "v1", spare.domain))]
    assert told(log, ReplicaUp)[1] == (50_000, spare.up("v2"))
    assert told(log, Warmed) == [(54_000, Warmed(1, "v2"))]
    assert world.replicas[1].state == "up"
    assert all(result.outcome == "answered" for result in results)


def test_a_replica_that_is_not_a_standby_cannot_be_started_twice() -> None:
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        return [Start(0), Start(1), Start(1)] if isinstance(event, Standby) else []

    main, spare = numbered([*fleet(), *fleet()])
    play_rows({"arrival_s": [seconds(90_000)]}, [main], served(more), log=log, standbys=[spare])
    assert [event.replica for _, event in told(log, ReplicaUp)] == [0, 1]  # type: ignore[union-attr]


def test_a_start_that_is_stopped_is_not_heard_of() -> None:
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Standby) and now_ns == 0:
            return [Start(1)]
        return [Stop(1)] if isinstance(event, Arrived) and event.request == 0 else []

    main, spare = numbered([*fleet(), *fleet()])
    rows = {"arrival_s": [seconds(20_000), seconds(90_000)]}
    play_rows(rows, [main], served(more), log=log, standbys=[spare])
    assert len(told(log, ReplicaUp)) == 1
    assert [now_ns for now_ns, _ in told(log, Standby)] == [0, 20_000]
    assert not told(log, ReplicaDown)


def test_a_cold_start_takes_longer_and_may_load_what_was_there() -> None:
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        return [Start(1, "v2")] if isinstance(event, Arrived) and event.request == 0 else []

    main, spare = numbered([*fleet(), *fleet()])
    cold = ColdStart(at_s=0.0, factor_permille=1500, keeps_version=True, for_s=1e-3)
    rows = {"arrival_s": [seconds(10_000), seconds(90_000)]}
    play_rows(rows, [main], served(more), log=log, standbys=[spare], faults=[cold])
    now_ns, up = told(log, ReplicaUp)[1]
    assert (now_ns, up.version) == (85_000, "v1")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("asked", "fails", "event"),
    [("v2", "v2", Warmed(1, "v2", ok=False)), ("v2", "", Warmed(1, "v2", ok=False)),
     ("", "v1", ReplicaDown(1, "did not start")), ("v2", "v3", None)],
)  # fmt: skip
def test_a_version_that_does_not_start_says_so_and_is_a_standby_again(
    asked: str, fails: str, event: Event | None
) -> None:
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        first = isinstance(event, Arrived) and event.request == 0
        return [Start(1, asked)] if first else []

    main, spare = numbered([*fleet(), *fleet()])
    broken = StartFails(at_s=0.0, on=1, version=fails)
    rows = {"arrival_s": [seconds(10_000), seconds(90_000)]}
    play_rows(rows, [main], served(more), settings=WAYS, log=log, standbys=[spare], faults=[broken])
    said = told(log, Warmed, ReplicaDown)
    again = [now_ns for now_ns, _ in told(log, Standby) if now_ns]
    if event is None:
        assert (said, again, len(told(log, ReplicaUp))) == ([], [], 2)
    else:
        assert said == [(60_000 + WAY_NS, event)]
        assert (again, len(told(log, ReplicaUp))) == ([60_000 + WAY_NS], 1)


def test_a_version_that_could_not_be_started_can_be_when_it_was_mended() -> None:
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        return [Start(1, "v2")] if isinstance(event, Standby) else []

    main, spare = numbered([*fleet(), *fleet()])
    broken = StartFails(at_s=0.0, for_s=seconds(60_000))
    rows = {"arrival_s": [seconds(190_000)]}
    play_rows(rows, [main], served(more), log=log, standbys=[spare], faults=[broken])
    assert [now_ns for now_ns, _ in told(log, ReplicaUp)] == [0, 100_000]


@pytest.mark.parametrize("starting", [False, True])
def test_a_standby_whose_card_breaks_is_down_and_back_when_it_is_repaired(starting: bool) -> None:
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        first = isinstance(event, Arrived) and event.request == 0
        return [Start(1)] if first and starting else []

    main, spare = numbered([*fleet(), *fleet()])
    lost = GpuLost(at_s=seconds(20_000), on=1, back_s=seconds(30_000))
    rows = {"arrival_s": [seconds(10_000), seconds(90_000)]}
    play_rows(rows, [main], served(more), settings=WAYS, log=log, standbys=[spare], faults=[lost])
    assert told(log, ReplicaDown) == [(20_000 + WAY_NS, ReplicaDown(1, "gpu"))]
    assert [now_ns for now_ns, _ in told(log, Standby)] == [0, 50_000 + WAY_NS]


def test_a_warm_up_that_finds_nobody_fails() -> None:
    log = ListLog()

    def more(now_ns: int, event: Event) -> list[Decision]:
        return [Warm(0)] if isinstance(event, Arrived) else []

    hang = EngineHung(at_s=seconds(2500), on=0)
    settings = WorldSettings(sample_every_ns=0, scrape_every_ns=0, call_timeout_ns=10 * S)
    play_rows(
        {"arrival_s": [0.0]}, fleet(), served(more), settings=settings, log=log, faults=[hang]
    )
    ((_, warmed),) = told(log, Warmed)
    assert warmed == Warmed(0, "v1", False)


def test_replicas_are_numbered_in_a_row() -> None:
    with pytest.raises(WorldError, match=r"ids \[0, 0\]: number the fleet"):
        play_rows({"arrival_s": [0.0]}, fleet(), served(), standbys=fleet())
