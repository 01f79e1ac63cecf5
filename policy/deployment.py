"""Judges a new policy on its way to all traffic: shadow, canary, full; and when it must go back.

It stands beside the policy, not in it: told what became of each request, it says at its looks
whether the present stage may be left for the next (``go_on``), must go on as it is (``hold``), or
the old policy must rule again (``roll_back``). It acts on nothing. The same in the twin and live.

A canary is rolled back when one of these holds:

- the evidence that it does worse than the live policy beside it reaches 1/alpha. It is the mean of
  three e-processes (``policy.sequential``): misses, hard failures, and figures outside their band;
- its hurt, the misses beyond what the live policy's own explain, has used up most of its budget,
  and there is some evidence too; or it nears the most that may be hurt, and then without any;
- in three windows in a row there was too little to judge by, or the stage has lasted too long.

It may go on when the stage's time and requests are there, and a confidence sequence shows that it
misses at most so many times as often as the live policy, or next to never.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from policy.canary import arm_of
from policy.decisions import Dispatch, Settled
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
from policy.sequential import Bets, Incidents, Keys, MeanBets, bets
from policy.tiers import Tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from policy.events import Event
    from policy.parameters import Parameters

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
MISSES, HARDS, BANDS = 0.70, 0.15, 0.15
"""Weights of the three e-processes."""
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
"""Misses of one caller that count as hurt: one caller's trouble is not many callers'."""
CALLERS_MOST = 100_000
WARM_ANSWERS, WARM_SLACK_PERMILLE = 10, 100
"""Warm-up is over when so many answers of the canary reuse as much of their prompts as the others,
less this."""
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
    """Requests of either policy in a window; fewer are too little data."""
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


class Verdict(msgspec.Struct, frozen=True):
    value: Value
    why: str
    figures: tuple[tuple[str, float], ...]
    """As they were at the look."""


class _Known(msgspec.Struct, array_like=True):
    event: Arrived
    arrived_ns: int
    canary: bool
    sent: bool = False
    first_ns: int = -1
    cached_permille: int = -1


class Watcher:
    """Reads the decision log as it grows, and says what became of the requests.

    ``live``: the policy that rules: its classes' deadlines are what both policies are judged by.
    """

    def __init__(self, live: Parameters, salt: int = 0, share_permille: int = 0) -> None:
        self._tags = Tags(live.classes, live.tiers)
        self._salt = salt
        self.share_permille = share_permille
        """Of the callers that the candidate serves; follows the log."""
        self._open: dict[int, _Known] = {}

    def step(self, now_ns: int, event: Event, decisions: Sequence[Decision]) -> list[Result]:
        """One record of the log."""
        if isinstance(event, Arrived):
            canary = self.share_permille > 0 and (
                self.share_permille == 1000 or arm_of(event, self._salt) < self.share_permille
            )
            self._open[event.request] = _Known(event, now_ns, canary)
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
        results: list[Result] = []
        for decision in decisions:
            if isinstance(decision, Dispatch):
                known = self._open.get(decision.request)
                if known is not None:
                    known.sent = True
            elif isinstance(decision, Settled):
                known = self._open.pop(decision.request, None)
                if known is not None and (result := self._result(now_ns, known, decision)):
                    results.append(result)
        return results

    def _result(self, now_ns: int, known: _Known, settled: Settled) -> Result | None:
        event = known.event
        if settled.outcome == "cancelled":
            return None
        if settled.why in CALLERS_FAULT and known.sent:  # a server said so, not the policy
            return None
        served = settled.outcome in ("answered", "degraded")
        first_ns = known.first_ns if known.first_ns >= 0 else now_ns
        ttft_ns = first_ns - known.arrived_ns if served else -1
        sla = self._tags.sla(event)
        return Result(
            at_ns=now_ns,
            arrived_ns=known.arrived_ns,
            key=event.user or event.session or event.chain or str(event.request),
            canary=known.canary,
            sla=sla,
            prompt_bytes=event.prompt_bytes,
            missed=not served or ttft_ns > self._tags.deadline_ns(event, sla),
            hard=settled.outcome == "failed" and known.sent,
            ttft_ns=ttft_ns,
            cached_permille=known.cached_permille,
            shed=settled.outcome == "shed",
        )


class Tally(msgspec.Struct):
    """Counts of one policy."""

    requests: int = 0
    misses: int = 0
    hards: int = 0

    def add(self, result: Result) -> None:
        self.requests += 1
        self.misses += result.missed
        self.hards += result.hard


class Reuse(msgspec.Struct):
    """How much of their prompts answers reused."""

    answers: int = 0
    permille: int = 0

    def mean(self) -> float:
        return self.permille / self.answers if self.answers else 0.0


class Watch(msgspec.Struct):
    """One figure of the band: how often single requests lie above its upper end."""

    figure: str
    bets: MeanBets
    above_ns: int = 0
    """For times to first token; 0: a miss is what counts."""
    sla: str = ""
    canary: tuple[int, int] = (0, 0)
    """(seen, above) in this window."""
    stable: tuple[int, int] = (0, 0)

    def add(self, result: Result) -> None:
        if self.sla not in ("", result.sla):
            return
        if self.figure == HARD_SHARE:
            above = result.hard
        elif not self.above_ns:
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

    def window_over(self) -> None:
        """Bet on the window, unless the live policy was no better: then it says nothing."""
        seen, above = self.canary
        stable_seen, stable_above = self.stable
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
    misses: Bets
    hards: Bets
    margins: Bets
    scarce: MeanBets
    """Against "the canary misses at least ``miss_share_most_permille``"."""
    watches: list[Watch]
    miss_incidents: Incidents
    hard_incidents: Incidents
    stage: int = 0
    over: str = ""
    """Why nothing more is judged; empty: it goes on."""
    warm_ns: int = -1
    """Requests that arrive from then on are compared; -1: not yet."""
    miss_keys: Keys = msgspec.field(default_factory=Keys)
    hard_keys: Keys = msgspec.field(default_factory=Keys)
    bet: float = 0.0
    """Wealth that stages before this one may bet at their begin."""
    banked_misses: float = 0.0
    banked_hards: float = 0.0
    """What they ended with."""
    hurt: float = 0.0
    """Misses of the canary beyond what the live policy's own explain, over all stages."""
    chance: float = 0.0
    """Variance of ``hurt`` if the policies are equal."""
    callers: dict[str, int] = msgspec.field(default_factory=dict[str, int])
    """Misses that counted as hurt, by caller."""
    canary: Tally = msgspec.field(default_factory=Tally)
    stable: Tally = msgspec.field(default_factory=Tally)
    """Of the stage, warm-up included."""
    compared: int = 0
    """Requests of the canary since the warm-up."""
    window: tuple[int, int] = (0, 0)
    """Requests in this window: the canary's, the live policy's."""
    held: int = 0
    """Windows in a row with too little data."""
    canary_reuse: Reuse = msgspec.field(default_factory=Reuse)
    stable_reuse: Reuse = msgspec.field(default_factory=Reuse)


