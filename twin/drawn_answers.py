"""Answers drawn from a scenario's rules: how sure each looks, and whether it is right.

An answer is of one of a few *kinds* (a sure one, an unsure one), each with laws for the features
that logprobs give and a chance of being right. The share of each kind may move with the load of the
replica, so a model can lose its confidence under pressure; weights that went bad make a share of
the answers of the ``bad`` kind.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from traces.generate.lengths import Law  # noqa: TC001 - msgspec reads it
from twin.answer_model import Features
from twin.dice import Dice, Share, quantile_of

if TYPE_CHECKING:
    from twin.arrivals import Asked, Chunk

_KIND, _MEAN, _WORST, _CLOSE, _RIGHT, _CONTRADICTS, _BAD = range(7)
"""What is drawn of an answer."""
_SUM_SLACK = 1e-6


class Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Answers that look alike. Entropies in millinats."""

    share: Share
    entropy_mean: Law
    entropy_worst: Law
    close_permille: Law
    correct: Share
    """Chance of being right."""
    loaded_share: Share | None = None
    """Under full load; none: as without load."""
    contradiction: Share = 0.0
    """Chance of turning something the prompt forbids into something allowed, or the reverse."""

    @property
    def share_at_load(self) -> float:
        return self.share if self.loaded_share is None else self.loaded_share


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares move straight from ``share`` to ``loaded_share`` as the requests in flight on the
    replica rise from the one number to the other."""

    from_in_flight: Annotated[int, Meta(ge=0)]
    to_in_flight: Annotated[int, Meta(ge=1)]

    def __post_init__(self) -> None:
        if self.to_in_flight <= self.from_in_flight:
            raise ValueError(
                f"to_in_flight {self.to_in_flight} must be more than from_in_flight"
                f" {self.from_in_flight}"
            )

    def part(self, in_flight: int) -> float:
        """0 without load, 1 under full load."""
        part = (in_flight - self.from_in_flight) / (self.to_in_flight - self.from_in_flight)
        return min(1.0, max(0.0, part))


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The answers of a model, a version of it, a business line or a chain's step.

    Empty names match everything; of several rules that match, the first is taken.
    """

    kinds: Annotated[tuple[Kind, ...], Meta(min_length=1)]
    model: str = ""
    version: str = ""
    line: str = ""
    step: str = ""
    load: Load | None = None
    bad: Kind | None = None
    """What bad weights answer, in the share of the answers that the fault says."""

    def __post_init__(self) -> None:
        for name, shares in (
            ("share", [kind.share for kind in self.kinds]),
            ("loaded_share", [kind.share_at_load for kind in self.kinds]),
        ):
            if abs(sum(shares) - 1) > _SUM_SLACK:
                raise ValueError(f"{name} of the kinds must add up to 1, not {sum(shares):g}")

    def matches(self, model: str, version: str, line: str, step: str) -> bool:
        return all(
            not own or own == given
            for own, given in (
                (self.model, model),
                (self.version, version),
                (self.line, line),
                (self.step, step),
            )
        )


class Answers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All rules of a scenario. Where none matches, answers come without logprobs and are right."""

    rules: Annotated[tuple[Rule, ...], Meta(min_length=1)]
    match_otherwise: Share = 0.0
    """Chance that two answers agree although they are not both right."""


class _Kind:
    """A kind with its laws made ready to draw."""

    __slots__ = ("close", "contradiction", "correct", "mean", "worst")

    def __init__(self, kind: Kind) -> None:
        self.mean = quantile_of(kind.entropy_mean)
        self.worst = quantile_of(kind.entropy_worst)
        self.close = quantile_of(kind.close_permille)
        self.correct = kind.correct
        self.contradiction = kind.contradiction


class _Rule:
    """A rule made ready to draw."""

    __slots__ = ("_kinds", "_load", "_loaded", "_plain", "bad", "rule")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._kinds = [_Kind(kind) for kind in rule.kinds]
        self._plain = tuple(accumulate(kind.share for kind in rule.kinds))
        self._loaded = tuple(accumulate(kind.share_at_load for kind in rule.kinds))
        self._load = rule.load
        self.bad = None if rule.bad is None else _Kind(rule.bad)

    def kind(self, uniform: float, in_flight: int) -> _Kind:
        part = 0.0 if self._load is None else self._load.part(in_flight)
        for kind, plain, loaded in zip(self._kinds, self._plain, self._loaded, strict=True):
            if uniform < plain + part * (loaded - plain):
                return kind
        return self._kinds[-1]


class DrawnAnswers:
    """Draws each answer from the scenario's rules: a ``twin.answer_model.AnswerModel``.

    A draw depends on the request, the replica and the instant only, so a second run of a request
    draws anew, and a run is the same each time.
    """

    def __init__(self, answers: Answers, seed: int) -> None:
        self._rules = [_Rule(rule) for rule in answers.rules]
        self._dice = Dice(seed, "answers")
        self._verdicts = Dice(seed, "verdicts")
        self._match_otherwise = answers.match_otherwise
        self._found: dict[tuple[str, str, str, str], _Rule | None] = {}

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
        """See ``twin.answer_model.AnswerModel``; ``shift_permille`` are of bad weights."""
        step = getattr(asked, "step", "")
        rule = self._rule(model, version, asked.line[row], step)
        if rule is None:
            return Features(-1, -1, -1, False, True)
        draw = self._dice.at(request, replica, now_ns).uniform
        bad = rule.bad if shift_permille else None
        if bad is not None and draw(_BAD) * 1000 < shift_permille:
            kind = bad
        else:
            kind = rule.kind(draw(_KIND), in_flight)
        mean = round(kind.mean(draw(_MEAN)))
        return Features(
            mean,
            max(mean, round(kind.worst(draw(_WORST)))),
            min(1000, round(kind.close(draw(_CLOSE)))),
            draw(_CONTRADICTS) < kind.contradiction,
            draw(_RIGHT) < kind.correct,
        )

    def verdict(
        self, request: int, first_correct: bool, second_correct: bool
    ) -> Literal["match", "mismatch"]:
        """Two right answers agree; others by chance."""
        if first_correct and second_correct:
            return "match"
        by_chance = self._verdicts.uniform(request) < self._match_otherwise
        return "match" if by_chance else "mismatch"

    def _rule(self, model: str, version: str, line: str, step: str) -> _Rule | None:
        key = (model, version, line, step)
        if key not in self._found:
            self._found[key] = next((rule for rule in self._rules if rule.rule.matches(*key)), None)
        return self._found[key]
