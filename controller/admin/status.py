"""The structure of ``GET /status``, and how it is put together. Times in ms, shares per mille."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from controller.telemetry import timing
from controller.telemetry.timing import NS_PER_MS
from policy.parameters import policy_hash
from policy.service import Service

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from controller.admin.stats import Heard, Past, Stats
    from controller.config import Settings
    from controller.driver import Driver
    from controller.upstream.replica import Replica
    from policy.parameters import Parameters

HOPS = (*timing.HOPS, "rest", "total")
TIERS = ("turbo", "lent", "stable", "batch", "fallback", "held")
HELD = "held"
"""What a limit holds back has no tier yet."""


class PolicyView(msgspec.Struct, frozen=True):
    """The policy in force."""

    name: str
    discipline: str
    hash: str


class ReplicaView(msgspec.Struct, frozen=True):
    """A server, and where it stands."""

    id: int
    name: str
    url: str
    up: bool
    rotation: str
    """in, ejected, probing, draining or isolated; out: it is down, or was never seen."""
    rotation_why: str
    in_flight: int
    """Calls of ours."""
    running: int
    """The engine's own figures, as last read; -1: never."""
    waiting: int
    kv_used_permille: int
    scraped_ms_ago: int
    output_tokens: int
    network_ms: float
    """Usual time of an empty request; -1: not measured."""
    models: tuple[str, ...] = ()
    version: str = ""
    domain: str = ""
    drift_permille: int | None = None
    """By how much its last steps took longer than its profile says (below 0: shorter); null: they
    are not recorded, or none was read yet."""
    steps_read: int = 0
    """Steps of its own records that were held against its profile since it came up."""
    step_ms_measured: float = -1.0
    """A step, of those read last; -1: none."""
    step_ms_predicted: float = -1.0
    """The same, as its profile predicts it."""
    lacks: tuple[str, ...] = ()
    """Metrics that its page, as last read, should have and has not."""


class TierView(msgspec.Struct, frozen=True):
    """A tier of the queue now, and how its last calls fared. -1: nothing to tell it by."""

    tier: str
    queued: int
    in_flight: int
    calls: int
    """Of the last calls, those of this tier with a first token."""
    ttft_ms_p50: float
    ttft_ms_p95: float
    promise_ms: int
    """p95 of queue wait and prefill that is promised; -1: none."""


class HopView(msgspec.Struct, frozen=True):
    """Where the time of the last calls went."""

    hop: str
    calls: int
    """Of the last calls, those of which it is known."""
    ms_p50: float
    ms_p95: float


class BreakerView(msgspec.Struct, frozen=True):
    """A breaker's last move."""

    key: str
    state: str
    why: str
    bad: int
    total: int
    for_ms: int
    """As long as it will be open, or as its probes are waited for, from its move."""
    moved_ms_ago: int


class OutcomeView(msgspec.Struct, frozen=True):
    """How many requests ended so, since the start."""

    outcome: str
    why: str
    requests: int


class AlertView(msgspec.Struct, frozen=True):
    """Something that someone should know."""

    at_s: float
    """Since 1970."""
    key: str
    cause: str
    action: str
    figures: dict[str, int]


class ConfidenceView(msgspec.Struct, frozen=True):
    """How far answers could be trusted, since the start."""

    scored: int
    """Answers that had a score."""
    mean_permille: int | None
    """Null: none had one."""
    below_verify: int
    """Those below the threshold of a second run."""


class BudgetView(msgspec.Struct, frozen=True):
    """What second runs are paid from, in tokens."""

    saved_tokens: int
    burst_tokens: int
    """As much as can be saved."""
    budget_permille: int
    """Of the tokens served, what is saved."""


class AnswersView(msgspec.Struct, frozen=True):
    """How far answers can be trusted, and what was done about it."""

    confidence: ConfidenceView
    verification: dict[str, int]
    """Answers by what became of their verification."""
    second_runs: int
    budget: BudgetView | None
    """Null: the policy in force makes no second runs."""


