"""The planner's page: twelve questions, the plan itself, and up to four of them side by side."""

from __future__ import annotations

import streamlit as st

from dashboards import state
from dashboards.parts.job_panel import job_panel
from dashboards.parts.plain import complain, plain_text
from dashboards.parts.what_if import settings as asked
from dashboards.parts.what_if.answer import answer, progress, word
from dashboards.parts.what_if.compare import compare
from dashboards.parts.what_if.form import assumptions, plan_form, question_form
from dashboards.parts.what_if.plan import first_answer, plan
from dashboards.state import t
from twin.plan.catalogue import QUESTIONS, Question

COLUMNS = 4


def page() -> None:
    """All of it, in a fragment: the rest of the app does not wait for it."""
    own = asked.settings()
    if wrong := st.session_state.pop("wi_wrong", ""):
        st.error(t("what_if.wrong_link", why=plain_text(wrong)))
    view = _view(own)
    if view == "compare":
        with st.container(key="compare"):
            compare()
        return
    try:
        now = asked.standing(state.scenario(), own)
    except ValueError as error:
        complain(error)
        return
    if view == "questions":
        _grid(own)
    own = asked.settings()
    own = assumptions(own, now)
    now = asked.standing(state.scenario(), own)
    _left_out()
    if view == "plan":
        _plan(own, now)
    elif own.question:
        _question(QUESTIONS[own.question], own, now)
    else:
        st.info(t("what_if.choose"))


def _view(own: asked.Settings) -> str:
    """Questions, plan or comparison."""
    if "wi_view" not in st.session_state:
        st.session_state.wi_view = own.view

    def chosen() -> None:
        asked.change(view=st.session_state.wi_view)

    count = len(asked.pins())
    names = {name: t(f"what_if.view.{name}") for name in asked.VIEWS}
    if count:
        names["compare"] = t("what_if.compare_some", count=count)
    st.segmented_control(
        t("what_if.title"), list(names), format_func=names.__getitem__, key="wi_view",
        label_visibility="collapsed", on_change=chosen, required=True,
    )  # fmt: skip
    return asked.settings().view


def _grid(own: asked.Settings) -> None:
    """The twelve questions as buttons."""

    def chosen(name: str) -> None:
        asked.change(question=name)

    with st.container(key="questions"):
        for begin in range(0, len(QUESTIONS), COLUMNS):
            names = list(QUESTIONS)[begin : begin + COLUMNS]
            for column, name in zip(st.columns(COLUMNS, gap="small"), names, strict=True):
                column.button(
                    t(f"what_if.question.{word(name)}"), key=f"question_{word(name)}",
                    on_click=chosen, args=(name,), width="stretch", wrap=True,
                    type="primary" if own.question == name else "secondary",
                )  # fmt: skip


def _question(question: Question, own: asked.Settings, now: asked.Standing) -> None:
    st.subheader(t(f"what_if.question.{word(question.name)}"))
    st.caption(t(f"what_if.about.{word(question.name)}"))
    own = question_form(question, own, now)
    now = asked.standing(state.scenario(), own)
    lacking = (question.needs == "users" and not now.named.users) or (
        question.needs == "lines" and len(now.named.lines) < 2
    )
    if lacking:
        st.warning(t(f"what_if.needs_{question.needs}", lines=len(now.named.lines)))
    try:
        request = asked.ask_request(question, state.scenario(), own, now)
    except ValueError as error:
        complain(error)
        return
    job = job_panel(
        "ask", request, label=t("what_if.answer"), partial=progress, disabled=lacking,
        button="ask_run",
    )  # fmt: skip
    if job is not None:
        with st.container(key="answer"):
            answer(job)


def _plan(own: asked.Settings, now: asked.Standing) -> None:
    st.caption(t("what_if.about_plan"))
    own = plan_form(own)
    request = asked.plan_request(state.scenario(), own, now)
    job = job_panel("plan", request, label=t("what_if.make_plan"), partial=first_answer,
                    button="plan_run")  # fmt: skip
    if job is not None:
        with st.container(key="plan"):
            plan(job)


def _left_out() -> None:
    """What of the scenario a plan does not take."""
    scenario = state.scenario()
    left = [name for name in ("speed", "scale", "scale_lengths") if getattr(scenario, name) != 1]
    left += ["faults"] if scenario.faults else []
    left += ["kinds"] if len(scenario.fleet) > 1 else []
    if left:
        st.info(t("what_if.left_out", names=", ".join(t(f"what_if.left.{one}") for one in left)))


st.header(t("what_if.title"))
st.fragment(page)()
