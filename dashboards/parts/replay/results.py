"""What came of a replay: figures, latencies, where the time went, what happened over time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards.parts.charts import show_chart, tail
from dashboards.parts.replay.downloads import downloads
from dashboards.parts.replay.requests import requests_view
from dashboards.parts.replay.tables import figure_table, policy_keys
from dashboards.parts.replay.trace import load_json
from dashboards.state import t
from twin.report.charts import CDF_METRICS

if TYPE_CHECKING:
    from dashboards.jobs import Job
    from dashboards.scenario import Scenario

VIEWS = ("figures", "latency", "hops", "time", "requests")
OVER_TIME = ("arrivals", "queued", "waiting", "running", "kv")
_KEPT = "replay_view_kept"
"""Of the page, when its widgets are forgotten because another page was looked at."""


def results(job: Job, scenario: Scenario) -> None:
    """Draw what the job wrote."""
    about = _result(job, "run")
    st.caption(t(
        "replay.of", trace=about["trace"], fleet=about["fleet"], slo=about["slo"],
        seed=scenario.seed,
    ))  # fmt: skip
    downloads(job, about["labels"], scenario)
    _views(job)


@st.fragment
def _views(job: Job) -> None:
    session = st.session_state
    if "replay_view" not in session:
        session.replay_view = session.get(_KEPT, VIEWS[0])
    view = st.segmented_control(
        t("replay.view"), VIEWS, key="replay_view", label_visibility="collapsed",
        format_func=lambda name: t(f"replay.views.{name}"), required=True,
    )  # fmt: skip
    session[_KEPT] = view
    charts = _result(job, "charts")
    about = _result(job, "run")
    places = {label: place for place, label in enumerate(about["labels"])}
    with st.container(key=f"replay_{view}_view"):
        if view == "figures":
            _figures(job, charts, places)
        elif view == "latency":
            _latency(charts, places)
        elif view == "hops":
            _hops(charts, places)
        elif view == "time":
            _time(charts, places)
        else:
            requests_view(job, about)


def _result(job: Job, name: str) -> Any:
    return load_json(str(job.folder / f"{name}.json"), f"{job.id} {job.ended_s}")


def _figures(job: Job, charts: dict[str, Any], places: dict[str, int]) -> None:
    left, right = st.columns(2)
    with left:
        _titled("attainment", charts["attainment"], places)
    with right:
        _titled("outcomes", charts["outcomes"], places)
    if charts["reasons"] is not None:
        _titled("reasons", charts["reasons"], places, legend=True)
    with st.container(key="replay_figures"):
        for table in _result(job, "rows"):
            st.markdown(f"**{t('replay.tables.' + _key(table['title']))}**")
            figure_table(table, places)
    st.caption(t("replay.figures_note"))


def _key(title: str) -> str:
    return {"overall": "overall", "by SLA class": "sla", "by tier": "tier"}[title]


def _latency(charts: dict[str, Any], places: dict[str, int]) -> None:
    st.caption(t("replay.latency_what"))
    switch, names = st.columns([1, 3], vertical_alignment="center")
    slow = switch.toggle(t("replay.tail"), key="replay_tail", help=t("replay.tail_help"))
    with names:
        policy_keys(places)
    for name, by_metric in charts["distributions"].items():
        st.markdown(f"**{name or t('replay.no_class')}**")
        for column, metric in zip(st.columns(len(CDF_METRICS)), CDF_METRICS, strict=True):
            with column:
                chart = by_metric.get(metric)
                if chart is None:
                    st.caption(t("replay.no_such"))
                else:
                    shown = tail(chart) if slow else chart
                    show_chart(shown, f"cdf_{name}_{metric}", legend=False)
    st.markdown(f"**{t('replay.by_tier')}**")
    if charts["tier_ttft"] is None:
        st.caption(t("replay.no_tiers"))
        return
    st.caption(t("replay.by_tier_what"))
    left, right = st.columns(2)
    with left:
        show_chart(charts["tier_queue"], "tier_queue", legend=False)
    with right:
        show_chart(charts["tier_ttft"], "tier_ttft", legend=False)


def _hops(charts: dict[str, Any], places: dict[str, int]) -> None:
    st.caption(t("replay.hops_what"))
    _titled("hop_bars", charts["hop_bars"], places, legend=True)
    _titled("hop_shares", charts["hop_shares"], places, legend=True)


def _time(charts: dict[str, Any], places: dict[str, int]) -> None:
    st.caption(t("replay.time_what"))
    known = [name for name in OVER_TIME if name in charts["over_time"]]
    columns = st.columns(2)
    for place, name in enumerate(known):
        with columns[place % 2]:
            _titled(name, charts["over_time"][name], places, legend=True)


def _titled(
    name: str, chart: dict[str, Any], places: dict[str, int], *, legend: bool | None = None
) -> None:
    st.markdown(f"**{t('replay.charts.' + name)}**")
    shown = chart["layout"].get("showlegend", False) if legend is None else legend
    layout = {key: value for key, value in chart["layout"].items() if key != "showlegend"}
    show_chart({**chart, "layout": layout}, f"chart_{name}", legend=shown, keep=places)
