"""The twelve questions as a list: what each is asked with, within which bounds, and how it is
answered. For whoever asks without knowing them, such as a page."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from twin.plan import questions
from twin.plan.inputs import PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from twin.plan.questions import Answer, Asking

Value = int | float | str
DIGITS_MOST = 40
"""Of a number that cannot be, in what is said of it."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One thing that a question is asked with."""

    name: str
    """As the option of ``twinkeel plan ask`` is called, without dashes; ``NAME`` stands for the
    argument without an option."""
    kind: Literal["whole", "number", "text"]
    usual: Value
    unit: str = ""
    least: float = -math.inf
    most: float = math.inf

    def checked(self, value: Any) -> Value:
        """The value, of its type.

        Raises:
            PlanError: it is of another type or out of bounds.
        """
        if self.kind == "text":
            if not isinstance(value, str) or not value:
                raise PlanError(f"{self.name} {value!r}: write a name")
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise PlanError(f"{self.name} {value!r}: write a number")
        if not self.least <= value <= self.most or math.isinf(value):
            raise PlanError(
                f"{self.name} {str(value)[:DIGITS_MOST]}: it must lie between {self.least:g} and"
                f" {self.most:g}"
            )
        if self.kind == "whole" and value != int(value):
            raise PlanError(f"{self.name} {value:g}: write a whole number")
        return int(value) if self.kind == "whole" else float(value)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, by the name that ``twinkeel plan ask`` has for it."""

    name: str
    title: str
    ask: Callable[..., Answer]
    """Of an ``Asking``, then the parameters in their order; see ``plain``."""
    parameters: tuple[Parameter, ...] = ()
    have: bool = False
    """Whether it is asked of the fleet that there is."""
    plain: bool = False
    """Arithmetic alone: nothing is played, and ``ask`` takes the parameters alone."""
    needs: Literal["", "users", "lines"] = ""
    """What the trace has to name."""

    def checked(self, given: Mapping[str, Any]) -> dict[str, Value]:
        """All parameters, as usual where they are not given.

        Raises:
            PlanError: one of them cannot be, or is unknown.
        """
        known = {one.name: one for one in self.parameters}
        for name in given:
            if name not in known:
                raise PlanError(f"{self.name} takes no {name}")
        return {name: one.checked(given.get(name, one.usual)) for name, one in known.items()}

    def answer(self, asking: Asking | None, given: Mapping[str, Any]) -> Answer:
        """
        Raises:
            PlanError, FileError, TraceError: it has no answer, and why.
        """
        values = self.checked(given).values()
        return self.ask(*values) if self.plain else self.ask(asking, *values)


QUESTIONS: dict[str, Question] = {
    one.name: one
    for one in (
        Question(
            "users", "How many GPUs for so many users?",
            questions.gpus_for_users,
            (Parameter("users", "whole", 5000, "users", 1, 1e9),), needs="users",
        ),
        Question(
            "capacity", "How many users on what I have, before p99 falls off?",
            questions.users_on_fleet,
            (Parameter("p99", "number", 2.0, "s", 0.001, 1e4),), have=True, needs="users",
        ),
        Question(
            "fit", "Do the model and that context fit on the card?",
            questions.does_it_fit,
            (
                Parameter("NAME", "text", "h100-sxm/qwen3-8b"),
                Parameter("context", "whole", 8192, "tokens", 1, 1e7),
            ),
            plain=True,
        ),
        Question(
            "tp", "Is one large replica (TP8) worth two small ones (TP4)?",
            questions.tensor_parallel,
            (
                Parameter("large", "whole", 8, "cards", 2, 64),
                Parameter("small", "whole", 4, "cards", 1, 32),
            ),
        ),
        Question("gpu", "Which card: H100, H200 or a cheaper one?", questions.which_gpu),
        Question(
            "double", "What if traffic doubles?", questions.doubled,
            (Parameter("factor", "number", 2.0, "x", 0.01, 100),), have=True,
        ),
        Question("n+1", "How many so that a card may be lost at the peak?", questions.n_plus_one),
        Question(
            "cost", "What does it cost a month, and a million good tokens?", questions.cost,
            have=True,
        ),
        Question(
            "burst", "A burst: buffer it or overflow?", questions.burst,
            (Parameter("factor", "number", 2.0, "x", 1, 100),), have=True,
        ),
        Question(
            "cold-start", "What does a cold start cost?", questions.cold_start, have=True
        ),
        Question("flag", "Which vLLM flag limits me?", questions.limiting_flag, have=True),
        Question(
            "shed", "Which business line can be shed with the least harm?", questions.least_harm,
            (Parameter("growth", "number", 0.0, "x", 0, 1000),), have=True, needs="lines",
        ),
    )
}  # fmt: skip
"""In the order in which they are listed."""


def question_of(name: str) -> Question:
    """
    Raises:
        PlanError: there is none of that name.
    """
    if name not in QUESTIONS:
        raise PlanError(f"no question {name!r}: use {', '.join(QUESTIONS)}")
    return QUESTIONS[name]


__all__ = ["QUESTIONS", "Parameter", "Question", "question_of"]
