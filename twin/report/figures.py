"""What a report compares: names, figures, how they are written, and which is better."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from twin.intervals import LEVEL_PERCENT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from twin.intervals import Interval
    from twin.replay import Replay
    from twin.summary import Group

Better = Literal["low", "high", "neither"]

SAME = 0.01
"""Figures less than 1 % apart count as equal: quantiles are within 0.5 % each."""
TIERS = ("turbo", "lent", "stable", "batch", "fallback")
NONE = "\u2013"
DURATIONS = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "e2e_s": "end to end",
    "queue_s": "policy queue",
}
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


class ReportError(ValueError):
    """A report that cannot be made, and why."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of each replay."""

    name: str
    values: tuple[float, ...]
    """NaN where there is none."""
    write: Callable[[float], str]
    better: Better = "neither"
    note: str = ""
    intervals: tuple[Interval | None, ...] = ()
    """Empty, or one of each replay; None where it has none."""

    def texts(self) -> list[str]:
        return [NONE if math.isnan(value) else self.write(value) for value in self.values]

    def ranges(self) -> list[str]:
        """The intervals; empty where there is none, or where it is of no width."""
        known = self.intervals or (None,) * len(self.values)
        return [
            "" if interval is None else between(interval.low, interval.high, self.write)
            for interval in known
        ]

    def best(self) -> frozenset[int]:
        return best(self.values, self.better)


def labels_of(replays: Sequence[Replay]) -> list[str]:
    """A different name for each replay.

    Raises:
        ReportError: there is none.
    """
    if not replays:
        raise ReportError("a report needs at least one replay, and 0 were given")
    labels: list[str] = []
    for number, replay in enumerate(replays, 1):
        name = replay.policy or f"run {number}"
        labels.append(name if name not in labels else f"{name} ({number})")
    return labels


def best(values: Sequence[float], better: Better) -> frozenset[int]:
    """Places of the best values, unless all are about the same."""
    known = [value for value in values if not math.isnan(value)]
    if better == "neither" or len(known) < 2:
        return frozenset()
    top, bottom = (min(known), max(known)) if better == "low" else (max(known), min(known))
    if _same(top, bottom):
        return frozenset()
    return frozenset(place for place, value in enumerate(values) if _same(value, top))


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * max(abs(one), abs(other))


# ---- how figures are written ----


def duration(seconds: float) -> str:
    """Three digits and a unit: 412 µs, 81.2 ms, 1.24 s."""
    if seconds == 0:
        return "0 ms"
    factor, unit = _unit(seconds)
    return f"{_three(seconds * factor)} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    for limit, factor, unit in ((0.0009995, 1e6, "µs"), (0.9995, 1e3, "ms")):
        if seconds < limit:
            return factor, unit
    return 1.0, "s"


def between(low: float, high: float, write: Callable[[float], str]) -> str:
    """An interval, its unit once: 81.2-94.0 ms, with a dash. Empty if both ends read the same."""
    if math.isinf(high):
        return "\u221e" if math.isinf(low) else f"\u2265 {write(low)}"
    first, last = write(low), write(high)
    if first == last:
        return ""
    number, _, unit = first.rpartition(" ")
    if write is duration:
        number = _three(low * _unit(high)[0]) if low else "0"
    elif not number or unit != last.rpartition(" ")[2]:
        number = first
    return f"{number}\u2013{last}"


