"""What the notebooks share: how much is run, figures with their intervals, and where they go.

``TWINKEEL_NOTEBOOKS=fast`` runs little of everything, to see that a notebook works: its figures are
then no evidence, are marked so, and replace nothing. Without it everything is run as it is claimed.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from inspect import iscoroutine
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from IPython.display import Markdown, display

from tests.figures import Figure
from twin.scenario.files import parse_scenario, read_document, scenario_path
from twin.scenario.merge import merged
from twin.scenario.play import run_scenario

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from matplotlib.axes import Axes

    from policy.log import Record
    from twin.scenario.result import ScenarioResult

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "notebooks"
CHARTS = ROOT / "docs" / "figures"
FAST = os.environ.get("TWINKEEL_NOTEBOOKS", "full") == "fast"
LONG = os.environ.get("TWINKEEL_NOTEBOOKS", "full") == "long"
"""Hours of it, too."""


@dataclass
class Claim:
    """A notebook's claim, and what was measured of it. ``name`` is the notebook's file name."""

    name: str
    figures: list[Figure] = field(default_factory=list)

    def scenario(
        self,
        name: str,
        *,
        seeds: Sequence[int] = (),
        runs: Sequence[str] = (),
        changed: Mapping[str, Any] | None = None,
        fast: Mapping[str, Any] | None = None,
        logs: Path | None = None,
    ) -> ScenarioResult:
        """Play a shipped scenario with all its seeds; what it expects becomes figures.

        Args:
            seeds: instead of its own.
            runs: of its runs, only these.
            changed: what is changed in the scenario's file, such as runs that are added to it.
            fast: what else is changed where only little is to be run, such as
                ``{"duration_s": 60}``; one seed is played then.
            logs: keep the decision logs there, in ``RUN/seed-N``.
        """
        path = scenario_path(name)
        raw = merged(read_document(path), dict(changed or {}), str(path))
        if FAST:
            raw, seeds = merged(raw, dict(fast or {}), str(path)), tuple(raw["seeds"][:1])
        scenario = parse_scenario(raw, str(path), path.parent)
        jobs = 1 if FAST else 2
        result = run_scenario(scenario, seeds=seeds, runs=runs, out=logs, jobs=jobs)
        for verdict in result.verdicts:
            expectation = verdict.expectation
            spread = ""
            if len(result.seeds) > 1 and verdict.low is not None and verdict.high is not None:
                spread = f"{len(result.seeds)} seeds: {verdict.low:.4g} to {verdict.high:.4g}"
            how = "; ".join(filter(None, (expectation.how.strip(), spread, f"scenario {name}")))
            for suffix, goal in _goals(expectation.goal):
                name_all = expectation.name + suffix
                self.add(name_all, verdict.value, expectation.unit or "1", goal, how)
        return result

    def add(self, name: str, value: float | None, unit: str, goal: str, how: str) -> None:
        """One more figure."""
        self.figures.append(Figure(name, value, unit, goal, how))

    def add_runs(self, name: str, values: Sequence[float], unit: str, goal: str, how: str) -> None:
        """One more figure: the median of several runs, with the least and the greatest in words."""
        spread = f"{len(values)} runs: {min(values):.4g} to {max(values):.4g}"
        told = f"{how}; {spread}" if len(values) > 1 else how
        self.add(name, median(values), unit, goal, told)

    def last(self, target: str, begins: str | tuple[str, ...] = "") -> None:
        """Show what ``make TARGET`` measured last, of the figures whose names begin so."""
        found = [one for name, one in measured(target).items() if name.startswith(begins)]
        made = f"test-{target}" if target in ("live", "ui") else target
        if not found:
            text = f"*`make {made}` has not been run here, so there is nothing to show of it.*"
            display(Markdown(text))
            return
        columns = (f"`make {made}`, last run", "value", "goal", "")
        self.table(columns, [_told(one) for one in found])

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Show some figures that have no goal."""
        lines = [columns, ["---"] * len(columns), *rows]
        display(Markdown("\n".join("| " + " | ".join(map(_cell, row)) + " |" for row in lines)))

    def show(self) -> None:
        """Show what was measured, and keep it in ``build/notebooks``."""
        self.table(
            ("figure", "value", "goal", "", "how"),
            [
                (
                    figure.name,
                    "not measured" if figure.value is None else f"{figure.value:.4g} {figure.unit}",
                    figure.goal, "holds" if figure.holds else "MISSED", figure.how,
                )
                for figure in self.figures
            ],
        )  # fmt: skip
        if FAST:
            display(Markdown("*Run with fast settings: these figures are no evidence.*"))
        OUT.mkdir(parents=True, exist_ok=True)
        rows = [{**asdict(figure), "holds": figure.holds} for figure in self.figures]
        text = json.dumps({"name": self.name, "fast": FAST, "figures": rows}, indent=2)
        (OUT / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")

    def chart(self, draw: Callable[[Axes], object], *, height_in: float = 3.2) -> None:
        """Draw one chart; with everything run, it is also kept under ``docs/figures``."""
        import matplotlib.pyplot as plt

        plt.rcParams.update({"svg.hashsalt": "twinkeel", "svg.fonttype": "none"})
        figure, axes = plt.subplots(figsize=(7.0, height_in), layout="constrained")
        draw(axes)
        axes.spines[["top", "right"]].set_visible(False)
        if not FAST:
            CHARTS.mkdir(parents=True, exist_ok=True)
            path = CHARTS / f"claim-{self.name}.svg"
            figure.savefig(path, metadata={"Date": None})
        plt.show()


def apart(function: Callable[..., Any], *arguments: object) -> Any:
    """What a function gives in a process of its own, without what it prints. A coroutine is run to
    its end there, as the measuring targets do: a notebook's own loop is under way."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_call, function, arguments).result()


def _call(function: Callable[..., Any], arguments: Sequence[object]) -> Any:
    import uvloop

    with redirect_stdout(StringIO()):
        given = function(*arguments)
        return uvloop.run(given) if iscoroutine(given) else given


def measured(target: str) -> dict[str, Figure]:
    """What ``make TARGET`` measured last, by name; empty where it never ran here."""
    from tests.figures import read_figures

    return {one.name: one for one in read_figures(ROOT / "build" / "figures" / f"{target}.json")}


def records(folder: Path) -> Iterator[Record]:
    """What stands in a decision log, in order."""
    from policy.log import read_segment

    paths = folder.glob("decisions.*.log")
    for path in sorted(paths, key=lambda path: int(path.suffixes[0][1:])):
        yield from read_segment(path.read_bytes()).records


def replicas_up(folder: Path) -> list[tuple[float, int]]:
    """(when, in s, and how many are up then) at each change, from a decision log."""
    from policy.events import ReplicaDown, ReplicaUp

    up: set[int] = set()
    changes: list[tuple[float, int]] = []
    for record in records(folder):
        if isinstance(record.event, ReplicaUp):
            up.add(record.event.replica)
        elif isinstance(record.event, ReplicaDown):
            up.discard(record.event.replica)
        if not changes or len(up) != changes[-1][1]:
            changes.append((record.now_ns / 1e9, len(up)))
    return changes


def whiskers(spans: Sequence[Sequence[float]]) -> tuple[list[float], list[list[float]]]:
    """For matplotlib's ``errorbar`` and ``bar``, of ``(median, least, greatest)`` each: the
    medians, and how far the least and the greatest lie from them."""
    middles = [middle for middle, _, _ in spans]
    return middles, [[m - low for m, low, _ in spans], [high - m for m, _, high in spans]]


def _goals(goal: str) -> list[tuple[str, str]]:
    """(what is put after the name, goal) of each figure: LOW..HIGH is two goals."""
    low, between, high = goal.partition("..")
    if not between:
        return [("", goal.replace("==", "="))]
    return [(", least", f">= {low}"), (", most", f"<= {high.lstrip('.')}")]


def _told(figure: Figure) -> tuple[str, str, str, str]:
    if figure.value is None:
        return figure.name, "", figure.goal, "not measured"
    held = "holds" if figure.holds else "MISSED"
    return figure.name, f"{figure.value:.4g} {figure.unit}", figure.goal, held


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
