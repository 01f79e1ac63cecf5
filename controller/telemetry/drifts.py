"""How far each replica's steps are from its profile, as they were read: for people to look at."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from policy.events import StepsRead

READS_KEPT = 12
"""A minute's, by default."""


class Steps(NamedTuple):
    """What a replica's steps took, as they were last read."""

    read: int
    """Steps, since it came up."""
    measured_ms: float
    predicted_ms: float
    """By its profile, for the very same steps; both a step, of those read last."""


class Drifts:
    """Keeps the last readings of each replica. What is judged, and told, is the policy's."""

    def __init__(self) -> None:
        self._reads: dict[int, deque[StepsRead]] = {}
        self._steps: dict[int, int] = {}

    def read(self, event: StepsRead) -> None:
        """Steps of a replica were read."""
        reads = self._reads.get(event.replica)
        if reads is None:
            reads = self._reads[event.replica] = deque(maxlen=READS_KEPT)
        reads.append(event)
        self._steps[event.replica] = self._steps.get(event.replica, 0) + event.steps

    def renewed(self, replica: int) -> None:
        """It came up anew, or went down."""
        self._reads.pop(replica, None)
        self._steps.pop(replica, None)

    def last(self, replica: int) -> Steps | None:
        """What was read last; None: no step of it was read."""
        reads = self._reads.get(replica)
        if not reads or not reads[-1].steps:
            return None
        last = reads[-1]
        return Steps(
            self._steps[replica], round(last.measured_us / last.steps / 1000, 4),
            round(last.predicted_us / last.steps / 1000, 4),
        )  # fmt: skip

    def permille(self, replica: int) -> int | None:
        """By how much its last steps took longer than predicted; below 0: shorter; None: no step
        of it was read."""
        reads = self._reads.get(replica, ())
        predicted_us = sum(each.predicted_us for each in reads)
        if not predicted_us:
            return None
        return round(1000 * sum(each.measured_us for each in reads) / predicted_us) - 1000
