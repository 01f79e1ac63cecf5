"""Judges a new policy on its way to all traffic: shadow, canary, full; and when it must go back.

It stands beside the policy, not in it: told what became of each request, it says at its looks
whether the present stage may be left for the next (``go_on``), must go on as it is (``hold``), or
the old policy must rule again (``roll_back``). It acts on nothing. The same in the twin and live.

A canary is rolled back when one of these holds:

- the evidence that it does worse than the live policy beside it reaches 1/alpha. It is the mean of
  e-processes (``policy.sequential``): misses in all and of each class, hard failures, and figures
  outside their band;
- its hurt, the misses beyond what the live policy's own explain, in all or of one class, has used
  up most of its budget, and there is some evidence too; or it nears the most that may be hurt, and
  then without any;
- in three windows in a row there was too little to judge by, or it missed most of its requests
  while the live policy did not; or the stage has lasted too long.

It may go on when the stage's time and requests are there, a confidence sequence shows that it
misses at most so many times as often as the live policy, or next to never, and in no class its
plain share of misses lies far above the live policy's. Once it serves everyone, what the live
policy missed before takes the place of the live policy beside it.
"""

from __future__ import annotations

import re
from collections import deque
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from policy.canary import arm_of, broke
from policy.decisions import Dispatch, Refused, Settled
from policy.events import (
    Arrived,
    CanaryEnded,
    CanaryStarted,
    Finished,
    FirstToken,
    PolicySwitched,
)
from policy.evidence import Band  # noqa: TC001 - msgspec reads it
from policy.outcomes import CALLERS_FAULT
from policy.sequential import KEYS_MOST, Bets, Incidents, Keys, MeanBets, Table, bets, hash_of
from policy.tiers import Tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from policy.events import Event
    from policy.parameters import Parameters
    from policy.sequential import Draw

NS = 1_000_000_000
BELIEVED = ((2.0, 0.10), (3.0, 0.25), (5.0, 0.35), (10.0, 0.20), (30.0, 0.10))
"""Ratios bet on, and the wealth that each begins with."""
MARGINS = (1.5, 2.0, 3.0, 5.0)
"""Ratios that a confidence sequence can exclude."""
PASSED = 20.0
"""Evidence that excludes a ratio, or a share of misses: 95 % confidence."""
FIRST_STAGE, NEXT_STAGE = 0.6, 0.4
"""What the first canary stage may bet of all wealth; each further one, of what is left before it
this much less. The sum stays below 1."""
MISSES, CLASS_MISSES, HARDS, BANDS = 0.55, 0.07, 0.12, 0.12
"""Weights of the e-processes: misses in all, of each of the three classes, hard failures, bands.
Together they are 1, so that alpha is shared among them."""
CLASSES = ("P0", "P1", "P2")
SUSPECT_BUDGET, SUSPECT = 0.6, 4.0
"""From this part of the budget on, this much evidence is enough."""
CAP_PART = 0.7
"""Of what may be hurt at most: the rest is for what is in flight when it is called back."""
CHANCE = 3.5
"""Standard deviations of chance that the hurt must exceed to count: among many thousands of misses
fifty more or less are nothing."""
SHARE_WEIGHT = 20.0
"""Requests that the nominal share is worth when the canary's share of requests is taken."""
CALLER_HURT_MOST = 5
"""Misses of one caller in a stage that count as hurt: one caller's trouble is not many callers'."""
HARM_REQUESTS, HARM_CALLERS = 20, 2
"""So many requests of the canary, and so many callers in trouble, make a window in which most of
them miss a bad one: one caller whom nobody can serve falls to the canary by chance."""
HARM_SHARE, FINE_SHARE = 0.5, 0.1
"""Shares of misses in it: the canary's above the first, the live policy's below the second."""
PLAIN_LEAST = 5
"""Times ``miss_share_most_permille`` that the canary may miss whatever the live policy does. Twice
as much when it serves everyone, for then nobody beside it shows what the load does."""
PLAIN_SLACK = 2
"""Misses more say nothing of a share."""
ALONE_S = 60
"""s between the bets on a figure when the candidate serves everyone. Not by the number of requests:
at hundreds a second a hiccup of seconds, which is one event, would be many bets."""
WARM_ANSWERS, WARM_SLACK_PERMILLE = 10, 100
"""Warm-up is over when so many answers of the canary reuse as much of their prompts as the others,
less this."""
REFUSED_MOST = 1000
"""Refused requests that wait for someone to ask for them."""
HARD_SHARE = "hard_failure_share"
_FIGURE = re.compile(r"(slo_miss_share|ttft_s_p([1-9]\d?))(?:/(P[012]))?")

Value = Literal["go_on", "hold", "roll_back"]
Seconds = Annotated[int, Meta(ge=0, le=10_000_000)]
Lasting = Annotated[int, Meta(ge=1, le=10_000_000)]
Count = Annotated[int, Meta(ge=0, le=1_000_000_000)]


