"""The page ``what_if``."""

from __future__ import annotations

import streamlit as st

from dashboards.state import t

st.header(t("what_if.title"))
