"""Invariants of what single mechanisms promise, seen in a decision log alone: breakers keep shut,
chains keep their budget, second runs keep to theirs, a full replica is left alone for a while,
only what was measured is called a drift.

Where a policy switch changes a mechanism's parameters it begins anew, and so does its rule here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policy.decisions import Alert, BreakerMoved, Dispatch, Rotated, Settled, Verify
from policy.events import (
    Arrived,
    CheckpointSaved,
    Finished,
    PolicySwitched,
    ReplicaDown,
    ReplicaUp,
    Restored,
    StepsRead,
)
from policy.parameters import from_canonical
from tests.dst.rules import NS_PER_MS, Broken, Decisions, Rule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policy.decisions import Decision
    from policy.events import Event
    from policy.parameters import Parameters
    from tests.dst.ledger import Ledger, Request


class BreakersHold(Rule):
    """What an open breaker cuts off is not sent, and a half-open one lets a few through.

    A request is judged when it is let in; one that was in before the breaker moved goes on.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._moved_ns: dict[str, int] = {}

    def decided(self, now_ns: int, decision: Decision) -> None:
        if isinstance(decision, BreakerMoved):
            self._moved_ns[decision.key] = now_ns
        elif isinstance(decision, Dispatch):
            request = self.ledger.requests[decision.request]
            if not request.tries and not decision.model and self.ledger.breakers:
                self._send(now_ns, request)

    def _send(self, now_ns: int, request: Request) -> None:
        for key, probes_most in self._keys(request):
            state = self.ledger.breakers.get(key, "closed")
            if state == "closed" or request.arrived_ns <= self._moved_ns[key]:
                continue
            number = request.event.request
            if state == "open":
                raise Broken(f"request {number} is sent while breaker {key!r} is open")
            probes = [
                other.event.request
                for other in self.ledger.open.values()
                if other.tries == 1
                and other.model == other.event.model  # not something less, given instead
                and other.arrived_ns > self._moved_ns[key]
                and other.finished is None
                and any(key == known for known, _ in self._keys(other))
            ]
            if len(probes) >= probes_most:
                raise Broken(
                    f"request {number} is sent while breaker {key!r} is tried by {probes}:"
                    f" at most {probes_most} may"
                )

    def _keys(self, request: Request) -> Iterator[tuple[str, int]]:
        """The keys of the breakers that judge a request, with their most probes. A version is only
        known where it is sent to, so rules by version are left out."""
        event = request.event
        for rule in self.ledger.parameters.breakers.rules:
            if "version" in rule.by:
                continue
            key = rule.name
            if "model" in rule.by:
                key += f" model={event.model}"
            if "line" in rule.by:
                key += f" line={event.line}"
            for kind in rule.kinds if "kind" in rule.by else ("",):
                yield (f"{key} kind={kind}" if kind else key), rule.probes_most


class PausesHold(Rule):
    """A replica that said that it is full is sent nothing for as long as was decided."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._until_ns: dict[int, int] = {}

    def decided(self, now_ns: int, decision: Decision) -> None:
        if isinstance(decision, Rotated):
            self._until_ns[decision.replica] = now_ns + decision.for_ns
        elif isinstance(decision, Dispatch | Verify):
            replica = self.ledger.replicas[decision.replica]
            until_ns = self._until_ns.get(decision.replica, 0)
            if replica.rotation == "probing" and now_ns < until_ns:
                raise Broken(f"replica {decision.replica} is paused until {until_ns} ns")


@dataclass(slots=True)
class Chain:
    """One chain as its client sees it."""

    end_ns: int
    budget_ns: int
    keep_ns: int
    done: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Checkpoint of a step, and when it was safe, in order."""
    open: set[int] = field(default_factory=set)
    told: bool = False
    """The client knows that it is over."""


