"""What a deployment has shown so far, in the figures that its evidence has predicted.

For people: what is judged is ``policy.deployment``'s. Both policies' figures are over the last of
the plan's windows, or what of it ``RESULTS_MOST`` requests cover, which is less of the busier
policy's; and of the present stage only.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.deployment import DeploymentPlan, Result
    from policy.evidence import Band

RESULTS_MOST = 4000
"""Kept of each policy; the oldest go first."""
MISSES = "slo_miss_share"
NS_PER_S = 1_000_000_000


class Measured(msgspec.Struct, frozen=True):
    """A figure as it was predicted, and as it is. Times in s, shares from 0 to 1."""

    figure: str
    low: float | None
    """Where the evidence expects the candidate's; null: it says nothing of it."""
    high: float | None
    candidate: float | None
    """null: nothing to tell it by."""
    candidate_requests: int
    live: float | None
    """Of the policy that ruled before, beside it."""
    live_requests: int


class Measuring:
    """Hears what became of requests, and says what that comes to."""

    def __init__(self, plan: DeploymentPlan) -> None:
        self._plan = plan
        self._arms: dict[bool, deque[Result]] = {}
        self.begin(0)

    def begin(self, now_ns: int) -> None:
        """A stage begins."""
        self._began_ns = now_ns
        self._arms = {arm: deque(maxlen=RESULTS_MOST) for arm in (True, False)}

    def settled(self, result: Result) -> None:
        if result.told != "refused" and result.arrived_ns >= self._began_ns:
            self._arms[result.canary].append(result)

    def figures(self, now_ns: int) -> tuple[Measured, ...]:
        """Each figure of the plan's band; the share of misses in any case. Costs about a
        millisecond for 4000 requests."""
        since_ns = now_ns - self._plan.window_s * NS_PER_S
        ours, theirs = (
            [each for each in self._arms[arm] if each.at_ns >= since_ns] for arm in (True, False)
        )
        expected = {band.figure: band for band in self._plan.band}
        names = [*expected] if MISSES in expected else [MISSES, *expected]
        return tuple(_measured(name, expected.get(name), ours, theirs) for name in names)


def _measured(
    name: str, band: Band | None, ours: Sequence[Result], theirs: Sequence[Result]
) -> Measured:
    low, high = (None, None) if band is None else (band.low, band.high)
    (candidate, seen), (live, live_seen) = _figure(name, ours), _figure(name, theirs)
    return Measured(name, low, high, candidate, seen, live, live_seen)


def _figure(name: str, results: Sequence[Result]) -> tuple[float | None, int]:
    """Its value, and how many requests tell it."""
    kind, _, sla = name.partition("/")
    mine = [each for each in results if sla in ("", each.sla)]
    if kind == MISSES:
        told = [each.missed for each in mine if each.told != "end"]
        return (sum(told) / len(told) if told else None), len(told)
    times_ns = sorted(each.ttft_ns for each in mine if each.ttft_ns >= 0)
    if not times_ns:
        return None, 0
    percent = int(kind.removeprefix("ttft_s_p"))
    return times_ns[-(-len(times_ns) * percent // 100) - 1] / NS_PER_S, len(times_ns)
