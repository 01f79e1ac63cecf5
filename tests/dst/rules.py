"""Invariants that a decision log alone can break: one small class each.

A rule sees a step in four moments: before its event counts (``before``), before each decision
counts (``decided``), once all of it counts (``after``), and at the end of the run (``end``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policy.decisions import (
    Abort,
    Dispatch,
    LookUp,
    ReadProgress,
    Refused,
    SaveCheckpoint,
    Settled,
    Start,
    Stop,
    Verify,
    Warm,
)
from policy.events import Cancelled, PolicySwitched, Restored
from tests.dst.ledger import NOWHERE

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.events import Event
    from tests.dst.ledger import Ledger, Request

Decisions = tuple["Decision", ...]
NS_PER_MS = 1_000_000
SHARED_HTTP = {"answered": (200,), "degraded": (200,), "shed": (429, 503), "cancelled": (499,)}


class Broken(AssertionError):
    """An invariant does not hold."""


class Rule:
    """One invariant. What a rule does not look at costs nothing."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    def before(self, now_ns: int, event: Event) -> None: ...

    def decided(self, now_ns: int, decision: Decision) -> None: ...

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None: ...

    def end(self, now_ns: int) -> None: ...


class OneOutcome(Rule):
    """Every request that arrives ends in exactly one outcome; none is lost, none told twice."""

    def decided(self, now_ns: int, decision: Decision) -> None:
        if isinstance(decision, Dispatch | Abort | Settled | Verify | SaveCheckpoint | LookUp):
            request = self.ledger.requests.get(decision.request)
            if request is None:
                raise Broken(f"request {decision.request} never arrived: {decision}")
            if isinstance(decision, Abort):
                return
            if request.outcome is not None:
                raise Broken(
                    f"request {decision.request} was settled at {request.settled_ns} ns"
                    f" ({request.outcome.outcome} {request.outcome.why}): {decision}"
                )
            if isinstance(decision, Settled):
                self._told(request, decision)

    def _told(self, request: Request, settled: Settled) -> None:
        arrived = request.event
        if settled.checkpoint and settled.checkpoint not in self.ledger.checkpoints:
            raise Broken(f"checkpoint {settled.checkpoint!r} was never saved: {settled}")
        codes = SHARED_HTTP.get(settled.outcome)
        if codes is not None and settled.http_code not in codes:
            raise Broken(f"request {settled.request}: {settled.outcome} with {settled.http_code}")
        if settled.outcome == "failed" and settled.http_code < 400:
            raise Broken(f"request {settled.request}: failed with {settled.http_code}")
        kept = settled.checkpoint in self.ledger.checkpoints and arrived.chain
        if settled.outcome == "answered" and request.finished is None and not kept:
            raise Broken(f"request {settled.request} is answered, and nobody answered it")

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        if isinstance(event, Cancelled) and event.request in self.ledger.open:
            raise Broken(f"request {event.request}: its client went away, and it stays open")
        if isinstance(event, Restored) and self.ledger.open:
            raise Broken(f"requests {list(self.ledger.open)[:5]} are open after a crash")

    def end(self, now_ns: int) -> None:
        if self.ledger.open:
            raise Broken(f"requests {list(self.ledger.open)[:5]} have no outcome at the end")


