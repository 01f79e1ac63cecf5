"""What a plan is made from, read and checked: a command, a page or a test may ask for it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from policy.files import FileError, load_models, load_policy, nearest
from traces import open_trace
from twin.plan.cell import play
from twin.plan.estimates import wilson
from twin.plan.inputs import PlanError, load_prices, load_slo
from twin.plan.machines import candidates
from twin.plan.planning import Setting, coarse
from twin.plan.questions import Asking
from twin.plan.workload import models_of, workload_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from traces import Trace
    from twin.plan.machines import Machine, Rejected
    from twin.plan.planning import Size
    from twin.plan.runs import Runs
    from twin.plan.workload import Workload

SHORT_ROWS = 1500
COARSE_S = 6.0
"""No further short run is begun after this."""
LOOKED_ROWS = 200_000
"""Of a trace, to know what it names."""


@dataclass(frozen=True, slots=True)
class Ready:
    """What the options come to."""

    setting: Setting
    machines: list[Machine]
    rejected: list[Rejected]
    folder: Path
    short: Workload
    """The busiest few requests, for a first look."""
    policy: str

    def asking(self, runs: Runs, have: int = 0) -> Asking:
        """To ask the twelve questions.

        Args:
            have: replicas of the first machine that there are; 0: as many as the load takes.

        Raises:
            PlanError: no machine is left, and the gates that say why.
        """
        if have < 0:
            raise PlanError(f"--have {have}: a number of replicas, or 0")
        if not self.machines:
            raise PlanError(
                "; ".join(f"{one.name}: gate {one.gate}: {one.why}" for one in self.rejected)
            )
        machines, folder = tuple(self.machines), self.folder / "machines"
        return Asking(self.setting, machines, runs, folder, have)

    def facts(self) -> dict[str, Any]:
        """What the figures stand on, as plain values."""
        load, setting = self.setting.load, self.setting
        return {
            "trace": load.trace, "model": load.model, "rows": load.rows, "span_s": load.span_s,
            "peak_rate_per_s": load.peak_rate_per_s, "users": load.users,
            "notes": list(load.notes), "policy": self.policy,
            "promise": setting.promise.text(), "confidence": setting.promise.confidence,
            "tpot_s": setting.promise.slo.tpot_s, "draws": setting.draws, "seed": setting.seed,
            "machines": [
                {
                    "name": machine.name, "kind": machine.kind,
                    "fitted_on": machine.profile.trust.fitted_on,
                    "usd_per_hour": setting.prices.usd_per_hour(machine.gpu),
                    "price_source": setting.prices.source(machine.gpu),
                }
                for machine in self.machines
            ],
        }  # fmt: skip


@contextmanager
def prepared(
    *, trace_path: str | None, slo_path: Path | None, gpus: tuple[str, ...],
    tp_sizes: tuple[int, ...], model: str, policy_name: str, prices_path: Path | None, rows: int,
    draws: int, assume_output: int, seed: int, **others: Any,
) -> Iterator[Ready]:  # fmt: skip
    """Trace, service levels, cards and prices, read and checked.

    Args:
        others: options that say nothing about what is planned; they are left alone.

    Raises:
        PlanError, FileError, TraceError: what is missing, or cannot be used.
    """
    if trace_path is None:
        raise PlanError("--trace is missing: a trace file, or shipped:demo")
    if slo_path is None:
        raise PlanError("--slo is missing: a file of service levels; see twinkeel plan --help")
    promise = load_slo(slo_path)
    prices = load_prices(prices_path)
    parameters = load_policy(policy_name)
    trace = open_trace(trace_path)
    asked = model or next(iter(models_of(trace)), "")
    if asked not in load_models():
        hint = nearest(asked, load_models()) if asked else "the trace names none: give --model"
        raise FileError(trace_path, f"no model {asked!r} is known", key="--model", hint=hint)
    with TemporaryDirectory(prefix="twinkeel-plan-") as name:
        folder = Path(name)
        more = {"model": asked, "assume_output": assume_output}
        load = workload_of(trace, folder / "days", rows=rows, **more)  # type: ignore[arg-type]
        short = workload_of(trace, folder / "short", rows=min(rows, SHORT_ROWS), **more)  # type: ignore[arg-type]
        machines, rejected = candidates(gpus, asked, tp_sizes, folder / "machines")
        setting = Setting(load, promise, parameters, prices, draws, seed)
        yield Ready(setting, machines, rejected, folder, short, policy_name)


def first_look(ready: Ready, growths: tuple[float, ...]) -> tuple[list[Size], Iterator[str]]:
    """The formula's answer at once, and then in words whether it holds on a short stretch."""
    began_s = time.perf_counter()
    found = coarse(ready.machines, growths, ready.setting)

    def checks() -> Iterator[str]:
        for size in found:
            late = time.perf_counter() - began_s > COARSE_S
            if size.growth == growths[0] and size.replicas is not None and not late:
                yield short_check(ready, size)

    return found, checks()


def short_check(ready: Ready, size: Size) -> str:
    """One short run at the formula's size, in words."""
    setting = replace(ready.setting, load=ready.short)
    outcome = play(setting.cell(size.machine, size.count, size.growth))
    broken = ", ".join(need.text() for need in outcome.broken)
    said = "hold" if outcome.holds else f"do not hold ({broken})"
    every = outcome.groups["all", ""]
    low, high = wilson(every.good, every.offered)
    return (
        f"On the busiest {ready.short.rows:,} requests {size.machine.text(size.count)} {said}: "
        f"{every.attainment:.1%} are good ({low:.1%} to {high:.1%}, extrapolated from one short "
        "run)."
    )


@dataclass(frozen=True, slots=True)
class Named:
    """What a trace names, as far as its first ``LOOKED_ROWS`` say."""

    users: bool
    lines: tuple[str, ...]
    classes: tuple[str, ...]
    """With an empty name where a request has no class."""
    models: tuple[str, ...]


def named_in(trace: Trace) -> Named:
    """
    Raises:
        TraceError: it cannot be read.
    """
    found: dict[str, dict[str, None]] = {"business_line": {}, "sla_class": {}, "model": {}}
    users, rows = False, 0
    for batch in trace.batches([*found, "user_id"]):
        for place, names in enumerate(found.values()):
            names |= {name or "": None for name in batch.column(place).unique().to_pylist()}
        users = users or batch.column(3).null_count < batch.num_rows
        rows += batch.num_rows
        if rows >= LOOKED_ROWS:
            break
    lines, classes, models = (sorted(names) for names in found.values())
    return Named(
        users, tuple(line for line in lines if line), tuple(classes),
        tuple(model for model in models if model),
    )  # fmt: skip
