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
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from controller.calibration import record_load
from policy.cost import StepCost
from tests.bench.fidelity import stack
from tests.bench.fidelity.driving import Driven, Seen
from tests.bench.fidelity.loads import Load, ServerName, Want, all_loads, flood
from tests.bench.fidelity.noise import noise_percent
from tests.figures import Figure
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
    from twin.calibrate import Calibration

SEQS = 16
OPTIONS = (
    "--dtype", "float32", "--block-size", "32", "--max-num-seqs", str(SEQS),
    "--max-num-batched-tokens", "512", "--enable-logging-iteration-details",
    "--enable-prompt-tokens-details",
)  # fmt: skip
POOLS: dict[ServerName, tuple[str, ...]] = {
    "fcfs": ("--num-gpu-blocks-override", "4096", "--scheduling-policy", "fcfs"),
    "priority": ("--num-gpu-blocks-override", "4096", "--scheduling-policy", "priority"),
    "tight": ("--num-gpu-blocks-override", "52", "--scheduling-policy", "fcfs"),
}
FLOOD = 240
BARS = {
    "e2e_mean": 5.0, "e2e_p99": 10.0, "ttft_mean": 10.0, "ttft_p99": 15.0, "tpot_mean": 5.0,
}  # fmt: skip
COUNT_BAR = 5.0
YARDSTICK = (
    *(Want(0.0, 48, 120) for _ in range(12)),
    *(Want(0.4 + 0.15 * number, 256, 2) for number in range(10)),
)
"""Steps that decode, and steps that prefill on top, two to three seconds of them."""


@dataclass
class Run:
    """A segment, played once on the server and once in the twin."""

    seen: list[Seen]
    served: list[Served]
    speed: float
    """How many times as long as the profile says steps took just then."""
    plain: list[Served]
    """The twin without regard to that."""
    own: list[Served]
    """The twin at the speed of the run's own steps: what is left is the schedule's error."""


@dataclass
class Result:
    """A load's runs: A and B of each segment."""

    load: Load
    a: list[Run] = field(default_factory=list)
    b: list[Run] = field(default_factory=list)


@dataclass
class Outcome:
    """All that was measured."""

    calibration: Calibration
    profile: Profile
    results: list[Result]
    saturation: dict[str, list[float]]
    """Requests a second: ``real`` and ``twin``, flood by flood."""
    speeds: list[float]
    """All that the yardstick said."""
    stack: tuple[list[stack.Played], list[stack.Played]]
    """The whole stack on the first server: runs A, runs B."""


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
            player = _Player(driven, profile, outside_ns, told)
            rates = player.flood()
            loads = all_loads(float(np.mean(rates["real"])), traces, SEQS)
            results += player.all(loads, "fcfs", rates)
            again = player.flood()
            saturation = {name: [*rates[name], *again[name]] for name in rates}
            speeds += player.speeds
            through = stack.measure(
                driven, profile, float(np.mean(saturation["real"])), player.yardstick, told
            )
        for name in ("priority", "tight"):
            with running(name, folder / name) as driven:
                player = _Player(driven, profile, outside_ns, told)
                results += player.all(loads, name, saturation)
                speeds += player.speeds
    return Outcome(calibration, profile, results, saturation, speeds, through)


class _Player:
    """Plays loads on one server, with a yardstick between any two runs."""

    def __init__(
        self, driven: Driven, profile: Profile, outside_ns: float, told: Callable[[str], None]
    ) -> None:
        self._driven = driven
        header = driven.recording(()).header
        self._twin = Twin(profile, header.settings, outside_ns)
        self._told = told
        self._speed = self.yardstick()
        self.speeds = [self._speed]
        """All that the yardstick has said."""

    def yardstick(self) -> float:
        """How many times as long as the profile says steps take just now."""
        rows = self._driven.play(YARDSTICK)[1]
        return drift(self._twin.cost, self._driven.recording(rows)).ratio

    def pair(self, wants: Sequence[Want], stretch: float = 1.0) -> tuple[Run, Run]:
        """A segment twice in a row, between two looks at the yardstick."""
        before = self._speed
        played = [self._once(wants), self._once(wants)]
        self._speed = self.yardstick()
        self.speeds.append(self._speed)
        speed = (before * self._speed) ** 0.5
        a, b = (self._predicted(seen, own, speed, stretch) for seen, own in played)
        return a, b

    def _once(self, wants: Sequence[Want]) -> tuple[list[Seen], float]:
        self._driven.forget_prefixes()
        seen, rows = self._driven.play(wants)
        return seen, drift(self._twin.cost, self._driven.recording(rows)).ratio

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

    def all(
        self, loads: Sequence[Load], server: ServerName, rates: dict[str, list[float]]
    ) -> list[Result]:
        results = []
        own = float(np.mean(rates["real"]) / np.mean(rates["twin"]))
        for load in loads:
            if load.server != server:
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


