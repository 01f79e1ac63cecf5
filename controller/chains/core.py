"""A chain's budget, as its client keeps it: what each step may take, and what is left out.

No IO and no clock: time is an argument, and both drivers, the blocking one and the one on an event
loop, ask the same ``Course``. A step's share is its weight's part of what is left, against the
steps after it. So time that a step leaves over flows on to those after it, and what it takes too
much is taken from them; a step is stopped only when nothing is left for the whole chain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from policy.chains import share_ns
from policy.files import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from policy.parameters.chains import Plan

NS_PER_MS = 1_000_000
RESERVE_NS = 50 * NS_PER_MS
"""Before the end of the budget steps are stopped, so that the caller has what is there in time; of
short budgets a twentieth."""
STEPS_MOST = 1000
"""Of one chain, numbered repetitions included."""
NAME_MOST = 256
NUMBER = "#"

Outcome = Literal["open", "done", "kept", "failed", "ended", "late"]
Kind = Literal["model", "function", "coroutine"]
NO_TIME = "the chain's time was over"
NOT_SAVED = "it came back, but its checkpoint was not committed before the chain's time was over"


class ChainError(Exception):
    """A chain that cannot be run as it was asked for: what is wrong, and what to do."""


class StepFailed(ChainError):
    """A model call that came to nothing. The chain may go on, or call the step again.

    Args:
        status: HTTP status; 0: nothing answered.
    """

    def __init__(self, message: str, status: int = 0, body: bytes = b"") -> None:
        super().__init__(message)
        self.status = status
        self.body = body


class ChainOver(ChainError):
    """Nothing is left of the budget. The run's ``with`` block ends quietly by it."""


@dataclass(slots=True)
class Step:
    """A step of a run, as far as it has come."""

    name: str
    kind: Kind = "function"
    outcome: Outcome = "open"
    """done: in this run; kept: before it, and taken from the store; failed: it raised, or the
    model did not answer; ended: it was stopped; late: it could not be stopped, and what it still
    gives is dropped."""
    value: Any = None
    why: str = ""
    checkpoint: str = ""
    gateway_checkpoint: str = ""
    began_ns: int = 0
    share_ns: int = 0
    """What it was meant to take, when it began."""
    spent_ns: int = 0
    """Of all its tries, here or, if it is kept, when it ran."""
    attributes: dict[str, Any] = field(default_factory=dict)
    saving: bool = False
    """It came back in time, and its checkpoint is not committed yet."""

    @property
    def finished(self) -> bool:
        return self.outcome in ("done", "kept")

    @property
    def spent_ms(self) -> float:
        return self.spent_ns / NS_PER_MS


@dataclass(frozen=True, slots=True)
class ChainResult:
    """What there is of a chain."""

    chain: str
    user: str
    trace_id: str
    partial: bool
    """A step failed, or was ended or not reached because the time was over."""
    values: Mapping[str, Any]
    """Of the steps that are finished, in order."""
    missing: Mapping[str, str]
    """Planned steps that are not finished, and why. "not called": the caller left it out."""
    checkpoints: Mapping[str, str]
    spent_ms: Mapping[str, float]
    left_ms: float
    steps: Mapping[str, Step]

    @property
    def checkpoint(self) -> str:
        """The last one, to resume from; empty: nothing is finished."""
        return list(self.checkpoints.values())[-1] if self.checkpoints else ""


