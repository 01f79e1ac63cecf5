"""A whole tuning: trials, the last round, the confirmation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from twin.tune.confirm import HELD_SEED, Verdict, confirm
from twin.tune.engines import HereEngine, LocalEngine, RayEngine
from twin.tune.objectives import TuneError
from twin.tune.race import Raced, race
from twin.tune.study import Settings, Tuning, open_tuning, run_trials

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.parameters import Parameters
    from twin.tune.engines import Engine
    from twin.tune.objectives import Goals
    from twin.tune.space import Space
    from twin.tune.work import Work

EngineName = Literal["local", "ray"]
IMPORTANCE_LEAST = 20
"""Trials played in full: a tenth of them are two."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tuned, and how."""

    space: Space
    goals: Goals
    work: Work
    held_out: tuple[Work, ...]
    """What the result is confirmed on."""
    settings: Settings
    storage: str
    study: str = "tune"
    seeds: int = 3
    """Of the last round, the trials' own counted."""
    held_seeds: int = 3
    """Of the confirmation, for each of ``held_out``."""
    engine: EngineName = "local"
    jobs: int = 1


@dataclass(frozen=True, slots=True)
class Tuned:
    """What came of it."""

    tuning: Tuning
    raced: Raced
    best: Parameters
    """The parent where nothing was found that is not worse somewhere."""
    changes: dict[str, Any]
    """Of the parent, by key; none: it is the parent."""
    verdict: Verdict | None
    """None: there is nothing to confirm."""
    importance: dict[str, float]
    """By key, together 1; empty: too few trials were played in full."""


class Watcher:
    """Told of what is going on; this one does nothing."""

    def trials(self, tuning: Tuning) -> None:
        """A trial has ended."""

    def round(self, done: int, of: int) -> None:
        """Seeds of the last round."""

    def confirming(self, done: int, of: int) -> None:
        """Plays of the confirmation."""


def tune(plan: Plan, watcher: Watcher | None = None) -> Tuned:
    """Tune.

    Raises:
        TuneError: it cannot be run.
        TraceError, FileError, FleetError, FaultError: what is to be played cannot be.
    """
    watcher = watcher or Watcher()
    tuning = open_tuning(
        plan.space, plan.goals, plan.work, plan.settings, storage=plan.storage, name=plan.study
    )
    engine = engine_of(plan, plan.work)
    try:
        run_trials(tuning, engine, watcher.trials)
        if tuning.parent is None:
            raise TuneError("another process still plays the parent: wait for it, then go on")
        raced = race(tuning, engine, further_seeds(plan.work, plan.seeds), watcher.round)
    finally:
        engine.close()
    best = tuning.policy(raced.best.tried)
    values = tuning.values(raced.best.tried.params)
    changes = {
        knob.key: value for knob in plan.space.knobs if (value := values[knob.key]) != knob.parent
    }
    verdict = _confirmed(plan, best, watcher) if changes else None
    return Tuned(tuning, raced, best, changes, verdict, importance(tuning))


def engine_of(plan: Plan, work: Work) -> Engine:
    """What plays it."""
    if plan.engine == "ray":
        return RayEngine(work, plan.goals, plan.jobs)
    if plan.jobs == 1:
        return HereEngine(work, plan.goals)
    return LocalEngine(work, plan.goals, plan.jobs)


def further_seeds(work: Work, count: int) -> Sequence[int]:
    """After the one that the trials had."""
    known = list(work.seeds_known)
    more = range(known[-1] + 1, HELD_SEED)
    return [*known, *more[: max(0, count - len(known))]][1:count]


def importance(tuning: Tuning) -> dict[str, float]:
    """How much each key decides whether a trial is among the best tenth: PED-ANOVA (Watanabe et
    al., IJCAI 2023), over the trials that were played in full. It takes nothing but numpy; fANOVA
    would take scikit-learn."""
    import optuna

    if sum(tried.whole for tried in tuning.tried.values()) < IMPORTANCE_LEAST:
        return {}
    try:
        found = optuna.importance.get_param_importances(
            tuning.study, evaluator=optuna.importance.PedAnovaImportanceEvaluator()
        )
    except (ValueError, RuntimeError):  # all the same
        return {}
    return {name: float(value) for name, value in found.items() if value == value}


def _confirmed(plan: Plan, best: Parameters, watcher: Watcher) -> Verdict:
    of = 2 * plan.held_seeds * len(plan.held_out)
    done = 0

    def one() -> None:
        nonlocal done
        done += 1
        watcher.confirming(done, of)

    watcher.confirming(0, of)
    return confirm(
        plan.space.parent, best, plan.goals, plan.held_out, plan.held_seeds,
        lambda work: engine_of(plan, work), one,
    )  # fmt: skip
