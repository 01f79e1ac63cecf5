"""What people and programs are shown of deployments: the structures of the admin API's answers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from controller.deployment.measured import Measured  # noqa: TC001 - msgspec reads it
from policy.deployment import DeploymentPlan  # noqa: TC001 - msgspec reads it

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from controller.store.deployments import Entry


class Step(msgspec.Struct, frozen=True):
    """A transition."""

    at_s: float
    """Since 1970."""
    stage: str
    share_permille: int
    why: str
    figures: dict[str, float]


class Row(msgspec.Struct, frozen=True):
    """A deployment in the history."""

    id: int
    at_s: float
    by: str
    name: str
    hash: str
    stage: str
    """Where it is, or how it ended."""
    override: str
    evidence: bool
    """There was some that could be read."""
    steps: tuple[Step, ...]


class Current(msgspec.Struct, frozen=True):
    """A deployment that is under way."""

    id: int
    name: str
    hash: str
    against: str
    against_hash: str
    stage: str
    share_permille: int
    verdict: str
    """The last one: go_on, hold or roll_back; empty: none was due yet."""
    why: str
    figures: dict[str, float]
    shadow: dict[str, int] | None
    """In stage shadow: what it would have done, by what and how often."""
    override: str
    stage_number: int = 0
    """Of the plan's, from 0."""
    stage_s: float = 0.0
    """s that it has lasted."""
    plan: DeploymentPlan | None = None
    measured: tuple[Measured, ...] = ()
    """What the evidence has predicted, and what is measured, over the plan's window."""


class Change(msgspec.Struct, frozen=True):
    """A key of the policy file that differs; null: it is not there."""

    key: str
    before: Any
    after: Any


class Diff(msgspec.Struct, frozen=True):
    """What differs from one policy to another."""

    id: int
    other: int | None
    """Whose policy it was compared with; null: with the one that ruled then."""
    changes: tuple[Change, ...]


def finite(figures: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Those that are numbers: JSON knows no infinity."""
    return {name: value for name, value in figures if math.isfinite(value)}


def row_of(entry: Entry) -> Row:
    steps = tuple(Step(*each) for each in entry.transitions)
    return Row(
        entry.id, entry.at_s, entry.by, entry.name, entry.sha256, entry.stage, entry.override,
        bool(entry.evidence), steps,
    )  # fmt: skip


def changes_between(before: str, after: str) -> Iterator[Change]:
    """Key by key; both are in ``policy.parameters.canonical`` form, or empty."""
    old, new = (dict(_flat(msgspec.json.decode(text or "{}"))) for text in (before, after))
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            yield Change(key, old.get(key), new.get(key))


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and (value or not key):
        for name, inner in value.items():
            yield from _flat(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value