class OnePlace(Rule):
    """A request is in one replica's hands at most, and only while it is its turn."""

    def decided(self, now_ns: int, decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            request = self.ledger.requests[decision.request]
            if request.replica != NOWHERE:
                raise Broken(
                    f"request {decision.request} is on replica {request.replica}: {decision}"
                )
            if request.finished is not None and not decision.model:
                raise Broken(f"request {decision.request} has its answer already: {decision}")
            if not request.waits:
                raise Broken(f"request {decision.request} waits for somebody else: {decision}")
        elif isinstance(decision, Verify | SaveCheckpoint):
            request = self.ledger.requests[decision.request]
            if request.finished is None and not (
                request.found and isinstance(decision, SaveCheckpoint)
            ):
                raise Broken(f"request {decision.request} has no answer yet: {decision}")
            if request.verifying != NOWHERE or request.saving:
                raise Broken(f"request {decision.request} waits for somebody else: {decision}")


class NothingRunsOn(Rule):
    """No replica goes on with a request that is settled: its work is aborted."""

    def decided(self, now_ns: int, decision: Decision) -> None:
        if isinstance(decision, Abort):
            request = self.ledger.requests[decision.request]
            if decision.replica not in request.tried:
                raise Broken(f"request {decision.request} never was there: {decision}")

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        for decision in decisions:
            if isinstance(decision, Settled):
                request = self.ledger.requests[decision.request]
                for number in (request.replica, request.verifying):
                    if number != NOWHERE and self.ledger.replicas[number].ready:
                        raise Broken(
                            f"request {decision.request} is {decision.outcome}, and replica"
                            f" {number} was not told to stop"
                        )


class RetriesAreSafe(Rule):
    """Another replica tries only what no client has seen a byte of, and no replica tries twice."""

    def decided(self, now_ns: int, decision: Decision) -> None:
        if not isinstance(decision, Dispatch):
            return
        request = self.ledger.requests[decision.request]
        if request.began and request.event.stream:
            raise Broken(f"request {decision.request}: its stream has begun: {decision}")
        if decision.replica in request.failed_on and not decision.model:
            raise Broken(f"request {decision.request} failed there before: {decision}")
        if request.tries >= self.ledger.tries_most and not decision.model:
            raise Broken(f"request {decision.request} was tried {request.tries} times: {decision}")


class OnlyWhereItMay(Rule):
    """Work goes to replicas that are up, in rotation, and serve the model; probes one by one."""

    def decided(self, now_ns: int, decision: Decision) -> None:
        if not isinstance(decision, Dispatch | Verify):
            return
        replica = self.ledger.replicas.get(decision.replica)
        if replica is None or not replica.ready:
            raise Broken(f"replica {decision.replica} is not up: {decision}")
        if not replica.usable:
            raise Broken(f"replica {decision.replica} is {replica.rotation}: {decision}")
        request = self.ledger.requests[decision.request]
        if replica.rotation == "probing" and self._probed(decision.replica):
            raise Broken(f"replica {decision.replica} is being probed already: {decision}")
        model = decision.model if isinstance(decision, Dispatch) else request.model
        model = model or request.event.model
        if replica.spec.models and model not in replica.spec.models:
            raise Broken(f"replica {decision.replica} does not serve {model!r}: {decision}")
        if replica.spec.pooling and request.event.endpoint != "embeddings":
            raise Broken(f"replica {decision.replica} serves embeddings only: {decision}")

    def _probed(self, number: int) -> bool:
        requests = self.ledger.requests
        return any(
            (requests[other].probe and requests[other].replica == number)
            or (requests[other].verify_probe and requests[other].verifying == number)
            for other in self.ledger.replicas[number].in_flight
        )


class VerifiedElsewhere(Rule):
    """A second run proves something only where the first one's fault would not be repeated."""

    def decided(self, now_ns: int, decision: Decision) -> None:
        if not isinstance(decision, Verify):
            return
        finished = self.ledger.requests[decision.request].finished
        assert finished is not None  # OnePlace has seen to it
        if decision.replica == finished.replica:
            raise Broken(f"request {decision.request} was answered there: {decision}")
        replicas = self.ledger.replicas
        first = replicas[finished.replica].spec.domain
        if first and first == replicas[decision.replica].spec.domain:
            raise Broken(f"both runs of request {decision.request} are in {first!r}: {decision}")


class OneOfASession(Rule):
    """No two requests of a session are under way at once, and they go in order of arrival.

    What was open when a switch changed the limits goes on as it was, and counts. Where so few
    requests may be open that it is not followed, nothing is checked.
    """

    FOLLOWED_LEAST = 1000

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._exempt: set[int] = set()

    def decided(self, now_ns: int, decision: Decision) -> None:
        if not isinstance(decision, Dispatch):
            return
        request = self.ledger.requests[decision.request]
        limits = self.ledger.parameters.limits
        session = request.event.session
        if not (limits.enabled and session) or request.tries:
            return
        most = limits.session_in_flight_most
        if not most or decision.request in self._exempt or limits.open_max < self.FOLLOWED_LEAST:
            return
        earlier = [
            other
            for other in self.ledger.open.values()
            if other.event.session == session and other.event.request < decision.request
        ]
        later = [
            other
            for other in self.ledger.open.values()
            if other.event.session == session
            and other.event.request > decision.request
            and other.dispatched_ns >= 0
        ]
        if most == 1 and (earlier or later):
            number = (earlier or later)[0].event.request
            raise Broken(
                f"request {decision.request} starts while request {number} of its session,"
                f" {session!r}, is open"
            )
        under_way = [other for other in earlier + later if other.dispatched_ns >= 0]
        if len(under_way) >= most:
            raise Broken(
                f"request {decision.request} starts, and {len(under_way)} of its session,"
                f" {session!r}, are under way: at most {most} may be"
            )

    def before(self, now_ns: int, event: Event) -> None:
        if isinstance(event, PolicySwitched):
            self._exempt |= set(self.ledger.open)


class FleetIsAsked(Rule):
    """Only standbys are started, and only what is idle is stopped.

    After a crash no replica is up before it says so; what was to be stopped may be told at once.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._crashed = False

    def before(self, now_ns: int, event: Event) -> None:
        self._crashed = isinstance(event, Restored)

    def decided(self, now_ns: int, decision: Decision) -> None:
        ledger = self.ledger
        if isinstance(decision, Start):
            running = ledger.replicas.get(decision.replica)
            if decision.replica not in ledger.standbys or (running and running.ready):
                raise Broken(f"replica {decision.replica} does not stand by: {decision}")
        elif isinstance(decision, Stop | Warm | ReadProgress):
            replica = ledger.replicas.get(decision.replica)
            if replica is None or not (replica.ready or self._crashed):
                raise Broken(f"replica {decision.replica} is not up: {decision}")
            if isinstance(decision, Stop) and replica.ready and replica.in_flight:
                some = sorted(replica.in_flight)[:5]
                raise Broken(f"replica {decision.replica} still holds requests {some}: {decision}")


class RefusedAlone(Rule):
    """An illegal event changes nothing, so nothing else is decided."""

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        if len(decisions) > 1 and any(isinstance(decision, Refused) for decision in decisions):
            raise Broken(f"{event} was refused, and yet: {decisions}")


class NoFloats(Rule):
    """Numbers that decide are integers: floats may differ between machines."""

    def decided(self, now_ns: int, decision: Decision) -> None:
        for name in decision.__struct_fields__:
            if isinstance(getattr(decision, name), float):
                raise Broken(f"{name} is a float: {decision}")


LOG_RULES = (
    OneOutcome, OnePlace, NothingRunsOn, RetriesAreSafe, OnlyWhereItMay, VerifiedElsewhere,
    OneOfASession, FleetIsAsked, RefusedAlone, NoFloats,
)  # fmt: skip
