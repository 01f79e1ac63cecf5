"""Twelve questions of a planner, each answered from a few runs of the twin.

Every answer is some sentences and the figures in them. ``Asking`` holds what all of them need; the
functions may be called from anywhere, such as a page.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from policy.files import FileError
from twin.plan.causes import cause_of
from twin.plan.cell import REPLACED_S
from twin.plan.effects import effects_of
from twin.plan.estimates import Estimate, exact, predicted
from twin.plan.inputs import Need, PlanError
from twin.plan.machines import Machine, card_name, fit_of, machine_of
from twin.plan.planning import fault_cell, knee_of, million_usd, month_usd, size_of
from twin.plan.search import smallest
from twin.plan.words import duration, fault_sentence, knee_sentence, size_sentence

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from twin.plan.cell import Outcome
    from twin.plan.planning import Setting, Size
    from twin.plan.runs import Runs

GB = 1e9
FLAGS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("max_num_seqs", (0.5, 2.0)),
    ("max_num_batched_tokens", (0.5, 2.0)),
    ("gpu_memory_utilization", (0.95,)),
    ("prefix_caching", (0.0,)),
    ("async_scheduling", (0.0,)),
)
"""vLLM's flags that decide its schedule, and by what each is multiplied; of the memory's share it
is the value itself, and 0 switches off."""
STORAGE = (1.0, 0.5, 0.25, 0.0)
"""Cold starts to compare, as parts of the profile's."""
WORTH = {"P0": 3.0, "P1": 2.0, "P2": 1.0, "": 2.0}
"""What a request of a class is taken to be worth, where nobody says: an assumption."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A question's answer."""

    question: str
    sentences: tuple[str, ...]
    figures: tuple[Estimate, ...] = ()


@dataclass(frozen=True, slots=True)
class Asking:
    """What the questions are asked about."""

    setting: Setting
    machines: tuple[Machine, ...]
    runs: Runs
    folder: Path
    have: int = 0
    """Replicas of the first machine that there are; 0: as many as the load takes."""

    @property
    def machine(self) -> Machine:
        if not self.machines:
            raise PlanError("no machine is left to ask about: see why with `plan ask fit`")
        return self.machines[0]

    def size(self, growth: float = 1.0, machine: Machine | None = None) -> Size:
        """Sized for a growth; refused in words.

        Raises:
            PlanError: nothing holds.
        """
        size = size_of(machine or self.machine, self.setting, self.runs, growth)
        if size.refused is not None:
            raise PlanError(f"{size.refused.name}: gate {size.refused.gate}: {size.refused.why}")
        return size

    def count(self) -> int:
        return self.have or self.size().count


def gpus_for_users(asking: Asking, users: int) -> Answer:
    """How many GPUs do so many users take?"""
    load = asking.setting.load
    if not load.users:
        raise PlanError(f"{load.trace} names no users: give one that does, or use plan --grow")
    growth = users / load.users
    sizes = [
        size for machine in asking.machines
        if (size := size_of(machine, asking.setting, asking.runs, growth)).replicas is not None
    ]  # fmt: skip
    if not sizes:
        raise PlanError(f"nothing holds for {users:,} users, {growth:.3g}x those of the trace")
    best = min(sizes, key=_month)
    texts = [
        f"{users:,} users are {growth:.3g}x the {load.users:,} of the trace: they take "
        f"{best.machine.text(best.count)}.",
        *(size_sentence(size, asking.setting.promise.confidence) for size in sizes),
    ]
    return Answer("GPUs for so many users", tuple(texts), _own(best))


def users_on_fleet(asking: Asking, ttft_s_p99: float) -> Answer:
    """How many users do the GPUs that I have bear before p99 falls off?"""
    setting = asking.setting
    if not setting.load.users:
        raise PlanError(f"{setting.load.trace} names no users: `plan` gives the knee as a multiple")
    first = min(setting.load.counts("class"), key=lambda name: name or "~")  # named ones first
    needs = (Need("class", first, "ttft_s_p99", ttft_s_p99),)
    setting = replace(setting, promise=replace(setting.promise, needs=needs))
    count = asking.count()
    knee = knee_of(asking.machine, count, setting, asking.runs, curve=())
    users = _times(knee.multiple, setting.load.users, "users")
    text = (
        f"{asking.machine.text(count)} bear {users.value:,.0f} users ({users.low:,.0f} to "
        f"{users.high:,.0f}, {users.kind}) before {needs[0].text()} breaks."
    )
    return Answer("users on what I have", (text, knee_sentence(knee)), (users, knee.multiple))


