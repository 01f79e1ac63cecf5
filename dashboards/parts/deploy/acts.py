"""What changes the controller: each act asks for confirmation and for the admin token, which is
used once and not kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from controller.deployment.asking import packed, request_of
from dashboards.admin import Admin, AdminError
from dashboards.parts.live.door import sentence
from dashboards.parts.live.tables import HASH_SHOWN
from dashboards.parts.plain import complain
from dashboards.state import t

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from controller.deployment.views import Current, Row
    from dashboards.parts.deploy.papers import Read
    from dashboards.parts.live.door import Door

OVERRIDE_MOST = 500
_SAID = "deploy_said"


def told() -> None:
    """What the last act has come to, once."""
    said = st.session_state.pop(_SAID, "")
    if said:
        st.success(said)


def ask_deploy(door: Door, read: Read, plan: dict[str, Any], reasons: Sequence[str]) -> None:
    """Open the dialog that deploys."""
    st.dialog(t("deploy.confirm_title"), width="medium")(_deploy)(door, read, plan, reasons)


def ask_roll_back(door: Door) -> None:
    """Open the dialog that rolls back."""
    st.dialog(t("deploy.rollback_title"), width="medium")(_roll_back)(door)


def _deploy(door: Door, read: Read, plan: dict[str, Any], reasons: Sequence[str]) -> None:
    st.write(t("deploy.confirm", name=read.parameters.name, controller=door.name,
               url=door.admin.url))  # fmt: skip
    if reasons:
        st.warning(t("deploy.will_refuse"))
        for reason in reasons:
            st.write(f"- {reason}")
    with st.form("deploy_form", clear_on_submit=True, border=False):
        override = st.text_input(
            t("deploy.override"), key="deploy_override", max_chars=OVERRIDE_MOST,
            help=t("deploy.override_help"),
        )  # fmt: skip
        token = st.text_input(
            t("live.token"), type="password", key="deploy_token", autocomplete="off"
        )
        sure = st.form_submit_button(t("deploy.sure"), key="deploy_confirm", type="primary")
    if not sure:
        return
    papers = read.papers
    evidence = packed(papers.evidence, papers.log) if papers.evidence else {}
    request = request_of(papers.policy, evidence, plan, override)

    def act(admin: Admin) -> str:
        row = admin.deploy(request)
        return t("deploy.begun", id=row.id, name=row.name, stage=row.stage)

    _act(door, token, act)


def _roll_back(door: Door) -> None:
    try:
        running, rows = door.admin.current(), door.admin.deployments()
    except AdminError as error:
        complain(sentence(error))
        return
    st.write(_what_back(running))
    with st.form("rollback_form", clear_on_submit=True, border=False):
        names: dict[int | None, str] = {None: t("deploy.before")}
        if running is None:
            names |= {
                row.id: f"{row.id} · {row.name} ({row.hash[:HASH_SHOWN]})"
                for row in rows if row.stage == "done"
            }  # fmt: skip
        to = st.selectbox(
            t("deploy.back_to"), list(names), key="rollback_to", format_func=names.__getitem__,
            disabled=running is not None,
        )  # fmt: skip
        why = st.text_input(t("live.why"), t("deploy.back_why"), key="rollback_why",
                            max_chars=OVERRIDE_MOST)  # fmt: skip
        token = st.text_input(
            t("live.token"), type="password", key="rollback_token", autocomplete="off"
        )
        sure = st.form_submit_button(
            t("deploy.rollback_yes"), key="rollback_confirm", type="primary"
        )
    if sure:
        _act(door, token, lambda admin: _went_back(admin.roll_back(why, to)))


def _what_back(running: Current | None) -> str:
    if running is None:
        return t("deploy.back_from_rule")
    return t("deploy.back_from", id=running.id, name=running.name, against=running.against)


def _went_back(row: Row) -> str:
    key = "deploy.is_back" if row.stage == "rolled_back" else "deploy.rules_again"
    return t(key, id=row.id, name=row.name)


def _act(door: Door, token: str, act: Callable[[Admin], str]) -> None:
    """With the token that was typed just now, whatever is known for looking."""
    if not token.strip():
        st.error(t("deploy.token_missing"))
        return
    try:
        with st.spinner(t("deploy.asking")):
            said = act(Admin(door.admin.url, token))
    except AdminError as error:
        st.error(sentence(error) if len(error.reasons) < 2 else t("deploy.refused"))
        if len(error.reasons) > 1:
            for reason in error.reasons:
                st.write(f"- {reason}")
        return
    st.session_state[_SAID] = said
    st.rerun()
