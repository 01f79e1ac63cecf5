"""The plan of a deployment: the usual one, a short one for demonstrations, or one's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from controller.deployment.papers import Refusal
from controller.deployment.plans import plan_of
from dashboards.parts.live.html import Html, html_of, joined, muted, strong
from dashboards.parts.live.tables import span
from dashboards.parts.plain import complain
from dashboards.state import colours, said, t

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.deployment import DeploymentPlan, Stage
    from policy.evidence import Evidence

DEMO: dict[str, Any] = {
    "look_s": 1, "window_s": 10, "warmup_least_s": 0, "warmup_most_s": 1,
    "miss_share_most_permille": 200, "incident_gap_s": 1, "incident_most_s": 2,
    "stages": [
        {"kind": "shadow", "share_permille": 0, "least_s": 10, "least_requests": 10},
        {"kind": "canary", "share_permille": 300, "least_s": 20, "least_requests": 20},
        {"kind": "full", "share_permille": 1000, "least_s": 10, "least_requests": 10},
    ],
}  # fmt: skip
"""Under steady traffic it is through in a minute. It is no proof: that takes the usual one."""
KINDS = ("shadow", "canary", "full")
NUMBERS: dict[str, tuple[int, int]] = {
    "look_s": (1, 3600), "window_s": (1, 86_400), "hurt_budget": (1, 100_000),
    "hurt_most": (1, 100_000), "alpha_permille": (1, 200), "warmup_least_s": (0, 86_400),
    "warmup_most_s": (0, 86_400), "miss_share_most_permille": (1, 1000),
    "stage_most_s": (1, 10_000_000),
}  # fmt: skip
"""Fields of one's own plan, with their bounds."""
STAGE_COLOURS = {"shadow": "--p5", "canary": "--p0", "full": "--p2"}


def choose(evidence: Evidence | None) -> dict[str, Any] | None:
    """Widgets; what differs from the usual plan. None: it is no plan, which is said."""
    names = {name: t(f"deploy.plan_{name}") for name in ("usual", "demo", "own")}
    kind = st.segmented_control(
        t("deploy.plan"), list(names), default="usual", key="deploy_plan",
        format_func=names.__getitem__, help=t("deploy.plan_help"),
    )  # fmt: skip
    given: dict[str, Any] = {}
    if kind == "demo":
        given = DEMO
        st.caption(t("deploy.demo_help"))
    elif kind == "own":
        given = _own(plan_of({}, evidence))
    try:
        plan = plan_of(given, evidence)
    except Refusal as refusal:
        for reason in refusal.reasons:
            complain(reason)
        return None
    st.html(timeline(plan.stages))
    return given


def _own(usual: DeploymentPlan) -> dict[str, Any]:
    """Typed widgets, filled with the usual plan."""
    rows = [
        {"kind": stage.kind, "share": stage.share_permille / 10, "least_s": stage.least_s,
         "least_requests": stage.least_requests}
        for stage in usual.stages
    ]  # fmt: skip
    columns = st.column_config
    edited = st.data_editor(
        rows, key="deploy_stages", num_rows="dynamic", width="stretch",
        column_config={
            "kind": columns.SelectboxColumn(t("deploy.stage"), options=list(KINDS), required=True),
            "share": columns.NumberColumn(
                t("deploy.share_percent"), min_value=0.0, max_value=100.0, required=True
            ),
            "least_s": columns.NumberColumn(
                t("deploy.least_s"), min_value=0, step=1, required=True
            ),
            "least_requests": columns.NumberColumn(
                t("deploy.least_requests"), min_value=0, step=1, required=True
            ),
        },
    )  # fmt: skip
    given: dict[str, Any] = {"stages": [_stage(row) for row in edited if row.get("kind")]}
    plain = msgspec.to_builtins(usual)
    places = st.columns(3)
    for place, (name, (low, high)) in enumerate(NUMBERS.items()):
        value = places[place % len(places)].number_input(
            t(f"deploy.fields.{name}"), low, high, int(plain[name]), key=f"deploy_{name}"
        )
        if value != plain[name]:
            given[name] = int(value)
    return given


def _stage(row: dict[str, Any]) -> dict[str, Any]:
    share = {"shadow": 0.0, "full": 100.0}.get(row["kind"], row.get("share") or 0.0)
    return {
        "kind": row["kind"], "share_permille": round(10 * share),
        "least_s": int(row.get("least_s") or 0),
        "least_requests": int(row.get("least_requests") or 0),
    }  # fmt: skip


def timeline(stages: Sequence[Stage], now: int = -1, done: bool = False) -> Html:
    """The stages side by side; those before ``now`` are past, those after it are to come."""
    palette = colours()
    parts = []
    for number, stage in enumerate(stages):
        past, current = done or number < now, number == now and not done
        shade = palette[STAGE_COLOURS[stage.kind]]
        share = f" {stage.share_permille / 10:g} %" if stage.kind == "canary" else ""
        mark = "✓ " if past else "▶ " if current else ""
        name = f"{mark}{said(stage.kind)}{share}"
        least = t("deploy.at_least", time=span(stage.least_s), requests=stage.least_requests)
        back = palette["--card"] if current else "transparent"
        opacity = 1 if current or past or now < 0 else 0.55
        parts.append(Html(
            f'<div style="flex:1;min-width:130px;border-top:5px solid {shade};background:{back};'
            f'border-radius:4px;padding:4px 8px;font-size:.82rem;opacity:{opacity}">'
            f"{strong(name) if current or now < 0 else html_of(name)}<br>{muted(least)}</div>"
        ))  # fmt: skip
    return Html(f'<div style="display:flex;gap:6px;flex-wrap:wrap">{joined(parts)}</div>')
