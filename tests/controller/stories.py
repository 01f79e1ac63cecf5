"""What a decision log tells about requests and replicas."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policy.decisions import Alert, BreakerMoved, Dispatch, Refused, Rotated, Settled
from policy.events import Arrived, Failed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policy.log import Record


@dataclass
class Request:
    """What became of a request."""

    arrived: Arrived
    arrived_ns: int
    dispatched_ns: int = -1
    """When it was sent to a server for the first time; -1: never."""
    tries: list[int] = field(default_factory=list)
    """Replicas that it was sent to, in order."""
    failures: list[Failed] = field(default_factory=list)
    settled: list[Settled] = field(default_factory=list)


@dataclass
class Story:
    """All requests of a log, and what was decided about replicas and breakers."""

    requests: dict[int, Request] = field(default_factory=dict)
    rotated: list[Rotated] = field(default_factory=list)
    breakers: list[BreakerMoved] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    def waits_s(self, sla: str) -> list[float]:
        """How long the requests of a class waited that were sent to a server."""
        return [
            (request.dispatched_ns - request.arrived_ns) / 1e9
            for request in self.requests.values()
            if request.arrived.sla == sla and request.dispatched_ns >= 0
        ]

    def kinds(self, replica: int) -> set[str]:
        """What went wrong there, as the policy was told or found out itself."""
        told = {
            failed.kind
            for request in self.requests.values()
            for failed in request.failures
            if failed.replica == replica
        }
        found = {moved.why for moved in self.rotated if moved.replica == replica}
        return {*told, *(found & {"silent"})}


def read_story(records: Iterable[Record]) -> Story:
    """Tell the log's story. Nothing may happen to a request that did not arrive."""
    story = Story()
    requests = story.requests
    for record in records:
        event = record.event
        if isinstance(event, Arrived):
            requests[event.request] = Request(event, record.now_ns)
        elif isinstance(event, Failed) and event.request in requests:
            requests[event.request].failures.append(event)
        for decision in record.decisions:
            if isinstance(decision, Dispatch):
                request = requests[decision.request]
                request.tries.append(decision.replica)
                if request.dispatched_ns < 0:
                    request.dispatched_ns = record.now_ns
            elif isinstance(decision, Settled):
                requests[decision.request].settled.append(decision)
            elif isinstance(decision, Rotated):
                story.rotated.append(decision)
            elif isinstance(decision, BreakerMoved):
                story.breakers.append(decision)
            elif isinstance(decision, Alert):
                story.alerts.append(decision)
            elif isinstance(decision, Refused):
                story.refused.append(decision)
    return story
