"""What the policy did when something went wrong: breakers, rotation, starts, alerts, and when."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from policy.decisions import Alert, BreakerMoved, Rotated, Start
from policy.events import GpuFault, ReplicaDown, ReplicaUp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from policy.decisions import Decision
    from policy.events import Event

NS = 1e9
MARKS = (
    "gpu_fault", "alert", "out", "isolated", "down", "start", "up", "served", "in", "breaker_open",
    "breaker_closed",
)  # fmt: skip
"""What is looked for after each fault: ``out`` is any rotation away from full service, ``in`` one
back to it; ``start`` is the decision to start a standby, ``up`` a replica that has come up, and
``served`` the first request that one is sent."""


class Incidents:
    """Counts, and the first of each mark after each fault.

    ``faults``: when each named fault strikes, in ns.
    """

    def __init__(self, faults: Mapping[str, int]) -> None:
        self._faults = dict(faults)
        self._first: dict[str, dict[str, int]] = {name: {} for name in faults}
        self._decisions: Counter[str] = Counter()
        self._rotations: Counter[str] = Counter()
        self._alerts: Counter[str] = Counter()
        self._downs: Counter[str] = Counter()
        self._opened: Counter[str] = Counter()
        """Breakers that opened, by key, again after a probe included."""
        self._incidents: Counter[str] = Counter()
        """The same, from closed only."""
        self.fresh: set[int] = set()
        """Replicas that came up during the run and were sent nothing yet."""

    def event(self, now_ns: int, event: Event) -> None:
        if isinstance(event, ReplicaUp):
            if now_ns:  # at 0 the fleet comes up
                self.fresh.add(event.replica)
                self._mark("up", now_ns)
        elif isinstance(event, ReplicaDown):
            self._downs[event.reason] += 1
            self._mark("down", now_ns)
        elif isinstance(event, GpuFault):
            self._mark("gpu_fault", now_ns)

    def dispatched(self, now_ns: int, replica: int) -> None:
        """A fresh replica is sent its first request."""
        self.fresh.discard(replica)
        self._mark("served", now_ns)

    def decision(self, now_ns: int, decision: Decision) -> None:
        self._decisions[_name(decision)] += 1
        if isinstance(decision, BreakerMoved):
            self._breaker(now_ns, decision)
        elif isinstance(decision, Rotated):
            self._rotations[decision.state] += 1
            self._mark("in" if decision.state == "in" else "out", now_ns)
            if decision.state == "isolated":
                self._mark("isolated", now_ns)
        elif isinstance(decision, Alert):
            self._alerts[decision.cause] += 1
            self._mark("alert", now_ns)
        elif isinstance(decision, Start):
            self._mark("start", now_ns)

    def figures(self) -> dict[str, Any]:
        opened, incidents = sum(self._opened.values()), sum(self._incidents.values())
        return {
            "decisions": {
                name: self._decisions[name] for name in sorted({*self._decisions, *_ALWAYS})
            },
            "alerts": dict(sorted(self._alerts.items())),
            "rotations": dict(sorted(self._rotations.items())),
            "downs": dict(sorted(self._downs.items())),
            "breakers": {
                "incidents": incidents,
                "opened": opened,
                "opened_per_incident": opened / incidents if incidents else None,
                "by_key": {
                    key: {"incidents": self._incidents[key], "opened": count}
                    for key, count in sorted(self._opened.items())
                },
            },
            "faults": {name: self._fault(name) for name in self._faults},
        }

    def _fault(self, name: str) -> dict[str, float | None]:
        at_ns = self._faults[name]
        first = self._first[name]
        after = {
            f"{mark}_s": (first[mark] - at_ns) / NS if mark in first else None for mark in MARKS
        }
        return {"at_s": at_ns / NS, **after}

    def _breaker(self, now_ns: int, moved: BreakerMoved) -> None:
        if moved.state == "open":
            self._opened[moved.key] += 1
            if moved.why != "probe":  # a probe that failed goes on with the same incident
                self._incidents[moved.key] += 1
            self._mark("breaker_open", now_ns)
        elif moved.state == "closed":
            self._mark("breaker_closed", now_ns)

    def _mark(self, mark: str, now_ns: int) -> None:
        for name, at_ns in self._faults.items():
            if now_ns >= at_ns:
                self._first[name].setdefault(mark, now_ns)


_ALWAYS = ("alert", "breaker", "refused", "start", "stop", "verify")


def _name(decision: Decision) -> str:
    return str(decision.__struct_config__.tag)
