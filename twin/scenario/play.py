"""A whole scenario: every run with every seed, and what that says about its claims."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from policy.files import FileError, nearest
from twin.scenario.expect import judge
from twin.scenario.result import ScenarioResult
from twin.scenario.run import Recordings, run_setup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twin.scenario.files import Scenario
    from twin.scenario.result import RunResult

    Progress = Callable[[str, int], None]


def run_scenario(
    scenario: Scenario,
    *,
    seeds: Sequence[int] = (),
    runs: Sequence[str] = (),
    out: Path | None = None,
    jobs: int = 1,
    progress: Progress = lambda run, seed: None,
) -> ScenarioResult:
    """Play the scenario.

    Args:
        seeds: instead of the scenario's.
        runs: of the scenario's runs, only these; none: all.
        out: folder for decision logs, ``out/RUN/seed-N``; None: they are only hashed.
        jobs: seeds that are played at the same time, each in a process of its own.
        progress: told (run, seed) when that is done.

    Raises:
        FileError, FleetError, FaultError, TraceError: what the scenario names cannot be used.
    """
    for name in runs:
        if name not in scenario.runs:
            raise FileError(
                scenario.where, f"there is no run {name!r}", key="runs",
                hint=nearest(name, scenario.runs),
            )  # fmt: skip
    chosen = [name for name in scenario.runs if not runs or name in runs]
    played = tuple(seeds) or scenario.head.seeds
    by_seed: list[list[RunResult]] = []
    if jobs > 1:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            play = partial(_play_seed, scenario, chosen, out, None)
            for results in pool.map(play, played):
                by_seed.append(results)
                for result in results:
                    progress(result.run, result.seed)
    else:
        by_seed += [_play_seed(scenario, chosen, out, progress, seed) for seed in played]
    columns = zip(*by_seed, strict=True)
    return _judged(scenario, played, dict(zip(chosen, map(list, columns), strict=True)))


def _play_seed(
    scenario: Scenario,
    runs: Sequence[str],
    out: Path | None,
    progress: Progress | None,
    seed: int,
) -> list[RunResult]:
    """All runs with one seed: they share its traffic."""
    results = []
    with TemporaryDirectory(prefix="twinkeel-") as scratch:
        recordings = Recordings(Path(scratch))
        for name in runs:
            folder = None if out is None else out / name / f"seed-{seed}"
            results.append(
                run_setup(
                    scenario.runs[name], seed, run=name, folder=scenario.folder,
                    recordings=recordings, out=folder,
                )
            )  # fmt: skip
            if progress is not None:
                progress(name, seed)
    return results


def _judged(
    scenario: Scenario, seeds: tuple[int, ...], results: dict[str, list[RunResult]]
) -> ScenarioResult:
    head = scenario.head
    figures = {name: [result.figures for result in made] for name, made in results.items()}
    verdicts, skipped = [], []
    for expectation in head.expect:
        if all(run in results for run in expectation.value.runs()):
            verdicts.append(judge(expectation, figures, scenario.where))
        else:
            skipped.append(expectation.name)
    return ScenarioResult(head.name, head.about, head.source, seeds, results, verdicts, skipped)
