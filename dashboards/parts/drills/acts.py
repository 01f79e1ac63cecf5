"""A drill on a controller that serves callers: who would be hit is shown, the target's name and its
admin token are typed, and then it begins at once or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from controller.drills import asking
from controller.drills.asking import DrillError, slot_named
from controller.drills.inject import INJECTIONS
from dashboards import state
from dashboards.admin import Admin, AdminError
from dashboards.jobs import JobsError
from dashboards.parts.drills import earlier
from dashboards.parts.drills.form import request_of
from dashboards.parts.live.door import sentence
from dashboards.parts.live.html import Html, badge, muted, table
from dashboards.parts.live.slots import STATES
from dashboards.parts.plain import complain, plain_text
from dashboards.state import t

if TYPE_CHECKING:
    from controller.admin.status import Status
    from controller.drills.inject import Injection
    from controller.fleet.contract import FleetView
    from dashboards.parts.live.door import Door


def ask_drill(door: Door, kept: dict[str, Any]) -> None:
    """Open the dialog that begins it."""
    st.dialog(t("drills.confirm_title"), width="large")(_confirm)(door, kept)


def _confirm(door: Door, kept: dict[str, Any]) -> None:
    try:
        fleet, status = door.admin.fleet().fleet, door.admin.status()
        slot = slot_named(fleet, kept["on"])
        # It is only asked what it would do: without a token it can do nothing.
        injection = INJECTIONS[kept["kind"]](slot, asking.Admin(door.admin.url, ""))
        refusal = injection.refusal()
    except (AdminError, DrillError) as error:
        complain(sentence(error) if isinstance(error, AdminError) else error)
        return
    with st.container(key="drill_hit"):
        _hit(door, kept, fleet, status, injection)
    if refusal:
        complain(refusal)
        return
    with st.form("drill_form", clear_on_submit=True, border=False):
        name = st.text_input(
            t("drills.type_name", name=plain_text(door.name), url=plain_text(door.admin.url)),
            key="drill_name", autocomplete="off",
        )  # fmt: skip
        token = st.text_input(
            t("live.token"), type="password", key="drill_token", autocomplete="off"
        )
        sure = st.form_submit_button(t("drills.sure"), key="drill_confirm", type="primary")
    if sure:
        _begin(door, kept, name.strip(), token.strip())


def _hit(
    door: Door, kept: dict[str, Any], fleet: FleetView, status: Status, injection: Injection
) -> None:
    """What would be done, and to whom."""
    slot = injection.slot
    flying = {each.id: each.in_flight for each in status.replicas}
    st.write(
        t(
            "drills.confirm", kind=kept["kind"], name=plain_text(door.name),
            url=plain_text(door.admin.url), seconds=f"{kept['for_s']:g}",
            slot=plain_text(slot.name), flying=flying.get(slot.replica, 0),
            open=status.open_requests,
        )
    )  # fmt: skip
    st.write(t("drills.would", what=plain_text(injection.what)))
    if injection.simulated:
        st.caption(t("drills.simulated", what=plain_text(injection.simulated)))
    st.html(hit_table(fleet, slot.replica, flying))


def hit_table(fleet: FleetView, hit: int, flying: dict[int, int]) -> Html:
    """The fleet, with the slot that would be hit first."""
    rows = [
        [
            slot.name,
            badge(t("drills.is_hit"), "--failed") if slot.replica == hit
            else muted(t("drills.stays")),
            badge(t(f"live.slot.states.{slot.state}"), STATES[slot.state]),
            f"{slot.model} {slot.version}".strip() or "-", slot.url, slot.domain or "-",
            flying.get(slot.replica, 0),
        ]
        for slot in sorted(fleet.slots, key=lambda one: (one.replica != hit, one.replica))
    ]  # fmt: skip
    head = [
        t("live.slot.slot"), t("drills.drill"), t("live.slot.state"), t("live.slot.model"),
        t("drills.address"), t("live.slot.domain"), t("live.flying"),
    ]  # fmt: skip
    return table(head, rows, (6,))


def _begin(door: Door, kept: dict[str, Any], name: str, token: str) -> None:
    if name.rstrip("/") not in (door.name, door.admin.url):
        st.error(t("drills.name_wrong", name=plain_text(door.name)))
        return
    if not token:
        st.error(t("deploy.token_missing"))
        return
    try:
        Admin(door.admin.url, token).fleet()
        job = state.jobs().start_now("drill", request_of(kept, door), token)
    except AdminError as error:
        complain(sentence(error))
        return
    except JobsError as error:
        complain(error)
        return
    earlier.choose(job.id)
    st.rerun()
