"""The page ``drills``: break one thing on purpose, and see whether the fleet bears it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards import state
from dashboards.parts.drills import acts, earlier
from dashboards.parts.drills.form import (
    BUILT_IN,
    command,
    drill_form,
    request_of,
    token_file,
)
from dashboards.parts.drills.result import shown
from dashboards.parts.live.door import door
from dashboards.state import t

if TYPE_CHECKING:
    from dashboards.parts.live.door import Door


def page() -> None:
    """All of it, in a fragment: the rest of the app does not wait for it."""
    kept = drill_form()
    found = None
    if kept["where"] != BUILT_IN:
        st.warning(t("drills.careful"), icon=":material/warning:")
        found = door()
    with st.container(key="drill_begin"):
        _button(kept, found)
    if found is not None or kept["where"] == BUILT_IN:
        with st.expander(t("form.command")):
            asked = request_of(kept, found)
            text = command(asked, token_file(asked["target"]))
            st.code(text, language="bash", wrap_lines=True)
    job = earlier.chosen()
    if job is not None:
        with st.container(key="drill_shown", border=True):
            shown(job)
    earlier.earlier(job)


def _button(kept: dict[str, Any], found: Door | None) -> None:
    """What begins it; callers are hit only after a dialog."""
    if kept["where"] == BUILT_IN:
        st.button(
            t("drills.begin"), type="primary", key="drill_go", on_click=_begin, args=(dict(kept),)
        )
        st.caption(t("drills.begin_about"))
        return
    asked = st.button(t("drills.ask"), type="primary", key="drill_ask", disabled=found is None)
    if asked and found is not None:
        acts.ask_drill(found, dict(kept))


def _begin(kept: dict[str, Any]) -> None:
    earlier.choose(state.jobs().start("drill", request_of(kept)).id)


st.header(t("drills.title"))
st.caption(t("drills.about"))
st.fragment(page)()
