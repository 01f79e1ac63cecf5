"""The whole stack: live controller and real vLLM under `stable`, against the twin under the same.

From the recorded arrivals alone the twin replays what passed through the controller. Network and
gateway times are those of a few requests before, when nothing else was under way. A load is played
twice, A and B in turns; what differs between them is the noise.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from policy.cost import StepCost
from policy.files import load_policy
from tests.bench.fidelity.driving import TOKENS
from tests.bench.fidelity.noise import noise_percent
from tests.controller.asking import COMPLETIONS
from tests.controller.processes import Controllers
from tests.controller.recording import Asking, play, world_as_seen
from tests.figures import Figure
from traces import open_trace
from twin.calibrate import write_profile
from twin.engine.steptime import slowed
from twin.fleet import ReplicaSpec, fleet_of
from twin.replay import ReplayOptions, replay
from twin.uncertainty import DrawnSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from policy.cost import Profile
    from tests.bench.fidelity.driving import Driven
    from twin.world import WorldSettings

ROUNDS, ROUND_S = 2, 15.0
LOAD = 0.8
CALM_LOAD, CALM_S = 0.1, 10.0
"""What comes before, for the times of the way."""
CV = 2.0
POLICY = "stable"
FEWEST = 40
"""Requests of a tier that make a row."""
BARS = {"e2e_mean": 5.0, "e2e_p99": 10.0, "wait_mean": 10.0}
WAIT_LEAST_S = 0.02
"""A mean wait shorter than a step of the engine is no queue whose error could be told."""


@dataclass
class Side:
    """What a tier's requests took, in seconds."""

    wait_s: list[float]
    e2e_s: list[float]

    def metrics(self) -> dict[str, float]:
        return {
            "e2e_mean": float(np.mean(self.e2e_s)),
            "e2e_p99": float(np.percentile(self.e2e_s, 99)),
            "wait_mean": float(np.mean(self.wait_s)),
        }


Tiers = dict[str, Side]


@dataclass(frozen=True)
class Played:
    """One run through the controller, and its replay."""

    live: Tiers
    twin: Tiers
    requests: int
    agreed: int
    """Answered here as there, or shed here as there."""
    shed_live: int
    shed_twin: int


def asked(seed: int, rate: float, seconds: float = ROUND_S) -> list[Asking]:
    """Gamma arrivals of three classes and 12 users; lengths as in the loads of the bare server."""
    dice = np.random.default_rng((seed, 17))
    shape = 1 / CV**2
    at_s, found = 0.2, []
    while (at_s := at_s + float(dice.gamma(shape, 1 / (rate * shape)))) < seconds:
        tokens = int(np.clip(dice.lognormal(4.6, 0.7), 16, 512))
        document = {
            "model": "tiny",
            "prompt": dice.integers(*TOKENS, tokens).tolist(),
            "max_tokens": int(np.clip(dice.lognormal(3.35, 0.6), 8, 96)),
            "ignore_eos": True,
            "stream": True,
            "user": f"user{dice.integers(12)}",
        }
        sla = str(dice.choice(("P0", "P1", "P2"), p=(0.4, 0.4, 0.2)))
        found.append(Asking(at_s, document, {"x-twinkeel-sla": sla}, COMPLETIONS))
    return found


def measure(
    driven: Driven, profile: Profile, saturation: float, yardstick: Callable[[], float],
    told: Callable[[str], None],
) -> tuple[list[Played], list[Played]]:  # fmt: skip
    """Runs A and runs B, each through a controller of its own.

    Args:
        saturation: requests a second that the bare server can do.
        yardstick: how many times as long as ``profile`` says steps take just now.
    """
    a: list[Played] = []
    b: list[Played] = []
    with TemporaryDirectory(prefix="twinkeel-stack-") as scratch:
        path = Path(scratch) / "profile.yaml"
        write_profile(profile, path)
        upstream = {"url": driven.server.url, "profile": str(path)}

        def passed(name: str, requests: list[Asking]) -> Path:
            """Through a controller of its own; the trace that it recorded."""
            controllers = Controllers(Path(scratch) / name)
            try:
                controller = controllers([upstream], policy=POLICY)
                answers = asyncio.run(play(controller.url, requests))
                controller.stop()
            finally:
                controllers.close()
            if wrong := {each.status for each in answers} - {200, 429}:
                raise RuntimeError(f"the controller answered {sorted(wrong)}")
            return controller.data / "trace" / "trace.parquet"

        calm = passed("calm", asked(99, saturation * CALM_LOAD, CALM_S))
        world = world_as_seen(pq.read_table(calm).to_pydict(), profile)
        speed = yardstick()
        for number in range(ROUNDS):
            for side, runs in (("a", a), ("b", b)):
                name = f"{side}{number}"
                trace = passed(name, asked(number, saturation * LOAD))
                before, speed = speed, yardstick()
                predicted = _replayed(trace, path, (before * speed) ** 0.5, world)
                runs.append(_compared(pq.read_table(trace).to_pydict(), predicted))
                told(f"stack {name}: {_text(runs[-1])}")
    return a, b


