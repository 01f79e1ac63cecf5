"""How certain a model was of its answer, from the logprobs of its tokens.

A server lists the likeliest candidates of a token only (vLLM: 20 at most), and what they leave of
the probability may be one token or thousands. Each of those is at most as likely as the least
likely listed one, p, so that they are at least rest/p many, and their part of the entropy is least
where as many as possible have p and one has what remains: floor(rest/p) * -p ln p, and one
-r ln r. That is counted: it is what the listed ones prove, and it never overstates. Where all are
equally likely it is exact: 20 of 4096 give ln 4096 = 8.3.
"""

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


def certainty(tokens: Sequence[Sequence[float]], *, candidates: int = 0) -> Certainty | None:
    """From each token's logprobs of its likeliest candidates; None without any.

    Entropies are lower bounds (see above), and exact where all the probability is listed. Figures
    that are no logprobs (NaN) and empty lists are passed over.

    Args:
        tokens: For each token its logprobs, likeliest first. Servers add the sampled one where it
            is none of the likeliest, at either end: so the least of a list that is not in order
            bounds nothing.
        candidates: How many were asked for: of a longer list, so many bound what is not listed.
            0: all do.
    """
    entropies: list[float] = []
    close = 0
    for logprobs in tokens:
        # Rounding takes a logprob above 0 at times; engines write -9999 or -inf for "never".
        given = [exp(min(at, 0.0)) for at in logprobs if at == at]
        if not given:
            continue
        listed = sorted(given, reverse=True)
        top = len(listed)
        if 0 < candidates < top:
            top = candidates
        elif listed != given:
            top -= 1
        entropies.append(_entropy_nats(listed, listed[top - 1]))
        second = listed[1] if len(listed) > 1 else 0.0
        close += listed[0] - second < CLOSE
    if not entropies:
        return None
    return Certainty(
        round(1000 * sum(entropies) / len(entropies)),
        round(1000 * max(entropies)),
        1000 * close // len(entropies),
    )


def _entropy_nats(listed: Sequence[float], most: float) -> float:
    """At least that of a distribution with these probabilities, the others at most ``most``."""
    entropy = -sum([p * log(p) for p in listed if p > 0.0])
    rest = 1.0 - sum(listed)
    if most > 0.0 and rest > most:
        full = (rest // most) * most
        entropy -= full * log(most)
        rest -= full
    # Else the list claims that nothing is left, or one token is: rounding, or all there is.
    return entropy - rest * log(rest) if rest > 0.0 else entropy
