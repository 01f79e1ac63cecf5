"""Real vLLM of the tiny model on this CPU against the twin, load by load.

The profile is calibrated with the designed load of `twinkeel calibrate`, never on a load that is
tested. Each segment is played twice on the server, as A and B in turns, and what differs between
them is the noise. Before and after each a short burst of the calibration's kind is played: how
much longer its steps take than the profile says is how fast the machine is just now, and the twin
plays the segment at that speed. (An error of the profile's level is in that, too; it is a figure of
its own.) Times are the server's own.
"""

from __future__ import annotations

import os
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from controller.calibration import record_load
from policy.cost import StepCost
from tests.bench.fidelity import stack
from tests.bench.fidelity.driving import Driven, Seen
from tests.bench.fidelity.loads import Load, ServerName, Want, all_loads, flood
from tests.bench.fidelity.rows import Outcome, Result, Run, rows_of
from tests.live.server import Vllm, vllm_servers
from traces.steps import steps_file
from twin.alone import Asked, serve_alone
from twin.calibrate import CalibrationError, drift, fit_profile
from twin.engine import EngineSettings
from twin.engine.steptime import slowed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from policy.cost import Overheads, Profile
    from traces.steps import ServerSettings
    from twin.alone import Served

SEQS = 16
OPTIONS = (
    "--dtype", "float32", "--block-size", "32", "--max-num-seqs", str(SEQS),
    "--max-num-batched-tokens", "512", "--enable-logging-iteration-details",
    "--enable-prompt-tokens-details",
)  # fmt: skip
POOLS: dict[ServerName, tuple[str, ...]] = {
    "fcfs": ("--num-gpu-blocks-override", "4096", "--scheduling-policy", "fcfs"),
    "priority": ("--num-gpu-blocks-override", "4096", "--scheduling-policy", "priority"),
    # vLLM does not start with a pool that its longest request does not fit into.
    "tight": (
        "--num-gpu-blocks-override", "52", "--max-model-len", "1024",
        "--scheduling-policy", "fcfs",
    ),
}  # fmt: skip
FLOOD = 160
YARDSTICK_DECODERS: dict[ServerName, int] = {"fcfs": 12, "priority": 12, "tight": 5}
"""As many as the pool holds beside a prompt: steps of preempted requests cannot be compared."""


def yardstick(server: ServerName) -> list[Want]:
    """Steps that decode, and steps that prefill on top, two to three seconds of them."""
    decoders = [Want(0.0, 48, 120) for _ in range(YARDSTICK_DECODERS[server])]
    return [*decoders, *(Want(0.4 + 0.15 * number, 256, 2) for number in range(10))]


@contextmanager
def running(name: ServerName, steps: Path) -> Iterator[Driven]:
    """A server of its own; its model has one core, everything else the other."""
    cores = sorted(os.sched_getaffinity(0))
    variables = {
        "VLLM_CPU_OMP_THREADS_BIND": str(cores[0]),
        "VLLM_SERVER_DEV_MODE": "1",
        "TWINKEEL_STEPS": str(steps),
    }
    with vllm_servers(1, *OPTIONS, *POOLS[name], variables=variables) as servers:
        _favour(servers[0], cores)
        driven = Driven(servers[0], steps_file(steps))
        driven.play([Want(0.0, 32, 8), Want(0.2, 256, 8)])
        yield driven
        os.sched_setaffinity(0, cores)


def _favour(server: Vllm, cores: Sequence[int]) -> None:
    """Server and client come before whatever else the machine does, as far as this user may; the
    model has a core of its own."""
    engine = server.engine_pids()
    for pid in (os.getpid(), server.process.pid):
        with suppress(PermissionError, FileNotFoundError):
            Path(f"/proc/{pid}/autogroup").write_text("-20")  # of the whole session
    if len(cores) < 2:
        return
    others = set(cores[1:])
    os.sched_setaffinity(0, others)
    for pid in (server.process.pid, *engine):
        if Path(f"/proc/{pid}/comm").read_text().startswith("VLLM::Work"):
            continue
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread), others)


def engine_of(settings: ServerSettings) -> EngineSettings:
    """The engine as the server says that it is set up."""
    known = {
        name: getattr(settings, name) for name in EngineSettings.__dataclass_fields__
        if hasattr(settings, name)
    }  # fmt: skip
    missing = [name for name, value in known.items() if value is None]
    if missing:
        raise RuntimeError(f"the server's records do not say {', '.join(missing)}")
    return EngineSettings(**known)


class Twin:
    """What the profile predicts."""

    def __init__(self, profile: Profile, settings: ServerSettings, outside_ns: float) -> None:
        self.cost = StepCost.from_profile(profile)
        self.settings = engine_of(settings)
        source = profile.overheads.request_in_ns
        inside = msgspec.structs.replace(source, value=round(outside_ns), interval=None)
        nothing = msgspec.structs.replace(source, value=0.0, interval=None)
        # What is compared are the server's own times, which begin and end inside its HTTP side.
        self._overheads: Overheads = msgspec.structs.replace(
            profile.overheads, request_in_ns=inside, request_out_ns=nothing, token_out_ns=nothing
        )

    def play(self, seen: Sequence[Seen], speed: float, stretch: float = 1.0) -> list[Served]:
        """The same arrivals; ``stretch``: further apart by this factor."""
        start_ns = seen[0].at_ns
        asked = [
            Asked(
                round((each.at_ns - start_ns) * stretch), each.want.prompt_tokens,
                each.want.output_tokens, priority=each.want.priority, prefix=each.want.prefix,
                prefix_block_tokens=self.settings.block_tokens,
            )
            for each in seen
        ]  # fmt: skip
        cost = slowed(self.cost, Fraction(speed).limit_denominator(10_000), Fraction(1))
        return serve_alone(self.settings, cost, asked, self._overheads)


