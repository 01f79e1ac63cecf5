"""Observe mode: a second policy that is told what the first is told, and decides for nobody.

The live policy passes everything on; this one says what it would have done. What it sent to another
replica than the live one did, or still holds back, happened all the same: events about a request
are told as if its replica were the one that the shadow chose, and what came while it was queued
here is told right after it is sent. So times are those of the real servers under the real load, and
how long a request would have waited is all that is new.

Of a failure on a replica that the shadow did not choose nothing can be said, so it is told as a
cancellation, which is neutral everywhere. The same goes for a retry: its answer never comes.

Beside a policy that rules already, the shadow begins in mid-flight: with that policy's state, as
after a switch. It knows what is open and where, and what only the ruling policy's errands would
bring is answered neutrally.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from controller.listener import Listener
from controller.store.log import LiveLog
from policy.compose import build_policy, restore
from policy.decisions import (
    Abort,
    BreakerMoved,
    Dispatch,
    LookUp,
    ReadProgress,
    Refused,
    Rotated,
    SaveCheckpoint,
    Settled,
    Verify,
    Warm,
)
from policy.events import (
    Arrived,
    CanaryEnded,
    CanaryStarted,
    Cancelled,
    CheckpointFailed,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    LookedUp,
    PolicySwitched,
    Progress,
    ReplicaUp,
    Ticked,
    Verified,
    Warmed,
)
from policy.facts import LOOKING, SAVING, VERIFYING
from policy.outcomes import CALLERS_FAULT
from policy.parameters import canonical
from policy.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from controller.call import Call
    from policy.decisions import Decision
    from policy.events import Event
    from policy.facts import Open
    from policy.parameters import Parameters
    from policy.service import Service

TIMES_MOST = 10_000
"""Queue times kept for the quantiles: the last ones."""
KINDS_MOST = 60
"""Different outcomes and reasons counted; what a reason names, such as a breaker's key, is not."""
_OUTCOMES = ("answered", "degraded", "shed", "failed", "cancelled", "unknown")
_TOLD_WHY = frozenset({"degraded", "shed", "failed"})
_LIVE_ONLY = (
    Ticked, Verified, CheckpointSaved, CheckpointFailed, LookedUp, Progress, Warmed, PolicySwitched,
    CanaryStarted, CanaryEnded,
)  # fmt: skip
"""Answers to what the live policy asked for, and what concerns it alone."""


class _Seen:
    """A request that the shadow has not settled."""

    __slots__ = (
        "arrived_ns", "compared", "dispatches", "first", "given_up", "kept", "over", "really",
        "replica",
    )  # fmt: skip

    def __init__(self, arrived_ns: int) -> None:
        self.arrived_ns = arrived_ns
        self.replica = -1
        """Where the shadow sent it; -1: it holds it back."""
        self.dispatches = 0
        self.first = -1
        """Where the shadow sent it first."""
        self.really = -1
        """Where the live policy sent it, as far as is known."""
        self.compared = False
        self.given_up = False
        self.kept: list[FirstToken | Finished | Failed] = []
        """What happened to it before the shadow sent it."""
        self.over = False
        """Really: nothing more will be heard of it."""


