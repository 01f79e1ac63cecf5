"""The page ``forecast``."""

from __future__ import annotations

import streamlit as st

from dashboards.state import t

st.header(t("forecast.title"))