def does_it_fit(name: str, context_tokens: int) -> Answer:
    """Do the model and that context fit?"""
    fit = fit_of(name, context_tokens)
    parts = (
        f"{fit.usable_bytes / GB:.1f} GB usable on each card, {fit.weights_bytes / GB:.1f} GB of "
        f"weights, {fit.reserved_bytes / GB:.1f} GB reserved, {fit.kv_token_bytes / 1024:.0f} KiB "
        f"a token"
    )
    text = f"{name} with {context_tokens:,} tokens does not fit: {fit.why} ({parts})."
    if fit.fits:
        text = (
            f"{name} fits with {context_tokens:,} tokens: {fit.kv_tokens:,} tokens of KV cache, so "
            f"{fit.sequences} such requests at once ({parts})."
        )
    figures = (
        exact("kv_tokens", fit.kv_tokens, "tokens", "estimated"),
        exact("sequences", fit.sequences, "requests at once", "estimated"),
    )
    return Answer("does it fit", (text,), figures)


def tensor_parallel(asking: Asking, large: int, small: int) -> Answer:
    """Is one replica over ``large`` cards worth ``large / small`` of ``small``?"""
    if small < 1 or large <= small or large % small:
        raise PlanError(f"TP{large} against TP{small}: the larger must be a multiple of the other")
    bare = asking.machine.name.partition("@")[0]
    one = machine_of(f"{bare}@tp{large}", asking.folder)
    many = machine_of(f"{bare}@tp{small}", asking.folder)
    times = large // small
    knees = [
        knee_of(machine, count, asking.setting, asking.runs, draws=3, curve=())
        for machine, count in ((one, 1), (many, times))
    ]
    first, second = (
        replace(knee.multiple, name=f"knee/TP{size}")
        for knee, size in zip(knees, (large, small), strict=True)
    )
    ratio = Estimate("ratio", first.value / second.value, first.low / max(second.high, 1e-9),
                     first.high / max(second.low, 1e-9), "x", first.kind)  # fmt: skip
    verdict = "is worth" if ratio.low > 1 else "is not worth" if ratio.high < 1 else "may be worth"
    text = (
        f"1 x TP{large} bears {first.value:.3g}x the load, {times} x TP{small} on as many cards "
        f"{second.value:.3g}x: one TP{large} {verdict} {times} TP{small} ({ratio.value:.2g}x, "
        f"{ratio.low:.2g}x to {ratio.high:.2g}x, {ratio.kind})."
    )
    return Answer("tensor parallel", (text, *map(knee_sentence, knees)), (ratio, first, second))


def which_gpu(asking: Asking) -> Answer:
    """Which card holds the promises for the least money?"""
    sizes = [size_of(machine, asking.setting, asking.runs) for machine in asking.machines]
    found = sorted((size for size in sizes if size.replicas is not None), key=_month)
    if not found:
        raise PlanError("no card holds: " + "; ".join(
            f"{s.refused.name}: gate {s.refused.gate}: {s.refused.why}" for s in sizes if s.refused
        ))  # fmt: skip
    best, *rest = found
    text = f"The cheapest is {best.machine.text(best.count)}"
    if rest:
        more = _month(rest[0]) / max(_month(best), 1e-9) - 1
        text += f"; {card_name(rest[0].machine.gpu.name)} costs {more:.0%} more"
    texts = [f"{text}.", *(size_sentence(s, asking.setting.promise.confidence) for s in found)]
    texts += [f"{r.name}: gate {r.gate}: {r.why}." for s in sizes if (r := s.refused)]
    figures = (
        replace(figure, name=f"{size.machine.name} {figure.name}")
        for size in found for figure in _own(size)
    )  # fmt: skip
    return Answer("which card", tuple(texts), tuple(figures))


def doubled(asking: Asking, growth: float = 2.0) -> Answer:
    """What if traffic grows ``growth`` times: on the same fleet, and on the one that it takes?"""
    now = asking.have or asking.size().count
    setting = asking.setting
    days = range(setting.draws)
    cells = [setting.cell(asking.machine, now, growth, run) for run in days]
    seen = asking.runs.all(cells)
    kept = _attained("attainment_as_is", seen, asking.machine)
    then = asking.size(growth)
    state = "still hold" if all(one.holds for one in seen) else "break"
    state += "s" if now == 1 else ""
    broken = ", ".join(need.text() for need in seen[0].broken)
    cause = cause_of(seen[0], asking.machine)
    texts = [
        f"At {growth:g}x the load {asking.machine.text(now)} {state}"
        + (f": {broken}" if broken else "")
        + f"; {kept.value:.1%} of the requests are good ({kept.low:.1%} to {kept.high:.1%}, "
        f"{kept.kind})" + (f". The {cause.part} gives way: {cause.why}" if broken else "") + ".",
        size_sentence(then, setting.promise.confidence),
    ]
    return Answer("traffic grows", tuple(texts), (kept, *_own(then)))


