"""What tuning takes and what it gains: run it with ``python -m tests.bench.tuning``.

A mixed trace of some 20,000 requests is generated (``tuning.yaml``), and two more with other seeds
that nothing is tuned on. Tuned are a policy whose thresholds are wrong in every way, and the
shipped ``stable``; all policies are then measured on the same held-out traces.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from policy.files import load_policy, policy_names
from tests.figures import Figure, show, write_figures
from traces.generate import generate_trace, load_spec
from twin.fleet import fleet_of
from twin.tune.confirm import held_seeds
from twin.tune.objectives import goals_of
from twin.tune.output import result
from twin.tune.space import load_space
from twin.tune.study import Settings
from twin.tune.tuning import Plan, engine_of, tune
from twin.tune.work import Order, TraceWork

if TYPE_CHECKING:
    from policy.parameters import Parameters
    from twin.tune.tuning import Tuned

HERE = Path(__file__).parent
TRIALS, JOBS, REPLICAS = 200, 2, 2
HELD_SEEDS = (20271, 20272)
"""Of the traces that nothing is tuned on."""


def trace_work(folder: Path, seed: int | None = None) -> TraceWork:
    """The mixed trace, or the same load drawn anew."""
    spec = load_spec(HERE / "tuning.yaml")
    if seed is not None:
        spec = msgspec.structs.replace(spec, seed=seed)
    path = folder / f"mixed-{spec.seed}.parquet"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        generate_trace(spec, path)
    return TraceWork(str(path), fleet_of([("h100-sxm/qwen3-8b", REPLICAS)]))


def plan_of(folder: Path, name: str, parent: Parameters, trials: int) -> Plan:
    """A tuning that begins anew."""
    study = folder / f"{name}.db"
    study.unlink(missing_ok=True)
    return Plan(
        load_space(HERE / "tuning-space.yaml", parent),
        goals_of(("goodput",), (), trace=True),
        trace_work(folder),
        tuple(trace_work(folder, seed) for seed in HELD_SEEDS),
        Settings(trials, seed=1),
        f"sqlite:///{study}",
        jobs=JOBS,
    )


def tuning_figures(folder: Path = Path("build/tuning"), trials: int = TRIALS) -> list[Figure]:
    """All three; ``folder`` gets the traces, the studies and ``stable-tuned.json``, the verdict on
    the tuned ``stable`` with its interval."""
    bad = plan_of(folder, "bad", load_policy(HERE / "tuning-bad.yaml"), trials)
    began_s = time.perf_counter()
    from_bad = tune(bad)
    took_s = time.perf_counter() - began_s
    good = plan_of(folder, "stable", load_policy("stable"), trials)
    from_good = tune(good)
    return [
        Figure(
            "tune_200_trials_s", took_s * TRIALS / trials, "s", "<= 300",
            f"{bad.work.text()}, {JOBS} processes: trials, last round and confirmation",
        ),
        _recovered(bad, from_bad, from_good),
        _reported(folder, from_good),
    ]  # fmt: skip


def _recovered(plan: Plan, from_bad: Tuned, from_good: Tuned) -> Figure:
    known = {name: load_policy(name) for name in policy_names()}
    known["tuned from stable"] = from_good.best
    values = {name: goodput(plan, policy) for name, policy in known.items()}
    best = max(values, key=values.__getitem__)
    own = goodput(plan, from_bad.best)
    shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    return Figure(
        "tuned_goodput_vs_best_pct", own / values[best] * 100, "%", ">= 95",
        f"tuned from bad thresholds ({goodput(plan, plan.space.parent):.4g}/s): {own:.4g}/s on "
        f"held-out traces; {shown}",
    )  # fmt: skip


def goodput(plan: Plan, policy: Parameters) -> float:
    """On the held-out traces with the seeds of the confirmation: requests a second, the mean."""
    found = []
    for work in plan.held_out:
        engine = engine_of(plan, work)
        try:
            seeds = held_seeds(work, plan.held_seeds)
            for seed in seeds:
                engine.submit(Order(0, policy, seed))
            found += [engine.next()[1].values["goodput"] for _ in seeds]
        finally:
            engine.close()
    return float(np.mean(found))


def _reported(folder: Path, tuned: Tuned) -> Figure:
    """Stated either way, with its interval; where nothing better was found, that is stated."""
    stated = result(tuned)
    path = folder / "stable-tuned.json"
    path.write_text(json.dumps(stated, indent=1) + "\n", encoding="utf-8")
    figures = stated.get("figures", {})
    known = tuned.verdict is None or figures["goodput"]["gain_low"] is not None
    return Figure(
        "heldout_gain_reported", float(known), "1", "= 1", f"{path.name}: {stated['why']}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--out", type=Path, default=Path("build/tuning/figures.json"))
    given = parser.parse_args()
    measured = tuning_figures(trials=given.trials)
    write_figures(given.out, measured)
    show(measured)
