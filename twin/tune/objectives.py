"""What a trial is judged by: figures of a run, objectives over them, and constraints.

A figure is the same whatever policy makes it: requests are grouped by what their callers said
(class, business line), never by what the policy made of them. "Batch" is the class P2, not the
tier: else moving a threshold would change what is counted. A request that got no answer counts in
a percentile as ``UNANSWERED_S``: else refusing the slow ones would be the way to a fine percentile.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from policy.files import nearest
from twin.figures.measure import gives_what_was_asked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Array = np.ndarray[Any, np.dtype[Any]]

UNANSWERED_S = 60.0
"""Time to first token of a request that came to nothing: beyond every deadline."""
BATCH_CLASS = "P2"


class TuneError(ValueError):
    """A tuning that cannot be run, and what to do."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Requests of a run side by side, those that were cancelled left out."""

    sla: Array
    line: Array
    good: Array
    """Answered within the SLO."""
    ttft_s: Array
    """``UNANSWERED_S`` where there was no answer."""
    tokens: Array
    """Of the answer; 0 without one."""
    outcome: Array
    """As words."""
    span_s: float
    """From the first arrival to the next block's: how long these requests took to arrive."""

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """Several stretches as one."""
        names = ("sla", "line", "good", "ttft_s", "tokens", "outcome")
        columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(**columns, span_s=sum(part.span_s for part in parts))

    def of(self, group: str) -> Array:
        """Which rows are of a class or a line; empty: all."""
        if not group:
            return np.ones(self.good.size, bool)
        found: Array = (self.sla == group) | (self.line == group)
        return found


@dataclass(frozen=True, slots=True)
class Kind:
    """A figure by its name: which direction is better, how it is told."""

    better: int
    """1: more; -1: less."""
    unit: str
    rows: Callable[[Rows, Array], float] | None
    """From a trace's requests; None: only scenarios have it."""
    scenario: Callable[[Mapping[str, Any], Mapping[str, Any]], float]
    """From a scenario's figures, all of them and those of the group."""


def _share(code: str) -> Callable[[Rows, Array], float]:
    return lambda rows, of: _mean(rows.outcome[of] == code)


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else math.nan


def _quantile(share: float) -> Callable[[Rows, Array], float]:
    def of_rows(rows: Rows, of: Array) -> float:
        values = rows.ttft_s[of]
        return float(np.quantile(values, share, method="higher")) if values.size else math.nan

    return of_rows


def _served_quantile(group: Mapping[str, Any], share: float) -> float:
    """Of a scenario's figures, which know quantiles of the answered only: the rank among these that
    ``share`` of all is, between the quantiles that there are."""
    known = group["ttft_s"]
    kept = group["offered"] - group["cancelled"]
    if not kept:
        return math.nan
    rank = share * kept / known["count"] if known["count"] else math.inf
    if rank > 1:
        return UNANSWERED_S
    ranks = (0.0, 0.5, 0.95, 0.99, 1.0)
    values = [0.0, *(known[name] for name in ("p50", "p95", "p99", "most"))]
    return float(np.interp(rank, ranks, values))


def _good(run: Mapping[str, Any], group: Mapping[str, Any]) -> float:
    """Answers in time that are worth the name. A template, which comes at once, is in time too:
    those are taken off, as a replay's report does not count them."""
    ways = run["useful_degraded"]
    lesser = sum(
        count for way, count in group["degraded_by"].items() if not gives_what_was_asked(way, ways)
    )
    return float(max(0, group["good"] - lesser))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


