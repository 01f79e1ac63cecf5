"""The fleet that a scenario describes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from twin.fleet import FleetError, cut, engine_settings, fleet_of, numbered

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twin.fleet import ReplicaSpec
    from twin.scenario.spec import Replicas

T = TypeVar("T")
NS = 1_000_000_000


def rack_of(kinds: Sequence[Replicas], folder: Path) -> tuple[list[ReplicaSpec], list[ReplicaSpec]]:
    """(replicas that are up, standbys). Ids count through the first, then through the second.

    Raises:
        FleetError, FileError: a profile that does not exist, or a figure out of range.
    """
    cards = iter(fleet_of([(_profile(kind, folder), kind.count + kind.standbys) for kind in kinds]))
    several = len({kind.profile for kind in kinds}) > 1
    up: list[ReplicaSpec] = []
    standbys: list[ReplicaSpec] = []
    for kind in kinds:
        for number in range(kind.count + kind.standbys):
            spec = _changed(next(cards), kind, number, several)
            made = cut(spec, kind.slices) if kind.slices else [spec]
            (up if number < kind.count else standbys).extend(made)
    if not up:
        raise FleetError("no replica is up at the start: give one of them a count")
    specs = numbered([*up, *standbys])
    return specs[: len(up)], specs[len(up) :]


def _profile(kind: Replicas, folder: Path) -> str:
    is_file = kind.profile.endswith((".yaml", ".yml"))
    return str(folder / kind.profile) if is_file else kind.profile


def _changed(spec: ReplicaSpec, kind: Replicas, number: int, several: bool) -> ReplicaSpec:
    """``spec`` as the ``number``-th replica of ``kind``."""
    own = (spec.profile.model,) if several else ()
    changes: dict[str, Any] = {"serves": kind.serves or own}
    if kind.kv_blocks or kind.max_model_len:
        try:
            changes["settings"] = engine_settings(
                spec.profile, spec.model, spec.gpu, kind.max_model_len, kind.kv_blocks
            )
        except ValueError as error:
            raise FleetError(str(error)) from error
    if kind.version:
        changes["version"] = kind.version
    if kind.labels:
        changes["labels"] = kind.labels
    if kind.domains:
        changes["domain"] = _dealt(kind.domains, number)
    if kind.closeness_permille:
        changes["closeness_permille"] = _dealt(kind.closeness_permille, number)
    if kind.cold_start_s is not None:
        changes["cold_start_ns"] = round(kind.cold_start_s * NS)
    return replace(spec, **changes)


def _dealt(values: Sequence[T], number: int) -> T:
    return values[number % len(values)]