# ---- errors ----


@dataclass(frozen=True)
class Row:
    """A metric of a load, in ns: measured by A and B, and predicted."""

    measured: float
    predicted: float
    noise: float
    """Between A and B, per cent."""
    plain_error: float
    """Of the twin without regard to the machine's speed of the moment, per cent."""
    own_error: float
    """Of the twin at the speed of the runs' own steps, per cent."""

    @property
    def error(self) -> float:
        return 100 * abs(self.predicted / self.measured - 1)


def _metrics(
    ttft: Sequence[float], e2e: Sequence[float], tpot: Sequence[float]
) -> dict[str, float]:
    return {
        "e2e_mean": float(np.mean(e2e)),
        "e2e_p99": float(np.percentile(e2e, 99)),
        "ttft_mean": float(np.mean(ttft)),
        "ttft_p99": float(np.percentile(ttft, 99)),
        "tpot_mean": float(np.mean(tpot)),
    }


def seen_metrics(seen: Sequence[Seen]) -> dict[str, float]:
    """Of the real server."""
    return _metrics(
        [each.ttft_ns for each in seen],
        [each.e2e_ns for each in seen],
        [each.tpot_ns for each in seen],
    )


def served_metrics(seen: Sequence[Seen], served: Sequence[Served]) -> dict[str, float]:
    """Of the twin."""
    gaps = [each.want.output_tokens - 1 for each in seen]
    return _metrics(
        [each.ttft_ns for each in served],
        [each.e2e_ns for each in served],
        [(each.last_ns - each.first_ns) / gap for each, gap in zip(served, gaps, strict=True)],
    )


def rows_of(result: Result) -> dict[str, Row]:
    """Each metric of a load."""
    runs = [*result.a, *result.b]
    seen = [each for run in runs for each in run.seen]
    measured = seen_metrics(seen)
    predicted = served_metrics(seen, [each for run in runs for each in run.served])
    plain = served_metrics(seen, [each for run in runs for each in run.plain])
    own = served_metrics(seen, [each for run in runs for each in run.own])
    one = seen_metrics([each for run in result.a for each in run.seen])
    two = seen_metrics([each for run in result.b for each in run.seen])
    pairs = [
        (seen_metrics(a.seen), seen_metrics(b.seen))
        for a, b in zip(result.a, result.b, strict=True)
    ]
    return {
        name: Row(
            measured[name], predicted[name],
            noise_percent(one[name], two[name], [(a[name], b[name]) for a, b in pairs]),
            100 * abs(plain[name] / measured[name] - 1),
            100 * abs(own[name] / measured[name] - 1),
        )
        for name in measured
    }  # fmt: skip


def figures(outcome: Outcome) -> list[Figure]:
    """Every row with its bar; one whose noise is above half of it was not measured."""
    refused = "; the calibration was refused" if outcome.calibration.profile is None else ""
    found = _calibration_figures(outcome)
    for result in outcome.results:
        requests = sum(len(run.seen) for run in (*result.a, *result.b))
        for name, row in rows_of(result).items():
            bar = BARS[name]
            found.append(
                _figure(
                    f"cpu_{result.load.name}_{name}_pct", row.error, row.noise, bar,
                    f"{result.load.what}: {requests} requests, {row.measured / 1e6:.1f} ms"
                    f" measured, {row.predicted / 1e6:.1f} ms predicted; without regard to the"
                    f" machine's speed of the moment {row.plain_error:.1f} % off, at the speed of"
                    f" the runs' own steps {row.own_error:.1f} %{refused}",
                )
            )  # fmt: skip
    real, twin = (np.array(outcome.saturation[name]) for name in ("real", "twin"))
    speed = np.array(outcome.saturation["speed"])
    at_one = real * speed  # as if the machine had been as fast as when it was calibrated
    found.append(
        _figure(
            "cpu_saturation_pct", 100 * abs(float(np.mean(twin) / np.mean(real)) - 1),
            100 * float(np.ptp(at_one) / np.mean(at_one)), 5.0,
            f"{np.mean(real):.2f} requests/s measured, {np.mean(twin):.2f} predicted",
        )
    )  # fmt: skip
    found.append(_counts(outcome, "cpu_preemptions_pct", ("tight",), "preemptions"))
    found.append(_counts(outcome, "cpu_prefix_hits_pct", ("mooncake", "prefixes"), "cached_tokens"))
    return found


