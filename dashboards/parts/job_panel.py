"""How far a job is, with what may be done about it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import streamlit as st

from dashboards import state
from dashboards.jobs import JobsError
from dashboards.parts.plain import complain
from dashboards.state import said, t

if TYPE_CHECKING:
    from collections.abc import Callable

    from dashboards.jobs import Job

RESUMED = frozenset(["tune"])
"""Kinds that go on where they were; others begin anew."""
POLL_S = 0.5
ASKED_S = 10.0
"""A click is for the panel that is drawn next, not for one that is drawn much later."""


def job_panel(
    kind: str, request: dict[str, object], *, label: str = "", key: str = "",
    partial: Callable[[Job], None] | None = None, disabled: bool = False, button: str = "",
) -> Job | None:  # fmt: skip
    """A button that begins the job, its progress, and the job itself once it is done.

    Pages draw what it found below. Nothing is lost when the page is left: the job is found again by
    its request.

    Args:
        label: of the button.
        key: tells panels of the same kind on one page apart.
        partial: draws what there is so far, while the job runs.
        button: the key of the button; empty: of the panel's own.
    """
    key = key or kind
    asked = _asked(key) and not disabled
    job = state.jobs().find(kind, request)
    if job is None or not (job.open or job.state == "done"):
        if asked:
            job = state.jobs().start(kind, request)
        else:
            if job is not None:
                ended_badly(job)
            text = label or t("jobs.run")
            if job is not None and job.state in ("cancelled", "died"):
                text = t("jobs.resume" if kind in RESUMED else "jobs.again")
            st.button(
                text, type="primary", key=button or f"job_{key}", disabled=disabled,
                on_click=_ask, args=(key,),
            )  # fmt: skip
            return None
    if job.open:
        progress(job.id, key, partial)
        return None
    return job


def _ask(key: str) -> None:
    """Note the click. A button's own word is gone when the page is drawn anew before it comes to
    the button, as when another job has just ended."""
    st.session_state[f"{key}_asked"] = time.monotonic()


def _asked(key: str) -> bool:
    """Whether somebody has clicked since this was asked last."""
    at_s = st.session_state.pop(f"{key}_asked", None)
    return at_s is not None and time.monotonic() - at_s < ASKED_S


@st.fragment(run_every=POLL_S)
def progress(number: str, key: str, partial: Callable[[Job], None] | None = None) -> None:
    """How far a job is that waits or runs, and the button that ends it."""
    jobs = state.jobs()
    jobs.look()
    try:
        job = jobs.get(number)
    except JobsError as error:
        complain(error)
        return
    if not job.open:
        st.rerun(scope="app")
    bar, button = st.columns([5, 1], vertical_alignment="center")
    text = said(job.said) if job.state == "running" else t("jobs.waiting")
    bar.progress(min(max(job.share or 0.0, 0.0), 1.0), text=text or t("jobs.starting"))

    def cancel() -> None:
        jobs.cancel(number)

    button.button(t("jobs.cancel"), key=f"cancel_{key}", width="stretch", on_click=cancel)
    if partial is not None:
        partial(job)


def ended_badly(job: Job) -> None:
    """Why a job has not come to its end."""
    if job.state == "failed":
        complain(job.error)
    elif job.state == "died":
        st.warning(t("jobs.died", log=job.folder / "log.txt"))
    else:
        st.info(t("jobs.cancelled"))
