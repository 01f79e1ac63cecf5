"""What a drill did to a fleet, read off its decision log: the same code in the twin and live.

At a known instant somebody breaks something. From then on this follows which replicas left the
rotation, when as many serve as before, what became of every request, and what people were told.
It uses none of the policy's own accounts: these would share its faults.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from policy.decisions import Alert, Dispatch, Rotated, Settled
from policy.events import Arrived, FirstToken, ReplicaDown, ReplicaUp, Restored
from policy.fleet import NO_DEATH
from policy.outcomes import CALLERS_FAULT
from policy.tiers import Tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from policy.events import Event
    from policy.parameters import Parameters

NS = 1_000_000_000
STRETCH_NS = NS
"""Goodput is looked at over this long before and after a request."""
GOOD_PERMILLE = 900
"""Of the share before the fault: goodput is back from there on."""
OUT = frozenset({"ejected", "isolated", "draining"})
SAME_S = 0.05
"""Times that differ by less are told as equal: a busy machine's timers are no finer."""
SAME_REQUESTS = 3
"""Counts that differ by no more are equal beside each other: what is in flight at the instant of
the fault is chance."""
ALERTS_MOST = 50
RULE = (
    "times relative to what was measured, equal where less than 50 ms apart; failed, and degraded"
    " or refused, requests relative to the larger of the two counts, equal where at most 3 apart,"
    " and at least as a share of those offered"
)
"""How ``differences`` compares, in words."""


DrillKind = Literal[
    "gpu-loss", "engine-kill", "engine-hang", "network", "oom", "bad-answers", "ecc"
]  # fmt: skip
DRILL_KINDS: tuple[DrillKind, ...] = get_args(DrillKind)


class Broken(msgspec.Struct, frozen=True):
    """What was broken, and when. Times are the log's own."""

    kind: DrillKind
    replicas: tuple[int, ...]
    """Those that it is to take out; more than one where they share a card."""
    at_ns: int
    until_ns: int
    """Requests that arrive later are not counted."""
    back_ns: int = -1
    """When it was taken back; -1: not before the end."""
    tokens_from: int = 0
    """``oom``: prompts that long, and longer, end the engine."""
    link: str = "blackhole"
    """``network``: how the link is meanwhile: blackhole, delay, loss or reset."""
    delay_ms: float = 0.0
    """Of a link with ``delay``, one way."""


class Raised(msgspec.Struct, frozen=True):
    """An alert, and how long after the fault."""

    after_s: float
    key: str
    cause: str
    action: str = ""


class DrillFigures(msgspec.Struct, frozen=True):
    """What came of it. Requests are those that were open at the fault, and those that arrived
    until the drill was over."""

    offered: int
    answered: int
    """In full, from a replica; (next) late ones among them, by their own deadline."""
    late: int
    degraded: int
    """Given something less than was asked for."""
    refused: int
    """Shed: the policy said no, with a reason."""
    failed: int
    avoidable: int
    """Of these, those that were not being answered, token by token, by what was hit: they could
    have been sent elsewhere."""
    cancelled: int
    lost: int
    """Without an outcome at the end of the log, or with more than one."""
    isolated_s: float | None
    """From the fault until all that was hit was out of rotation; None: never, or it was not in the
    rotation when it was hit."""
    recovered_s: float | None
    """From the fault until as many replicas serve as before, for good, and goodput is back; None:
    not by the end of the log."""
    serving_before: int
    serving_least: int
    others_out: tuple[str, ...]
    """Replicas that left the rotation though they were not hit, and why."""
    alerts: tuple[Raised, ...]
    hit: tuple[str, ...] = ()
    """Names of what was hit, as alerts have them; empty: the log does not tell."""


class Difference(msgspec.Struct, frozen=True):
    """A figure as it was measured and as the twin has it."""

    figure: str
    measured: float | None
    predicted: float | None
    error_pct: float


class _Known(msgspec.Struct):
    """A request."""

    arrived_ns: int
    due_ns: int
    """Its first token is late after that."""
    replica: int = -1
    """That it was last sent to."""
    first_ns: int = -1
    """Of that try."""
    settled_ns: int = -1
    outcome: str = ""
    why: str = ""
    streamed_by: int = -1
    """Who was answering it when it was settled; -1: nobody had begun."""
    settlements: int = 0

    @property
    def fine(self) -> bool:
        """Answered in full and in time."""
        first_ns = self.first_ns if self.first_ns >= 0 else self.settled_ns
        return self.outcome == "answered" and first_ns <= self.due_ns


