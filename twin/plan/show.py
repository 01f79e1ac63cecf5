"""A plan on the terminal and in a file."""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from twin.plan.estimates import Estimate
from twin.plan.words import duration, sentences

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import RenderableType

    from twin.plan.machines import Machine
    from twin.plan.planning import Plan, Size
    from twin.plan.questions import Answer

LEFT_OUT = frozenset({"outcomes", "outcome", "load", "folder", "path"})


def sizes_table(sizes: tuple[Size, ...] | list[Size], title: str) -> RenderableType:
    """One row a machine and growth."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    card = short_names([size.machine for size in sizes])
    priced = any(size.usd_per_million_good_tokens is not None for size in sizes)
    for name in ("load", "card", "replicas", "formula", "USD a month",
                 *(("USD/M good",) if priced else ()), "kind"):  # fmt: skip
        left = name in ("card", "kind")
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    for size in sizes:
        bracket = f"{size.bracket[0]} to {size.bracket[1]}"
        if size.replicas is None:
            assert size.refused is not None
            table.add_row(f"{size.growth:g}x", card[size.machine.name], "none", bracket, "",
                          *(("",) if priced else ()), f"gate {size.refused.gate}")  # fmt: skip
            continue
        low, high = int(size.replicas.low), int(size.replicas.high)
        count = f"{size.count}" + (f" ({low} to {high})" if low < high else "")
        month = "" if size.usd_per_month is None else f"{size.usd_per_month.value:,.0f}"
        each = size.usd_per_million_good_tokens
        million = "" if each is None else f"{each.value:.3g} ({each.low:.3g} to {each.high:.3g})"
        table.add_row(f"{size.growth:g}x", card[size.machine.name], count, bracket, month,
                      *((million,) if priced else ()), size.replicas.kind)  # fmt: skip
    return table


def short_names(machines: Sequence[Machine]) -> dict[str, str]:
    """By name: without the model, which is the same for all, where that tells them apart. With it
    no row fits a terminal of 80 columns."""
    names = list(dict.fromkeys(machine.name for machine in machines))
    short = {}
    for name in names:
        card, _, rest = name.partition("/")
        _, at, size = rest.partition("@")
        short[name] = card + at + size
    return short if len(set(short.values())) == len(names) else {name: name for name in names}


def report(plan: Plan) -> RenderableType:
    """Tables, then sentences."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    load = plan.load
    notes = f" ({'; '.join(load.notes)})" if load.notes else ""
    parts: list[RenderableType] = [
        Text(f"{load.trace}: {load.rows:,} requests in {load.span_s:,.0f} s{notes}", "bold"),
        Text(f"Promised: {plan.promise.text()}; {plan.promise.confidence:.0%} sure. Policy: "
             f"{plan.policy}, a fleet of fixed size.", "dim"),
    ]  # fmt: skip
    if plan.sizes:
        parts.append(sizes_table(plan.sizes, "Fewest replicas"))
    if plan.faults:
        table = Table(title="Faults at the size found", title_justify="left", box=SIMPLE_HEAD)
        card = short_names([size.machine for size in plan.sizes])
        for name in ("load", "card", "replicas", "fault", "holds", "hardest hit", "points", "for"):
            table.add_column(name)
        for cell in plan.faults:
            worst = cell.effects[0] if cell.effects else None
            points = "" if worst is None else (
                f"{worst.points.value:.2g} ({worst.points.low:.2g} to {worst.points.high:.2g})"
            )  # fmt: skip
            table.add_row(
                f"{cell.size.growth:g}x", card[cell.size.machine.name], str(cell.size.count),
                cell.fault,
                "yes" if cell.holds else "no", worst.name if worst else "none", points,
                duration(worst.lasts_s) if worst else "",
            )  # fmt: skip
        parts.append(table)
    if plan.knee is not None:
        table = Table(title="Knee", title_justify="left", box=SIMPLE_HEAD)
        names = sorted(plan.knee.curve[0].attainment)
        for name in ("load", "holds", *(f"{n or 'other'} good" for n in names),
                     *(f"{n or 'other'} p95 s" for n in names)):  # fmt: skip
            table.add_column(name, justify="right")
        for point in plan.knee.curve:
            table.add_row(
                f"{point.multiple:.3g}x", "yes" if point.holds else "no",
                *(f"{point.attainment.get(n, math.nan):.1%}" for n in names),
                *(_seconds(point.ttft_s_p95.get(n, math.nan)) for n in names),
            )  # fmt: skip
        parts.append(table)
    # Where there is no plan, the sentence names them all.
    for one in dict.fromkeys(plan.rejected) if plan.best(plan.growths[0]) else ():
        parts.append(Text(f"{one.name}: gate {one.gate}: {one.why}", "yellow"))
    parts += [Text(text) for text in sentences(plan)]
    return Group(*parts)


def write_json(thing: Plan | Answer, path: Path) -> None:
    """All figures with kind and interval; what has no end becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document_of(thing), indent=1) + "\n", encoding="utf-8")


def document_of(thing: Plan | Answer) -> dict[str, Any]:
    """What ``write_json`` writes, as plain values."""
    plain: dict[str, Any] = plain_of(thing)
    if "sizes" in plain:
        plain["sentences"] = sentences(thing)  # type: ignore[arg-type]
    return plain


def estimate_of(raw: Mapping[str, Any]) -> Estimate:
    """A figure of such a document: null is what has no end."""
    ends = {name: math.inf if raw[name] is None else raw[name] for name in ("value", "low", "high")}
    return Estimate(raw["name"], **ends, unit=raw["unit"], kind=raw["kind"], runs=raw["runs"])


def plain_of(value: Any) -> Any:
    """A part of it as plain values; what has no end, or is no number, is None."""
    from twin.plan.machines import Machine

    if isinstance(value, Machine):
        return value.name
    if is_dataclass(value):
        return {
            field.name: plain_of(getattr(value, field.name))
            for field in fields(value) if field.name not in LEFT_OUT
        }  # fmt: skip
    if isinstance(value, dict):
        return {str(name): plain_of(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return [plain_of(part) for part in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | int) or value is None:
        return value
    import msgspec

    return msgspec.to_builtins(value)


def _seconds(value: float) -> str:
    return "no end" if math.isinf(value) else f"{value:.2g}"
