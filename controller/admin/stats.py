"""What the status tells of the recent past: a listener that counts and keeps the last calls."""

from __future__ import annotations

import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple

from controller.listener import Listener
from controller.telemetry.drifts import Drifts
from policy.decisions import Alert, BreakerMoved, Refused, Rotated, Scaled, Verify
from policy.events import ReplicaDown, ReplicaUp, Scraped, StepsRead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from controller.call import Call, Hops
    from policy.decisions import Decision, Settled
    from policy.events import Event
    from policy.parameters import Parameters

CALLS_KEPT = 1000
ALERTS_KEPT = 100
BREAKERS_KEPT = 1000
"""Closed ones are forgotten first: callers invent business lines, which are part of a key."""
NOT_SCORED = ("cached", "checkpoint")
"""How answers were given whose score was counted when they were made."""


class Past(NamedTuple):
    """A call that is over."""

    tier: str
    outcome: str
    ttft_ns: int
    """From the caller's headers to the first token; -1: it never came to that."""
    hops: Hops


class Heard(NamedTuple):
    """An alert, and when it came: seconds since 1970."""

    at_s: float
    alert: Alert


class Stats(Listener):
    """Counts outcomes, and keeps the last calls, alerts, and the state of breakers and rotation.

    Nothing in it comes from a prompt or an answer.

    Args:
        parameters: those in force; None: none of an answer's scores is too low.
    """

    def __init__(self, parameters: Parameters | None = None) -> None:
        self._verify_below = 0
        if parameters is not None:
            self.switched(parameters)
        self.scored = self.score_permille = self.below_verify = 0
        """Answers with a score, the sum of these, and those that were too low to be trusted."""
        self.verifications: Counter[str] = Counter()
        """By status."""
        self.second_runs = 0
        self.started_s = time.time()
        self.calls: deque[Past] = deque(maxlen=CALLS_KEPT)
        self.alerts: deque[Heard] = deque(maxlen=ALERTS_KEPT)
        self.outcomes: Counter[tuple[str, str]] = Counter()
        """By outcome and the kind of reason, since the start."""
        self.lost_calls = 0
        """Requests that an earlier process took with it."""
        self.refused = 0
        """Events that the policy refused as illegal: each is a fault of the controller."""
        self.breakers: dict[str, tuple[BreakerMoved, int]] = {}
        """The last move of each breaker, and when it was made on the log's clock."""
        self.rotation: dict[int, tuple[Rotated, int]] = {}
        self.scraped: dict[int, tuple[Scraped, int]] = {}
        self.drifts = Drifts()
        self.scaled: dict[str, Scaled] = {}
        self._now_ns = 0

    def restored(self, open_keys: Iterable[str]) -> None:
        """Breakers that were not closed when the policy came back with its state."""
        for key in open_keys:
            self.breakers[key] = (BreakerMoved(key, "open", "restored"), self._now_ns)

    def settled(self, call: Call, settled: Settled) -> None:
        self.outcomes[settled.outcome, kind_of(settled.why)] += 1
        score = settled.confidence_permille
        if score >= 0 and settled.why not in NOT_SCORED:
            self.scored += 1
            self.score_permille += score
            self.below_verify += score < self._verify_below
        if settled.verification:
            self.verifications[settled.verification] += 1
        self.calls.append(
            Past(settled.tier or call.tier, settled.outcome, ttft_ns(call), call.hops())
        )

    def switched(self, parameters: Parameters) -> None:
        self._verify_below = parameters.confidence.verify_below_permille

    def lost(self, settled: Settled) -> None:
        self.lost_calls += 1
        self.outcomes[settled.outcome, kind_of(settled.why)] += 1

    def decided(self, decision: Decision) -> None:
        if isinstance(decision, Alert):
            self.alerts.append(Heard(time.time(), decision))
        elif isinstance(decision, BreakerMoved):
            self.breakers.pop(decision.key, None)  # the last moved stands last
            self.breakers[decision.key] = (decision, self._now_ns)
            if len(self.breakers) > BREAKERS_KEPT:
                self._forget_a_breaker()
        elif isinstance(decision, Rotated):
            self.rotation[decision.replica] = (decision, self._now_ns)
        elif isinstance(decision, Scaled):
            self.scaled[decision.pool] = decision
        elif isinstance(decision, Refused):
            self.refused += 1
        elif isinstance(decision, Verify):
            self.second_runs += 1

    def fed(self, now_ns: int, event: Event) -> None:
        self._now_ns = now_ns
        kind = type(event)  # three events a request come by here: `isinstance` costs more
        if kind is Scraped:
            self.scraped[event.replica] = (event, now_ns)  # type: ignore[union-attr, assignment]
        elif kind is StepsRead:
            self.drifts.read(event)  # type: ignore[arg-type]
        elif kind is ReplicaUp:
            self.rotation.pop(event.replica, None)  # type: ignore[union-attr]
            self.drifts.renewed(event.replica)  # type: ignore[union-attr]
        elif kind is ReplicaDown:
            self.drifts.renewed(event.replica)  # type: ignore[union-attr]
            self.scraped.pop(event.replica, None)  # type: ignore[union-attr]

    def _forget_a_breaker(self) -> None:
        keys = (key for key, (moved, _) in self.breakers.items() if moved.state == "closed")
        del self.breakers[next(keys, next(iter(self.breakers)))]


def kind_of(why: str) -> str:
    """The kind of a reason, without the key that follows it: ``breaker``, ``model``."""
    return why.partition(" ")[0]


def ttft_ns(call: Call) -> int:
    """From the caller's headers to the first token; -1: unknown.

    An answer that is no stream shows no first token, so there the engine's own times are taken.
    """
    if call.asked.stream:
        return -1 if call.first_ns < 0 else call.first_ns - call.entered_ns
    engine = call.engine
    if engine is None or call.dispatched_ns < 0 or min(engine.schedule_ns, engine.prefill_ns) < 0:
        return -1
    return call.dispatched_ns - call.entered_ns + engine.schedule_ns + engine.prefill_ns
