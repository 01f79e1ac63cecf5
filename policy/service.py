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
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from policy.breakers import Breakers, BreakersState
from policy.canary import Canary, CanaryState, place_of
from policy.chains import Chains, ChainsState
from policy.confidence import Budget, Confidence, ConfidenceState
from policy.decisions import (
    Abort,
    BreakerMoved,
    LookUp,
    Refused,
    Reset,
    SaveCheckpoint,
    Settled,
    Undo,
)
from policy.events import (
    Arrived,
    CanaryEnded,
    CanaryStarted,
    Cancelled,
    ChainFound,
    CheckpointFailed,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    GpuRead,
    LookedUp,
    PolicySwitched,
    QuotaLeased,
    ReplicaDown,
    ReplicaShare,
    Restored,
    SessionOwned,
    StoreChanged,
    Ticked,
    Verified,
)
from policy.facts import LOOKING, SAVING, UNANSWERED, VERIFYING, Facts, FactsState, Illegal
from policy.fleet import Fleet, FleetState
from policy.leases import UNUSED, Kind, Leases, LeasesState, Use
from policy.limits import FULL, PARKED, Limits, LimitsState, within
from policy.outcomes import CALLERS_FAULT, MAYBE_RUNNING, failed
from policy.parameters import Parameters, canonical, from_canonical
from policy.tiered import Tiered, TieredState, copied
from policy.tiers import NAMES, NS_PER_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.decisions import Decision
    from policy.events import Event
    from policy.facts import Open
    from policy.health import Health
    from policy.mechanism import Mechanism
    from policy.placement import Score
    from policy.tiers import Job

    Decisions = list[Decision]

PULSE_LEAST_NS, PULSE_MOST_NS = 50_000_000, 500_000_000
"""The mechanisms that watch are asked when something is due, but no sooner than after the first of
these; and while work is open no later than after the second, since what happens on a request's way
may have made something due. Nothing does so within less by default."""


LATE = "deadline"
"""Why a request is degraded whose time is over."""
SALT_MOST = (1 << 63) - 1
JUDGEMENT = (
    "parameters", "_breakers", "_chains", "_confidence", "_degrade_below", "_fleet", "_limits",
    "_parked", "_parked_due", "_pulse_ns", "_tiered", "_verify_below",
)  # fmt: skip
"""What a candidate that is kept brings with it."""
LED = ("capacity", "rollout", "drift", "alerts")
"""Mechanisms that only the policy which runs the fleet has."""


class ServiceState(msgspec.Struct, array_like=True):
    """The whole policy in canonical form. Times are relative to the facts' ``now_ns``."""

    facts: FactsState | None
    """None: a candidate's, which has those of the policy that rules."""
    tiered: TieredState
    limits: LimitsState | None
    breakers: BreakersState | None
    confidence: ConfidenceState | None
    chains: ChainsState | None
    fleet: FleetState
    parked: list[tuple[int, int]]
    pulse_ns: int | None
    canary: CanaryState | None = None
    leases: LeasesState | None = None
    """None: a candidate's, which has those of the policy that rules."""


class _Books(NamedTuple):
    """What a judgement that ends leaves to the other."""

    parameters: Parameters
    queue: Tiered
    health: Health | None
    chains: Chains | None
    parked: dict[int, int]


_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(ServiceState)


