"""The whole policy: every mechanism at its place on a request's way.

    arrival -> chains (is there budget left?) -> limits (may its session, its user go on?)
            -> breakers (is its model cut off?) -> tiers and placement (when, and where?)
    answer  -> health, breakers (how did it go?) -> confidence (can it be trusted?)
            -> chains (must its state be saved?) -> the caller

One file each; this one only says who is asked, and in which order. What one event sets off is
carried to its end before the next is taken: a replica that leaves the rotation gives its requests
back, a settled request lets its session's next one go.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any

import msgspec

from policy.breakers import Breakers, BreakersState
from policy.chains import Chains, ChainsState
from policy.confidence import Confidence, ConfidenceState
from policy.decisions import (
    Abort,
    LookUp,
    Refused,
    Reset,
    SaveCheckpoint,
    Settled,
)
from policy.events import (
    Arrived,
    Cancelled,
    CheckpointFailed,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    GpuRead,
    LookedUp,
    PolicySwitched,
    ReplicaDown,
    Restored,
    Ticked,
    Verified,
)
from policy.facts import LOOKING, SAVING, UNANSWERED, VERIFYING, Facts, FactsState, Illegal
from policy.fleet import Fleet, FleetState
from policy.limits import FULL, PARKED, Limits, LimitsState
from policy.outcomes import CALLERS_FAULT, MAYBE_RUNNING, failed
from policy.parameters import Parameters, canonical, from_canonical
from policy.tiered import Tiered, TieredState
from policy.tiers import NAMES, NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.decisions import Decision
    from policy.events import Event
    from policy.facts import Open
    from policy.mechanism import Mechanism
    from policy.placement import Score
    from policy.tiers import Job

    Decisions = list[Decision]

PULSE_LEAST_NS, PULSE_MOST_NS = 50_000_000, 500_000_000
"""The mechanisms that watch are asked when something is due, but no sooner than after the first of
these; and while work is open no later than after the second, since what happens on a request's way
may have made something due. Nothing does so within less by default."""


class ServiceState(msgspec.Struct, array_like=True):
    """The whole policy in canonical form. Times are relative to the facts' ``now_ns``."""

    facts: FactsState
    tiered: TieredState
    limits: LimitsState | None
    breakers: BreakersState | None
    confidence: ConfidenceState | None
    chains: ChainsState | None
    fleet: FleetState
    parked: list[tuple[int, int]]
    pulse_ns: int | None


_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(ServiceState)


