"""From real runs and the twin's to rows with a bar: errors, noise, and whether they hold."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench.fidelity.noise import noise_percent
from tests.figures import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.cost import Profile
    from tests.bench.fidelity.driving import Seen
    from tests.bench.fidelity.loads import Load
    from tests.bench.fidelity.stack import Played
    from twin.alone import Served
    from twin.calibrate import Calibration

BARS = {
    "e2e_mean": 5.0, "e2e_p99": 10.0, "ttft_mean": 10.0, "ttft_p99": 15.0, "tpot_mean": 5.0,
}  # fmt: skip
COUNT_BAR = 5.0


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
    """The twin at the speed of the run's own steps: what is left is the schedule's error. Where
    those cannot be compared, at ``speed``."""


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
    stack: tuple[list[Played], list[Played]]
    """The whole stack on the first server: runs A, runs B."""


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
