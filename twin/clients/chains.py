"""Agent chains: steps in order, some on the models, some outside, all within one time budget."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any
from zlib import crc32

import msgspec
import numpy as np
from msgspec import Meta

from traces.generate.arrivals import Arrivals, start_times
from traces.generate.lengths import Law, NonNegative, Positive
from twin.clients.sender import NS, Sender
from twin.clients.setting import Client, Name
from twin.dice import Share, quantile_of
from twin.figures.bounds import upper_share
from twin.figures.measure import gives_what_was_asked
from twin.figures.spread import Trickle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policy.decisions import Settled
    from twin.clients.setting import Setting
    from twin.dice import Dice
    from twin.world import Result

_PROMPT, _OUTPUT, _SLOW, _TIME = range(4)
"""What is drawn of a step."""


class _Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    name: Name


class LlmStep(_Step, frozen=True, forbid_unknown_fields=True, tag="llm", kw_only=True):
    """A request to a language model."""

    prompt_tokens: Law
    output_tokens: Law
    model: str = ""
    """Instead of the chain's."""


class EmbeddingStep(_Step, frozen=True, forbid_unknown_fields=True, tag="embedding", kw_only=True):
    """A request to an embedding model."""

    prompt_tokens: Law
    model: str = ""


class ExternalStep(_Step, frozen=True, forbid_unknown_fields=True, tag="external", kw_only=True):
    """Something outside, such as a database: the gateway sees nothing of it."""

    takes_s: Law
    slow_share: Share = 0.0
    """Of the calls that take ``slow_s`` instead."""
    slow_s: Law | None = None

    def __post_init__(self) -> None:
        if (self.slow_share > 0) != (self.slow_s is not None):
            raise ValueError("slow_share above 0 and slow_s belong together")


Step = LlmStep | EmbeddingStep | ExternalStep


class Chains(Client, frozen=True, forbid_unknown_fields=True, tag="chains", kw_only=True):
    """Chains that start as ``arrivals`` says. A chain is useful when it is complete within the
    budget, or was ended within it after the step ``enough_after``, and no step on the way was wrong
    or without a real answer."""

    arrivals: Arrivals
    steps: Annotated[tuple[Step, ...], Meta(min_length=1)]
    stream: bool = False
    """Agents read whole answers, which can be verified before they are given out."""
    budget_s: Positive
    """From the chain's start, by the client's own clock."""
    users: Annotated[int, Meta(ge=1)] = 1000
    """Chain n belongs to user n modulo this."""
    cut_external: bool = True
    """Steps outside are cut where the answer before said how long they may take; the chain goes
    on without their result."""
    enough_after: str = ""
    """A step whose answer is worth having although the chain was ended after it; empty: none."""
    useful_degraded: tuple[str, ...] = ("cached", "model")
    """Ways of being degraded that are a real answer to a step."""
    resumes: Annotated[int, Meta(ge=0, le=20)] = 1
    """How often a chain goes on after a step has failed: from its last checkpoint, or, without
    one, from its first step."""
    resume_after_s: NonNegative = 1.0

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        if len(set(names)) < len(names):
            raise ValueError(f"two steps have the same name: {', '.join(names)}")
        if self.enough_after and self.enough_after not in names:
            raise ValueError(f"enough_after {self.enough_after!r} is no step: {', '.join(names)}")
        if isinstance(self.steps[0], ExternalStep):
            raise ValueError("the first step must be a request: the gateway counts from it")


