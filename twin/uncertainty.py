"""A replay once more, with what is not known about its profiles drawn: intervals for its figures.

Each drawn run has coefficients of its own for every profile, drawn from what the fit knows of their
errors, and a seed of its own. The policy is told the profiles as they are written in every run: a
live controller, too, predicts with the profile that it has, on machines that are as they are.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any
from zlib import crc32

import msgspec
import numpy as np

from policy.cost import Coefficient, Overheads, Step, StepCost
from twin.fleet import ReplicaSpec, cut
from twin.intervals import (
    LEVEL_PERCENT,
    RUNS,
    RUNS_LEAST,
    Intervals,
    UncertaintyError,
    figures_of,
    intervals_around,
)
from twin.replay import replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from policy.cost import Profile
    from policy.events import ReplicaUp
    from policy.parameters import Parameters
    from traces import Trace
    from twin.replay import Replay, ReplayOptions

    Array = np.ndarray[Any, np.dtype[Any]]

SD_WIDTHS = 3.92
"""Standard deviations in a 95 % interval of a normal variable."""
NO_ROOM = 1e-9
"""A part of a variance that is as good as nothing."""
PADDINGS = ("batch_padding", "token_padding")
ROUNDING = 1e-4
"""Files round their numbers: by this part of a variance a covariance may be none."""
SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Errors:
    """What a profile says of the errors of its coefficients."""

    joint: tuple[str, ...]
    """Coefficients of the fit's covariance."""
    root_ns: Array
    """Their covariance is this matrix times its transpose."""
    alone_sd_ns: dict[str, float]
    """Coefficients with an interval only: standard deviations."""
    run_to_run: float
    """Standard deviation of the factor that all times share."""
    not_covered: tuple[str, ...]

    def text(self) -> str:
        """What is drawn, in words."""
        parts = []
        if self.joint:
            parts.append(f"together, by the fit's covariance: {', '.join(self.joint)}")
        if self.alone_sd_ns:
            parts.append(f"each by its own interval: {', '.join(self.alone_sd_ns)}")
        if self.run_to_run:
            parts.append(f"a factor on all times, {self.run_to_run * 100:g} % from run to run")
        return "; ".join(parts) or "nothing: no error is known of any coefficient"


@dataclass(frozen=True, slots=True)
class DrawnSpec(ReplicaSpec):
    """A replica that is not quite as its profile says, announced as the profile says."""

    told: ReplicaSpec | None = None

    def up(self, version: str | None = None) -> ReplicaUp:
        assert self.told is not None
        return self.told.up(version)


def errors_of(profile: Profile) -> Errors:
    """What can be drawn of a profile, and what cannot.

    Raises:
        UncertaintyError: its covariance is none.
    """
    known = profile.trust.uncertainty
    coefficients = dict(_coefficients(profile))
    joint: tuple[str, ...] = ()
    root_ns: Array = np.zeros((0, 0))
    run_to_run = 0.0
    if known is not None:
        joint, run_to_run = known.names, known.run_to_run_percent / 100
        missing = [name for name in joint if name not in coefficients]
        if missing:
            raise UncertaintyError(
                f"{profile.name}: trust.uncertainty.names has {missing[0]}, which the profile does "
                "not give"
            )
        root_ns = _root(np.array(known.covariance_ns2), profile.name)
    alone = {
        name: (coefficient.interval[1] - coefficient.interval[0]) / SD_WIDTHS
        for name, coefficient in coefficients.items()
        if name not in joint and coefficient.interval is not None
    }
    rest = [name for name in coefficients if name not in joint and name not in alone]
    step = profile.step
    counts = [name for name in step.__struct_fields__ if name.endswith("_tokens")]
    rest += [name for name in counts if getattr(step, name) is not None]
    rest += [name for name in PADDINGS if getattr(step, name)]
    return Errors(joint, root_ns, alone, run_to_run, tuple(rest))


