"""Invariants that are seen by looking at the policy beside its log: its books, its clock, its
memory. They ask only what a composed policy shows to everybody: ``facts``, ``mechanisms``,
``deadline_ns`` and ``snapshot``.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from policy.compose import restore
from policy.events import Arrived, Ticked
from tests.dst.rules import NS_PER_MS, Broken, Decisions, Rule

if TYPE_CHECKING:
    import random
    from collections.abc import Iterator

    from policy.contract import Policy
    from policy.events import Event
    from tests.dst.ledger import Ledger, Replica, Request

S = 1_000_000_000
PULSE_NS = 550_000_000
"""How long a policy may take to notice that a reading has become too old."""


def mechanisms(policy: Any) -> dict[str, Any]:
    """The mechanisms that are on, by name; a policy without any shows none."""
    found: dict[str, Any] = getattr(policy, "mechanisms", {})
    return found


class Book(Rule):
    """A rule that looks at the policy, too."""

    def __init__(self, ledger: Ledger, policy: Policy) -> None:
        super().__init__(ledger)
        self.policy = policy

    @property
    def facts(self) -> Any:
        """The policy's facts; a policy that shows none has None."""
        return getattr(self.policy, "facts", None)


class BooksAgree(Book):
    """The policy's books say what the log says: nothing leaks, nothing is counted twice."""

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        facts, ledger = self.facts, self.ledger
        if facts is None:
            return
        if list(facts.open) != list(ledger.open):
            both = set(facts.open) ^ set(ledger.open)
            raise Broken(f"requests {sorted(both)[:5]} are open in one set of books only")
        kv_tokens: dict[int, int] = {}
        for opened in facts.open.values():
            if opened.replica >= 0:
                kv_tokens[opened.replica] = kv_tokens.get(opened.replica, 0) + opened.kv_tokens
        for number, booked in facts.replicas.items():
            if booked.kv_tokens < kv_tokens.get(number, 0):
                raise Broken(
                    f"replica {number} has {booked.kv_tokens} KV tokens reserved, and its requests"
                    f" {kv_tokens.get(number, 0)}"
                )
            held = len(ledger.replicas[number].in_flight)
            if booked.in_flight != held:
                raise Broken(
                    f"replica {number}: {booked.in_flight} in flight by the policy's books,"
                    f" {held} by the log"
                )


