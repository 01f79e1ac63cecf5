"""A plan in sentences, each made from its figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from twin.plan.estimates import Estimate
    from twin.plan.planning import FaultCell, Knee, Plan, Size

NAMES = {
    "n-1": "losing one card at the peak", "host": "losing one host at the peak",
    "ecc": "an ECC error at the peak", "slow": "a slow card", "spike": "a spike to twice the load",
}  # fmt: skip


def sentences(plan: Plan) -> list[str]:
    """What a planner wants to hear: how many, how far, what a fault costs, what gives way."""
    return [*_lines(plan)]


def _lines(plan: Plan) -> Iterator[str]:
    first = plan.growths[0]
    best = plan.best(first)
    if best is None:
        yield empty(plan)
        return
    yield headline(plan, best)
    for growth in plan.growths:
        size = plan.best(growth)
        if size is None:
            yield f"At {growth:g}x the load nothing holds."
        else:
            yield size_sentence(size, plan.promise.confidence)
    if plan.knee is not None:
        yield knee_sentence(plan.knee)
    for cell in plan.faults:
        if cell.size is best:
            yield fault_sentence(cell)
    outside = [one for one in plan.rejected if one.gate == "region"]
    for one in {one.name: one for one in outside}.values():
        yield f"{one.name}: no answer outside of what it was calibrated on: {one.why}."
    if any(size.machine.kind == "extrapolated" for size in plan.sizes if size.replicas):
        yield ("What is called extrapolated comes from a profile that was scaled, not fitted: its "
               "intervals are wide on purpose; calibrate before buying.")  # fmt: skip


def headline(plan: Plan, best: Size) -> str:
    """With N of a card you hold this up to that; and what a lost card costs."""
    held = plan.promise.needs[0].text()
    text = f"With {best.machine.text(best.count)} you hold {held}"
    if len(plan.promise.needs) > 1:
        text += f" (and {len(plan.promise.needs) - 1} more promises)"
    if plan.knee is not None:
        text += f" up to {plan.knee.multiple.value:.2g}x today's peak"
    costs = [cell for cell in plan.faults if cell.size is best and cell.fault in ("n-1", "host")]
    if costs:
        text += f"; {_cost(costs[-1])}"
    return f"{text}."


def size_sentence(size: Size, confidence: float) -> str:
    assert size.replicas is not None
    text = f"{size.growth:.4g}x the load: {size.machine.text(size.count)}"
    low = int(size.replicas.low)
    if low < size.count:
        text += f" ({low} hold on the recorded day alone)"
    text += f", {confidence:.0%} sure over {size.replicas.runs} days, {size.replicas.kind}"
    if size.usd_per_month is not None:
        text += f"; {_money(size.usd_per_month)} a month"
    if size.usd_per_million_good_tokens is not None:
        each = size.usd_per_million_good_tokens
        text += f", {_price(each)} per million good tokens"
    return f"{text}."


def knee_sentence(knee: Knee) -> str:
    multiple = knee.multiple
    text = (
        f"{knee.machine.text(knee.replicas)} hold up to {multiple.value:.3g}x the load "
        f"({multiple.low:.3g}x to {multiple.high:.3g}x, {multiple.kind}"
        f"{', on the recorded day alone' if multiple.runs == 1 else ''})"
    )
    broken = f": then {' and '.join(knee.broken)} breaks" if knee.broken else ""
    text += f"{broken}. What gives way first is the {knee.cause.part}: {knee.cause.why}. "
    text += f"Next knob: {knee.cause.knob}."
    if knee.outside:
        text += f" The knee itself is outside of what was calibrated: {knee.outside}."
    return text


def fault_sentence(cell: FaultCell) -> str:
    """What a fault does, and how many replicas hold even so."""
    text = _cost(cell)
    text = f"With {cell.size.machine.text(cell.size.count)}, {text}"
    text += "; every promise still holds" if cell.holds else "; a promise breaks"
    if cell.fault == "n-1" and cell.replicas is not None and not cell.holds:
        text += f", and {cell.size.machine.text(int(cell.replicas.value))} hold it on that day"
    if cell.cause is not None:
        text += f" ({cell.cause.part}: {cell.cause.why})"
    return f"{text}."


def empty(plan: Plan) -> str:
    """Why nothing is left: the gate that rejected everything."""
    gates: dict[str, list[str]] = {}
    for one in plan.rejected:
        gates.setdefault(one.gate, []).append(f"{one.name}: {one.why}")
    if len(gates) == 1:
        gate, whys = next(iter(gates.items()))
        return f"No plan: the gate {gate} rejected everything. {'; '.join(dict.fromkeys(whys))}."
    parts = [f"{gate} ({'; '.join(dict.fromkeys(whys))})" for gate, whys in gates.items()]
    return f"No plan: between them the gates rejected everything: {', '.join(parts)}."


def _cost(cell: FaultCell) -> str:
    name = NAMES.get(cell.fault, cell.fault)
    if not cell.effects:
        return f"{name} costs no attainment that could be seen"
    worst = cell.effects[0]
    points = worst.points
    return (
        f"{name} costs {points.value:.2g} points ({points.low:.2g} to {points.high:.2g}) of "
        f"{worst.name} attainment for {duration(worst.lasts_s)}"
    )


def duration(lasts_s: Estimate) -> str:
    """How long; ``or more`` where the stretch ends first."""
    seconds = lasts_s.value
    text = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.2g} minutes"
    return f"{text} or more" if math.isinf(lasts_s.high) else text


def _money(value: Estimate) -> str:
    if math.isinf(value.value):
        return "no price"
    ends = f"{value.low:,.0f} to {value.high:,.0f}, " if value.low < value.high else ""
    return f"USD {value.value:,.0f} ({ends}{value.kind})"


def _price(value: Estimate) -> str:
    if math.isinf(value.value):
        return "no price"
    return f"USD {value.value:.3g} ({value.low:.3g} to {value.high:.3g}, {value.kind})"


__all__ = ["duration", "empty", "fault_sentence", "headline", "knee_sentence", "sentences",
           "size_sentence"]  # fmt: skip
