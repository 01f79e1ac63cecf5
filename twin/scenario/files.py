"""Scenario files: where they lie, and how one becomes a set-up for each of its runs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from policy.files import FileError, decode, load_policy, nearest, read_document
from policy.parameters import Parameters
from twin.scenario.merge import merged
from twin.scenario.spec import SCHEMA, Head, PolicyChoice, Setup

if TYPE_CHECKING:
    from collections.abc import Mapping

HEAD = tuple(Head.__struct_fields__)
SETUP = tuple(Setup.__struct_fields__)
BASE = "base"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario file, checked through and through."""

    head: Head
    runs: dict[str, Setup]
    folder: Path
    """Where it lies; paths in it start here."""
    where: str
    """What errors call it."""


def scenario_names() -> tuple[str, ...]:
    """Names of the scenarios that are shipped."""
    return tuple(sorted(path.stem for path in _shipped().glob("*.yaml")))


def scenario_path(name_or_path: str | Path) -> Path:
    """A scenario file, or a shipped one by its name.

    Raises:
        FileError: there is no such scenario.
    """
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or name.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    if name not in scenario_names():
        raise FileError(name, "no such scenario", value=name, hint=nearest(name, scenario_names()))
    return _shipped() / f"{name}.yaml"


def load_scenario(name_or_path: str | Path) -> Scenario:
    """Read a scenario and check all of it, every run and every policy included.

    Raises:
        FileError: which key is wrong, what stands there, and what was perhaps meant.
    """
    path = scenario_path(name_or_path)
    return parse_scenario(read_document(path), str(path), path.parent)


def parse_scenario(raw: Mapping[str, Any], where: str, folder: Path) -> Scenario:
    """The same of a document that is read already."""
    raw = _with_on(raw)
    for key in raw:
        if key not in (*HEAD, *SETUP):
            raise FileError(where, "unknown key", key=key, hint=nearest(key, (*HEAD, *SETUP)))
    head = decode({key: raw[key] for key in HEAD if key in raw}, Head, where, schema=SCHEMA)
    base = _plain_policy({key: raw[key] for key in SETUP if key in raw})
    runs = {}
    for name, over in (head.runs or {BASE: {}}).items():
        in_run = f"{where}: runs.{name}" if over else where
        runs[name] = _setup(base, over, in_run)
        policy_of(runs[name].policy, folder, f"{in_run}: policy.set")
    _check_expectations(head, runs, where)
    return Scenario(head, runs, folder, where)


def policy_of(choice: PolicyChoice, folder: Path, where: str) -> Parameters:
    """The policy that is meant.

    Raises:
        FileError: no such policy, or a key or value that it cannot have.
    """
    name = choice.preset
    loaded = load_policy(folder / name if name.endswith((".yaml", ".yml")) else name)
    if not choice.set:
        return loaded
    return decode(merged(msgspec.to_builtins(loaded), choice.set, where), Parameters, where)


def _setup(base: Mapping[str, Any], over: Mapping[str, Any], where: str) -> Setup:
    for key in over:
        if key not in SETUP:
            raise FileError(where, "unknown key", key=key, hint=nearest(key, SETUP))
    return decode(_plain_policy(merged(base, over, where)), Setup, where, schema=None)


def _with_on(raw: Any) -> Any:
    """YAML 1.1 reads a bare ``on`` as true, as a key too: there the word is meant."""
    if isinstance(raw, dict):
        return {"on" if key is True else key: _with_on(value) for key, value in raw.items()}
    return [_with_on(value) for value in raw] if isinstance(raw, list) else raw


def _plain_policy(raw: dict[str, Any]) -> dict[str, Any]:
    """A policy's name alone stands for the policy as it is."""
    name = raw.get("policy")
    return {**raw, "policy": {"preset": name}} if isinstance(name, str) else raw


def _check_expectations(head: Head, runs: Mapping[str, Setup], where: str) -> None:
    for number, expectation in enumerate(head.expect):
        for run in expectation.value.runs():
            if run not in runs:
                raise FileError(
                    where, f"there is no run {run!r}", key=f"expect[{number}].value",
                    value=run, hint=nearest(run, runs),
                )  # fmt: skip


def _shipped() -> Path:
    return Path(str(resources.files("twin"))) / "scenarios"
