"""Every fault by name: what it does, where, from when until when; and all of it seeded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.decisions import Abort, Decision, Dispatch, Settled, Start
from policy.events import (
    Arrived,
    Event,
    Failed,
    Finished,
    FirstToken,
    GpuFault,
    ReplicaDown,
    ReplicaUp,
    Standby,
)
from policy.outcomes import failed
from tests.support import (
    BARE,
    MS,
    ListLog,
    ScriptedPolicy,
    bare_fleet,
    chunk_of,
    engine_settings,
    flat_cost,
    play_rows,
)
from twin.arrivals import FIRST_COPY_ID, repeated
from twin.cards import CardSettings
from twin.faults import (
    EccUncorrectable,
    EngineHung,
    EngineKilled,
    Fault,
    FaultError,
    GpuLost,
    Network,
    OomLongPrompt,
    Overheating,
    PcieLoad,
    RetryStorm,
    SlowCard,
    TrafficSpike,
    Xid,
)
from twin.fleet import numbered
from twin.world import World

if TYPE_CHECKING:
    from collections.abc import Callable

    from twin.fleet import ReplicaSpec
STEP_NS = 1000
WAY_NS = 300
WAYS = replace(BARE, network_ns=WAY_NS, gpu_event_ns=2000)
US = 1e-6


def fleet(count: int = 1, **changes: Any) -> list[ReplicaSpec]:
    specs = bare_fleet(count, engine_settings(**changes), flat_cost(STEP_NS))
    return [replace(spec, cold_start_ns=5000) for spec in specs]


def in_turn(count: int = 1, more: Callable[[Event], list[Decision]] | None = None) -> Any:
    """Request n goes to replica n modulo ``count``; what fails is settled so."""

    def decide(now_ns: int, event: Event) -> list[Decision]:
        decisions: list[Decision] = []
        if isinstance(event, Arrived):
            decisions.append(Dispatch(event.request, event.request % count, ""))
        elif isinstance(event, Finished):
            decisions.append(Settled(event.request, "answered"))
        elif isinstance(event, Failed):
            decisions += [Abort(event.request, event.replica), failed(event.request, event.kind)]
        return decisions + (more(event) if more else [])

    return ScriptedPolicy(decide)


def told(log: ListLog, *kinds: type) -> list[tuple[int, Any]]:
    return [(now_ns, event) for now_ns, event, _ in log.records if isinstance(event, kinds)]


def downs(faults: list[Fault], specs: list[ReplicaSpec]) -> list[int]:
    log = ListLog()
    rows = {"arrival_s": [0.0, 100 * US]}
    play_rows(rows, specs, in_turn(), log=log, faults=faults)
    return [event.replica for _, event in told(log, ReplicaDown)]


# Where


def test_a_fault_hits_a_replica_by_number_or_name_or_all_that_fails_with_it() -> None:
    specs = fleet(3)
    domains = ["host0/card0/mig0", "host0/card0/mig1", "host0/card1+2"]
    specs = [replace(spec, domain=name) for spec, name in zip(specs, domains, strict=True)]
    expected: dict[int | str, list[int]] = {
        1: [1], specs[2].name: [2], "host0": [0, 1, 2], "host0/card0": [0, 1],
        "host0/card0/mig1": [1], "host0/card1": [2], "host0/card2": [2], "*": [0, 1, 2],
    }  # fmt: skip
    for where, hit in expected.items():
        assert downs([GpuLost(at_s=10 * US, on=where)], specs) == hit, where


def test_a_fault_may_hit_one_of_those_that_are_up() -> None:
    specs = fleet(4)
    hit = set()
    for at_us in range(10, 60):
        faults: list[Fault] = [
            GpuLost(at_s=1 * US, on=0), Xid(at_s=at_us * US, on="?", code=79, dies_after_s=0)
        ]  # fmt: skip
        first, second = downs(faults, specs)
        assert first == 0
        hit.add(second)
    assert hit == {1, 2, 3}
    nobody: list[Fault] = [GpuLost(at_s=1 * US, on="*"), GpuLost(at_s=2 * US, on="?")]
    assert downs(nobody, specs) == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["host1", "host0/card", "card0", 7, "", "host0/card0/mig0"])
def test_a_fault_on_nothing_is_refused_with_what_there_is(where: int | str) -> None:
    with pytest.raises(FaultError, match=r"gpu_lost at 1.0 s is on .*: there are 0 h100-sxm"):
        play_rows({"arrival_s": [0.0]}, fleet(), in_turn(), faults=[GpuLost(at_s=1.0, on=where)])


def test_faults_of_cards_need_cards() -> None:
    for fault in (
        Overheating(at_s=0.0, on=0, heat_permille=100), PcieLoad(at_s=0.0, on=0, permille=100)
    ):  # fmt: skip
        with pytest.raises(FaultError, match="needs cards to happen to"):
            play_rows({"arrival_s": [0.0]}, fleet(), in_turn(), faults=[fault])
        play_rows({"arrival_s": [0.0]}, fleet(), in_turn(), faults=[fault], cards=CardSettings())


def test_faults_are_read_from_a_file_and_checked() -> None:
    read = msgspec.convert(
        [
            {"kind": "gpu_lost", "at_s": 3, "on": "host0"},
            {"kind": "slow_card", "at_s": 1.5, "on": 2, "factor_permille": 3000, "for_s": 10},
        ],
        list[Fault],
    )
    assert read == [
        GpuLost(at_s=3.0, on="host0"),
        SlowCard(at_s=1.5, on=2, factor_permille=3000, for_s=10.0),
    ]
    for wrong in (
        {"kind": "gpu_lost", "at_s": -1, "on": 0},
        {"kind": "gpu_lost", "at_s": 1, "on": 0, "sped": 1},
        {"kind": "gpu_lost", "at_s": 1},
        {"kind": "slow_card", "at_s": 1, "on": 0, "factor_permille": 900},
        {"kind": "network", "at_s": 1, "on": 0, "loss_permille": 1001},
        {"kind": "ecc_uncorrectable", "at_s": 1, "on": 0, "dies_after_s": 5, "reset_s": 5},
        {"kind": "meteor", "at_s": 1},
    ):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Fault)


# Cards


def test_a_lost_card_takes_its_work_with_it_and_may_come_back_as_a_standby() -> None:
    log = ListLog()
    rows = {"arrival_s": [0.0, 100 * US], "output_tokens": [50, 1]}

    def more(event: Event) -> list[Decision]:
        return [Start(0)] if isinstance(event, Standby) else []

    lost = GpuLost(at_s=10 * US, on=0, back_s=50 * US)
    _, results = play_rows(rows, fleet(), in_turn(1, more), settings=WAYS, log=log, faults=[lost])
    assert [(now_ns, event) for now_ns, event in told(log, Failed, ReplicaDown)] == [
        (10_300, Failed(0, 0, "replica_lost")),
        (10_300, ReplicaDown(0, "gpu_lost")),
    ]
    assert [now_ns for now_ns, _ in told(log, Standby)] == [60_300]
    assert [now_ns for now_ns, _ in told(log, ReplicaUp)] == [0, 65_300]
    assert [result.outcome for result in results] == ["failed", "answered"]


def test_a_lost_card_cannot_be_started_on() -> None:
    """Neither a standby there, nor one that is starting."""
    log = ListLog()

    def more(event: Event) -> list[Decision]:
        if isinstance(event, Standby) and event.replica == 1:
            return [Start(1)]
        return [Start(2)] if isinstance(event, Arrived) and event.request == 1 else []

    specs = numbered([*fleet(), *fleet(), *fleet()])
    lost = [GpuLost(at_s=US, on=1), GpuLost(at_s=US, on=2)]
    rows = {"arrival_s": [0.0, 50 * US, 90 * US]}
    world, _ = play_rows(
        rows, specs[:1], in_turn(1, more), log=log, standbys=specs[1:], faults=lost
    )
    assert [event.replica for _, event in told(log, ReplicaUp)] == [0]
    assert [replica.state for replica in world.replicas] == ["up", "dead", "dead"]


def test_a_card_reports_its_memory_error_before_its_process_dies() -> None:
    log = ListLog()
    rows = {"arrival_s": [0.0, 5 * US, 90 * US], "output_tokens": [1, 50, 1]}
    ecc = EccUncorrectable(at_s=2 * US, on=0, dies_after_s=20 * US, reset_s=40 * US)
    _, results = play_rows(rows, fleet(), in_turn(), settings=WAYS, log=log, faults=[ecc])
    assert told(log, GpuFault) == [(4000, GpuFault(0, "ecc_uncorrectable"))]
    assert told(log, ReplicaDown) == [(22_300, ReplicaDown(0, "gpu_error"))]
    assert [now_ns for now_ns, _ in told(log, Standby)] == [42_300]
    assert [result.outcome for result in results] == ["answered", "failed", "failed"]


def test_only_a_fatal_xid_has_consequences() -> None:
    for fatal, kind in ((False, "xid_minor"), (True, "xid_fatal")):
        log = ListLog()
        xid = Xid(at_s=2 * US, on=0, code=79, fatal=fatal, dies_after_s=0.0)
        rows = {"arrival_s": [0.0, 90 * US]}
        world, _ = play_rows(rows, fleet(), in_turn(), settings=WAYS, log=log, faults=[xid])
        assert told(log, GpuFault) == [(4000, GpuFault(0, kind, 79))]  # type: ignore[arg-type]
        assert world.replicas[0].state == ("dead" if fatal else "up")


def test_slow_downs_add_up_and_end_one_by_one() -> None:
    rows = {"arrival_s": [0.0], "output_tokens": [10]}
    slow: list[Fault] = [
        SlowCard(at_s=0.0, on=0, factor_permille=2000, for_s=20 * US),
        SlowCard(at_s=4 * US, on=0, factor_permille=1500),
    ]
    _, (result,) = play_rows(rows, fleet(), in_turn(), faults=slow)
    # Twice 2,000, from 4,001 on 3,000 until the first fault ends, then 1,500.
    assert result.last_ns == 1 + 2 * 2000 + 6 * 3000 + 2 * 1500


# Engines


def test_a_prompt_that_is_too_long_takes_the_slice_with_it() -> None:
    log = ListLog()
    rows = {
        "arrival_s": [0.0, 5 * US, 6 * US, 90 * US],
        "prompt_tokens": [3, 40, 3, 40],
        "output_tokens": [50, 5, 5, 5],
    }
    oom = OomLongPrompt(at_s=US, on=0, tokens_from=40, for_s=50 * US, restart_s=0.0)
    _, results = play_rows(rows, fleet(), in_turn(), settings=WAYS, log=log, faults=[oom])
    assert told(log, Failed, ReplicaDown) == [
        (5600, Failed(0, 0, "replica_lost")),
        (5600, Failed(1, 0, "oom")),
        (5600, ReplicaDown(0, "oom")),
        (6000 + 2 * WAY_NS, Failed(2, 0, "replica_lost")),
    ]
    assert results[3].outcome == "answered"


def test_a_hang_and_a_death_at_once_is_a_death() -> None:
    log = ListLog()
    faults: list[Fault] = [EngineHung(at_s=5 * US, on=0), EngineKilled(at_s=5 * US, on=0)]
    rows = {"arrival_s": [0.0], "output_tokens": [50]}
    _, (result,) = play_rows(rows, fleet(), in_turn(), log=log, faults=faults)
    assert (result.why, result.settled_ns) == ("replica_lost", 5000)


# The network


def test_a_slow_network_makes_every_message_late() -> None:
    rows = {"arrival_s": [0.0, 200 * US], "output_tokens": [3, 3]}
    slow = Network(at_s=0.0, on=0, delay_ms=0.01, for_s=100 * US)
    _, (late, normal) = play_rows(rows, fleet(), in_turn(), settings=WAYS, faults=[slow])
    assert late.scheduled_ns == normal.scheduled_ns - 200_000 + 10_000
    assert late.first_out_ns - late.first_ns == 10_000 + WAY_NS
    assert late.settled_ns == normal.settled_ns - 200_000 + 20_000


def test_a_lost_message_leaves_the_request_without_an_answer() -> None:
    """Only the time-out of the call is left. What is lost, the seed decides."""
    settings = replace(WAYS, call_timeout_ns=MS)
    rows = {"arrival_s": [number * 10 * US for number in range(300)], "output_tokens": [3] * 300}
    lossy = Network(at_s=0.0, on=0, loss_permille=200)

    def outcomes(seed: int) -> tuple[list[str], ListLog]:
        log = ListLog()
        _, results = play_rows(
            rows, fleet(), in_turn(), settings=settings, log=log, faults=[lossy], seed=seed
        )
        assert {result.why for result in results} == {"", "timeout"}
        return [result.outcome for result in results], log

    seen, log = outcomes(4)
    answered = seen.count("answered")
    assert 300 * 0.8**3 - 50 < answered < 300 * 0.8**3 + 50
    firsts = {event.request for _, event in told(log, FirstToken)}
    finished = {event.request for _, event in told(log, Finished)}
    assert finished < firsts
    assert seen == outcomes(4)[0] != outcomes(5)[0]


# Load


def test_a_spike_repeats_arrivals_under_ids_of_their_own() -> None:
    chunks = [
        chunk_of({"arrival_s": [float(number) for number in range(10)]}),
        chunk_of({"arrival_s": [10.0 + number for number in range(10)]}),
    ]
    spikes = [(3 * 10**9, 13 * 10**9, 2500), (12 * 10**9, 15 * 10**9, 2000)]
    first, second = repeated(iter(chunks), spikes, 7)
    times = first.arrival_ns + second.arrival_ns
    assert times == sorted(times)
    counts = [times.count(number * 10**9) for number in range(20)]
    assert counts[:3] + counts[15:] == [1] * 8
    assert set(counts[3:13]) == {2, 3}
    assert counts[13:15] == [2, 2]
    ids = [*first.batch["request_id"].to_pylist(), *second.batch["request_id"].to_pylist()]
    copies = [request for request in ids if request >= FIRST_COPY_ID]
    assert copies == list(range(FIRST_COPY_ID, FIRST_COPY_ID + len(times) - 20))
    assert len(first.results) == len(first.arrival_ns) == first.open


def test_what_a_spike_adds_comes_from_other_callers() -> None:
    rows = {"arrival_s": [1.0, 2.0, 3.0], "user_id": [7, 7, None], "session_id": [5, 5, 6]}
    (chunk,) = repeated(iter([chunk_of(rows)]), [(0, 10**10, 3000)], 7)
    first, second, third = chunk.user[:3]
    assert len({first, second, third}) == 3
    assert chunk.user == [first, second, third, first, second, third, "", "", ""]
    sessions = chunk.session
    assert sessions[:3] == sessions[3:6]
    assert len(set(sessions)) == 6


def test_what_a_spike_adds_is_served_and_counted_like_everything_else() -> None:
    rows = {"arrival_s": [number * US for number in range(100)]}
    spike = TrafficSpike(at_s=20 * US, factor_permille=3000, for_s=10 * US)
    world, results = play_rows(rows, fleet(), in_turn(), faults=[spike], chunk_rows=7)
    assert len(results) == 120
    assert {result.outcome for result in results} == {"answered"}
    assert world.arrived == 120


def test_a_retry_storm_is_there_for_clients_to_see() -> None:
    seen = []
    storms: list[Fault] = [
        RetryStorm(at_s=10 * US, attempts=3, for_s=30 * US),
        RetryStorm(at_s=20 * US, attempts=5, for_s=10 * US),
    ]
    worlds: list[World] = []

    class Looking(ListLog):
        def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
            if isinstance(event, Arrived):
                seen.append(worlds[0].retry_attempts)

    world = World(fleet(), in_turn(), Looking(), lambda chunk: None, BARE, faults=storms)
    worlds.append(world)
    world.run(iter([chunk_of({"arrival_s": [at * US for at in (5, 10, 25, 35, 45)]})]))
    assert seen == [0, 3, 5, 3, 0]


# All of it


def trouble_of_every_kind() -> list[Fault]:
    return [
        Network(at_s=50 * US, on=2, delay_ms=0.002, loss_permille=100, for_s=200 * US),
        SlowCard(at_s=30 * US, on=1, factor_permille=3300, for_s=150 * US),
        EngineHung(at_s=60 * US, on=0, for_s=47 * US),
        EngineKilled(at_s=120 * US, on=1, restart_s=9 * US),
        OomLongPrompt(at_s=140 * US, on=0, tokens_from=150, for_s=60 * US, restart_s=5 * US),
        EccUncorrectable(at_s=200 * US, on=2, dies_after_s=10 * US, reset_s=30 * US),
        Overheating(at_s=10 * US, on=0, heat_permille=900, for_s=150 * US),
        PcieLoad(at_s=20 * US, on=1, permille=500, for_s=100 * US),
        TrafficSpike(at_s=100 * US, factor_permille=1700, for_s=50 * US),
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
def test_skipping_changes_nothing_in_a_world_where_everything_goes_wrong(seed: int) -> None:
    def more(event: Event) -> list[Decision]:
        return [Start(event.replica)] if isinstance(event, Standby) else []

    dice = random.Random(seed)  # noqa: S311
    count = 150
    rows = {
        "arrival_s": sorted(dice.uniform(0, 300 * US) for _ in range(count)),
        "prompt_tokens": [dice.randint(1, 200) for _ in range(count)],
        "output_tokens": [dice.randint(1, 40) for _ in range(count)],
    }
    settings = replace(
        WAYS, call_timeout_ns=MS, sample_every_ns=5000, scrape_every_ns=7000, scrape_age_ns=900
    )
    cards = CardSettings(read_every_s=9 * US, lag_s=2 * US, heat_s=30 * US, full_heat_permille=990)
    specs = [
        replace(spec, cost=flat_cost(STEP_NS, per_kv_token_ns=1, per_prefill_token_ns=3))
        for spec in fleet(3, kv_blocks=200, async_scheduling=bool(seed % 2))
    ]
    runs = []
    for skip in (False, True):
        log = ListLog()
        world, results = play_rows(
            rows, specs, in_turn(3, more), settings=settings, log=log, skip=skip,
            faults=trouble_of_every_kind(), cards=cards, seed=seed,
        )  # fmt: skip
        runs.append((log.records, results, world.samples, [r.steps for r in world.replicas]))
    for slow, fast in zip(*runs, strict=True):
        assert slow == fast
    kinds = {type(event).__name__ for _, event, _ in runs[0][0]}
    assert kinds >= {"Failed", "ReplicaDown", "ReplicaUp", "GpuFault", "GpuRead", "Standby"}
