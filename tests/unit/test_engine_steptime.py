"""Spans of decode steps: the closed form and its inverse, against counting."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policy.cost import StepCost
from policy.files import load_profile
from tests.support import Request, Submit, engine_settings, play
from twin.engine.steptime import NEVER, TICK_BITS, slowed, span_ticks, steps_to_reach

SMALL = st.integers(0, 50)
LARGE = st.integers(0, 2**52)


def counted_steps(ticks: int, first: int, growth: int) -> int:
    spent, steps = first, 1
    while spent < ticks:
        spent += first + steps * growth
        steps += 1
    return steps


@given(st.integers(0, 300), SMALL, SMALL)
def test_a_span_is_the_sum_of_its_steps(steps: int, first: int, growth: int) -> None:
    assert span_ticks(steps, first, growth) == sum(first + step * growth for step in range(steps))


@given(st.integers(1, 5000), SMALL, SMALL)
def test_the_inverse_equals_counting(ticks: int, first: int, growth: int) -> None:
    if not first and not growth:
        assert steps_to_reach(ticks, first, growth) == NEVER
    else:
        assert steps_to_reach(ticks, first, growth) == counted_steps(ticks, first, growth)


@given(st.integers(1, 2**62), st.integers(1, 2**60), LARGE)
@example(2**62, 1, 1)
@example(2**62, 2**40, 1)
@example(2**62 - 1, 2**40, 0)
@example(3338604519880202049, 49097125292355879, 1)  # the float's guess is 72, the answer 69
def test_the_inverse_is_exact_where_a_float_is_not(ticks: int, first: int, growth: int) -> None:
    steps = steps_to_reach(ticks, first, growth)
    assert span_ticks(steps, first, growth) >= ticks
    assert steps == 1 or span_ticks(steps - 1, first, growth) < ticks


@given(st.integers(1, 10**7), st.integers(1, 2**20), st.integers(0, 2**20))
def test_a_boundary_itself_is_reached_by_its_own_step(steps: int, first: int, growth: int) -> None:
    end = span_ticks(steps, first, growth)
    assert steps_to_reach(end, first, growth) == steps
    assert steps_to_reach(end + 1, first, growth) == steps + 1


@pytest.mark.parametrize("skip", [False, True])
def test_the_clock_keeps_fractions_of_a_nanosecond(skip: bool) -> None:
    """A thousand steps of 1.25 ns end 1250 ns later: nothing is rounded on the way."""
    ticks = 5 << (TICK_BITS - 2)
    cost = StepCost(ticks, ticks, 0, 0, 0, 0)
    played = play(engine_settings(), cost, [Submit(0, Request(1, 10, 900, 900))], skip=skip)
    assert played.finish_ns(1) == 1 + 900 * 5 // 4
    assert played.engine.busy_ticks == 900 * ticks


@pytest.mark.parametrize("skip", [False, True])
def test_decoding_gets_slower_as_the_context_grows(skip: bool) -> None:
    """Each decode step reads prompt + tokens so far; the prefill reads none."""
    cost = StepCost(1024, 2048, 0, 1024, 0, 0)
    played = play(engine_settings(), cost, [Submit(0, Request(1, 10, 4, 4))], skip=skip)
    assert played.first_ns(1) == 1 + 2
    assert played.finish_ns(1) == 1 + 2 + 3 + (11 + 12 + 13)


@pytest.mark.parametrize("skip", [False, True])
def test_a_mixed_step_pays_for_both(skip: bool) -> None:
    cost = StepCost(1024, 10_240, 1024, 0, 1024, 1024)
    inputs = [Submit(0, Request(1, 2, 5, 5)), Submit(1, Request(2, 3, 1))]
    played = play(engine_settings(), cost, inputs, skip=skip)
    prefill_ns = 10 + 2 + 4
    mixed_ns = 1 + 1 + 3 + 9
    assert played.first_ns(1) == 1 + prefill_ns
    assert played.finish_ns(2) == 1 + prefill_ns + mixed_ns
    assert played.finish_ns(1) == 1 + prefill_ns + mixed_ns + 3 * 2


def test_a_slow_card_takes_longer_for_every_term() -> None:
    cost = StepCost(
        1000, 900, 10, 2, 20, 4, padding=(30,) * 9, per_logprobs_sequence=6,
        mixed_per_sequence=50, mixed_per_kv_token=8, token_padding=(-40,) * 65,
    )  # fmt: skip
    slow = slowed(cost, Fraction(3, 2), Fraction(1))
    for step in ((4, 100), (4, 100, 30, 900), (0, 0, 30, 900)):
        assert slow.step_ticks(*step) * 2 == cost.step_ticks(*step) * 3
    assert slow.per_logprobs_sequence == 9
    computing = slowed(cost, Fraction(1), Fraction(2))
    assert computing.step_ticks(4, 100) == cost.step_ticks(4, 100)
    on_top = 20 * 30 + 50 * 4 - 40
    assert computing.step_ticks(4, 100, 30, 900) == cost.step_ticks(4, 100, 30, 900) + on_top
    assert slowed(cost, Fraction(1), Fraction(1)) is cost


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_paddings_and_mixed_terms_cost_the_same_step_by_step(async_scheduling: bool) -> None:
    """The shipped profile that has them all, on a pool too small for its requests."""
    cost = StepCost.from_profile(load_profile("rtx-4090/llama-3.1-8b"))
    assert cost.padding
    assert cost.token_padding
    sizes = np.random.default_rng(5).integers(1, (10**10, 900, 300), (60, 3)).tolist()
    inputs = [
        Submit(at_ns, Request(number, prompt, output, 300))
        for number, (at_ns, prompt, output) in enumerate(sizes)
    ]
    engine = engine_settings(
        kv_blocks=200, block_tokens=16, max_num_batched_tokens=2048, max_num_seqs=64,
        max_model_len=2000, async_scheduling=async_scheduling,
    )  # fmt: skip
    slow, fast = (play(engine, cost, inputs, skip=skip) for skip in (False, True))
    assert fast.calls == slow.calls
    assert fast.engine.busy_ticks == slow.engine.busy_ticks
    assert len(fast.wakes) < len(slow.wakes)
    assert slow.engine.preemptions
