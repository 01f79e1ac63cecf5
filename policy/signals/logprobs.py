"""How certain a model was of its answer, from the logprobs of its tokens."""

from __future__ import annotations

from math import exp, log
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

CLOSE = 0.03
"""Two candidates whose probabilities differ by less are decided by a hair."""


class Certainty(NamedTuple):
    """As ``Finished`` carries it."""

    entropy_mean_millinats: int
    entropy_worst_millinats: int
    close_permille: int


def certainty(tokens: Sequence[Sequence[float]]) -> Certainty | None:
    """From each token's logprobs of its likeliest candidates, in any order; None without any.

    What the listed candidates leave of the probability counts as one more candidate, so entropies
    are never overstated. Figures that are no logprobs (NaN) and empty lists are passed over.
    """
    entropies: list[float] = []
    close = 0
    for candidates in tokens:
        # Rounding takes a logprob above 0 at times; engines write -9999 or -inf for "never".
        listed = sorted([exp(min(at, 0.0)) for at in candidates if at == at], reverse=True)
        if not listed:
            continue
        entropies.append(_entropy_nats(listed))
        second = listed[1] if len(listed) > 1 else 0.0
        close += listed[0] - second < CLOSE
    if not entropies:
        return None
    return Certainty(
        round(1000 * sum(entropies) / len(entropies)),
        round(1000 * max(entropies)),
        1000 * close // len(entropies),
    )


def _entropy_nats(probabilities: Sequence[float]) -> float:
    rest = 1.0 - sum(probabilities)
    return -sum([p * log(p) for p in (*probabilities, rest) if p > 0.0])
