"""What came of a scenario: figures by run and seed, their medians, and the verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twin.scenario.expect import Verdict


@dataclass(frozen=True, slots=True)
class RunResult:
    """One run with one seed."""

    run: str
    seed: int
    figures: dict[str, Any]
    log_hash: str
    wall_s: float


@dataclass(frozen=True, slots=True)
class ScenarioResult:
    """All runs and seeds of a scenario."""

    name: str
    about: str
    source: str
    seeds: tuple[int, ...]
    runs: dict[str, list[RunResult]]
    """By name, seeds in order."""
    verdicts: list[Verdict]
    skipped: list[str]
    """Expectations about runs that were left out."""

    @property
    def holds(self) -> bool:
        return all(verdict.holds for verdict in self.verdicts)

    def summary(self, run: str) -> dict[str, list[float]]:
        """(median, least, greatest) over the seeds of each figure that all seeds have."""
        return spans([result.figures for result in self.runs[run]])

    def plain(self) -> dict[str, Any]:
        """As values for JSON."""
        return {
            "schema": 1,
            "scenario": self.name,
            "about": self.about,
            "source": self.source,
            "seeds": list(self.seeds),
            "holds": self.holds,
            "expect": [verdict.plain() for verdict in self.verdicts],
            "skipped": self.skipped,
            "runs": {
                run: {
                    "median_least_greatest": self.summary(run),
                    "by_seed": [
                        {
                            "seed": result.seed,
                            "log_hash": result.log_hash,
                            "wall_s": result.wall_s,
                            "figures": result.figures,
                        }
                        for result in results
                    ],
                }
                for run, results in self.runs.items()
            },
        }


def spans(trees: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """(median, least, greatest) of each number that stands at the same path in all trees."""
    tables = [dict(_leaves(tree, "")) for tree in trees]
    out = {}
    for path in tables[0]:
        if all(path in table for table in tables):
            values = [table[path] for table in tables]
            out[path] = [median(values), min(values), max(values)]
    return out


def _leaves(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{key}", value