class Stage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step on the way."""

    kind: Literal["shadow", "canary", "full"]
    share_permille: Annotated[int, Meta(ge=0, le=1000)]
    """Of the callers that the candidate serves: 0 in shadow, 1000 in full."""
    least_s: Seconds
    """It lasts at least so long."""
    least_requests: Count
    """And until so many requests of the candidate are settled; in shadow, of the live policy."""

    def __post_init__(self) -> None:
        allowed = {"shadow": (0, 0), "canary": (1, 999), "full": (1000, 1000)}[self.kind]
        if not allowed[0] <= self.share_permille <= allowed[1]:
            raise ValueError(
                f"stage {self.kind} has share_permille {self.share_permille}: it must lie within"
                f" {allowed[0]}..{allowed[1]}"
            )


STAGES = (
    Stage("shadow", 0, 600, 100),
    Stage("canary", 100, 1800, 100),
    Stage("canary", 300, 1800, 300),
    Stage("full", 1000, 3600, 500),
)


class DeploymentPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a policy is brought to all traffic, fixed before it begins."""

    stages: tuple[Stage, ...] = STAGES
    """Shares rise: few callers first, since a policy that is five times worse is found out by about
    the same number of hurt requests whatever the share, but with luck on fewer callers."""
    window_s: Lasting = 600
    """s that figures of the band are taken over, and after which missing data counts."""
    look_s: Lasting = 10
    """s between two looks. The test stays valid however small this is."""
    alpha_permille: Annotated[int, Meta(ge=1, le=200)] = 7
    """Per mille: how often an equally good policy may be rolled back by the evidence, at most."""
    hurt_budget: Annotated[int, Meta(ge=1, le=100_000)] = 25
    """Requests that the canary may hurt before suspicion is enough to end it."""
    hurt_most: Annotated[int, Meta(ge=1, le=100_000)] = 50
    """Requests that it may hurt at all."""
    ratio_most_permille: Annotated[int, Meta(ge=1500, le=5000)] = 3000
    """Per mille: a stage is passed when it is shown that the canary misses at most this many times
    as often as the live policy beside it; less as the budget of hurt requests is used up."""
    miss_share_most_permille: Annotated[int, Meta(ge=1, le=1000)] = 5
    """Per mille: or when it is shown that it misses less than this, whatever the live one does."""
    hard_share_most_permille: Annotated[int, Meta(ge=1, le=1000)] = 20
    """Per mille of requests that may fail hard, while fewer of the live policy's do."""
    incident_gap_s: Seconds = 10
    """s without a miss after which the next one is another incident."""
    incident_most_s: Lasting = 60
    """s that one incident lasts at most: about as long as a queue needs to drain."""
    held_windows_most: Annotated[int, Meta(ge=1, le=1000)] = 3
    """Windows in a row with too little data after which the old policy rules again."""
    window_requests_least: Count = 2
    """Requests of either policy in a window; fewer are too little data, and so is a window in which
    the canary misses most of them and the live policy few."""
    stage_most_s: Lasting = 172_800
    """s that a stage may last: what is not shown by then will not be."""
    warmup_least_s: Seconds = 60
    """s at the beginning of a stage whose misses say nothing yet (hard failures do)."""
    warmup_most_s: Seconds = 600
    """s after which they do, even if the prefix cache is not yet used as well."""
    band: tuple[Band, ...] = ()
    """Where the evidence expects the candidate's figures; only their upper ends are judged."""

    def __post_init__(self) -> None:
        shares = [stage.share_permille for stage in self.stages]
        if not shares or shares != sorted(shares):
            raise ValueError(f"stages have shares of {shares} per mille: they must rise")
        if [stage.kind for stage in self.stages[:-1]].count("full"):
            raise ValueError("only the last stage may be full")
        if self.hurt_budget > self.hurt_most:
            raise ValueError(
                f"hurt_budget is {self.hurt_budget}, above hurt_most, {self.hurt_most}"
            )
        if self.warmup_least_s > self.warmup_most_s:
            raise ValueError(
                f"warmup_least_s is {self.warmup_least_s}, above warmup_most_s,"
                f" {self.warmup_most_s}"
            )
        for band in self.band:
            if not is_judged(band.figure):
                raise ValueError(
                    f"band for {band.figure!r}: figures that can be judged are slo_miss_share and"
                    " ttft_s_pNN, with /P0, /P1 or /P2 for one class"
                )


def is_judged(figure: str) -> bool:
    """Whether a band for this figure can be watched."""
    return _FIGURE.fullmatch(figure) is not None


