"""The study: which policies are tried, and what is known of each.

The state of a tuning is an Optuna study in a storage; the process that runs it may be ended at any
time, and several may work on one. Trial 0 is the parent. A trial is played with the first seed; at
the rungs it stops where a trial that is known in full is clearly better on the same requests.
"""

from __future__ import annotations

import os
import socket
import warnings
from dataclasses import dataclass, field
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from policy.files import FileError
from policy.parameters import canonical
from twin.tune.compare import BLOCKS_LEAST, front
from twin.tune.held import BLOCKS
from twin.tune.objectives import TuneError
from twin.tune.work import Order, Rival

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from optuna import Study, Trial
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from policy.parameters import Parameters
    from twin.tune.engines import Engine
    from twin.tune.objectives import Goals
    from twin.tune.space import Knob, Space
    from twin.tune.work import Played, Work

    Array = np.ndarray[Any, np.dtype[Any]]

RUNGS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Shares of a trace after which a trial is looked at."""
STARTUP = 16
"""Trials drawn at random before the sampler follows what they told."""
RIVALS_MOST = 8
"""Of the front, those that others are stopped for."""
INVALID_PER_TRIAL = 20
"""Draws that make no policy, for each that does, before the space is called too narrow."""
PLAYED_WHAT = "what is played"
PLAYED, INVALID, OWNER = "played", "invalid", "owner"
NAMED_S = 60.0
"""A trial that nobody says is his by then was begun by a process that is gone."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A trial that has ended."""

    number: int
    values: dict[str, float]
    """By figure."""
    blocks: Array
    params: dict[str, Any]
    violation: float
    beaten_by: int
    """-1: it was played in full."""

    @property
    def whole(self) -> bool:
        return self.beaten_by < 0


@dataclass(frozen=True, slots=True)
class Settings:
    """How to tune."""

    trials: int
    seed: int = 0
    rungs: tuple[float, ...] = RUNGS


@dataclass(slots=True)
class Tuning:
    """A study together with what it is about."""

    study: Study
    space: Space
    goals: Goals
    work: Work
    settings: Settings
    tried: dict[int, Tried] = field(default_factory=dict)
    """By number, as far as this process knows."""

    @property
    def incumbent(self) -> dict[str, Any]:
        """The parent's values, as they are stored."""
        return {knob.key: _stored(knob.parent) for knob in self.space.knobs}

    @property
    def parent(self) -> Tried | None:
        """Its trial, once it has ended."""
        return _same(self, self.incumbent)

    @property
    def points(self) -> int | None:
        """How many policies there are, where all of them are tried."""
        points = self.space.points()
        return points if points is not None and points <= self.settings.trials else None

    @property
    def wanted(self) -> int:
        """Trials in all."""
        return self.points or self.settings.trials

    def policy(self, tried: Tried) -> Parameters:
        return self.policy_of(tried.params)

    def policy_of(self, params: dict[str, Any]) -> Parameters:
        return self.space.policy(self.values(params))

    def values(self, params: dict[str, Any]) -> dict[str, Any]:
        """What a trial sets, by key, as a policy has it."""
        kinds = {knob.key: knob for knob in self.space.knobs}
        return {key: _meant(value, kinds[key]) for key, value in params.items()}

    def order_of(self, values: dict[str, float]) -> list[float]:
        """The objectives, in their order."""
        return [values[figure.name] for figure in self.goals.objectives]

    @property
    def better(self) -> list[int]:
        return [figure.better for figure in self.goals.objectives]

    def refresh(self) -> None:
        """Learn what others have added to the storage."""
        from optuna.trial import TrialState

        states = (TrialState.COMPLETE, TrialState.PRUNED)
        for trial in self.study.get_trials(deepcopy=False, states=states):
            if trial.number not in self.tried and PLAYED in trial.user_attrs:
                self.tried[trial.number] = _tried(trial)

    def front(self) -> list[Tried]:
        """The trials that no other beats; those that keep all constraints where there are any."""
        whole = [tried for tried in self.tried.values() if tried.whole]
        if not whole:
            return []
        least = min(tried.violation for tried in whole)
        able = [tried for tried in whole if tried.violation <= least]
        able.sort(key=lambda tried: tried.number)
        chosen = front([self.order_of(tried.values) for tried in able], self.better)
        return [able[place] for place in chosen]

    def rivals(self) -> tuple[Rival, ...]:
        """Whom a new trial is compared with on its way. Where no trial keeps the constraints,
        their figures count too: what breaks them less must not be stopped."""
        names = [figure.name for figure in self.goals.figures]
        directions = {figure.name: figure.better for figure in self.goals.objectives}
        known = sorted(self.front(), key=self._first_gain, reverse=True)[:RIVALS_MOST]
        if any(tried.violation for tried in known):
            for constraint in self.goals.constraints:
                directions.setdefault(constraint.figure.name, 1 if constraint.sign == ">=" else -1)
        columns = tuple(names.index(name) for name in directions)
        better = tuple(directions.values())
        return tuple(Rival(tried.number, tried.blocks, columns, better) for tried in known)

    def _first_gain(self, tried: Tried) -> float:
        first = self.goals.objectives[0]
        return tried.values[first.name] * first.better