class Service:
    """The policy of the discipline ``tiered``.

    Args:
        leader: the policy that rules, where this is a candidate's judgement beside it, over the
            same facts (``policy.canary``).
    """

    __slots__ = (
        "_answers_due", "_breakers", "_canary", "_chains", "_confidence", "_degrade_below",
        "_fleet", "_handlers", "_health", "_later", "_leases", "_limits", "_other", "_parked",
        "_parked_due", "_pulse_ns", "_tiered", "_verify_below", "_watching", "arm", "facts",
        "parameters",
    )  # fmt: skip

    def __init__(
        self, parameters: Parameters, facts: Facts | None = None, leader: Service | None = None
    ) -> None:
        self.facts = Facts(parameters.history.keys_max) if facts is None else facts
        self.arm = 0 if leader is None else 1
        """Whose requests it judges (``Open.arm``)."""
        self._canary: Canary | None = None
        self._other = leader
        """The other judgement, while a canary goes on."""
        self._parked: dict[int, int] = {}
        """Requests that a limit holds back: when they are due at the latest."""
        self._parked_due: list[tuple[int, int]] = []
        self._answers_due: list[tuple[int, int]] = []
        """When a request's fallback is due, or its time over; some have their outcome by then."""
        self._pulse_ns: int | None = None
        self._later: list[Decision] = []
        """What breakers decided on the way."""
        self._leases: Leases = (
            Leases(parameters.limits.keys_max) if leader is None else leader._leases
        )
        if leader is None:
            self._leases.use = self._used
        self._build(parameters)
        self._handlers: dict[type, Callable[[int, Any], Sequence[Decision]]] = {
            Verified: self._verified,
            CheckpointSaved: self._saved,
            CheckpointFailed: self._saved,
            LookedUp: self._looked_up,
            PolicySwitched: self._switched,
            Restored: self._back,
            CanaryStarted: self._canary_started,
            CanaryEnded: self._canary_ended,
            ChainFound: self._chain_found,
            StoreChanged: self._store_changed,
            QuotaLeased: self._leased,
            SessionOwned: self._owned,
            ReplicaShare: self._shared,
        }

    def _build(self, parameters: Parameters) -> None:
        self.parameters = parameters
        fleet = queue = None
        limits = parameters.limits
        if self.arm and self._other is not None:
            fleet, queue = self._other._fleet, self._other._tiered
            limits = within(limits, self._other.parameters.limits)
        self._fleet: Fleet = Fleet(parameters, self.facts, fleet)
        self._tiered: Tiered = Tiered(parameters, self.facts, self._closed, self._fleet.sent, queue)
        self._limits = Limits(limits, self._leases) if limits.enabled else None
        self._breakers = Breakers(parameters.breakers) if parameters.breakers.enabled else None
        self._fleet.attach(self._tiered, self._breakers)
        confidence = parameters.confidence
        self._confidence = Confidence(confidence) if confidence.enabled else None
        self._verify_below = confidence.verify_below_permille
        self._degrade_below = confidence.degrade_below_permille
        self._chains = (
            Chains(parameters.chains, parameters.classes.fallback_reserve_ms * NS_PER_MS)
            if parameters.chains.enabled
            else None
        )
        self._watch()

    def _watch(self) -> None:
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
        if self._canary is not None and not self._canary.deciding:
            return self._canary.step(now_ns, event)
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
            decisions = self._followed_up(now_ns, list(decisions))
        if self._leases.due_ns <= now_ns:
            decisions = [*decisions, *self._leases.ticked(now_ns)]
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
        if self._answers_due:
            due_ns = _earlier(due_ns, self._next_answer_ns())
        if self._leases.sharing:
            due_ns = _earlier(due_ns, self._leases.deadline_ns())
        if self._canary is not None:
            due_ns = _earlier(due_ns, self._canary.due_ns)
        return due_ns

    def _next_answer_ns(self) -> int | None:
        due, requests = self._answers_due, self.facts.open
        while due:
            at_ns, request = due[0]
            opened = requests.get(request)
            if opened is not None and not _is_streaming(opened):
                return at_ns
            heappop(due)
        return None

    # A request's way

    def _arrived(self, now_ns: int, event: Arrived) -> Sequence[Decision]:
        opened = self.facts.arrive(now_ns, event)
        if self.arm:
            opened.arm = self.arm
        if self._watching:
            self._soon(now_ns)
        self._promise(opened)
        if self._chains is not None and event.chain:
            ruling = self._chains.arrive(now_ns, event)
            if ruling is not None and ruling.kind == "go":
                opened.due_ns = min(ruling.end_ns, now_ns + ruling.share_ns)
            undone: tuple[Decision, ...] = ()
            if ruling is not None and ruling.undone:
                undone = (Undo(event.request, event.user, event.chain, event.resume),)
            if ruling is not None and ruling.kind != "go":
                return (*undone, self._ruled(now_ns, opened, ruling.kind == "done"))
            if undone:
                return (*undone, *self._limited(now_ns, opened))
        return self._limited(now_ns, opened)

    def _promise(self, opened: Open) -> None:
        """Its caller has something by a certain time."""
        answer_ns = self._tiered.tags.answer_ns(opened.event)
        if answer_ns:
            opened.answer_ns = opened.arrived_ns + answer_ns
            heappush(self._answers_due, (self._late_ns(opened), opened.event.request))
            if len(self._answers_due) > 64 + 2 * len(self.facts.open):
                self._promise_anew()

    def _late_ns(self, opened: Open) -> int:
        """When it is late; once it is, when its time is over."""
        if opened.late:
            return opened.answer_ns
        reserve_ns = self.parameters.classes.fallback_reserve_ms * NS_PER_MS
        return max(opened.arrived_ns, opened.answer_ns - reserve_ns)

    def _promise_anew(self) -> None:
        """Most entries are of requests that are settled: drop them."""
        self._answers_due = sorted(
            (self._late_ns(opened), request)
            for request, opened in self.facts.open.items()
            if opened.answer_ns and opened.arm == self.arm and not _is_streaming(opened)
        )

    def _limited(self, now_ns: int, opened: Open) -> Sequence[Decision]:
        limits = self._limits
        if limits is not None:
            event = opened.event
            if self._leases.cut_off and limits.foreign(now_ns, event.session):
                return (self._refused(now_ns, opened, "session_elsewhere", 503),)
            verdict = limits.arrive(now_ns, event.request, event.user, event.session, event.model)
            if verdict == PARKED:
                self._park(now_ns, opened)
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

    def _park(self, now_ns: int, opened: Open) -> None:
        event = opened.event
        tags = self._tiered.tags
        due_ns = opened.arrived_ns + tags.deadline_ns(event, tags.sla(event))
        if opened.due_ns:
            due_ns = min(due_ns, opened.due_ns)
        due_ns = max(due_ns, now_ns)  # parked anew, it may be due already
        self._parked[event.request] = due_ns
        heappush(self._parked_due, (due_ns + 1, event.request))
        if len(self._parked_due) > 64 + 2 * len(self._parked):
            # Most entries are of requests that went on in time: drop them.
            self._parked_due = sorted((due + 1, request) for request, due in self._parked.items())

    def _passed(self, now_ns: int, opened: Open) -> Sequence[Decision]:
        """No limit holds it back."""
        if self._other is not None:
            self._count_there(now_ns, opened.event)
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
            if self._tiered.candidates(opened.event):
                score = self._confidence.score(event)
        if score < 0 or job.lighter:
            bad = None if score < 0 else self._is_low(score)
            self._judge_replica(now_ns, event.request, event.replica, bad)
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
        tries = self._tries(event.request, opened.replica)
        action, verification = self._confidence.judge(  # type: ignore[union-attr]
            score, event.stream, tokens, choice is not None, tries
        )
        bad = self._is_low(score)
        if tries and action != "verify":
            bad = None if verification == "skipped_budget" else bad or action == "degrade"
        if not (tries and action == "verify"):
            self._judge_replica(now_ns, event.request, opened.replica, bad)
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
        self._compared(now_ns, opened, event)
        decisions = self._verification_over(now_ns, opened, event.verdict)
        if self._health is not None:
            self._health.gone(now_ns, event.request, event.replica)
            self._fleet.attention |= self._fleet.moved()
        return decisions

    def _compared(self, now_ns: int, opened: Open, event: Verified) -> None:
        """What a second run says of the two replicas. Where they differ, the less certain answer is
        held to be the wrong one; without both scores the first, which was worth a second run."""
        if event.verdict == "failed" or self._confidence is None or opened.pending is None:
            return
        request, first = event.request, opened.served
        own, other = opened.pending.confidence_permille, self._confidence.score(event)
        tries = self._tries(request, first)
        if event.verdict == "match":
            if tries or self._is_low(own) is None:  # else its score was counted
                self._judge_replica(now_ns, request, first, False)
        elif 0 <= other < own:
            self._judge_replica(now_ns, request, event.replica, True)
            if tries:
                self._judge_replica(now_ns, request, first, None)
        else:
            self._judge_replica(now_ns, request, first, True)

    def _verification_over(self, now_ns: int, opened: Open, verdict: str) -> Decisions:
        replica = opened.replica
        job = self._tiered.jobs[opened.event.request]
        self._tiered.verification_over(opened, job)
        assert opened.pending is not None
        decisions: Decisions = []
        score = opened.pending.confidence_permille
        if verdict == "failed" and self._tries(job.request, opened.served):
            self._judge_replica(now_ns, job.request, opened.served, None)
        if verdict == "mismatch":
            opened.pending = msgspec.structs.replace(opened.pending, verification="mismatch")
            self._observe(now_ns, opened, "mismatch", opened.pending.confidence_permille)
            opened.cause = "mismatch"
            decisions += self._degraded(now_ns, opened)
        elif verdict == "failed" and (
            score < self._degrade_below or opened.served in self._tiered.doubted
        ):
            opened.pending = msgspec.structs.replace(opened.pending, verification="skipped_budget")
            self._observe(now_ns, opened, "", score)
            opened.cause = "low_confidence"
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
        answered = opened.pending is not None
        actions = parameters.confidence.actions if answered else parameters.breakers.actions
        opened.stage = UNANSWERED
        while opened.rung < len(actions):
            action = actions[opened.rung]
            opened.rung += 1
            if action == "cached":
                if _is_over(now_ns, opened):
                    continue
                opened.stage = LOOKING
                return (LookUp(request),)
            if action == "lighter":
                lighter = tiered.lighter_model
                if (
                    tiered.has_lighter(opened.event)
                    and self._is_in_time(now_ns, opened)
                    and not self._blocked(now_ns, opened, lighter)
                ):
                    tiered.forget(opened)
                    return tiered.admit(now_ns, opened, lighter=True, from_ns=now_ns)
                continue
            return self._delivered(now_ns, opened, self._lesser(opened, "template"))
        if opened.pending is not None:  # there is an answer: better it, and said so, than none
            return self._delivered(now_ns, opened, self._lesser(opened, opened.cause))
        if opened.cause == LATE and opened.tries:
            return self._timed_out(now_ns, opened)
        return (self._refused(now_ns, opened, opened.cause, 429 if opened.cause == LATE else 503),)

    def _is_in_time(self, now_ns: int, opened: Open) -> bool:
        """Could the lighter model still answer it?"""
        if not opened.answer_ns:
            return True
        return now_ns + self._tiered.lighter_ns(opened.event) <= self._late_ns(opened)

    def _timed_out(self, now_ns: int, opened: Open) -> Decisions:
        """No replica answered it in time, and there is nothing to give instead."""
        self._tiered.forget(opened)
        self.facts.settle(now_ns, opened, "timeout")
        retry_after_ns = self.parameters.shedding.retry_after_least_ms * NS_PER_MS
        settled = failed(opened.event.request, "timeout", "", retry_after_ns)
        return [self._closed(now_ns, opened, settled)]

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
        worth_keeping &= _is_streaming(opened) or not _is_over(now_ns, opened)
        if chains is None or not worth_keeping or not chains.answered(event.request):
            return self._settled(now_ns, opened, settled)
        replica = opened.replica
        if replica >= 0:
            self._tiered.answered(opened, self._tiered.jobs[event.request])
        opened.stage = SAVING
        opened.pending = settled
        left_ns = chains.left_ns(now_ns, event.request)
        decisions: Decisions = [SaveCheckpoint(event.request, event.chain, event.step, left_ns)]
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
        if self._other is not None:
            self._over_there(now_ns, request)
        if self._breakers is not None:
            tried = self._breakers.tried(request)
            if tried >= 0:
                self._judge_replica(now_ns, request, tried, None)
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
        if event.kind == "replica_lost":
            self._fleet.let_back(now_ns, event.replica, opened, decisions)
        return decisions + self._lost(now_ns, opened, event.kind)

    def _lost(self, now_ns: int, opened: Open, kind: str) -> Decisions:
        """Its replica will not answer it: try elsewhere, or tell its caller."""
        if opened.stage == VERIFYING:
            return self._verification_over(now_ns, opened, "failed")
        request = opened.event.request
        replica = opened.replica
        if self._tries(request, replica):
            self._judge_replica(now_ns, request, replica, None)
        decisions: Decisions = []
        again = self._tiered.retry(now_ns, opened, kind)
        if again is not None:
            decisions += again
        elif opened.pending is not None:  # the doubtful answer before is better than none
            self._observe(now_ns, opened, kind, -1)
            decisions += self._settled(now_ns, opened, self._lesser(opened, opened.cause))
        elif opened.cause:  # the lighter model has failed it: perhaps there is another way
            self._observe(now_ns, opened, kind, -1)
            self._tiered.answered(opened, self._tiered.jobs[request])
            decisions += self._degraded(now_ns, opened)
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

    def _is_low(self, score: int) -> bool | None:
        """Is an answer bad, to its replica's breaker, by its score?"""
        return None if self._breakers is None else self._breakers.low(score)

    def _tries(self, request: int, replica: int) -> bool:
        """Does the request try whether the replica's answers can be trusted again?"""
        return self._breakers is not None and self._breakers.tried(request) == replica

    def _judge_replica(self, now_ns: int, request: int, replica: int, bad: bool | None) -> None:
        """Tell the replica's breaker of an answer; None: it says nothing of the replica."""
        breakers = self._breakers
        if breakers is None:
            return
        self._later += breakers.answered(now_ns, request, replica, bad)
        if self._later or replica in breakers.doubted:
            self._fleet.attention = True
            host = self._tiered.hosts.get(replica)
            if host is not None and replica in breakers.doubted:
                host.out = True  # at once: the same event may send more

    # What is due

    def _ticked(self, now_ns: int) -> Sequence[Decision]:
        self.facts.now_ns = now_ns
        decisions: Decisions = self._tiered.ticked(now_ns)
        if self._parked:
            if self._leases.sharing:
                self._cut_off(now_ns, decisions)
            while self._parked_due and self._parked_due[0][0] <= now_ns:
                _, request = heappop(self._parked_due)
                if request in self._parked:
                    decisions.append(self._waited(now_ns, self.facts.open[request]))
        if self._chains is not None:
            for request in self._chains.ended(now_ns):
                decisions += self._out_of_budget(now_ns, self.facts.open[request])
        due = self._answers_due
        while due and due[0][0] <= now_ns:
            opened = self.facts.open.get(heappop(due)[1])
            if opened is not None and not _is_streaming(opened):
                decisions += self._out_of_time(now_ns, opened)
        if self._pulse_ns is not None and self._pulse_ns <= now_ns:
            self._pulse(now_ns, decisions)
        return decisions

    def _out_of_time(self, now_ns: int, opened: Open) -> Decisions:
        """Its time is nearly over, so that only what is given instead can come; or over, and what
        is there is given."""
        request, replica = opened.event.request, opened.replica
        over = opened.late
        if not over:
            opened.late = True
            heappush(self._answers_due, (opened.answer_ns, request))
        if request in self._parked:
            return [self._waited(now_ns, opened)] if over else []
        if opened.stage == SAVING:
            assert opened.pending is not None
            return self._settled(now_ns, opened, opened.pending) if over else []
        if opened.stage == LOOKING:
            return [*self._degraded(now_ns, opened)] if over else []
        decisions: Decisions = []
        if replica >= 0:
            decisions.append(Abort(request, replica))
            if self._health is not None:
                self._health.gone(now_ns, request, replica)
                self._fleet.attention |= self._fleet.moved()
        if opened.stage == VERIFYING:
            return decisions + self._verification_over(now_ns, opened, "failed")
        replicas: tuple[int, ...] = ()
        job = self._tiered.jobs.get(request)
        if job is not None and replica >= 0:
            replicas = (replica,)
            if self._tries(request, replica):
                self._judge_replica(now_ns, request, replica, None)
            self._tiered.answered(opened, job)
            opened.first_ns = None
        elif job is not None:
            replicas = self._tiered.waits_for(opened, job)
            self._tiered.forget(opened)
        self._observe(now_ns, opened, "neutral", -1)
        opened.cause = opened.cause or LATE
        decisions += self._degraded(now_ns, opened)
        return decisions + self._tiered.refill(now_ns, replicas)

    def _waited(self, now_ns: int, opened: Open) -> Settled:
        """It waited for a limit until it was too late."""
        assert self._limits is not None
        if self._limits.foreign(now_ns, opened.event.session):
            return self._refused(now_ns, opened, "session_elsewhere", 503)
        return self._refused(now_ns, opened, "limit")

    def _cut_off(self, now_ns: int, decisions: Decisions) -> None:
        """With the store lost for some time, nothing will come of waiting for a session."""
        self._leases.cut(now_ns)
        if self._leases.cut_off and self._limits is not None:
            for request in self._limits.away():
                opened = self.facts.open[request]
                decisions.append(self._refused(now_ns, opened, "session_elsewhere", 503))

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
                self._tell_moves(now_ns, breakers.ticked(now_ns), decisions)
        pulse_ns = now_ns + PULSE_MOST_NS if self.facts.open else None
        for mechanism in self._watching:
            pulse_ns = _earlier(pulse_ns, mechanism.deadline_ns())
        self._pulse_ns = None if pulse_ns is None else max(pulse_ns, now_ns + PULSE_LEAST_NS)

    def _tell_moves(self, now_ns: int, told: Sequence[Decision], decisions: Decisions) -> None:
        """Pass on what breakers decided. One that opens may be about a version that is watched, or
        a replica."""
        for moved in told:
            assert isinstance(moved, BreakerMoved)
            breakers = self._breakers
            replica = -1 if breakers is None else breakers.replica_of(moved.key)
            if replica >= 0:
                self._fleet.doubted(now_ns, replica, moved, decisions)
                continue
            self._fleet.tell(now_ns, (moved,), decisions)
            if breakers is not None and moved.state == "open":
                model, version = breakers.about(moved.key)
                self._fleet.breaker_opened(now_ns, model, version, moved, decisions)

    def _followed_up(self, now_ns: int, decisions: Decisions) -> Decisions:
        """Carry what an event set off to its end. Each round settles, sends or rotates something,
        of which there is only so much."""
        self.facts.now_ns = now_ns
        limits = self._limits
        while True:
            if self._fleet.attention or self._tiered.gone:
                self._fleet.attention = False
                told, self._later = self._later, []
                self._tell_moves(now_ns, told, decisions)
                self._fleet.rotate(now_ns, decisions)
                while self._fleet.rolled_back:
                    model = self._fleet.rolled_back.pop()
                    if self._breakers is not None:
                        forgiven = self._breakers.forgive(now_ns, model)
                        self._fleet.tell(now_ns, forgiven, decisions)
            while self._tiered.stranded:
                decisions += self._degraded(now_ns, self._tiered.stranded.pop(0))
            if self._fleet.stuck:
                self._clear(now_ns, *self._fleet.stuck.pop(0), decisions)
                continue
            released: Sequence[int] = ()
            if limits is not None and self._parked and self._other is None:
                released = limits.released(now_ns)
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
            if opened.replica == replica
            and opened.arm == self.arm
            and (silent or opened.first_ns is None)
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

    # Several controllers

    def _store_changed(self, now_ns: int, event: StoreChanged) -> Sequence[Decision]:
        if not self.arm:  # one fold of facts: a candidate's leases are those of the leader
            self._leases.changed(now_ns, event)
            self.facts.now_ns = now_ns
        if self._limits is not None:
            self._limits.changed(now_ns)
        return ()

    def _leased(self, now_ns: int, event: QuotaLeased) -> Sequence[Decision]:
        if not self.arm:
            self._leases.leased(now_ns, event)
            self.facts.now_ns = now_ns
        if self._limits is not None:
            self._limits.lent(now_ns, event.kind, event.name)
        return ()

    def _owned(self, now_ns: int, event: SessionOwned) -> Sequence[Decision]:
        if not self.arm:
            self._leases.owned(now_ns, event)
            self.facts.now_ns = now_ns
        if self._limits is not None:
            if self._leases.gained == event.session:
                self._limits.spent(now_ns, event.session, event.spent_ages_ns)
            self._limits.lent(now_ns, "session", event.session)
        return ()

    def _shared(self, now_ns: int, event: ReplicaShare) -> Sequence[Decision]:
        """So much of what may be in flight on a replica is this controller's."""
        if not self.arm:
            self.facts.fleet(now_ns, event)
        self._tiered.aim_at(event.replica)
        return self._tiered.refill(now_ns, (event.replica,)) if self._tiered.queued else ()

    def _used(self, kind: Kind, name: str) -> Use:
        """What both policies, while there are two, use a key for."""
        own = UNUSED if self._limits is None else self._limits.use(kind, name)
        limits = None if self._other is None else self._other._limits
        if limits is None:
            return own
        if self._canary is None:
            theirs = limits.use(kind, name)
        else:
            theirs = self._canary.ask(1, lambda: limits.use(kind, name), UNUSED)
        last_ns = max(own.last_ns, theirs.last_ns)
        return Use(max(own.used, theirs.used), own.waiting + theirs.waiting, last_ns)

    def _chain_found(self, now_ns: int, event: ChainFound) -> Sequence[Decision]:
        if self._chains is not None:
            self._chains.found(now_ns, event)
        self.facts.now_ns = now_ns
        return ()

    # Switches and restarts

    def _switched(self, now_ns: int, event: PolicySwitched) -> Sequence[Decision]:
        """Another policy file rules from now on. Facts carry over; judgement is kept where its
        parameters are the same; what waits is judged anew, what is in flight keeps its terms."""
        if self._canary is not None:
            raise Illegal("a canary goes on: end it before the switch")
        new = self._checked(event.old, event.new)
        self.facts.now_ns = now_ns
        self._resize_histories(new)
        old, tiered, fleet, before = self.parameters, self._tiered, self._fleet, self.mechanisms
        self._leases.keys_max = new.limits.keys_max
        doubted = self._doubted()
        self._build(new)
        self._leases.other_limits()
        reset = self._carried(now_ns, before, old)
        fresh = {name for name in self.mechanisms if name not in before} | set(reset)
        if "rollout" in reset:  # its parameters are times: what is under way goes on
            reset.remove("rollout")
        self._fleet.take_over(now_ns, fleet, fresh)
        if "limits" in fresh:
            self._count_open(self._parked)
        waiting = self._tiered.adopt(tiered, now_ns)
        if _learns_otherwise(old, new):
            reset.append("complexity")
        decisions: Decisions = [Reset(tuple(reset))] if reset else []
        self._fleet.believe(now_ns, doubted, decisions)
        parked: list[int] = []
        if old.limits != new.limits:
            parked += self._parked
            self._parked.clear()
            self._parked_due.clear()
        decisions += self._admitted_anew(now_ns, waiting, parked)
        self._promise_anew()
        self._fleet.attention = True
        return decisions

    def _doubted(self) -> list[int]:
        """Replicas that are out for what they answer."""
        return [] if self._breakers is None else sorted(self._breakers.doubted)

    def _resize_histories(self, parameters: Parameters) -> None:
        self.facts.users.resize(parameters.history.keys_max)
        self.facts.lines.resize(parameters.history.keys_max)

    def _carried(
        self, now_ns: int, before: dict[str, Mechanism[Any]], old: Parameters
    ) -> list[str]:
        """Go on with what the mechanisms in ``before``, by the policy ``old``, remember, where
        their parameters are the same. Returns the others, which begin anew."""
        reset: list[str] = []
        for name, mechanism in self.mechanisms.items():
            if name not in before:
                continue
            if getattr(old, name) == getattr(self.parameters, name):
                mechanism.load(copied(before[name].state(now_ns)), now_ns)
            else:
                reset.append(name)
        return reset

    def _count_open(self, parked: dict[int, int]) -> None:
        """What went on under another policy counts as in flight."""
        if self._limits is not None:
            for request, opened in self.facts.open.items():
                if request not in parked:
                    asked = opened.event
                    self._limits.adopt(request, asked.user, asked.session, asked.model)

    def _admitted_anew(self, now_ns: int, waiting: list[Open], parked: list[int]) -> Decisions:
        """Judge what waits, and what a limit held back, by other parameters."""
        decisions: Decisions = []
        for opened in waiting:
            if not opened.cause:
                decisions += self._tiered.admit(now_ns, opened)
            elif self._tiered.has_lighter(opened.event):
                decisions += self._tiered.admit(now_ns, opened, lighter=True, from_ns=now_ns)
            else:
                decisions += self._degraded(now_ns, opened)
        for request in sorted(parked):
            decisions += self._limited(now_ns, self.facts.open[request])
        return decisions

    def _checked(self, old: str, text: str) -> Parameters:
        """What is to rule after, or beside, the policy ``old``."""
        if not self._in_force(old):
            raise Illegal("the policy that was to be switched from is not the one in force")
        try:
            new = from_canonical(text)
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
        if self._canary is not None:
            decisions += self._canary.candidate.lose(now_ns)
            self._alone()
        decisions += self.lose(now_ns)
        for replica in list(facts.replicas):
            decisions += self._fleet.told(now_ns, ReplicaDown(replica, "controller_lost"))
        self._leases.forget()
        if self._limits is not None:
            self._limits.changed(now_ns)
        return decisions

    def lose(self, now_ns: int) -> Decisions:
        """Settle all that is open here: the controller lost it."""
        decisions: Decisions = []
        for opened in list(self.facts.open.values()):
            if opened.arm != self.arm:
                continue
            job = self._tiered.jobs.get(opened.event.request)
            tier = "" if job is None else NAMES[job.tier]
            self._tiered.forget(opened)
            self.facts.drop(opened)
            settled = failed(opened.event.request, "controller_lost", tier)
            decisions.append(self._closed(now_ns, opened, settled))
        self._parked.clear()
        self._parked_due.clear()
        return decisions

    # A canary

    def _canary_started(self, now_ns: int, event: CanaryStarted) -> Sequence[Decision]:
        """A candidate judges a share of the callers from now on, or another share than before."""
        new = self._checked(event.old, event.new)
        if not (1 <= event.share_permille <= 1000 and 0 <= event.salt <= SALT_MOST):
            raise Illegal(
                f"share_permille is {event.share_permille} and salt {event.salt}: they lie within"
                f" 1..1000 and 0..{SALT_MOST}"
            )
        if self._canary is not None:
            if new != self._canary.candidate.parameters or event.salt != self._canary.salt:
                raise Illegal("another canary goes on: end it first")
            self.facts.now_ns = now_ns
            self._canary.resize(event.share_permille)
            return ()
        if new == self.parameters:
            raise Illegal("the candidate is the policy in force")
        try:
            candidate = Service(new, self.facts, self)
            reset = candidate._begin_beside(now_ns, self)
            canary = Canary(self, candidate, event.share_permille, event.salt)
        except Exception as error:
            self._alone()
            raise Illegal(f"the candidate raised {place_of(error)}") from error
        self.facts.now_ns = now_ns
        self._go_beside(canary, candidate)
        self._leases.other_limits()
        decisions: Decisions = [Reset(tuple(reset))] if reset else []
        return decisions + canary.begun(now_ns)

    def _go_beside(self, canary: Canary, candidate: Service) -> None:
        self._canary = canary
        self._other = candidate
        self._fleet.guests = (candidate._tiered,)

    def _alone(self) -> None:
        """Only one policy rules again."""
        self._canary = self._other = None
        self._fleet.guests = ()
        self._tiered.split = None
        self._tiered.aim(self.parameters.inflight)

    def _begin_beside(self, now_ns: int, stable: Service) -> list[str]:
        """Know what the policy that rules does, where that means the same here. Its requests stay
        its own, and so do chains that go on. Returns what begins anew."""
        old, new = stable.parameters, self.parameters
        before = {name: one for name, one in stable.mechanisms.items() if name != "chains"}
        reset = self._carried(now_ns, before, old)
        fresh = {name for name in self.mechanisms if name not in before} | set(reset)
        self._tiered.learn(stable._tiered, now_ns)
        if _learns_otherwise(old, new):
            reset.append("complexity")
        if "health" in fresh:
            self._fleet.watch_all(now_ns, stable._fleet)
        elif self._health is not None:
            self._health.disown()
        if "limits" in fresh:
            self._count_open(stable._parked)
        elif self._limits is not None:
            self._limits.disown(now_ns)
        if self._breakers is not None:
            self._breakers.disown(now_ns)
        self._fleet.follow(stable._fleet)
        self._soon(now_ns)
        return reset

    def _canary_ended(self, now_ns: int, event: CanaryEnded) -> Sequence[Decision]:
        """One of the two serves everyone from now on: what waits for the other is judged anew, what
        the other has in flight keeps its terms."""
        candidate = self._other
        if candidate is None:
            raise Illegal("no canary goes on")
        if event.keep not in ("old", "new"):
            raise Illegal(f"keep is {event.keep!r}: it must be old or new")
        self.facts.now_ns = now_ns
        reset: list[str] = []
        parked: list[int] = []
        doubted = self._doubted()
        if event.keep == "old":
            ended = candidate._books()
        else:
            ended = self._books()
            reset += self._succeeded(now_ns, candidate)
            parked += self._unbound(now_ns)
        self._alone()
        for opened in self.facts.open.values():
            opened.arm = 0
        self._promise_anew()
        reset += self._take_in(now_ns, ended)
        waiting = self._tiered.take_in(ended.queue)
        decisions: Decisions = [Reset(tuple(reset))] if reset else []
        self._fleet.believe(now_ns, doubted, decisions)
        decisions += self._admitted_anew(now_ns, waiting, [*ended.parked, *parked])
        decisions += self._tiered.refill(now_ns, list(self.facts.replicas))
        self._fleet.attention = True
        self._soon(now_ns)
        return decisions

    def _take_in(self, now_ns: int, ended: _Books) -> list[str]:
        """Watch what the other sent, and go on with its chains. Returns what is given up."""
        if self._health is not None and ended.health is not None:
            self._health.take_in(now_ns, ended.health)
        if self._chains is not None and ended.chains is not None:
            if self.parameters.chains != ended.parameters.chains:
                return ["chains"]
            self._chains.take_in(now_ns, ended.chains)
        return []

    def _unbound(self, now_ns: int) -> list[int]:
        """A candidate that is kept has its own limits now. Returns what they are to be asked about:
        what waited for those that were not only its own."""
        limits = self._limits
        if limits is None:
            return []
        own = self.parameters.limits
        self._limits = limits.bounded_by(now_ns, own) if own.enabled else None
        parked = list(self._parked)
        self._parked.clear()
        self._parked_due.clear()
        return parked

    def carry_on(self, now_ns: int, told: dict[int, Open], event: Event | None) -> Decisions:
        """The candidate raised: this policy serves everyone from now on.

        What the candidate sent keeps its terms, where the facts say of it what was told. All else
        of it is put back to what was told, and judged anew; what it had in flight is stopped.

        Args:
            told: the candidate's requests, each as it was when something was last told of it.
            event: what this policy is to be told before it judges anew.
        """
        candidate, facts = self._other, self.facts
        assert candidate is not None
        self._alone()
        books = candidate._books()
        stopped: list[Abort] = []
        unsent: list[Open] = []
        ended: list[tuple[Open, Settled]] = []
        self._put_back(told, books.queue, stopped, unsent, ended)
        try:
            reset = self._take_in(now_ns, books)
        except Exception:  # whatever raised may have left it like this
            reset = ["chains"]
        self._tiered.take_in(books.queue)
        decisions: Decisions = [*([Reset(tuple(reset))] if reset else []), *stopped]
        if self._health is not None:
            for abort in stopped:
                self._health.gone(now_ns, abort.request, abort.replica)
        for opened, settled in ended:
            decisions += self._settled(now_ns, opened, settled)
        if event is not None:
            decisions += self.step(now_ns, event)
        for opened in unsent:
            request = opened.event.request
            if request not in facts.open:  # that is what the event was about
                continue
            passed = self._limits is None or self._limits.passed(request)
            waiting, parked = ([opened], []) if passed else ([], [request])
            decisions += self._admitted_anew(now_ns, waiting, parked)
        decisions += self._tiered.refill(now_ns, list(facts.replicas))
        self._fleet.attention = True
        self._soon(now_ns)
        return self._followed_up(now_ns, decisions)

    def _put_back(
        self,
        told: dict[int, Open],
        queue: Tiered,
        stopped: list[Abort],
        unsent: list[Open],
        ended: list[tuple[Open, Settled]],
    ) -> None:
        """Put the facts in order, and leave only that in ``queue`` which goes on as it is."""
        facts = self.facts
        jobs, queue.jobs = queue.jobs, {}
        for request, known in sorted(told.items()):
            opened, job = facts.open.get(request), jobs.get(request)
            if opened is not None and _as_told(opened, known, job):
                if known.replica < 0 and not known.stage:
                    unsent.append(opened)
                elif job is not None and not job.queued:
                    queue.jobs[request] = job
                continue
            if opened is not None and job is not None and opened.replica >= 0 > known.replica:
                queue.hosts[opened.replica].prefixes.remove(job.keys)
            if known.replica >= 0:
                stopped.append(Abort(request, known.replica))
            settled = _taken_off(known)
            facts.open[request] = known
            if settled is None:
                unsent.append(known)
            else:
                ended.append((known, settled))
        facts.recount()
        for opened in facts.open.values():
            opened.arm = 0
        self._promise_anew()

    def _succeeded(self, now_ns: int, candidate: Service) -> list[str]:
        """The candidate's judgement becomes this one's, and runs the fleet from now on. Returns
        what of the latter begins anew."""
        old, before, fleet = self.parameters, self.mechanisms, self._fleet
        self._resize_histories(candidate.parameters)
        for name in JUDGEMENT:
            setattr(self, name, getattr(candidate, name))
        self._tiered.rule(self._closed)
        self._fleet.lead(self.parameters)
        self._watch()
        reset = self._carried(now_ns, {name: before[name] for name in LED if name in before}, old)
        fresh = {name for name in LED if name not in before} | set(reset)
        if "rollout" in reset:  # its parameters are times: what is under way goes on
            reset.remove("rollout")
        self._fleet.take_over(now_ns, fleet, fresh)
        return reset

    def _books(self) -> _Books:
        return _Books(self.parameters, self._tiered, self._health, self._chains, self._parked)

    # What a canary asks of each of the two

    @property
    def queue(self) -> Tiered:
        return self._tiered

    @property
    def canary(self) -> Canary | None:
        """The candidate and its share, while a canary goes on."""
        return self._canary

    def _count_there(self, now_ns: int, asked: Arrived) -> None:
        """What goes on here counts against the other's limits, too."""
        request, names = asked.request, (asked.user, asked.session, asked.model)
        self._tell_limits(lambda limits: limits.count(now_ns, request, *names))

    def _over_there(self, now_ns: int, request: int) -> None:
        self._tell_limits(lambda limits: limits.over(now_ns, request))

    def _tell_limits(self, news: Callable[[Limits], None]) -> None:
        limits = None if self._other is None else self._other._limits
        if limits is not None and self._canary is not None:
            self._canary.ask(1, lambda: news(limits), None)
        elif limits is not None:
            news(limits)

    def holds_back(self, event: Arrived) -> bool:
        """Does something of its session wait here for a limit?"""
        return self._limits is not None and self._limits.holds_back(event.session)

    def continues(self, event: Arrived) -> bool:
        """Is it a step of a chain that is known here?"""
        return self._chains is not None and bool(event.chain) and self._chains.known(event)

    def next_up(self, now_ns: int) -> int | None:
        """The request that a limit held back and now lets go, before all others."""
        return None if self._limits is None else self._limits.next_up(now_ns)

    def let_go(self, now_ns: int, request: int) -> Sequence[Decision]:
        """What ``next_up`` gave goes on."""
        assert self._limits is not None
        self._limits.release(now_ns, request)
        del self._parked[request]
        return self._passed(now_ns, self.facts.open[request])

    def unsettled(self) -> bool:
        """Has something been set off that is not carried to its end?"""
        fleet = self._fleet
        fleet.attention |= fleet.behind
        return fleet.attention or bool(fleet.stuck or self._tiered.stranded)

    def attend(self) -> None:
        """The fleet as the other sees it has changed."""
        self._fleet.attention = True

    def follow_up(self, now_ns: int) -> Decisions:
        """Carry it to its end."""
        return self._followed_up(now_ns, [])

    # What people and snapshots see

    def verification(self) -> Budget | None:
        """What second runs may take; None: no answer is scored."""
        return None if self._confidence is None else self._confidence.budget()

    def scores(self, event: Arrived) -> list[Score]:
        """How the replicas that serve the event's model look to it now."""
        opened = self.facts.open.get(event.request)
        if self._canary is not None and opened is not None and opened.arm:
            return self._canary.candidate.scores(event)
        return self._tiered.scores(event)

    def waiting(self) -> dict[str, int]:
        """Requests that wait here, by tier; ``held``: those that a limit keeps back."""
        counts: dict[str, int] = dict.fromkeys((*NAMES, "held"), 0)
        for job in self._tiered.jobs.values():
            if job.queued:
                counts[NAMES[job.tier]] += 1
        counts["held"] = len(self._parked)
        if self._canary is not None:
            for name, count in self._canary.candidate.waiting().items():
                counts[name] += count
        return counts

    def snapshot(self) -> bytes:
        now_ns = self.facts.now_ns
        limits, breakers = self._limits, self._breakers
        confidence, chains = self._confidence, self._chains
        return _ENCODER.encode(
            ServiceState(
                facts=None if self.arm else self.facts.state(),
                tiered=self._tiered.state(now_ns),
                limits=None if limits is None else limits.state(now_ns),
                breakers=None if breakers is None else breakers.state(now_ns),
                confidence=None if confidence is None else confidence.state(now_ns),
                chains=None if chains is None else chains.state(now_ns),
                fleet=self._fleet.state(now_ns),
                parked=[(request, due_ns - now_ns) for request, due_ns in self._parked.items()],
                pulse_ns=None if self._pulse_ns is None else self._pulse_ns - now_ns,
                canary=None if self._canary is None else self._canary.state(),
                leases=None if self.arm else self._leases.state(now_ns),
            )
        )

    @classmethod
    def restored(cls, parameters: Parameters, snapshot: bytes, now_ns: int | None) -> Service:
        state = _DECODER.decode(snapshot)
        assert state.facts is not None, "this is the snapshot of a candidate"
        at_ns = state.facts.now_ns if now_ns is None else now_ns
        facts = Facts.restored(state.facts, parameters.history.keys_max, at_ns)
        service = cls(parameters, facts)
        service._load(state, at_ns)
        if state.canary is not None:
            candidate = cls(from_canonical(state.canary.new), facts, service)
            candidate._load(_DECODER.decode(state.canary.candidate), at_ns)
            canary = Canary(service, candidate, state.canary.share_permille, state.canary.salt)
            canary.load(state.canary, at_ns)
            service._go_beside(canary, candidate)
        return service

    def _load(self, state: ServiceState, now_ns: int) -> None:
        if state.leases is not None:
            self._leases.load(state.leases, now_ns)
        for name in ("limits", "breakers", "confidence", "chains"):
            saved = getattr(state, name)
            if saved is not None:
                self.mechanisms[name].load(saved, now_ns)
        self._tiered.load(state.tiered, now_ns)
        self._fleet.load(state.fleet, now_ns)
        self._parked = {request: due_ns + now_ns for request, due_ns in state.parked}
        self._parked_due = sorted((due_ns + 1, request) for request, due_ns in self._parked.items())
        self._promise_anew()
        self._pulse_ns = None if state.pulse_ns is None else state.pulse_ns + now_ns


