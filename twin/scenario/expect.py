"""What a scenario claims, and whether it holds: figures of its runs, seed by seed."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from policy.files import FileError, nearest
from twin.figures.bounds import upper_share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_GOAL = re.compile(r"^(?P<how><=|>=|<|>|==) *(?P<limit>-?[0-9.]+(?:e-?[0-9]+)?)$")
_WITHIN = re.compile(r"^(?P<low>-?[0-9.]+)\.\.\.?(?P<high>-?[0-9.]+)$")
_COMPARE = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq,
}  # fmt: skip
Figures = str | tuple[str, ...]
As = Literal["value", "milli", "ratio", "cut_pct", "loss_pct", "gain_points", "share_up95"]
ALONE = ("value", "milli")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"how": "as"}):
    """A figure of a run, perhaps against a figure of another run with the same seed.

    Figures are written ``RUN/PATH``, such as ``stable/by_class.P0.ttft_s.p99``; several in a list
    are added up.
    """

    of: Figures
    against: Figures = ""
    how: As = "value"
    """``value``: as it is. ``milli``: times 1000, so seconds as ms. ``ratio``: of / against.
    ``cut_pct`` and ``loss_pct``: by how many per cent it is less than ``against``, which is a cut
    of something bad or a loss of something good. ``gain_points``: how many percentage points a
    share is above ``against``. ``share_up95``: the upper 95 % bound of of / against, both counts,
    over all seeds together."""
    missing: float | None = None
    """What counts where a run has no such figure, such as a tier that was never used."""

    def __post_init__(self) -> None:
        if not _each(self.of):
            raise ValueError("of names no figure")
        alone = self.how in ALONE
        if alone == bool(self.against):
            need = "nothing" if alone else "a figure"
            raise ValueError(f"as {self.how} needs {need} in against, which is {self.against!r}")
        for figure in (*_each(self.of), *_each(self.against)):
            if "/" not in figure:
                raise ValueError(f"write the figure {figure!r} as RUN/PATH")

    def runs(self) -> tuple[str, ...]:
        figures = (*_each(self.of), *_each(self.against))
        return tuple(figure.partition("/")[0] for figure in figures)


class Expectation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One claim."""

    name: str
    goal: str
    """``<= 0.34``, ``>= 30``, ``== 0`` or ``0.9..1.1``."""
    value: Value
    unit: str = ""
    how: str = ""
    """In words: how the figure is made."""

    def __post_init__(self) -> None:
        if not (_GOAL.match(self.goal) or _WITHIN.match(self.goal)):
            raise ValueError(
                f"goal {self.goal!r}: write <=, >=, <, > or == and a number, or LOW..HIGH"
            )

    def met_by(self, value: float) -> bool:
        found = _GOAL.match(self.goal)
        if found is not None:
            return bool(_COMPARE[found["how"]](value, float(found["limit"])))
        within = _WITHIN.match(self.goal)
        assert within is not None
        return float(within["low"]) <= value <= float(within["high"])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of an expectation. ``value`` is the median over the seeds, ``low`` and ``high`` the
    least and the greatest; None: a run has no such figure."""

    expectation: Expectation
    value: float | None
    low: float | None
    high: float | None
    by_seed: tuple[float | None, ...]

    @property
    def holds(self) -> bool:
        """The median meets the goal."""
        return self.value is not None and self.expectation.met_by(self.value)

    @property
    def holds_in(self) -> int:
        """Seeds whose own value meets the goal."""
        return sum(value is not None and self.expectation.met_by(value) for value in self.by_seed)

    def plain(self) -> dict[str, Any]:
        expectation = self.expectation
        return {
            "name": expectation.name, "unit": expectation.unit, "goal": expectation.goal,
            "how": expectation.how, "value": self.value, "low": self.low, "high": self.high,
            "by_seed": list(self.by_seed), "holds": self.holds, "holds_in": self.holds_in,
        }  # fmt: skip


def judge(
    expectation: Expectation, figures: Mapping[str, Sequence[Mapping[str, Any]]], where: str
) -> Verdict:
    """``figures``: by run, one tree for each seed, seeds in the same order.

    Raises:
        FileError: a path that no run has, unless ``missing`` says what that means.
    """
    value = expectation.value
    of = _sums(value.of, value.missing, figures, where)
    if not value.against:
        times = 1000 if value.how == "milli" else 1
        return _verdict(expectation, [None if each is None else each * times for each in of])
    against = _sums(value.against, value.missing, figures, where)
    if value.how == "share_up95":
        if None in of or None in against:
            return _verdict(expectation, [None])
        bound = upper_share(round(sum(filter(None, of))), round(sum(filter(None, against))))
        return _verdict(expectation, [bound])
    pairs = zip(of, against, strict=True)
    return _verdict(expectation, [_compared(value.how, *pair) for pair in pairs])


def _verdict(expectation: Expectation, by_seed: Sequence[float | None]) -> Verdict:
    known = [value for value in by_seed if value is not None]
    if len(known) < len(by_seed):
        return Verdict(expectation, None, None, None, tuple(by_seed))
    return Verdict(expectation, median(known), min(known), max(known), tuple(by_seed))


def _compared(how: As, of: float | None, against: float | None) -> float | None:
    if of is None or against is None:
        return None
    if how == "gain_points":
        return 100 * (of - against)
    if not against:
        return None
    return of / against if how == "ratio" else 100 * (against - of) / against


def _each(figures: Figures) -> tuple[str, ...]:
    return figures if isinstance(figures, tuple) else tuple(filter(None, (figures,)))


def _sums(
    named: Figures,
    missing: float | None,
    figures: Mapping[str, Sequence[Mapping[str, Any]]],
    where: str,
) -> list[float | None]:
    """By seed; None where one of them is."""
    columns = [_column(figure, missing, figures, where) for figure in _each(named)]
    return [None if None in row else sum(filter(None, row)) for row in zip(*columns, strict=True)]


def _column(
    figure: str,
    missing: float | None,
    figures: Mapping[str, Sequence[Mapping[str, Any]]],
    where: str,
) -> list[float | None]:
    run, _, path = figure.partition("/")
    column: list[float | None] = []
    for tree in figures[run]:
        try:
            found = figure_at(tree, path)
        except KeyError as error:
            if missing is None:
                raise FileError(
                    where, f"the run {run!r} has no figure {path!r}", key="expect", value=path,
                    hint=str(error.args[0]),
                ) from None  # fmt: skip
            found = missing
        column.append(missing if found is None else found)
    return column


def figure_at(tree: Mapping[str, Any], path: str) -> float | None:
    """The number at a dotted path. Names may hold dots themselves: the longest that fits is taken.

    Raises:
        KeyError: there is none; with a hint of what is near.
    """
    here: Any = tree
    rest = path
    while rest:
        if not isinstance(here, dict):
            raise KeyError(f"{path.removesuffix(rest)} is a number")
        fitting = [key for key in here if rest == key or rest.startswith(f"{key}.")]
        if not fitting:
            raise KeyError(nearest(rest.partition(".")[0], here))
        key = max(fitting, key=len)
        here = here[key]
        rest = rest[len(key) + 1 :]
    if isinstance(here, dict):
        raise KeyError(f"it is a group: {nearest('', here)}")
    return None if here is None else float(here)