class Result(msgspec.Struct, frozen=True):
    """What became of one request. Cancelled ones, and its caller's own mistakes, are none."""

    at_ns: int
    """When that was known."""
    arrived_ns: int
    key: str
    """Whom the request is from: what decides who serves it."""
    canary: bool
    sla: str
    prompt_bytes: int
    missed: bool
    hard: bool
    """A server failed it; one that the policy refused was not served, but did not fail."""
    ttft_ns: int
    """From arrival to first token, or to the whole answer; -1: there was none."""
    cached_permille: int = -1
    """Of its prompt; -1: unknown."""
    shed: bool = False
    told: Literal["whole", "late", "end", "refused"] = "whole"
    """``late``: it is still open, and its deadline is over, so it counts as missed. ``end``: what
    became of it then; that it was missed has been told. ``refused``: a server took it for its
    caller's mistake, so it counts nowhere but in whom that befalls."""


class Verdict(msgspec.Struct, frozen=True):
    value: Value
    why: str
    figures: tuple[tuple[str, float], ...]
    """As they were at the look."""


class _Known(msgspec.Struct, array_like=True):
    event: Arrived
    arrived_ns: int
    canary: bool
    sla: str
    due_ns: int
    """A first token after that is a miss."""
    sent: bool = False
    first_ns: int = -1
    cached_permille: int = -1
    told: bool = False
    """That it is missed."""


class Watcher:
    """Reads the decision log as it grows, and says what became of the requests.

    ``live``: the policy that rules: its classes' deadlines are what both policies are judged by.
    What is refused changes nothing.
    """

    def __init__(self, live: Parameters, salt: int = 0, share_permille: int = 0) -> None:
        self._tags = Tags(live.classes, live.tiers)
        self._salt = salt
        self.share_permille = share_permille
        """Of the callers that the candidate serves; follows the log."""
        self._open: dict[int, _Known] = {}
        self._due: list[tuple[int, int]] = []
        """A heap of (due_ns, request); some have gone."""
        self._refused: deque[Result] = deque(maxlen=REFUSED_MOST)

    def aside(self, now_ns: int) -> list[Result]:
        """What a judge wants to know beside the outcomes; to be asked before each record. Once
        each: open requests whose first token is late by now, and what a server refused since it
        was asked last. Whoever never asks hears of the late ones at their end."""
        results = list(self._refused)
        self._refused.clear()
        while self._due and self._due[0][0] < now_ns:
            due_ns, request = heappop(self._due)
            known = self._open.get(request)
            if known is None or known.told or known.first_ns >= 0 or known.due_ns != due_ns:
                continue
            known.told = True
            results.append(_result(now_ns, known, told="late"))
        return results

    def step(self, now_ns: int, event: Event, decisions: Sequence[Decision]) -> list[Result]:
        """One record of the log."""
        if decisions and isinstance(decisions[0], Refused):
            return []
        self._follow(now_ns, event)
        if broke(decisions):
            self.share_permille = 0
        results: list[Result] = []
        for decision in decisions:
            if isinstance(decision, Dispatch):
                known = self._open.get(decision.request)
                if known is not None:
                    known.sent = True
            elif isinstance(decision, Settled):
                known = self._open.pop(decision.request, None)
                if known is None:
                    continue
                if decision.why in CALLERS_FAULT and known.sent:  # a server's word, no policy's
                    self._refused.append(_result(now_ns, known, told="refused", missed=False))
                elif result := _settled(now_ns, known, decision):
                    results.append(result)
        return results

    def _follow(self, now_ns: int, event: Event) -> None:
        if isinstance(event, Arrived):
            self._arrived(now_ns, event)
        elif isinstance(event, FirstToken):
            known = self._open.get(event.request)
            if known is not None and known.first_ns < 0:
                known.first_ns = now_ns
        elif isinstance(event, Finished):
            known = self._open.get(event.request)
            if known is not None and event.prompt_tokens:
                known.cached_permille = 1000 * event.cached_tokens // event.prompt_tokens
        elif isinstance(event, CanaryStarted):
            self.share_permille, self._salt = event.share_permille, event.salt
        elif isinstance(event, CanaryEnded):
            self.share_permille = 1000 if event.keep == "new" else 0
        elif isinstance(event, PolicySwitched):
            self.share_permille = 0

    def _arrived(self, now_ns: int, event: Arrived) -> None:
        canary = self.share_permille > 0 and (
            self.share_permille == 1000 or arm_of(event, self._salt) < self.share_permille
        )
        sla = self._tags.sla(event)
        due_ns = now_ns + self._tags.deadline_ns(event, sla)
        self._open[event.request] = _Known(event, now_ns, canary, sla, due_ns)
        heappush(self._due, (due_ns, event.request))
        if len(self._due) > 64 + 2 * len(self._open):
            self._due = [each for each in self._due if each[1] in self._open]
            heapify(self._due)