def _as_told(opened: Open, known: Open, job: Job | None) -> bool:
    """Do the facts, and the queue, say of a request what was told of it last?"""
    if (opened.replica, opened.stage) != (known.replica, known.stage):
        return False
    return known.replica < 0 or (job is not None and not job.queued)


def _taken_off(known: Open) -> Settled | None:
    """Take a request off where it was. Returns what its caller is told, if it cannot be tried
    again: the answer that there is; or that it failed, where a stream has begun."""
    settled = known.pending if known.stage else None
    if known.first_ns is not None and known.event.stream:
        settled = settled or failed(known.event.request, "controller_lost")
    if known.replica >= 0:
        known.served = known.replica  # what is heard of it from there is late, and legal
    known.replica, known.stage, known.first_ns = -1, UNANSWERED, None
    known.kv_tokens = known.prefill_tokens = 0
    known.long = False
    return settled


def _is_streaming(opened: Open) -> bool:
    """Has its caller a part of the answer already?"""
    return opened.event.stream and opened.first_ns is not None


def _is_over(now_ns: int, opened: Open) -> bool:
    """Has its caller waited as long as it does?"""
    return 0 < opened.answer_ns <= now_ns


def _learns_otherwise(old: Parameters, new: Parameters) -> bool:
    """Does what one has learned of requests' sizes mean nothing to the other?"""
    return (old.estimates, old.history) != (new.estimates, new.history)


def _earlier(first_ns: int | None, second_ns: int | None) -> int | None:
    if first_ns is None:
        return second_ns
    return first_ns if second_ns is None or first_ns <= second_ns else second_ns
