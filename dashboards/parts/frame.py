"""What stands around every page."""

from __future__ import annotations

import streamlit as st

from dashboards import state

NAMES = {"en": "English", "zh": "中文"}


def language_switch() -> None:
    """English or Chinese."""

    def chosen() -> None:
        state.set_language(st.session_state.lang_switch)

    st.segmented_control(
        "Language · 语言", list(NAMES), default=state.language(), key="lang_switch",
        format_func=NAMES.__getitem__, label_visibility="collapsed", on_change=chosen,
        required=True,
    )  # fmt: skip
