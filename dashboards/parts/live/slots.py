"""The panel of what runs where: slots, hot reloads that are under way, cards with their slices."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import streamlit as st

from dashboards.admin import NOT_FOUND, UNREACHABLE, AdminError
from dashboards.parts.live.cards import card_table
from dashboards.parts.live.door import complain
from dashboards.parts.live.html import Html, badge, joined, muted, strip, table, whole
from dashboards.parts.live.tables import span
from dashboards.parts.plain import plain_text
from dashboards.state import said, t

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.fleet.contract import FleetView, SlotView
    from dashboards.admin import FleetSeen, Reload
    from dashboards.parts.live.door import Door

POLL_S = 2.0
STALE_S = 6.0
"""Older answers are greyed."""
STATES = {
    "serving": "--good", "outside": "--good", "warm": "--p1", "cold": "--p5", "starting": "--late",
    "warming": "--late", "stopping": "--late", "waiting": "--failed", "broken": "--failed",
}  # fmt: skip
SLOTS_MOST = 256
UUID_SHOWN = 12
RELOADS_MOST = 8
"""Models that are asked about: one request each."""


class _Seen(NamedTuple):
    """The last answer, and when it came."""

    seen: FleetSeen
    reloads: tuple[Reload, ...]
    at_s: float


def slots(door: Door) -> None:
    """One round. While nobody answers, which the panels above say, the last answer stays."""
    known: dict[str, _Seen] = st.session_state.setdefault("fleet_seen", {})
    now_s = time.time()
    try:
        seen = door.admin.fleet()
        known[door.name] = _Seen(seen, _reloads(door, seen.fleet), now_s)
    except AdminError as error:
        if error.status == NOT_FOUND:
            st.caption(t("live.slot.not_told"))
            return
        if error.code != UNREACHABLE:
            complain(door, error)
    last = known.get(door.name)
    if last is None:
        return
    age_s = now_s - last.at_s
    with st.container(key="slots_stale" if age_s > STALE_S else "slots_fresh"):
        draw(last.seen, last.reloads)
        st.caption(t("live.age", s=f"{age_s:.1f}"))
    if age_s > STALE_S:
        st.html("<style>.st-key-slots_stale{opacity:.45}</style>")


def _reloads(door: Door, fleet: FleetView) -> tuple[Reload, ...]:
    """The last reload of each model, where there was one; only processes of the controller's own
    are reloaded."""
    if fleet.kind != "local":
        return ()
    models = list(dict.fromkeys(slot.model for slot in fleet.slots if slot.model))
    found = []
    for model in models[:RELOADS_MOST]:
        try:
            found.append(door.admin.reload(model))
        except AdminError:  # of no use without it; a controller that is away is told of elsewhere
            return ()
    return tuple(each for each in found if each is not None)


def draw(seen: FleetSeen, reloads: Sequence[Reload] = ()) -> None:
    """What was answered."""
    fleet, cards = seen.fleet, seen.cards
    if fleet.kind == "static" and not cards:
        st.caption(t("live.slot.static", count=len(fleet.slots)))
        return
    st.caption(t("live.slot.kind", kind=t(f"live.slot.kinds.{_kind(fleet)}")))
    for reload in reloads:
        if reload.over:
            st.caption(_ended(reload))
        else:
            st.html(reload_strip(reload))
    st.html(slot_table(fleet.slots))
    if len(fleet.slots) > SLOTS_MOST:
        st.caption(t("live.cut", shown=SLOTS_MOST, all=len(fleet.slots)))
    if not cards:
        st.caption(t("live.card.none"))
        return
    st.html(card_table(cards, {slot.replica: slot.name for slot in fleet.slots}))
    st.caption(t("live.card.about"))


def _kind(fleet: FleetView) -> str:
    return fleet.kind if fleet.kind in ("static", "local", "kubernetes") else "other"


def slot_table(slots: Sequence[SlotView]) -> Html:
    """A row a slot."""
    head = [
        t("live.slot.slot"), t("live.slot.model"), t("live.slot.state"), t("live.why"),
        t("live.slot.since"), t("live.slot.role"), t("live.slot.domain"), t("live.slot.cards"),
        t("live.slot.starts"),
    ]  # fmt: skip
    rows = [
        [
            whole(joined([slot.name, " ", muted(f"#{slot.replica}")])),
            joined([slot.model or muted(t("live.unknown")), " ", muted(slot.version)]),
            badge(t(f"live.slot.states.{slot.state}"), STATES[slot.state]),
            said(slot.why) or "-", span(slot.since_s),
            t("live.slot.standby" if slot.standby else "live.slot.replica"), slot.domain or "-",
            joined([whole(uuid[:UUID_SHOWN]) for uuid in slot.gpus], " ") or "-", slot.starts,
        ]
        for slot in slots[:SLOTS_MOST]
    ]  # fmt: skip
    return table(head, rows, (4, 8))


def reload_strip(reload: Reload) -> Html:
    """A hot reload that is under way."""
    parts: list[object] = [
        badge(t("live.reload.going"), "--p1"), _way(reload), badge(said(reload.phase), "--late"),
        t("live.reload.sides", new=reload.new, old=reload.old, open=reload.open_on_old),
        t("live.reload.for", time=span(reload.took_s)),
    ]  # fmt: skip
    if reload.steps:
        parts.append(muted(reload.steps[-1].text))
    return strip(parts)


def _ended(reload: Reload) -> str:
    why = f": {plain_text(reload.why)}" if reload.why else ""
    return t(
        "live.reload.last", what=plain_text(_way(reload)), phase=said(reload.phase), why=why,
        time=span(reload.took_s),
    )  # fmt: skip


def _way(reload: Reload) -> str:
    return f"{reload.model} {reload.before} → {reload.version}"