def _settled(now_ns: int, known: _Known, settled: Settled) -> Result | None:
    """What became of it; None: that says nothing of its policy, or nothing more."""
    first_ns = known.first_ns if known.first_ns >= 0 else now_ns
    if settled.outcome == "cancelled" and (known.told or first_ns <= known.due_ns):
        return None  # who leaves in time says nothing
    served = settled.outcome in ("answered", "degraded")
    return _result(
        now_ns, known,
        missed=not served or first_ns > known.due_ns,
        hard=settled.outcome == "failed" and known.sent,
        ttft_ns=first_ns - known.arrived_ns if served else -1,
        shed=settled.outcome == "shed",
        told="end" if known.told else "whole",
    )  # fmt: skip


def _result(
    now_ns: int,
    known: _Known,
    *,
    told: Literal["whole", "late", "end", "refused"],
    missed: bool = True,
    hard: bool = False,
    ttft_ns: int = -1,
    shed: bool = False,
) -> Result:
    event = known.event
    return Result(
        at_ns=now_ns,
        arrived_ns=known.arrived_ns,
        key=event.user or event.session or event.chain or str(event.request),
        canary=known.canary,
        sla=known.sla,
        prompt_bytes=event.prompt_bytes,
        missed=missed,
        hard=hard,
        ttft_ns=ttft_ns,
        cached_permille=known.cached_permille,
        shed=shed,
        told=told,
    )


class Tally(msgspec.Struct):
    """Counts of one policy."""

    requests: int = 0
    misses: int = 0
    hards: int = 0

    def add(self, result: Result) -> None:
        first = result.told != "end"
        self.requests += first
        self.misses += first and result.missed
        self.hards += result.hard

    def share(self) -> float:
        """Of misses."""
        return self.misses / self.requests if self.requests else 0.0


class Reuse(msgspec.Struct):
    """How much of their prompts answers reused."""

    answers: int = 0
    permille: int = 0

    def mean(self) -> float:
        return self.permille / self.answers if self.answers else 0.0


class Trouble(msgspec.Struct):
    """One kind of it: which callers were in it, and what the bettors have made of that."""

    incidents: Incidents
    bets: Bets
    keys: Keys = msgspec.field(default_factory=Keys)
    banked: float = 0.0
    """What the stages before this one ended with."""

    def add(self, result: Result, share_permille: int) -> None:
        draw = self.keys.draw(result.key, result.canary, share_permille)
        self.incidents.add(result.at_ns, draw)

    def close(self, now_ns: int) -> list[Draw]:
        draws = self.incidents.closed(now_ns)
        if draws:
            self.bets.incident(draws)
        return draws


class Group(msgspec.Struct):
    """Requests of one class, or all."""

    trouble: Trouble
    """Misses since the warm-up."""
    canary: Tally = msgspec.field(default_factory=Tally)
    stable: Tally = msgspec.field(default_factory=Tally)
    """Of the stage, warm-up included."""
    before: Tally = msgspec.field(default_factory=Tally)
    """The live policy's, over all stages."""
    hurt: float = 0.0
    """Misses of the canary beyond what the live policy's own explain, over all stages."""
    chance: float = 0.0
    """Variance of ``hurt`` if the policies are equal."""

    def add(self, result: Result) -> None:
        (self.canary if result.canary else self.stable).add(result)
        if not result.canary:
            self.before.add(result)

    def hurts(self, canary: bool, share: float, counted: int) -> None:
        """One more miss, at this share of the canary's. All of one caller's fall to one policy
        together, so that the variance of their sum is the square of their number."""
        ours = self.canary.requests + SHARE_WEIGHT * share
        theirs = self.stable.requests + SHARE_WEIGHT * (1 - share)
        self.hurt += 1.0 if canary else -ours / theirs
        self.chance += (2 * counted + 1) * ours / theirs

    def hurt_by(self, least: float) -> bool:
        """At least so many are hurt, and not by chance."""
        hurt = self.hurt
        return hurt >= least and hurt * hurt >= CHANCE * CHANCE * self.chance


class Window(msgspec.Struct):
    """What is looked at together."""

    canary: Tally = msgspec.field(default_factory=Tally)
    stable: Tally = msgspec.field(default_factory=Tally)
    missing: list[bytes] = []
    """Some callers of the canary who missed."""

    def add(self, result: Result) -> None:
        (self.canary if result.canary else self.stable).add(result)
        if result.canary and result.missed and len(self.missing) < HARM_CALLERS:
            hash_ = hash_of(result.key)
            if hash_ not in self.missing:
                self.missing.append(hash_)

    def harmful(self) -> bool:
        """The canary misses most of its requests, and the live policy few."""
        ours, theirs = self.canary, self.stable
        return (
            ours.requests >= HARM_REQUESTS
            and len(self.missing) >= HARM_CALLERS
            and ours.share() > HARM_SHARE
            and theirs.requests > 0
            and theirs.share() < FINE_SHARE
        )


