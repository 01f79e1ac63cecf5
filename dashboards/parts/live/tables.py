"""Tiers, hops, breakers, outcomes and alerts of a controller, as tables and a chart."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from dashboards.parts.live.html import (
    Html,
    badge,
    bar,
    dot,
    joined,
    muted,
    strip,
    strong,
    table,
    whole,
)
from dashboards.state import said, t
from twin.report.colours import LIGHT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.admin.status import (
        AlertView,
        BreakerView,
        HopView,
        OutcomeView,
        Status,
        TierView,
    )
    from dashboards.parts.charts import Chart

BREAKERS = {"closed": "--good", "half_open": "--late", "open": "--failed"}
OUTCOMES = {
    "answered": "--good", "degraded": "--late", "shed": "--shed", "failed": "--failed",
    "cancelled": "--p5",
}  # fmt: skip
ROWS_MOST = 30
HASH_SHOWN = 12
MS_LEAST = 0.01
"""On a log axis nothing is 0."""


def summary(status: Status) -> Html:
    """A controller in one line."""
    state = status.state.partition(":")[0]
    colour = {"serving": "--good", "draining": "--late"}.get(state, "--failed")
    parts: list[object] = [
        badge(said(status.state), colour),
        t("live.policy_is", name=status.policy.name, hash=status.policy.hash[:HASH_SHOWN]),
        t("live.up_for", time=span(status.uptime_s)),
        t("live.open", count=status.open_requests),
        t("live.settled", count=status.settled_requests),
    ]
    if status.observe:
        parts.insert(1, badge(t("live.observing"), "--late"))
    if status.deployment:
        parts.append(badge(t("live.deploying", what=status.deployment), "--p1"))
    if status.lost_requests:
        parts.append(t("live.lost", count=status.lost_requests))
    if status.refused_events:
        parts.append(badge(t("live.refused", count=status.refused_events), "--failed"))
    parts += [t("live.scaling", pool=pool, count=count) for pool, count in status.scaling.items()]
    return strip(parts)


def tier_table(tiers: Sequence[TierView]) -> Html:
    """What waits and what runs in each, and how its last calls fared against its promise."""
    head = [
        t("live.tier"), t("live.queued"), t("live.flying"), t("live.calls"), "TTFT p50",
        "TTFT p95", t("live.promise"), t("live.of_promise"),
    ]  # fmt: skip
    rows = []
    for tier in tiers:
        share: object = ""
        if tier.promise_ms > 0 and tier.ttft_ms_p95 >= 0:
            of = tier.ttft_ms_p95 / tier.promise_ms
            share = bar(of / 2, "--good" if of <= 1 else "--failed", 0.5)
        name = whole(joined([dot(tier_colour(tier.tier)), said(tier.tier)]))
        rows.append([
            name, tier.queued, tier.in_flight, tier.calls, ms(tier.ttft_ms_p50),
            ms(tier.ttft_ms_p95), ms(tier.promise_ms), share,
        ])  # fmt: skip
    return table(head, rows, range(1, 7))


def tier_colour(tier: str) -> str:
    colour = f"--tier-{tier}"
    return colour if colour in LIGHT else "--p5"


def hop_chart(hops: Sequence[HopView]) -> Chart:
    """Where the time of the last answers went, hop by hop."""
    known = [hop for hop in hops if hop.calls and hop.ms_p95 >= 0][::-1]
    names = [said(hop.hop) for hop in known]
    shades = [
        f"--hop-{hop.hop}" if f"--hop-{hop.hop}" in LIGHT else "--p5" for hop in known
    ]  # fmt: skip
    traces = [
        {
            "type": "bar", "orientation": "h", "name": label, "y": names,
            "x": [max(value, MS_LEAST) for value in values],
            "marker": {"color": shades, "opacity": opacity}, "showlegend": False,
            "hovertemplate": f"%{{y}}: %{{x:.1f}} ms ({label})<extra></extra>",
        }
        for label, values, opacity in (
            ("p95", [hop.ms_p95 for hop in known], 0.45),
            ("p50", [hop.ms_p50 for hop in known], 1.0),
        )
    ]  # fmt: skip
    layout = {
        "barmode": "overlay",
        "uirevision": "hops",
        "bargap": 0.3,
        "xaxis": {"type": "log", "title": {"text": "ms, log: p50 dark, p95 light"}},
        "yaxis": {"type": "category"},
    }
    return {"traces": traces, "layout": layout, "height": 230}


def breaker_table(breakers: Sequence[BreakerView]) -> Html:
    """Each breaker's last move, with the figures that caused it."""
    head = [
        t("live.breaker"), t("live.state"), t("live.bad_of"), t("live.share"), t("live.why"),
        t("live.moved"), t("live.lasts"),
    ]  # fmt: skip
    rows = [
        [
            each.key, badge(said(each.state), BREAKERS.get(each.state, "--p5")),
            f"{each.bad} / {each.total}",
            f"{100 * each.bad / each.total:.1f} %" if each.total else "-",
            said(each.why.replace("_", " ")), t("live.ago", time=span(each.moved_ms_ago / 1000)),
            span(each.for_ms / 1000) if each.for_ms else "-",
        ]
        for each in breakers[:ROWS_MOST]
    ]  # fmt: skip
    return table(head, rows, (2, 3, 5, 6))


def outcome_table(outcomes: Sequence[OutcomeView]) -> Html:
    total = sum(each.requests for each in outcomes) or 1
    rows = [
        [
            badge(said(each.outcome), OUTCOMES.get(each.outcome, "--p5")),
            said(each.why.replace("_", " ")) or "-",
            each.requests, f"{100 * each.requests / total:.1f} %",
            bar(each.requests / total, OUTCOMES.get(each.outcome, "--p5")),
        ]
        for each in sorted(outcomes, key=lambda each: -each.requests)[:ROWS_MOST]
    ]  # fmt: skip
    head = [t("live.outcome"), t("live.why"), t("live.requests"), t("live.share"), ""]
    return table(head, rows, (2, 3))


def alert_table(alerts: Sequence[AlertView]) -> Html:
    rows = [
        [
            clock(each.at_s),
            strong(each.key),
            said(each.cause),
            said(each.action),
            muted(", ".join(f"{name} {value}" for name, value in each.figures.items())),
        ]
        for each in alerts[:ROWS_MOST]
    ]
    head = [t("live.when"), t("live.key"), t("live.cause"), t("live.action"), t("live.figures")]
    return table(head, rows)


def observed_table(observed: dict[str, int]) -> Html:
    rows = [[said(name.replace("_", " ")), count] for name, count in observed.items()]
    return table([t("live.what"), t("live.count")], rows, (1,))


def ms(value: float) -> str:
    return "-" if value < 0 else f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def span(seconds: float) -> str:
    """A duration for people."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%m-%d %H:%M:%S")
