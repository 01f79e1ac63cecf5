"""The frame of all pages: navigation, language, and the scenario's form beside them.

Streamlit runs this file; start it with ``twinkeel ui``.
"""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from dashboards import state
from dashboards.parts.frame import language_switch
from dashboards.parts.scenario_form import scenario_form
from dashboards.state import t

PAGES = ("replay", "what_if", "tune", "forecast", "live", "drills", "deploy")
ICONS = {
    "replay": ":material/replay:", "what_if": ":material/query_stats:", "tune": ":material/tune:",
    "forecast": ":material/timeline:", "live": ":material/monitor_heart:",
    "drills": ":material/emergency_home:", "deploy": ":material/rocket_launch:",
}  # fmt: skip

ICON = Path(__file__).with_name("icon.png")
"""Of our own: a named one would be fetched from elsewhere."""

st.set_page_config(page_title="Twinkeel", page_icon=str(ICON), layout="wide")
came = state.sync_url()
st.html("<style>[data-testid='stMainBlockContainer'] { padding-top: 4rem; }</style>")
page = st.navigation(
    [
        st.Page(
            f"app_pages/{name}.py", title=t(f"{name}.title"), icon=ICONS[name],
            url_path=name.replace("_", "-"), default=name == PAGES[0],
        )
        for name in PAGES
    ],
    position="top",
)  # fmt: skip
with st.sidebar:
    language_switch()
    scenario_form(anew=came)
if state.link_error():
    st.error(t("frame.wrong_link", why=state.link_error()))
page.run()