class ChainClients:
    """All chains of one ``Chains``."""

    def __init__(self, spec: Chains, setting: Setting) -> None:
        self.spec = spec
        self.setting = setting
        self.sender = Sender(setting, spec.name, spec.retries, spec.patience_s)
        self.laws = [_Laws(step) for step in spec.steps]
        self._dice = setting.dice(spec.name)
        self._starts = self._start_times()
        self._started = 0
        self.counts: Counter[str] = Counter()
        self._lasted_s = Trickle()
        self._useful_s = Trickle()
        names = [step.name for step in spec.steps]
        self._enough = names.index(spec.enough_after) if spec.enough_after else len(names)

    def start(self) -> None:
        self.setting.world.clients += 1
        self._await_next()

    def over(self, kind: str, flaws: set[str], steps_done: int, lasted_ns: int) -> None:
        """A chain has come to its end: complete, ended (by the gateway) or failed.

        ``flaws``: of ``wrong`` and ``hollow``, what its steps were.
        """
        in_time = lasted_ns <= self.spec.budget_s * NS
        enough = kind == "complete" or (kind == "ended" and steps_done > self._enough)
        useful = in_time and enough and not flaws
        self.counts[kind] += 1
        self.counts.update(flaws)
        self.counts["useful"] += useful
        self.counts["late"] += not in_time
        self._lasted_s.add(lasted_ns / NS)
        if useful:
            self._useful_s.add(lasted_ns / NS)
        self.setting.world.clients -= 1

    def figures(self) -> dict[str, Any]:
        counts, started = self.counts, self._started
        useless = started - counts["useful"]
        return {
            **self.sender.figures(),
            "started": started,
            **{name: counts[name] for name in _COUNTS},
            "useless": useless,
            "useful_share": counts["useful"] / started if started else None,
            "useless_share": useless / started if started else None,
            "useless_share_up95": upper_share(useless, started),
            "lasted_s": self._lasted_s.figures(),
            "useful_s": self._useful_s.figures(),
        }

    def _start_times(self) -> Iterator[float]:
        seed = np.random.SeedSequence([self.setting.seed, crc32(self.spec.name.encode())])
        rng = np.random.Generator(np.random.PCG64(seed))
        for times in start_times(self.spec.arrivals, 0.0, self.setting.end_ns / NS, rng):
            yield from times.tolist()

    def _await_next(self) -> None:
        at_s = next(self._starts, None)
        world = self.setting.world
        if at_s is None:
            world.clients -= 1
            return
        world.after(max(0, round(at_s * NS) - world.now_ns), self._begin)

    def _begin(self, event: object) -> None:
        number = self._started
        self._started += 1
        self.setting.world.clients += 1
        _Chain(self, number, self._dice.at(number)).go_on(event)
        self._await_next()


_COUNTS = (
    "complete", "ended", "failed", "useful", "late", "wrong", "hollow", "degraded_steps",
    "cut_steps", "slow_steps", "resumed", "restarted", "steps_repeated",
)  # fmt: skip


class _Laws:
    """A step's laws made ready to draw."""

    __slots__ = ("_output", "_prompt", "_slow", "_takes", "step")

    def __init__(self, step: Step) -> None:
        self.step = step
        one = quantile_of(Law(fixed=1.0))
        self._prompt = self._output = self._takes = self._slow = one
        if isinstance(step, ExternalStep):
            self._takes = quantile_of(step.takes_s)
            self._slow = quantile_of(step.slow_s) if step.slow_s is not None else self._takes
        else:
            self._prompt = quantile_of(step.prompt_tokens)
            if isinstance(step, LlmStep):
                self._output = quantile_of(step.output_tokens)

    def takes(self, dice: Dice, slow_share: float) -> tuple[int, bool]:
        """(how long it takes in ns, whether that is one of the slow ones)."""
        slow = dice.uniform(_SLOW) < slow_share
        law = self._slow if slow else self._takes
        return round(law(dice.uniform(_TIME)) * NS), slow

    def message(self, dice: Dice) -> dict[str, Any]:
        """What a step on a model adds to the chain's fields."""
        step = self.step
        prompt_tokens = max(1, round(self._prompt(dice.uniform(_PROMPT))))
        fields: dict[str, Any] = {"prompt_tokens": prompt_tokens, "step": step.name}
        if isinstance(step, LlmStep):
            fields["output_tokens"] = max(1, round(self._output(dice.uniform(_OUTPUT))))
        else:
            fields |= {"output_tokens": 0, "max_tokens": 0, "endpoint": "embeddings"}
        if not isinstance(step, ExternalStep) and step.model:
            fields["model"] = step.model
        return fields


