"""Cards in time: heat follows power, throttling slows the engine, and links fill up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from policy.decisions import Decision, Dispatch, Settled
from policy.events import Arrived, Event, Finished, GpuRead
from tests.support import (
    BARE,
    ListLog,
    ScriptedPolicy,
    bare_fleet,
    engine_settings,
    flat_cost,
    play_rows,
)
from twin.cards import CardSettings
from twin.faults import EngineKilled, Overheating, PcieLoad

if TYPE_CHECKING:
    from twin.fleet import ReplicaSpec

US = 1e-6
STEP_NS = 1000
CALM = CardSettings(
    read_every_s=10 * US, lag_s=2 * US, heat_s=30 * US, pcie_most_permille=0, pcie_step_permille=0
)
"""Nobody else uses the link."""


def fleet(count: int = 1) -> list[ReplicaSpec]:
    cost = flat_cost(STEP_NS, per_prefill_token_ns=10)
    return bare_fleet(count, engine_settings(), cost, overhead_ns=(2000, 0, 0))


def to_first() -> ScriptedPolicy:
    def decide(now_ns: int, event: Event) -> list[Decision]:
        if isinstance(event, Arrived):
            return [Dispatch(event.request, 0, "")]
        return [Settled(event.request, "answered")] if isinstance(event, Finished) else []

    return ScriptedPolicy(decide)


def readings(
    specs: list[ReplicaSpec], rows: dict[str, Any], cards: CardSettings, **more: Any
) -> tuple[list[tuple[int, GpuRead]], list[Any]]:
    log = ListLog()
    _, results = play_rows(rows, specs, to_first(), settings=BARE, log=log, cards=cards, **more)
    read = [(now_ns, event) for now_ns, event, _ in log.records if isinstance(event, GpuRead)]
    return read, results


BUSY = {"arrival_s": [0.0], "output_tokens": [500]}


def test_readings_come_at_their_interval_and_are_as_old_as_they_say() -> None:
    read, _ = readings(fleet(2), BUSY, CALM)
    assert [(now_ns, event.replica, event.age_ns) for now_ns, event in read[:4]] == [
        (12_000, 0, 2000), (12_000, 1, 2000), (22_000, 0, 2000), (22_000, 1, 2000),
    ]  # fmt: skip
    assert len(read) == 2 * 51  # the last one when nothing is left to do


def test_a_busy_card_is_hotter_than_an_idle_one() -> None:
    read, _ = readings(fleet(2), BUSY, CALM)
    busy, idle = ([event for _, event in read if event.replica == each] for each in (0, 1))
    assert busy[0].memory_permille < 1000  # it began in the middle
    assert {event.memory_permille for event in busy[1:-1]} == {1000}
    assert {event.power_permille for event in busy[1:-1]} == {1000}
    assert all(a.heat_permille <= b.heat_permille for a, b in pairwise(busy[:-1]))
    assert 790 <= busy[-2].heat_permille <= 800
    assert {(event.memory_permille, event.power_permille) for event in idle} == {(0, 150)}
    assert {event.heat_permille for event in idle} == {120}
    assert not any(event.throttled for event in busy)


def test_a_card_without_cooling_throttles_until_it_has_cooled_down() -> None:
    hot = Overheating(at_s=100 * US, on=0, heat_permille=600, for_s=100 * US)
    read, (result,) = readings(fleet(), BUSY, CALM, faults=[hot])
    _, (quiet,) = readings(fleet(), BUSY, CALM)
    throttled = [event.throttled for _, event in read]
    begin, end = throttled.index(True), len(throttled) - throttled[::-1].index(True)
    assert all(throttled[begin:end])
    heat = [event.heat_permille for _, event in read]
    assert heat[begin - 1] < 1000 <= heat[begin]
    assert heat[end] < 900 <= heat[end - 1]
    slow_ns = 10_000 * (end - begin)
    lost_ns = slow_ns - slow_ns * 1000 // 1500
    assert result.last_ns - quiet.last_ns == pytest.approx(lost_ns, abs=2 * STEP_NS)


def test_a_loaded_link_slows_what_comes_in_but_not_decoding() -> None:
    rows = {"arrival_s": [0.0, 300 * US], "prompt_tokens": [60, 60], "output_tokens": [5, 5]}
    load = PcieLoad(at_s=200 * US, on=0, permille=500, for_s=200 * US)
    read, (free, loaded) = readings(fleet(), rows, CALM, faults=[load])
    assert loaded.scheduled_ns - 300_000 == free.scheduled_ns + 1000  # 2,000 of request in
    assert loaded.first_ns - loaded.scheduled_ns == free.first_ns - free.scheduled_ns + 300
    assert loaded.last_ns - loaded.first_ns == free.last_ns - free.first_ns
    seen = {now_ns: event.pcie_permille for now_ns, event in read}
    assert (seen[192_000], seen[212_000]) == (0, 500)


def test_a_far_card_takes_prompts_in_more_slowly_but_decodes_as_fast() -> None:
    rows = {"arrival_s": [0.0], "prompt_tokens": [60], "output_tokens": [5]}
    _, (near,) = readings(fleet(), rows, CALM)
    far_fleet = [replace(spec, closeness_permille=500) for spec in fleet()]
    cards = msgspec.structs.replace(CALM, far_permille=400)
    _, (far,) = readings(far_fleet, rows, cards)
    assert far.scheduled_ns == near.scheduled_ns + 400  # a fifth of 2,000 of request in
    assert far.first_ns - far.scheduled_ns == near.first_ns - near.scheduled_ns + 120
    assert far.last_ns - far.first_ns == near.last_ns - near.first_ns


def test_the_other_traffic_of_a_link_wanders_within_its_bounds_and_by_the_seed() -> None:
    cards = msgspec.structs.replace(CALM, pcie_most_permille=300, pcie_step_permille=40)

    def walks(seed: int) -> list[list[int]]:
        read, _ = readings(fleet(2), BUSY, cards, seed=seed)
        return [
            [event.pcie_permille for _, event in read if event.replica == each] for each in (0, 1)
        ]

    first, second = walks(3)
    assert first != second
    assert [first, second] == walks(3) != walks(4)
    for walk in (first, second):
        assert all(0 <= value <= 300 for value in walk)
        assert all(abs(a - b) <= 40 for a, b in pairwise(walk))
        assert len(set(walk)) > 10


def test_slices_share_their_card_and_its_memory_is_their_own() -> None:
    specs = [
        replace(spec, domain=f"host0/card0/mig{spec.id}", memory_mb=(spec.id + 1) * 10_000)
        for spec in fleet(2)
    ]
    read, _ = readings(specs, BUSY, CALM)
    pairs = list(zip(read[::2], read[1::2], strict=True))
    assert all(a.heat_permille == b.heat_permille for (_, a), (_, b) in pairs)
    assert pairs[3][0][1].memory_permille == 500  # one of the two computes all the time
    gpu_memory_utilization = specs[0].profile.engine.gpu_memory_utilization
    assert pairs[0][0][1].free_mb == round(10_000 * (1 - gpu_memory_utilization))
    assert pairs[0][1][1].free_mb == 2 * pairs[0][0][1].free_mb


def test_a_replica_that_is_down_is_not_read() -> None:
    kill = EngineKilled(at_s=25 * US, on=1)
    read, _ = readings(fleet(2), BUSY, CALM, faults=[kill])
    assert [event.replica for now_ns, event in read if now_ns < 50_000] == [0, 1, 0, 1, 0, 0]
