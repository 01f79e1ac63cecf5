"""The page ``tune``: better values for a policy's parameters, and evidence about a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st
import yaml

from dashboards import state
from dashboards.parts.job_panel import job_panel
from dashboards.parts.plain import complain
from dashboards.parts.tune import result as tune_result
from dashboards.parts.tune.form import open_job, tune_form
from dashboards.parts.tune.validate import validate_panel
from dashboards.shelf import label
from dashboards.state import t

if TYPE_CHECKING:
    from dashboards.jobs import Job

MODES = ("tune", "validate")
RECENT_MOST = 10
BEGUN = "tune_begun"


@st.fragment
def tuning() -> None:
    """The form, the run and what it found: widgets of these run nothing else again."""
    with st.expander(t("tune.form"), expanded=not st.session_state.get(BEGUN, False)):
        left, right = st.columns([3, 2], gap="medium")
    request, space, wrong = tune_form(left, right)
    with right:
        if wrong:
            complain(wrong)
        points = None if space is None else space.points()
        if points is not None and points <= request["trials"]:
            st.caption(t("tune.every_point", n=points))
        if state.scenario().faults:
            st.caption(t("tune.no_faults"))
    known = state.jobs().find("tune", request)
    begun = _begun(known)
    # The button stands beside the form; what it begins takes the whole width.
    with st.container() if begun else right:
        job = job_panel(
            "tune", request, label=t("tune.run"), key="tune", partial=tune_result.partial,
            disabled=bool(wrong) or space is None,
        )  # fmt: skip
    begun = _begun(state.jobs().find("tune", request))
    if begun != st.session_state.get(BEGUN, False):
        st.session_state[BEGUN] = begun  # the form gives way to what there is to see
        st.rerun(scope="app")
    with st.expander(t("tune.command")):
        st.code(tune_result.command(request), language="bash", wrap_lines=True)
        text = yaml.safe_dump(request["space"], sort_keys=False, allow_unicode=True)
        st.code(text, language="yaml")
        st.download_button(t("tune.download_space"), text, "space.yaml", key="tune_get_asked")
    _recent()
    if job is not None:
        chosen = tune_result.result(job)
        if chosen:
            st.subheader(t("tune.validate_title"), divider="gray")
            st.caption(t("tune.validate_about"))
            validate_panel(chosen, request["policy"])


@st.fragment
def validating() -> None:
    """Of any policy."""
    st.caption(t("tune.validate_about"))
    names = list(dict.fromkeys([*state.scenario().policies, *state.shelf().policies()]))
    kept = st.session_state.get("tune_candidate_kept")
    chosen = st.selectbox(
        t("tune.candidate"), names, index=names.index(kept) if kept in names else 0,
        key="tune_candidate", format_func=label, help=t("tune.candidate_help"),
    )  # fmt: skip
    st.session_state.tune_candidate_kept = chosen
    others = [name for name in state.scenario().policies if name != chosen]
    validate_panel(chosen, others[0] if others else chosen)


def _begun(job: Job | None) -> bool:
    return job is not None and (job.open or job.state == "done")


def _recent() -> None:
    """What was asked for before, to be shown again."""
    jobs = state.jobs().recent("tune", most=RECENT_MOST)
    if not jobs:
        return
    with st.popover(t("tune.recent"), icon=":material/history:"):
        for job in jobs:
            st.button(
                tune_result.described(job), key=f"tune_open_{job.id}", width="stretch",
                on_click=open_job, args=(job.request,),
            )  # fmt: skip


st.header(t("tune.title"))
if "tune_mode" not in st.session_state:
    st.session_state.tune_mode = st.session_state.get("tune_mode_kept", MODES[0])
mode = st.segmented_control(
    t("tune.mode"), MODES, key="tune_mode", format_func=lambda name: t(f"tune.mode_{name}"),
    label_visibility="collapsed",
)  # fmt: skip
st.session_state.tune_mode_kept = mode or MODES[0]
if mode == MODES[1]:
    validating()
else:
    st.caption(t("tune.about"))
    tuning()