def perturbed(profile: Profile, generator: np.random.Generator) -> Profile:
    """The profile with coefficients drawn from what it says of their errors, none below 0, and no
    fixed part below what a padding takes off it.

    Those of the fit's covariance are drawn together; those with an interval only each for itself,
    with a standard deviation of its width / 3.92. The factor from run to run is log-normal, its
    median 1, and multiplies all times. What is drawn has no interval any more.

    Raises:
        UncertaintyError: the covariance is none.
    """
    errors = errors_of(profile)
    shifts = dict(
        zip(errors.joint, errors.root_ns @ generator.standard_normal(len(errors.joint)),
            strict=True)
    )  # fmt: skip
    for name, sd_ns in errors.alone_sd_ns.items():
        shifts[name] = sd_ns * generator.standard_normal()
    sigma = math.sqrt(math.log1p(errors.run_to_run**2))
    factor = math.exp(sigma * generator.standard_normal())

    paddings = {
        name: tuple(
            msgspec.structs.replace(row, extra_ns=row.extra_ns * factor)
            for row in getattr(profile.step, name)
        )
        for name in PADDINGS
    }
    of_batch, of_tokens = (
        min((row.extra_ns for row in paddings[name]), default=0.0) for name in PADDINGS
    )
    floors_ns = {"decode_fixed_ns": -(of_tokens + of_batch), "prefill_fixed_ns": -of_tokens}

    def drawn(name: str, coefficient: Coefficient) -> Coefficient:
        value_ns = max(0.0, coefficient.value + float(shifts.get(name, 0.0))) * factor
        value_ns = max(value_ns, floors_ns.get(name, 0.0))
        return Coefficient(value=value_ns, source=coefficient.source)

    def changed(section: Step | Overheads) -> dict[str, Coefficient]:
        return {name: drawn(name, value) for name, value in _in_section(section)}

    step = msgspec.structs.replace(profile.step, **paddings, **changed(profile.step))
    overheads = msgspec.structs.replace(profile.overheads, **changed(profile.overheads))
    return msgspec.structs.replace(profile, step=step, overheads=overheads)


def drawn_fleet(fleet: Iterable[ReplicaSpec], seed: int, run: int) -> list[ReplicaSpec]:
    """The fleet of drawn run ``run``: each profile is drawn once, and all its replicas share it.

    A profile's draw hangs on the seed, the run and its name alone: it is the same under every
    policy and in every fleet.

    Raises:
        UncertaintyError: a profile's covariance is none, or a replica's step times are not those of
            its profile.
    """
    profiles: dict[Profile, tuple[Profile, StepCost]] = {}
    out: list[ReplicaSpec] = []
    for spec in fleet:
        profile = spec.profile
        if profile not in profiles:
            generator = np.random.default_rng([seed % SEEDS, run, crc32(profile.name.encode())])
            fresh = perturbed(profile, generator)
            profiles[profile] = fresh, StepCost.from_profile(fresh)
        fresh, cost = profiles[profile]
        _check_cost(spec)
        if spec.mig:
            cost = _sliced(spec, fresh, cost).cost
        fields = {name: getattr(spec, name) for name in ReplicaSpec.__dataclass_fields__}
        out.append(DrawnSpec(**{**fields, "profile": fresh, "cost": cost, "told": spec}))
    return out


def drawn_seed(seed: int, run: int) -> int:
    """Seed of drawn run ``run`` of a replay with ``seed``."""
    return int(np.random.default_rng([seed % SEEDS, run]).integers(2**31))


