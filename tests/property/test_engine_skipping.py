"""Fast equals slow: an engine that skips what changes nothing gives the same run, to the last bit.

A workload is played twice, every decision taken and with skipping. Every request's times, every
count and what an observer sees at any instant must be equal; afterwards the engine is empty.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policy.cost import TICKS_PER_NS, StepCost
from tests.support import Abort, Input, Look, Played, Request, Submit, assert_empty, play
from twin.engine import EngineSettings

PARTS = 10
SEEDS_EACH = 45
COST_SHAPES = ("real", "round", "odd", "free")


@dataclass(frozen=True, slots=True)
class Workload:
    engine: EngineSettings
    cost: StepCost
    inputs: tuple[Input, ...]


def check(work: Workload, *, inputs_first: bool = True) -> Played:
    """Play both ways and compare; returns the slow run."""
    slow, fast = (
        play(work.engine, work.cost, work.inputs, skip=skip, inputs_first=inputs_first)
        for skip in (False, True)
    )
    expected, found = slow.facts(), fast.facts()
    for name, value in expected.items():
        assert found[name] == value, f"{name} differ: {work}"
    assert_empty(slow.engine)
    assert_empty(fast.engine)
    assert len(fast.wakes) <= len(slow.wakes)
    return slow


# A seeded generator


class Dice(random.Random):
    """Seeded by a string, so equal in every process."""

    def chance(self, share: float) -> bool:
        return self.random() < share

    def around(self, mean: float) -> int:
        return int(self.expovariate(1 / mean))


def workload(seed: int) -> Workload:
    """Requests of all kinds for one replica of any kind."""
    dice = Dice(f"skipping/{seed}")
    engine = _engine(dice)
    cost = _cost(dice)
    return Workload(engine, cost, tuple(_inputs(dice, engine, cost)))


def _engine(dice: Dice) -> EngineSettings:
    block_tokens = dice.choice([1, 2, 4, 16, 16, 32, 128])
    blocks = dice.choice([60, 200, 300, 500, 1000, 6000]) // block_tokens + 1
    pool_tokens = blocks * block_tokens
    seats = dice.choice([1, 2, 4, 16, 64])
    return EngineSettings(
        kv_blocks=blocks + 1,
        block_tokens=block_tokens,
        max_num_batched_tokens=max(seats, dice.choice([8, 32, 64, 256, 2048])),
        max_num_seqs=seats,
        max_model_len=dice.choice([4096, 4096, pool_tokens, pool_tokens // 2 + 1]),
        async_scheduling=dice.chance(0.6),
        prefix_caching=dice.chance(0.8),
        scheduling_policy=dice.choice(["fcfs", "priority"]),
    )


def _cost(dice: Dice) -> StepCost:
    shape = dice.choice(COST_SHAPES)
    if shape == "real":
        padding = tuple(7 * (size // 8) for size in range(65))
        cost = StepCost(6_859_776, 4_506_000, 11_161, 48, 19_660, 1, padding, 20, 5)
    elif shape == "round":  # whole microseconds, so that boundaries can be met exactly
        unit = 1000 * TICKS_PER_NS
        cost = linear(unit, unit, *(dice.choice([0, unit]) for _ in range(3)), 0)
    elif shape == "odd":
        cost = linear(*(dice.choice([0, 1, 3, 1023, 1025, 999_983]) for _ in range(6)))
    else:
        cost = StepCost(0, 0, 0, dice.choice([0, 0, 1]), 0, 0)
    return cost


def linear(*coefficients: int) -> StepCost:
    """The six coefficients of the formula, without padding or free tokens."""
    decode, prefill, sequence, kv_token, prefill_token, prefill_quad = coefficients
    return StepCost(decode, prefill, sequence, kv_token, prefill_token, prefill_quad)


def _inputs(dice: Dice, engine: EngineSettings, cost: StepCost) -> list[Input]:
    block = engine.block_tokens
    id_tokens = dice.choice([block, block, 2 * block, 3 * block, max(1, block // 2), 3, 16, 512])
    prefixes = [
        tuple(
            dice.randint(0, 3) * 100 + depth for depth in range(dice.randint(0, 400) // id_tokens)
        )
        for _ in range(4)
    ]
    step_ns = max(1, cost.step_ticks(1, 100) // TICKS_PER_NS)
    pacing = dice.choice(["at once", "coarse", "loose", "dense", "round"])
    aborts = dice.choice([0.0, 0.0, 0.15, 0.5])
    pooling = dice.chance(0.1)
    now_ns = 0
    inputs: list[Input] = []
    for number in range(dice.randint(1, 50)):
        now_ns += _gap_ns(dice, pacing, step_ns)
        request = _request(dice, engine, number)
        if dice.chance(0.6):
            request = replace(request, prefix=dice.choice(prefixes), prefix_block_tokens=id_tokens)
            whole = len(request.prefix) * id_tokens
            if whole and dice.chance(0.4):  # its last block is computed again: a second copy
                request = replace(request, prompt_tokens=whole)
        request = replace(request, pooling=pooling)
        ahead_ns = dice.choice([0, 0, 5000, 3 * step_ns, 15_600_000])
        inputs.append(Submit(now_ns, request, ahead_ns))
        if dice.chance(aborts):
            abort = _abort(dice, now_ns, number, step_ns)
            inputs.append(abort)
            if dice.chance(0.2):  # tried again, under the same id
                inputs.append(Submit(abort.at_ns, request, abort.ahead_ns + ahead_ns))
    last_ns = inputs[-1].at_ns
    looks = [Look(dice.randint(0, 2 * last_ns + 50 * step_ns)) for _ in range(8)]
    return sorted([*inputs, *looks], key=lambda item: item.at_ns)


def _gap_ns(dice: Dice, pacing: str, step_ns: int) -> int:
    if pacing == "at once":
        return 0
    if pacing == "coarse":
        return dice.choice([0, 0, 0, 20 * step_ns])
    if pacing == "loose":
        return dice.around(5 * step_ns)
    if pacing == "dense":
        return dice.around(step_ns / 20)
    return 1000 * dice.choice([0, 0, 1, 3, 9, 50]) + dice.choice([0, 0, 1])


def _request(dice: Dice, engine: EngineSettings, number: int) -> Request:
    pool_tokens = (engine.kv_blocks - 1) * engine.block_tokens
    if dice.chance(0.01):
        return Request(number, min(pool_tokens, engine.max_model_len) + 2)
    longest = min(pool_tokens if dice.chance(0.1) else pool_tokens // 2, 300)
    prompt = dice.randint(1, max(1, min(longest, engine.max_model_len - 1)))
    output = dice.randint(1, max(1, min(dice.choice([3, 40, 400]), pool_tokens - prompt + 1)))
    limit = dice.choice([0, output, output + dice.randint(1, 50), max(1, output // 2)])
    return Request(number, prompt, output, limit, dice.randint(0, 3))


def _abort(dice: Dice, now_ns: int, number: int, step_ns: int) -> Abort:
    gap_ns = dice.choice([0, 1, step_ns, dice.around(20 * step_ns)])
    return Abort(now_ns + gap_ns, number, dice.choice([0, 0, 200, 2 * step_ns]))


@pytest.mark.parametrize("part", range(PARTS))
def test_seeded_workloads(part: int) -> None:
    for seed in range(part * SEEDS_EACH, (part + 1) * SEEDS_EACH):
        check(workload(seed))


@pytest.mark.parametrize("part", range(PARTS))
def test_inputs_moved_exactly_onto_boundaries(part: int) -> None:
    """Inputs are moved to where a step of the first run ended, or a nanosecond beside it."""
    for seed in range(1000 + part * SEEDS_EACH // 3, 1000 + (part + 1) * SEEDS_EACH // 3):
        work = workload(seed)
        wakes = play(work.engine, work.cost, work.inputs, skip=False).wakes
        dice = Dice(f"boundaries/{seed}")
        moved = [
            replace(item, at_ns=dice.choice(wakes) + dice.choice([0, 0, 0, -1, 1]))
            if dice.chance(0.5) and wakes
            else item
            for item in work.inputs
        ]
        check(replace(work, inputs=tuple(sorted(moved, key=lambda item: max(0, item.at_ns)))))


def test_first_tokens_stand_where_a_count_of_the_steps_outputs_puts_them() -> None:
    """Chunks put out nothing, nor does what is computed past an end, or again."""
    behind = preempted = 0
    for seed in range(3000, 3200):
        work = workload(seed)
        engine = replace(work.engine, prefix_caching=False)
        taken: set[int] = set()
        inputs = []
        for item in work.inputs:
            if isinstance(item, Submit):
                if item.request.id in taken:
                    continue
                taken.add(item.request.id)
            inputs.append(item)
        played = play(engine, work.cost, inputs, record=True)
        expected = {id: turn for id, turn in played.turns().items() if not played.seq(id).pooling}
        found = {seq.id: seq.turn for seq in played.seqs if seq.turn}
        assert found == expected, f"seed {seed}"
        behind += sum(turn > 1 for turn in found.values())
        preempted += played.engine.preemptions
    assert behind > 500
    assert preempted > 200


@pytest.mark.parametrize("skip", [False, True], ids=["every decision", "skipping"])
def test_it_does_not_matter_whether_an_input_or_a_wake_of_the_same_instant_comes_first(
    skip: bool,
) -> None:
    """An abort is the exception: it stops the call-backs of that very instant."""
    met = 0
    for seed in range(2000, 2050):
        work = workload(seed)
        inputs = [item for item in work.inputs if isinstance(item, Submit)]
        wakes = play(work.engine, work.cost, inputs, skip=False).wakes
        dice = Dice(f"ties/{seed}")
        inputs = [
            replace(item, at_ns=dice.choice(wakes), ahead_ns=0) if dice.chance(0.7) else item
            for item in inputs
        ]
        before, after = (
            play(work.engine, work.cost, inputs, skip=skip, inputs_first=first)
            for first in (True, False)
        )
        assert before.facts() == after.facts(), f"seed {seed}"
        met += len({item.at_ns for item in inputs} & set(before.wakes))
    assert met > 40  # else no input ever met a wake


def test_the_generator_reaches_what_it_is_for() -> None:
    """Counts of what the seeded workloads hold, so that a change cannot hollow them out."""
    seen: Counter[str] = Counter()
    for seed in range(200):
        work = workload(seed)
        slow = play(work.engine, work.cost, work.inputs, skip=False)
        fast = play(work.engine, work.cost, work.inputs)
        seen["preemptions"] += slow.engine.preemptions
        seen["cached"] += sum(seq.cached_tokens > 0 for seq in slow.seqs)
        seen["eos"] += sum(seq.eos for seq in slow.seqs)
        seen["known"] += sum(not seq.eos for seq in slow.seqs)
        seen["pooling"] += sum(seq.pooling for seq in slow.seqs)
        finished = {who for _, what, who in slow.calls if what == "finish"}
        seen["aborted"] += sum(seq.id not in finished for seq in slow.seqs)
        seen["refused"] += sum("prompt tokens" in text for text in slow.refused)
        seen["tried again"] += len(slow.seqs) - len({seq.id for seq in slow.seqs})
        seen["waiting seen"] += sum(load.waiting > 0 for _, load in slow.looks)
        seen["running seen"] += sum(load.running > 0 for _, load in slow.looks)
        seen["wakes"] += len(slow.wakes)
        seen["wakes saved"] += len(slow.wakes) - len(fast.wakes)
    assert {name for name, count in seen.items() if count < 20} == set(), seen
    assert seen["wakes saved"] > seen["wakes"] / 2


# Hypothesis: small workloads, so that a failure shrinks to something readable


@st.composite
def small_workloads(draw: st.DrawFn) -> Workload:
    block_tokens = draw(st.sampled_from([1, 2, 3, 4, 8, 128]))
    blocks = draw(st.integers(1, 12))
    seats = draw(st.integers(1, 5))
    policy: Literal["fcfs", "priority"] = draw(st.sampled_from(["fcfs", "priority"]))
    engine = EngineSettings(
        kv_blocks=blocks + 1,
        block_tokens=block_tokens,
        max_num_batched_tokens=max(seats, draw(st.integers(1, 40))),
        max_num_seqs=seats,
        max_model_len=draw(st.sampled_from([10, 40, 4096])),
        async_scheduling=draw(st.booleans()),
        prefix_caching=draw(st.booleans()),
        scheduling_policy=policy,
    )
    tick = st.sampled_from([0, 1, 700, TICKS_PER_NS, 3 * TICKS_PER_NS])
    cost = linear(*(draw(tick) for _ in range(6)))
    pool_tokens = blocks * block_tokens
    inputs: list[Input] = []
    ahead_ns = st.sampled_from([0, 0, 1, 7])
    for number in range(draw(st.integers(1, 9))):
        prompt = draw(st.integers(1, min(pool_tokens, 30)))
        request = Request(
            number,
            prompt,
            draw(st.integers(1, max(1, min(30, pool_tokens - prompt + 1)))),
            draw(st.integers(0, 30)),
            draw(st.integers(0, 2)),
            draw(st.integers(0, 9)) == 0,
            draw(st.sampled_from([(), (1,), (1, 2), (1, 2, 3, 4), (5, 2)])),
            draw(st.sampled_from([block_tokens, 2 * block_tokens, 3])),
        )
        at_ns = draw(st.integers(0, 60))
        inputs.append(Submit(at_ns, request, draw(ahead_ns)))
        if draw(st.integers(0, 3)) == 0:
            inputs.append(Abort(at_ns + draw(st.integers(0, 40)), number, draw(ahead_ns)))
    inputs += [Look(at_ns) for at_ns in draw(st.lists(st.integers(0, 120), max_size=4))]
    return Workload(engine, cost, tuple(inputs))


@settings(
    max_examples=250,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(small_workloads())
def test_small_workloads(work: Workload) -> None:
    check(work)
