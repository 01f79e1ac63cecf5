"""How long a run of equal decode steps takes, and its inverse; all in integers.

Time is counted in ticks of 2**-10 ns, so that one step at a time and all at once agree to the
last bit. While a batch of B sequences only decodes, every step reads B more KV tokens than the one
before, so step i of a span takes ``first + i * growth`` ticks.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from fractions import Fraction

    from policy.cost import StepCost

TICK_BITS = 10
NEVER = 1 << 60


def span_ticks(steps: int, first: int, growth: int) -> int:
    """Ticks of ``steps`` steps when the first takes ``first`` and each ``growth`` more."""
    return steps * first + growth * (steps * (steps - 1) >> 1)


def steps_to_reach(ticks: int, first: int, growth: int) -> int:
    """The least number of steps that take ``ticks`` (above 0) or more; NEVER if none does.

    The square root is only a first guess: the answer is settled in integers.
    """
    if growth:
        half = first - growth * 0.5
        steps = int((sqrt(half * half + 2.0 * growth * ticks) - half) / growth)
    elif first:
        steps = ticks // first
    else:
        return NEVER
    if steps < 1:
        steps = 1
    while steps * first + growth * (steps * (steps - 1) >> 1) < ticks:
        steps += 1
    while steps > 1 and span_ticks(steps - 1, first, growth) >= ticks:
        steps -= 1
    return steps


def slowed(cost: StepCost, factor: Fraction, prefill_factor: Fraction) -> StepCost:
    """The cost on a slow card; each coefficient is rounded to the nearest tick.

    Args:
        factor: every step takes this many times as long.
        prefill_factor: and what is paid for each new token, once more this many times.
    """
    if factor == prefill_factor == 1:
        return cost
    computed = factor * prefill_factor
    return msgspec.structs.replace(
        cost,
        decode_fixed=round(cost.decode_fixed * factor),
        prefill_fixed=round(cost.prefill_fixed * factor),
        per_sequence=round(cost.per_sequence * factor),
        per_kv_token=round(cost.per_kv_token * factor),
        per_prefill_token=round(cost.per_prefill_token * computed),
        per_prefill_quad=round(cost.per_prefill_quad * factor),
        padding=tuple(round(extra * factor) for extra in cost.padding),
        per_logprobs_sequence=round(cost.per_logprobs_sequence * factor),
        mixed_per_sequence=round(cost.mixed_per_sequence * computed),
        mixed_per_kv_token=round(cost.mixed_per_kv_token * factor),
        token_padding=tuple(round(extra * computed) for extra in cost.token_padding),
    )