def n_plus_one(asking: Asking) -> Answer:
    """How many hold even when a card is lost at the peak?"""
    size = asking.size()
    cell = fault_cell(size, "n-1", asking.setting, asking.runs)
    even_so = size_of(size.machine, asking.setting, asking.runs, size.growth, guess=size.count + 1,
                      fault="n-1", least=size.count)  # fmt: skip
    texts = [size_sentence(size, asking.setting.promise.confidence), fault_sentence(cell)]
    if even_so.refused is not None:
        texts.append(f"No spares hold it: gate {even_so.refused.gate}: {even_so.refused.why}.")
    elif even_so.count == size.count:
        texts.append("No spare is needed for one lost card.")
    else:
        more = even_so.count - size.count
        texts.append(f"With a card lost at the peak it takes {size.machine.text(even_so.count)}: "
                     f"{more} more.")  # fmt: skip
    figures: tuple[Estimate, ...] = () if size.replicas is None else (size.replicas,)
    if even_so.replicas is not None:
        figures += (replace(even_so.replicas, name="replicas_n1"),)
    figures += tuple(replace(one.points, name=f"points/{one.name}") for one in cell.effects[:3])
    return Answer("N+1", tuple(texts), figures)


def cost(asking: Asking) -> Answer:
    """What does it cost a month, and a million good tokens?"""
    if not asking.have:
        size = asking.size()
        month, each, count = size.usd_per_month, size.usd_per_million_good_tokens, size.count
    else:
        count, setting = asking.have, asking.setting
        seen = asking.runs.all(
            [setting.cell(asking.machine, count, 1.0, run) for run in range(setting.draws)]
        )
        month = month_usd(asking.machine, setting,
                          exact("replicas", count, "replicas", "measured"))  # fmt: skip
        each = million_usd(asking.machine, setting, count, seen, 1.0)
    assert month is not None
    assert each is not None
    source = asking.setting.prices.source(asking.machine.gpu)
    text = (
        f"{asking.machine.text(count)} cost {month.text()} and {each.text()} at the load of the "
        f"stretch; at night, with less to do, a million costs more. Price: {source}."
    )
    return Answer("cost", (text,), (month, each))


def burst(asking: Asking, factor: float = 2.0) -> Answer:
    """A burst: let it wait (buffer), or send it to more replicas (overflow)?"""
    setting, machine = asking.setting, asking.machine
    count = asking.count()
    permille = round(1000 * factor)

    def seen(replicas: int, run: int = 0) -> Outcome:
        cell = setting.cell(machine, replicas, 1.0, run, "spike")
        return asking.runs.see(replace(cell, spike_permille=permille))

    days = range(min(3, setting.draws))
    kept = [seen(count, run) for run in days]
    buffered = _attained("attainment_buffered", kept, machine)
    most = 3 * count + 8
    enough = smallest(lambda n: seen(n).holds, guess=2 * count, least=count + 1, most=most)
    plain = asking.runs.see(setting.cell(machine, count))
    effects = effects_of(plain, kept[0], machine.kind)
    lost = effects[0] if effects else None
    texts = [
        f"A burst of {factor:g}x on {machine.text(count)}, left to wait: {buffered.value:.1%} of "
        f"the day's requests are good ({buffered.low:.1%} to {buffered.high:.1%}, {buffered.kind})"
        + (f", {lost.name} loses {lost.points.value:.2g} points for {duration(lost.lasts_s)}"
           if lost else "")
        + ".",
    ]  # fmt: skip
    if all(one.holds for one in kept):
        texts.append("Buffer: every promise holds, so overflow buys nothing.")
    elif enough is None:
        last = seen(most)
        cause = cause_of(last, machine)
        texts.append(
            f"Not even {machine.text(most)} hold it ({', '.join(n.text() for n in last.broken)} "
            f"breaks): what gives way there is the {cause.part}: {cause.why}."
        )
    else:
        extra = enough - count
        cold_s = machine.profile.cold_start.total_s if machine.profile.cold_start else 100.0
        texts.append(
            f"Overflow: {machine.text(extra)} more hold it, if they are there when it comes: a "
            f"cold start takes {cold_s:g} s, and a burst here a minute at most. So keep them warm, "
            "or send the overflow to someone else."
        )
        price = setting.prices.overflow_usd_per_million_tokens
        if price is not None:
            tokens = kept[0].output_tokens - kept[0].good_tokens + _turned_away(kept[0])
            usd = exact("overflow_usd", tokens / 1e6 * price, "USD a burst", "estimated")
            spare = exact("spare", extra, "replicas", machine.kind)
            month = month_usd(machine, setting, spare)
            texts.append(f"Sent away, a burst costs {usd.text()}; warm spares {month.text()}.")
            return Answer("burst", tuple(texts), (buffered, usd, month))
    return Answer("burst", tuple(texts), (buffered,))


