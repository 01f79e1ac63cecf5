"""What a drill would do, by the twin: the same fleet, policy, traffic and fault at the same time.

Everything comes from before the fault, as the live decision log has it: which replicas were up and
how large they are, which standbys there were and how soon each would be there. Only the traffic is
what was recorded during the drill. The figures are read off the twin's log by the code that read
the live one (``policy.drills``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from policy.compose import build_policy
from policy.drills import Broken, DrillReader
from policy.events import Arrived, ReplicaDown, ReplicaUp, Restored, Standby
from traces import open_trace
from twin.arrivals import arrivals
from twin.faults import (
    BadAnswers,
    EccUncorrectable,
    EngineHung,
    EngineKilled,
    Network,
    OomLongPrompt,
    Xid,
)
from twin.fleet import fleet_of
from twin.source import Source, write_sources
from twin.world import World, WorldSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from policy.decisions import Decision
    from policy.drills import DrillFigures
    from policy.events import Event
    from policy.log import Record
    from policy.parameters import Parameters
    from twin.faults import Fault
    from twin.fleet import ReplicaSpec

NS = 1_000_000_000
BEFORE_S = 60.0
"""Of the traffic before the fault that is played, so that the policy knows its callers."""
LOST_CARD_XID = 79
ANSWER_TOKENS = 256
"""Of an answer that nobody knows the length of."""


class PredictionError(ValueError):
    """The twin cannot play this drill: why."""


@dataclass(frozen=True, slots=True)
class DrillSettings:
    """What the live side is known for beforehand, beside its policy."""

    card_event_s: float = 0.02
    """From a card's error to the event that tells of it."""
    dies_after_s: float = 1.0
    """From a card's error to the end of the process on it."""
    scrape_s: float = 5.0
    """How often metrics are read."""
    restart_s: float = 1.0
    """From the end of an engine that hung to its next process."""


@dataclass(slots=True)
class _Standing:
    """The fleet at the fault, from the log."""

    up: dict[int, ReplicaUp] = field(default_factory=dict)
    standbys: dict[int, Standby] = field(default_factory=dict)
    seen: dict[int, ReplicaUp] = field(default_factory=dict)
    """Whatever was up once: what a standby is like when it is up is not said before."""
    started_s: dict[int, float] = field(default_factory=dict)
    """From the controller's beginning until it was up for the first time."""
    arrived: dict[int, int] = field(default_factory=dict)
    """When each request came, by the log's clock."""


def predict(
    broken: Broken,
    records: Iterable[Record],
    trace: Path,
    parameters: Parameters,
    profiles: Mapping[str, str],
    settings: DrillSettings | None = None,
) -> DrillFigures:
    """Play the drill in the twin.

    Args:
        broken: what was done to the live fleet, by its log's clock and numbers.
        records: the live decision log, from its beginning or from what stands for it.
        trace: what passed, as the controller recorded it.
        parameters: the policy in force.
        profiles: a profile of step times, by model; under "" that of all others.

    Raises:
        PredictionError: what is needed for it is not in the log.
        FileError, TraceError, FleetError: a profile or the trace cannot be used.
    """
    settings = settings or DrillSettings()
    standing = _standing(broken, records)
    shift_ns = _shift_ns(trace, standing.arrived)
    fleet, standbys, numbers = _rack(standing, profiles)
    hit = [numbers[replica] for replica in broken.replicas if replica in numbers]
    if not hit:
        raise PredictionError("none of the replicas that were hit was up, or could be started")
    from_s = max(0.0, (broken.at_ns - shift_ns) / NS - BEFORE_S)
    moved_ns = shift_ns + round(from_s * NS)
    mine = msgspec.structs.replace(
        broken,
        replicas=tuple(hit),
        at_ns=broken.at_ns - moved_ns,
        until_ns=broken.until_ns - moved_ns,
        back_ns=broken.back_ns - moved_ns if broken.back_ns >= 0 else -1,
    )
    log = _Log(DrillReader(parameters, mine))
    world = World(
        fleet, build_policy(parameters), log, lambda chunk: None,
        WorldSettings(
            gpu_event_ns=round(settings.card_event_s * NS),
            scrape_every_ns=round(settings.scrape_s * NS),
            sample_every_ns=0,
            hung_restart_ns=round(settings.restart_s * NS),
        ),
        standbys=standbys, faults=_faults(mine, settings),
    )  # fmt: skip
    with TemporaryDirectory(prefix="twinkeel-drill-") as scratch:
        source = Source(trace=str(trace), from_s=from_s, assume_output=ANSWER_TOKENS)
        written = write_sources(
            [source], Path(scratch) / "traffic.parquet", duration_s=mine.until_ns / NS, seed=0
        )
        assert written is not None
        world.run(arrivals(open_trace(written)))
    return log.reader.end()


class _Log:
    """A decision log that is only read."""

    def __init__(self, reader: DrillReader) -> None:
        self.reader = reader

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        self.reader.step(now_ns, event, decisions)