def uncertain_replay(
    plain: Replay,
    trace: Trace,
    parameters: Parameters,
    *,
    runs: int = RUNS,
    jobs: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> Replay:
    """``plain`` with intervals for its figures; its figures stay what they are.

    Args:
        plain: the replay of ``trace`` under ``parameters`` with the profiles as they are written.
        runs: drawn runs beside it. Only their figures are kept.
        jobs: processes; the intervals are the same with any number. 0: one a core.
        progress: called when a drawn run has ended.

    Raises:
        UncertaintyError: runs too few, a profile's covariance is none, or a process was ended from
            outside.
        TraceError: a drawn run cannot be played.
    """
    check_runs(runs)
    errors = {spec.profile.name: errors_of(spec.profile) for spec in plain.fleet}
    options = replace(plain.options, log="hash")
    task = _Task(trace, plain.fleet, parameters, options)
    drawn: list[dict[str, float]] = []
    for figures in _played(task, runs, min(runs, jobs or os.cpu_count() or 1)):
        drawn.append(figures)
        progress()
    values = figures_of(plain)
    intervals = Intervals(
        runs=runs,
        covered={name: found.text() for name, found in errors.items()},
        not_covered={name: found.not_covered for name, found in errors.items()},
        values=values,
        by_figure=intervals_around(values, drawn),
    )
    return replace(plain, intervals=intervals)


def check_runs(runs: int) -> None:
    """Raises UncertaintyError where ``runs`` are too few for an interval."""
    if runs < RUNS_LEAST:
        raise UncertaintyError(
            f"{runs} runs are too few: a {LEVEL_PERCENT} % interval takes {RUNS_LEAST} or more"
        )


@dataclass(frozen=True, slots=True)
class _Task:
    trace: Trace
    fleet: list[ReplicaSpec]
    parameters: Parameters
    options: ReplayOptions

    def play(self, run: int) -> dict[str, float]:
        seed = self.options.seed
        fleet = drawn_fleet(self.fleet, seed, run)
        options = replace(self.options, seed=drawn_seed(seed, run))
        return figures_of(replay(self.trace, fleet, self.parameters, options))


def _played(task: _Task, runs: int, jobs: int) -> Iterator[dict[str, float]]:
    numbers = range(1, runs + 1)
    if jobs == 1:
        yield from map(task.play, numbers)
        return
    try:
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            yield from pool.map(task.play, numbers)
    except BrokenProcessPool as error:
        raise UncertaintyError(
            f"one of {jobs} processes was ended from outside, perhaps for want of memory: "
            "use fewer with --jobs"
        ) from error


def _check_cost(spec: ReplicaSpec) -> None:
    plain = StepCost.from_profile(spec.profile)
    own = _sliced(spec, spec.profile, plain).cost if spec.mig else plain
    if own != spec.cost:
        raise UncertaintyError(
            f"{spec.name}: its step times are not those of profile {spec.profile.name}, so the "
            "profile's errors say nothing of them"
        )


def _sliced(spec: ReplicaSpec, profile: Profile, cost: StepCost) -> ReplicaSpec:
    """A MIG slice like ``spec`` of a card with this profile."""
    return cut(replace(spec, profile=profile, cost=cost, mig=""), [spec.mig])[0]


def _coefficients(profile: Profile) -> Iterator[tuple[str, Coefficient]]:
    yield from _in_section(profile.step)
    yield from _in_section(profile.overheads)


def _in_section(section: Step | Overheads) -> Iterator[tuple[str, Coefficient]]:
    for name in section.__struct_fields__:
        value = getattr(section, name)
        if isinstance(value, Coefficient):
            yield name, value


def _root(covariance: Array, profile: str) -> Array:
    """A lower triangle that gives the covariance, times its transpose.

    By way of the correlations: variances of a fixed time and of a quadratic term lie fifteen
    decades apart. No eigenvectors, whose signs differ between machines.
    """
    sd = np.sqrt(np.diag(covariance))
    scale = np.where(sd > 0, sd, 1.0)
    correlation = covariance / np.outer(scale, scale)
    size = sd.size
    root = np.zeros((size, size))
    for i in range(size):
        left = correlation[i, i] - float(root[i, :i] @ root[i, :i])
        rest = correlation[i + 1 :, i] - root[i + 1 :, :i] @ root[i, :i]
        if left > NO_ROOM:
            root[i, i] = math.sqrt(left)
            root[i + 1 :, i] = rest / root[i, i]
        elif left < -ROUNDING or (np.abs(rest) > math.sqrt(ROUNDING)).any():
            raise UncertaintyError(
                f"{profile}: trust.uncertainty.covariance_ns2 is no covariance: with what the rows "
                f"before it say, row {i + 1} would have a variance below 0; calibrate again"
            )
    return np.asarray(scale[:, None] * root)
