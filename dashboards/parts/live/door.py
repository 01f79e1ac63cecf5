"""Which controller is meant, and the token to look at it.

A token that was typed is kept in the server's memory of this session and nowhere else: a reload
asks again. It opens the door for looking; whoever acts types it once more.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import streamlit as st

from dashboards import state
from dashboards.admin import UNAUTHORIZED, UNREACHABLE, Admin, AdminError
from dashboards.state import t

_TOKENS, _CHOSEN, _WRONG = "admin_tokens", "controller_chosen", "admin_token_wrong"


class Door(NamedTuple):
    """A controller that may be looked at."""

    name: str
    admin: Admin


def door() -> Door | None:
    """The controller that is looked at; None: there is none, or its token is not known yet."""
    controllers = state.settings().controllers
    if not controllers:
        st.info(t("live.no_controller"))
        st.code("twinkeel ui --admin http://127.0.0.1:8081 --token-file DATA/admin.token", "bash")
        return None
    name = _chosen(list(controllers))
    token = _token(name)
    if token:
        return Door(name, Admin(controllers[name], token))
    _ask(name, controllers[name])
    return None


def complain(door: Door, error: AdminError) -> None:
    """Say what is wrong. A token that does not fit is asked for again."""
    if error.code == UNAUTHORIZED:
        st.session_state.setdefault(_TOKENS, {})[door.name] = ""
        st.session_state[_WRONG] = door.name
        st.rerun(scope="app")
    key = "live.unreachable" if error.code == UNREACHABLE else "live.wrong_answer"
    st.warning(t(key, why=str(error)))


def sentence(error: AdminError) -> str:
    """What is wrong, where a token was typed to act."""
    return t("live.token_wrong") if error.code == UNAUTHORIZED else str(error)


def _chosen(names: list[str]) -> str:
    """Several pages ask, so the answer is kept apart from the widget."""
    known = st.session_state.get(_CHOSEN)
    index = names.index(known) if known in names else 0
    name = names[index]
    if len(names) > 1:
        name = st.selectbox(t("live.controller"), names, index, key="controller")
    st.session_state[_CHOSEN] = name
    return name


def _token(name: str) -> str:
    typed = st.session_state.get(_TOKENS, {}).get(name)
    if typed is not None:
        return str(typed)
    file = state.settings().token_files.get(name)
    if file is None:
        return ""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        st.warning(t("live.token_file", file=file, why=getattr(error, "strerror", "") or error))
        return ""


def _ask(name: str, url: str) -> None:
    if st.session_state.get(_WRONG) == name:
        st.error(t("live.token_wrong"))
    with st.form("token_form", clear_on_submit=True, border=True):
        st.write(t("live.token_why", url=url))
        left, right = st.columns([4, 1], vertical_alignment="bottom")
        typed = left.text_input(
            t("live.token"), type="password", key="token_look", autocomplete="off"
        )
        sent = right.form_submit_button(t("live.token_go"), key="token_look_go", width="stretch")
    if sent and typed.strip():
        st.session_state.setdefault(_TOKENS, {})[name] = typed.strip()
        st.session_state.pop(_WRONG, None)
        st.rerun()
