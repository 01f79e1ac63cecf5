"""What a trial plays: a trace on a fleet, or a run of a scenario.

Both are played with numbered seeds. Seed 0 of a trace is the fleet as its profiles say; the others
draw step times from what the profiles know of their errors (``twin.uncertainty``), so that a policy
is not tuned to one set of coefficients. A scenario's seeds draw its traffic and its faults.
The same policy with the same seed gives the same figures, so policies are compared in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from multiprocessing.util import Finalize
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from policy.compose import build_policy
from policy.log import HashLog
from twin.arrivals import arrivals
from twin.replay import ReplayOptions, rare_collections
from twin.results import Observed
from twin.scenario.run import Recordings, run_setup
from twin.scenario.spec import PolicyChoice
from twin.tune.compare import FIRST_LEVEL, LEVEL, dominated
from twin.tune.held import HeldTrace
from twin.tune.objectives import UNANSWERED_S, Rows
from twin.uncertainty import drawn_fleet, drawn_seed
from twin.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from policy.parameters import Parameters
    from twin.arrivals import Chunk
    from twin.fleet import ReplicaSpec
    from twin.scenario.spec import Setup
    from twin.summary import Slo
    from twin.tune.objectives import Goals

    Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class Rival:
    """A trial that another must not be clearly worse than."""

    number: int
    blocks: Array
    """By block and figure."""
    columns: tuple[int, ...]
    """The figures that are compared."""
    better: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """One play: a policy with a seed."""

    number: int
    policy: Parameters
    seed: int = 0
    rivals: tuple[Rival, ...] = ()
    rungs: tuple[int, ...] = ()
    """After how many blocks it is looked at whether to go on."""
    keep_rows: bool = False
    """Send back what became of each request."""


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it."""

    values: dict[str, float]
    """By figure, of all that was played."""
    blocks: Array
    """By block and figure; a scenario's seed is one block."""
    beaten_by: int = -1
    """The trial that it was stopped for; -1: it was played to its end."""
    rows: tuple[Rows, ...] = ()
    """By block, where they were asked for."""


class Work(Protocol):
    """What all trials play."""

    @property
    def seeds_known(self) -> tuple[int, ...]:
        """Those to tune with, in order; further ones follow the last."""
        ...

    @property
    def is_trace(self) -> bool: ...

    def text(self) -> str:
        """What it is, for people."""
        ...

    def exactly(self) -> str:
        """Everything that figures depend on: one study must not hold those of two."""
        ...

    def ready(self, goals: Goals) -> Callable[[Order], Played]:
        """Load it: what plays orders.

        Raises:
            TraceError, FileError, FleetError, FaultError: it cannot be played.
        """
        ...


class _Beaten(Exception):
    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, slots=True)
class TraceWork:
    """Part of a trace on a fleet."""

    path: str
    fleet: list[ReplicaSpec]
    options: ReplayOptions = field(default_factory=ReplayOptions)
    begin: float = 0.0
    end: float = 1.0
    """Shares of the trace's time."""

    @property
    def seeds_known(self) -> tuple[int, ...]:
        return (0,)

    @property
    def is_trace(self) -> bool:
        return True

    def text(self) -> str:
        part = "" if (self.begin, self.end) == (0, 1) else (
            f", {self.begin * 100:g} to {self.end * 100:g} % of its time"
        )  # fmt: skip
        kinds = dict.fromkeys(spec.profile.name for spec in self.fleet)
        counts = {name: sum(s.profile.name == name for s in self.fleet) for name in kinds}
        fleet = ", ".join(f"{count} x {name}" for name, count in counts.items())
        return f"{Path(self.path).name}{part} on {fleet}"

    def exactly(self) -> str:
        return f"{self.text()}, {self.options}"

    def ready(self, goals: Goals) -> Callable[[Order], Played]:
        held = HeldTrace(self.path, self.begin, self.end)
        spans_s: dict[int, list[float]] = {}
        return lambda order: self._play(held, spans_s, goals, order)

    def _play(
        self, held: HeldTrace, spans_s: dict[int, list[float]], goals: Goals, order: Order
    ) -> Played:
        """Play it block by block, and stop at a rung where a rival is clearly better. ``spans_s``
        keeps the blocks' lengths by seed."""
        fleet, options = self.fleet, self.options
        if order.seed:
            fleet = drawn_fleet(fleet, options.seed, order.seed)
            options = replace(options, seed=drawn_seed(options.seed, order.seed))
        parts: list[Rows] = []
        blocks: list[list[float]] = []
        beaten_by = -1

        def settled(chunk: Chunk) -> None:
            part = rows_of(chunk, fleet, options, spans_s[options.seed][len(parts)])
            parts.append(part)
            blocks.append([figure.of_rows(part) for figure in goals.figures])
            if len(blocks) in order.rungs:
                level = FIRST_LEVEL if len(blocks) == order.rungs[0] else LEVEL
                _compare(np.array(blocks), order.rivals, level)

        if options.seed not in spans_s:
            spans_s[options.seed] = _spans_s(_arrivals(held, options))
        try:
            world = World(fleet, build_policy(order.policy), HashLog(), settled, options.world)
            with rare_collections():
                world.run(_arrivals(held, options))
        except _Beaten as beaten:
            beaten_by = beaten.number
        together = Rows.joined(parts)
        values = {figure.name: figure.of_rows(together) for figure in goals.figures}
        kept = tuple(parts) if order.keep_rows else ()
        return Played(values, np.array(blocks), beaten_by, kept)


