"""What a tuning leaves: files, and tables for the terminal."""

from __future__ import annotations

import csv
import json
import math
from typing import TYPE_CHECKING, Any

from twin.tune.edit import diff, edited

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType

    from twin.tune.race import Finalist
    from twin.tune.tuning import Tuned

IMPORTANCE_SHOWN = 10


def write_all(tuned: Tuned, folder: Path, parent_text: str, parent_label: str) -> str:
    """Write everything into ``folder``; gives the diff of ``best.yaml``, empty where the parent is
    the best.

    ``front.csv`` and ``front.json`` (the Pareto front and the parent), ``front/trial-N.yaml`` (its
    policies), ``trials.csv``, ``importance.json``, ``result.json`` (the verdict), ``best.yaml`` and
    ``best.diff``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = front_rows(tuned)
    _write_csv(folder / "front.csv", rows)
    _write_json(folder / "front.json", {"schema": 1, "front": rows})
    _write_csv(folder / "trials.csv", trial_rows(tuned))
    _write_json(folder / "importance.json", {
        "schema": 1, "evaluator": "PED-ANOVA", "importance": tuned.importance,
    })  # fmt: skip
    _write_json(folder / "result.json", result(tuned))
    policies = folder / "front"
    policies.mkdir(exist_ok=True)
    for old in policies.glob("trial-*.yaml"):
        old.unlink()
    for one in tuned.raced.front:
        text = policy_text(tuned, one, parent_text)
        (policies / f"trial-{one.number}.yaml").write_text(text, encoding="utf-8")
    best = policy_text(tuned, tuned.raced.best, parent_text)
    (folder / "best.yaml").write_text(best, encoding="utf-8")
    changed = diff(parent_text, best, parent_label, "best.yaml")
    (folder / "best.diff").write_text(changed + "\n" if changed else "", encoding="utf-8")
    return changed


def policy_text(tuned: Tuned, one: Finalist, parent_text: str) -> str:
    """The policy file of a finalist: the parent's, edited."""
    tuning = tuned.tuning
    knobs = {knob.key: knob.parent for knob in tuning.space.knobs}
    values = tuning.values(one.tried.params)
    changes = {key: value for key, value in values.items() if value != knobs[key]}
    if not changes:
        return parent_text
    return edited(parent_text, tuning.policy(one.tried), changes, knobs)


def result(tuned: Tuned) -> dict[str, Any]:
    """The verdict, as plain values."""
    verdict = tuned.verdict
    out: dict[str, Any] = {
        "schema": 1,
        "best": tuned.raced.best.number,
        "changes": tuned.changes,
        "better": verdict is not None and verdict.better,
        "why": why(tuned),
        "trials": counts(tuned),
    }
    if verdict is not None:
        out["held_out"] = list(verdict.held_out)
        out["seeds"] = list(verdict.seeds)
        out["constraints_broken"] = list(verdict.broken)
        out["figures"] = {
            one.figure.name: {
                "parent": _finite(one.parent),
                "tuned": _finite(one.tuned),
                "gain": _finite(one.difference.value),
                "gain_low": _finite(one.difference.low),
                "gain_high": _finite(one.difference.high),
                "gain_percent": None if one.percent is None else _finite(one.percent),
                "better": "more" if one.figure.better > 0 else "less",
            }
            for one in verdict.compared
        }
    return out


def why(tuned: Tuned) -> str:
    """The verdict in a sentence."""
    if tuned.verdict is None:
        own = tuned.raced.best.values
        broken = [name for name, by in tuned.tuning.goals.excesses(own).items() if by > 0]
        also = f", though it does not keep {' and '.join(broken)}" if broken else ""
        return f"not better: no trial was better than the parent, which stays{also}"
    return tuned.verdict.why


def counts(tuned: Tuned) -> dict[str, int]:
    """How many trials there were, and how they ended."""
    tried = tuned.tuning.tried.values()
    whole = sum(one.whole for one in tried)
    return {"finished": len(tried), "whole": whole, "stopped_early": len(tried) - whole}


def front_rows(tuned: Tuned) -> list[dict[str, Any]]:
    """The Pareto front and the parent: figures (means over seeds) and values by key."""
    parent = tuned.raced.finalists[0]
    shown = [parent, *(one for one in tuned.raced.front if one is not parent)]
    ahead = {one.number for one in tuned.raced.front}
    return [
        {
            "trial": one.number,
            "role": ", ".join(
                word for word, holds in (
                    ("parent", one is parent), ("front", one.number in ahead),
                    ("best", one is tuned.raced.best),
                ) if holds
            ),
            "seeds": len(one.by_seed),
            **{name: _finite(value) for name, value in one.values.items()},
            **_params(tuned, one.tried.params),
        }
        for one in shown
    ]  # fmt: skip


def trial_rows(tuned: Tuned) -> list[dict[str, Any]]:
    """Every trial; figures of one that was stopped are of the part that was played."""
    return [
        {
            "trial": one.number,
            "blocks": len(one.blocks),
            "stopped_for": "" if one.whole else one.beaten_by,
            "violation": one.violation,
            **{name: _finite(value) for name, value in one.values.items()},
            **_params(tuned, one.params),
        }
        for _, one in sorted(tuned.tuning.tried.items())
    ]


def tables(tuned: Tuned) -> RenderableType:
    """The front, and which keys matter."""
    from rich.console import Group

    parts = [_front_table(tuned)]
    if tuned.importance:
        parts.append(_importance_table(tuned))
    if tuned.verdict is not None:
        parts.append(_verdict_table(tuned))
    return Group(*parts)


def _front_table(tuned: Tuned) -> Any:
    from rich.table import Column, Table

    figures = [figure.name for figure in tuned.tuning.goals.figures]
    columns = [Column(name, overflow="fold") for name in figures]
    table = Table("trial", "", "seeds", *columns, title="Pareto front", title_justify="left")
    for row in front_rows(tuned):
        cells = [_shown(row[name]) for name in figures]
        style = "bold green" if "best" in row["role"] else ""
        table.add_row(str(row["trial"]), row["role"], str(row["seeds"]), *cells, style=style)
    return table


def _importance_table(tuned: Tuned) -> Any:
    from rich.table import Table

    table = Table("key", "share", "tried", title="What matters (PED-ANOVA)", title_justify="left")
    knobs = {knob.key: knob for knob in tuned.tuning.space.knobs}
    for name, share in list(tuned.importance.items())[:IMPORTANCE_SHOWN]:
        table.add_row(name, f"{share * 100:.0f} %", knobs[name].text())
    return table


def _verdict_table(tuned: Tuned) -> Any:
    from rich.table import Table

    verdict = tuned.verdict
    assert verdict is not None
    title = f"Held out: {'; '.join(verdict.held_out)}; seeds: {len(verdict.seeds)}"
    table = Table(
        "figure", "parent", "tuned", "gain", "95 % interval of the gain", title=title,
        title_justify="left",
    )  # fmt: skip
    for one in verdict.compared:
        difference = one.difference
        interval = f"{_shown(difference.low)} to {_shown(difference.high)}"
        table.add_row(
            one.figure.name, _shown(one.parent), _shown(one.tuned), _shown(difference.value),
            interval,
        )  # fmt: skip
    return table


def _params(tuned: Tuned, params: dict[str, Any]) -> dict[str, Any]:
    values = tuned.tuning.values(params)
    return {knob.key: values[knob.key] for knob in tuned.tuning.space.knobs}


def _shown(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, allow_nan=False) + "\n", encoding="utf-8")