def _three(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def count(value: float) -> str:
    return f"{value:,.0f}"


def share(value: float) -> str:
    """A percentage; what is not quite all or nothing is not rounded to it."""
    if value in (0, 1):
        return f"{value * 100:.0f} %"
    if 0 < value < 0.0005:
        return "<0.1 %"
    if 0.9995 <= value < 1:
        return ">99.9 %"
    return f"{value * 100:.1f} %"


def rate(value: float) -> str:
    return f"{_three(value)} /s"


def usd(value: float) -> str:
    return f"{value:,.2f} USD"


def hours(value: float) -> str:
    return f"{value:,.2f} h" if value >= 0.1 else f"{value:.4f} h"


# ---- what is compared ----


def overall_rows(replays: Sequence[Replay]) -> list[Row]:
    """The figures of whole runs."""
    groups = [replay.summary.all for replay in replays]

    def of_group(name: str, better: Better = "neither", label: str = "", note: str = "") -> Row:
        values = tuple(float(getattr(group, name)) for group in groups)
        known = intervals(replays, f"all.{name}")
        return Row(label or name, values, count, better, note, known)

    def of_run(
        label: str, figure: str, value: Callable[[Replay], float | None],
        write: Callable[[float], str], better: Better = "neither", note: str = "",
    ) -> Row:  # fmt: skip
        values = tuple(_number(value(run)) for run in replays)
        return Row(label, values, write, better, note, intervals(replays, figure))

    rows = [
        of_group("offered", label="requests offered"),
        of_run("span", "span_s", lambda run: run.span_s, duration,
               note="first arrival to last settlement, in simulated time"),
        of_group("answered"),
        of_group("degraded", "low", note="answered by a lesser path"),
        of_group("shed", "low", note="refused by the policy"),
        of_group("failed", "low"),
        *_reason_rows(replays),
        of_group("cancelled", note="by the client"),
        of_run("goodput", "all.goodput_per_s", _goodput, rate, "high",
               "answers within every SLO, over the span"),
        of_run("SLO attainment, of offered", "all.slo_attainment",
               lambda run: run.summary.all.attainment(), share,
               "high", "shed and failed count as missed"),
        of_run("SLO attainment, of admitted", "all.slo_attainment_admitted",
               lambda run: run.summary.all.attainment_admitted(),
               share, "high", "of those that were answered"),
        of_run("preemptions", "engine_preemptions", lambda run: run.engine_preemptions, count,
               "low", "sequences thrown out of a full KV cache"),
        of_run("prefix hit share", "prefix_hit_share", _prefix_hits, share, "high",
               "prompt tokens found in the KV cache"),
        of_run("GPU busy", "gpu_busy_share_mean", mean_busy, share,
               note="share of time in which a step was running, mean over all replicas"),
        of_run("GPU-hours", "gpu_hours", lambda run: run.gpu_hours, hours, "low"),
        of_run("price of 1 M good tokens", "usd_per_million_good_tokens",
               lambda run: run.usd_per_million_good_tokens, usd, "low",
               "output tokens of answers within SLO"),
        of_run("refused events", "refused_events", lambda run: run.refused, count, "low",
               "a fault in the code unless 0"),
        of_run("wall time of the replay", "wall_s", lambda run: run.wall_s, duration),
        of_run("requests per wall second", "", _pace, count),
    ]  # fmt: skip
    hidden_at_zero = {"degraded", "cancelled", "refused events"}
    return [
        row
        for row in rows
        if row.name not in hidden_at_zero or any(row.values) or any(row.ranges())
    ]


def intervals(replays: Sequence[Replay], figure: str) -> tuple[Interval | None, ...]:
    """Of one figure, by its path in ``twin.intervals``: one of each replay."""
    return tuple(
        run.intervals.by_figure.get(figure) if run.intervals is not None else None
        for run in replays
    )


def _reason_rows(replays: Sequence[Replay]) -> list[Row]:
    return [
        Row(f"  {reason}", tuple(float(run.summary.shed_why.get(reason, 0)) for run in replays),
            count, "low", intervals=intervals(replays, f"shed_or_failed.{reason}"))
        for reason in reasons(replays)
    ]  # fmt: skip


def reasons(replays: Sequence[Replay]) -> list[str]:
    """Why requests were shed or failed, the commonest first."""
    total: dict[str, int] = {}
    for run in replays:
        for reason, number in run.summary.shed_why.items():
            total[reason] = total.get(reason, 0) + number
        for name in run.intervals.by_figure if run.intervals is not None else ():
            if name.startswith("shed_or_failed."):  # some are met in drawn runs only
                total.setdefault(name.removeprefix("shed_or_failed."), 0)
    return sorted(total, key=lambda reason: (-total[reason], reason))


def names_in(replays: Sequence[Replay], kind: str) -> list[str]:
    """The groups of ``kind`` in any replay: tiers in their order, others by name, unnamed last."""
    names = {name for run in replays for name in run.summary.groups[kind]}
    order = {name: place for place, name in enumerate(TIERS)}
    return sorted(names, key=lambda name: (name == "", order.get(name, len(order)), name))


def group_name(kind: str, name: str) -> str:
    return name or {"sla": "no class", "tier": "no tier", "line": "no line"}[kind]


def group_of(replay: Replay, kind: str, name: str) -> Group | None:
    return replay.summary.groups[kind].get(name)


def groups_of(
    replays: Sequence[Replay], kind: str
) -> list[tuple[str, str, list[Group | None]]]:  # fmt: skip
    """(what it is called, its path among the figures, run by run) of each group of a kind; before
    the SLA classes stand the whole runs."""
    groups: list[tuple[str, str, list[Group | None]]] = [
        (group_name(kind, name), f"by_{kind}.{name}",
         [group_of(replay, kind, name) for replay in replays])
        for name in names_in(replays, kind)
    ]  # fmt: skip
    if kind == "sla":
        groups.insert(0, ("all", "all", [replay.summary.all for replay in replays]))
    return groups


def duration_rows(
    groups: Sequence[Group | None], replays: Sequence[Replay] = (), path: str = "all"
) -> dict[str, dict[str, Row]]:
    """By duration and quantile; durations that no replay has are left out.

    ``replays``, one a group, give the intervals, of the group at ``path``: ``by_sla.P0``.
    A short wait in the policy's queue is not called better: it may be a long one in the engine's.
    """
    out: dict[str, dict[str, Row]] = {}
    for key, name in DURATIONS.items():
        rows = {}
        for label, part in QUANTILES.items():
            values = tuple(
                group.metrics[key].quantile_s(part) if group else math.nan for group in groups
            )
            better: Better = "neither" if key == "queue_s" else "low"
            known = intervals(replays, f"{path}.{key}_{label}")
            rows[label] = Row(name, values, duration, better, intervals=known)
        if not all(math.isnan(value) for value in rows["p50"].values):
            out[key] = rows
    return out


def mean_busy(replay: Replay) -> float | None:
    busy = replay.gpu_busy
    return sum(busy) / len(busy) if busy else None


def _goodput(replay: Replay) -> float | None:
    return replay.summary.all.good / replay.span_s if replay.span_s else None


def _prefix_hits(replay: Replay) -> float | None:
    summary = replay.summary
    return summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else None


def _pace(replay: Replay) -> float | None:
    return replay.summary.all.offered / replay.wall_s if replay.wall_s else None


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


# ---- what the runs were ----


def differences(replays: Sequence[Replay]) -> list[str]:
    """What besides the policy is not the same in all replays, so that a reader is warned."""

    def differ(value: Callable[[Replay], object]) -> bool:
        return any(value(run) != value(replays[0]) for run in replays[1:])

    checks: list[tuple[str, Callable[[Replay], object]]] = [
        ("trace", lambda run: run.trace),
        ("requests offered", lambda run: run.summary.all.offered),
        ("fleet", lambda run: [(spec.name, spec.settings) for spec in run.fleet]),
        ("seed", lambda run: run.options.seed),
        ("speed", lambda run: run.options.speed),
        ("scale", lambda run: run.options.scale),
        ("lengths", lambda run: run.options.scale_lengths),
        ("SLO", lambda run: run.options.slo),
        ("faults", lambda run: run.options.faults),
        ("delays of the world", lambda run: run.options.world),
    ]
    return [name for name, value in checks if differ(value)]


def fleet_text(replay: Replay) -> str:
    """As in ``2 x h100-sxm/qwen3-8b``."""
    counts: dict[str, int] = {}
    for spec in replay.fleet:
        counts[spec.profile.name] = counts.get(spec.profile.name, 0) + 1
    return ", ".join(f"{number} \u00d7 {name}" for name, number in counts.items())


def slo_text(replay: Replay) -> str:
    slo = replay.options.slo
    classes = ", ".join(f"{name} {duration(limit)}" for name, limit in slo.ttft_s.items() if name)
    other = slo.ttft_s.get("")
    if other is not None:
        classes += f", others {duration(other)}" if classes else duration(other)
    return f"TTFT {classes} (a request's own deadline goes first); TPOT {duration(slo.tpot_s)}"


def verdict(replays: Sequence[Replay]) -> str:
    """The outcome in a sentence or two."""
    labels = labels_of(replays)

    def said(values: Sequence[float]) -> str:
        known = [(label, value) for label, value in zip(labels, values, strict=True)
                 if not math.isnan(value)]  # fmt: skip
        if len(labels) == 1:
            return share(known[0][1]) if known else NONE
        return ", ".join(f"{label} {share(value)}" for label, value in known)

    kept = said([run.summary.all.attainment() for run in replays])
    text = f"Answered within SLO, of all requests offered: {kept}"
    urgent = [group_of(run, "sla", "P0") for run in replays]
    if any(urgent):
        kept = said([group.attainment() if group else math.nan for group in urgent])
        text += f"; of the urgent ones (P0): {kept}"
    shed = [run.summary.all.shed / run.summary.all.offered for run in replays]
    if any(shed):
        text += f". Shed by the policy: {said(shed)}"
    return f"{text}."


# ---- what the intervals say ----


def with_intervals(replays: Sequence[Replay]) -> bool:
    return any(run.intervals is not None for run in replays)


def interval_texts(replays: Sequence[Replay]) -> list[str]:
    """What the intervals cover and what they do not; empty without any."""
    found = [run.intervals for run in replays if run.intervals is not None]
    if not found:
        return []
    runs = " or ".join(str(number) for number in sorted({known.runs for known in found}))
    covered = {name: text for known in found for name, text in known.covered.items()}
    blank = {name: names for known in found for name, names in known.not_covered.items() if names}
    return [
        f"Intervals hold {LEVEL_PERCENT} %, from {runs} more runs, each with step times drawn "
        "from what the profiles know of their errors and with a seed of its own (ties, thinning, "
        "copies). In all of them the policy predicts with the profile as it is written. A figure "
        "of the simulation without an interval reads the same at both ends of it, or too few of "
        "the runs have it.",
        *(f"Drawn for {name}: {text}." for name, text in covered.items()),
        *(
            f"Not covered for {name}, since no error is known: {', '.join(names)}."
            for name, names in blank.items()
        ),
        "Nor do intervals cover a step-time formula that does not hold, traffic unlike this trace, "
        "faults, or prices.",
    ]