class ChainsKeepTime(Rule):
    """A chain's steps are over by its end and none is sent later; a step that has a checkpoint is
    never paid for again.

    An answer whose checkpoint is being saved may be given out late: it is there, and only the
    store is slow. With bounds so small that chains are not followed nothing is checked.
    """

    FOLLOWED_LEAST = 1000

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._chains: dict[tuple[str, str], Chain] = {}
        self._of: dict[int, Chain] = {}
        """The chain of an open request."""

    def before(self, now_ns: int, event: Event) -> None:
        if isinstance(event, PolicySwitched) and _chains_differ(event):
            self._chains.clear()
            self._of.clear()
        elif isinstance(event, CheckpointSaved):
            self._save(now_ns, event)
        for number, chain in list(self._of.items()):
            request = self.ledger.open.get(number)
            if request is None:
                del self._of[number]
                chain.open.discard(number)
            elif chain.end_ns < now_ns and not request.saving:
                raise Broken(
                    f"request {number} is open at {now_ns} ns; its chain {request.event.chain!r}"
                    f" ended at {chain.end_ns} ns"
                )

    def _save(self, now_ns: int, event: CheckpointSaved) -> None:
        request = self.ledger.open.get(event.request)
        chain = self._of.get(event.request)
        if request is None or chain is None or not request.saving:
            return
        step = request.event.step
        if not step:  # nameless steps take each other's place
            chain.done.pop(step, None)
        chain.done.setdefault(step, (event.checkpoint, now_ns))

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        if isinstance(event, Arrived) and event.chain:
            self._arrive(now_ns, event)
        for decision in decisions:
            if isinstance(decision, Settled) and decision.why == "chain_budget":
                arrived = self.ledger.requests[decision.request].event
                chain = self._chains.get((arrived.user, arrived.chain))
                if chain is not None:
                    chain.told = True

    def _arrive(self, now_ns: int, event: Arrived) -> None:
        section = self.ledger.parameters.chains
        if (
            event.request not in self.ledger.requests
            or not section.enabled
            or min(section.chains_max, section.open_max) < self.FOLLOWED_LEAST
        ):
            return
        key = (event.user, event.chain)
        chain = self._chains.get(key)
        if chain is None or (not chain.open and now_ns >= chain.end_ns + chain.keep_ns):
            plan = section.lines.get(event.line, section.default)
            budget_ns = plan.budget_ms * NS_PER_MS
            keep_ns = section.keep_ms * NS_PER_MS
            chain = self._chains[key] = Chain(now_ns + budget_ns, budget_ns, keep_ns)
        elif event.resume:
            self._resume(now_ns, chain, event)
        if event.request in self.ledger.open:
            chain.open.add(event.request)
            self._of[event.request] = chain

    def _resume(self, now_ns: int, chain: Chain, event: Arrived) -> None:
        """After its end, a chain may be resumed with a new budget; later steps are undone."""
        steps = [step for step, (checkpoint, _) in chain.done.items() if checkpoint == event.resume]
        if chain.told and steps and not chain.open:
            chain.told = False
            chain.end_ns = now_ns + chain.budget_ns
            names = list(chain.done)
            for step in names[names.index(steps[0]) + 1 :]:
                del chain.done[step]

    def decided(self, now_ns: int, decision: Decision) -> None:
        if not isinstance(decision, Dispatch):
            return
        request = self.ledger.requests[decision.request]
        event = request.event
        chain = self._of.get(decision.request)
        if chain is None and event.chain and request.arrived_ns == now_ns:  # in this very step
            chain = self._chains.get((event.user, event.chain))
        if chain is None:
            return
        if now_ns > chain.end_ns and decision.request in self._of:
            raise Broken(f"chain {event.chain!r} ended at {chain.end_ns} ns: {decision}")
        checkpoint, saved_ns = chain.done.get(event.step, ("", 0))
        before = checkpoint and event.step and saved_ns < request.arrived_ns
        if before and now_ns < chain.end_ns:
            raise Broken(
                f"step {event.step!r} of chain {event.chain!r} is paid for again; its checkpoint,"
                f" {checkpoint!r}, is safe since {saved_ns} ns: {decision}"
            )


