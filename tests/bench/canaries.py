"""How canaries end, over many runs in the twin: `python -m tests.bench.canaries --runs 500`.

`aa`: the candidate is the live policy under another name, compared for the whole ten hours.
`bad5x`, `bad20x`: it misses about five and twenty times as often (`--ratio` measures how often).
Runs are kept in `build/canaries/KIND.jsonl`: what was played is not played again.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from policy.deployment import DeploymentPlan
from policy.files import load_policy
from tests.figures import Figure, show
from twin.canaries import Ground, miss_share, play_many
from twin.figures.bounds import upper_share

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.parameters import Parameters
    from twin.canaries import Played

HERE = Path(__file__).parent
OUT = Path("build/canaries")
KINDS = ("aa", "bad5x", "bad20x")
RUNS = 500


def candidate(kind: str) -> Parameters:
    """The policy that is tried."""
    if kind == "aa":
        return msgspec.structs.replace(load_policy("stable"), name="stable-again")
    return load_policy(HERE / f"canary-{kind}.yaml")


def plan_of(kind: str, ground: Ground) -> DeploymentPlan:
    """The usual plan; equal policies are compared to the end."""
    plan = DeploymentPlan()
    if kind != "aa":
        return plan
    *before, last, _ = plan.stages
    longest = msgspec.structs.replace(last, least_s=round(ground.hours * 3600))
    return msgspec.structs.replace(plan, stages=(*before, longest))


def play_kind(kind: str, runs: int, jobs: int = 2, out: Path = OUT) -> list[Played]:
    """All runs of a kind, with a progress bar."""
    ground = Ground()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(kind, total=runs)
        return play_many(
            load_policy("stable"), candidate(kind), plan_of(kind, ground), ground, range(runs),
            out=out / f"{kind}.jsonl", jobs=jobs, progress=lambda played: progress.advance(task),
        )  # fmt: skip


def quantile(values: Sequence[float], share: float) -> float:
    """By nearest rank from above, so that no quantile is flattered."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def hurt(played: Played) -> float:
    """Requests that the candidate hurt: all that missed once it served everyone, too."""
    return played.hurt + played.alone_misses


def figures_of(runs: dict[str, list[Played]]) -> list[Figure]:
    """The figures that the kinds played allow."""
    figures = []
    if played := runs.get("aa"):
        wrong, count = sum(run.rolled_back for run in played), len(played)
        low = 1 - (upper_share(count - wrong, count) or 0)
        high = upper_share(wrong, count) or 0
        how = f"{wrong} of {count} runs of 10 h; exact 90 % interval {low:.2%} to {high:.2%}"
        figures.append(Figure("aa_false_rollback_pct", 100 * wrong / count, "%", "<= 1", how))
    if played := runs.get("bad5x"):
        value = quantile([hurt(run) for run in played], 0.95)
        raw = quantile([run.raw_misses for run in played], 0.95)
        how = f"{len(played)} runs; misses beyond the live policy's own (all misses: {raw:g})"
        figures.append(Figure("bad5x_hurt_p95", value, "requests", "<= 25", how))
    if bad := [run for kind in KINDS[1:] for run in runs.get(kind, [])]:
        value = max(hurt(run) for run in bad)
        raw = max(run.raw_misses for run in bad)
        played_kinds = " and ".join(kind for kind in KINDS[1:] if runs.get(kind))
        how = f"{len(bad)} runs of {played_kinds} (all misses: {raw})"
        figures.append(Figure("bad_hurt_max", value, "requests", "<= 50", how))
    return figures


def show_runs(runs: dict[str, list[Played]]) -> None:
    """One line for each kind."""
    table = Table(
        "kind", "runs", "rolled back", "under way", "hurt p50", "p95", "most", "misses p95",
        "hours p50", "p95", "last decision s",
    )  # fmt: skip
    for kind, played in runs.items():
        back = [run for run in played if run.rolled_back]
        hurts, misses = [hurt(run) for run in played], [run.raw_misses for run in played]
        hours = [run.after_s / 3600 for run in back]
        cells = [
            len(played), len(back), sum(not run.ended for run in played), quantile(hurts, 0.5),
            quantile(hurts, 0.95), max(hurts), quantile(misses, 0.95),
            quantile(hours, 0.5) if hours else 0, quantile(hours, 0.95) if hours else 0,
            max(run.lateness_s for run in played),
        ]  # fmt: skip
        table.add_row(kind, *(f"{cell:.4g}" for cell in cells))
    Console().print(table)
    for kind, played in runs.items():
        for run in played:
            if run.rolled_back and kind == "aa":
                print(f"{kind} {run.seed}: {run.ended}")


def measured_ratio(kind: str, runs: int, jobs: int = 2) -> tuple[float, float]:
    """(share of requests that miss under the live policy, how many times that the bad one's is):
    each serves everyone, on the same traffic."""
    live = load_policy("stable")
    shares = []
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for rules in (live, candidate(kind)):
            pairs = list(pool.map(partial(_share, rules, live), range(runs)))
            shares.append(sum(misses for _, misses in pairs) / sum(count for count, _ in pairs))
    return shares[0], shares[1] / shares[0]


def _share(rules: Parameters, live: Parameters, seed: int) -> tuple[int, int]:
    return miss_share(rules, live, Ground(), seed)


def main(arguments: list[str]) -> int:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--ratio", action="store_true", help="how often the bad ones miss")
    given = parser.parse_args(arguments)
    kinds = given.kind or list(KINDS)
    if given.ratio:
        for kind in kinds[kinds[0] == "aa" :]:
            share, ratio = measured_ratio(kind, given.runs, given.jobs)
            print(f"{kind}: {ratio:.2f} times the live policy's {share:.2%}")
        return 0
    runs = {kind: play_kind(kind, given.runs, given.jobs) for kind in kinds}
    show_runs(runs)
    figures = figures_of(runs)
    show(figures)
    return int(not all(figure.holds for figure in figures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
