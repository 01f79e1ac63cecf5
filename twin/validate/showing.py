"""Evidence on the terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console, RenderableType

    from policy.evidence import Evidence, Figure, Source


def shown(evidence: Evidence, figures: bool = False) -> Group:
    """Whom it is about, its gates with their reasons, and what the canary should show; with
    ``figures`` every figure as well."""
    parts: list[RenderableType] = [
        Text("\n".join(_head(evidence))),
        _gates(evidence),
        Text("\n".join(_canary(evidence))),
    ]
    if figures:
        parts.append(_figures(evidence))
    return Group(*parts)


def print_evidence(evidence: Evidence, console: Console, figures: bool = False) -> None:
    console.print(shown(evidence, figures))


def _head(evidence: Evidence) -> Iterator[str]:
    made = datetime.fromtimestamp(evidence.made_s, UTC)
    yield (
        f"{evidence.name} ({evidence.policy_hash[:12]}) against {evidence.against_name}"
        f" ({evidence.against[:12]}): {'PASS' if evidence.holds else 'FAIL'}"
    )
    yield (
        f"made {made:%Y-%m-%d %H:%M:%S} UTC with policy code {evidence.code_hash[:12]},"
        f" {len(evidence.seeds)} seeds{', quick' if evidence.quick else ''},"
        f" {'signed' if evidence.signature else 'NOT SIGNED'}"
    )
    for source in evidence.sources:
        yield f"  {source.kind:9} {source.name} ({source.sha256[:12]}){_trust(source)}"


def _trust(source: Source) -> str:
    if source.kind != "profile":
        return ""
    error = source.held_out_error_percent
    off = "error unknown" if error is None else f"off by {error:g} %"
    age = "" if source.age_days is None else f", {source.age_days:.1f} days old"
    return f" {source.trust}, {off}{age}"


def _gates(evidence: Evidence) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("gate", no_wrap=True)
    table.add_column("holds", no_wrap=True)
    table.add_column("why")
    for gate in evidence.gates:
        mark = Text("yes", "green") if gate.holds else Text("NO", "red")
        table.add_row(gate.name, mark, Text(gate.why))
    return table


def _canary(evidence: Evidence) -> Iterator[str]:
    expected = evidence.expected
    effect = expected.effect
    yield (
        f"expected of a canary of {expected.share_permille / 10:g} %: miss share"
        f" {100 * effect.value:+.2f} points ({100 * effect.low:+.2f} to {100 * effect.high:+.2f},"
        f" {effect.kind}) against the live policy"
    )
    yield (
        f"  a policy that misses five times as often is found out within {expected.sample_size}"
        f" requests of the canary (4 in 5), at most {expected.hurt_budget} of them hurt"
    )
    for band in expected.band:
        unit = " s" if band.figure.startswith("ttft_s") else ""
        yield (
            f"  {band.figure}: {band.low:.4g} to {band.high:.4g}{unit} over {expected.window_s} s,"
            f" 99 %, {effect.kind}"
        )


def _figures(evidence: Evidence) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("figure")
    for name in ("value", "low", "high"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    rows: list[Figure] = [*evidence.figures]
    for gate in evidence.gates:
        rows += gate.figures
    for figure in rows:
        cells = (f"{value:.5g}" for value in (figure.value, figure.low, figure.high))
        table.add_row(Text(f"{figure.name} {figure.unit}".strip()), *cells, figure.kind)
    return table