def cold_start(asking: Asking) -> Answer:
    """What does a cold start cost: requests that miss their promise while a lost card's replica
    loads the model, beside shorter starts?"""
    setting, machine = asking.setting, asking.machine
    count = asking.count()
    known = machine.profile.cold_start
    whole_s = known.total_s if known else 100.0
    plain = asking.runs.see(setting.cell(machine, count))
    figures, texts = [], []
    for part in STORAGE:
        cell = replace(setting.cell(machine, count, 1.0, 0, "n-1"), cold_start_s=part * whole_s)
        seen = asking.runs.see(cell)
        missed = plain.groups["all", ""].good - seen.groups["all", ""].good
        wide = 1.645 * math.sqrt(max(missed, 1))
        figure = Estimate(f"missed_at_{part * whole_s:g}_s", missed, missed - wide, missed + wide,
                          "requests", machine.kind)  # fmt: skip
        figures.append(figure)
        texts.append(f"{part * whole_s:g} s: {figure.text()} more miss")
    first = f"On {machine.text(count)}, a card lost at the peak and started again in "
    source = f" The profile's {whole_s:g} s: {known.source}." if known else ""
    share = figures[0].value - figures[-1].value
    last = f"The cold start itself costs {share:,.0f} requests; the rest is the loss.{source}"
    answers = [first + "; ".join(texts) + ".", last]
    left_s = setting.load.window(1.0)[1] - setting.load.peak_s
    if left_s < REPLACED_S + whole_s:
        answers.append(
            f"The stretch ends {left_s:.0f} s after the loss, and the replica is back after "
            f"{REPLACED_S + whole_s:g} s ({REPLACED_S:g} s for a spare card, then the start): what "
            "would be missed later is not counted. Give more --rows."
        )
    return Answer("cold start", tuple(answers), tuple(figures))


def limiting_flag(asking: Asking) -> Answer:
    """Which of vLLM's flags limits the fleet at its knee?"""
    setting, machine, count = asking.setting, asking.machine, asking.count()
    knee = knee_of(machine, count, setting, asking.runs, draws=1, curve=())
    over = knee.curve[-1].multiple
    base = asking.runs.see(setting.cell(machine, count, over)).groups["all", ""]
    tried: list[tuple[float, str, Estimate]] = []
    refused = []
    for flag, factors in FLAGS:
        for factor in factors:
            value = _changed(machine, flag, factor)
            if value is None:
                continue
            try:
                other = machine_of(_origin(machine), asking.folder, **{flag: value})
            except (FileError, PlanError) as error:
                refused.append(f"{flag}={value} cannot be: {error}")
                continue
            seen = asking.runs.see(setting.cell(other, count, over)).groups["all", ""]
            gain = 100 * (seen.attainment - base.attainment)
            share = base.attainment
            wide = 100 * 1.645 * math.sqrt(max(share * (1 - share), 1e-6) / base.offered)
            tried.append((gain, f"{flag}={value}", Estimate(
                f"gain/{flag}={value}", gain, gain - wide, gain + wide, "points", machine.kind
            )))  # fmt: skip
    tried.sort(key=lambda one: -one[0])
    texts = [knee_sentence(knee)]
    if tried and tried[0][2].low > 0:
        _, name, figure = tried[0]
        texts.append(f"At {over:.3g}x the load {name} gives {figure.text()} of attainment more: "
                     "that flag limits you.")  # fmt: skip
    else:
        texts.append(f"At {over:.3g}x the load no flag gives attainment that could be seen: the "
                     "card limits you, not a flag.")  # fmt: skip
    texts.append("; ".join(f"{name}: {gain:+.2g} points" for gain, name, _ in tried) + ".")
    texts += refused
    return Answer("limiting flag", tuple(texts), tuple(one for _, _, one in tried))


