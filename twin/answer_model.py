"""The contract between the world and whoever models answers; ``twin.drawn_answers`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from twin.arrivals import Asked, Chunk


class Features(NamedTuple):
    """What an answer looks like from outside, and whether it is right."""

    entropy_mean_millinats: int
    entropy_worst_millinats: int
    close_permille: int
    contradiction: bool
    correct: bool
    """Nobody in the world is told: it is for the report and for verdicts."""


class AnswerModel(Protocol):
    """What engines answer. Every draw depends on the arguments only."""

    def features(
        self,
        request: int,
        asked: Chunk | Asked,
        row: int,
        *,
        replica: int,
        version: str,
        model: str,
        in_flight: int,
        shift_permille: int,
        now_ns: int,
    ) -> Features:
        """Of the answer to ``asked``'s row that ``replica`` gave.

        Args:
            model: that was asked for; it may differ from the row's own.
            in_flight: requests left in that engine.
            shift_permille: how far bad weights move it; 0: they are good.
        """
        ...

    def verdict(
        self, request: int, first_correct: bool, second_correct: bool
    ) -> Literal["match", "mismatch"]:
        """Whether two answers to the same request agree."""
        ...
