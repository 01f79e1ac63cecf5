"""Chains whose processes are killed, and chains whose steps take longer than they should.

python -m tests.bench.answers.steps [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from controller.chains import Chain
from policy.parameters.chains import Plan
from policy.parameters.chains import Step as Planned
from tests.chains.killing import STEPS, Killer
from tests.figures import Figure, show, write_figures
from tests.redis_server import redis_server

if TYPE_CHECKING:
    from collections.abc import Iterator

BUDGET_MS = 1000
BESIDE = 4
"""Chains under way at one time."""
SEED = 20_260_801


@contextmanager
def stores(folder: Path) -> Iterator[list[str]]:
    """Both kinds."""
    with redis_server() as server:
        yield [str(folder / "killed.sqlite"), server.url]


def killed(quick: bool) -> Figure:
    """Finished steps that ran again, over all kills."""
    kills = chains = again = 0
    twice: list[str] = []
    points: set[str] = set()
    with tempfile.TemporaryDirectory(prefix="twinkeel-steps-") as name, stores(Path(name)) as both:
        for where in both:
            for manner in ("sync", "async"):
                killer = Killer(where, Path(name), manner)
                killer.at_every_point()
                killer.at_random(15 if quick else 60, SEED, within_s=0.04)
                kills += killer.tally.kills
                chains += killer.tally.chains
                again += killer.tally.again
                twice += killer.tally.twice
                points |= killer.tally.points
    print(
        f"{kills} kills of {chains} chains at {len(points)} kinds of points; {again} steps ran"
        " again since they were killed before they were finished"
    )
    return Figure(
        "twice_run_steps",
        len(twice),
        "1",
        "= 0",
        f"finished steps that ran again: {kills} kill -9 of {chains} chains, at every point around"
        " and in every commit and at random instants; SQLite and Redis, blocking and async",
    )


def within_budget(quick: bool) -> Figure:
    """Chains whose steps overrun at random: how many ended in time, and what they gave."""
    generator = random.Random(SEED)  # noqa: S311 - how long steps take, no secret
    plan = Plan(
        budget_ms=BUDGET_MS, steps=tuple(Planned(name, part) for name, part in STEPS.items())
    )
    count = 40 if quick else 200
    waits = [[_wait_s(generator, plan, n) for n in range(len(STEPS))] for _ in range(count)]
    folder = tempfile.TemporaryDirectory(prefix="twinkeel-budget-")
    with folder as name, Chain(plan, store=Path(name) / "budget.sqlite") as chain:
        with ThreadPoolExecutor(BESIDE) as pool:
            ended = list(pool.map(partial(_blocking, chain), waits[::2]))
        ended += asyncio.run(_on_a_loop(chain, waits[1::2]))
    cut = sum(is_partial for _, is_partial in ended)
    assert 0 < cut < count, f"{cut} of {count} chains overran: some were to, and some were not"
    in_time = sum(took_ms <= BUDGET_MS for took_ms, _ in ended)
    return Figure(
        "chain_within_budget_pct",
        100 * in_time / count,
        "%",
        ">= 99",
        f"{count} chains of {BUDGET_MS} ms whose steps overrun at random, {BESIDE} at a time; {cut}"
        f" of them ended as partial; the slowest took {max(ended)[0]:.0f} ms",
    )


def _wait_s(generator: random.Random, plan: Plan, place: int) -> float:
    """Mostly less than the step's part of the budget, sometimes several times as much."""
    part_s = plan.steps[place].weight / sum(step.weight for step in plan.steps) * BUDGET_MS / 1e3
    return part_s * (generator.uniform(2, 6) if generator.random() < 0.15 else generator.random())


def _blocking(chain: Chain, waits: list[float]) -> tuple[float, bool]:
    """How long it took, in ms, and whether it was cut short."""
    began_ns = time.monotonic_ns()
    with chain.run(f"c{began_ns}") as run:
        for step, wait_s in zip(STEPS, waits, strict=True):
            run.do(step, time.sleep, wait_s)
    return (time.monotonic_ns() - began_ns) / 1e6, run.result().partial


async def _on_a_loop(chain: Chain, every: list[list[float]]) -> list[tuple[float, bool]]:
    async def one(waits: list[float]) -> tuple[float, bool]:
        async with beside:
            began_ns = time.monotonic_ns()
            async with chain.arun(f"c{began_ns}") as run:
                for step, wait_s in zip(STEPS, waits, strict=True):
                    await run.do(step, asyncio.sleep, wait_s)
            return (time.monotonic_ns() - began_ns) / 1e6, run.result().partial

    beside = asyncio.Semaphore(BESIDE)
    return await asyncio.gather(*(one(waits) for waits in every))


def measure(quick: bool = False) -> list[Figure]:
    """All figures of this part."""
    return [killed(quick), within_budget(quick)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("build/figures/answers-steps.json"))
    given = parser.parse_args()
    figures = measure(given.quick)
    write_figures(given.out, figures)
    show(figures)


if __name__ == "__main__":
    main()
