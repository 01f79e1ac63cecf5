"""The fewest that hold, and the most that is held: bisection over what is monotone but for chance.

The days and the draws are the same at every size (common random numbers), so a larger fleet differs
from a smaller one by its size alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def smallest(holds: Callable[[int], bool], *, guess: int, least: int, most: int) -> int | None:
    """The least size in ``least`` .. ``most`` that holds, where larger ones than it hold too.

    From the guess in growing steps until it is bracketed, then by halves.

    Returns:
        None: not even ``most`` holds.
    """
    size = min(max(guess, least), most)
    step = 1
    if holds(size):
        good, bad = size, least - 1
        while good > least:
            lower = max(least, good - step)
            if not holds(lower):
                bad = lower
                break
            good, step = lower, 2 * step
    else:
        bad = size
        while True:
            if bad == most:
                return None
            upper = min(most, bad + step)
            if holds(upper):
                good = upper
                break
            bad, step = upper, 2 * step
    while good - bad > 1:
        middle = (good + bad) // 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good


def largest_load(
    holds: Callable[[float], bool], *, known: float, step: float, within: float, most: float
) -> tuple[float, float]:
    """The knee: the largest load that holds and the least that does not, by ratio ``within``.

    Args:
        known: a load to start from; it need not hold.
        step: the ratio of the first steps away from it.
        most: no load above it is tried. If it holds, the second figure is infinite.

    Returns:
        0 as the first figure where not even a 64th of ``known`` holds.
    """
    if holds(known):
        good = known
        while True:
            if good >= most:
                return good, math.inf
            higher = min(most, good * step)
            if not holds(higher):
                bad = higher
                break
            good = higher
    else:
        bad = known
        while True:
            lower = bad / step
            if lower < known / 64:
                return 0.0, bad
            if holds(lower):
                good = lower
                break
            bad = lower
    while bad / good > within:
        middle = math.sqrt(good * bad)
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good, bad