class DrillReader:
    """Folds a decision log, record by record.

    Args:
        parameters: whose deadlines say what is late.
        broken: what was done.
    """

    def __init__(self, parameters: Parameters, broken: Broken) -> None:
        self._tags = Tags(parameters.classes, parameters.tiers)
        self._broken = broken
        self._requests: dict[int, _Known] = {}
        self._names: dict[int, str] = {}
        self._serving: set[int] = set()
        self._before = -1
        self._least = 0
        self._isolated_ns = -1
        self._was_in = False
        """All that was hit was in the rotation at the fault: else nothing shows that it left."""
        self._short = False
        """Fewer serve than before."""
        self._back_ns = -1
        self._others: dict[str, None] = {}
        self._alerts: list[Raised] = []

    def step(self, now_ns: int, event: Event, decisions: Sequence[Decision]) -> None:
        """One record of the log."""
        if self._before < 0 and now_ns >= self._broken.at_ns:
            self._begin()
        self._take(now_ns, event)
        for decision in decisions:
            if isinstance(decision, Settled):
                self._settle(now_ns, decision)
            elif isinstance(decision, Dispatch):
                self._send(decision)
            elif isinstance(decision, Rotated):
                self._rotate(decision)
            elif isinstance(decision, Alert):
                self._raise(now_ns, decision)
        if self._before >= 0:
            self._look(now_ns)

    def _begin(self) -> None:
        """The fault happens: how things stood."""
        self._before = self._least = len(self._serving)
        self._was_in = self._serving.issuperset(self._broken.replicas)

    # Requests

    def _take(self, now_ns: int, event: Event) -> None:
        if isinstance(event, Arrived):
            due_ns = now_ns + self._tags.deadline_ns(event, self._tags.sla(event))
            self._requests[event.request] = _Known(now_ns, due_ns)
        elif isinstance(event, FirstToken):
            known = self._requests.get(event.request)
            if known is not None and known.replica == event.replica and known.first_ns < 0:
                known.first_ns = now_ns
        elif isinstance(event, ReplicaUp):
            self._names[event.replica] = event.name
            self._serving.add(event.replica)
        elif isinstance(event, Restored):  # whatever was up counts again when it comes up
            self._serving.clear()
        elif isinstance(event, ReplicaDown):
            self._leave(event.replica, "" if event.reason in NO_DEATH else f"down: {event.reason}")

    def _send(self, sent: Dispatch) -> None:
        known = self._requests.get(sent.request)
        if known is not None:
            known.replica = sent.replica
            known.first_ns = -1

    def _settle(self, now_ns: int, settled: Settled) -> None:
        known = self._requests.get(settled.request)
        if known is None:  # it arrived before the log began
            return
        known.settlements += 1
        known.settled_ns = now_ns
        known.outcome = settled.outcome
        known.why = settled.why
        known.streamed_by = known.replica if known.first_ns >= 0 else -1

    # The rotation

    def _rotate(self, moved: Rotated) -> None:
        if moved.state == "in":
            self._serving.add(moved.replica)
        elif moved.state in OUT:
            why = "" if moved.state == "draining" else f"{moved.state}: {moved.why}"
            self._leave(moved.replica, why)
        # One that is tried by single requests stays what it was: in where it had only said that it
        # is full, else out.

    def _leave(self, replica: int, why: str) -> None:
        if replica not in self._serving:
            return
        self._serving.discard(replica)
        if self._before >= 0 and why and replica not in self._broken.replicas:
            self._others[f"{self._names.get(replica, str(replica))} ({why})"] = None

    def _look(self, now_ns: int) -> None:
        serving = len(self._serving)
        self._least = min(self._least, serving)
        out = self._was_in and self._serving.isdisjoint(self._broken.replicas)
        if self._isolated_ns < 0 and out:
            self._isolated_ns = now_ns
        short = serving < self._before
        if self._short and not short:
            self._back_ns = now_ns
        self._short = short

    def _raise(self, now_ns: int, alert: Alert) -> None:
        if now_ns >= self._broken.at_ns and len(self._alerts) < ALERTS_MOST:
            after_s = (now_ns - self._broken.at_ns) / NS
            self._alerts.append(Raised(after_s, alert.key, alert.cause, alert.action))

    # What it comes to

    def end(self) -> DrillFigures:
        """The log is over."""
        at_ns = self._broken.at_ns
        if self._before < 0:
            self._begin()
        mine = [
            known
            for known in self._requests.values()
            if known.arrived_ns < self._broken.until_ns
            and (known.settled_ns < 0 or known.settled_ns >= at_ns)
            and known.why not in CALLERS_FAULT
        ]
        counted = {
            outcome: sum(known.outcome == outcome for known in mine)
            for outcome in ("answered", "degraded", "shed", "failed", "cancelled")
        }
        hit = self._broken.replicas
        return DrillFigures(
            offered=len(mine),
            answered=counted["answered"],
            late=sum(known.outcome == "answered" and not known.fine for known in mine),
            degraded=counted["degraded"],
            refused=counted["shed"],
            failed=counted["failed"],
            avoidable=sum(
                known.outcome == "failed" and known.streamed_by not in hit for known in mine
            ),
            cancelled=counted["cancelled"],
            lost=sum(known.settlements != 1 for known in mine),
            isolated_s=None if self._isolated_ns < 0 else (self._isolated_ns - at_ns) / NS,
            recovered_s=self._recovered_s(mine),
            serving_before=self._before,
            serving_least=self._least,
            others_out=tuple(self._others),
            alerts=tuple(self._alerts),
            hit=tuple(self._names[each] for each in hit if each in self._names),
        )

    def _recovered_s(self, mine: Sequence[_Known]) -> float | None:
        if self._short:
            return None
        at_ns = self._broken.at_ns
        back_ns = max(at_ns, self._back_ns, self._good_again_ns(mine))
        return (back_ns - at_ns) / NS

    def _good_again_ns(self, mine: Sequence[_Known]) -> int:
        """When the last request was settled that was not fine, among neighbours of which too many
        were not. Single ones happen at any time."""
        earlier = [
            known for known in self._requests.values()
            if 0 <= known.settled_ns < self._broken.at_ns
        ]  # fmt: skip
        fine = sum(known.fine for known in earlier)
        before_permille = 1000 * fine // len(earlier) if earlier else 1000
        least_permille = before_permille * GOOD_PERMILLE // 1000
        rows = sorted((known.arrived_ns, known.fine) for known in mine)
        times = [arrived_ns for arrived_ns, _ in rows]
        good = [0]
        for _, is_fine in rows:
            good.append(good[-1] + is_fine)
        last_ns = 0
        for known in mine:
            if known.fine or known.outcome == "cancelled":
                continue
            low = bisect_left(times, known.arrived_ns - STRETCH_NS)
            high = bisect_right(times, known.arrived_ns + STRETCH_NS)
            if (good[high] - good[low]) * 1000 < least_permille * (high - low):
                last_ns = max(last_ns, known.settled_ns)
        return last_ns


