"""How large a share may be, having been seen so often."""

from __future__ import annotations

import math

import numpy as np

LEVEL = 0.95
_EXACT_MAX = 2000
_NORMAL_AT_LEVEL = 1.6448536269514722
_HALVINGS = 60


def upper_share(count: int, of: int) -> float | None:
    """The one-sided upper 95 % bound of a proportion of which ``count`` in ``of`` were seen.

    Exact (Clopper and Pearson 1934) up to 2,000 counts, and Wilson's beyond, where the two agree
    to three digits. None without any observation.
    """
    if not of:
        return None
    if count >= of:
        return 1.0
    if count > _EXACT_MAX:
        return _wilson(count, of)
    ranks = np.arange(count)
    choices = np.concatenate(([0.0], np.cumsum(np.log((of - ranks) / (ranks + 1)))))
    hits = np.arange(count + 1)
    low, high = count / of, 1.0
    for _ in range(_HALVINGS):
        share = (low + high) / 2
        if share in (0.0, 1.0):
            break
        logs = choices + hits * math.log(share) + (of - hits) * math.log1p(-share)
        if float(np.exp(logs).sum()) > 1 - LEVEL:
            low = share
        else:
            high = share
    return high


def _wilson(count: int, of: int) -> float:
    square = _NORMAL_AT_LEVEL**2
    share = count / of
    spread = math.sqrt(share * (1 - share) / of + square / (4 * of * of))
    return min(1.0, (share + square / (2 * of) + _NORMAL_AT_LEVEL * spread) / (1 + square / of))
