"""Whether all controllers that share a store decide alike: by the same policy and the same code.

Each says with its heartbeat what it runs. For a while they may differ, as while a new version is
rolled out; after that somebody was forgotten.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from policy.canary import HASH_DIGITS
from policy.files import code_hash
from policy.parameters import policy_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.parameters import Parameters

GRACE_NS = 60_000_000_000
SHOWN_MOST = 5
"""Kinds of others that are named."""
NAME_MOST = 64
LOGGER = logging.getLogger("twinkeel")


class Agreeing:
    """Compares what this controller runs with what the others say that they do.

    Args:
        parameters: the policy in force.
    """

    def __init__(self, parameters: Callable[[], Parameters]) -> None:
        self._parameters = parameters
        self._last: Parameters | None = None
        self._own = ""
        self._since_ns = -1
        """When they were first seen to differ; -1: they do not."""
        self.differ = False
        """They do, and have for longer than it takes to change all of them."""

    def own(self) -> str:
        """What this controller runs, to be told."""
        parameters = self._parameters()
        if parameters is not self._last:
            self._last = parameters
            self._own = f"{policy_hash(parameters)} {code_hash()} {parameters.name}"
        return self._own

    def heard(self, now_ns: int, own: str, told: Sequence[str], controllers: int) -> str:
        """What is wrong, for people; empty: nothing is, or not for long yet.

        Args:
            own: what this controller told.
            told: what all told, this one among them.
            controllers: how many there are. Who told nothing is of a version that cannot.
        """
        others = Counter(each for each in told if each != own)
        silent = max(0, controllers - len(told))
        if not others and not silent:
            if self.differ:
                LOGGER.info("policies: all controllers that share the store run the same again")
            self._since_ns, self.differ = -1, False
            return ""
        if self._since_ns < 0:
            self._since_ns = now_ns
        lasted_ns = now_ns - self._since_ns
        if lasted_ns < GRACE_NS:
            return ""
        self.differ = True
        found = [f"{count} by {_shown(each)}" for each, count in others.most_common(SHOWN_MOST)]
        if silent:
            found.append(f"{silent} by an older version, which does not tell")
        return (
            f"for {lasted_ns // 1_000_000_000} s controllers that share one store decide"
            f" differently: this one by {_shown(own)}, of the others {', '.join(found)}: give all"
            " of them the same policy and the same version"
        )


def _shown(told: str) -> str:
    policy, _, rest = told.partition(" ")
    code, _, name = rest.partition(" ")
    return f"policy {name[:NAME_MOST]} ({policy[:HASH_DIGITS]}, code {code[:HASH_DIGITS]})"