class Shadow(Listener):
    """What ``parameters`` would have decided. Nothing of it ever raises into the live path.

    Args:
        folder: of its own decision log.
        clock_ns: the live log's clock.
        schedule: ``schedule(at_ns, call)`` calls back at that time of the clock, once; calls that
            were scheduled before may still come.
        on_trouble: told in plain words when its log has a gap, or it is switched off.
        beside: the policy that rules, between two events; None: nothing is known yet.
    """

    def __init__(
        self,
        parameters: Parameters,
        folder: Path,
        clock_ns: Callable[[], int],
        schedule: Callable[[int, Callable[[], None]], object],
        on_trouble: Callable[[str], object],
        beside: Service | None = None,
        **log: Any,
    ) -> None:
        if beside is None:
            self.policy = build_policy(parameters)
        else:
            self.policy = restore(beside.parameters, beside.snapshot())
        self.off = ""
        """Why it is switched off; empty: it is not."""
        self.refused = 0
        """Events that its policy found illegal: always 0 unless there is a fault here."""
        self._clock_ns = clock_ns
        self._schedule = schedule
        self._on_trouble = on_trouble
        self._now_ns = clock_ns()
        begun_as = parameters if beside is None else beside.parameters
        self._log = LiveLog(
            folder, self.policy, begun_as, self._now_ns, on_trouble=on_trouble, **log
        )
        self._runner = Runner(self.policy, lambda: self._now_ns, self._apply, self._arm, self._log)
        self._open: dict[int, _Seen] = {}
        self._versions: dict[int, str] = {}
        self._progress = 0
        self._outcomes: Counter[tuple[str, str]] = Counter()
        """By outcome and reason; "unknown" is an outcome of its own here."""
        self._tiers: Counter[str] = Counter()
        self._waits_ns: deque[int] = deque(maxlen=TIMES_MOST)
        self._moves: Counter[str] = Counter()
        self._arrived = 0
        self._compared = 0
        self._agreed = 0
        if beside is not None:
            switched = PolicySwitched(canonical(beside.parameters), canonical(parameters))
            self._safely(lambda: self._take_over(beside, switched))

    # What the driver calls

    def fed(self, now_ns: int, event: Event) -> None:
        """The live policy was given ``event``."""
        self._safely(lambda: self._told(event), now_ns)

    def settled(self, call: Call, settled: Settled) -> None:
        """Really settled, if need be without any event, as what nothing could serve."""
        self._safely(lambda: self._ended(settled.request))

    def tick(self) -> None:
        """A timer fired."""
        self._safely(self._runner.tick)

    def flush(self) -> None:
        """Write its log; to be called as often as for the live one."""
        self._safely(self._log.flush)

    def close(self) -> None:
        self.end()()

    def end(self) -> Callable[[], None]:
        """It decides no more. What is returned writes the rest of its log, which may have to wait
        for the disk."""
        if self.off:
            return lambda: None
        self.off = "it was ended"
        return self._log.close

    def report(self) -> dict[str, int]:
        """What it would have done so far, by what and how often."""
        totals: Counter[str] = Counter()
        for (outcome, _), count in self._outcomes.items():
            totals[outcome] += count
        waits_ns = sorted(self._waits_ns)
        return {
            "arrived": self._arrived,
            "open": len(self._open),
            **{outcome: totals[outcome] for outcome in _OUTCOMES},
            **{f"tier {tier}": count for tier, count in sorted(self._tiers.items())},
            "queue_ms_p50": _quantile_ns(waits_ns, 50) // 1_000_000,
            "queue_ms_p95": _quantile_ns(waits_ns, 95) // 1_000_000,
            "compared": self._compared,
            "same_replica": self._agreed,
            "refused_events": self.refused,
            "off": int(bool(self.off)),
            **{
                f"{outcome} {why}": count
                for (outcome, why), count in sorted(self._outcomes.items())
                if why and outcome in _TOLD_WHY
            },
            **dict(sorted(self._moves.items())),
        }

    # Facts, as the shadow has to hear them

    def _safely(self, work: Callable[[], object], now_ns: int | None = None) -> None:
        """The live path must not notice what goes wrong here."""
        if self.off:
            return
        try:
            # Its own ticks come between the live policy's events, which may have waited their turn.
            self._now_ns = max(self._now_ns, self._clock_ns() if now_ns is None else now_ns)
            work()
        except Exception as error:
            self._switch_off(error)

    def _told(self, event: Event) -> None:
        if isinstance(event, _LIVE_ONLY):
            return
        if isinstance(event, Arrived):
            self._arrived += 1
            self._open[event.request] = _Seen(self._now_ns)
        elif isinstance(event, (FirstToken, Finished, Failed)):
            self._happened(event)
            return
        elif isinstance(event, Cancelled):
            if event.request not in self._open:
                return
            self._open[event.request].over = True
        elif isinstance(event, ReplicaUp):
            self._versions[event.replica] = event.version
        self._runner.feed(event)

    def _take_over(self, beside: Service, switched: PolicySwitched) -> None:
        """Go on from the state of the policy that rules."""
        facts = beside.facts
        for request, opened in facts.open.items():
            seen = self._open[request] = _Seen(opened.arrived_ns)
            seen.replica = seen.really = opened.replica
            seen.compared = opened.replica >= 0  # where it is was not chosen here
        self._versions = {number: each.spec.version for number, each in facts.replicas.items()}
        awaited = [_answer(opened) for opened in facts.open.values()]
        ready = [number for number, each in facts.replicas.items() if each.ready]
        self._runner.feed(switched)
        for answer in awaited:
            if answer is not None:
                self._runner.feed(answer)
        for replica in ready:
            self._runner.feed(Warmed(replica, self._versions[replica]))

    def _happened(self, event: FirstToken | Finished | Failed) -> None:
        seen = self._open.get(event.request)
        if seen is None or seen.over:
            return  # settled here, or told already
        seen.really = event.replica
        if seen.first >= 0:
            self._compare(seen)
        if not isinstance(event, FirstToken):
            seen.over = True
        if seen.replica >= 0:
            self._tell(seen, event)
        else:
            seen.kept.append(event)

    def _ended(self, request: int) -> None:
        seen = self._open.get(request)
        if seen is not None and not seen.over:
            seen.over = True
            if seen.replica >= 0:
                self._give_up(request, seen)

    def _tell(self, seen: _Seen, event: FirstToken | Finished | Failed) -> None:
        """The shadow has it in flight: let it happen there."""
        request, replica = event.request, seen.replica
        if not isinstance(event, Failed):
            self._runner.feed(msgspec.structs.replace(event, replica=replica))
        elif event.replica == replica or event.kind in CALLERS_FAULT:
            self._runner.feed(Failed(request, replica, event.kind))
        else:
            self._give_up(request, seen)

    def _compare(self, seen: _Seen) -> None:
        if not seen.compared and seen.really >= 0:
            seen.compared = True
            self._compared += 1
            self._agreed += seen.really == seen.first

    def _give_up(self, request: int, seen: _Seen) -> None:
        """What would have become of it is unknown."""
        seen.given_up = True
        self._runner.feed(Cancelled(request))

    # Decisions, which nobody carries out

    def _apply(self, decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            self._dispatched(decision)
        elif isinstance(decision, Settled):
            self._settled(decision)
        elif isinstance(decision, Abort):
            if decision.request in self._open:  # perhaps it waits here again
                self._open[decision.request].replica = -1
        elif isinstance(decision, Verify):
            self._runner.feed(Verified(decision.request, decision.replica, "match"))
        elif isinstance(decision, SaveCheckpoint):
            self._runner.feed(CheckpointSaved(decision.request, f"shadow-{decision.request}"))
        elif isinstance(decision, LookUp):
            self._runner.feed(LookedUp(decision.request, found=False))
        elif isinstance(decision, ReadProgress):
            self._progress += 1  # it moves: whether it really does is the live policy's to judge
            self._runner.feed(Progress(decision.replica, self._progress))
        elif isinstance(decision, Warm):
            version = self._versions.get(decision.replica, "")
            self._runner.feed(Warmed(decision.replica, version))
        elif isinstance(decision, Refused):
            self.refused += 1
        elif isinstance(decision, BreakerMoved):
            self._moves[f"breaker {decision.state}"] += 1
        elif isinstance(decision, Rotated):
            self._moves[f"replica {decision.state}"] += 1

    def _dispatched(self, decision: Dispatch) -> None:
        seen = self._open[decision.request]
        seen.replica = decision.replica
        seen.dispatches += 1
        if seen.dispatches == 1:
            seen.first = decision.replica
            self._compare(seen)
            self._tiers[decision.tier] += 1
            self._waits_ns.append(self._now_ns - seen.arrived_ns)
        kept, seen.kept = seen.kept, []
        for event in kept:
            self._tell(seen, event)
        if seen.over and (not kept or isinstance(kept[-1], FirstToken)):
            self._give_up(decision.request, seen)

    def _settled(self, settled: Settled) -> None:
        seen = self._open.pop(settled.request, None)
        key: tuple[str, str] = (settled.outcome, settled.why.partition(" ")[0])
        if seen is not None and seen.given_up:
            key = ("unknown", "")
        if key not in self._outcomes and len(self._outcomes) >= KINDS_MOST:
            key = (settled.outcome, "other")
        self._outcomes[key] += 1

    def _arm(self, at_ns: int) -> None:
        self._schedule(at_ns, self.tick)

    def _switch_off(self, error: Exception) -> None:
        self.off = f"{type(error).__name__}: {error}"
        self._open.clear()
        with suppress(Exception):  # nothing is left that could be done
            self._on_trouble(f"the shadow policy is switched off, serving goes on: {self.off}")
            self._log.close()


def _answer(opened: Open) -> Verified | LookedUp | CheckpointSaved | None:
    """What the ruling policy waits for beside the servers, and its errands will tell it alone."""
    request = opened.event.request
    if opened.stage == VERIFYING:
        return Verified(request, opened.replica, "match")
    if opened.stage == LOOKING:
        return LookedUp(request, found=False)
    return CheckpointSaved(request, f"shadow-{request}") if opened.stage == SAVING else None


def _quantile_ns(ordered_ns: list[int], percent: int) -> int:
    """By nearest rank; 0 of nothing."""
    return ordered_ns[(len(ordered_ns) * percent + 99) // 100 - 1] if ordered_ns else 0