def least_harm(asking: Asking, growth: float = 0.0) -> Answer:
    """Which business line can be shed with the least harm when the fleet is too small?"""
    setting, machine, count = asking.setting, asking.machine, asking.count()
    lines = {name: n for name, n in setting.load.counts("line").items() if name}
    if len(lines) < 2:
        raise PlanError(f"{setting.load.trace} names {len(lines)} business lines: two are needed")
    if not growth:
        knee = knee_of(machine, count, setting, asking.runs, draws=1, curve=())
        growth = knee.curve[-1].multiple * 1.1
    over = setting.cell(machine, count, growth)
    rows = []
    for line in lines:
        mine = {
            sla: sum(1 for a, b in zip(setting.load.sla, setting.load.line, strict=True)
                     if (a, b) == (sla, line))
            for sla in dict.fromkeys(setting.load.sla)
        }  # fmt: skip
        worth = sum(WORTH.get(sla, 1.0) * n for sla, n in mine.items())
        rest = asking.runs.see(replace(over, day_0=setting.load.without_line(line)))
        rows.append((not rest.holds, worth, line, rest))
    rows.sort(key=lambda row: row[:3])
    whole = asking.runs.see(over)
    broken, worth, line, rest = rows[0]
    share = lines[line] / setting.load.rows
    verb = "brings the others within their promises" if not broken else "is not enough by itself"
    texts = [
        f"At {growth:.3g}x the load, on {machine.text(count)}, "
        f"{whole.groups['all', ''].attainment:.1%} of the requests are good. Shedding {line} "
        f"({share:.1%} of the requests) {verb}: "
        f"{rest.groups['all', ''].attainment:.1%} of the rest are good.",
        *(
            f"Without {name}: {one.groups['all', ''].attainment:.1%} of the rest are good, "
            f"{'a promise breaks' if bad else 'every promise holds'}; it is worth {value:,.0f} "
            "points."
            for bad, value, name, one in rows
        ),
        "Worth, an assumption: a P0 counts 3 points, a P1 2, a P2 1.",
    ]
    figures = tuple(
        predicted(f"attainment_without/{name}", [one.groups["all", ""].attainment], "",
                  machine.kind, share=True, of=one.groups["all", ""].offered)
        for _, _, name, one in rows
    )  # fmt: skip
    return Answer("least harm", tuple(texts), figures)


def _own(size: Size) -> tuple[Estimate, ...]:
    own = (size.replicas, size.usd_per_month, size.usd_per_million_good_tokens, *size.figures)
    return tuple(figure for figure in own if figure is not None)


def _month(size: Size) -> float:
    return size.usd_per_month.value if size.usd_per_month is not None else math.inf


def _times(figure: Estimate, factor: float, unit: str) -> Estimate:
    return replace(figure, name=unit, unit=unit, value=figure.value * factor,
                   low=figure.low * factor, high=figure.high * factor)  # fmt: skip


def _attained(name: str, seen: Sequence[Outcome], machine: Machine) -> Estimate:
    all_seen = [one.groups["all", ""] for one in seen]
    return predicted(name, [one.attainment for one in all_seen], "", machine.kind, share=True,
                     of=all_seen[0].offered)  # fmt: skip


def _turned_away(outcome: Outcome) -> float:
    """Output tokens of what was shed, by the mean of what was answered."""
    every = outcome.groups["all", ""]
    answered = every.offered - every.shed - every.failed
    return every.shed * outcome.output_tokens / max(answered, 1)


def _changed(machine: Machine, flag: str, factor: float) -> int | float | bool | None:
    """The flag's other value; None: it has that already."""
    value = getattr(machine.profile.engine, flag)
    if isinstance(value, bool):
        return False if value else None
    if flag == "gpu_memory_utilization":
        return factor if factor > value else None
    other = max(1, round(value * factor))
    if flag == "max_num_batched_tokens":
        other = max(other, machine.profile.engine.max_num_seqs)
    if flag == "max_num_seqs":
        other = min(other, machine.profile.engine.max_num_batched_tokens)
    return other if other != value else None


def _origin(machine: Machine) -> str:
    """What the machine was made from: its profile's file holds everything."""
    return str(machine.path)


__all__ = [
    "Answer", "Asking", "burst", "cold_start", "cost", "does_it_fit", "doubled",
    "gpus_for_users", "least_harm", "limiting_flag", "n_plus_one", "tensor_parallel",
    "users_on_fleet", "which_gpu",
]  # fmt: skip
