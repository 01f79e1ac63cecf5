"""A request as the world keeps it: between arrival and settlement, and what became of it."""

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
        "answered_ns", "arrival_ns", "candidates", "chunk", "correct", "dispatched_ns", "first_ns",
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
        self.candidates = 0
        """Logprobs asked for; 0: the answer comes without."""
        self.tries = 0
        self.seq: Sequence | None = None
        """The try that the controller listens to."""
        self.gone: Sequence | None = None
        """The last try that it does not listen to any more."""
        self.second: Second | None = None
        self.correct = -1


class Result(NamedTuple):
    """What became of one request. Times in ns since the start; -1: it never came to that."""

    outcome: str
    why: str
    tier: str
    http_code: int
    replica: int
    tries: int
    arrival_ns: int
    settled_ns: int
    dispatched_ns: int
    scheduled_ns: int
    first_ns: int
    """The engine had computed its first token."""
    last_ns: int
    """The engine had computed its last token."""
    first_out_ns: int
    """The first token was back at the controller."""
    cached_tokens: int
    output_tokens: int
    """Made by the engine; 0 for an embedding, and where it came to nothing."""
    preemptions: int
    confidence_permille: int = -1
    """What the caller was told; -1: nothing."""
    verification: str = ""
    correct: int = -1
    """Whether the engine's last answer was right, where an answer model knows: 1 or 0."""
    answered_ns: int = -1
    """The engine's answer was back at the controller; what it did with it then, took the rest."""
    turn: int = 0
    """Outputs that its server sent until the first token was out, that one included."""
