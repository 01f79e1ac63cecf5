"""A small trace whose policies differ, and tunings of it."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

from policy.files import load_policy
from traces.generate import generate_trace, parse_spec
from twin.fleet import fleet_of
from twin.tune.objectives import goals_of
from twin.tune.space import Space, parse_space
from twin.tune.study import Settings
from twin.tune.tuning import Plan
from twin.tune.work import Order, TraceWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.parameters import Parameters
    from twin.tune.work import Played

SPEC = """
schema: 1
seed: {seed}
duration_s: 25
streams:
  - name: search
    business_line: search
    sla_class: P0
    model: qwen3-8b
    endpoint: completions
    arrivals: {{law: poisson, rate_rps: 9.0}}
    prompt_tokens: {{fixed: 400}}
    output_tokens: {{fixed: 8}}
    users: {{count: 300, zipf: 0.9}}
  - name: summary
    business_line: reports
    sla_class: P2
    model: qwen3-8b
    endpoint: chat
    arrivals: {{law: poisson, rate_rps: 9.0}}
    prompt_tokens: {{fixed: 6000}}
    output_tokens: {{fixed: 40}}
    users: {{count: 60, zipf: 1.1}}
"""
"""More than one replica can serve in time where all of it is sent to the engine at once."""
GRID: dict[str, Any] = {
    "inflight.sequences_permille": [12, 40, 1020],
    "inflight.prefill_steps_milli": [100, 1000],
    "shedding.enabled": [True, False],
}
OBJECTIVES = ("goodput", "p0_ttft_p95_s", "batch_tokens_per_s")
STABLE = load_policy("stable")


@cache
def small_trace(seed: int = 7) -> str:
    """Some 400 requests of 25 s."""
    path = Path(mkdtemp(prefix="twinkeel-test-")) / f"small-{seed}.parquet"
    generate_trace(parse_spec(SPEC.format(seed=seed), "small"), path)
    return str(path)


def work(seed: int = 7) -> TraceWork:
    return TraceWork(small_trace(seed), fleet_of([("h100-sxm/qwen3-8b", 1)]))


def space_of(keys: dict[str, Any], parent: Parameters = STABLE) -> Space:
    return parse_space({"schema": 1, "space": keys}, "space.yaml", parent)


def plan_of(
    folder: Path, space: Space, trials: int, objectives: Sequence[str] = (),
    constraints: Sequence[str] = (), **more: Any,
) -> Plan:  # fmt: skip
    goals = goals_of(objectives, constraints, trace=True)
    storage = more.pop("storage", f"sqlite:///{folder / 'study.db'}")
    settings = Settings(trials, **{key: more.pop(key) for key in ("rungs", "seed") if key in more})
    return Plan(
        space, goals, work(), (work(8),), settings, storage,
        **{"seeds": 1, "held_seeds": 1, **more},
    )  # fmt: skip


@cache
def exhaustive() -> dict[tuple[Any, ...], Played]:
    """Every policy of the grid, played in full."""
    space = space_of(GRID)
    names = (*OBJECTIVES, "slo_attainment.P2", "shed_share")
    play = work().ready(goals_of(names, (), trace=True))
    keys = [knob.key for knob in space.knobs]
    points = product(*(knob.values() or () for knob in space.knobs))
    return {
        point: play(Order(0, space.policy(dict(zip(keys, point, strict=True)))))
        for point in points
    }  # fmt: skip