class Status(msgspec.Struct, frozen=True):
    """A controller, now."""

    state: str
    """serving, draining, or not ready and why."""
    observe: bool
    uptime_s: float
    policy: PolicyView
    """In force."""
    open_requests: int
    settled_requests: int
    lost_requests: int
    """Open when an earlier process died."""
    refused_events: int
    """Illegal ones: each is a fault of the controller."""
    replicas: tuple[ReplicaView, ...]
    tiers: tuple[TierView, ...]
    hops: tuple[HopView, ...]
    breakers: tuple[BreakerView, ...]
    outcomes: tuple[OutcomeView, ...]
    alerts: tuple[AlertView, ...]
    scaling: dict[str, int]
    """Replicas that each pool should have."""
    observed: dict[str, int] | None = None
    """With ``--observe``: what the policy would have done, by what and how often."""
    shadow: PolicyView | None = None
    """With ``--observe``: the policy that would have."""
    deployment: str = ""
    """What is being deployed, and how far it is; empty: nothing."""
    answers: AnswersView | None = None


def status_of(
    settings: Settings,
    driver: Driver,
    stats: Stats,
    state: str,
    waiting: Mapping[str, int],
    observed: Mapping[str, int] | None,
    shadow: Parameters | None = None,
    deployment: str = "",
) -> Status:
    """The present state. Costs about a millisecond for each 1000 open requests."""
    parameters = driver.parameters
    now_ns = driver.now_ns()
    past = tuple(stats.calls)
    return Status(
        state=state,
        observe=settings.observe,
        uptime_s=round(time.time() - stats.started_s, 3),
        policy=_policy(parameters),
        open_requests=len(driver.calls),
        settled_requests=sum(stats.outcomes.values()) - stats.lost_calls,
        lost_requests=stats.lost_calls,
        refused_events=stats.refused,
        replicas=tuple(
            _replica(replica, stats, now_ns) for _, replica in sorted(driver.replicas.items())
        ),
        tiers=_tiers(driver, waiting, past),
        hops=_hops(past),
        breakers=_breakers(stats, now_ns),
        outcomes=tuple(
            OutcomeView(outcome, why, count)
            for (outcome, why), count in sorted(stats.outcomes.items())
        ),
        alerts=alerts_of(stats.alerts),
        scaling={pool: scaled.replicas for pool, scaled in sorted(stats.scaled.items())},
        observed=None if observed is None else dict(observed),
        shadow=None if shadow is None else _policy(shadow),
        deployment=deployment,
        answers=_answers(driver, stats),
    )


def _answers(driver: Driver, stats: Stats) -> AnswersView:
    mean = None if not stats.scored else round(stats.score_permille / stats.scored)
    return AnswersView(
        ConfidenceView(stats.scored, mean, stats.below_verify),
        dict(sorted(stats.verifications.items())),
        stats.second_runs,
        _budget(driver),
    )


def _budget(driver: Driver) -> BudgetView | None:
    budget = driver.policy.verification() if isinstance(driver.policy, Service) else None
    return None if budget is None else BudgetView(*budget)


def _policy(parameters: Parameters) -> PolicyView:
    return PolicyView(parameters.name, parameters.discipline, policy_hash(parameters))


def alerts_of(heard: Sequence[Heard]) -> tuple[AlertView, ...]:
    """The youngest first."""
    return tuple(
        AlertView(round(at_s, 3), alert.key, alert.cause, alert.action, dict(alert.figures))
        for at_s, alert in reversed(heard)
    )


