"""vLLM's WAITING queue in its two orders, with one set of verbs.

Both are built-in containers, so that asking whether one is empty costs nothing.
"""

from __future__ import annotations

from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twin.engine.sequence import Sequence

Rank = tuple[int, int, int, "Sequence"]


class FcfsQueue(deque["Sequence"]):
    """First come, first served; a preempted sequence goes back to the front."""

    def add(self, seq: Sequence) -> None:
        self.append(seq)

    def put_back(self, seq: Sequence) -> None:
        self.appendleft(seq)

    def head(self) -> Sequence:
        return self[0]

    def take(self) -> Sequence:
        return self.popleft()

    def drop(self, seq: Sequence) -> None:
        self.remove(seq)

    def overtakes(self, seq: Sequence) -> bool:
        """Whether ``seq``, arriving now, would become the head."""
        return not self


class PriorityQueue(list[Rank]):
    """By (priority, arrival, id), lowest first; a preempted sequence goes back by its rank."""

    def add(self, seq: Sequence) -> None:
        heappush(self, _rank(seq))

    def put_back(self, seq: Sequence) -> None:
        heappush(self, _rank(seq))

    def head(self) -> Sequence:
        return self[0][3]

    def take(self) -> Sequence:
        return heappop(self)[3]

    def drop(self, seq: Sequence) -> None:
        self.remove(_rank(seq))
        heapify(self)

    def overtakes(self, seq: Sequence) -> bool:
        return not self or _rank(seq) < self[0]


def _rank(seq: Sequence) -> Rank:
    return (seq.priority, seq.arrival_ns, seq.id, seq)
