"""Single requests: all of them over time, the slowest, and the story of the one that is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards import state
from dashboards.parts.charts import show_chart
from dashboards.parts.job_panel import job_panel
from dashboards.parts.replay.story import show_story
from dashboards.parts.replay.trace import load_json
from dashboards.state import said, t
from twin.report.figures import count, duration
from twin.report.requests import METRICS, POINTS_MOST, SLOW_POINTS

if TYPE_CHECKING:
    from dashboards.jobs import Job

_CLICKED = "replay_clicked"
"""The click that was seen last, so that it does not win over what is chosen after it."""
_KEPT = "replay_row_kept"


def requests_view(job: Job, about: dict[str, Any]) -> None:
    """Draw it; a click on a point, or a choice from the list, tells that request's story."""
    labels: list[str] = about["labels"]
    left, right = st.columns([1, 1])
    label = left.segmented_control(
        t("replay.policy"), labels, default=labels[0], key="requests_policy",
        label_visibility="collapsed", required=True,
    )  # fmt: skip
    metric = right.segmented_control(
        t("replay.metric"), [*METRICS], default="ttft_s", key="requests_metric",
        format_func=lambda name: said(METRICS[name]), label_visibility="collapsed", required=True,
    )  # fmt: skip
    version = f"{job.id} {job.ended_s}"
    place = labels.index(label)
    chart = load_json(str(job.folder / f"requests-{place}-{metric}.json"), version)
    many = about["offered"] > POINTS_MOST
    st.caption(
        t("replay.many", number=count(about["offered"]), most=count(SLOW_POINTS))
        if many
        else t("replay.each_point")
    )
    with st.container(key="replay_scatter"):
        clicked = show_chart(chart, f"scatter_{place}_{metric}", select=True)
    _adopt_click(clicked, f"{version} {place} {metric}")
    slow = load_json(str(job.folder / "slowest.json"), version)[label][metric]
    _choose(slow, metric, about["offered"])
    row = st.session_state.replay_row
    st.session_state[_KEPT] = row
    if row is None:
        st.info(t("replay.choose"))
        return
    _story(job, int(row), about)


def _adopt_click(clicked: Any, chart: str) -> None:
    points = clicked["selection"]["points"] if clicked else []
    row = next((_row(point) for point in points if _row(point) is not None), None)
    if row is None or st.session_state.get(_CLICKED) == (chart, row):
        return
    st.session_state[_CLICKED] = (chart, row)
    st.session_state.replay_row = row


def _row(point: dict[str, Any]) -> int | None:
    found = point.get("customdata")
    if isinstance(found, list):
        found = found[0] if found else None
    return int(found) if isinstance(found, int | float) else None


def _choose(slow: list[dict[str, Any]], metric: str, offered: int) -> None:
    """From the slowest, or by number."""
    session = st.session_state
    if "replay_row" not in session:
        session.replay_row = session.get(_KEPT)
    if session.replay_row is not None and session.replay_row >= offered:
        session.replay_row = None

    def chosen() -> None:
        if session.replay_slow is not None:
            session.replay_row = session.replay_slow

    texts = {one["row"]: _title(one, metric) for one in slow}
    known = session.replay_row if session.replay_row in texts else None
    if session.get("replay_slow") != known:
        session.replay_slow = known
    left, right = st.columns([3, 1])
    left.selectbox(
        t("replay.slow"), [*texts], key="replay_slow", format_func=lambda row: texts.get(row, ""),
        on_change=chosen, placeholder=t("replay.slow_which"), index=None,
    )  # fmt: skip
    right.number_input(t("replay.number"), 0, offered - 1, key="replay_row", value=None, step=1,
                       help=t("replay.number_help"))  # fmt: skip


def _title(one: dict[str, Any], metric: str) -> str:
    parts = [f"#{one['row']}", duration(one[metric]), one["sla_class"], one["endpoint"],
             one["tier"], one["replica"]]  # fmt: skip
    return " · ".join(part for part in parts if part)


def _story(played: Job, row: int, about: dict[str, Any]) -> None:
    request = {"replay": played.id, "row": row}
    jobs = state.jobs()
    if jobs.find("story", request) is None:
        jobs.start("story", request)
    job = job_panel("story", request, label=t("replay.tell"))
    if job is not None:
        with st.container(key="replay_story"):
            show_story(load_json(str(job.folder / "story.json"), f"{job.id} {job.ended_s}"), about)