class SecondRunsKeepToBudget(Rule):
    """Tokens spent on second runs never exceed their share of the tokens served."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._served = 0
        self._spent = 0

    def before(self, now_ns: int, event: Event) -> None:
        if isinstance(event, PolicySwitched) and _confidence_differs(event):
            self._served = self._spent = 0
        elif isinstance(event, Finished):
            request = self.ledger.open.get(event.request)
            legal = 0 <= event.cached_tokens <= event.prompt_tokens and event.output_tokens >= 0
            if request is not None and request.replica == event.replica and legal:
                self._served += event.prompt_tokens + event.output_tokens

    def decided(self, now_ns: int, decision: Decision) -> None:
        if not isinstance(decision, Verify):
            return
        finished = self.ledger.requests[decision.request].finished
        assert finished is not None  # OnePlace has seen to it
        self._spent += finished.prompt_tokens + finished.output_tokens
        most = self._served * self.ledger.parameters.confidence.budget_permille // 1000
        if self._spent > most:
            raise Broken(
                f"second runs have taken {self._spent} tokens, of {self._served} served: at most"
                f" {most}: {decision}"
            )


class DriftIsMeasured(Rule):
    """A replica is said to have drifted only when its steps are read, after as many of them as the
    samples need, and if some of what was read lies as far from the prediction as the alarm.

    A sample's ratio lies between those of the readings in it, so one of these must be beyond the
    limit, in the direction that is told. What was told once, and may not be over, is told again
    from the lower limit on.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._read: dict[int, list[StepsRead]] = {}
        self._told: set[int] = set()
        self._now: StepsRead | None = None

    def before(self, now_ns: int, event: Event) -> None:
        self._now = None
        if isinstance(event, StepsRead):
            replica = self.ledger.replicas.get(event.replica)
            if replica is not None and replica.ready and event.predicted_us > 0:
                self._read.setdefault(event.replica, []).append(event)
                self._now = event
        elif isinstance(event, ReplicaUp | ReplicaDown):
            self._read.pop(event.replica, None)
        elif isinstance(event, Restored) or (
            isinstance(event, PolicySwitched) and _drift_differs(event)
        ):
            self._read.clear()

    def decided(self, now_ns: int, decision: Decision) -> None:
        if not (isinstance(decision, Alert) and decision.key.startswith("drift ")):
            return
        event = self._now
        if event is None:
            raise Broken(f"no steps of a replica that is up were read: {decision}")
        name = self.ledger.replicas[event.replica].spec.name
        if decision.key != f"drift {name}":
            raise Broken(f"the steps of {name} were read: {decision}")
        section, read = self.ledger.parameters.drift, self._read[event.replica]
        steps = sum(each.steps for each in read)
        if steps < section.steps_least * section.samples_least:
            raise Broken(f"only {steps} steps were read: {decision}")
        drift = dict(decision.figures)["drift_permille"]
        told = event.replica in self._told
        limit = section.recover_permille if told else section.alarm_permille
        self._told.add(event.replica)
        if abs(drift) < limit:
            raise Broken(f"told from {limit} per mille on: {decision}")
        off = [each.measured_us * 1000 // each.predicted_us - 1000 for each in read]
        if not min(off) <= drift <= max(off):
            raise Broken(f"readings are off by {min(off)} to {max(off)} per mille: {decision}")


def _drift_differs(event: PolicySwitched) -> bool:
    old, new = _both(event)
    return old.drift != new.drift


def _chains_differ(event: PolicySwitched) -> bool:
    old, new = _both(event)
    return old.chains != new.chains


def _confidence_differs(event: PolicySwitched) -> bool:
    old, new = _both(event)
    return old.confidence != new.confidence


def _both(event: PolicySwitched) -> tuple[Parameters, Parameters]:
    return from_canonical(event.old), from_canonical(event.new)


PROMISES = (BreakersHold, PausesHold, ChainsKeepTime, SecondRunsKeepToBudget, DriftIsMeasured)
