"""The page ``tune``."""

from __future__ import annotations

import streamlit as st

from dashboards.state import t

st.header(t("tune.title"))