class Watch(msgspec.Struct):
    """One figure: how often single requests lie above its upper end."""

    figure: str
    bets: MeanBets
    above_ns: int = 0
    """For times to first token; 0: a miss is what counts."""
    sla: str = ""
    alone: bool = False
    """There is no band: it is watched once the candidate serves everyone, and its level is set
    then, from what the live policy missed before."""
    canary: tuple[int, int] = (0, 0)
    """(seen, above) since the last bet."""
    stable: tuple[int, int] = (0, 0)

    def add(self, result: Result) -> None:
        if self.sla not in ("", result.sla):
            return
        if self.figure == HARD_SHARE:
            if result.told == "late":
                return
            above = result.hard
        elif not self.above_ns:
            if result.told == "end":
                return
            above = result.missed
        elif result.ttft_ns < 0:
            return
        else:
            above = result.ttft_ns > self.above_ns
        seen, many = self.canary if result.canary else self.stable
        if result.canary:
            self.canary = (seen + 1, many + above)
        else:
            self.stable = (seen + 1, many + above)

    def bet(self, beside: bool) -> None:
        """On what was seen since the last bet. If the live policy serves others ``beside`` it, only
        where that one was better; and not before it can tell."""
        seen, above = self.canary
        stable_seen, stable_above = self.stable
        if beside and stable_seen * self.bets.level < 1.0:
            return
        if seen and not stable_above > self.bets.level * stable_seen:
            self.bets.value(above / seen)
        self.canary = self.stable = (0, 0)


class DeploymentState(msgspec.Struct):
    """All that is remembered, ready for msgpack. Times are the log's."""

    began_ns: int
    stage_ns: int
    look_ns: int
    """The next look."""
    window_ns: int
    """When this window ends."""
    watch_ns: int
    """When the watches bet next."""
    groups: dict[str, Group]
    """By class; empty: all."""
    hards: Trouble
    margins: Bets
    scarce: MeanBets
    """Against "the canary misses at least ``miss_share_most_permille``"."""
    watches: list[Watch]
    stage: int = 0
    over: str = ""
    """Why nothing more is judged; empty: it goes on."""
    warm_ns: int = -1
    """Requests that arrive from then on are compared; -1: not yet."""
    bet: float = 0.0
    """Wealth that stages before this one may bet at their begin."""
    callers: Table = msgspec.field(default_factory=Table)
    """Misses that counted as hurt in this stage, by caller."""
    compared: int = 0
    """Requests of the canary since the warm-up."""
    window: Window = msgspec.field(default_factory=Window)
    held: int = 0
    """Windows in a row that showed too little, or harm."""
    held_for: str = ""
    """What the last one had."""
    canary_reuse: Reuse = msgspec.field(default_factory=Reuse)
    stable_reuse: Reuse = msgspec.field(default_factory=Reuse)


_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(DeploymentState)