def _arrivals(held: HeldTrace, options: ReplayOptions) -> Iterator[Chunk]:
    return arrivals(
        held, seed=options.seed, speed=options.speed, scale=options.scale,
        scale_lengths=options.scale_lengths, assume_output=options.assume_output,
    )  # fmt: skip


def _spans_s(chunks: Iterable[Chunk]) -> list[float]:
    """Of each block: from its first arrival to the next one's; of the last, to its own last. They
    are not always those of the trace: what a scale above 1 adds arrives a little later."""
    firsts: list[int] = []
    last_ns = 0
    for chunk in chunks:
        firsts.append(chunk.arrival_ns[0])
        last_ns = chunk.arrival_ns[-1]
    return [(after - before) / 1e9 for before, after in pairwise([*firsts, last_ns])]


@dataclass(frozen=True, slots=True)
class ScenarioWork:
    """A run of a scenario."""

    name: str
    run: str
    setup: Setup
    folder: Path
    seeds: tuple[int, ...]

    @property
    def seeds_known(self) -> tuple[int, ...]:
        return self.seeds

    @property
    def is_trace(self) -> bool:
        return False

    def text(self) -> str:
        return f"scenario {self.name}, run {self.run}"

    def exactly(self) -> str:
        return f"{self.text()}, {self.setup}"

    def ready(self, goals: Goals) -> Callable[[Order], Played]:
        scratch = mkdtemp(prefix="twinkeel-")
        Finalize(None, rmtree, (scratch, True), exitpriority=1)  # when this process ends
        recordings = Recordings(Path(scratch))

        def play(order: Order) -> Played:
            choice = PolicyChoice(set=msgspec.json.decode(msgspec.json.encode(order.policy)))
            result = run_setup(
                msgspec.structs.replace(self.setup, policy=choice), order.seed,
                run=self.run, folder=self.folder, recordings=recordings,
            )  # fmt: skip
            figures = {
                **result.figures,
                "duration_s": self.setup.duration_s - self.setup.measure.warm_up_s,
                "useful_degraded": self.setup.measure.useful_degraded,
            }
            values = {figure.name: figure.of_run(figures) for figure in goals.figures}
            return Played(values, np.array([list(values.values())]))

        return play


def rows_of(chunk: Chunk, fleet: list[ReplicaSpec], options: ReplayOptions, span_s: float) -> Rows:
    """What became of a chunk's requests; good ones as in a replay's report."""
    seen = Observed(chunk, fleet, options.world)
    whole = seen.whole
    ttft_s, tpot_s = seen.columns["ttft_s"], seen.columns["tpot_s"]
    limit_s = _limits(chunk, options.slo)
    good = whole & (ttft_s <= limit_s) & ~(tpot_s > options.slo.tpot_s)
    known = whole & ~np.isnan(ttft_s)
    return Rows(
        sla=np.array(chunk.sla),
        line=np.array(chunk.line),
        good=good,
        ttft_s=np.where(known, ttft_s, UNANSWERED_S),
        tokens=np.where(whole, seen.output_tokens, 0),
        outcome=np.array(seen.outcome),
        span_s=span_s,
    )


def _limits(chunk: Chunk, slo: Slo) -> Array:
    limits = {name: slo.limit_s(name) for name in set(chunk.sla)}
    return np.array([
        own / 1e9 if own else limits[name]
        for own, name in zip(chunk.deadline_ns, chunk.sla, strict=True)
    ])  # fmt: skip


def _compare(blocks: Array, rivals: Sequence[Rival], level: float) -> None:
    for rival in rivals:
        columns = list(rival.columns)
        if dominated(blocks[:, columns], rival.blocks[:, columns], rival.better, level):
            raise _Beaten(rival.number)