def _standing(broken: Broken, records: Iterable[Record]) -> _Standing:
    standing = _Standing()
    began_ns = 0
    for record in records:
        event = record.event
        if isinstance(event, Restored):
            began_ns = record.now_ns
            standing.started_s.clear()
            standing.up.clear()  # what was up counts again when it comes up
        elif isinstance(event, Arrived):
            standing.arrived[event.request] = record.now_ns
        if record.now_ns >= broken.at_ns:
            break
        if isinstance(event, ReplicaUp):
            standing.up[event.replica] = standing.seen[event.replica] = event
            standing.standbys.pop(event.replica, None)
            standing.started_s.setdefault(event.replica, (record.now_ns - began_ns) / NS)
        elif isinstance(event, ReplicaDown):
            standing.up.pop(event.replica, None)
        elif isinstance(event, Standby):
            standing.standbys[event.replica] = event
    if not standing.up:
        raise PredictionError("no replica was up before the fault, by the decision log")
    return standing


def _shift_ns(trace: Path, arrived: Mapping[int, int]) -> int:
    """The log's clock where the trace's is 0, by the first request that both have: it has the same
    id in both."""
    for batch in open_trace(trace).batches(columns=["request_id", "arrival_s"]):
        ids, times_s = (batch.column(name).to_pylist() for name in ("request_id", "arrival_s"))
        for request, arrival_s in zip(ids, times_s, strict=True):
            if request in arrived:
                shift_ns: int = arrived[request] - round(arrival_s * NS)
                return shift_ns
    raise PredictionError(
        "none of the trace's requests had come before the fault, by the decision log"
    )


def _rack(
    standing: _Standing, profiles: Mapping[str, str]
) -> tuple[list[ReplicaSpec], list[ReplicaSpec], dict[int, int]]:
    """(replicas that are up, standbys, the twin's numbers by the live ones)."""
    numbers: dict[int, int] = {}
    up: list[ReplicaSpec] = []
    for live, spec in sorted(standing.up.items()):
        numbers[live] = len(numbers)
        up.append(_spec(numbers[live], spec, profiles, round(standing.started_s[live] * NS)))
    standbys: list[ReplicaSpec] = []
    for live, standby in sorted(standing.standbys.items()):
        like = standing.seen.get(live) or _peer(standing, standby)
        named = msgspec.structs.replace(
            like, name=standby.name, version=standby.version, domain=standby.domain
        )
        numbers[live] = len(numbers)
        standbys.append(_spec(numbers[live], named, profiles, standby.start_ns))
    return up, standbys, numbers


def _peer(standing: _Standing, standby: Standby) -> ReplicaUp:
    """A replica of the same model that is up."""
    for spec in standing.up.values():
        if spec.models == standby.models and spec.pooling == standby.pooling:
            return spec
    raise PredictionError(
        f"standby {standby.name}: nothing that serves {', '.join(standby.models)} was up, so its"
        " size is not known"
    )


def _spec(
    number: int, up: ReplicaUp, profiles: Mapping[str, str], cold_start_ns: int
) -> ReplicaSpec:
    model = up.models[0] if up.models else ""
    name = profiles.get(model, profiles.get("", ""))
    if not name:
        raise PredictionError(f"no profile is known for {model or up.name}: give one")
    (spec,) = fleet_of([(name, 1)], max_model_len=up.max_model_len, kv_blocks_given=up.kv_blocks)
    sized = replace(
        spec.settings,
        block_tokens=up.block_tokens,
        max_num_seqs=up.max_num_seqs,
        max_num_batched_tokens=up.max_num_batched_tokens,
    )
    return replace(
        spec, id=number, name=up.name, settings=sized, serves=up.models, version=up.version,
        domain=up.domain, labels=up.labels, closeness_permille=up.closeness_permille,
        memory_mb=up.memory_mb, cold_start_ns=cold_start_ns,
    )  # fmt: skip


def _faults(broken: Broken, settings: DrillSettings) -> list[Fault]:
    """The drill in the twin's words, for each replica that is hit.

    Raises:
        PredictionError: it has none.
    """
    at_s = broken.at_ns / NS
    for_s = (broken.back_ns - broken.at_ns) / NS if broken.back_ns >= 0 else None
    dies_s = settings.dies_after_s
    reset_s = max(for_s, dies_s + 0.001) if for_s is not None else None
    made: list[Fault] = []
    for on in broken.replicas:
        match broken.kind:
            case "engine-kill":
                made.append(EngineKilled(at_s=at_s, on=on))
            case "engine-hang":
                made.append(EngineHung(at_s=at_s, on=on, for_s=for_s))
            case "oom":
                made.append(
                    OomLongPrompt(at_s=at_s, on=on, tokens_from=broken.tokens_from, for_s=for_s)
                )
            case "network" if broken.link == "blackhole":
                made.append(Network(at_s=at_s, on=on, loss_permille=1000, for_s=for_s))
            case "network" if broken.link == "delay":
                made.append(Network(at_s=at_s, on=on, delay_ms=broken.delay_ms, for_s=for_s))
            case "network":
                raise PredictionError(
                    f"the twin has no link with {broken.link}: it loses whole messages, and does"
                    " not break connections that are well"
                )
            case "bad-answers":
                made.append(BadAnswers(at_s=at_s, on=on, for_s=for_s))
            case "ecc":
                made.append(
                    EccUncorrectable(at_s=at_s, on=on, dies_after_s=dies_s, reset_s=reset_s)
                )
            case "gpu-loss":
                made.append(
                    Xid(at_s=at_s, on=on, code=LOST_CARD_XID, dies_after_s=dies_s, reset_s=reset_s)
                )
    return made