class Deployment:
    """One policy on its way. ``now_ns`` is the log's clock everywhere."""

    def __init__(self, plan: DeploymentPlan, now_ns: int) -> None:
        self.plan = plan
        self._s = DeploymentState(
            began_ns=now_ns,
            stage_ns=now_ns,
            look_ns=now_ns + plan.look_s * NS,
            window_ns=now_ns + plan.window_s * NS,
            watch_ns=now_ns,
            groups={name: Group(_trouble(plan)) for name in ("", *CLASSES)},
            hards=_trouble(plan),
            margins=_margins(),
            scarce=MeanBets(1.0 - plan.miss_share_most_permille / 1000),
            watches=_watches(plan),
        )
        self._begin_watches(now_ns)

    def _begin_watches(self, now_ns: int) -> None:
        s = self._s
        s.watch_ns = now_ns + self._watch_ns()
        for watch in s.watches:
            watch.canary = watch.stable = (0, 0)
            if watch.alone and self.stage.kind == "full":
                watch.bets.level = self._plain_most(s.groups[watch.sla].before.share())

    def _watch_ns(self) -> int:
        window_s = self.plan.window_s
        return NS * (min(ALONE_S, window_s) if self.stage.kind == "full" else window_s)

    # ---- what it is told ----

    def settled(self, result: Result) -> None:
        """What became of a request; ``deadline_ns`` may lie earlier afterwards."""
        s = self._s
        if s.over or result.arrived_ns < s.stage_ns:  # it belongs to the stage before
            return
        if result.told == "refused":
            if self.stage.kind == "canary":
                self._close_incidents(result.at_ns)
                s.hards.add(result, self.stage.share_permille)
            return
        for name in ("", result.sla):
            s.groups[name].add(result)
        if self.stage.kind != "shadow":
            for watch in s.watches:
                if self.stage.kind == "full" or not watch.alone:
                    watch.add(result)
        if self.stage.kind == "canary":
            self._compare(result)
        if result.told == "end":
            return
        s.window.add(result)
        if self.stage.kind == "canary":
            self._compare_missed(result)

    def _compare(self, result: Result) -> None:
        s = self._s
        self._close_incidents(result.at_ns)
        if result.hard:
            s.hards.add(result, self.stage.share_permille)
        if result.cached_permille >= 0:
            reuse = s.canary_reuse if result.canary else s.stable_reuse
            reuse.answers += 1
            reuse.permille += result.cached_permille

    def _compare_missed(self, result: Result) -> None:
        s = self._s
        if result.missed:
            self._count_hurt(result)
        if not 0 <= s.warm_ns <= result.arrived_ns:
            return
        if result.canary:
            s.compared += 1
            s.scarce.value(0.0 if result.missed else 1.0)
        if result.missed:
            for name in ("", result.sla):
                s.groups[name].trouble.add(result, self.stage.share_permille)

    def _count_hurt(self, result: Result) -> None:
        s = self._s
        counted = s.callers.get(result.key) or 0
        if counted >= CALLER_HURT_MOST or s.callers.full:
            return
        s.callers.put(result.key, counted + 1)
        for name in ("", result.sla):
            s.groups[name].hurts(result.canary, self.stage.share_permille / 1000, counted)

    def _close_incidents(self, now_ns: int) -> None:
        s = self._s
        for name, group in s.groups.items():
            draws = group.trouble.close(now_ns)
            if draws and not name:
                s.margins.incident(draws)
        s.hards.close(now_ns)

    # ---- what it says ----

    @property
    def stage(self) -> Stage:
        return self.plan.stages[self._s.stage]

    @property
    def stage_number(self) -> int:
        return self._s.stage

    @property
    def over(self) -> str:
        """Why nothing more is judged: ``done``, or why it was ended; empty: it goes on."""
        return self._s.over

    def deadline_ns(self) -> int | None:
        """When to look next; at once if no more may be hurt."""
        s = self._s
        if s.over:
            return None
        return s.began_ns if self._at_cap() else s.look_ns

    def look(self, now_ns: int) -> Verdict | None:
        """The verdict; None: it is not time yet, or it is over."""
        s = self._s
        due_ns = self.deadline_ns()
        if due_ns is None or now_ns < due_ns:
            return None
        s.look_ns = now_ns + self.plan.look_s * NS
        if self.stage.kind == "canary":
            self._close_incidents(now_ns)
            self._warm(now_ns)
        if now_ns >= s.window_ns:
            self._window_over()
            s.window_ns = now_ns + self.plan.window_s * NS  # nobody looked into those before
        if now_ns >= s.watch_ns:
            s.watch_ns = now_ns + self._watch_ns()
            for watch in s.watches:
                watch.bet(beside=self.stage.kind == "canary")
        value, why = self._judged(now_ns)
        return Verdict(value, why, self.figures())

    def _warm(self, now_ns: int) -> None:
        s = self._s
        since_ns = now_ns - s.stage_ns
        if s.warm_ns >= 0 or since_ns < self.plan.warmup_least_s * NS:
            return
        settled = (
            s.canary_reuse.answers >= WARM_ANSWERS
            and s.canary_reuse.mean() >= s.stable_reuse.mean() - WARM_SLACK_PERMILLE
        )
        if settled or since_ns >= self.plan.warmup_most_s * NS:
            s.warm_ns = now_ns

    def _window_over(self) -> None:
        s = self._s
        s.held_for = self._withheld()
        s.held = s.held + 1 if s.held_for else 0
        s.window = Window()

    def _withheld(self) -> str:
        """What speaks against going on after this window; empty: nothing."""
        s, kind = self._s, self.stage.kind
        ours, theirs = s.window.canary.requests, s.window.stable.requests
        least = self.plan.window_requests_least
        if (kind != "shadow" and ours < least) or (kind != "full" and theirs < least):
            return "had too little data to judge by"
        if kind == "canary" and s.window.harmful():
            return "had the canary miss most of its requests and the live policy few"
        if kind == "canary" and self._blind():
            return f"had {KEYS_MOST} callers in trouble and more, which is too many to compare"
        return ""

    def _blind(self) -> bool:
        """So many callers were in trouble that further ones are not compared."""
        s = self._s
        tables = [s.hards.keys.shares, *(group.trouble.keys.shares for group in s.groups.values())]
        return any(table.full for table in (s.callers, *tables))

    def _judged(self, now_ns: int) -> tuple[Value, str]:
        plan, s = self.plan, self._s
        evidence, hurt = self.evidence(), self._most_hurt()
        if evidence >= 1000 / plan.alpha_permille:
            return "roll_back", f"{self._worst()}: evidence {evidence:.3g} to 1 that it is worse"
        if self._at_cap():
            return "roll_back", f"about {hurt:.0f} requests hurt, of {plan.hurt_most} at most"
        if self._hurt(SUSPECT_BUDGET * plan.hurt_budget) and evidence >= SUSPECT:
            return "roll_back", (
                f"about {hurt:.0f} requests hurt of a budget of {plan.hurt_budget}, and evidence"
                f" {evidence:.3g} to 1 that it is worse"
            )
        if s.held >= plan.held_windows_most:
            return "roll_back", f"{s.held} windows in a row {s.held_for}"
        if now_ns - s.stage_ns >= plan.stage_most_s * NS:
            return "roll_back", f"the stage has not been passed within {plan.stage_most_s} s"
        if s.held:
            return "hold", f"{s.held} of {plan.held_windows_most} windows {s.held_for}"
        if self.stage.kind == "canary" and self._blind():
            return "hold", f"{KEYS_MOST} callers are in trouble: more cannot be compared"
        return self._passed(now_ns)

    def _passed(self, now_ns: int) -> tuple[Value, str]:
        s, stage = self._s, self.stage
        left_s = stage.least_s - (now_ns - s.stage_ns) // NS
        if left_s > 0:
            return "hold", f"the stage lasts {left_s} s more at least"
        whole = s.groups[""]
        seen = {
            "shadow": whole.stable.requests, "canary": s.compared, "full": whole.canary.requests
        }[stage.kind]  # fmt: skip
        if seen < stage.least_requests:
            return "hold", f"{seen} of {stage.least_requests} requests seen"
        if apart := self._apart():
            return "hold", apart
        if stage.kind != "canary":
            return "go_on", f"{seen} requests, nothing against it"
        if s.scarce.evidence() >= PASSED:
            most = self.plan.miss_share_most_permille
            return "go_on", f"it misses less than {most} per mille of its requests"
        bound, wanted = self.ratio_most(), self._ratio_wanted()
        if bound <= wanted:
            return "go_on", f"it misses at most {bound:g} times as often as the live policy"
        return "hold", f"not yet shown that it misses at most {wanted:g} times as often"

    def _apart(self) -> str:
        """Where the plain shares of misses cannot be compared; empty: nowhere."""
        for name, group in self._s.groups.items():
            live = (group.before if self.stage.kind == "full" else group.stable).share()
            ours, most = group.canary, self._plain_most(live)
            if ours.misses > most * ours.requests + PLAIN_SLACK:
                return (
                    f"it misses {100 * ours.share():.1f} % of its {name or 'requests'}, the live"
                    f" policy {100 * live:.1f} %: no more than {100 * most:.1f} % can be compared"
                )
        return ""

    def _plain_most(self, live: float) -> float:
        """Misses of all that the candidate may have where the live policy has this share: a few
        times as many, or half of what that one serves."""
        times = PLAIN_LEAST * (2 if self.stage.kind == "full" else 1)
        least = min(0.5, times * self.plan.miss_share_most_permille / 1000)
        return max(least, min(self.plan.ratio_most_permille / 1000 * live, (1.0 + live) / 2))

    def _ratio_wanted(self) -> float:
        """What must be shown: the more, the more of the budget is used up."""
        used = max(0.0, self._s.groups[""].hurt / self.plan.hurt_budget)
        wanted = self.plan.ratio_most_permille / 1000
        return wanted if used < 0.3 else min(wanted, 2.0) if used < SUSPECT_BUDGET else 1.5

    def _at_cap(self) -> bool:
        return self._hurt(CAP_PART * self.plan.hurt_most)

    def _hurt(self, least: float) -> bool:
        return any(group.hurt_by(least) for group in self._s.groups.values())

    def _most_hurt(self) -> float:
        """Of all, or of the class that is hurt more."""
        return max(group.hurt for group in self._s.groups.values())

    def ratio_most(self) -> float:
        """Of misses, the canary's keys' to the others': the least margin that is excluded with 95 %
        confidence, or infinity."""
        for (margin, _), wealth in zip(self._s.margins.ratios, self._s.margins.wealth, strict=True):
            if wealth >= PASSED:
                return margin
        return float("inf")

    def evidence(self) -> float:
        """That the candidate does worse: to 1, if it does not; an e-process."""
        return sum(self._parts().values())

    def _parts(self) -> dict[str, float]:
        s = self._s
        bands = sum(watch.bets.evidence() for watch in s.watches) / len(s.watches)
        parts = {
            f"misses of {name}" if name else "misses":
                (CLASS_MISSES if name else MISSES) * self._worth(group.trouble)
            for name, group in s.groups.items()
        }  # fmt: skip
        return {
            **parts,
            "hard failures or refusals": HARDS * self._worth(s.hards),
            "band": BANDS * bands,
        }

    def _worth(self, trouble: Trouble) -> float:
        now = self._stake()
        return trouble.banked + now * _wealth(trouble.bets) + (1.0 - self._s.bet - now)

    def _stake(self) -> float:
        """Wealth that this stage bets, of 1 in all."""
        if self.stage.kind != "canary":
            return 0.0
        before = sum(stage.kind == "canary" for stage in self.plan.stages[: self._s.stage])
        return FIRST_STAGE * float(NEXT_STAGE**before)

    def _worst(self) -> str:
        parts = self._parts()
        worst = max(parts, key=parts.__getitem__)
        if worst == "band":
            watch = max(self._s.watches, key=lambda watch: watch.bets.evidence())
            if not watch.alone:
                return f"{watch.figure} outside its band"
            return f"{watch.figure} far above the live policy's before"
        return worst

    def figures(self) -> tuple[tuple[str, float], ...]:
        """What a person wants to see beside the verdict."""
        s = self._s
        whole = s.groups[""]
        return (
            ("stage", s.stage),
            ("evidence", self.evidence()),
            ("hurt", self._most_hurt()),
            ("canary_requests", whole.canary.requests),
            ("canary_misses", whole.canary.misses),
            ("canary_hards", whole.canary.hards),
            ("stable_requests", whole.stable.requests),
            ("stable_misses", whole.stable.misses),
            ("stable_hards", whole.stable.hards),
            ("ratio_most", self.ratio_most()),
            ("held_windows", s.held),
        )

    # ---- what is done about it ----

    def advance(self, now_ns: int) -> Stage | None:
        """The next stage begins, by a verdict or by an operator's word; None: that was the last."""
        s = self._s
        if s.over:
            raise ValueError(f"the deployment is over ({s.over}): begin another")
        if s.stage + 1 == len(self.plan.stages):
            s.over = "done"
            return None
        stake = self._stake()
        s.bet += stake
        fresh = Deployment(self.plan, now_ns)._s
        for name in _OF_A_STAGE:
            setattr(s, name, getattr(fresh, name))
        for trouble, new in zip(_troubles(s), _troubles(fresh), strict=True):
            if trouble.incidents.draws:  # one that is not over, and known already
                trouble.bets.incident(trouble.incidents.draws)
            trouble.banked += stake * _wealth(trouble.bets)
            trouble.bets, trouble.incidents = new.bets, new.incidents
        for group in s.groups.values():
            group.canary, group.stable = Tally(), Tally()
        s.stage += 1
        self._begin_watches(now_ns)
        return self.stage

    def abort(self, why: str) -> None:
        """The old policy rules again, by a verdict or by an operator's word."""
        self._s.over = self._s.over or why or "ended by its operator"

    # ---- memory ----

    def state(self) -> bytes:
        """All of it but the plan, in canonical msgpack."""
        return _ENCODER.encode(self._s)

    @classmethod
    def load(cls, plan: DeploymentPlan, state: bytes) -> Deployment:
        """Go on from a state, under the same plan.

        Raises:
            ValueError: it is no state of this plan's.
        """
        made = cls.__new__(cls)
        made.plan = plan
        try:
            made._s = _DECODER.decode(state)
        except msgspec.DecodeError as error:
            raise ValueError(f"not a deployment's state: {error}") from error
        if not 0 <= made._s.stage < len(plan.stages):
            raise ValueError(
                f"the state is of stage {made._s.stage}, the plan has {len(plan.stages)}: give the"
                " plan that it began with"
            )
        return made


