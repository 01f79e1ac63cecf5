"""The page ``deploy``: bring a validated policy into live traffic, watch it, and take it back."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from dashboards.admin import AdminError
from dashboards.parts.deploy import acts, current, history, papers, plan
from dashboards.parts.live.door import complain, door
from dashboards.parts.live.html import steady, title
from dashboards.state import t

if TYPE_CHECKING:
    from controller.admin.status import Status
    from dashboards.parts.live.door import Door


def _status(found: Door) -> Status | None:
    try:
        return found.admin.status()
    except AdminError as error:
        complain(found, error)
        return None


@st.fragment
def _new(found: Door | None) -> None:
    """Choose, check, plan, deploy; what is only looked at needs no controller."""
    title(t("deploy.new"))
    read = papers.choose()
    if read is None:
        return
    st.html(papers.summary(read))
    status = None if found is None else _status(found)
    reasons = papers.reasons(read, status)
    with st.container(key="gates"):
        if read.evidence is not None:
            st.html(papers.gate_table(read.evidence.gates))
            st.caption(papers.expected_text(read.evidence))
            with st.expander(t("deploy.all_figures")):
                st.html(papers.figure_table(read.evidence.figures))
    with st.container(key="reasons"):
        if reasons:
            st.error("\n".join([t("deploy.will_refuse"), "", *(f"- {why}" for why in reasons)]))
        else:
            st.success(t("deploy.may_go"))
    wanted = plan.choose(read.evidence)
    asked = st.button(
        t("deploy.go"), type="primary", key="deploy_go", disabled=found is None or wanted is None
    )
    if asked and found is not None and wanted is not None:
        acts.ask_deploy(found, read, wanted, reasons)


st.header(t("deploy.title"))
controller = door()
acts.told()
if controller is not None:
    steady("current", "history")
    with st.container(key="current", border=True):
        st.fragment(current.current, run_every=current.POLL_S)(controller)
    if st.button(t("deploy.rollback"), key="rollback_go", icon=":material/undo:"):
        acts.ask_roll_back(controller)
with st.container(key="new"):
    _new(controller)
if controller is not None:
    with st.container(key="history"):
        title(t("deploy.history"))
        st.fragment(history.history, run_every=history.POLL_S)(controller)