def measure(traces: Path, told: Callable[[str], None] = print) -> Outcome:
    """Calibrate, flood, and play every load on its server."""
    with TemporaryDirectory(prefix="twinkeel-fidelity-") as scratch:
        folder = Path(scratch)
        results: list[Result] = []
        speeds: list[float] = []
        with running("fcfs", folder / "fcfs") as driven:
            told("calibrating")
            record_load(driven.server.url, folder / "load", steps=steps_file(folder / "fcfs"))
            calibration = fit_profile(
                folder / "load", name="cpu/tiny-here", gpu="cpu-2core", model="tiny-qwen3"
            )
            profile = calibration.profile or calibration.draft
            if profile is None:
                raise CalibrationError("; ".join(calibration.refusal))
            told("; ".join(("calibrated", *calibration.refusal)))
            outside_ns = calibration.figures["server_in_ns"] + calibration.figures["server_out_ns"]
            player = _Player(driven, "fcfs", profile, outside_ns, told)
            rates = player.flood()
            loads = all_loads(float(np.mean(rates["real"])), traces, SEQS)
            results += player.all(loads, rates)
            again = player.flood()
            saturation = {name: [*rates[name], *again[name]] for name in rates}
            speeds += player.speeds
            through = stack.measure(
                driven, profile, float(np.mean(saturation["real"])), player.yardstick, told
            )
        for name in ("priority", "tight"):
            with running(name, folder / name) as driven:
                player = _Player(driven, name, profile, outside_ns, told)
                results += player.all(loads, saturation)
                speeds += player.speeds
    return Outcome(calibration, profile, results, saturation, speeds, through)


class _Player:
    """Plays loads on one server, with a yardstick between any two runs."""

    def __init__(
        self, driven: Driven, server: ServerName, profile: Profile, outside_ns: float,
        told: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._driven = driven
        self._server: ServerName = server
        header = driven.recording(()).header
        self._twin = Twin(profile, header.settings, outside_ns)
        self._told = told
        self._speed = self.yardstick()
        self.speeds = [self._speed]
        """All that the yardstick has said."""

    def yardstick(self) -> float:
        """How many times as long as the profile says steps take just now."""
        rows = self._driven.play(yardstick(self._server))[1]
        return drift(self._twin.cost, self._driven.recording(rows)).ratio

    def pair(self, wants: Sequence[Want], stretch: float = 1.0) -> tuple[Run, Run]:
        """A segment twice in a row, between two looks at the yardstick."""
        before = self._speed
        played = [self._once(wants), self._once(wants)]
        self._speed = self.yardstick()
        self.speeds.append(self._speed)
        speed = (before * self._speed) ** 0.5
        a, b = (self._predicted(seen, own or speed, speed, stretch) for seen, own in played)
        return a, b

    def _once(self, wants: Sequence[Want]) -> tuple[list[Seen], float | None]:
        """What was seen, and the speed of the run's own steps if they can be compared: those of
        preempted requests cannot."""
        self._driven.forget_prefixes()
        seen, rows = self._driven.play(wants)
        try:
            return seen, drift(self._twin.cost, self._driven.recording(rows)).ratio
        except CalibrationError:
            return seen, None

    def _predicted(self, seen: list[Seen], own: float, speed: float, stretch: float) -> Run:
        served, plain, owned = (self._twin.play(seen, each, stretch) for each in (speed, 1.0, own))
        return Run(seen, served, speed, plain, owned)

    def flood(self) -> dict[str, list[float]]:
        """Saturation, twice."""
        rates: dict[str, list[float]] = {"real": [], "twin": [], "speed": []}
        for run in self.pair(flood(FLOOD).segments[0]):
            rates["real"].append(_rate([each.at_ns + each.e2e_ns for each in run.seen]))
            rates["twin"].append(_rate([each.last_ns for each in run.served]))
            rates["speed"].append(run.speed)
        self._told(f"saturation: {rates}")
        return rates

    def all(self, loads: Sequence[Load], rates: dict[str, list[float]]) -> list[Result]:
        results = []
        own = float(np.mean(rates["real"]) / np.mean(rates["twin"]))
        for load in loads:
            if load.server != self._server:
                continue
            result = Result(load)
            stretch = own if load.stretch_twin else 1.0
            for segment in load.segments:
                a, b = self.pair(segment, stretch)
                result.a.append(a)
                result.b.append(b)
            results.append(result)
            text = ", ".join(
                f"{name} {row.error:.1f} (noise {row.noise:.1f}, own speed {row.own_error:.1f})"
                for name, row in rows_of(result).items()
            )
            speeds = " ".join(f"{run.speed:.2f}" for run in (*result.a, *result.b))
            self._told(f"{load.name}: errors in %: {text}; speeds {speeds}")
        return results


def _rate(ends_ns: Sequence[int]) -> float:
    """Requests a second while the server was full: from the first fifth to the last."""
    ends = np.sort(np.array(ends_ns, dtype=np.float64))
    low, high = len(ends) // 5, 4 * len(ends) // 5
    return float((high - low) / (ends[high] - ends[low]) * 1e9)