def open_tuning(
    space: Space, goals: Goals, work: Work, settings: Settings, *, storage: str, name: str
) -> Tuning:
    """Begin a study, or go on with it.

    Args:
        storage: ``sqlite:///FILE``, ``postgresql://...``, ``redis://...`` or ``journal:FILE``.

    Raises:
        TuneError: Optuna is not installed, the storage cannot be used, or it holds a study of the
            same name about something else.
    """
    try:
        import optuna
    except ImportError as error:
        raise TuneError("tuning needs Optuna: install it with pip install 'twinkeel[tune]'") from (
            error
        )
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            seed=settings.seed, multivariate=True, constant_liar=True,
            n_startup_trials=max(4, min(STARTUP, settings.trials // 4)),
        )  # fmt: skip
        study = _opened(storage, name, goals, sampler)
    about = _about(space, goals, work)
    known = study.user_attrs.get("about")
    if known is None:
        study.set_user_attr("about", about)
    elif known != about:
        _take_over(study)
        unlike = [key for key in about if known.get(key) != about[key]]
        begun = any(trial.state.name not in ("WAITING", "FAIL") for trial in study.get_trials())
        if begun or unlike != [PLAYED_WHAT]:
            raise TuneError(
                f"study {name!r} in {_hidden(storage)} is about something else (other: "
                f"{', '.join(unlike)}): give --study a new name, or another --out"
            )
        study.set_user_attr("about", about)  # a scale that could not be played, say
    tuning = Tuning(study, space, goals, work, settings)
    tuning.refresh()
    _take_over(study)
    _enqueue(tuning)
    if tuning.tried:
        sampler.reseed_rng()  # or the first draws would come again
    return tuning


def run_trials(
    tuning: Tuning, engine: Engine, progress: Callable[[Tuning], None] = lambda tuning: None
) -> None:
    """Play trials until there are as many as were asked for.

    Raises:
        TuneError: nearly no draw makes a policy; and what an engine raises.
    """
    open_trials: dict[int, Trial] = {}
    invalid = 0
    progress(tuning)
    while True:
        while _may_ask(tuning, open_trials, engine.slots):
            trial = tuning.study.ask(distributions_of(tuning.space.knobs))
            trial.set_user_attr(OWNER, _me())
            try:
                order = _order(tuning, trial)
            except FileError as error:
                invalid += 1
                _tell_invalid(tuning.study, trial, str(error))
                if invalid > INVALID_PER_TRIAL * max(10, tuning.wanted):
                    raise TuneError(
                        f"{invalid} draws from the space made no policy, the last: {error}; "
                        "make the ranges narrower"
                    ) from error
                continue
            same = _same(tuning, trial.params)
            if same is not None:
                _tell(tuning, trial, same)
                progress(tuning)
                continue
            open_trials[trial.number] = trial
            engine.submit(order)
        if not open_trials:
            return
        order, played = engine.next()
        trial = open_trials.pop(order.number)
        _tell(tuning, trial, _of_played(tuning, trial, played))
        tuning.refresh()
        progress(tuning)


def distributions_of(knobs: Iterable[Knob]) -> dict[str, Any]:
    """For Optuna."""
    from optuna import distributions as of

    out: dict[str, Any] = {}
    for knob in knobs:
        if knob.kind == "int":
            out[knob.key] = of.IntDistribution(int(knob.low), int(knob.high), log=knob.log)
        elif knob.kind == "float":
            out[knob.key] = of.FloatDistribution(knob.low, knob.high, log=knob.log)
        else:
            out[knob.key] = of.CategoricalDistribution([_stored(value) for value in knob.choices])
    return out


def _stored(value: Any) -> Any:
    """As Optuna takes it: a list or a mapping is stored as JSON text."""
    return msgspec.json.encode(value).decode() if isinstance(value, list | dict) else value


def _meant(value: Any, knob: Knob) -> Any:
    """The other way round."""
    return next((choice for choice in knob.choices if _stored(choice) == value), value)


def _opened(storage: str, name: str, goals: Goals, sampler: Any) -> Study:
    import optuna

    of = optuna.study.StudyDirection
    directions = [of.MAXIMIZE if f.better > 0 else of.MINIMIZE for f in goals.objectives]
    try:
        study = optuna.create_study(
            storage=storage_of(storage), sampler=sampler, study_name=name, directions=directions,
            load_if_exists=True,
        )  # fmt: skip
    except TuneError:
        raise
    except ImportError as error:
        raise TuneError(f"{_hidden(storage)}: {error}: install what this storage needs") from error
    except Exception as error:  # whatever a database's driver raises
        why = str(error).partition("\n")[0]
        raise TuneError(f"{_hidden(storage)}: the storage cannot be used: {why}") from error
    if len(study.directions) != len(directions):
        raise TuneError(
            f"study {name!r} in {_hidden(storage)} has {len(study.directions)} objectives, not "
            f"{len(directions)}: give --study a new name, or another --out"
        )
    return study


def storage_of(url: str) -> BaseStorage:
    """The storage that a URL names."""
    import optuna.storages as of
    from optuna.storages import journal

    if url.startswith("redis"):
        return of.JournalStorage(journal.JournalRedisBackend(url))
    if url.startswith("journal:"):
        return of.JournalStorage(journal.JournalFileBackend(url.removeprefix("journal:")))
    if "://" not in url:
        raise TuneError(
            f"{url}: no such storage; write sqlite:///FILE, postgresql://USER@HOST/NAME, "
            "redis://HOST:PORT or journal:FILE"
        )
    options = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    return of.RDBStorage(url, engine_kwargs=options)


def _hidden(url: str) -> str:
    """Without a password."""
    head, at, tail = url.rpartition("@")
    return f"{head.partition('://')[0]}://...@{tail}" if at else url


def _about(space: Space, goals: Goals, work: Work) -> dict[str, str]:
    return {
        "the parent policy": canonical(space.parent),
        "the space": "; ".join(f"{knob.key}: {knob.text()}" for knob in space.knobs),
        "the objectives": ", ".join(figure.name for figure in goals.objectives),
        "the constraints": ", ".join(constraint.text for constraint in goals.constraints),
        PLAYED_WHAT: work.exactly(),
    }


def _enqueue(tuning: Tuning) -> None:
    """The parent first; where there are no more policies than trials, then all of them. What is in
    the study already stays as it is."""
    knobs, study = tuning.space.knobs, tuning.study
    every = [tuning.incumbent]
    if tuning.points is not None:
        grid = [
            {knob.key: _stored(value) for knob, value in zip(knobs, values, strict=True)}
            for values in product(*(knob.values() or () for knob in knobs))
        ]
        order = np.random.default_rng(tuning.settings.seed).permutation(len(grid))
        every += [grid[place] for place in order if grid[place] != tuning.incumbent]
    known = [
        trial.params or trial.system_attrs.get("fixed_params")
        for trial in study.get_trials(deepcopy=False)
        if trial.state.name != "FAIL"
    ]
    for params in every:
        if params not in known:
            study.enqueue_trial(params)


def _may_ask(tuning: Tuning, ours: dict[int, Trial], slots: int) -> bool:
    """Others wait for the parent, whom they are compared with."""
    from optuna.trial import TrialState

    if len(ours) >= slots or (ours and tuning.parent is None):
        return False
    trials = tuning.study.get_trials(
        deepcopy=False, states=(TrialState.RUNNING, TrialState.WAITING)
    )
    waiting = any(trial.state is TrialState.WAITING for trial in trials)
    running = sum(OWNER in trial.user_attrs for trial in trials)
    if tuning.points is not None:
        return waiting
    return len(tuning.tried) + running < tuning.wanted


def _order(tuning: Tuning, trial: Trial) -> Order:
    rungs = tuning.settings.rungs if tuning.work.is_trace else ()
    return Order(
        trial.number, tuning.policy_of(trial.params), tuning.work.seeds_known[0],
        tuning.rivals(), tuple(max(BLOCKS_LEAST, round(share * BLOCKS)) for share in rungs),
    )  # fmt: skip


def _same(tuning: Tuning, params: dict[str, Any]) -> Tried | None:
    """The trial that had these values already: its figures are known."""
    return next((tried for tried in tuning.tried.values() if tried.params == params), None)


def _of_played(tuning: Tuning, trial: Trial, played: Played) -> Tried:
    violation = tuning.goals.violation(played.values)
    return Tried(
        trial.number, played.values, played.blocks, trial.params, violation, played.beaten_by
    )


def _tell(tuning: Tuning, trial: Trial, tried: Tried) -> None:
    from optuna.trial import TrialState

    kept = {
        "values": tried.values,
        "blocks": tried.blocks.tolist(),  # to the last digit: equal trials must stay equal
        "violation": tried.violation,
        "beaten_by": tried.beaten_by,
    }
    trial.set_user_attr(PLAYED, msgspec.json.encode(kept).decode())
    for name, excess in tuning.goals.excesses(tried.values).items():
        trial.set_constraint(name, excess)
    if tried.whole:
        values = [_told(value, f) for value, f in
                  zip(tuning.order_of(tried.values), tuning.better, strict=True)]  # fmt: skip
        tuning.study.tell(trial, values)
    else:
        tuning.study.tell(trial, state=TrialState.PRUNED)


def _told(value: float, better: int) -> float:
    """A figure that there is none of is the worst there can be."""
    return -better * 1e12 if np.isnan(value) else value


def _tell_invalid(study: Study, trial: Trial, why: str) -> None:
    """No policy: the sampler learns to keep away."""
    from optuna.trial import TrialState

    trial.set_user_attr(INVALID, why)
    trial.set_constraint("is a policy", 1.0)
    study.tell(trial, state=TrialState.PRUNED)


def _tried(trial: FrozenTrial) -> Tried:
    kept = msgspec.json.decode(trial.user_attrs[PLAYED])
    blocks = np.array(kept["blocks"], float)
    values = {name: np.nan if v is None else v for name, v in kept["values"].items()}
    return Tried(trial.number, values, blocks, trial.params, kept["violation"], kept["beaten_by"])


def _take_over(study: Study) -> None:
    """What a process that is gone was at is played again."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        owner = trial.user_attrs.get(OWNER, "")
        if not owner and _age_s(trial) > NAMED_S:  # its process died before it had said so
            study.tell(trial.number, state=TrialState.FAIL)
        elif owner and _is_gone(owner):
            study.enqueue_trial(trial.params)
            study.tell(trial.number, state=TrialState.FAIL)


def _age_s(trial: FrozenTrial) -> float:
    began = trial.datetime_start
    return 0.0 if began is None else (datetime.now(tz=began.tzinfo) - began).total_seconds()


def _me() -> str:
    return f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())}"


def _is_gone(owner: str) -> bool:
    """Of another machine nobody knows."""
    host, pid, started = owner.split(" ")
    return host == socket.gethostname() and _started(int(pid)) != started


def _started(pid: int) -> str:
    """When a process began, in ticks since the machine did: a process id is used again. Empty: it
    is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
    return fields.rpartition(")")[2].split()[19]
