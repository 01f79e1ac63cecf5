"""The page ``deploy``."""

from __future__ import annotations

import streamlit as st

from dashboards.state import t

st.header(t("deploy.title"))
