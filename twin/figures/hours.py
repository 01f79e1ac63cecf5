"""What the fleet costs: hours that replicas and their GPUs were held."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from policy.decisions import Start
from policy.events import ReplicaDown, ReplicaUp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from policy.decisions import Decision
    from policy.events import Event

NS_PER_HOUR = 3600 * 10**9


class Hours:
    """A replica is held from its start (not only from when it is up) until it is down.

    ``gpus``: GPUs that a replica holds, by id; a slice of a card is a part of one.
    """

    def __init__(self, gpus: Mapping[int, float]) -> None:
        self._gpus = gpus
        self._since_ns: dict[int, int] = {}
        self._held: list[tuple[int, int, int]] = []
        """(replica, from, until), of what is over."""
        self._up: set[int] = set()
        self._most_up = 0

    def event(self, now_ns: int, event: Event) -> None:
        if isinstance(event, ReplicaUp):
            self._since_ns.setdefault(event.replica, now_ns)
            self._up.add(event.replica)
            self._most_up = max(self._most_up, len(self._up))
        elif isinstance(event, ReplicaDown):
            self._up.discard(event.replica)
            self._end(event.replica, now_ns)

    def decision(self, now_ns: int, decision: Decision) -> None:
        if isinstance(decision, Start):
            self._since_ns.setdefault(decision.replica, now_ns)

    def figures(self, end_ns: int) -> dict[str, Any]:
        """As of ``end_ns``."""
        held = [*self._held, *((number, since, end_ns) for number, since in self._since_ns.items())]
        replica_ns, gpu_ns = 0, 0.0
        for replica, since_ns, until_ns in held:
            length_ns = max(0, min(until_ns, end_ns) - since_ns)
            replica_ns += length_ns
            gpu_ns += length_ns * self._gpus.get(replica, 1.0)
        return {
            "replica_hours": replica_ns / NS_PER_HOUR,
            "gpu_hours": gpu_ns / NS_PER_HOUR,
            "replicas_most": self._most_up,
        }

    def _end(self, replica: int, now_ns: int) -> None:
        since_ns = self._since_ns.pop(replica, None)
        if since_ns is not None:
            self._held.append((replica, since_ns, now_ns))
