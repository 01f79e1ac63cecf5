"""The drills that there were, and which of them is looked at: its number is in the link."""

from __future__ import annotations

from typing import TYPE_CHECKING

import streamlit as st

from dashboards import state
from dashboards.jobs import JobsError
from dashboards.parts.drills.form import BUILT_IN
from dashboards.parts.drills.result import found_by
from dashboards.parts.live.html import Html, badge, muted, table, title
from dashboards.parts.live.tables import clock
from dashboards.parts.plain import complain
from dashboards.state import t

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dashboards.jobs import Job

EXTRA = "drill"
"""Its name in the link."""
MOST = 20
STATES = {
    "waiting": "--p5", "running": "--p1", "failed": "--failed", "cancelled": "--p5",
    "died": "--failed",
}  # fmt: skip


def choose(number: str) -> None:
    """Look at this one from now on."""
    state.set_extra(EXTRA, [number])


def chosen() -> Job | None:
    """The one that the link names, else the youngest; None: there is none."""
    asked = state.extra(EXTRA)
    if not asked:
        return next(iter(state.jobs().recent("drill", most=1)), None)
    try:
        job = state.jobs().get(asked[-1])
    except JobsError as error:
        complain(error)
        return None
    return job if job.kind == "drill" else None


def earlier(looked_at: Job | None) -> None:
    """All of them, the youngest first, and the way to each."""
    jobs = state.jobs().recent("drill", most=MOST)
    if not jobs:
        return
    title(t("drills.earlier"))
    names = {job.id: named(job) for job in jobs}
    if looked_at is not None and looked_at.id not in names:
        names[looked_at.id] = named(looked_at)
    st.session_state.drill_earlier = None if looked_at is None else looked_at.id

    def look() -> None:
        if st.session_state.drill_earlier:
            choose(st.session_state.drill_earlier)

    st.selectbox(
        t("drills.look_at"), list(names), key="drill_earlier", format_func=names.__getitem__,
        on_change=look,
    )  # fmt: skip
    with st.container(key="drill_list"):
        st.html(job_table(jobs))


def named(job: Job) -> str:
    """In a list to choose from."""
    asked = job.request
    return f"{clock(asked['asked_s'])} · {asked['kind']} · {_target(job)}"


def job_table(jobs: Sequence[Job]) -> Html:
    """A row a drill."""
    head = [
        t("live.when"), t("drills.drill"), t("drills.target"), t("live.slot.slot"),
        t("drills.for"), t("drills.verdict"),
    ]  # fmt: skip
    rows = []
    for job in jobs:
        asked = job.request
        found = found_by(job)
        slot = asked["on"] if found is None else found.slot
        rows.append([
            clock(asked["asked_s"]), asked["kind"], _target(job), slot or "-",
            f"{asked['for_s']:g} s", _verdict(job),
        ])  # fmt: skip
    return table(head, rows, (4,))


def _target(job: Job) -> str:
    target: str = job.request["target"]
    return t("drills.demo") if target == BUILT_IN else target


def _verdict(job: Job) -> Html:
    if job.state != "done":
        return badge(t(f"drills.states.{job.state}"), STATES[job.state])
    found = found_by(job)
    if found is None:
        return muted(t("live.unknown"))
    if found.passed:
        return badge(t("drills.passed"), "--good")
    failed = sum(not each.passed for each in found.criteria)
    return badge(t("drills.failed_some", count=failed), "--failed")
