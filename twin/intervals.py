"""Intervals of a run's figures, from other runs of the same; and which end of each is the worse.

Figures go by the path that they have in a replay's own: ``all.ttft_s_p95``,
``by_sla.P0.slo_attainment``, ``shed_or_failed.shed: deadline``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from twin.results import HOPS
from twin.summary import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from twin.replay import Replay

LEVEL_PERCENT = 90
RUNS_LEAST = 19
"""With fewer, even the range from the least to the largest holds the next run's figure less often
than in 90 % of cases: n draws do in (n - 1) of (n + 1)."""
RUNS = 20

End = Literal["low", "high"]

COUNTS: dict[str, End] = {
    "offered": "high", "answered": "low", "degraded": "high", "shed": "high", "failed": "high",
    "cancelled": "high", "good": "low", "preemptions": "high", "output_tokens": "low",
    "good_output_tokens": "low", "judged": "low", "wrong": "high",
}  # fmt: skip
"""Of a group: a run that does not have the group has 0 of them."""
DURATIONS = frozenset(
    f"{metric}_{part}" for metric in METRICS for part in ("mean", "p50", "p95", "p99")
) | {f"{hop}_mean" for hop in HOPS}
"""Of a group. Where all its requests were turned away, they count as without end."""
WORSE: dict[str, End] = {
    **COUNTS,
    **dict.fromkeys(sorted(DURATIONS), "high"),
    "slo_attainment": "low", "slo_attainment_admitted": "low", "shed_share": "high",
    "offered_per_s": "high", "goodput_per_s": "low",
    "span_s": "high", "prefix_hit_share": "low", "gpu_busy_share_mean": "high",
    "gpu_hours": "high", "usd_per_million_good_tokens": "high", "engine_steps": "high",
    "engine_preemptions": "high", "decisions": "high", "refused_events": "high",
}  # fmt: skip
"""The end that is worse for whoever runs the fleet, by the last word of the figure's path. Of what
is neither good nor bad, such as the load, that is the end that takes more of the fleet."""
WORSE_IN: dict[str, End] = {
    "shed_or_failed": "high", "degraded_how": "high", "verification": "high",
    "gpu_busy_share": "high",
}  # fmt: skip
"""The same by the first word, for what has names of its own behind it."""
BETTER_MORE = frozenset({"verification.match"})
NO_FIGURES = frozenset({
    "schema", "policy", "trace", "fleet", "options", "log_hash", "uncertainty",
    "wall_s", "cpu_s", "peak_mib",
})  # fmt: skip
"""What a replay was asked for, and what it took of this machine: no intervals there."""


class UncertaintyError(ValueError):
    """Intervals that cannot be made, and why."""


@dataclass(frozen=True, slots=True)
class Interval:
    """From ``low`` to ``high``; infinite where a duration or a price has no end."""

    low: float
    high: float
    runs: int
    """How many drawn runs have the figure at all."""


@dataclass(frozen=True, slots=True)
class Intervals:
    """Of all figures of a run, and what they cover."""

    runs: int
    """Drawn runs, beside the one that the intervals are put around."""
    covered: dict[str, str]
    """By profile: what was drawn, in words."""
    not_covered: dict[str, tuple[str, ...]]
    """By profile: coefficients that no error is known of."""
    values: dict[str, float]
    """Of the run itself; NaN where there is none."""
    by_figure: dict[str, Interval]

    def plain(self) -> dict[str, Any]:
        """For JSON. An end that is infinite, and a value that is not there, become None."""
        return {
            "level_percent": LEVEL_PERCENT,
            "runs": self.runs,
            "covered": self.covered,
            "not_covered": {name: list(names) for name, names in self.not_covered.items()},
            "intervals": {
                name: {
                    "value": _finite(self.values.get(name, _absent(name))),
                    "low": _finite(interval.low),
                    "high": _finite(interval.high),
                    "pessimistic": _finite(pessimistic(interval, name)),
                    "runs": interval.runs,
                }
                for name, interval in self.by_figure.items()
            },
        }


def pessimistic(interval: Interval, name: str) -> float:
    """The end of the interval of figure ``name`` that is worse for whoever runs the fleet.

    Raises:
        UncertaintyError: no rule names the figure.
    """
    return interval.low if worse_end(name) == "low" else interval.high


def worse_end(name: str) -> End:
    """Which end of the figure's interval is the worse.

    Raises:
        UncertaintyError: no rule names the figure.
    """
    if name in BETTER_MORE:
        return "low"
    head, last = name.partition(".")[0], name.rpartition(".")[2]
    end = WORSE_IN.get(head) or WORSE.get(last)
    if end is None:
        raise UncertaintyError(
            f"figure {name!r}: no rule says which end of its interval is the worse; "
            "give it one in WORSE"
        )
    return end


def figures_of(replay: Replay) -> dict[str, float]:
    """All figures of a replay by path, those that the report makes of them too; NaN: there is none.

    A duration of requests that were all turned away, and the price of good tokens where there is
    none, are infinite.
    """
    figures = {name: value for name, value in replay.figures().items() if name not in NO_FIGURES}
    busy = replay.gpu_busy
    figures["gpu_busy_share_mean"] = sum(busy) / len(busy) if busy else None
    for group in _groups(figures):
        offered, answered = group["offered"], group["answered"] + group["degraded"]
        group["shed_share"] = group["shed"] / offered if offered else None
        if offered and not answered:
            group.update(dict.fromkeys(DURATIONS, math.inf))
    if figures["usd_per_million_good_tokens"] is None and figures["all"]["offered"]:
        figures["usd_per_million_good_tokens"] = math.inf
    return dict(_leaves("", figures))


def intervals_around(
    values: Mapping[str, float], drawn: Sequence[Mapping[str, float]]
) -> dict[str, Interval]:
    """Around the figures of one run, from those of ``drawn`` others.

    The ends are figures of drawn runs, by rank, so that a run like them lies inside in at least
    90 % of cases; the interval is widened to hold the run's own figure. A count that a run does
    not have is 0 there; any other figure that a run does not have is left out, and one that fewer
    than ``RUNS_LEAST`` runs have gets no interval.
    """
    names = dict.fromkeys([*values, *(name for figures in drawn for name in figures)])
    out: dict[str, Interval] = {}
    for name in names:
        absent = _absent(name)
        found = [figures.get(name, absent) for figures in drawn]
        known = sorted(value for value in found if not math.isnan(value))
        if len(known) < RUNS_LEAST:
            continue
        low, high = _ends(known)
        own = values.get(name, absent)
        if not math.isnan(own):
            low, high = min(low, own), max(high, own)
        out[name] = Interval(low, high, len(known))
    return out


def _ends(known: Sequence[float]) -> tuple[float, float]:
    """Of sorted values: the widest ranks that 90 % may lie between."""
    size = len(known)
    outside = (size + 1) * (100 - LEVEL_PERCENT) / 200
    rank = max(1, math.floor(outside))
    return known[rank - 1], known[size - rank]


def _groups(figures: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield figures["all"]
    for name, groups in figures.items():
        if name.startswith("by_"):
            yield from groups.values()


def _leaves(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(f"{path}.{name}" if path else name, part)
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _leaves(f"{path}.{number}", part)
    else:
        yield path, math.nan if value is None else float(value)


def _absent(name: str) -> float:
    """What a run that does not have the figure counts as."""
    head, last = name.partition(".")[0], name.rpartition(".")[2]
    is_count = head in WORSE_IN or (head.startswith("by_") and last in COUNTS)
    return 0.0 if is_count else math.nan


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
