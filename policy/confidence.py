"""How far an answer can be trusted, and whether it is worth a second run.

The score is a weighted mean of three parts, each 1000 where a figure is 0 and falling in a
straight line to 0 where the figure leaves no trust:

    mean   = 1000 - 1000 * entropy_mean / entropy_mean_zero
    worst  = 1000 - 1000 * entropy_worst / entropy_worst_zero
    close  = 1000 - 1000 * close / close_zero
    score  = (mean * (1000 - w - c) + worst * w + close * c) / 1000

The mean entropy says how sure the model was all along, so it weighs most; one uncertain token is
lost in the mean of a long answer, hence the worst; and a token decided by a hair could as well
have been the other, whatever its entropy, hence the close ones. Straight lines and whole numbers,
so that a score is the same on every machine and its parts can be added up by hand. An answer that
contradicts its prompt is capped instead: a model can be wrong and sure of it.

A second run is paid from a budget that fills with the tokens served, and never overdraws it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from policy.decisions import Decision, Verification
    from policy.events import Finished, Verified
    from policy.parameters.confidence import Confidence as Section

Judgement = tuple[Literal["deliver", "verify", "degrade"], "Verification"]

_UNSCORED: Judgement = ("deliver", "")
_TRUSTED: Judgement = ("deliver", "not_needed")
_STREAMED: Judgement = ("deliver", "skipped_stream")
_DOUBTED: Judgement = ("degrade", "not_needed")
_UNPAID: Judgement = ("degrade", "skipped_budget")
_VERIFY: Judgement = ("verify", "")


class Budget(NamedTuple):
    """What second runs may take."""

    saved_tokens: int
    burst_tokens: int
    """The most that is saved up."""
    budget_permille: int
    """Of the tokens served."""


class ConfidenceState(msgspec.Struct, array_like=True):
    """The budget in canonical form."""

    saved: int


class Confidence:
    """Scores answers and rations second runs."""

    __slots__ = (
        "_budget_permille", "_close_weight", "_close_zero", "_contradiction_most",
        "_degrade_below", "_mean_weight", "_mean_zero", "_saved", "_saved_most", "_verify_below",
        "_worst_weight", "_worst_zero",
    )  # fmt: skip

    def __init__(self, section: Section) -> None:
        self._verify_below = section.verify_below_permille
        self._degrade_below = section.degrade_below_permille
        self._budget_permille = section.budget_permille
        self._saved_most = section.burst_tokens * 1000
        self._saved = 0
        """Budget not spent, in thousandths of a token."""
        self._mean_zero = section.entropy_mean_zero_milli
        self._worst_zero = section.entropy_worst_zero_milli
        self._close_zero = section.close_zero_permille
        self._worst_weight = section.worst_weight_permille
        self._close_weight = section.close_weight_permille
        self._mean_weight = 1000 - self._worst_weight - self._close_weight
        self._contradiction_most = section.contradiction_most_permille

    def budget(self) -> Budget:
        return Budget(self._saved // 1000, self._saved_most // 1000, self._budget_permille)

    def score(self, event: Finished | Verified) -> int:
        """Per mille; -1 for an answer without logprobs, or with a part of its figures only."""
        figures = (
            event.entropy_mean_millinats, event.entropy_worst_millinats, event.close_permille,
        )  # fmt: skip
        if min(figures) < 0:
            return -1
        score = (
            _part(event.entropy_mean_millinats, self._mean_zero) * self._mean_weight
            + _part(event.entropy_worst_millinats, self._worst_zero) * self._worst_weight
            + _part(event.close_permille, self._close_zero) * self._close_weight
        ) // 1000
        if event.contradiction and score > self._contradiction_most:
            return self._contradiction_most
        return score

    def judge(
        self, score: int, stream: bool, tokens: int, can_verify: bool, probe: bool = False
    ) -> Judgement:
        """What becomes of an answer, and the state of its verification (empty: not yet known).

        ``tokens`` is what a second run costs, its prompt and output; "verify" has taken them from
        the budget. ``can_verify``: a replica that does not fail together with the first is there.
        ``probe``: the answer says whether its replica can be trusted again; such ones are few, and
        are verified with whatever budget there is.
        """
        if score < 0:
            return _UNSCORED
        if score >= self._verify_below:
            return _TRUSTED
        if stream:  # its caller has it already
            return _STREAMED
        if score < self._degrade_below:
            return _DOUBTED
        if not can_verify or (tokens * 1000 > self._saved and not probe):
            return _UNPAID
        self._saved = max(0, self._saved - tokens * 1000)
        return _VERIFY

    def served(self, tokens: int) -> None:
        """A request was answered with so many tokens, prompt and output: the budget grows."""
        saved = self._saved + tokens * self._budget_permille
        self._saved = saved if saved < self._saved_most else self._saved_most

    def ticked(self, now_ns: int) -> tuple[Decision, ...]:
        """Nothing here waits for a time."""
        return ()

    def deadline_ns(self) -> int | None:
        return None

    def state(self, now_ns: int) -> ConfidenceState:
        return ConfidenceState(self._saved)

    def load(self, state: ConfidenceState, now_ns: int) -> None:
        self._saved = state.saved

    def size(self) -> int:
        return 0

    def size_most(self) -> int:
        return 0


def _part(figure: int, zero: int) -> int:
    """1000 at 0, falling to 0 at ``zero`` and beyond."""
    return 0 if figure >= zero else 1000 - 1000 * max(0, figure) // zero