_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(DeploymentState)


class Deployment:
    """One policy on its way. ``now_ns`` is the log's clock everywhere."""

    def __init__(self, plan: DeploymentPlan, now_ns: int) -> None:
        self.plan = plan
        gap_ns, most_ns = plan.incident_gap_s * NS, plan.incident_most_s * NS
        self._s = DeploymentState(
            began_ns=now_ns,
            stage_ns=now_ns,
            look_ns=now_ns + plan.look_s * NS,
            window_ns=now_ns + plan.window_s * NS,
            misses=_doubters(),
            hards=_doubters(),
            margins=_margins(),
            scarce=MeanBets(1.0 - plan.miss_share_most_permille / 1000),
            watches=_watches(plan),
            miss_incidents=Incidents(gap_ns, most_ns),
            hard_incidents=Incidents(gap_ns, most_ns),
        )

    # ---- what it is told ----

    def settled(self, result: Result) -> None:
        """What became of a request; ``deadline_ns`` may lie earlier afterwards."""
        s = self._s
        if s.over or result.arrived_ns < s.stage_ns:  # it belongs to the stage before
            return
        (s.canary if result.canary else s.stable).add(result)
        ours, theirs = s.window
        s.window = (ours + result.canary, theirs + (not result.canary))
        if self.stage.kind == "shadow":
            return
        if self.stage.kind == "canary":
            self._count_hurt(result)
            self._compare(result)
        for watch in s.watches:
            watch.add(result)

    def _count_hurt(self, result: Result) -> None:
        s = self._s
        if not result.missed:
            return
        counted = s.callers.get(result.key, 0)
        if counted >= CALLER_HURT_MOST or (not counted and len(s.callers) >= CALLERS_MOST):
            return
        s.callers[result.key] = counted + 1
        ours = s.canary.requests + SHARE_WEIGHT * self.stage.share_permille / 1000
        theirs = s.stable.requests + SHARE_WEIGHT * (1 - self.stage.share_permille / 1000)
        s.hurt += 1.0 if result.canary else -ours / theirs
        s.chance += ours / theirs

    def _compare(self, result: Result) -> None:
        s = self._s
        share = self.stage.share_permille
        self._close_incidents(result.at_ns)
        if result.hard:
            draw = s.hard_keys.draw(result.key, result.canary, share)
            s.hard_incidents.add(result.at_ns, draw)
        if result.cached_permille >= 0:
            reuse = s.canary_reuse if result.canary else s.stable_reuse
            reuse.answers += 1
            reuse.permille += result.cached_permille
        if not 0 <= s.warm_ns <= result.arrived_ns:
            return
        if result.canary:
            s.compared += 1
            s.scarce.value(0.0 if result.missed else 1.0)
        if result.missed:
            draw = s.miss_keys.draw(result.key, result.canary, share)
            s.miss_incidents.add(result.at_ns, draw)

    def _close_incidents(self, now_ns: int) -> None:
        s = self._s
        if draws := s.miss_incidents.closed(now_ns):
            s.misses.incident(draws)
            s.margins.incident(draws)
        if draws := s.hard_incidents.closed(now_ns):
            s.hards.incident(draws)

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
        while now_ns >= s.window_ns:
            self._window_over()
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
        ours, theirs = s.window
        least = self.plan.window_requests_least
        kind = self.stage.kind
        enough = (kind == "shadow" or ours >= least) and (kind == "full" or theirs >= least)
        s.held = 0 if enough else s.held + 1
        s.window = (0, 0)
        s.window_ns += self.plan.window_s * NS
        for watch in s.watches:
            watch.window_over()

    def _judged(self, now_ns: int) -> tuple[Value, str]:
        plan, s = self.plan, self._s
        evidence = self.evidence()
        if evidence >= 1000 / plan.alpha_permille:
            return "roll_back", f"{self._worst()}: evidence {evidence:.3g} to 1 that it is worse"
        if self._at_cap():
            return "roll_back", f"about {s.hurt:.0f} requests hurt, of {plan.hurt_most} at most"
        if self._hurt(SUSPECT_BUDGET * plan.hurt_budget) and evidence >= SUSPECT:
            return "roll_back", (
                f"about {s.hurt:.0f} requests hurt of a budget of {plan.hurt_budget}, and evidence"
                f" {evidence:.3g} to 1 that it is worse"
            )
        if s.held >= plan.held_windows_most:
            return "roll_back", f"{s.held} windows in a row had too little data to judge by"
        if now_ns - s.stage_ns >= plan.stage_most_s * NS:
            return "roll_back", f"the stage has not been passed within {plan.stage_most_s} s"
        if s.held:
            return "hold", f"{s.held} windows with too little data"
        return self._passed(now_ns)

    def _passed(self, now_ns: int) -> tuple[Value, str]:
        s, stage = self._s, self.stage
        left_s = stage.least_s - (now_ns - s.stage_ns) // NS
        if left_s > 0:
            return "hold", f"the stage lasts {left_s} s more at least"
        seen = {
            "shadow": s.stable.requests, "canary": s.compared, "full": s.canary.requests
        }[stage.kind]  # fmt: skip
        if seen < stage.least_requests:
            return "hold", f"{seen} of {stage.least_requests} requests seen"
        if stage.kind != "canary":
            return "go_on", f"{seen} requests, nothing against it"
        if s.scarce.evidence() >= PASSED:
            most = self.plan.miss_share_most_permille
            return "go_on", f"it misses less than {most} per mille of its requests"
        bound, wanted = self.ratio_most(), self._ratio_wanted()
        if bound <= wanted:
            return "go_on", f"it misses at most {bound:g} times as often as the live policy"
        return "hold", f"not yet shown that it misses at most {wanted:g} times as often"

    def _ratio_wanted(self) -> float:
        """What must be shown: the more, the more of the budget is used up."""
        used = max(0.0, self._s.hurt / self.plan.hurt_budget)
        wanted = self.plan.ratio_most_permille / 1000
        return wanted if used < 0.3 else min(wanted, 2.0) if used < SUSPECT_BUDGET else 1.5

    def _at_cap(self) -> bool:
        return self._hurt(CAP_PART * self.plan.hurt_most)

    def _hurt(self, least: float) -> bool:
        """At least so many, and not by chance."""
        hurt = self._s.hurt
        return hurt >= least and hurt * hurt >= CHANCE * CHANCE * self._s.chance

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
        now = self._stake()
        cash = 1.0 - s.bet - now
        misses = s.banked_misses + now * _wealth(s.misses) + cash
        hards = s.banked_hards + now * _wealth(s.hards) + cash
        bands = sum(watch.bets.evidence() for watch in s.watches) / len(s.watches)
        return {"misses": MISSES * misses, "hard failures": HARDS * hards, "band": BANDS * bands}

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
            return f"{watch.figure} outside its band"
        return worst

    def figures(self) -> tuple[tuple[str, float], ...]:
        """What a person wants to see beside the verdict."""
        s = self._s
        return (
            ("stage", s.stage),
            ("evidence", self.evidence()),
            ("hurt", s.hurt),
            ("canary_requests", s.canary.requests),
            ("canary_misses", s.canary.misses),
            ("canary_hards", s.canary.hards),
            ("stable_requests", s.stable.requests),
            ("stable_misses", s.stable.misses),
            ("stable_hards", s.stable.hards),
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
        s.banked_misses += stake * _wealth(s.misses)
        s.banked_hards += stake * _wealth(s.hards)
        fresh = Deployment(self.plan, now_ns)._s
        for name in _OF_A_STAGE:
            setattr(s, name, getattr(fresh, name))
        s.stage += 1
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
    "stage_ns", "look_ns", "window_ns", "misses", "hards", "margins", "scarce", "miss_incidents",
    "hard_incidents", "warm_ns", "canary", "stable", "compared", "window", "held", "canary_reuse",
    "stable_reuse",
)  # fmt: skip
"""What begins anew with each stage."""


def _doubters() -> Bets:
    return bets([(1.0, ratio) for ratio, _ in BELIEVED])


def _margins() -> Bets:
    return bets([(margin, 1.0) for margin in MARGINS])


def _wealth(doubters: Bets) -> float:
    return sum(
        weight * wealth for (_, weight), wealth in zip(BELIEVED, doubters.wealth, strict=True)
    )


def _watches(plan: DeploymentPlan) -> list[Watch]:
    watches = [Watch(HARD_SHARE, MeanBets(plan.hard_share_most_permille / 1000))]
    for band in plan.band:
        found = _FIGURE.fullmatch(band.figure)
        assert found is not None
        _, percent, sla = found.groups()
        if percent is None:
            level, above_ns = band.high, 0
        else:
            level, above_ns = 1 - int(percent) / 100, round(band.high * NS)
        watches.append(Watch(band.figure, MeanBets(max(level, 0.001)), above_ns, sla or ""))
    return watches
