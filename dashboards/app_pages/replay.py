"""The page ``replay``: a trace through a fleet under policies, and what came of it."""

from __future__ import annotations

import msgspec
import streamlit as st

from dashboards import state
from dashboards.parts.job_panel import job_panel
from dashboards.parts.plain import complain
from dashboards.parts.replay.results import results
from dashboards.parts.replay.trace import opened, trace_section
from dashboards.scenario import ScenarioError, check
from dashboards.state import t

scenario = state.scenario()
st.header(t("replay.title"))
trace = opened(scenario)
if trace is not None:
    try:
        check(scenario, state.shelf().path_of)
        wrong = ""
    except ScenarioError as error:
        wrong = str(error)
        complain(wrong)
    # Above the trace: while that is read, what stands below it moves under the pointer.
    job = job_panel(
        "replay", msgspec.to_builtins(scenario), label=t("replay.run"), disabled=bool(wrong)
    )
    trace_section(scenario, trace)
    if job is not None:
        st.divider()
        with st.container(key="replay_results"):
            results(job, scenario)