def _calibration_figures(outcome: Outcome) -> list[Figure]:
    """Whether the profile is one at all, and how far its level is off.

    The yardstick takes out of the loads' rows whatever is common to all steps: the machine's speed
    of the moment, and an error of the calibration's level. This is where the latter shows.
    """
    speeds = np.array(outcome.speeds)
    level = float(np.exp(np.mean(np.log(speeds))))
    held_out = outcome.calibration.figures["held_out_errors"]["all"]
    return [
        Figure(
            "cpu_calibration_accepted", float(outcome.calibration.profile is not None), "1", "= 1",
            "; ".join(outcome.calibration.refusal) or "the fit was good enough",
        ),
        Figure(
            "cpu_calibration_level_pct", round(100 * abs(level - 1), 2), "%", "<= 5",
            f"steps took {level:.3f} times what the profile says, in {len(speeds)} looks at the"
            f" yardstick over the whole measurement, from {speeds.min():.2f} to"
            f" {speeds.max():.2f}",
        ),
        Figure(
            "cpu_calibration_held_out_bias_pct", round(abs(held_out["bias_percent"]), 2), "%",
            "<= 5",
            f"{held_out['steps']:.0f} held-out steps when it was fitted, in all; each was off by"
            f" {held_out['mean_percent']:.1f} % in the mean",
        ),
    ]  # fmt: skip


def _figure(name: str, error: float, noise: float, bar: float, how: str) -> Figure:
    measured = noise <= bar / 2
    verdict = "" if measured else f"NOT MEASURED (error {error:.1f} %): "
    return Figure(
        name, round(error, 2) if measured else None, "%", f"<= {bar:g}",
        f"{verdict}{how}; noise between two real runs {noise:.1f} %",
    )  # fmt: skip


def _counts(outcome: Outcome, name: str, loads: tuple[str, ...], what: str) -> Figure:
    """The worst of some loads by a count."""
    worst: tuple[float, str] = (-1.0, "")
    loudest = 0.0
    for result in outcome.results:
        if result.load.name not in loads:
            continue
        counted = defaultdict(int)
        for side, runs in (("a", result.a), ("b", result.b)):
            for run in runs:
                counted[side] += sum(getattr(each, what) for each in run.seen)
                counted["twin"] += sum(getattr(each, what) for each in run.served)
        both = counted["a"] + counted["b"]
        if not both:
            raise RuntimeError(f"{result.load.name}: the server counted no {what}")
        error = 100 * abs(counted["twin"] / both - 1)
        noise = 200 * abs(counted["a"] - counted["b"]) / both
        text = f"{result.load.what}: {both} measured, {counted['twin']} predicted"
        worst = max(worst, (error, text))
        loudest = max(loudest, noise)
    return _figure(name, worst[0], loudest, COUNT_BAR, worst[1])


def as_json(outcome: Outcome) -> dict[str, Any]:
    """For plots: each request's measured and predicted times in ms."""
    return {
        result.load.name: {
            "what": result.load.what,
            "speed": [run.speed for run in (*result.a, *result.b)],
            "requests": [
                [
                    *(round(value / 1e6, 3) for value in (
                        each.ttft_ns, played.ttft_ns, each.e2e_ns, played.e2e_ns
                    )),
                    each.want.output_tokens,
                ]
                for run in (*result.a, *result.b)
                for each, played in zip(run.seen, run.served, strict=True)
            ],
        }
        for result in outcome.results
    }  # fmt: skip