_OF_A_STAGE = (
    "stage_ns", "look_ns", "window_ns", "margins", "scarce", "warm_ns", "callers", "compared",
    "window", "held", "held_for", "canary_reuse", "stable_reuse",
)  # fmt: skip
"""What begins anew with each stage."""


def _trouble(plan: DeploymentPlan) -> Trouble:
    return Trouble(Incidents(plan.incident_gap_s * NS, plan.incident_most_s * NS), _doubters())


def _troubles(state: DeploymentState) -> list[Trouble]:
    return [*(group.trouble for group in state.groups.values()), state.hards]


def _doubters() -> Bets:
    return bets([(1.0, ratio) for ratio, _ in BELIEVED])


def _margins() -> Bets:
    return bets([(margin, 1.0) for margin in MARGINS])


def _wealth(doubters: Bets) -> float:
    return sum(
        weight * wealth for (_, weight), wealth in zip(BELIEVED, doubters.wealth, strict=True)
    )


def _wary(level: float) -> MeanBets:
    return MeanBets(level, stakes=(0.1, 0.3, 0.6, 0.9), reserve=0.5)


def _watches(plan: DeploymentPlan) -> list[Watch]:
    watches = [Watch(HARD_SHARE, _wary(plan.hard_share_most_permille / 1000))]
    for band in plan.band:
        found = _FIGURE.fullmatch(band.figure)
        assert found is not None
        _, percent, sla = found.groups()
        if percent is None:
            level, above_ns = band.high, 0
        else:
            level, above_ns = 1 - int(percent) / 100, round(band.high * NS)
        watches.append(Watch(band.figure, _wary(max(level, 0.001)), above_ns, sla or ""))
    known = {watch.figure for watch in watches}
    for sla in ("", *CLASSES):
        figure = f"slo_miss_share/{sla}" if sla else "slo_miss_share"
        if figure not in known:
            watches.append(Watch(figure, _wary(1.0), sla=sla, alone=True))
    return watches