class Service:
    """The policy of the discipline ``tiered``."""

    __slots__ = (
        "_breakers", "_chains", "_confidence", "_fleet", "_handlers", "_health", "_later",
        "_limits", "_parked", "_parked_due", "_pulse_ns", "_tiered", "_verify_below", "_watching",
        "facts", "parameters",
    )  # fmt: skip

    def __init__(self, parameters: Parameters, facts: Facts | None = None) -> None:
        self.facts = Facts(parameters.history.keys_max) if facts is None else facts
        self._parked: dict[int, int] = {}
        """Requests that a limit holds back: when they are due at the latest."""
        self._parked_due: list[tuple[int, int]] = []
        self._pulse_ns: int | None = None
        self._later: list[Decision] = []
        """What breakers decided on the way."""
        self._build(parameters)
        self._handlers: dict[type, Callable[[int, Any], Sequence[Decision]]] = {
            Verified: self._verified,
            CheckpointSaved: self._saved,
            CheckpointFailed: self._saved,
            LookedUp: self._looked_up,
            PolicySwitched: self._switched,
            Restored: self._back,
        }

    def _build(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self._fleet = Fleet(parameters, self.facts)
        self._tiered = Tiered(parameters, self.facts, self._closed, self._fleet.sent)
        self._fleet.attach(self._tiered)
        self._limits = Limits(parameters.limits) if parameters.limits.enabled else None
        self._breakers = Breakers(parameters.breakers) if parameters.breakers.enabled else None
        confidence = parameters.confidence
        self._confidence = Confidence(confidence) if confidence.enabled else None
        self._verify_below = confidence.verify_below_permille
        self._chains = Chains(parameters.chains) if parameters.chains.enabled else None
        fleet = self._fleet
        self._health = fleet.health
        watching = (fleet.health, self._breakers, fleet.rollout, fleet.capacity)
        self._watching: list[Mechanism[Any]] = [one for one in watching if one is not None]

    @property
    def mechanisms(self) -> dict[str, Mechanism[Any]]:
        """Those that are enabled, by name."""
        every: dict[str, Mechanism[Any] | None] = {
            "limits": self._limits,
            "breakers": self._breakers,
            "confidence": self._confidence,
            "chains": self._chains,
            "health": self._fleet.health,
            "capacity": self._fleet.capacity,
            "rollout": self._fleet.rollout,
            "drift": self._fleet.drift,
            "alerts": self._fleet.alerts,
        }
        return {name: one for name, one in every.items() if one is not None}

    # The contract

    def step(self, now_ns: int, event: Event) -> Sequence[Decision]:
        kind = type(event)
        try:
            if kind is Arrived:
                decisions = self._arrived(now_ns, event)  # type: ignore[arg-type]
            elif kind is FirstToken:
                decisions = self._first_token(now_ns, event)  # type: ignore[arg-type]
            elif kind is Finished:
                decisions = self._finished(now_ns, event)  # type: ignore[arg-type]
            elif kind is Failed:
                decisions = self._failed(now_ns, event)  # type: ignore[arg-type]
            elif kind is Cancelled:
                decisions = self._cancelled(now_ns, event)  # type: ignore[arg-type]
            elif kind is Ticked:
                decisions = self._ticked(now_ns)
            else:
                handler = self._handlers.get(kind)
                decisions = (handler or self._fleet.told)(now_ns, event)
                if self._watching or kind is GpuRead:  # a reading grows stale
                    self._soon(now_ns)
        except Illegal as illegal:
            return (Refused(kind.__name__, str(illegal)),)
        tiered = self._tiered
        if self._fleet.attention or self._parked or tiered.gone or tiered.stranded:
            return self._followed_up(now_ns, list(decisions))
        return decisions

    def _soon(self, now_ns: int) -> None:
        """A pulse is due within the usual time, however long it was quiet."""
        at_ns = now_ns + PULSE_MOST_NS
        if self._pulse_ns is None or self._pulse_ns > at_ns:
            self._pulse_ns = at_ns

    def deadline_ns(self) -> int | None:
        due_ns = self._tiered.deadline_ns()
        pulse_ns = self._pulse_ns
        if pulse_ns is not None and (due_ns is None or pulse_ns < due_ns):
            due_ns = pulse_ns
        if self._parked:
            due_ns = _earlier(due_ns, self._limits.deadline_ns())  # type: ignore[union-attr]
            while self._parked_due and self._parked_due[0][1] not in self._parked:
                heappop(self._parked_due)
            due_ns = _earlier(due_ns, self._parked_due[0][0])
        if self._chains is not None:
            due_ns = _earlier(due_ns, self._chains.deadline_ns())
        return due_ns

    # A request's way

    def _arrived(self, now_ns: int, event: Arrived) -> Sequence[Decision]:
        opened = self.facts.arrive(now_ns, event)
        if self._watching:
            self._soon(now_ns)
        if self._chains is not None and event.chain:
            ruling = self._chains.arrive(now_ns, event)
            if ruling is not None and ruling.kind != "go":
                return (self._ruled(now_ns, opened, ruling.kind == "done"),)
            if ruling is not None:
                opened.due_ns = min(ruling.end_ns, now_ns + ruling.share_ns)
        return self._limited(now_ns, opened)

    def _limited(self, now_ns: int, opened: Open) -> Sequence[Decision]:
        limits = self._limits
        if limits is not None:
            event = opened.event
            verdict = limits.arrive(now_ns, event.request, event.user, event.session, event.model)
            if verdict == PARKED:
                self._park(opened)
                return ()
            if verdict == FULL:
                return (self._refused(now_ns, opened, "limit_full"),)
        return self._passed(now_ns, opened)

    def _ruled(self, now_ns: int, opened: Open, done: bool) -> Settled:
        """Its chain has this step's result already, or no budget left: it costs nothing more."""
        self.facts.drop(opened)
        request = opened.event.request
        if done:
            return self._closed(now_ns, opened, Settled(request, "answered", "", "checkpoint"))
        return self._closed(now_ns, opened, Settled(request, "degraded", "", "chain_budget"))

    def _park(self, opened: Open) -> None:
        event = opened.event
        tags = self._tiered.tags
        due_ns = opened.arrived_ns + tags.deadline_ns(event, tags.sla(event))
        if opened.due_ns:
            due_ns = min(due_ns, opened.due_ns)
        self._parked[event.request] = due_ns
        heappush(self._parked_due, (due_ns + 1, event.request))
        if len(self._parked_due) > 64 + 2 * len(self._parked):
            # Most entries are of requests that went on in time: drop them.
            self._parked_due = sorted((due + 1, request) for request, due in self._parked.items())

    def _passed(self, now_ns: int, opened: Open) -> Sequence[Decision]:
        """No limit holds it back."""
        key = self._blocked(now_ns, opened, opened.event.model)
        if key is not None:
            opened.cause = f"breaker {key}"
            return self._degraded(now_ns, opened)
        return self._tiered.admit(now_ns, opened)

    def _blocked(self, now_ns: int, opened: Open, model: str) -> str | None:
        """The open breaker that keeps it from the model; else it is let through, once."""
        if self._breakers is None:
            return None
        event = opened.event
        hosts = self._tiered.serving(model, event)
        version = hosts[0].spec.version if hosts else ""
        key = self._breakers.gate(now_ns, event.request, model, version, event.line)
        if key is None:
            opened.gated = (model, version)
        return key

    def _first_token(self, now_ns: int, event: FirstToken) -> Sequence[Decision]:
        opened = self.facts.first_token(now_ns, event)
        if opened is None:
            return ()
        self._tiered.first_token(now_ns, opened)
        decisions: Decisions = []
        health = self._health
        if health is not None:
            told = health.first_token(now_ns, event.request, event.replica)
            if told or self._fleet.moved():
                self._fleet.attention = True
                self._fleet.tell(now_ns, told, decisions)
        if self._tiered.queued:
            decisions += self._tiered.refill(now_ns, (event.replica,))
        return decisions

    def _finished(self, now_ns: int, event: Finished) -> Sequence[Decision]:
        opened = self.facts.finished(now_ns, event)
        if opened is None:
            return ()
        job = self._tiered.finished(now_ns, opened, event)
        decisions: Decisions = []
        if self._health is not None:
            dispatched_ns = opened.dispatched_ns or 0
            first_ns = opened.first_ns
            expected_ns = 0 if first_ns is None else job.prefill_ns
            ttft_ns = (now_ns if first_ns is None else first_ns) - dispatched_ns
            told = self._health.answered(now_ns, event.request, event.replica, ttft_ns, expected_ns)
            if told or self._fleet.moved():
                self._fleet.attention = True
                self._fleet.tell(now_ns, told, decisions)
        tokens = event.prompt_tokens + event.output_tokens
        if self._limits is not None and opened.event.user:
            self._limits.served(now_ns, opened.event.user, tokens + event.output_tokens)
        score = -1
        if self._confidence is not None:
            self._confidence.served(tokens)
            score = self._confidence.score(event)
        if job.lighter:
            # Fallback's lighter model was not let through by a breaker: it says nothing of one.
            self._observe(now_ns, opened, "" if opened.cause else "neutral", score)
            why = f"model {self._tiered.lighter_model}"
            before = opened.pending
            settled = Settled(
                event.request, "degraded", NAMES[job.tier], why, confidence_permille=score,
                verification="" if before is None else before.verification,
            )  # fmt: skip
        elif score >= 0:
            decisions += self._trusted(now_ns, opened, job, score, tokens)
            return decisions
        else:
            settled = Settled(event.request, "answered", NAMES[job.tier])
        decisions += self._delivered(now_ns, opened, settled)
        return decisions

    def _trusted(
        self, now_ns: int, opened: Open, job: Job, score: int, tokens: int
    ) -> Sequence[Decision]:
        """Deliver an answer with a score, run it a second time, or degrade it."""
        tiered = self._tiered
        event = opened.event
        choice = None
        if score < self._verify_below and not event.stream:
            choice = tiered.second(opened, job)
        action, verification = self._confidence.judge(  # type: ignore[union-attr]
            score, event.stream, tokens, choice is not None
        )
        settled = Settled(
            event.request, "answered", NAMES[job.tier], confidence_permille=score,
            verification=verification,
        )  # fmt: skip
        if action == "deliver":
            return self._delivered(now_ns, opened, settled)
        replica = opened.replica
        opened.pending = settled
        tiered.answered(opened, job)
        decisions: Decisions = []
        if action == "verify" and choice is not None:
            decisions.append(tiered.verify(now_ns, opened, job, choice))
        else:
            opened.cause = "low_confidence"
            self._observe(now_ns, opened, "", score)
            decisions += self._degraded(now_ns, opened)
        return decisions + tiered.refill(now_ns, (replica,))

    def _verified(self, now_ns: int, event: Verified) -> Sequence[Decision]:
        opened = self.facts.verified(now_ns, event)
        if opened is None:
            return ()
        decisions = self._verification_over(now_ns, opened, event.verdict)
        if self._health is not None:
            self._health.gone(now_ns, event.request, event.replica)
            self._fleet.attention |= self._fleet.moved()
        return decisions

    def _verification_over(self, now_ns: int, opened: Open, verdict: str) -> Decisions:
        replica = opened.replica
        job = self._tiered.jobs[opened.event.request]
        self._tiered.verification_over(opened, job)
        assert opened.pending is not None
        decisions: Decisions = []
        if verdict == "mismatch":
            opened.pending = msgspec.structs.replace(opened.pending, verification="mismatch")
            self._observe(now_ns, opened, "mismatch", opened.pending.confidence_permille)
            opened.cause = "mismatch"
            decisions += self._degraded(now_ns, opened)
        else:
            # A second run that came to nothing says nothing: as if there had been no budget.
            verification = "match" if verdict == "match" else "skipped_budget"
            settled = msgspec.structs.replace(opened.pending, verification=verification)
            decisions += self._delivered(now_ns, opened, settled)
        return decisions + self._tiered.refill(now_ns, (replica,))

    def _degraded(self, now_ns: int, opened: Open) -> Sequence[Decision]:
        """The next of the configured ways to give its caller something less."""
        request = opened.event.request
        tiered = self._tiered
        parameters = self.parameters
        blocked = opened.cause.startswith("breaker")
        actions = parameters.breakers.actions if blocked else parameters.confidence.actions
        opened.stage = UNANSWERED
        while opened.rung < len(actions):
            action = actions[opened.rung]
            opened.rung += 1
            if action == "cached":
                opened.stage = LOOKING
                return (LookUp(request),)
            if action == "lighter":
                lighter = tiered.lighter_model
                if tiered.has_lighter(opened.event) and not self._blocked(now_ns, opened, lighter):
                    tiered.forget(opened)
                    return tiered.admit(now_ns, opened, lighter=True, from_ns=now_ns)
                continue
            return self._delivered(now_ns, opened, self._lesser(opened, "template"))
        if opened.pending is not None:  # there is an answer: better it, and said so, than none
            return self._delivered(now_ns, opened, self._lesser(opened, opened.cause))
        return (self._refused(now_ns, opened, opened.cause, 503),)

    def _lesser(self, opened: Open, why: str, age_ns: int = 0) -> Settled:
        before = opened.pending or Settled(opened.event.request, "degraded")
        return msgspec.structs.replace(before, outcome="degraded", why=why, age_ns=age_ns)

    def _looked_up(self, now_ns: int, event: LookedUp) -> Sequence[Decision]:
        opened = self.facts.looked_up(now_ns, event)
        if opened is None:
            return ()
        if not event.found:
            return self._degraded(now_ns, opened)
        opened.stage = UNANSWERED
        settled = self._lesser(opened, "cached", event.age_ns)
        settled = msgspec.structs.replace(settled, confidence_permille=event.confidence_permille)
        return self._delivered(now_ns, opened, settled)

    def _delivered(self, now_ns: int, opened: Open, settled: Settled) -> Sequence[Decision]:
        """Tell the caller; a chain's state is made safe before."""
        event = opened.event
        chains = self._chains
        worth_keeping = bool(event.chain) and settled.why != "template"
        if chains is None or not worth_keeping or not chains.answered(event.request):
            return self._settled(now_ns, opened, settled)
        replica = opened.replica
        if replica >= 0:
            self._tiered.answered(opened, self._tiered.jobs[event.request])
        opened.stage = SAVING
        opened.pending = settled
        decisions: Decisions = [SaveCheckpoint(event.request, event.chain, event.step)]
        if replica >= 0 and self._tiered.queued:
            decisions += self._tiered.refill(now_ns, (replica,))
        return decisions

    def _saved(self, now_ns: int, event: CheckpointSaved | CheckpointFailed) -> Sequence[Decision]:
        opened = self.facts.saved(now_ns, event)
        if opened is None:
            return ()
        if self._chains is not None and isinstance(event, CheckpointSaved):
            self._chains.saved(event.request, event.checkpoint)
        assert opened.pending is not None
        return self._settled(now_ns, opened, opened.pending)

    def _settled(self, now_ns: int, opened: Open, settled: Settled) -> Decisions:
        replica = opened.replica
        self._tiered.forget(opened)
        if opened.tries and settled.why not in ("cached", "template"):
            self.facts.settle(now_ns, opened)
        else:  # no replica did this: it is no part of how the user was served
            self.facts.drop(opened)
        decisions: Decisions = [self._closed(now_ns, opened, settled)]
        if replica >= 0 and self._tiered.queued:
            decisions += self._tiered.refill(now_ns, (replica,))
        return decisions

    def _refused(self, now_ns: int, opened: Open, why: str, http_code: int = 429) -> Settled:
        """Shed before it was queued, or with nothing left to give."""
        self._tiered.forget(opened)
        self.facts.drop(opened)
        retry_after_ns = self.parameters.shedding.retry_after_least_ms * NS_PER_MS
        settled = Settled(opened.event.request, "shed", "", why, http_code, retry_after_ns)
        return self._closed(now_ns, opened, settled)

    def _closed(self, now_ns: int, opened: Open, settled: Settled) -> Settled:
        """Every settled request comes by here, once: the mechanisms let go of it."""
        event = opened.event
        request = event.request
        if self._limits is not None:
            self._limits.over(now_ns, request)
            if self._parked:
                self._parked.pop(request, None)
        if opened.gated is not None:
            if settled.outcome == "failed":
                self._observe(now_ns, opened, settled.why, -1)
            elif settled.outcome == "answered":
                self._observe(now_ns, opened, "", settled.confidence_permille)
            else:
                self._observe(now_ns, opened, "neutral", -1)
        if self._chains is not None and event.chain:
            checkpoint, left_ns, step_ns = self._chains.over(now_ns, request)
            settled = msgspec.structs.replace(
                settled, checkpoint=checkpoint, left_ns=left_ns, step_ns=step_ns
            )
        return settled

    # What goes wrong

    def _failed(self, now_ns: int, event: Failed) -> Sequence[Decision]:
        opened = self.facts.failed(now_ns, event)
        if opened is None:
            return ()
        decisions: Decisions = []
        if event.kind in MAYBE_RUNNING:
            decisions.append(Abort(event.request, event.replica))
        if self._health is not None:
            told = self._health.failed(now_ns, event.request, event.replica, event.kind)
            self._fleet.tell(now_ns, told, decisions)
            self._fleet.attention |= self._fleet.moved()
        return decisions + self._lost(now_ns, opened, event.kind)

    def _lost(self, now_ns: int, opened: Open, kind: str) -> Decisions:
        """Its replica will not answer it: try elsewhere, or tell its caller."""
        if opened.stage == VERIFYING:
            return self._verification_over(now_ns, opened, "failed")
        request = opened.event.request
        replica = opened.replica
        decisions: Decisions = []
        again = self._tiered.retry(now_ns, opened, kind)
        if again is not None:
            decisions += again
        elif opened.pending is not None:  # the doubtful answer before is better than none
            self._observe(now_ns, opened, kind, -1)
            decisions += self._settled(now_ns, opened, self._lesser(opened, opened.cause))
        else:
            tier = NAMES[self._tiered.jobs[request].tier]
            self._tiered.forget(opened)
            if kind in CALLERS_FAULT:
                self.facts.drop(opened)
            else:
                self.facts.settle(now_ns, opened, kind)
            retry_after_ns = self.parameters.shedding.retry_after_least_ms * NS_PER_MS
            settled = failed(request, kind, tier, retry_after_ns)
            decisions.append(self._closed(now_ns, opened, settled))
        if self._tiered.queued:
            decisions += self._tiered.refill(now_ns, (replica,))
        return decisions

    def _cancelled(self, now_ns: int, event: Cancelled) -> Sequence[Decision]:
        opened = self.facts.cancelled(now_ns, event)
        if opened is None:
            return ()
        return self._ended(now_ns, opened, Settled(event.request, "cancelled", "", "client", 499))

    def _ended(self, now_ns: int, opened: Open, settled: Settled) -> Decisions:
        """Stop a request wherever it is."""
        request = opened.event.request
        job = self._tiered.jobs.get(request)
        decisions: Decisions = []
        replicas: tuple[int, ...] = ()
        if opened.replica >= 0:
            replicas = (opened.replica,)
            decisions.append(Abort(request, opened.replica))
            if self._health is not None:
                self._health.gone(now_ns, request, opened.replica)
                self._fleet.attention |= self._fleet.moved()
        elif job is not None and job.queued:
            replicas = self._tiered.waits_for(opened, job)
        if job is not None:
            settled = msgspec.structs.replace(settled, tier=NAMES[job.tier])
        self._tiered.forget(opened)
        self.facts.drop(opened)
        decisions.append(self._closed(now_ns, opened, settled))
        if self._tiered.queued:
            decisions += self._tiered.refill(now_ns, replicas)
        return decisions

    def _observe(self, now_ns: int, opened: Open, kind: str, score: int) -> None:
        """Let the breaker that let it through know how it went, once."""
        if self._breakers is None or opened.gated is None:
            return
        model, version = opened.gated
        opened.gated = None
        event = opened.event
        told = self._breakers.observe(
            now_ns, event.request, model, version, event.line, kind, score
        )
        if told:
            self._later += told
            self._fleet.attention = True

    # What is due

    def _ticked(self, now_ns: int) -> Sequence[Decision]:
        self.facts.now_ns = now_ns
        decisions: Decisions = self._tiered.ticked(now_ns)
        if self._parked:
            while self._parked_due and self._parked_due[0][0] <= now_ns:
                _, request = heappop(self._parked_due)
                if request in self._parked:
                    decisions.append(self._refused(now_ns, self.facts.open[request], "limit"))
        if self._chains is not None:
            for request in self._chains.ended(now_ns):
                decisions += self._out_of_budget(now_ns, self.facts.open[request])
        if self._pulse_ns is not None and self._pulse_ns <= now_ns:
            self._pulse(now_ns, decisions)
        return decisions

    def _out_of_budget(self, now_ns: int, opened: Open) -> Decisions:
        """Its chain's time is over: what is there is returned."""
        request = opened.event.request
        if opened.pending is None:
            return self._ended(now_ns, opened, Settled(request, "degraded", "", "chain_budget"))
        decisions: Decisions = []
        if opened.replica >= 0:
            decisions.append(Abort(request, opened.replica))
            if self._health is not None:
                self._health.gone(now_ns, request, opened.replica)
                self._fleet.attention |= self._fleet.moved()
        settled = self._lesser(opened, "chain_budget")
        return decisions + self._settled(now_ns, opened, settled)

    def _pulse(self, now_ns: int, decisions: Decisions) -> None:
        """Ask the mechanisms that watch whether something is due."""
        self._fleet.pulse(now_ns, decisions)
        breakers = self._breakers
        if breakers is not None:
            due_ns = breakers.deadline_ns()
            if due_ns is not None and due_ns <= now_ns:
                self._fleet.tell(now_ns, breakers.ticked(now_ns), decisions)
        pulse_ns = now_ns + PULSE_MOST_NS if self.facts.open else None
        for mechanism in self._watching:
            pulse_ns = _earlier(pulse_ns, mechanism.deadline_ns())
        self._pulse_ns = None if pulse_ns is None else max(pulse_ns, now_ns + PULSE_LEAST_NS)

    def _followed_up(self, now_ns: int, decisions: Decisions) -> Decisions:
        """Carry what an event set off to its end. Each round settles, sends or rotates something,
        of which there is only so much."""
        self.facts.now_ns = now_ns
        limits = self._limits
        while True:
            if self._fleet.attention or self._tiered.gone:
                self._fleet.attention = False
                told, self._later = self._later, []
                self._fleet.tell(now_ns, told, decisions)
                self._fleet.rotate(now_ns, decisions)
            while self._tiered.stranded:
                decisions += self._degraded(now_ns, self._tiered.stranded.pop(0))
            if self._fleet.stuck:
                self._clear(now_ns, *self._fleet.stuck.pop(0), decisions)
                continue
            released = limits.released(now_ns) if limits is not None and self._parked else ()
            for request in released:
                if self._parked.pop(request, None) is not None:
                    decisions += self._passed(now_ns, self.facts.open[request])
            fleet = self._fleet
            if not (released or fleet.attention or fleet.stuck or self._tiered.stranded):
                return decisions

    def _clear(self, now_ns: int, replica: int, kind: str, decisions: Decisions) -> None:
        """Take its requests off a replica that will not answer them. On an isolated card streams
        that have begun may still end well, and so may what is too late to go elsewhere; on a silent
        one nothing will."""
        silent = kind == "silent"
        stuck = [
            opened
            for opened in self.facts.open.values()
            if opened.replica == replica and (silent or opened.first_ns is None)
        ]
        for opened in stuck:
            if opened.replica != replica:  # one before it may have moved it
                continue
            if silent or opened.stage == VERIFYING or self._tiered.may_move(now_ns, opened, kind):
                decisions.append(Abort(opened.event.request, replica))
                if self._health is not None:
                    self._health.gone(now_ns, opened.event.request, replica)
                decisions += self._lost(now_ns, opened, kind)
        self._fleet.attention = True

    # Switches and restarts

    def _switched(self, now_ns: int, event: PolicySwitched) -> Sequence[Decision]:
        """Another policy file rules from now on. Facts carry over; judgement is kept where its
        parameters are the same; what waits is judged anew, what is in flight keeps its terms."""
        new = self._checked_switch(event)
        facts = self.facts
        facts.now_ns = now_ns
        facts.users.resize(new.history.keys_max)
        facts.lines.resize(new.history.keys_max)
        old, tiered, fleet, before = self.parameters, self._tiered, self._fleet, self.mechanisms
        self._build(new)
        reset: list[str] = []
        after = self.mechanisms
        for name, mechanism in after.items():
            if name not in before:
                continue
            if getattr(old, name) == getattr(new, name):
                mechanism.load(before[name].state(now_ns), now_ns)
            else:
                reset.append(name)
        fresh = {name for name in after if name not in before} | set(reset)
        if "rollout" in reset:  # its parameters are times: what is under way goes on
            reset.remove("rollout")
        self._fleet.take_over(now_ns, fleet, fresh)
        if "limits" in fresh and self._limits is not None:
            for request, opened in facts.open.items():
                if request not in self._parked:
                    asked = opened.event
                    self._limits.adopt(request, asked.user, asked.session, asked.model)
        waiting = self._tiered.adopt(tiered, now_ns)
        if (old.estimates, old.history) != (new.estimates, new.history):
            reset.append("complexity")
        decisions: Decisions = [Reset(tuple(reset))] if reset else []
        decisions += self._admitted_anew(now_ns, waiting, old.limits != new.limits)
        self._fleet.attention = True
        return decisions

    def _admitted_anew(self, now_ns: int, waiting: list[Open], new_limits: bool) -> Decisions:
        """Judge what waits by other parameters."""
        parked = list(self._parked) if new_limits else []
        if new_limits:
            self._parked.clear()
            self._parked_due.clear()
        decisions: Decisions = []
        for opened in waiting:
            if not opened.cause:
                decisions += self._tiered.admit(now_ns, opened)
            elif self._tiered.has_lighter(opened.event):
                decisions += self._tiered.admit(now_ns, opened, lighter=True, from_ns=now_ns)
            else:
                decisions += self._degraded(now_ns, opened)
        for request in parked:
            decisions += self._limited(now_ns, self.facts.open[request])
        return decisions

    def _checked_switch(self, event: PolicySwitched) -> Parameters:
        if not self._in_force(event.old):
            raise Illegal("the policy that was to be switched from is not the one in force")
        try:
            new = from_canonical(event.new)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise Illegal(f"the new policy cannot be read: {error}") from error
        if new.discipline != "tiered":
            raise Illegal(f"a switch to discipline {new.discipline} needs a restart")
        return new

    def _in_force(self, text: str) -> bool:
        """Is it the policy that rules? A log from before a section was added is without it."""
        if text == canonical(self.parameters):
            return True
        try:
            return from_canonical(text) == self.parameters
        except (msgspec.ValidationError, msgspec.DecodeError):
            return False

    def _back(self, now_ns: int, event: Restored) -> Sequence[Decision]:
        """After a crash: what was open is lost, and replicas count again when they come up."""
        facts = self.facts
        if event.down_ns < 0:
            raise Illegal(f"down_ns is {event.down_ns}: it must not be negative")
        facts.now_ns = now_ns
        decisions: Decisions = []
        for opened in list(facts.open.values()):
            job = self._tiered.jobs.get(opened.event.request)
            tier = "" if job is None else NAMES[job.tier]
            self._tiered.forget(opened)
            facts.drop(opened)
            settled = failed(opened.event.request, "controller_lost", tier)
            decisions.append(self._closed(now_ns, opened, settled))
        self._parked.clear()
        self._parked_due.clear()
        for replica in list(facts.replicas):
            decisions += self._fleet.told(now_ns, ReplicaDown(replica, "controller_lost"))
        return decisions

    # What people and snapshots see

    def scores(self, event: Arrived) -> list[Score]:
        """How the replicas that serve the event's model look to it now."""
        return self._tiered.scores(event)

    def waiting(self) -> dict[str, int]:
        """Requests that wait here, by tier; ``held``: those that a limit keeps back."""
        counts = dict.fromkeys(NAMES, 0)
        for job in self._tiered.jobs.values():
            if job.queued:
                counts[NAMES[job.tier]] += 1
        return {**counts, "held": len(self._parked)}

    def snapshot(self) -> bytes:
        now_ns = self.facts.now_ns
        limits, breakers = self._limits, self._breakers
        confidence, chains = self._confidence, self._chains
        return _ENCODER.encode(
            ServiceState(
                facts=self.facts.state(),
                tiered=self._tiered.state(now_ns),
                limits=None if limits is None else limits.state(now_ns),
                breakers=None if breakers is None else breakers.state(now_ns),
                confidence=None if confidence is None else confidence.state(now_ns),
                chains=None if chains is None else chains.state(now_ns),
                fleet=self._fleet.state(now_ns),
                parked=[(request, due_ns - now_ns) for request, due_ns in self._parked.items()],
                pulse_ns=None if self._pulse_ns is None else self._pulse_ns - now_ns,
            )
        )

    @classmethod
    def restored(cls, parameters: Parameters, snapshot: bytes, now_ns: int | None) -> Service:
        state = _DECODER.decode(snapshot)
        at_ns = state.facts.now_ns if now_ns is None else now_ns
        facts = Facts.restored(state.facts, parameters.history.keys_max, at_ns)
        service = cls(parameters, facts)
        service._load(state, at_ns)
        return service

    def _load(self, state: ServiceState, now_ns: int) -> None:
        for name in ("limits", "breakers", "confidence", "chains"):
            saved = getattr(state, name)
            if saved is not None:
                self.mechanisms[name].load(saved, now_ns)
        self._tiered.load(state.tiered, now_ns)
        self._fleet.load(state.fleet, now_ns)
        self._parked = {request: due_ns + now_ns for request, due_ns in state.parked}
        self._parked_due = sorted((due_ns + 1, request) for request, due_ns in self._parked.items())
        self._pulse_ns = None if state.pulse_ns is None else state.pulse_ns + now_ns


def _earlier(first_ns: int | None, second_ns: int | None) -> int | None:
    if first_ns is None:
        return second_ns
    return first_ns if second_ns is None or first_ns <= second_ns else second_ns
