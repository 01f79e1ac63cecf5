"""The job ``tune``: what ``twinkeel tune`` does, with files that a page can draw while it runs.

Its study lies in the job's folder, so one that was cancelled goes on where it was.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from dashboards.scenario import by_name
from dashboards.shelf import Shelf, label
from policy.files import load_policy
from twin.fleet import fleet_of
from twin.replay import ReplayOptions
from twin.report.files import write_whole
from twin.summary import Slo
from twin.tune.asking import policy_text, study_in, trace_works
from twin.tune.objectives import goals_of
from twin.tune.output import counts, front_rows, write_all
from twin.tune.space import parse_space
from twin.tune.study import RUNGS, Settings
from twin.tune.tuning import Plan, Watcher, tune

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twin.tune.study import Tuning
    from twin.tune.tuning import Tuned

    Tell = Callable[[float | None, str], None]

SPACE, PROGRESS, RESULT = "space.yaml", "progress.json", "page.json"
EVERY_S = 0.4
"""How often the points are written, at most."""
TRIALS_SHARE, ROUND_SHARE = 0.8, 0.9
"""Of the whole job, when the trials are over and when the last round is."""


class Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request."""

    trace: str
    fleet: list[tuple[str, int]]
    policy: str
    """The parent."""
    space: dict[str, Any]
    """As the space file has it, objectives and constraints too."""
    slo: str
    seed: int
    speed: float
    scale: float
    scale_lengths: float
    assume_output: int
    trials: int
    seeds: int
    held_seeds: int
    held_out: list[str]
    jobs: int
    """0: one a core."""


def run(request: dict[str, Any], folder: Path, tell: Tell) -> None:
    asked = msgspec.convert(request, Asked)
    text = yaml.safe_dump(asked.space, sort_keys=False, allow_unicode=True)
    (folder / SPACE).write_text(text, encoding="utf-8")
    plan, parent_text = plan_of(asked, folder)
    tell(0.0, "playing the parent")
    tuned = tune(plan, _Pages(folder, tell))
    tell(1.0, "writing the results")
    write_all(tuned, folder, parent_text, label(asked.policy))
    _write(folder / RESULT, _result(tuned))


def plan_of(asked: Asked, folder: Path) -> tuple[Plan, str]:
    """(what to do, the parent's file as text).

    Raises:
        TuneError, FileError, FleetError, TraceError: what is asked for cannot be.
    """
    path_of = Shelf(folder.parents[1] / "uploads").path_of
    policy = str(path_of(asked.policy))
    parent = load_policy(policy)
    space = parse_space(asked.space, SPACE, parent)
    options = ReplayOptions(
        seed=asked.seed, speed=asked.speed, scale=asked.scale, scale_lengths=asked.scale_lengths,
        assume_output=asked.assume_output, slo=Slo.parse(asked.slo),
    )  # fmt: skip
    fleet = fleet_of([(by_name(name), count) for name, count in asked.fleet])
    held = [path_of(name) for name in asked.held_out]
    work, held_out = trace_works(path_of(asked.trace), held, fleet, options)
    goals = goals_of(space.objectives, space.constraints, trace=True)
    plan = Plan(
        space, goals, work, held_out, Settings(asked.trials, asked.seed, RUNGS), study_in(folder),
        seeds=asked.seeds, held_seeds=asked.held_seeds, jobs=asked.jobs or os.cpu_count() or 1,
    )  # fmt: skip
    return plan, policy_text(parent, policy)


class _Pages(Watcher):
    """Writes what there is so far."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        self._folder, self._tell = folder, tell
        self._last_s = 0.0
        self._points: dict[str, Any] = {}

    def trials(self, tuning: Tuning) -> None:
        done, of = len(tuning.tried), tuning.wanted
        self._tell(TRIALS_SHARE * min(1.0, done / of), "playing trials")
        if done < of and time.monotonic() - self._last_s < EVERY_S:
            return
        self._last_s = time.monotonic()
        self._points = points_of(tuning)
        _write(self._folder / PROGRESS, {**self._points, "phase": "trials"})

    def round(self, done: int, of: int) -> None:
        self._tell(
            TRIALS_SHARE + (ROUND_SHARE - TRIALS_SHARE) * done / max(1, of),
            "playing the best with further seeds",
        )
        _write(self._folder / PROGRESS, {**self._points, "phase": "round"})

    def confirming(self, done: int, of: int) -> None:
        share = ROUND_SHARE + (1 - ROUND_SHARE) * done / max(1, of)
        self._tell(share, "confirming on held-out traffic")


def points_of(tuning: Tuning) -> dict[str, Any]:
    """The trials as points, to be drawn."""
    figures = tuning.goals.figures
    parent = tuning.parent
    tried = [one for _, one in sorted(tuning.tried.items())]
    return {
        "done": len(tried),
        "of": tuning.wanted,
        "stopped": sum(not one.whole for one in tried),
        "figures": [
            {"name": figure.name, "unit": figure.unit, "better": figure.better}
            for figure in figures
        ],
        "objectives": len(tuning.goals.objectives),
        "parent": None if parent is None else parent.number,
        "front": [one.number for one in tuning.front()],
        "trials": [
            {
                "n": one.number, "whole": one.whole, "kept": one.violation <= 0,
                "values": [_finite(one.values[figure.name]) for figure in figures],
            }
            for one in tried
        ],
    }  # fmt: skip


def _result(tuned: Tuned) -> dict[str, Any]:
    """What the page shows that the other files do not say in one place."""
    knobs = {knob.key: knob for knob in tuned.tuning.space.knobs}
    return {
        "counts": counts(tuned),
        "front": front_rows(tuned),
        "best": tuned.raced.best.number,
        "figures": [figure.name for figure in tuned.tuning.goals.figures],
        "changes": [
            {"key": key, "parent": knobs[key].parent, "tuned": value, "tried": knobs[key].text()}
            for key, value in tuned.changes.items()
        ],
    }


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def _write(path: Path, value: Any) -> None:
    """Whole or not at all: a page reads it meanwhile."""
    write_whole(path, json.dumps(value, allow_nan=False))
