"""The panels that show what ``GET /status`` says, again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import streamlit as st

from dashboards.admin import AdminError
from dashboards.parts.charts import show_chart
from dashboards.parts.live import answers, tables
from dashboards.parts.live.door import complain
from dashboards.parts.live.fleet import fleet_map
from dashboards.parts.live.html import title
from dashboards.parts.live.needs import need_table, why_empty
from dashboards.parts.live.predicted import (
    chosen,
    error_text,
    history_of,
    predicted_chart,
    remember,
)
from dashboards.parts.plain import plain_text
from dashboards.state import said, t

if TYPE_CHECKING:
    from controller.admin.status import Status
    from dashboards.parts.live.door import Door

POLL_S = 1.5
STALE_S = 4.0
"""Older answers are greyed."""
DRIFT = "drift "
"""How the keys of drift alarms begin."""
DRIFTS_MOST = 3


class _Seen(NamedTuple):
    """The last answer, and when it came."""

    status: Status
    at_s: float


def panels(door: Door) -> None:
    """One round: ask, remember, draw. While nobody answers, the last answer stays, greyed."""
    known: dict[str, _Seen] = st.session_state.setdefault("live_seen", {})
    now_s = time.time()
    try:
        status = door.admin.status()
    except AdminError as error:
        complain(door, error)
    else:
        known[door.name] = _Seen(status, now_s)
        remember(history_of(door.name), status, now_s)
        answers.remember(answers.history_of(door.name), status, now_s)
    seen = known.get(door.name)
    if seen is None:
        return
    age_s = now_s - seen.at_s
    key = "live_stale" if age_s > STALE_S else "live_fresh"
    with st.container(key=key):
        st.html(tables.summary(seen.status))
        _draw(door.name, seen.status, age_s, now_s)
    if age_s > STALE_S:
        st.html("<style>.st-key-live_stale{opacity:.45}</style>")


def _draw(name: str, status: Status, age_s: float, now_s: float) -> None:
    left, right = st.columns([1, 1])
    with left, st.container(key="fleet_map"):
        title(t("live.panels.fleet"))
        st.html(fleet_map(status.replicas))
        _under("fleet", status, age_s, _scraped(status))
    with right, st.container(key="predicted"):
        title(t("live.panels.predicted"))
        _predicted(name, status, age_s, now_s)
    left, right = st.columns([3, 2])
    with left, st.container(key="tiers"):
        title(t("live.panels.tiers"))
        st.html(tables.tier_table(status.tiers))
        _under("tiers", status, age_s, t("live.last_calls"))
    with right, st.container(key="hops"):
        title(t("live.panels.hops"))
        if any(hop.calls for hop in status.hops):
            show_chart(tables.hop_chart(status.hops), "hop_chart", legend=False)
        _under("hops", status, age_s, t("live.medians"))
    left, right = st.columns([3, 2])
    with left, st.container(key="breakers"):
        title(t("live.panels.breakers"))
        if status.breakers:
            st.html(tables.breaker_table(status.breakers))
        _under("breakers", status, age_s)
    with right, st.container(key="outcomes"):
        title(t("live.panels.outcomes"))
        if status.outcomes:
            st.html(tables.outcome_table(status.outcomes))
        _under("outcomes", status, age_s, t("live.since_start"))
    _answers(name, status, age_s)
    with st.container(key="alerts"):
        title(t("live.panels.alerts"))
        if status.alerts:
            st.html(tables.alert_table(status.alerts))
        _under("alerts", status, age_s)
    if status.observed is not None:
        with st.container(key="observed"):
            title(t("live.panels.observed"))
            if status.shadow is not None:
                st.caption(t("live.shadow_is", name=status.shadow.name))
            st.html(tables.observed_table(status.observed))
    with st.expander(t("live.needs_title")):
        st.html(need_table())
        st.caption(t("live.needs_tried"))


def _predicted(name: str, status: Status, age_s: float, now_s: float) -> None:
    history = history_of(name)
    options = ["", *sorted(history)]
    replica = ""
    if len(options) > 2:
        replica = st.selectbox(
            t("live.replica"), options, key="predicted_replica", label_visibility="collapsed",
            format_func=lambda each: each or t("live.all_replicas"),
        )  # fmt: skip
    points = chosen(history, replica)
    if points:
        st.markdown(f"**{error_text(points, now_s)}**")
        show_chart(predicted_chart(points), "predicted_chart")
    drifts = [alert for alert in status.alerts if alert.key.startswith(DRIFT)]
    for alert in drifts[:DRIFTS_MOST]:
        st.error(
            t("live.drift_alarm", when=tables.clock(alert.at_s), alert=alert.key,
              cause=said(alert.cause), action=said(alert.action)),
            icon=":material/warning:",
        )  # fmt: skip
    if points and not drifts:
        st.caption(t("live.no_drift_alarm"))
    _under("predicted", status, age_s, t("live.predicted_from"))


def _answers(name: str, status: Status, age_s: float) -> None:
    """Confidence and verification; controllers of earlier versions tell nothing of them."""
    told = status.answers
    left, right = st.columns([2, 3])
    with left, st.container(key="confidence"):
        title(t("live.panels.confidence"))
        if told is not None:
            st.html(answers.confidence_strip(told))
            history = answers.history_of(name)
            if len(history) > 1:
                show_chart(answers.score_chart(history), "score_chart")
        _under("confidence", status, age_s, t("live.score.what"))
    with right, st.container(key="verification"):
        title(t("live.panels.verification"))
        if told is not None:
            st.html(answers.budget_strip(told))
            st.html(answers.verification_table(told))
        _under("verification", status, age_s, t("live.since_start"))


def _under(panel: str, status: Status, age_s: float, more: str = "") -> None:
    """How old a panel is, and why it, or a part of it, is empty."""
    reasons = why_empty(panel, status)
    if reasons:
        with st.container(key=f"why_empty_{panel}"):
            for reason in reasons:
                st.info(plain_text(reason), icon=":material/help:")
    age = t("live.age", s=f"{age_s:.1f}")
    st.caption(f"{age} · {more}" if more else age)


def _scraped(status: Status) -> str:
    """How old the engines' own figures are."""
    ages = [each.scraped_ms_ago for each in status.replicas if each.scraped_ms_ago >= 0]
    if not ages:
        return ""
    return t("live.engines_age", s=f"{max(ages) / 1000:.1f}")
