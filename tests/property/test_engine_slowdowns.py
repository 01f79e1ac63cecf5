"""Slow-downs and standstills at any instant: an engine that skips still gives the same run."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy.cost import TICKS_PER_NS
from tests.property.test_engine_skipping import (
    Dice,
    Workload,
    check,
    small_workloads,
    workload,
)
from tests.support import Slow, Stall, Submit, play
from twin.engine.steptime import slowed

if TYPE_CHECKING:
    from tests.support import Input

PARTS = 6
SEEDS_EACH = 40


def troubled(work: Workload, dice: Dice, instants: list[int], pauses: bool = True) -> Workload:
    """The workload with slow-downs and standstills at some of ``instants`` or beside them."""
    step_ns = max(1, work.cost.step_ticks(1, 100) // TICKS_PER_NS)
    inputs: list[Input] = list(work.inputs)
    for _ in range(dice.randint(1, 8)):
        at_ns = max(0, dice.choice(instants) + dice.choice([0, 0, -1, 1, dice.around(step_ns)]))
        if pauses and dice.chance(0.4):
            for_ns = dice.choice([0, 1, step_ns, dice.around(30 * step_ns)])
            inputs.append(Stall(at_ns, for_ns))
        else:
            factor = Fraction(dice.choice([1000, 1000, 1001, 1500, 3333, 20_000]), 1000)
            prefill = Fraction(dice.choice([1000, 1000, 1700]), 1000)
            inputs.append(Slow(at_ns, slowed(work.cost, factor, prefill)))
    return replace(work, inputs=tuple(sorted(inputs, key=lambda item: max(0, item.at_ns))))


@pytest.mark.parametrize("part", range(PARTS))
def test_seeded_workloads(part: int) -> None:
    for seed in range(5000 + part * SEEDS_EACH, 5000 + (part + 1) * SEEDS_EACH):
        work = workload(seed)
        dice = Dice(f"troubles/{seed}")
        last_ns = work.inputs[-1].at_ns
        check(troubled(work, dice, [dice.randint(0, last_ns + 1) for _ in range(8)]))


@pytest.mark.parametrize("part", range(PARTS))
def test_troubles_exactly_at_the_end_of_a_step(part: int) -> None:
    for seed in range(6000 + part * SEEDS_EACH // 2, 6000 + (part + 1) * SEEDS_EACH // 2):
        work = workload(seed)
        wakes = play(work.engine, work.cost, work.inputs, skip=False).wakes
        if wakes:
            check(troubled(work, Dice(f"ends/{seed}"), wakes))


def test_a_slow_down_and_its_end_leave_the_rest_as_it_was() -> None:
    """A factor of 1 is the cost itself, so troubles that change nothing are not seen at all."""
    for seed in range(40):
        work = workload(seed)
        dice = Dice(f"nothing/{seed}")
        nothing: list[Input] = [
            dice.choice([Slow(item.at_ns, work.cost), Stall(item.at_ns, 0)])
            for item in work.inputs
            if isinstance(item, Submit)
        ]
        inputs = tuple(sorted([*work.inputs, *nothing], key=lambda item: max(0, item.at_ns)))
        quiet = play(work.engine, work.cost, work.inputs)
        seen = play(work.engine, work.cost, inputs)
        assert seen.facts() == quiet.facts(), f"seed {seed}"


def test_slower_steps_take_longer_and_slowing_is_exact() -> None:
    cost = workload(3).cost
    double = slowed(cost, Fraction(2), Fraction(1))
    assert double.step_ticks(7, 900, 40, 90) == 2 * cost.step_ticks(7, 900, 40, 90)
    uploads = slowed(cost, Fraction(1), Fraction(3))
    assert uploads.step_ticks(7, 900) == cost.step_ticks(7, 900)
    assert slowed(cost, Fraction(1), Fraction(1)) is cost


@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(small_workloads(), st.data())
def test_small_workloads(work: Workload, data: st.DataObject) -> None:
    inputs: list[Input] = list(work.inputs)
    for _ in range(data.draw(st.integers(1, 4))):
        at_ns = data.draw(st.integers(0, 90))
        if data.draw(st.booleans()):
            inputs.append(Stall(at_ns, data.draw(st.integers(0, 40))))
        else:
            factor = Fraction(data.draw(st.sampled_from([1000, 1300, 2000, 7000])), 1000)
            inputs.append(Slow(at_ns, slowed(work.cost, factor, Fraction(1))))
    check(replace(work, inputs=tuple(sorted(inputs, key=lambda item: item.at_ns))))
