"""What is in the trace, at once: its rate, its lengths, what its prompts share."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards import state
from dashboards.parts.charts import show_chart
from dashboards.parts.job_panel import job_panel
from dashboards.parts.plain import complain
from dashboards.state import t
from policy.files import FileError
from traces import Trace, TraceError, open_trace
from traces.describe import describe_trace
from twin.report.figures import count, duration, rate, share
from twin.report.traffic import length_chart, prefix_chart, rate_chart

if TYPE_CHECKING:
    from dashboards.scenario import Scenario

DIRECT_ROWS = 20_000
"""Requests that are read while the page waits; the traces that come with the project have fewer."""
CLASSES_SHOWN = 4


def opened(scenario: Scenario) -> Trace | None:
    """The trace; None: it cannot be read, and the page says why."""
    try:
        return open_trace(state.shelf().path_of(scenario.trace))
    except (TraceError, FileError) as error:
        complain(error)
        return None


def trace_section(scenario: Scenario, trace: Trace) -> None:
    """Draw it."""
    try:
        description = _described(scenario.trace, trace)
    except TraceError as error:
        complain(error)
        return
    if description is not None:
        with st.container(key="replay_trace"):
            _draw(description)


def _described(name: str, trace: Trace) -> dict[str, Any] | None:
    """None: it is being read."""
    if trace.rows <= DIRECT_ROWS:
        return _direct(str(trace.path), trace.path.stat().st_mtime_ns)
    jobs = state.jobs()
    request: dict[str, object] = {"trace": name}
    if jobs.find("describe", request) is None:
        jobs.start("describe", request)
    job = job_panel("describe", request, label=t("replay.read"))
    if job is None:
        return None
    found: dict[str, Any] = load_json(str(job.folder / "description.json"), job.id)
    return found


@st.cache_data(show_spinner=False, max_entries=32)
def _direct(path: str, changed_ns: int) -> dict[str, Any]:
    return describe_trace(open_trace(path))


@st.cache_data(show_spinner=False, max_entries=128)
def load_json(path: str, version: str) -> Any:
    """A result, read once for each version of it."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _draw(description: dict[str, Any]) -> None:
    st.caption(" · ".join(_facts(description)))
    left, middle, right = st.columns(3)
    with left:
        st.markdown(f"**{t('replay.rate')}**")
        chart = rate_chart(description)
        if chart is None:
            st.info(t("replay.no_arrivals"))
        else:
            show_chart(chart, "trace_rate")
    with middle:
        st.markdown(f"**{t('replay.lengths')}**")
        show_chart(length_chart(description), "trace_lengths")
    with right:
        st.markdown(f"**{t('replay.prefixes')}**")
        chart = prefix_chart(description)
        if chart is None:
            st.info(t("replay.no_prefixes"))
        else:
            known = description["prefix"]
            show_chart(chart, "trace_prefixes")
            st.caption(t(
                "replay.prefix_share", tokens=share(known["hit_share_tokens"]),
                blocks=share(known["hit_share_blocks"]),
            ))  # fmt: skip


def _facts(description: dict[str, Any]) -> list[str]:
    facts = [t("replay.requests", number=count(description["rows"]))]
    if description["duration_s"]:
        facts.append(t("replay.span", span=duration(description["duration_s"])))
    if description["rate_rps"] is not None:
        facts.append(t("replay.mean_rate", rate=rate(description["rate_rps"])))
    if description["rate_rps_busiest_minute"] is not None:
        facts.append(t("replay.busiest", rate=rate(description["rate_rps_busiest_minute"])))
    if description["interarrival_cv"] is not None:
        facts.append(t("replay.burstiness", cv=f"{description['interarrival_cv']:.2f}"))
    classes = description["shares"].get("sla_class", {})
    facts += [f"{name} {share(part)}" for name, part in [*classes.items()][:CLASSES_SHOWN]]
    for name in ("user_id", "session_id", "chain_id"):
        if name in description["distinct"]:
            facts.append(t(f"replay.{name}", number=count(description["distinct"][name])))
    return facts
