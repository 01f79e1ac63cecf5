"""What is asked of a tuning, from plain values: the command line and the app ask alike."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from policy.files import policy_names
from policy.parameters import render
from traces.store import resolve_path
from twin.tune.objectives import TuneError
from twin.tune.work import TraceWork

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.parameters import Parameters
    from twin.fleet import ReplicaSpec
    from twin.replay import ReplayOptions

SPLIT = 0.7
"""Of a trace's time, that is tuned on where no held-out trace is given."""


def trace_works(
    trace: str | Path, held_out: Sequence[str | Path], fleet: list[ReplicaSpec],
    options: ReplayOptions,
) -> tuple[TraceWork, tuple[TraceWork, ...]]:  # fmt: skip
    """(what is tuned on, what the result is confirmed on).

    Args:
        held_out: traces to confirm on; none: the last part of the trace's time, which is not tuned
            on then.

    Raises:
        TraceError: a trace that there is not.
        TuneError: one to confirm on is the one that is tuned on.
    """
    path = str(resolve_path(trace))
    others = [str(resolve_path(name)) for name in held_out]
    if path in others:
        raise TuneError(f"--held-out {path}: that is the trace that is tuned on")
    if others:
        confirmed = tuple(TraceWork(name, fleet, options) for name in others)
        return TraceWork(path, fleet, options), confirmed
    rest = TraceWork(path, fleet, options, begin=SPLIT)
    return TraceWork(path, fleet, options, end=SPLIT), (rest,)


def study_in(folder: Path) -> str:
    """The storage of a study whose results lie in ``folder``; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{folder / 'study.db'}"


def policy_text(parent: Parameters, label: str) -> str:
    """A policy as a file, as its author wrote it where there is one.

    Args:
        label: a file, a preset's name, or anything else for one that has no file.
    """
    if label.endswith((".yaml", ".yml")):
        return Path(label).read_text(encoding="utf-8")
    if label in policy_names():
        shipped = files("policy") / "presets" / f"{label}.yaml"
        return shipped.read_text(encoding="utf-8")
    return render(parent, comments=True)
