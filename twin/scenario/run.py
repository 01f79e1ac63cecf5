"""One run of a scenario: one variant with one seed."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from policy.compose import build_policy
from policy.files import FileError, code_hash, nearest
from policy.log import FullLog, HashLog, Header
from policy.parameters import canonical
from traces import open_trace
from twin.arrivals import arrivals
from twin.clients import CallClients, Calls, ChainClients, Chains, SessionClients, Setting
from twin.drawn_answers import DrawnAnswers
from twin.faults import kind_of
from twin.figures.collect import Collected
from twin.replay import rare_collections
from twin.scenario.drill import drawn
from twin.scenario.files import policy_of
from twin.scenario.happenings import dated_events, schedule
from twin.scenario.rack import rack_of
from twin.scenario.result import RunResult
from twin.source import write_sources
from twin.world import World, WorldSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from twin.arrivals import Chunk
    from twin.scenario.spec import Setup
    from twin.source import Source

    AnyClients = SessionClients | ChainClients | CallClients

NS = 1_000_000_000


class Recordings:
    """Open-loop traffic of a seed, written once and played in every run that has it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[bytes, Path | None] = {}

    def chunks(
        self, sources: Sequence[Source], duration_s: float, seed: int, scenario: Path
    ) -> Iterator[Chunk]:
        """The requests of ``sources`` in order of arrival."""
        key = msgspec.json.encode((sources, duration_s, seed, str(scenario)))
        if key not in self._written:
            path = self._folder / f"{len(self._written)}.parquet"
            beside = [source.beside(scenario) for source in sources]
            written = write_sources(beside, path, duration_s=duration_s, seed=seed)
            self._written[key] = written
        path_written = self._written[key]
        return iter(()) if path_written is None else arrivals(open_trace(path_written), seed=seed)


def run_setup(
    setup: Setup,
    seed: int,
    *,
    run: str,
    folder: Path,
    recordings: Recordings,
    out: Path | None = None,
) -> RunResult:
    """Play it and gather its figures.

    Args:
        run: its name, for errors and the result.
        folder: where the scenario's file lies.
        out: folder for the decision log; None: it is only hashed.

    Raises:
        FileError, FleetError, FaultError, TraceError: what the scenario names cannot be used.
    """
    began_s = time.perf_counter()
    parameters = policy_of(setup.policy, folder, f"{run}: policy.set")
    fleet, standbys = rack_of(setup.fleet, folder)
    policy = build_policy(parameters)
    log = _log(out, canonical(parameters), policy.snapshot)
    collected = Collected(setup.measure, [*fleet, *standbys], fault_times(setup))
    drilled = [] if setup.drill is None else drawn(setup.drill, setup.duration_s, seed)
    world = World(
        fleet,
        policy,
        collected.watch(log),
        collected.chunk,
        world_settings(setup.world, run),
        standbys=standbys,
        faults=(*setup.faults, *drilled),
        answers=None if setup.answers is None else DrawnAnswers(setup.answers, seed),
        cards=setup.cards,
        seed=seed,
    )
    schedule(world, dated_events(setup.events, parameters, folder, run))
    duration_ns = round(setup.duration_s * NS)
    setting = Setting(world, seed, duration_ns, collected.asked)
    clients = _clients(setup, setting, recordings, folder)
    for client in clients.values():
        client.start()
    chunks = recordings.chunks(setup.traffic.open, setup.duration_s, seed, folder)
    with rare_collections():
        world.run(chunks)
    log.close()
    figures = collected.figures(world, duration_ns)
    figures["clients"] = {name: client.figures() for name, client in clients.items()}
    figures["drill"] = Counter(kind_of(fault) for fault in drilled)
    return RunResult(run, seed, figures, log.hexdigest(), time.perf_counter() - began_s)


def fault_times(setup: Setup) -> dict[str, int]:
    """When each fault strikes, in ns; of several of a kind the later ones are numbered."""
    times: dict[str, int] = {}
    for fault in sorted(setup.faults, key=lambda fault: fault.at_s):
        kind = kind_of(fault)
        number = sum(name.partition("-")[0] == kind for name in times) + 1
        times[kind if number == 1 else f"{kind}-{number}"] = round(fault.at_s * NS)
    return times


def world_settings(changes: Mapping[str, int], where: str) -> WorldSettings:
    """The defaults with some fields set otherwise.

    Raises:
        FileError: an unknown field, or a value below 0.
    """
    known = WorldSettings.__dataclass_fields__
    for name, value in changes.items():
        if name not in known:
            raise FileError(where, "unknown key", key=f"world.{name}", hint=nearest(name, known))
        if value < 0:
            raise FileError(where, f"{value} must not be negative", key=f"world.{name}")
    return replace(WorldSettings(), **changes)


def _clients(
    setup: Setup, setting: Setting, recordings: Recordings, folder: Path
) -> dict[str, AnyClients]:
    made: dict[str, AnyClients] = {}
    for spec in setup.traffic.clients:
        if isinstance(spec, Calls):
            own_seed = setting.dice(spec.name, "source").number() >> 32
            chunks = recordings.chunks((spec.source,), setup.duration_s, own_seed, folder)
            made[spec.name] = CallClients(spec, setting, chunks)
        elif isinstance(spec, Chains):
            made[spec.name] = ChainClients(spec, setting)
        else:
            made[spec.name] = SessionClients(spec, setting)
    return made


def _log(out: Path | None, policy: str, snapshot: Callable[[], bytes]) -> HashLog:
    if out is None:
        return HashLog()
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("decisions.*.log"):
        old.unlink()
    header = Header(schema=1, code_hash=code_hash(), policy=policy, wall_ns=0)
    return FullLog(header, snapshot, lambda index: (out / f"decisions.{index}.log").open("wb"))