class Course:
    """One chain under way.

    Args:
        now_ns: when its budget begins, on any clock that does not go back.
        left_ns: what is left of the budget, if it began before; at most all of it.
    """

    def __init__(self, plan: Plan, now_ns: int, left_ns: int | None = None) -> None:
        budget_ns = plan.budget_ms * NS_PER_MS
        self._plan = plan
        self._places = {step.name: place for place, step in enumerate(plan.steps)}
        if left_ns is not None:
            budget_ns = min(budget_ns, max(0, left_ns))
        self.budget_ns = budget_ns
        self._reserve_ns = min(RESERVE_NS, budget_ns // 20)
        self._end_ns = now_ns + budget_ns - self._reserve_ns
        self._why_over = ""
        self.steps: dict[str, Step] = {}
        """All that are known, in the order in which they were finished or begun."""

    def left_ns(self, now_ns: int) -> int:
        return 0 if self._why_over else max(0, self._end_ns - now_ns)

    def save_ns(self, now_ns: int) -> int:
        """For how long the store is still waited for: most of what is kept back, too."""
        return max(0, self._end_ns + self._reserve_ns * 4 // 5 - now_ns)

    @property
    def over(self) -> bool:
        """It was ended."""
        return bool(self._why_over)

    def finished(self, name: str) -> Step | None:
        """The step, if it must not be run again."""
        step = self.steps.get(name)
        return step if step is not None and step.finished else None

    def keep(self, step: Step) -> Step:
        """It was finished before, here or in another process; the step as it is known then."""
        known = self.steps.get(step.name)
        if known is not None and (known.finished or known.outcome == "open"):
            return known
        self.steps.pop(step.name, None)
        self.steps[step.name] = step
        return step

    def begin(self, name: str, kind: Kind, now_ns: int) -> Step:
        """A step begins; what it may take is in it.

        Raises:
            ChainError: no such step is planned, or it runs or is finished already.
            ChainOver: there is no time for it.
        """
        place = self._place(name)
        known = self.steps.get(name)
        if known is not None and (known.finished or known.outcome == "open"):
            raise ChainError(
                f"step {name!r} is {known.outcome} already: number repetitions, as"
                f" {name.partition(NUMBER)[0] + NUMBER}2"
            )
        if known is None and len(self.steps) >= STEPS_MOST:
            raise ChainError(f"step {name!r} would be number {STEPS_MOST + 1}: begin a new chain")
        left_ns = self.left_ns(now_ns)
        if left_ns == 0:
            self.end(now_ns, NO_TIME)
            raise ChainOver(f"step {name!r} was not begun: {self._why_over}")
        spent_ns = known.spent_ns if known is not None else 0
        weight, *later = [step.weight for step in self._plan.steps[place:]] or [1]
        share = share_ns(left_ns, weight, sum(later))
        step = Step(name, kind, began_ns=now_ns, share_ns=share, spent_ns=spent_ns)
        self.steps.pop(name, None)
        self.steps[name] = step
        return step

    def came_back(self, step: Step) -> bool:
        """It has given its value, and the end of the budget is nothing to it any more; false: it
        was given up before, and its value is dropped."""
        step.saving = step.outcome == "open"
        return step.saving

    def finish(self, step: Step, now_ns: int) -> None:
        """Its checkpoint is committed."""
        self._settle(step, now_ns, "done", "")

    def fail(self, step: Step, now_ns: int, why: str) -> None:
        self._settle(step, now_ns, "failed", why)

    def told_left(self, now_ns: int, left_ns: int) -> None:
        """The gateway keeps the same budget, and says what is left of it there."""
        self._end_ns = min(self._end_ns, now_ns + max(0, left_ns))

    def end(self, now_ns: int, why: str) -> list[Step]:
        """The chain is over: which steps are given up by that."""
        self._why_over = self._why_over or why
        opened = [step for step in self.steps.values() if step.outcome == "open"]
        given_up = [step for step in opened if not step.saving]
        for step in given_up:
            late = step.kind == "function"
            self._settle(step, now_ns, "late" if late else "ended", self._why_over)
        return given_up

    def missing(self) -> dict[str, str]:
        """Planned steps that are not finished, and why; what failed beside them, too."""
        missing: dict[str, str] = {}
        for planned in self._plan.steps:
            if planned.name not in self.steps:
                missing[planned.name] = self._why_over or "not called"
        for step in self.steps.values():
            if not step.finished:
                missing[step.name] = f"{step.outcome}: {step.why}" if step.why else step.outcome
        return missing

    def result(
        self, now_ns: int, chain: str, user: str, trace_id: str, order: Sequence[str] = ()
    ) -> ChainResult:
        """What there is, the finished steps in the ``order`` in which the store has them: beside
        each other they end otherwise than they began."""
        missing = self.missing()
        finished = {name: step for name, step in self.steps.items() if step.finished}
        for name in order:
            if name in finished:
                finished[name] = finished.pop(name)
        return ChainResult(
            chain=chain,
            user=user,
            trace_id=trace_id,
            partial=any(why != "not called" for why in missing.values()),
            values={name: step.value for name, step in finished.items()},
            missing=missing,
            checkpoints={name: step.checkpoint for name, step in finished.items()},
            spent_ms={name: step.spent_ms for name, step in self.steps.items()},
            left_ms=self.left_ns(now_ns) / NS_PER_MS,
            steps=dict(self.steps),
        )

    def _settle(self, step: Step, now_ns: int, outcome: Outcome, why: str) -> None:
        if step.outcome != "open":  # the chain was over before it came back
            return
        step.outcome = outcome
        step.saving = False
        step.why = why
        step.spent_ns += now_ns - step.began_ns

    def _place(self, name: str) -> int:
        if not self._places:  # each may take what is left
            return 0
        base, _, number = name.rpartition(NUMBER)
        numbered = number.isascii() and number.isdigit()
        place = self._places.get(name, self._places.get(base) if numbered else None)
        if place is None:
            hint = nearest(name, self._places)
            raise ChainError(f"step {name!r} is not in the chain's definition ({hint})")
        return place


def check_name(what: str, name: str) -> str:
    """A name that goes into headers and logs.

    Raises:
        ChainError: it is empty, too long, or has characters that control.
    """
    if not name or len(name) > NAME_MOST:
        raise ChainError(f"the {what} is {name[:40]!r}: 1 to {NAME_MOST} characters")
    if any(char < " " or char == "\x7f" or "\ud800" <= char <= "\udfff" for char in name):
        raise ChainError(f"the {what} is {name[:40]!r}: no control characters, no lone surrogates")
    if name != name.strip(" "):  # HTTP drops them, and the gateway would know it by another name
        raise ChainError(f"the {what} is {name[:40]!r}: no spaces at its ends")
    return name
