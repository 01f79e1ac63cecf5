"""The page ``forecast``: what a load will be, how far that can be trusted, what it is worth."""

from __future__ import annotations

import streamlit as st

from dashboards.parts.forecast.form import forecast_form, missing
from dashboards.parts.forecast.result import result
from dashboards.parts.job_panel import job_panel
from dashboards.state import t


@st.fragment
def forecasting(lacking: str) -> None:
    """The form, the run and what it found: widgets of these run nothing else again."""
    request = forecast_form()
    if lacking:
        st.info(t("forecast.missing", names=lacking))
    job = job_panel(
        "forecast", request, label=t("forecast.run"), key="forecast", disabled=bool(lacking)
    )
    if job is not None:
        result(job)


st.header(t("forecast.title"))
st.caption(t("forecast.about"))
forecasting(missing())
