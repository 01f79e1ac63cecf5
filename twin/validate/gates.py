"""Gates on what both policies did on recorded traces and under faults. Pure: runs in, gates out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from policy.evidence import Figure, Gate
from twin.validate.numbers import counts, difference, pairs_of, share, spread, upper_difference
from twin.validate.reading import BLOCK_NS, CLASSES, NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.evidence import Kind, Source
    from twin.validate.numbers import Pair
    from twin.validate.playing import Played
    from twin.validate.reading import Story

RECOVERED_SHARE = 0.9
"""Of what was good before the fault, within two stretches of 5 s in a row."""
HELD_OUT_PERCENT_MOST = 15.0
"""Mean error of a profile's table, above which its times say little about a queue's."""
PROFILE_DAYS_MOST = 30.0
"""Drivers, engines and quantisations change about as often."""
STRESS_MARGIN = 0.05


@dataclass(frozen=True, slots=True)
class Goals:
    """What is asked of a candidate."""

    attain: float = 0.95
    """Share of each class's requests that must meet their deadline on recorded traces."""
    margin: float = 0.01
    """Share of requests that it may miss more than the live policy on them."""
    recover_s: float = 20.0
    """After a fault is over, until it serves again what it did before."""


def invariants(played: Sequence[Played]) -> Gate:
    """Nothing that must always hold was broken in any of the candidate's runs."""
    own = [one for one in played if one.side == "candidate"]
    broken = [(one, what) for one in own for what in one.story.broken]
    steps = sum(one.story.steps for one in own)
    figures = (_exact("steps checked", steps), _exact("invariants broken", len(broken)))
    if not broken:
        why = (
            f"in {len(own)} runs with {steps} steps every request had exactly one outcome, no event"
            " was refused, sessions kept their order, limits held, tables stayed within their"
            " bounds and no deadline was left in the past"
        )
        return Gate("invariants", True, why, figures)
    one, what = broken[0]
    why = f"an invariant was broken in {one.run.name}, seed {one.seed}: {what}"
    return Gate("invariants", False, _short(why), figures)


def slo(played: Sequence[Played], goals: Goals, kind: Kind) -> Gate:
    """Each class meets its deadlines on the recorded traces."""
    pairs = _pairs(played, "trace")
    figures, missed = [], []
    for sla in CLASSES:
        found = counts(pairs, sla)
        if not found.requests:
            continue
        ours = share(f"slo_attainment/{sla}", found.offered - found.candidate, found.offered, kind)
        live = share(f"live slo_attainment/{sla}", found.offered - found.live, found.offered, kind)
        figures += [ours, live]
        if ours.value < goals.attain:
            missed.append(
                f"{sla}: {_percent(ours.value)} of its requests in time (the live policy:"
                f" {_percent(live.value)})"
            )
    goal = _percent(goals.attain)
    if not figures:
        return Gate("slo", False, "no request was played: give a trace with arrivals in it")
    if missed:
        why = f"on recorded traces {goal} are asked for, and {'; '.join(missed)}"
        return Gate("slo", False, why, tuple(figures))
    least = min(figure.value for figure in figures if not figure.name.startswith("live"))
    why = f"on recorded traces each class has at least {_percent(least)} of its requests in time"
    return Gate("slo", True, f"{why} ({goal} are asked for)", tuple(figures))


def not_worse(played: Sequence[Played], goals: Goals, kind: Kind) -> Gate:
    """Beside the live policy, on the same requests: on recorded traces within the margin, and
    within a wider one under overload and among long prompts."""
    figures, worse = [], []
    for name, pairs, margin in (
        ("recorded traces", _pairs(played, "trace"), goals.margin),
        ("scenarios", _pairs(played, "scenario"), STRESS_MARGIN),
        ("overload", _pairs(played, "overload"), STRESS_MARGIN),
        ("long prompts", _pairs(played, "long_prompts"), STRESS_MARGIN),
    ):
        if not pairs:
            continue
        found = counts(pairs)
        apart = difference(f"miss_share_difference/{name}", found, kind)
        figures.append(apart)
        bound = upper_difference(found)
        if bound > margin:
            few = apart.value <= 0
            worse.append(
                f"{name}: it may miss {_points(bound)} points more (at most {_points(margin)} are"
                f" allowed; seen were {_points(apart.value)} in {found.requests} requests"
                + ("; play more seeds or a longer trace)" if few else ")")
            )
    if not any(figure.name.endswith("recorded traces") for figure in figures):
        return Gate("not_worse", False, "no recorded trace was played beside the live policy")
    if worse:
        return Gate("not_worse", False, "; ".join(worse), tuple(figures))
    first = figures[0]
    why = (
        f"beside the live policy it misses {_points(first.value)} points more on recorded traces"
        f" (95 % interval {_points(first.low)} to {_points(first.high)}, margin"
        f" {_points(goals.margin)})"
    )
    return Gate("not_worse", True, why, tuple(figures))


