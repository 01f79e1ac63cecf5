"""What one decision log says of a run: who missed, what was broken, what a storm looks like.

A ``Reader`` is told every step. With the policy beside it, which replay steps, it looks at its
books as well. It uses none of the policy's own accounts of requests: these would share its faults.
What is missed is judged by the same code as in a canary (``policy.deployment.Watcher``).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.decisions import BreakerMoved, Dispatch, Refused, Settled, Verify
from policy.deployment import Watcher
from policy.events import Arrived, Failed, Finished, PolicySwitched, Ticked
from policy.tiers import Tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.deployment import Result
    from policy.events import Event
    from policy.parameters import Parameters

    Array = np.ndarray[Any, np.dtype[Any]]

NS = 1_000_000_000
BLOCK_NS = 5 * NS
"""Requests that arrive in one such stretch are taken to share their luck."""
BROKEN_MOST = 5
SIZES_EVERY_STEPS = 32
FOLLOWED_LEAST = 1000
"""With so little room for open requests, limits do not follow them all."""
CLASSES = ("P0", "P1", "P2")


@dataclass(slots=True)
class Request:
    """One request that is open."""

    event: Arrived
    arrived_ns: int
    sla: str
    started_ns: int = -1
    """When it was first sent to a replica."""
    tokens: int = 0
    """That its answer took to compute."""


@dataclass(slots=True)
class Story:
    """What is kept of a run. Arrays have a row a block of arrival and a column a class."""

    steps: int = 0
    arrived: int = 0
    sent: int = 0
    """Dispatches, tries after a failure included."""
    again: int = 0
    """Of these, those after a failure."""
    broken: list[str] = field(default_factory=list)
    """Invariants that do not hold, a few of them."""
    offered: Array = field(default_factory=lambda: np.zeros((0, len(CLASSES)), np.int64))
    missed: Array = field(default_factory=lambda: np.zeros((0, len(CLASSES)), np.int64))
    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    starved_s: dict[str, float] = field(default_factory=dict)
    """By class: the longest that some of it waited while only others were started."""
    tokens: int = 0
    second_tokens: int = 0
    """Computed for answers, and for second runs of answers."""
    scores: Counter[int] = field(default_factory=Counter)
    """Confidence of answers, per mille."""
    openings: dict[str, int] = field(default_factory=dict)
    """By breaker: how often it opened from closed."""
    opened_for_s: dict[str, float] = field(default_factory=dict)
    """By breaker: how long it was not closed in all."""
    open_at_end: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    last_ns: int = 0


class Reader:
    """Folds a log, step by step.

    Args:
        parameters: the policy that wrote it.
        judged_by: the policy whose deadlines say what is missed; for both sides of a comparison the
            live one, since no candidate may set itself an easier goal.
    """

    def __init__(self, parameters: Parameters, judged_by: Parameters) -> None:
        self.story = Story()
        self._parameters = parameters
        self._limits = parameters.limits
        self._tags = Tags(judged_by.classes, judged_by.tiers)
        self._watcher = Watcher(judged_by)
        self._open: dict[int, Request] = {}
        self._under_way: Counter[tuple[str, str]] = Counter()
        """Requests that were started, by (kind of key, key)."""
        self._sessions: dict[str, list[int]] = {}
        self._rows: list[list[int]] = []
        self._starving = {sla: _Starving() for sla in CLASSES}
        self._breakers: dict[str, int] = {}
        """When each breaker that is not closed left that state."""
        self._rates = Rates(parameters)
        self._switched = False

    def step(
        self, now_ns: int, event: Event, decisions: Sequence[Decision], policy: Policy | None = None
    ) -> None:
        """One step; ``policy`` is the state after it."""
        story = self.story
        story.steps += 1
        story.last_ns = now_ns
        kind = type(event)
        if kind is Arrived:
            self._arrive(now_ns, event)  # type: ignore[arg-type]
        elif kind is Finished:
            self._finish(event)  # type: ignore[arg-type]
        elif kind is Failed:
            story.failures[event.kind] += 1  # type: ignore[union-attr]
        elif kind is PolicySwitched:
            self._switched = True  # what was let in under the old limits goes on
        for decision in decisions:
            made = type(decision)
            if made is Dispatch:
                self._send(now_ns, decision)  # type: ignore[arg-type]
            elif made is Settled:
                self._settle(decision)  # type: ignore[arg-type]
            elif made is Verify:
                self._verify(decision)  # type: ignore[arg-type]
            elif made is BreakerMoved:
                self._breaker(now_ns, decision)  # type: ignore[arg-type]
            elif made is Refused:
                self._break(f"an event was refused at {now_ns} ns: {decision}")
        for result in self._watcher.step(now_ns, event, decisions):
            self._count(result)
        if policy is not None:
            self._look_into(now_ns, event, policy)

    def end(self) -> Story:
        """The log ends, and with it everything that was open should have."""
        story = self.story
        story.open_at_end = len(self._open)
        if self._open:
            some = sorted(self._open)[:3]
            self._break(f"{len(self._open)} requests have no outcome at the end, such as {some}")
        for key, since_ns in self._breakers.items():
            self._opened_for(key, story.last_ns - since_ns)
        story.starved_s = {sla: each.most_ns / NS for sla, each in self._starving.items()}
        shape = (-1, 2, len(CLASSES))
        rows = np.array(self._rows, np.int64).reshape(shape)
        story.offered, story.missed = rows[:, 0], rows[:, 1]
        return story

    # ---- requests ----

    def _arrive(self, now_ns: int, event: Arrived) -> None:
        if event.request in self._open:
            self._break(f"request {event.request} arrives twice")
        sla = self._tags.sla(event)
        request = Request(event, now_ns, sla)
        self.story.arrived += 1
        self._open[event.request] = request
        self._starving[sla].waits(now_ns)
        if event.session:
            self._sessions.setdefault(event.session, []).append(event.request)

    def _send(self, now_ns: int, decision: Dispatch) -> None:
        story = self.story
        request = self._open.get(decision.request)
        if request is None:
            self._break(f"request {decision.request} is sent, and it is not open")
            return
        story.sent += 1
        if request.started_ns >= 0:
            story.again += 1
            return
        request.started_ns = now_ns
        self._keep_limits(request)
        for sla, each in self._starving.items():
            each.started(now_ns, sla == request.sla)

    def _keep_limits(self, request: Request) -> None:
        """No more of a user, a session or a model, or in all, are under way than may be; of a
        session with one at a time they go in order."""
        limits, event = self._limits, request.event
        followed = limits.enabled and limits.open_max >= FOLLOWED_LEAST and not self._switched
        if not followed or self._parameters.discipline == "fifo":  # which has no limits
            return
        for key, most in (
            (("user", event.user), limits.user_in_flight_most),
            (("session", event.session), limits.session_in_flight_most),
            (("model", event.model), limits.model_in_flight_most),
            (("", "all"), limits.global_in_flight_most),
        ):
            if most and key[1]:
                self._under_way[key] += 1
                if self._under_way[key] > most:
                    self._break(
                        f"request {event.request} is number {self._under_way[key]} under way of"
                        f" {' '.join(key).strip()}: at most {most} may be"
                    )
        earlier = self._sessions.get(event.session, [event.request])[0]
        if limits.session_in_flight_most == 1 and event.session and earlier != event.request:
            self._break(
                f"request {event.request} is started before request {earlier} of its session,"
                f" {event.session!r}, has ended"
            )

    def _leave_limits(self, event: Arrived) -> None:
        for key in (
            ("user", event.user), ("session", event.session), ("model", event.model), ("", "all"),
        ):  # fmt: skip
            if self._under_way[key] > 1:
                self._under_way[key] -= 1
            else:
                del self._under_way[key]

    def _finish(self, event: Finished) -> None:
        tokens = event.prompt_tokens - event.cached_tokens + event.output_tokens
        self.story.tokens += tokens
        request = self._open.get(event.request)
        if request is not None:
            request.tokens = tokens

    def _verify(self, decision: Verify) -> None:
        request = self._open.get(decision.request)
        if request is None:
            self._break(f"request {decision.request} is verified, and it is not open")
            return
        self.story.second_tokens += request.tokens

    def _settle(self, settled: Settled) -> None:
        request = self._open.pop(settled.request, None)
        if request is None:
            self._break(f"request {settled.request} is settled, and it is not open: {settled}")
            return
        session = request.event.session
        if session:
            numbers = self._sessions[session]
            numbers.remove(settled.request)
            if not numbers:
                del self._sessions[session]
        if request.started_ns < 0:
            self._starving[request.sla].leaves()
        else:
            self._leave_limits(request.event)
        if settled.confidence_permille >= 0:
            self.story.scores[settled.confidence_permille] += 1

    def _count(self, result: Result) -> None:
        block = result.arrived_ns // BLOCK_NS
        rows = self._rows
        while len(rows) <= block:
            rows.append([0] * (2 * len(CLASSES)))
        column = CLASSES.index(result.sla)
        rows[block][column] += 1
        rows[block][len(CLASSES) + column] += result.missed
        if result.ttft_ns >= 0:
            self.story.ttft_s.setdefault(result.sla, []).append(result.ttft_ns / NS)

    # ---- the rest ----

    def _breaker(self, now_ns: int, moved: BreakerMoved) -> None:
        if moved.state == "closed":
            since_ns = self._breakers.pop(moved.key, now_ns)
            self._opened_for(moved.key, now_ns - since_ns)
        elif moved.key not in self._breakers:
            self._breakers[moved.key] = now_ns
            openings = self.story.openings
            openings[moved.key] = openings.get(moved.key, 0) + 1

    def _opened_for(self, key: str, for_ns: int) -> None:
        opened = self.story.opened_for_s
        opened[key] = opened.get(key, 0.0) + for_ns / NS

    def _look_into(self, now_ns: int, event: Event, policy: Any) -> None:
        """Books that only a policy itself can show; a fifo policy shows none."""
        due_ns = policy.deadline_ns()
        if due_ns is not None and due_ns <= now_ns and type(event) is Ticked:
            self._break(f"a tick at {now_ns} ns leaves the deadline at {due_ns} ns")
        mechanisms = getattr(policy, "mechanisms", {})
        if self.story.steps % SIZES_EVERY_STEPS == 0:
            for name, mechanism in mechanisms.items():
                if mechanism.size() > mechanism.size_most():
                    self._break(
                        f"{name} holds {mechanism.size()} entries: at most {mechanism.size_most()}"
                    )
        limits = mechanisms.get("limits")
        if limits is not None and not self._switched:
            said = self._rates.look(now_ns, event, limits, self._open)
            if said:
                self._break(said)

    def _break(self, what: str) -> None:
        if len(self.story.broken) < BROKEN_MOST:
            self.story.broken.append(what)


class _Starving:
    """How long a class waits while others are started and it is not."""

    __slots__ = ("_since_ns", "_waiting", "most_ns")

    def __init__(self) -> None:
        self._waiting = 0
        self._since_ns = 0
        """Since when something of it waits and nothing of it was started."""
        self.most_ns = 0

    def waits(self, now_ns: int) -> None:
        if not self._waiting:
            self._since_ns = now_ns
        self._waiting += 1

    def leaves(self) -> None:
        """One of it went without being started: whoever is left waits on."""
        self._waiting -= 1

    def started(self, now_ns: int, own: bool) -> None:
        if own:
            self._waiting -= 1
            self._since_ns = now_ns
        elif self._waiting:
            self.most_ns = max(self.most_ns, now_ns - self._since_ns)


class Rates:
    """In no second more of a user, a session or a model goes on than its limit says.

    What is paced is when a request gets past the limits, which may be before it is sent: the first
    step after which they no longer hold it.
    """

    KEYS_LEAST = 100

    def __init__(self, parameters: Parameters) -> None:
        limits = parameters.limits
        self._most = (
            ("user", limits.user_per_s), ("session", limits.session_per_s),
            ("model", limits.model_per_s),
        )  # fmt: skip
        self._followed = limits.keys_max >= self.KEYS_LEAST
        self._held: dict[int, Arrived] = {}
        self._passed: dict[tuple[str, str], deque[int]] = {}

    def look(self, now_ns: int, event: Event, limits: Any, open_: dict[int, Request]) -> str:
        """What is broken, in words; empty: nothing."""
        if not self._followed:
            return ""
        if isinstance(event, Arrived) and event.request in open_:
            self._held[event.request] = event
        said = ""
        for number, arrived in list(self._held.items()):
            request = open_.get(number)
            if request is not None and limits.parked(number):
                if request.started_ns >= 0:
                    said = f"request {number} was sent while the limits hold it back"
                continue
            del self._held[number]
            if request is not None:
                said = self._pass(now_ns, arrived) or said
        return said

    def _pass(self, now_ns: int, arrived: Arrived) -> str:
        for kind, most in self._most:
            key = getattr(arrived, kind)
            if not (key and most):
                continue
            passed = self._passed.setdefault((kind, key), deque())
            while passed and passed[0] <= now_ns - NS:
                passed.popleft()
            passed.append(now_ns)
            if len(passed) > most:
                return (
                    f"request {arrived.request} is number {len(passed)} of {kind} {key!r} within a"
                    f" second: at most {most}"
                )
        return ""