KINDS: dict[str, Kind] = {
    "goodput": Kind(
        1, "/s", lambda rows, of: float(rows.good[of].sum()) / rows.span_s,
        lambda run, group: _good(run, group) / run["duration_s"],
    ),
    "slo_attainment": Kind(
        1, "", lambda rows, of: _mean(rows.good[of]),
        lambda run, group: _ratio(
            _good(run, group), group["offered"] - group["cancelled"]
        ),
    ),
    "ttft_p95_s": Kind(-1, "s", _quantile(0.95), lambda run, group: _served_quantile(group, 0.95)),
    "ttft_p99_s": Kind(-1, "s", _quantile(0.99), lambda run, group: _served_quantile(group, 0.99)),
    "tokens_per_s": Kind(
        1, "/s", lambda rows, of: float(rows.tokens[of].sum()) / rows.span_s,
        lambda run, group: _number(group["output_tokens_per_s"]),
    ),
    "shed_share": Kind(-1, "", _share("shed"), lambda run, group: _number(group["shed_share"])),
    "failed_share": Kind(
        -1, "", _share("failed"), lambda run, group: _number(group["failed_share"])
    ),
    "degraded_share": Kind(
        -1, "", _share("degraded"), lambda run, group: _number(group["degraded_share"])
    ),
    "gpu_hours": Kind(-1, "h", None, lambda run, group: _number(run["fleet"]["gpu_hours"])),
    "wrong": Kind(-1, "", None, lambda run, group: _number(group["wrong"])),
}  # fmt: skip
ALIASES = {
    "p0_ttft_p95_s": "ttft_p95_s.P0",
    "batch_tokens_per_s": f"tokens_per_s.{BATCH_CLASS}",
    "wrong_answers": "wrong",
}
NOT_GROUPED = frozenset({"gpu_hours"})


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run that is asked for: ``goodput``, ``slo_attainment.P1``,
    ``ttft_p95_s.search``; of a scenario also any path in its figures with its better direction,
    ``max:clients.agents.useful``."""

    name: str
    """As it was asked for."""
    kind: str
    group: str = ""
    path: str = ""
    better: int = 1

    @property
    def unit(self) -> str:
        return KINDS[self.kind].unit if self.kind else ""

    def of_rows(self, rows: Rows) -> float:
        """NaN: no request of the group."""
        of = KINDS[self.kind].rows
        assert of is not None
        return of(rows, rows.of(self.group))

    def of_run(self, run: Mapping[str, Any]) -> float:
        """From a scenario's figures; NaN: there is none.

        Raises:
            TuneError: no figure has the path.
        """
        if self.path:
            return _at(run, self.path)
        group: Mapping[str, Any] | None = run["all"]
        if self.group:
            group = run["by_class"].get(self.group) or run["by_line"].get(self.group)
        return math.nan if group is None else KINDS[self.kind].scenario(run, group)


def parse_figure(text: str, *, trace: bool) -> Figure:
    """The figure of that name.

    Raises:
        TuneError: there is none, or a trace has none.
    """
    direction, _, path = text.partition(":")
    if path:
        if direction not in ("max", "min") or trace:
            raise TuneError(
                f"objective {text!r}: write max:PATH or min:PATH, with --scenario; of a trace: "
                f"{', '.join(figure_names(trace=trace))}"
            )
        return Figure(text, "", path=path, better=1 if direction == "max" else -1)
    kind, _, group = ALIASES.get(text, text).partition(".")
    if kind not in KINDS or (group and kind in NOT_GROUPED):
        raise TuneError(
            f"no figure is called {text!r} ({nearest(text, figure_names(trace=trace))})"
        )
    if trace and KINDS[kind].rows is None:
        why = {
            "gpu_hours": "a trace is played on a fleet that never changes",
            "wrong": "the answers of a trace are not known",
        }
        raise TuneError(f"{text}: {why[kind]}; tune it with --scenario")
    return Figure(text, kind, group, better=KINDS[kind].better)


@dataclass(frozen=True, slots=True)
class Constraint:
    """What a policy must keep: a figure and a bound."""

    figure: Figure
    sign: str
    bound: float

    @property
    def text(self) -> str:
        return f"{self.figure.name} {self.sign} {self.bound:g}"

    def excess(self, value: float) -> float:
        """By how much it is broken; 0 or less: kept. A figure that is not there keeps it."""
        if math.isnan(value):
            return 0.0
        return self.bound - value if self.sign == ">=" else value - self.bound


_CONSTRAINT = re.compile(r"^\s*(?P<name>\S+)\s*(?P<sign>>=|<=)\s*(?P<bound>-?[\d.]+(e-?\d+)?)\s*$")


def parse_constraint(text: str, *, trace: bool) -> Constraint:
    """From ``slo_attainment.P1 >= 0.95``.

    Raises:
        TuneError: not of that form, or no such figure.
    """
    match = _CONSTRAINT.match(text)
    try:
        bound = float(match["bound"]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or math.isnan(bound):
        raise TuneError(f"constraint {text!r}: write FIGURE >= NUMBER or FIGURE <= NUMBER")
    return Constraint(parse_figure(match["name"], trace=trace), match["sign"], bound)


@dataclass(frozen=True, slots=True)
class Goals:
    """Everything that a trial is judged by."""

    objectives: tuple[Figure, ...]
    """In order of weight: the first decides where there is a choice."""
    constraints: tuple[Constraint, ...] = ()

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Every figure once, objectives first."""
        asked = [*self.objectives, *(constraint.figure for constraint in self.constraints)]
        return tuple({figure.name: figure for figure in asked}.values())

    def excesses(self, values: Mapping[str, float]) -> dict[str, float]:
        """By constraint."""
        return {
            constraint.text: constraint.excess(values[constraint.figure.name])
            for constraint in self.constraints
        }

    def violation(self, values: Mapping[str, float]) -> float:
        """0: all are kept."""
        return sum(max(0.0, excess) for excess in self.excesses(values).values())


def goals_of(objectives: Sequence[str], constraints: Sequence[str], *, trace: bool) -> Goals:
    """Raises: TuneError: a name that is none, or an objective that stands twice."""
    figures = tuple(parse_figure(text, trace=trace) for text in objectives or ("goodput",))
    names = [figure.name for figure in figures]
    if len(set(names)) < len(names):
        raise TuneError(f"an objective stands twice: {', '.join(names)}")
    bounds = tuple(parse_constraint(text, trace=trace) for text in constraints)
    return Goals(figures, bounds)


def figure_names(*, trace: bool) -> list[str]:
    """Of all figures that can be asked for, without groups."""
    known = [name for name, kind in KINDS.items() if not trace or kind.rows is not None]
    return sorted({*known, *(name for name, of in ALIASES.items() if of.split(".")[0] in known)})


def _at(run: Mapping[str, Any], path: str) -> float:
    value: Any = run
    for step in path.split("."):
        if not isinstance(value, dict) or step not in value:
            known = sorted(value) if isinstance(value, dict) else []
            raise TuneError(f"{path}: the scenario has no such figure ({nearest(step, known)})")
        value = value[step]
    if value is not None and not isinstance(value, int | float):
        raise TuneError(f"{path}: is no number")
    return _number(value)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