def _replica(replica: Replica, stats: Stats, now_ns: int) -> ReplicaView:
    rotated = stats.rotation.get(replica.id)
    scraped = stats.scraped.get(replica.id)
    spec = replica.spec
    steps = stats.drifts.last(replica.id)
    rotation, why = ("in", "") if rotated is None else (rotated[0].state, rotated[0].why)
    if not replica.up:
        rotation, why = "out", "never seen" if spec is None else "down"
    return ReplicaView(
        id=replica.id,
        name=replica.name,
        url=replica.url,
        up=replica.up,
        rotation=rotation,
        rotation_why=why,
        in_flight=len(replica.attempts),
        running=-1 if scraped is None else scraped[0].running,
        waiting=-1 if scraped is None else scraped[0].waiting,
        kv_used_permille=-1 if scraped is None else scraped[0].kv_used_permille,
        scraped_ms_ago=(
            -1 if scraped is None else (now_ns - scraped[1] + scraped[0].age_ns) // NS_PER_MS
        ),
        output_tokens=replica.tokens,
        network_ms=-1.0 if replica.network_ns < 0 else _ms(replica.network_ns),
        models=() if spec is None else spec.models,
        version="" if spec is None else spec.version,
        domain="" if spec is None else spec.domain,
        drift_permille=stats.drifts.permille(replica.id),
        steps_read=0 if steps is None else steps.read,
        step_ms_measured=-1.0 if steps is None else steps.measured_ms,
        step_ms_predicted=-1.0 if steps is None else steps.predicted_ms,
        lacks=replica.lacks,
    )


def _tiers(
    driver: Driver, waiting: Mapping[str, int], past: Sequence[Past]
) -> tuple[TierView, ...]:
    in_flight = Counter(
        call.tier
        for call in driver.calls.values()
        if call.attempt is not None and not call.attempt.done()
    )
    ttft: dict[str, list[int]] = {}
    for call in past:
        if call.ttft_ns >= 0:
            ttft.setdefault(call.tier, []).append(call.ttft_ns)
    tiers = driver.parameters.tiers
    promises = {
        "turbo": tiers.turbo_promise_ms,
        "lent": tiers.stable_promise_ms,
        "stable": tiers.stable_promise_ms,
        "fallback": tiers.fallback_promise_ms,
    }
    seen = {*in_flight, *waiting, *ttft} - set(TIERS)  # other disciplines have tiers of their own
    names = [*TIERS[:-1], *sorted(seen)]
    if waiting.get(HELD):
        names.append(HELD)
    return tuple(
        TierView(
            tier=name,
            queued=waiting.get(name, 0),
            in_flight=in_flight[name],
            calls=len(ttft.get(name, ())),
            ttft_ms_p50=_percentile_ms(ttft.get(name, ()), 50),
            ttft_ms_p95=_percentile_ms(ttft.get(name, ()), 95),
            promise_ms=promises.get(name, -1),
        )
        for name in names
    )


def _hops(past: Sequence[Past]) -> tuple[HopView, ...]:
    """Of calls that were answered: what was shed has no time at a server."""
    answered = [call.hops for call in past if call.outcome == "answered"]
    rows: list[HopView] = []
    for index, hop in enumerate(HOPS):
        if hop == "rest":
            known = [hops.rest_ns for hops in answered if min(hops) >= 0]
        else:
            position = index if index < HOPS.index("rest") else index - 1
            known = [hops[position] for hops in answered if hops[position] >= 0]
        rows.append(HopView(hop, len(known), _percentile_ms(known, 50), _percentile_ms(known, 95)))
    return tuple(rows)


def _breakers(stats: Stats, now_ns: int) -> tuple[BreakerView, ...]:
    """Those that are not closed first."""
    views = [
        BreakerView(
            key, moved.state, moved.why, moved.bad, moved.total, moved.for_ns // NS_PER_MS,
            (now_ns - at_ns) // NS_PER_MS,
        )
        for key, (moved, at_ns) in stats.breakers.items()
    ]  # fmt: skip
    return tuple(sorted(views, key=lambda view: (view.state == "closed", view.moved_ms_ago)))


def _percentile_ms(values_ns: Sequence[int], percent: int) -> float:
    """By nearest rank; -1 without values."""
    if not values_ns:
        return -1.0
    ordered = sorted(values_ns)
    return _ms(ordered[max(0, -(-len(ordered) * percent // 100) - 1)])


def _ms(ns: int) -> float:
    return round(ns / NS_PER_MS, 3)
