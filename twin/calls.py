"""A request between arrival and settlement, as the world keeps it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from twin.arrivals import Asked, Chunk
    from twin.engine import Sequence


class Second(NamedTuple):
    """The second run of an answered request, to compare the answers."""

    seq: Sequence
    replica: int
    began_ns: int


class _Unheard:
    """Stands for the call of a sequence whose answer was lost on the way: nobody listens to it."""

    seq = second = None
    tries = 0


UNHEARD = _Unheard()


class Call:
    """A request, and what became of it so far. Times in ns; -1: it never came to that."""

    __slots__ = (
        "answered_ns", "arrival_ns", "chunk", "correct", "dispatched_ns", "first_ns",
        "first_out_ns", "gone", "last_ns", "model", "replica", "row", "second", "seq", "tries",
    )  # fmt: skip

    def __init__(self, chunk: Chunk | Asked, row: int, arrival_ns: int) -> None:
        self.chunk = chunk
        self.row = row
        self.arrival_ns = arrival_ns
        self.dispatched_ns = -1
        self.first_ns = -1
        self.first_out_ns = -1
        self.last_ns = -1
        self.answered_ns = -1
        """The answer was back at the controller."""
        self.replica = -1
        """Of the last try."""
        self.model = ""
        """Asked for instead of the caller's."""
        self.tries = 0
        self.seq: Sequence | None = None
        """The try that the controller listens to."""
        self.gone: Sequence | None = None
        """The last try that it does not listen to any more."""
        self.second: Second | None = None
        self.correct = -1