class _Chain:
    """One chain under way."""

    __slots__ = (
        "_all", "_at", "_checkpoint", "_checkpoint_at", "_dice", "_flaws", "_furthest", "_number",
        "_resumes", "_resuming", "_start_ns", "_step_ns",
    )  # fmt: skip

    def __init__(self, clients: ChainClients, number: int, dice: Dice) -> None:
        self._all = clients
        self._number = number
        self._dice = dice
        self._start_ns = clients.setting.world.now_ns
        self._at = 0
        self._furthest = 0
        """Steps done at best, before any restart."""
        self._checkpoint = ""
        self._checkpoint_at = 0
        """The step that follows the checkpoint."""
        self._resumes = clients.spec.resumes
        self._resuming = False
        self._step_ns = -1
        self._flaws: set[str] = set()

    def go_on(self, event: object) -> None:
        """The present step, or the chain's end."""
        steps = self._all.laws
        if self._at == len(steps):
            self._over("complete")
            return
        laws = steps[self._at]
        dice = self._dice.at(self._at)
        if isinstance(laws.step, ExternalStep):
            self._outside(laws, laws.step, dice)
            return
        self._all.counts["steps_repeated"] += self._at < self._furthest
        spec = self._all.spec
        message = {
            **spec.fields(),
            "user": f"{spec.name}-{self._number % spec.users}",
            "chain": f"{spec.name}-{self._number}",
            "resume": self._checkpoint if self._resuming else "",
            **laws.message(dice),
        }
        self._all.sender.send(message, self._answered)

    def _outside(self, laws: _Laws, step: ExternalStep, dice: Dice) -> None:
        takes_ns, slow = laws.takes(dice, step.slow_share)
        self._all.counts["slow_steps"] += slow
        if self._all.spec.cut_external and 0 <= self._step_ns < takes_ns:
            takes_ns = self._step_ns
            self._all.counts["cut_steps"] += 1
        self._done()
        self._all.setting.world.after(takes_ns, self.go_on)

    def _answered(self, result: Result, told: Settled) -> None:
        if result.outcome == "answered" or (result.outcome == "degraded" and told.left_ns != 0):
            self._judge(result)
            self._step_ns = told.step_ns
            self._resuming = False
            self._done()
            if told.checkpoint:
                self._checkpoint = told.checkpoint
                self._checkpoint_at = self._at
            self.go_on(None)
        elif result.outcome == "degraded":
            self._over("ended")
        else:
            self._failed()

    def _judge(self, result: Result) -> None:
        """Whether the step has a real answer, and whether that is right."""
        if result.outcome == "degraded":
            self._all.counts["degraded_steps"] += 1
            if not gives_what_was_asked(result.why, self._all.spec.useful_degraded):
                self._flaws.add("hollow")
                return
        if result.correct == 0 and result.why != "cached":
            self._flaws.add("wrong")

    def _failed(self) -> None:
        spec = self._all.spec
        if not self._resumes:
            self._over("failed")
            return
        self._resumes -= 1
        self._resuming = bool(self._checkpoint)
        if not self._resuming:
            self._flaws.clear()
        self._at = self._checkpoint_at
        self._all.counts["resumed" if self._resuming else "restarted"] += 1
        self._all.setting.world.after(round(spec.resume_after_s * NS), self.go_on)

    def _done(self) -> None:
        self._at += 1
        self._furthest = max(self._furthest, self._at)

    def _over(self, kind: str) -> None:
        lasted_ns = self._all.setting.world.now_ns - self._start_ns
        self._all.over(kind, self._flaws, self._furthest, lasted_ns)
