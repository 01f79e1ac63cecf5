"""How long a run of equal decode steps takes, and its inverse; all in integers.

Time is counted in ticks of 2**-10 ns, so that one step at a time and all at once agree to the
last bit. While a batch of B sequences only decodes, every step reads B more KV tokens than the one
before, so step i of a span takes ``first + i * growth`` ticks.
"""

from __future__ import annotations

from math import sqrt

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
