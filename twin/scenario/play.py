"""A whole scenario: every run with every seed, and what that says about its claims."""

from __future__ import annotations

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

    Progress = Callable[[str, int, int], None]


def run_scenario(
    scenario: Scenario,
    *,
    seeds: Sequence[int] = (),
    runs: Sequence[str] = (),
    out: Path | None = None,
    progress: Progress = lambda run, seed, requests: None,
) -> ScenarioResult:
    """Play the scenario.

    Args:
        seeds: instead of the scenario's.
        runs: of the scenario's runs, only these; none: all.
        out: folder for decision logs, ``out/RUN/seed-N``; None: they are only hashed.
        progress: told (run, seed, requests settled since it was last told).

    Raises:
        FileError, FleetError, FaultError, TraceError: what the scenario names cannot be used.
    """
    for name in runs:
        if name not in scenario.runs:
            raise FileError(
                scenario.where, f"there is no run {name!r}", key="runs",
                hint=nearest(name, scenario.runs),
            )  # fmt: skip
    chosen = {name: setup for name, setup in scenario.runs.items() if not runs or name in runs}
    played_seeds = tuple(seeds) or scenario.head.seeds
    results: dict[str, list[RunResult]] = {name: [] for name in chosen}
    for seed in played_seeds:
        with TemporaryDirectory(prefix="twinkeel-") as scratch:
            recordings = Recordings(Path(scratch))
            for name, setup in chosen.items():
                results[name].append(
                    run_setup(
                        setup,
                        seed,
                        run=name,
                        folder=scenario.folder,
                        recordings=recordings,
                        out=None if out is None else out / name / f"seed-{seed}",
                        progress=lambda requests, name=name, seed=seed: progress(  # type: ignore[misc]
                            name, seed, requests
                        ),
                    )
                )
    return _judged(scenario, played_seeds, results)


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
