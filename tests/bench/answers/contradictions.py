"""How many contradictions between prompt and answer are found, and how many found are none.

Counted on the cases in ``tests/unit/contradictions.yaml``, hand-written, half of them Chinese: on
all, and on those that were written after the rules and that no rule was changed for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from policy.signals import contradictions
from tests.figures import Figure, require, show

CASES = Path(__file__).parents[2] / "unit" / "contradictions.yaml"
NAMES = (
    "contradiction_precision", "contradiction_recall", "contradiction_precision_held_out",
    "contradiction_recall_held_out",
)  # fmt: skip


class Case(NamedTuple):
    """A prompt, its answer, and whether that contradicts it."""

    lang: str
    kind: str
    prompt: str
    answer: str
    contradiction: bool
    held_out: bool = False


class Score(NamedTuple):
    """How the rules did on some cases."""

    cases: int
    found: int
    """Contradictions that were found."""
    missed: tuple[Case, ...]
    false: tuple[Case, ...]

    @property
    def precision(self) -> float:
        return self.found / max(1, self.found + len(self.false))

    @property
    def recall(self) -> float:
        return self.found / max(1, self.found + len(self.missed))

    def told(self) -> str:
        contrary = self.found + len(self.missed)
        return (
            f"{self.found} of {contrary} contradictions found, {len(self.false)} false alarms in "
            f"{self.cases - contrary} clean answers"
        )


def load_cases() -> list[Case]:
    """All of the file's."""
    listed: list[dict[str, Any]] = yaml.safe_load(CASES.read_text(encoding="utf-8"))["cases"]
    return [Case(**case) for case in listed]


def score(cases: list[Case]) -> Score:
    """Put the rules to all of them."""
    found = 0
    missed: list[Case] = []
    false: list[Case] = []
    for case in cases:
        told = bool(contradictions(case.prompt, case.answer))
        found += told and case.contradiction
        if told != case.contradiction:
            (missed if case.contradiction else false).append(case)
    return Score(len(cases), found, tuple(missed), tuple(false))


def measure(quick: bool = False) -> list[Figure]:
    """The figures; they take less than a second, so ``quick`` changes nothing."""
    cases = load_cases()
    everything = score(cases)
    held_out = score([case for case in cases if case.held_out])
    how = f"{everything.cases} hand-written prompts and answers: {everything.told()}"
    apart = f"{held_out.cases} cases written after the rules: {held_out.told()}"
    goals = (">= 0.95", ">= 0.8", ">= 0.9", ">= 0.7")
    values = (everything.precision, everything.recall, held_out.precision, held_out.recall)
    return [
        Figure(name, value, "1", goal, text)
        for name, value, goal, text in zip(
            NAMES, values, goals, (how, how, apart, apart), strict=True
        )
    ]


def main() -> int:
    """Show the figures and the cases that were judged wrongly."""
    figures = measure()
    show(figures)
    judged = score(load_cases())
    for name, cases in (("missed", judged.missed), ("false alarm", judged.false)):
        for case in cases:
            where = "held out" if case.held_out else "developed on"
            print(f"{name} ({where}, {case.kind}): {case.prompt!r} -> {case.answer!r}")
    complaints = require(figures, NAMES)
    for complaint in complaints:
        print(complaint, file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
