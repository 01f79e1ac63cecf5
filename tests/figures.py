"""Figures that the checks measure: each with its goal, and whether it holds.

A figures file is `{"figures": [{"name", "value", "unit", "goal", "how", "holds"}, ...]}`.
`holds` is always computed from value and goal, never written by hand.
"""

from __future__ import annotations

import json
import operator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_COMPARE = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "=": operator.eq,
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value, its goal (such as ">= 500", "= 100", "<= 3.5") and how it was got. None:
    it could not be measured, so it does not hold."""

    name: str
    value: float | None
    unit: str
    goal: str
    how: str

    @property
    def holds(self) -> bool:
        """Whether the value reaches the goal."""
        sign, _, bound = self.goal.partition(" ")
        if sign not in _COMPARE:
            raise ValueError(f"figure {self.name!r}: goal {self.goal!r} is not 'SIGN NUMBER'")
        return self.value is not None and bool(_COMPARE[sign](self.value, float(bound)))


def write_figures(path: Path, figures: Sequence[Figure]) -> None:
    """Write the file, with `holds` computed."""
    rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"figures": rows}, indent=2) + "\n", encoding="utf-8")


def read_figures(path: Path) -> list[Figure]:
    """What ``write_figures`` left there; none, if it never did."""
    if not path.is_file():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["figures"]
    return [Figure(**{key: row[key] for key in Figure.__dataclass_fields__}) for row in rows]


def show(figures: Iterable[Figure]) -> None:
    """Print them as a table."""
    table = Table("figure", "value", "goal", "", "how")
    for figure in figures:
        value = "" if figure.value is None else f"{figure.value:.4g} {figure.unit}"
        kept = "holds" if figure.holds else "not measured" if figure.value is None else "MISSED"
        table.add_row(figure.name, value, figure.goal, kept, figure.how)
    Console(width=160).print(table)


def require(figures: Iterable[Figure], names: Iterable[str]) -> list[str]:
    """Complaints, one a line: a required figure is absent, or a figure misses its goal."""
    by_name = {figure.name: figure for figure in figures}
    complaints = [f"figure {name!r} is absent" for name in names if name not in by_name]
    complaints += [
        f"figure {figure.name!r} is {figure.value} {figure.unit}, goal {figure.goal}"
        for figure in by_name.values()
        if not figure.holds
    ]
    return complaints


def markdown(folder: Path) -> str:
    """The figures of all targets as a Markdown table: docs/figures.md; the README has some."""
    rows = ["| target | figure | value | goal | |", "|---|---|---|---|---|"]
    for path in sorted(folder.glob("*.json")):
        for figure in json.loads(path.read_text(encoding="utf-8"))["figures"]:
            name = figure["name"]
            # Rare paths taken, what random runs saw, side figures told in words: too many to show.
            if name.startswith(("path_", "seen_")) or not name.replace("_", "").isalnum():
                continue
            number = figure["value"]
            measured = number is not None
            value = f"{number:,.4g}" if measured and number < 1e4 else f"{number or 0:,.0f}"
            unit = "" if figure["unit"] == "1" else f" {figure['unit']}"
            held = "holds" if figure["holds"] else "missed" if measured else "not measured"
            value, unit = (value, unit) if measured else ("", "")
            cells = (f"`{path.stem}`", f"`{name}`", value + unit, figure["goal"], held)
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(markdown(Path("build/figures")))