def _replayed(trace: Path, profile: Path, speed: float, world: WorldSettings) -> dict[str, Any]:
    """What the twin makes of the recorded arrivals, by column."""
    (spec,) = fleet_of([(str(profile), 1)])
    factor = Fraction(speed).limit_denominator(10_000)
    # The policy is told the profile, as the live controller's is; the machine takes what it takes.
    fields = {name: getattr(spec, name) for name in ReplicaSpec.__dataclass_fields__}
    cost = slowed(StepCost.from_profile(spec.profile), factor, Fraction(1))
    fleet: list[ReplicaSpec] = [DrawnSpec(**{**fields, "cost": cost, "told": spec})]
    with TemporaryDirectory(prefix="twinkeel-stack-twin-") as folder:
        out = Path(folder) / "twin"
        options = ReplayOptions(world=world)
        replay(open_trace(trace), fleet, load_policy(POLICY), options, out=out)
        rows: dict[str, Any] = pq.read_table(out / "requests.parquet").to_pydict()
    return rows


def _compared(live: dict[str, Any], twin: dict[str, Any]) -> Played:
    """Times of the requests that were answered on both sides, by the live tier; who was answered
    at all is compared on its own."""
    assert live["request_id"] == twin["request_id"]
    outcomes = list(zip(live["outcome"], twin["outcome"], strict=True))
    here: Tiers = defaultdict(lambda: Side([], []))
    there: Tiers = defaultdict(lambda: Side([], []))
    for number, tier in enumerate(live["tier"]):
        if tier is None or outcomes[number] != ("answered", "answered"):
            continue
        for rows, tiers in ((live, here), (twin, there)):
            tiers[tier].wait_s.append(rows["queue_s"][number] or 0.0)
            tiers[tier].e2e_s.append(rows["e2e_s"][number])
    return Played(
        dict(here), dict(there), len(outcomes), sum(a == b for a, b in outcomes),
        live["outcome"].count("shed"), twin["outcome"].count("shed"),
    )  # fmt: skip


def _text(played: Played) -> str:
    parts = {
        tier: {
            name: f"{1e3 * value:.0f}/{1e3 * played.twin[tier].metrics()[name]:.0f}"
            for name, value in side.metrics().items()
        }
        for tier, side in played.live.items()
        if tier in played.twin
    }
    shed = f"shed {played.shed_live}/{played.shed_twin} of {played.requests}"
    return f"{shed}; ms live/twin {json.dumps(parts)}"


def _pooled(runs: list[Played], which: str) -> Tiers:
    found: Tiers = defaultdict(lambda: Side([], []))
    for run in runs:
        for tier, side in getattr(run, which).items():
            found[tier].wait_s += side.wait_s
            found[tier].e2e_s += side.e2e_s
    return dict(found)


def figures(a: list[Played], b: list[Played]) -> list[Figure]:
    """By tier; the worst e2e mean is the one with a bar of its own."""
    live, twin = _pooled([*a, *b], "live"), _pooled([*a, *b], "twin")
    one, two = _pooled(a, "live"), _pooled(b, "live")
    shed = sum(run.shed_live for run in (*a, *b)), sum(run.shed_twin for run in (*a, *b))
    asked_for = sum(run.requests for run in (*a, *b))
    found: list[Figure] = []
    worst: list[tuple[float, bool, str]] = []
    for tier, side in sorted(live.items()):
        if len(side.e2e_s) < FEWEST or not all(tier in each for each in (one, two)):
            continue
        here, there = side.metrics(), twin[tier].metrics()
        first, second = one[tier].metrics(), two[tier].metrics()
        for name, bar in BARS.items():
            if name == "wait_mean" and here[name] < WAIT_LEAST_S:
                continue
            error = 100 * abs(there[name] / here[name] - 1)
            segments = [
                (x.live[tier].metrics()[name], y.live[tier].metrics()[name])
                for x, y in zip(a, b, strict=True)
                if tier in x.live and tier in y.live
            ]
            noise = noise_percent(first[name], second[name], segments)
            measured = noise <= bar / 2
            how = (
                f"tier {tier}, {len(side.e2e_s)} requests: {1e3 * here[name]:.0f} ms measured,"
                f" {1e3 * there[name]:.0f} ms predicted; noise {noise:.1f} %"
            )
            if not measured:
                how = f"NOT MEASURED (error {error:.1f} %): {how}"
            found.append(
                Figure(
                    f"stack_{tier}_{name}_pct", round(error, 2) if measured else None, "%",
                    f"<= {bar:g}", how,
                )
            )  # fmt: skip
            if name == "e2e_mean":
                worst.append((error, measured, how))
    error, _, how = max(worst)
    everything = all(measured for _, measured, _ in worst)
    found.append(
        Figure(
            "stack_outcome_agree_pct",
            round(100 * sum(run.agreed for run in (*a, *b)) / asked_for, 2), "%", ">= 95",
            f"answered or shed in the twin as live, {asked_for} requests",
        )
    )  # fmt: skip
    found.append(
        Figure(
            "stack_worst_e2e_mean_pct", round(error, 2) if everything else None, "%", "<= 5",
            f"{how}; {asked_for} requests, shed {shed[0]} live and {shed[1]} in the twin",
        )
    )  # fmt: skip
    return found