def differences(measured: DrillFigures, predicted: DrillFigures) -> tuple[Difference, ...]:
    """How far the twin was off.

    Times: relative to what was measured; such as differ by less than ``SAME_S`` are equal.
    Requests: relative to the larger of the two counts; such as differ by at most
    ``SAME_REQUESTS`` are equal in that. Where their difference as a share of the requests offered
    is larger, that counts: of few requests a few are much. ``RULE`` says the same.
    """
    offered = max(1, measured.offered)
    return (
        _times("isolated_s", measured.isolated_s, predicted.isolated_s),
        _times("recovered_s", measured.recovered_s, predicted.recovered_s),
        _counts("failed", measured.failed, predicted.failed, offered),
        _counts(
            "degraded",
            measured.degraded + measured.refused,
            predicted.degraded + predicted.refused,
            offered,
        ),
    )


def _times(figure: str, measured: float | None, predicted: float | None) -> Difference:
    if measured is None or predicted is None:
        return Difference(figure, measured, predicted, 0.0 if measured == predicted else 100.0)
    apart_s = abs(measured - predicted)
    error_pct = 0.0 if apart_s < SAME_S else 100.0 * apart_s / max(measured, SAME_S)
    return Difference(figure, measured, predicted, error_pct)


def _counts(figure: str, measured: int, predicted: int, offered: int) -> Difference:
    apart = abs(measured - predicted)
    error_pct = 100.0 * apart / offered
    if apart > SAME_REQUESTS:
        error_pct = max(error_pct, 100.0 * apart / max(measured, predicted))
    return Difference(figure, float(measured), float(predicted), error_pct)
