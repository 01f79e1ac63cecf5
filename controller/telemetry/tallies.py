"""Counters and histograms that cost next to nothing to add to, and are put in order when read.

They are used in one thread, so they need no locks; and label values come from outside, so each
family has a bound on its series. They write Prometheus' text format themselves: there may be
thousands of lines, and whoever reads them must not hold up the event loop for long.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

NS_PER_S = 1_000_000_000
OTHER = "other"

Labels = tuple[str, ...]


class Names:
    """The first ``most`` different label values; all later ones are ``other``."""

    __slots__ = ("_most", "_seen")

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen: dict[str, str] = {"": "none"}

    def __call__(self, name: str) -> str:
        """``name``, ``none`` where it is empty, or ``other``."""
        known = self._seen.get(name)
        if known is not None:
            return known
        if len(self._seen) > self._most or len(name) > 128:
            return OTHER
        self._seen[name] = name
        return name


class Counter:
    """A number that only rises, by labels."""

    __slots__ = ("_head", "_labels", "_most", "_name", "_starts", "values")

    def __init__(
        self, name: str, help: str, labels: Sequence[str] = (), series_most: int = 1000
    ) -> None:
        self._name = f"{name}_total"
        self._head = _head(self._name, help, "counter")
        self._labels = tuple(labels)
        self._most = series_most
        self._starts: dict[Labels, str] = {}
        """How each series' line starts."""
        self.values: dict[Labels, int] = {} if labels else {(): 0}

    def add(self, labels: Labels = (), by: int = 1) -> None:
        values = self.values
        if labels in values:
            values[labels] += by
        else:
            self._begin(labels, by)

    def _begin(self, labels: Labels, by: int) -> None:
        if len(self.values) >= self._most:
            labels = (OTHER,) * len(self._labels)
        self.values[labels] = self.values.get(labels, 0) + by

    def write(self, lines: list[str]) -> None:
        """Add its lines."""
        lines.append(self._head)
        starts = self._starts
        for labels, value in self.values.items():
            start = starts.get(labels)
            if start is None:
                start = starts[labels] = f"{self._name}{_braced(self._labels, labels)} "
            lines.append(f"{start}{value}\n")


class Cell:
    """The counts of one series of a histogram: one for each bound, and one for what is above."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0

    def observe(self, value: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


class Histogram:
    """Values by labels, whole numbers of which ``unit`` make one of what is shown: ns of which a
    second has 10**9. ``bounds`` are in what is shown."""

    __slots__ = (
        "_bounds", "_head", "_labels", "_most", "_name", "_shown", "_starts", "_unit", "cells",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        help: str,
        labels: Sequence[str],
        bounds: Sequence[float],
        unit: int = NS_PER_S,
        series_most: int = 100,
    ) -> None:
        self._name = name
        self._head = _head(name, help, "histogram")
        self._labels = tuple(labels)
        self._starts: dict[Labels, list[str]] = {}
        """How each series' lines start: one for each bound, the count, the sum."""
        self._bounds = tuple(round(bound * unit) for bound in bounds)
        if list(self._bounds) != sorted(set(self._bounds)):
            raise ValueError(f"{name}: bounds must rise, but are {bounds}")
        self._shown = (*(str(float(bound)) for bound in bounds), "+Inf")
        self._unit = unit
        self._most = series_most
        self.cells: dict[Labels, Cell] = {}

    def cell(self, labels: Labels = ()) -> Cell:
        """Where to count values of these labels; may be kept."""
        cell = self.cells.get(labels)
        return cell if cell is not None else self._begin(labels)

    def _begin(self, labels: Labels) -> Cell:
        if len(self.cells) >= self._most:
            labels = (OTHER,) * len(self._labels)
        return self.cells.setdefault(labels, Cell(self._bounds))

    def write(self, lines: list[str]) -> None:
        """Add its lines."""
        lines.append(self._head)
        for labels, cell in self.cells.items():
            starts = self._starts.get(labels)
            if starts is None:
                starts = self._starts[labels] = self._begin_lines(labels)
            count = 0
            for start, more in zip(starts, cell.counts, strict=False):
                count += more
                lines.append(f"{start}{count}\n")
            lines.append(f"{starts[-2]}{count}\n")
            lines.append(f"{starts[-1]}{cell.total / self._unit!r}\n")

    def _begin_lines(self, labels: Labels) -> list[str]:
        names = (*self._labels, "le")
        starts = [
            f"{self._name}_bucket{_braced(names, (*labels, shown))} " for shown in self._shown
        ]
        braced = _braced(self._labels, labels)
        return [*starts, f"{self._name}_count{braced} ", f"{self._name}_sum{braced} "]


def _head(name: str, help: str, kind: str) -> str:
    return f"# HELP {name} {help}\n# TYPE {name} {kind}\n"


def _braced(names: Labels, values: Labels) -> str:
    if not names:
        return ""
    return "{" + ",".join(f'{n}="{_escaped(v)}"' for n, v in zip(names, values, strict=True)) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
