"""The plan: for each growth and card the fewest replicas that hold, what faults do to them, the
knee, and what it costs.

First a formula brackets the size, then the twin looks for it on the recorded day by bisection, and
then the size found is confirmed on other days with drawn step times: it grows until the lower end
of a prediction interval holds, at the stated confidence.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from twin.plan.causes import Cause, cause_of
from twin.plan.cell import FAULTS, Cell, FaultName, Outcome
from twin.plan.effects import Effect, effects_of
from twin.plan.estimates import Estimate, held, predicted
from twin.plan.formula import alone_s, balance, replicas_least, replicas_likely
from twin.plan.inputs import PlanError, Prices
from twin.plan.machines import Machine, Rejected
from twin.plan.search import largest_load, smallest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policy.evidence import Kind
    from policy.parameters import Parameters
    from twin.plan.inputs import Promise
    from twin.plan.runs import Runs
    from twin.plan.workload import Workload

DRAWS = 4
"""Days that a size is confirmed on, the recorded one with them."""
REPLICAS_MOST = 512
BEYOND = 4
"""Times what the formula says, and a few: what so many do not hold, more do not either."""
OUTSIDE_SHARE = 0.01
"""Of requests that may be longer than what the profile was fitted on."""
KNEE_STEP, KNEE_WITHIN, KNEE_MOST = 1.25, 1.05, 16.0
CURVE = (0.75, 1.25, 1.5625)
"""Loads of the curve beside those that the search for the knee asks for."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What does not change from cell to cell."""

    load: Workload
    promise: Promise
    parameters: Parameters
    prices: Prices
    draws: int = DRAWS
    seed: int = 0
    most: int = REPLICAS_MOST

    def cell(
        self, machine: Machine, replicas: int, growth: float = 1.0, run: int = 0,
        fault: FaultName = "none", *, whole: bool = True,
    ) -> Cell:  # fmt: skip
        """A run on day ``run``; the seed and the run alone say what is drawn."""
        load = self.load
        return Cell(
            load.day_0, load.window(growth), machine.path, replicas, self.parameters, self.promise,
            growth, fault, load.peak_s, run, self.seed, whole,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Size:
    """The fewest replicas of a machine for a growth of the load."""

    machine: Machine
    growth: float
    bracket: tuple[int, int]
    """What the formula says: no fewer than, and about."""
    replicas: Estimate | None
    """None: there is no answer, and ``refused`` says why."""
    refused: Rejected | None = None
    usd_per_month: Estimate | None = None
    usd_per_million_good_tokens: Estimate | None = None
    figures: tuple[Estimate, ...] = ()
    outcomes: tuple[Outcome, ...] = field(default=(), repr=False)
    """By day, at the size found."""

    @property
    def count(self) -> int:
        assert self.replicas is not None
        return int(self.replicas.value)

    @property
    def name(self) -> str:
        return f"{self.machine.name} x{self.growth:g}"


@dataclass(frozen=True, slots=True)
class FaultCell:
    """What a fault at the peak does to the size found."""

    size: Size
    fault: FaultName
    holds: bool
    effects: tuple[Effect, ...]
    """By group, the hardest hit first."""
    replicas: Estimate | None
    """The fewest that hold the promise with the fault; None: not looked for, or none do."""
    cause: Cause | None
    outcome: Outcome = field(repr=False)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One load of the knee curve."""

    multiple: float
    holds: bool
    attainment: dict[str, float]
    """By class."""
    ttft_s_p95: dict[str, float]


@dataclass(frozen=True, slots=True)
class Knee:
    """How much load a fleet bears, as a multiple of the recorded one."""

    machine: Machine
    replicas: int
    multiple: Estimate
    curve: tuple[CurvePoint, ...]
    cause: Cause
    broken: tuple[str, ...]
    outside: str = ""
    """What lies outside the calibrated region at the knee; empty: nothing."""


def gates(machine: Machine, setting: Setting) -> Rejected | None:
    """What rejects a machine before anything is played; None: nothing does."""
    load, promise = setting.load, setting.promise
    lengths = load.prompt_tokens + load.output_tokens
    region, name = machine.region, machine.name
    longest = machine.profile.engine.max_model_len
    if (lengths > longest).mean() > OUTSIDE_SHARE:
        share = (lengths > longest).mean()
        return Rejected(name, "context", f"{share:.0%} of the requests are longer than its "
                        f"max_model_len of {longest:,} tokens")  # fmt: skip
    beyond = float((lengths > region.context_tokens).mean())
    if beyond > OUTSIDE_SHARE:
        return Rejected(
            name, "region",
            f"{beyond:.0%} of the requests are longer than {region.context_tokens:,} tokens, the "
            f"longest that its profile knows ({region.source}): calibrate there",
        )  # fmt: skip
    first_s, token_s = alone_s(machine, load)
    if token_s > promise.slo.tpot_s:
        return Rejected(name, "latency", f"one answer alone takes {token_s:.2g} s a token, and "
                        f"{promise.slo.tpot_s:g} s is promised")  # fmt: skip
    tightest = min((n.limit for n in promise.needs if n.what != "attainment"), default=math.inf)
    every = all(need.kind == "class" for need in promise.needs) and len(load.counts("class")) == 1
    if every and first_s > tightest:
        return Rejected(name, "latency", f"a prompt alone takes {first_s:.2g} s to its first token,"
                        f" and {tightest:g} s is promised")  # fmt: skip
    if replicas_likely(machine, load, promise) is None:
        found = balance(machine, load, promise)
        return Rejected(name, "rate", f"no number of replicas: the wall is {found.wall}")
    return None


def guess_of(machine: Machine, setting: Setting, growth: float) -> tuple[int, int]:
    """The formula's bracket: no fewer than, and about."""
    least = replicas_least(machine, setting.load, setting.promise, growth)
    likely = replicas_likely(machine, setting.load, setting.promise, growth) or least
    return least, max(least, likely)


def size_of(
    machine: Machine, setting: Setting, runs: Runs, growth: float = 1.0, *,
    guess: int | None = None, fault: FaultName = "none", least: int | None = None,
) -> Size:  # fmt: skip
    """The fewest replicas that hold the promises at ``growth`` times the load.

    Args:
        guess: where the search begins; None: at the formula's.
        fault: what goes wrong at the peak of every day.
        least: no fewer are tried; None: the formula's bound.
    """
    rejected = gates(machine, setting)
    if rejected is not None:
        return Size(machine, growth, (0, 0), None, rejected)
    low, likely = guess_of(machine, setting, growth)
    low = max(low, least or 1)

    def holds(replicas: int) -> bool:
        cell = setting.cell(machine, replicas, growth, 0, fault, whole=False)
        return runs.see(cell).holds

    most = max(low, min(setting.most, BEYOND * likely + 8))
    found = smallest(holds, guess=guess or likely, least=low, most=most)
    if found is None:
        why = _broken(runs.see(setting.cell(machine, most, growth, 0, fault, whole=False)))
        refused = Rejected(machine.name, "rate", f"not even {most} replicas hold: {why}")
        return Size(machine, growth, (low, likely), None, refused)

    def confirmed(replicas: int) -> bool:
        seen = days(replicas)
        return held([outcome.slack for outcome in seen], setting.promise.confidence)

    def days(replicas: int) -> list[Outcome]:
        return runs.all([
            setting.cell(machine, replicas, growth, run, fault, whole=False)
            for run in range(setting.draws)
        ])  # fmt: skip

    most = min(setting.most, 2 * found + 4)
    sure = smallest(confirmed, guess=found, least=found, most=most)
    if sure is None:
        worst = min(days(most), key=lambda outcome: outcome.slack)
        why = (
            f"{found} hold on the recorded day, but on others like it, with step times drawn from "
            f"what the profile knows, not even {most} do: {_broken(worst)}"
        )
        refused = Rejected(machine.name, "confidence", why)
        return Size(machine, growth, (low, likely), None, refused)
    return _sized(machine, setting, growth, (low, likely), found, sure, days(sure))


def _sized(
    machine: Machine, setting: Setting, growth: float, bracket: tuple[int, int], plain: int,
    replicas: int, outcomes: Sequence[Outcome],
) -> Size:  # fmt: skip
    outside = outside_of(machine, outcomes)
    if outside:
        return Size(machine, growth, bracket, None, Rejected(machine.name, "region", outside))
    kind = machine.kind
    count = Estimate("replicas", replicas, plain, replicas, "replicas", kind, len(outcomes))
    return Size(
        machine, growth, bracket, count, None, month_usd(machine, setting, count),
        million_usd(machine, setting, replicas, outcomes, growth),
        figures_of(setting, outcomes, kind), tuple(outcomes),
    )  # fmt: skip


def month_usd(machine: Machine, setting: Setting, count: Estimate) -> Estimate:
    """What so many replicas cost in a month. A price of the shipped table is an estimate."""
    prices = setting.prices
    each = prices.usd_per_hour(machine.gpu) * machine.cards * prices.hours_per_month
    return Estimate("usd_per_month", count.value * each, count.low * each, count.high * each,
                    "USD a month", price_kind(machine, prices))  # fmt: skip


def million_usd(
    machine: Machine, setting: Setting, replicas: int, outcomes: Sequence[Outcome], growth: float
) -> Estimate:
    """Of a million output tokens within every promise, at the load of the day."""
    each = setting.prices.usd_per_hour(machine.gpu) * machine.cards / 3600
    from_s, until_s = setting.load.window(growth)
    seconds = until_s - from_s
    values = [
        replicas * each * seconds / outcome.good_tokens * 1e6 if outcome.good_tokens else math.inf
        for outcome in outcomes
    ]
    kind = price_kind(machine, setting.prices)
    return predicted("usd_per_million_good_tokens", values, "USD per million good tokens", kind)


def price_kind(machine: Machine, prices: Prices) -> Kind:
    return machine.kind if machine.gpu.name in prices.gpus else "estimated"


def figures_of(setting: Setting, outcomes: Sequence[Outcome], kind: Kind) -> tuple[Estimate, ...]:
    """Of each promise: what was seen, and where the next day's lies."""
    out = []
    for need in setting.promise.needs:
        seen = [outcome.groups.get((need.kind, need.group)) for outcome in outcomes]
        known = [one for one in seen if one is not None]
        if not known:
            continue
        name = f"{need.what}/{need.group or 'other'}"
        if need.what == "attainment":
            values = [one.attainment for one in known]
            out.append(predicted(name, values, "", kind, share=True, of=known[0].offered))
        else:
            out.append(predicted(name, [getattr(one, need.what) for one in known], "s", kind))
    return tuple(out)


def outside_of(machine: Machine, outcomes: Sequence[Outcome]) -> str:
    """What of the runs lies outside of what the profile was fitted on; empty: nothing."""
    region = machine.region
    batch = max(outcome.pressure.batch_most for outcome in outcomes)
    tokens = max(outcome.pressure.kv_tokens_most for outcome in outcomes)
    if batch > region.sequences:
        return (f"up to {batch} sequences run at once, and its profile knows {region.sequences} "
                f"({region.source}): calibrate there")  # fmt: skip
    if tokens > region.kv_tokens:
        return (f"up to {tokens:,} KV tokens are held, and its profile knows {region.kv_tokens:,} "
                f"({region.source}): calibrate there")  # fmt: skip
    return ""


def fault_cell(size: Size, fault: FaultName, setting: Setting, runs: Runs) -> FaultCell:
    """What ``fault`` at the peak does to a size that was found, beside the same day without it; and
    for a lost card the fewest replicas that hold even so."""
    machine, growth, count = size.machine, size.growth, size.count
    cells = [setting.cell(machine, count, growth, 0, name) for name in ("none", fault)]
    plain, hit = runs.all(cells)
    with_fault: Estimate | None = None
    if fault == "n-1":
        if hit.holds:
            with_fault = replace(size.replicas, name="replicas_n1") if size.replicas else None
        else:
            found = smallest(
                lambda n: runs.see(
                    setting.cell(machine, n, growth, 0, fault, whole=False)
                ).holds,
                guess=count + 1, least=count, most=min(setting.most, 2 * count + 8),
            )  # fmt: skip
            if found is not None:
                with_fault = Estimate("replicas_n1", found, found, found + 1, "replicas",
                                      machine.kind)  # fmt: skip
    cause = None if hit.holds else cause_of(hit, machine, fault)
    return FaultCell(
        size, fault, hit.holds, effects_of(plain, hit, machine.kind), with_fault, cause, hit
    )


def knee_of(
    machine: Machine, replicas: int, setting: Setting, runs: Runs, *,
    known: float = 1.0, draws: int | None = None, curve: Sequence[float] = CURVE,
) -> Knee:  # fmt: skip
    """The load at which the fleet's first promise breaks: on the recorded day, and on others for
    the interval."""

    def largest(run: int, start: float) -> tuple[float, float]:
        def holds(multiple: float) -> bool:
            cell = setting.cell(machine, replicas, _round(multiple), run, whole=False)
            return runs.see(cell).holds

        return largest_load(holds, known=start, step=KNEE_STEP, within=KNEE_WITHIN, most=KNEE_MOST)

    good, bad = largest(0, known)
    start = math.sqrt(good * bad) if good and math.isfinite(bad) else max(good, 1 / KNEE_MOST)
    days = range(1, setting.draws if draws is None else draws)
    with ThreadPoolExecutor(max(1, len(days))) as threads:
        others = list(threads.map(lambda run: largest(run, start), days))
    middles = [_middle(*ends) for ends in ((good, bad), *others)]
    multiple = predicted("knee", [max(m, 1e-3) for m in middles], "x the load", machine.kind)
    if len(middles) == 1:  # nothing says how days differ: only where the search ended
        multiple = replace(multiple, low=good, high=bad)
    after = _round(bad if math.isfinite(bad) else good)
    points = sorted({*(_round(p * max(known, 1e-3)) for p in curve), _round(good or after), after})
    seen = runs.all([setting.cell(machine, replicas, point) for point in points])
    at_knee = seen[points.index(after)]
    return Knee(
        machine, replicas, multiple,
        tuple(_point(point, one) for point, one in zip(points, seen, strict=True)),
        cause_of(at_knee, machine), tuple(need.text() for need in at_knee.broken),
        outside_of(machine, [seen[points.index(_round(good or after))]]),
    )  # fmt: skip


def _round(multiple: float) -> float:
    """So that two bisections ask for the same loads: steps of half a per cent."""
    return float(f"{1.005 ** round(math.log(multiple) / math.log(1.005)):.6g}")


def _middle(good: float, bad: float) -> float:
    return math.sqrt(good * bad) if good and math.isfinite(bad) else good


def _point(multiple: float, outcome: Outcome) -> CurvePoint:
    classes = {name: seen for (kind, name), seen in outcome.groups.items() if kind == "class"}
    return CurvePoint(
        multiple, outcome.holds,
        {name: seen.attainment for name, seen in classes.items()},
        {name: seen.ttft_s_p95 for name, seen in classes.items()},
    )  # fmt: skip


def _broken(outcome: Outcome) -> str:
    names = [need.text() for need in outcome.broken]
    return f"{', '.join(names)} breaks" if names else "a promise breaks"


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that was found."""

    load: Workload
    promise: Promise
    policy: str
    growths: tuple[float, ...]
    sizes: tuple[Size, ...]
    faults: tuple[FaultCell, ...]
    knee: Knee | None
    rejected: tuple[Rejected, ...]
    prices: Prices
    runs: int = 0
    wall_s: float = 0.0

    def best(self, growth: float) -> Size | None:
        """The cheapest that holds; of two alike the first."""
        own = [size for size in self.sizes if size.growth == growth and size.replicas]
        return min(own, key=lambda size: size.usd_per_month.value, default=None)  # type: ignore[union-attr]


def make_plan(
    machines: Sequence[Machine], rejected: Sequence[Rejected], growths: Sequence[float],
    faults: Sequence[FaultName], setting: Setting, runs: Runs, *, policy: str = "stable",
    say: Callable[[str], None] = lambda text: None,
) -> Plan:  # fmt: skip
    """Size every machine for every growth, then faults at the sizes found, then the cheapest's
    knee.

    Raises:
        PlanError: there is no machine, growth or fault of that name.
    """
    unknown = [name for name in faults if name not in FAULTS]
    if unknown:
        raise PlanError(f"no fault {unknown[0]!r}: use {', '.join(FAULTS)}")
    if not growths or min(growths) <= 0:
        raise PlanError(f"growths {', '.join(map(str, growths))}: each must be above 0")
    first, *others = dict.fromkeys(growths)
    with ThreadPoolExecutor(max(2, runs.jobs)) as threads:
        starts = list(threads.map(lambda m: size_of(m, setting, runs, first), machines))
        jobs = [
            (start.machine, growth, max(1, round(start.count * growth / first)))
            for growth in others
            for start in starts
            if start.replicas is not None
        ]
        rest = threads.map(lambda job: size_of(job[0], setting, runs, job[1], guess=job[2]), jobs)
        sizes = [*starts, *rest]
        found = [size for size in sizes if size.replicas is not None]
        say(f"{len(found)} of {len(sizes)} sizes found; now the faults")
        pairs = [(size, fault) for size in found for fault in faults if fault != "none"]
        cells = list(threads.map(lambda pair: fault_cell(pair[0], pair[1], setting, runs), pairs))
    plan = Plan(
        setting.load, setting.promise, policy, tuple(growths), tuple(sizes), tuple(cells), None,
        (*rejected, *(size.refused for size in sizes if size.refused is not None)), setting.prices,
    )  # fmt: skip
    best = plan.best(first)
    if best is None:
        return replace(plan, runs=runs.played)
    say(f"the cheapest is {best.machine.text(best.count)}; now its knee")
    draws = min(3, setting.draws)
    knee = knee_of(best.machine, best.count, setting, runs, known=first, draws=draws)
    return replace(plan, knee=knee, runs=runs.played)


def coarse(machines: Sequence[Machine], growths: Sequence[float], setting: Setting) -> list[Size]:
    """What the formula alone says, at once."""
    out = []
    for machine in machines:
        rejected = gates(machine, setting)
        for growth in growths:
            if rejected is not None:
                out.append(Size(machine, growth, (0, 0), None, rejected))
                continue
            low, likely = guess_of(machine, setting, growth)
            count = Estimate("replicas", likely, low, 2 * likely, "replicas", "estimated", 0)
            out.append(
                Size(machine, growth, (low, likely), count, None,
                     month_usd(machine, setting, count))
            )  # fmt: skip
    return out


__all__ = [
    "CURVE", "DRAWS", "CurvePoint", "FaultCell", "Knee", "Plan", "Setting", "Size", "coarse",
    "fault_cell", "figures_of", "gates", "knee_of", "make_plan", "size_of",
]  # fmt: skip
