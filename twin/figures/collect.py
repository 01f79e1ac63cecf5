"""Everything that is gathered of one run, put together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twin.figures.columns import Row
from twin.figures.contexts import Contexts
from twin.figures.hours import Hours
from twin.figures.incidents import Incidents
from twin.figures.requests import Requests
from twin.figures.watch import Watch
from twin.fleet import MIG_SEVENTHS, MIG_SLICES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from policy.runner import Log
    from twin.arrivals import Asked, Chunk
    from twin.figures.measure import Measure
    from twin.fleet import ReplicaSpec
    from twin.world import Result, World


class Collected:
    """The collectors of a run.

    Args:
        specs: every replica there is or may be, in order of id.
        faults: when each named fault strikes, in ns.
    """

    def __init__(
        self,
        measure: Measure,
        specs: Sequence[ReplicaSpec],
        faults: Mapping[str, int],
    ) -> None:
        self._requests = Requests(measure, [spec.domain or spec.name for spec in specs])
        self._incidents = Incidents(faults)
        self._hours = Hours({spec.id: _gpus(spec) for spec in specs})
        self._contexts = Contexts()

    def watch(self, log: Log) -> Watch:
        """The decision log with the collectors behind it."""
        return Watch(log, self._incidents, self._hours, self._contexts)

    def chunk(self, chunk: Chunk) -> None:
        """Open-loop requests, all settled."""
        self._requests.add_chunk(chunk)

    def asked(self, asked: Asked, result: Result) -> None:
        """A client's request, settled."""
        self._requests.add(Row(asked.sla[0], asked.line[0], asked.deadline_ns[0], result))

    def figures(self, world: World, duration_ns: int) -> dict[str, Any]:
        """All of it as nested plain values. The run ends with its last settlement, and not before
        ``duration_ns``; what the policy does after that to an idle fleet costs nothing."""
        engines = [replica.engine for replica in world.replicas]
        queried = sum(engine.prefix_tokens_queried for engine in engines)
        hit = sum(engine.prefix_tokens_hit for engine in engines)
        requests = self._requests.figures()
        end_ns = max(duration_ns, round(self._requests.last_s * 1e9))
        return {
            **requests,
            **self._incidents.figures(),
            "contexts": self._contexts.figures(),
            "fleet": self._hours.figures(end_ns),
            "engines": {
                "preemptions": sum(engine.preemptions for engine in engines),
                "prefix_hit_share": hit / queried if queried else None,
            },
            "refused_events": world.refused,
        }


def _gpus(spec: ReplicaSpec) -> float:
    part = MIG_SLICES[spec.mig].compute / MIG_SEVENTHS if spec.mig else 1.0
    return spec.profile.tensor_parallel * part
