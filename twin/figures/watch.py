"""Looks over the decision log's shoulder: every step, and what of it is rare enough to note."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policy.decisions import Abort, Dispatch, Settled
from policy.events import Arrived, GpuFault, ReplicaDown, ReplicaUp

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.events import Event
    from policy.runner import Log
    from twin.figures.contexts import Contexts
    from twin.figures.hours import Hours
    from twin.figures.incidents import Incidents

_RARE_EVENTS = frozenset({ReplicaUp, ReplicaDown, GpuFault})


class Watch:
    """A log that passes everything on and lets the collectors see it."""

    __slots__ = ("_append", "_contexts", "_hours", "_incidents")

    def __init__(self, log: Log, incidents: Incidents, hours: Hours, contexts: Contexts) -> None:
        self._append = log.append
        self._incidents = incidents
        self._hours = hours
        self._contexts = contexts

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        self._append(now_ns, event, decisions)
        kind = type(event)
        contexts = self._contexts
        if kind is Arrived and event.session:  # type: ignore[union-attr]
            contexts.arrived(event.request, event.session)  # type: ignore[union-attr]
        elif kind in _RARE_EVENTS:
            self._incidents.event(now_ns, event)
            self._hours.event(now_ns, event)
        for decision in decisions:
            made = type(decision)
            if made is Dispatch:
                contexts.dispatched(decision.request)  # type: ignore[union-attr]
                if self._incidents.fresh and decision.replica in self._incidents.fresh:  # type: ignore[union-attr]
                    self._incidents.dispatched(now_ns, decision.replica)  # type: ignore[union-attr]
            elif made is Settled:
                contexts.settled(decision.request)  # type: ignore[union-attr]
            elif made is not Abort:
                self._incidents.decision(now_ns, decision)
                self._hours.decision(now_ns, decision)
