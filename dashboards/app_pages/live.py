"""The page ``live``: a controller at work."""

from __future__ import annotations

import streamlit as st

from dashboards.parts.live import chains, panels
from dashboards.parts.live import found as others
from dashboards.parts.live.door import door
from dashboards.parts.live.html import steady, title
from dashboards.parts.live.slots import POLL_S, slots
from dashboards.state import t

st.header(t("live.title"))
found = door()
if found is not None:
    steady("live_fresh", "chains", "slots", "found")
    st.fragment(panels.panels, run_every=panels.POLL_S)(found)
    with st.container(key="chains"):
        title(t("live.chain.title"))
        st.fragment(chains.chains, run_every=chains.POLL_S)(found)
    with st.container(key="slots"):
        title(t("live.slots"))
        st.fragment(slots, run_every=POLL_S)(found)
    with st.container(key="found"):
        title(t("live.found"))
        st.caption(t("live.found_why"))
        st.fragment(others.found, run_every=others.POLL_S)(found)
