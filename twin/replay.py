"""One run: a trace through a fleet under a policy, and what came of it."""

from __future__ import annotations

import gc
import resource
import shutil
import time
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Literal

from msgspec import to_builtins

from policy.compose import build_policy
from policy.files import code_hash, load_policy
from policy.log import FullLog, HashLog, Header, SampleLog
from policy.parameters import canonical
from traces import TraceError, TraceWriter
from twin.arrivals import arrivals
from twin.results import Observed, results_batch
from twin.summary import Slo, Summary
from twin.world import World, WorldSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from policy.parameters import Parameters
    from traces import Trace
    from twin.arrivals import Chunk
    from twin.faults import Fault
    from twin.fleet import ReplicaSpec
    from twin.intervals import Intervals
    from twin.world import Sample

RESULT_ROWS = 16_384
"""Rows that the results file holds back in memory."""
LogMode = Literal["full", "hash", "sample"]


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How a trace is played."""

    seed: int = 0
    speed: float = 1.0
    scale: float = 1.0
    scale_lengths: float = 1.0
    assume_output: int = 0
    log: LogMode = "hash"
    skip: bool = True
    slo: Slo = field(default_factory=Slo)
    faults: tuple[Fault, ...] = ()
    """What goes wrong meanwhile; times count from the trace's start, as it is played."""
    world: WorldSettings = field(default_factory=WorldSettings)


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of a run."""

    policy: str
    """Its name."""
    trace: str
    options: ReplayOptions
    fleet: list[ReplicaSpec]
    summary: Summary
    samples: list[Sample]
    span_s: float
    """First arrival to last settlement."""
    gpu_busy: list[float]
    """By replica."""
    engine_steps: int
    engine_preemptions: int
    decisions: int
    """Records in the decision log."""
    log_hash: str
    refused: int
    wall_s: float
    cpu_s: float
    peak_mib: float
    intervals: Intervals | None = None
    """Of its figures, where they were asked for (``twin.uncertainty``)."""

    @property
    def gpu_hours(self) -> float:
        return sum(spec.profile.tensor_parallel for spec in self.fleet) * self.span_s / 3600

    @property
    def usd_per_million_good_tokens(self) -> float | None:
        """GPU price of a million output tokens of requests within their SLO."""
        tokens = self.summary.all.good_output_tokens
        usd = sum(spec.usd_per_hour for spec in self.fleet) * self.span_s / 3600
        return usd / tokens * 1e6 if tokens else None

    def figures(self) -> dict[str, Any]:
        """All of it as plain values, ready for JSON."""
        summary = self.summary
        prompt_tokens = summary.prompt_tokens
        return {
            "schema": 1,
            "policy": self.policy,
            "trace": self.trace,
            "fleet": [
                {"name": spec.name, "profile": spec.profile.name,
                 "trust": spec.profile.trust.status, "kv_blocks": spec.settings.kv_blocks}
                for spec in self.fleet
            ],
            "options": asdict(replace(self.options, faults=()))
            | {"faults": to_builtins(self.options.faults)},
            "span_s": self.span_s,
            "all": summary.all.figures(self.span_s),
            **{
                f"by_{kind}": {name: group.figures(self.span_s) for name, group in groups.items()}
                for kind, groups in summary.groups.items()
            },
            "shed_or_failed": summary.shed_why,
            "degraded_how": dict(summary.degraded_how),
            "verification": dict(summary.verification),
            "prefix_hit_share": summary.cached_tokens / prompt_tokens if prompt_tokens else None,
            "gpu_busy_share": self.gpu_busy,
            "gpu_hours": self.gpu_hours,
            "usd_per_million_good_tokens": self.usd_per_million_good_tokens,
            "engine_steps": self.engine_steps,
            "engine_preemptions": self.engine_preemptions,
            "decisions": self.decisions,
            "log_hash": self.log_hash,
            "refused_events": self.refused,
            "wall_s": self.wall_s,
            "cpu_s": self.cpu_s,
            "peak_mib": self.peak_mib,
            **({"uncertainty": self.intervals.plain()} if self.intervals is not None else {}),
        }  # fmt: skip


def named_policies(names: Sequence[str]) -> list[tuple[str, Parameters]]:
    """Presets and policy files, each with a label of its own: the preset's name or the file's,
    numbered where they repeat.

    Raises:
        FileError: one of them is none.
    """
    loaded: list[tuple[str, Parameters]] = []
    for name in names:
        stem = Path(name).stem
        labels = {label for label, _ in loaded}
        numbered = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
        loaded.append((next(label for label in numbered if label not in labels), load_policy(name)))
    return loaded


def replay(
    trace: Trace,
    fleet: list[ReplicaSpec],
    parameters: Parameters,
    options: ReplayOptions | None = None,
    *,
    policy_name: str = "",
    out: Path | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> Replay:
    """Play ``trace`` through ``fleet`` under the policy of ``parameters``.

    Args:
        policy_name: for the report.
        out: folder for ``requests.parquet``, and for ``decisions.N.log`` unless it is only hashed.
            It takes the place of a folder of that name when the run has ended well.
        progress: called with the number of requests settled since the last call.

    Raises:
        TraceError, FaultError: the trace, or a fault, cannot be played; nothing is left
            half-written.
    """
    options = options or ReplayOptions()
    source = arrivals(
        trace, seed=options.seed, speed=options.speed, scale=options.scale,
        scale_lengths=options.scale_lengths, assume_output=options.assume_output,
    )  # fmt: skip
    if options.log != "hash" and out is None:
        raise TraceError(f"a log in mode {options.log} needs a folder to write to: give out")
    policy = build_policy(parameters)
    header = Header(schema=1, code_hash=code_hash(), policy=canonical(parameters), wall_ns=0)
    summary = Summary(options.slo)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    with ExitStack() as stack:
        writer = None
        folder = None
        if out is not None:
            folder = stack.enter_context(_fresh_folder(out))
        log = _log(options.log, header, policy.snapshot, folder)
        stack.callback(log.close)
        if folder is not None:
            writer = stack.enter_context(
                TraceWriter(folder / "requests.parquet", row_group_rows=RESULT_ROWS)
            )

        def settled(chunk: Chunk) -> None:
            seen = Observed(chunk, fleet, options.world)
            summary.add(chunk, seen)
            if writer is not None:
                writer.write(results_batch(chunk, seen, fleet))
            progress(len(chunk.results))

        world = World(
            fleet, policy, log, settled, options.world, options.skip, faults=options.faults,
            seed=options.seed,
        )  # fmt: skip
        first_ns, source = _peek(source, options.scale)
        with rare_collections():
            world.run(source)
    span_s = (max(summary.last_ns, first_ns) - first_ns) / 1e9
    return Replay(
        policy=policy_name,
        trace=str(trace.path.name),
        options=options,
        fleet=fleet,
        summary=summary,
        samples=world.samples,
        span_s=span_s,
        gpu_busy=world.gpu_busy_share(round(span_s * 1e9)),
        engine_steps=sum(replica.steps for replica in world.replicas),
        engine_preemptions=sum(replica.preemptions for replica in world.replicas),
        decisions=log.count,
        log_hash=log.hexdigest(),
        refused=world.refused,
        wall_s=time.perf_counter() - wall_s,
        cpu_s=time.process_time() - cpu_s,
        peak_mib=_peak_mib(),
    )


def _peak_mib() -> float:
    """Most memory this process has held. Linux's own mark where there is one: ``getrusage`` counts
    the parent's memory too when a large process starts a small one."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the cyclic garbage collector run rarely: a quarter of a run's time goes into it else.

    The simulation makes no cycles that it does not break itself, so there is next to nothing to
    find among the millions of short-lived objects that set it off.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _peek(source: Iterator[Chunk], scale: float) -> tuple[int, Iterator[Chunk]]:
    first = next(source, None)
    if first is None:
        raise TraceError(f"a scale of {scale} leaves none of the trace's requests: raise it")

    def chunks() -> Iterator[Chunk]:
        yield first
        yield from source

    return first.arrival_ns[0], chunks()


@contextmanager
def _fresh_folder(out: Path) -> Iterator[Path]:
    """A folder to write to that becomes ``out`` if all goes well, and leaves nothing if not."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield scratch
        if out.exists():
            shutil.rmtree(out)
        scratch.chmod(0o755)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _log(
    mode: LogMode, header: Header, snapshot: Callable[[], bytes], folder: Path | None
) -> HashLog:
    if mode == "hash" or folder is None:
        return HashLog()

    def segment(index: int) -> Any:
        return (folder / f"decisions.{index}.log").open("wb")

    kind = FullLog if mode == "full" else SampleLog
    return kind(header, snapshot, segment)