def faults(played: Sequence[Played], goals: Goals, kind: Kind) -> Gate:
    """After each fault it serves again what it did before, soon enough or no later than the live
    policy does, and loses no request."""
    figures, failed = [], []
    names = dict.fromkeys(one.run.name for one in played if one.run.fault_s)
    for name in names:
        pairs = [pair for pair in pairs_of(played) if pair.candidate.run.name == name]
        ours = [recovered_s(pair.candidate) for pair in pairs]
        theirs = [recovered_s(pair.live) for pair in pairs]
        lost = sum(pair.candidate.story.open_at_end for pair in pairs)
        figures.append(spread(f"recovered_s/{name}", ours, kind, "s"))
        if lost:
            failed.append(f"{name}: {lost} requests had no outcome")
        slowest = max(ours, default=0.0)
        if slowest > goals.recover_s and slowest > max(theirs) + BLOCK_NS / NS:
            failed.append(
                f"{name}: back to {_percent(RECOVERED_SHARE)} of before only {slowest:.0f} s after"
                f" its end (the live policy: {max(theirs):.0f} s, allowed: {goals.recover_s:g} s)"
            )
    if not names:
        return Gate("faults", False, "no fault was played: the fleet answers embeddings only")
    if failed:
        return Gate("faults", False, _short("; ".join(failed)), tuple(figures))
    worst = max(figures, key=lambda figure: figure.value)
    why = (
        f"after each of {len(names)} kinds of faults it was back at {_percent(RECOVERED_SHARE)} of"
        f" before, at the latest {worst.value:.0f} s after the end of"
        f" {worst.name.partition('/')[2]}, and no request was lost"
    )
    return Gate("faults", True, why, tuple(figures))


def recovered_s(one: Played) -> float:
    """From the fault's end to the first of two stretches in a row that are as good as before it;
    where there are none, to the end of the run."""
    fault_s = one.run.fault_s
    assert fault_s is not None
    begin, end = (int(at_s * NS) // BLOCK_NS for at_s in fault_s)
    good = _good_shares(one.story)
    before = good[1:begin]
    wanted = RECOVERED_SHARE * (sum(before) / len(before) if before else 1.0)
    last = int(one.run.setup.duration_s * NS) // BLOCK_NS
    for block in range(end, last - 1):
        if all(share_ >= wanted for share_ in good[block : block + 2]):
            return (block - end) * BLOCK_NS / NS
    return (last - end) * BLOCK_NS / NS


def _good_shares(story: Story) -> list[float]:
    """By block; one in which nobody asked for anything is good."""
    offered, missed = story.offered.sum(axis=1), story.missed.sum(axis=1)
    return [
        1.0 - float(bad) / float(all_) if all_ else 1.0
        for bad, all_ in zip(missed, offered, strict=True)
    ]


def profile(sources: Sequence[Source], drifting: Sequence[str]) -> Gate:
    """What the twin computed with is known well enough, and not long ago."""
    figures, wrong = [], []
    for source in sources:
        if source.kind != "profile":
            continue
        if source.trust == "untuned":
            wrong.append(f"{source.name} was never fitted to a running engine (untuned)")
        error = source.held_out_error_percent
        if error is None:
            wrong.append(f"{source.name} does not say how far it is off")
        else:
            figures.append(Figure(f"error_percent/{source.name}", error, error, error, "%",
                                  "measured"))  # fmt: skip
            if error > HELD_OUT_PERCENT_MOST:
                wrong.append(
                    f"{source.name} is off by {error:g} % on what it was not fitted on (at most"
                    f" {HELD_OUT_PERCENT_MOST:g} %)"
                )
        if source.age_days is not None and source.age_days > PROFILE_DAYS_MOST:
            wrong.append(
                f"{source.name} is {source.age_days:.0f} days old (at most"
                f" {PROFILE_DAYS_MOST:g} days)"
            )
        if source.name in drifting:
            wrong.append(f"{source.name} drifts: its replicas' steps take other times by now")
    if wrong:
        why = f"{'; '.join(wrong)}: calibrate it (twinkeel calibrate)"
        return Gate("profile", False, _short(why), tuple(figures))
    why = f"each profile is fitted and off by {HELD_OUT_PERCENT_MOST:g} % at most"
    return Gate("profile", True, why, tuple(figures))


def determinism(played: Sequence[Played], again: Sequence[Played]) -> Gate:
    """The same seed gives the same log, and each log replays to the same decisions."""
    hashes = {(one.run.name, one.seed): one.log_hash for one in played if one.side == "candidate"}
    other = [one for one in again if hashes[one.run.name, one.seed] != one.log_hash]
    differing = [one for one in [*played, *again] if one.difference]
    steps = sum(one.story.steps for one in played if one.side == "candidate")
    figures = (
        _exact("runs played twice", len(again)), _exact("steps replayed", steps),
        _exact("logs that differ", len(other) + len(differing)),
    )  # fmt: skip
    if other:
        one = other[0]
        why = f"{one.run.name} with seed {one.seed} gave two decision logs in two processes"
        return Gate("determinism", False, why, figures)
    if differing:
        one = differing[0]
        why = f"replayed, {one.run.name} with seed {one.seed} decides otherwise at {one.difference}"
        return Gate("determinism", False, why, figures)
    why = (
        f"{len(again)} runs gave the same decision log when played again, and {steps} steps"
        " replayed to the same decisions, byte for byte"
    )
    return Gate("determinism", True, why, figures)


def _pairs(played: Sequence[Played], kind: str) -> list[Pair]:
    return [pair for pair in pairs_of(played) if pair.candidate.run.kind == kind]


def _exact(name: str, count: int) -> Figure:
    return Figure(name, count, count, count, kind="measured")


def _percent(part: float) -> str:
    return f"{100 * part:.4g} %"


def _points(part: float) -> str:
    return f"{100 * part:.2f}"


def _short(why: str) -> str:
    return why if len(why) <= 1500 else f"{why[:1500]} ..."
