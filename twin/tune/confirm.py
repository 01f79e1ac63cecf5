"""Whether the tuned policy is better than its parent, on what it was not tuned on.

Both play the held-out traces (or a scenario's other seeds); the differences are of the same
requests, with an interval from leaving out one stretch of time after the other. Only where an
interval lies on the better side, and none on the worse, is the word "better" used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twin.tune.compare import CONFIRM_LEVEL, Difference, jackknife
from twin.tune.held import BLOCKS
from twin.tune.objectives import Rows
from twin.tune.work import Order

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.parameters import Parameters
    from twin.tune.engines import Engine
    from twin.tune.objectives import Figure, Goals
    from twin.tune.work import Played, Work

STRETCHES = 10
"""Of a held-out trace, that are left out in turn: far longer than a queue remembers."""
PARENT, TUNED = 0, 1
HELD_SEED = 1_000_003
"""Seeds that no trial has."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of both policies on the held-out traffic."""

    figure: Figure
    parent: float
    tuned: float
    difference: Difference
    """Positive: the tuned one is better."""

    @property
    def percent(self) -> float | None:
        """The difference as part of the parent's value."""
        return self.difference.value / abs(self.parent) * 100 if self.parent else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is said of the tuned policy."""

    better: bool
    why: str
    """A sentence."""
    compared: tuple[Compared, ...]
    held_out: tuple[str, ...]
    """What was played."""
    seeds: tuple[int, ...]
    broken: tuple[str, ...]
    """Constraints that the tuned policy does not keep there."""


@dataclass(frozen=True, slots=True)
class _Unit:
    """A stretch of a trace with all seeds, or one seed of a scenario."""

    rows: Rows | None
    values: dict[str, float]


def held_seeds(work: Work, count: int) -> tuple[int, ...]:
    """Of a trace the fleet as its profiles say, and draws of it that no trial met; of a scenario
    seeds that follow its own."""
    if work.is_trace:
        return (0, *range(HELD_SEED, HELD_SEED + count - 1))
    return tuple(range(HELD_SEED, HELD_SEED + count))


def confirm(
    parent: Parameters,
    tuned: Parameters,
    goals: Goals,
    held_out: Sequence[Work],
    seeds: int,
    engine_for: Callable[[Work], Engine],
    progress: Callable[[], None] = lambda: None,
) -> Verdict:
    """Play both on all of ``held_out`` and judge.

    Args:
        seeds: how many, of each.
        engine_for: an engine that plays it; it is closed here.
        progress: called after each play.

    Raises: what the engines raise.
    """
    units: dict[int, list[_Unit]] = {PARENT: [], TUNED: []}
    for work in held_out:
        engine = engine_for(work)
        try:
            played = _played(engine, work, (parent, tuned), held_seeds(work, seeds), progress)
        finally:
            engine.close()
        for side, plays in played.items():
            units[side] += _units(plays)
    compared = tuple(_compared(figure, units) for figure in goals.figures)
    texts = tuple(work.text() for work in held_out)
    return judged(compared, goals, texts, held_seeds(held_out[0], seeds))


def judged(
    compared: tuple[Compared, ...], goals: Goals, held_out: tuple[str, ...], seeds: tuple[int, ...]
) -> Verdict:
    """The verdict that the figures give."""
    by_name = {one.figure.name: one for one in compared}
    objectives = [by_name[figure.name] for figure in goals.objectives]
    before = {name: one.parent for name, one in by_name.items()}
    after = {name: one.tuned for name, one in by_name.items()}
    broken = tuple(name for name, excess in goals.excesses(after).items() if excess > 0)
    mended = goals.violation(before) > 0 and not broken
    gains = [one for one in objectives if one.difference.better]
    losses = [one for one in objectives if one.difference.worse]
    better = not broken and (mended or (bool(gains) and not losses))
    if better:
        reasons = [f"{one.figure.name} {_text(one)}" for one in gains]
        if mended:
            reasons.append("it keeps the constraints, which its parent does not")
        why = f"better than its parent on held-out traffic: {'; '.join(reasons)}"
    elif broken:
        why = f"not better: on held-out traffic it does not keep {' and '.join(broken)}"
    elif losses:
        shown = "; ".join(f"{one.figure.name} {_text(one)}" for one in losses)
        why = f"not better: on held-out traffic it is worse in {shown}"
    else:
        shown = "; ".join(f"{one.figure.name} {_text(one)}" for one in objectives)
        why = f"not better: on held-out traffic no difference is certain: {shown}"
    return Verdict(better, why, compared, held_out, seeds, broken)


def _text(one: Compared) -> str:
    unit, difference = one.figure.unit, one.difference
    sign = one.figure.better
    ends = sorted((difference.low * sign, difference.high * sign))
    interval = "no interval" if np.isnan(ends[0]) else (
        f"{CONFIRM_LEVEL * 100:.0f} % interval {ends[0]:+.3g} to {ends[1]:+.3g}"
    )  # fmt: skip
    return f"{one.parent:.4g} -> {one.tuned:.4g}{unit} ({difference.value * sign:+.3g}, {interval})"


def _played(
    engine: Engine, work: Work, policies: Sequence[Parameters], seeds: Sequence[int],
    progress: Callable[[], None],
) -> dict[int, list[Played]]:  # fmt: skip
    orders = [
        Order(side, policy, seed, keep_rows=work.is_trace)
        for seed in seeds for side, policy in enumerate(policies)
    ]  # fmt: skip
    for order in orders:
        engine.submit(order)
    found: dict[tuple[int, int], Played] = {}
    for _ in orders:
        order, played = engine.next()
        found[order.number, order.seed] = played
        progress()
    return {side: [found[side, seed] for seed in seeds] for side in (PARENT, TUNED)}


def _units(plays: list[Played]) -> list[_Unit]:
    if not plays[0].rows:
        return [_Unit(None, played.values) for played in plays]
    size = BLOCKS // STRETCHES
    return [
        _Unit(Rows.joined([row for played in plays for row in played.rows[at : at + size]]), {})
        for at in range(0, BLOCKS, size)
    ]


def _compared(figure: Figure, units: dict[int, list[_Unit]]) -> Compared:
    def value(side: int, places: list[int]) -> float:
        chosen = [units[side][place] for place in places]
        # Rows of traces go together; scenarios' seeds have figures of their own.
        rows = [unit.rows for unit in chosen if unit.rows is not None]
        if rows:
            return figure.of_rows(Rows.joined(rows))
        return float(np.mean([unit.values[figure.name] for unit in chosen]))

    def gain(places: list[int]) -> float:
        return (value(TUNED, places) - value(PARENT, places)) * figure.better

    everything = list(range(len(units[PARENT])))
    difference = jackknife(len(everything), gain)
    return Compared(figure, value(PARENT, everything), value(TUNED, everything), difference)