class Reservations(Book):
    """What is reserved on a replica never exceeds its target, unless one request alone does."""

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        if self.facts is None or self.ledger.parameters.discipline == "fifo":
            return
        inflight = self.ledger.parameters.inflight
        for number in {getattr(decision, "replica", -1) for decision in decisions}:
            booked = self.facts.replicas.get(number)
            if booked is None or booked.in_flight < 2 or not self._sent(number, decisions):
                continue
            spec = booked.spec
            capacity = (spec.kv_blocks - 1) * spec.block_tokens
            kv_most = capacity * inflight.kv_permille // 1000
            if booked.kv_tokens > kv_most:
                raise Broken(
                    f"replica {number} has {booked.kv_tokens} KV tokens reserved: at most {kv_most}"
                )
            most = max(1, spec.max_num_seqs * inflight.sequences_permille // 1000)
            if booked.in_flight > most:
                raise Broken(f"replica {number} has {booked.in_flight} in flight: at most {most}")

    @staticmethod
    def _sent(number: int, decisions: Decisions) -> bool:
        return any(
            type(decision).__name__ in ("Dispatch", "Verify")
            and getattr(decision, "replica", -1) == number
            for decision in decisions
        )


class Rates(Book):
    """In no second are more requests let through than a user's and a session's limits say.

    What is paced is when a request gets past the limits, not when it is sent (it may wait for a
    replica meanwhile). That instant is the first step after which ``Limits.parked`` denies it;
    none is sent while it is parked. A request that is over in the step of its arrival was not let
    through. What was open when the policy was switched is not counted: it had passed, or it passes
    by the old rule. With room for a few keys only, they are forgotten and nothing is checked.
    """

    KEYS_LEAST = 100

    def __init__(self, ledger: Ledger, policy: Policy) -> None:
        super().__init__(ledger, policy)
        self._parked: dict[int, None] = {}
        self._passed: dict[tuple[str, str], deque[int]] = {}
        self._switches = 0

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        limits = mechanisms(self.policy).get("limits")
        if self.ledger.switches != self._switches:
            self._switches = self.ledger.switches
            self._passed.clear()
            self._parked.clear()
        if limits is None or self.ledger.parameters.limits.keys_max < self.KEYS_LEAST:
            return
        if isinstance(event, Arrived) and event.request in self.ledger.requests:
            self._parked[event.request] = None
        elif not self._parked:
            return
        for number in list(self._parked):
            request = self.ledger.requests[number]
            if request.outcome is None and limits.parked(number):
                if request.dispatched_ns >= 0:
                    raise Broken(f"request {number} was sent while the limits hold it back")
                continue
            del self._parked[number]
            if request.outcome is None or request.dispatched_ns >= 0:
                self._let_through(now_ns, request)

    def _let_through(self, now_ns: int, request: Request) -> None:
        limits = self.ledger.parameters.limits
        for kind, key, most in (
            ("user", request.event.user, limits.user_per_s),
            ("session", request.event.session, limits.session_per_s),
            ("model", request.event.model, limits.model_per_s),
        ):
            if not (key and most):
                continue
            passed = self._passed.setdefault((kind, key), deque())
            while passed and passed[0] <= now_ns - S:
                passed.popleft()
            passed.append(now_ns)
            if len(passed) > most:
                raise Broken(
                    f"request {request.event.request} is number {len(passed)} of {kind} {key!r}"
                    f" within a second: at most {most}"
                )


class Bounds(Book):
    """Every table keeps to its bound."""

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        for name, mechanism in mechanisms(self.policy).items():
            size, most = mechanism.size(), mechanism.size_most()
            if size > most:
                raise Broken(f"{name} holds {size} entries: at most {most}")


class Deadlines(Book):
    """A served tick leaves no deadline in the past, and what waits has one or an event to come."""

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        due_ns = self.policy.deadline_ns()
        if due_ns is None:
            return
        if type(due_ns) is not int:
            raise Broken(f"the deadline is {due_ns!r}")
        if due_ns <= now_ns and isinstance(event, Ticked):
            raise Broken(f"ticked at {now_ns} ns, the policy's deadline stays at {due_ns} ns")


class NothingStarves(Book):
    """No request waits while a replica that may take it stands idle, and background work that
    waits is not passed for ever: it gets its share of what is started meanwhile.

    A request that may not go to a replica because it failed there may stand before others that
    may: for a replica that something waiting has failed on, standing idle is allowed. So it is for
    one whose card was throttled a short time ago.

    Background work goes by deadline, so only the first of it is owed the share. Short prompts may
    pass a long one, which waits for the cap on long prompts; that it is served in
    the end is checked when the run has been drained. Passing is counted in tokens, as a crude
    price: the policy prices in FLOPs, by lengths that it learns. ``SLACK`` covers the difference,
    and the work that may be saved up for a tier.
    """

    SLACK = 20
    ALWAYS_TOKENS = 400_000

    def __init__(self, ledger: Ledger, policy: Policy) -> None:
        super().__init__(ledger, policy)
        self._passed_tokens: dict[int, int] = {}

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        stale_ns = self.ledger.parameters.placement.stale_ms * NS_PER_MS + PULSE_NS
        idle = [
            replica
            for replica in self.ledger.replicas.values()
            if replica.ready
            and replica.rotation == "in"
            and not replica.in_flight
            and not (replica.throttled and (replica.read_ns or 0) >= now_ns - stale_ns)
        ]
        waiting = list(self._waiting()) if idle else []
        if waiting:
            failed_on = {number for request in waiting for number in request.failed_on}
            idle = [replica for replica in idle if replica.spec.replica not in failed_on]
            for request in waiting:
                for replica in idle:
                    if self._may_go(request, replica):
                        raise Broken(
                            f"request {request.event.request} waits since {request.arrived_ns} ns,"
                            f" and replica {replica.spec.replica} stands idle"
                        )
        for decision in decisions:
            if type(decision).__name__ == "Dispatch":
                self._passes(decision.request)  # type: ignore[union-attr]

    def _waiting(self) -> Iterator[Request]:
        limits = mechanisms(self.policy).get("limits")
        for request in self.ledger.open.values():
            if request.waits and not (limits and limits.parked(request.event.request)):
                yield request

    def _may_go(self, request: Request, replica: Replica) -> bool:
        event, spec = request.event, replica.spec
        if spec.pooling != (event.endpoint == "embeddings"):
            return False
        # Perhaps it waits for the lighter model instead of its own.
        lighter = self.ledger.parameters.tiers.fallback_model or event.model
        return not spec.models or {event.model, lighter} <= set(spec.models)

    def _passes(self, number: int) -> None:
        started = self.ledger.requests[number]
        share = self.ledger.parameters.tiers.batch_least_permille
        behind = [request for request in self._waiting() if request.event.sla == "P2"]
        if not (share and behind):
            return
        first = min(behind, key=self._order)
        event, begun = first.event, started.event
        if event.request > number or event.model != begun.model or first.tried:
            return
        if (event.endpoint == "embeddings") != (begun.endpoint == "embeddings"):
            return  # other replicas serve these
        if event.prompt_bytes // 2 >= self.ledger.parameters.inflight.long_prefill_tokens:
            return  # perhaps a long prompt: it waits for the cap on these, short ones pass
        ahead = sum(_tokens(request) for request in behind)
        most = self.ALWAYS_TOKENS + self.SLACK * ahead * 1000 // share
        passed = self._passed_tokens.get(event.request, 0) + _tokens(started)
        self._passed_tokens[event.request] = passed
        if passed > most:
            raise Broken(
                f"request {event.request} (P2) has waited since {first.arrived_ns} ns while"
                f" {passed} tokens were started that came later: at most {most}"
            )

    def _order(self, request: Request) -> tuple[int, int]:
        """Its place in the background tier: by deadline, but never further off than aging."""
        parameters, event = self.ledger.parameters, request.event
        deadline_ns = event.deadline_ns or parameters.classes.p2_deadline_ms * NS_PER_MS
        aging_ns = parameters.tiers.aging_ms * NS_PER_MS
        return request.arrived_ns + min(deadline_ns, aging_ns), event.request


def _tokens(request: Request) -> int:
    return request.event.prompt_bytes // 4 + 256


class Snapshots(Book):
    """A policy restored from a snapshot decides as the one it was taken from, from there on.

    Stepping a second policy costs as much as the first, so a run is followed only now and then:
    at random steps the double is made anew from a fresh snapshot.
    """

    def __init__(
        self, ledger: Ledger, policy: Policy, rng: random.Random, every_steps: int
    ) -> None:
        super().__init__(ledger, policy)
        self._rng = rng
        self._every_steps = every_steps
        self._double: Policy | None = None
        self.taken = 0

    def after(self, now_ns: int, event: Event, decisions: Decisions) -> None:
        double = self._double
        if double is not None:
            same = tuple(double.step(now_ns, event))
            if same != decisions:
                raise Broken(f"restored, the policy decides {same} and not {decisions} at {event}")
            due_ns, due_too_ns = self.policy.deadline_ns(), double.deadline_ns()
            if due_ns != due_too_ns:
                raise Broken(f"restored, the deadline after {event} is {due_too_ns}, not {due_ns}")
        if self._rng.randrange(self._every_steps) == 0:
            self._take()

    def end(self, now_ns: int) -> None:
        if self._double is not None and self._double.snapshot() != self.policy.snapshot():
            raise Broken("at the end, the restored policy's state is another")

    def _take(self) -> None:
        """End the old double's life with a comparison, and begin a new one's."""
        snapshot = self.policy.snapshot()
        if self._double is not None and self._double.snapshot() != snapshot:
            raise Broken("the restored policy decided the same, and its state is another")
        self._double = restore(self.ledger.parameters, snapshot)
        self.taken += 1
        if self._double.snapshot() != snapshot:
            raise Broken("a snapshot, restored at once, is another")


BOOKS = (BooksAgree, Reservations, Rates, Bounds, Deadlines, NothingStarves)

__all__ = ["BOOKS", "NS_PER_MS", "Book", "Snapshots", "mechanisms"]
