"""A decision log that fails a run as soon as the policy breaks an invariant.

Plugged in where a run keeps its log, a ``Checker`` sees every step of it. What it holds a policy
to is in ``tests.dst.rules``, ``tests.dst.promises`` and ``tests.dst.books``, one class for each
invariant. A broken one is told by name, with the time, the step and the seed.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from policy.decisions import Refused, Settled
from tests.dst.books import BOOKS, Snapshots
from tests.dst.ledger import Ledger
from tests.dst.promises import PROMISES
from tests.dst.rules import LOG_RULES, Broken, Rule

if TYPE_CHECKING:
    from collections import Counter

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.events import Event
    from policy.parameters import Parameters
    from policy.runner import Log


class Checker:
    """See above.

    Args:
        parameters: the policy file in force at first.
        policy: what writes the log, to look at its books, too; without it only the log is checked.
        log: where the steps go on to.
        seed: of the run, for the message, and for when snapshots are taken.
        snapshot_every_steps: on average; 0: never.
        seen: counts what the run came by: events and decisions by name, and their kinds.
    """

    def __init__(
        self,
        parameters: Parameters,
        policy: Policy | None = None,
        *,
        log: Log | None = None,
        seed: int = 0,
        snapshot_every_steps: int = 0,
        seen: Counter[str] | None = None,
    ) -> None:
        self.ledger = Ledger(parameters)
        self.steps = 0
        self.seed = seed
        self._log = log
        self._seen = seen
        self._rules: list[Rule] = [rule(self.ledger) for rule in LOG_RULES + PROMISES]
        if policy is not None:
            self._rules += [book(self.ledger, policy) for book in BOOKS]
            if snapshot_every_steps:
                rng = random.Random(seed)  # noqa: S311
                self._rules.append(Snapshots(self.ledger, policy, rng, snapshot_every_steps))
        self._before = self._overriding("before")
        self._decided = self._overriding("decided")
        self._after = self._overriding("after")

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        """One step of the policy.

        Raises:
            Broken: the policy broke an invariant.
        """
        self.steps += 1
        ledger = self.ledger
        for rule in self._before:
            self._ask(rule, now_ns, "before", event)
        if not any(type(decision) is Refused for decision in decisions):
            ledger.learn(now_ns, event)
        for decision in decisions:
            for rule in self._decided:
                self._ask(rule, now_ns, "decided", decision)
            ledger.carry(now_ns, decision)
        for rule in self._after:
            self._ask(rule, now_ns, "after", event, decisions)
        for decision in decisions:
            if type(decision) is Settled:
                ledger.forget(decision.request)
        if self._seen is not None:
            self._count(event, decisions)
        if self._log is not None:
            self._log.append(now_ns, event, decisions)

    def end(self, now_ns: int) -> None:
        """The run is over and everything has come to its end.

        Raises:
            Broken: something has not.
        """
        for rule in self._rules:
            self._ask(rule, now_ns, "end")

    def _overriding(self, moment: str) -> list[Rule]:
        plain = getattr(Rule, moment)
        return [rule for rule in self._rules if getattr(type(rule), moment) is not plain]

    def _ask(self, rule: Rule, now_ns: int, moment: str, *what: object) -> None:
        try:
            getattr(rule, moment)(now_ns, *what)
        except Broken as broken:
            name = type(rule).__name__
            raise Broken(
                f"{name}, seed {self.seed}, step {self.steps}, at {now_ns} ns: {broken}"
            ) from None

    def _count(self, event: Event, decisions: tuple[Decision, ...]) -> None:
        assert self._seen is not None
        for value in (event, *decisions):
            self._seen[_named(value)] += 1


def _named(value: object) -> str:
    """What was seen, with the kind where there are several."""
    name = type(value).__name__
    for field in ("outcome", "state", "verdict", "kind"):
        kind = getattr(value, field, None)
        if kind:
            return f"{name} {kind}"
    return name
