"""An answer: its sentences, its figures with kind and interval, and what would make it wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards.parts.plain import plain_text
from dashboards.parts.what_if import settings as asked
from dashboards.state import language, said, t
from dashboards.work.ask import ANSWER
from dashboards.work.plan import FACTS, PLAN, RUNS
from twin.plan.catalogue import question_of
from twin.plan.doubts import doubts
from twin.plan.page import Paper, page
from twin.plan.show import estimate_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dashboards.jobs import Job

COLOURS = {"measured": "green", "fitted": "green", "extrapolated": "orange", "estimated": "orange"}
FIGURES = (
    "replicas", "replicas_n1", "usd_per_month", "usd_per_million_good_tokens", "attainment",
    "ttft_s_p95", "ttft_s_p99", "users", "knee", "kv_tokens", "sequences", "ratio",
    "attainment_as_is", "attainment_buffered", "attainment_without", "points", "gain",
    "overflow_usd",
)  # fmt: skip


def answer(job: Job) -> None:
    """All of it."""
    document = read(job, ANSWER)
    facts = read(job, FACTS)
    request = job.request
    if document is None:
        st.warning(t("what_if.gone"))
        return
    first, *others = document["sentences"]
    if language() != "en":
        st.caption(t("what_if.in_english"))
    st.markdown(f"##### {plain_text(first)}")
    for text in others:
        st.markdown(plain_text(text))
    left, right = st.columns([3, 2], gap="large")
    with left:
        figures_table(document["figures"])
        stands_on(facts)
    with right:
        what_would_make_it_wrong(request["question"], document, facts)
    actions(job, "ask")


def figures_table(figures: Sequence[Mapping[str, Any]]) -> None:
    """One row a figure."""
    rows = [estimate_of(raw) for raw in figures]
    if not rows:
        return
    st.table(
        {
            t("what_if.figure_name"): [figure_name(one.name) for one in rows],
            t("what_if.value"): [f"**{plain_text(_value(one))}**" for one in rows],
            t("what_if.interval"): [plain_text(_interval(one)) for one in rows],
            t("what_if.kind"): [badge(one.kind) for one in rows],
        },
        border="horizontal", hide_index=True,
    )  # fmt: skip


def stands_on(facts: Mapping[str, Any] | None) -> None:
    """Of how many runs, of what, with which promises."""
    if facts is None:
        st.caption(t("what_if.arithmetic"))
        return
    st.caption(t(
        "what_if.stands_on", runs=facts["runs"], wall=f"{facts['wall_s']:.0f}",
        rows=f"{facts['rows']:,}", span=f"{facts['span_s']:.0f}", draws=facts["draws"],
        trace=plain_text(facts["trace"]), policy=plain_text(facts["policy"]),
        promise=plain_text(facts["promise"]), confidence=f"{facts['confidence']:.0%}",
    ))  # fmt: skip
    for note in facts["notes"]:
        st.caption(plain_text(note))


def what_would_make_it_wrong(
    question: str, document: Mapping[str, Any], facts: Mapping[str, Any] | None
) -> None:
    st.markdown(f"**{t('what_if.wrong')}**")
    st.markdown("\n".join(
        f"- {plain_text(said(text))}" for text in doubts(question, document, facts)
    ))  # fmt: skip


def actions(job: Job, kind: str) -> None:
    """Pin it, take the report along, see the command."""
    pinned = job.id in asked.pins()
    with st.container(horizontal=True, key=f"actions_{kind}"):
        st.button(
            t("what_if.unpin") if pinned else t("what_if.pin"), key=f"pin_{kind}",
            icon=":material/keep_off:" if pinned else ":material/keep:",
            on_click=asked.pin, args=(job.id,), help=t("what_if.pin_help", most=asked.PINS_MOST),
        )  # fmt: skip
        st.download_button(
            t("what_if.report"), data=lambda: report(job, kind), mime="text/html",
            file_name=f"twinkeel-{kind}-{job.id[:6]}.html", key=f"report_{kind}",
            icon=":material/download:", on_click="ignore",
        )  # fmt: skip
        with st.popover(t("what_if.command"), icon=":material/terminal:"):
            st.code(asked.command(kind, job.request), language="bash", wrap_lines=True)


def report(job: Job, kind: str) -> str:
    """The page for one's manager."""
    document = read(job, ANSWER if kind == "ask" else PLAN)
    assert document is not None
    question = job.request.get("question", "plan")
    facts = read(job, FACTS)
    title = f"Capacity plan for {facts['trace']}" if facts and kind == "plan" else ""
    if kind == "ask":
        title = question_of(question).title
    more = {name: str(value) for name, value in job.request.get("parameters", {}).items()}
    if job.request.get("have"):
        more["Replicas there are"] = str(job.request["have"])
    if kind == "plan":
        more["Growths"] = ", ".join(f"{growth:g}x" for growth in job.request["growths"])
        more["Faults"] = ", ".join(job.request["faults"])
    return page(Paper(question, title, document, facts, asked.command(kind, job.request), more))


def progress(job: Job) -> None:
    """How many runs have been played."""
    try:
        played = (job.folder / RUNS).read_text(encoding="utf-8")
    except OSError:
        return
    if played:
        st.caption(t("what_if.played", runs=played))


def read(job: Job, name: str) -> Any:
    """A result of the job; None: it is not there."""
    path = job.folder / name
    try:
        return _read(str(path), path.stat().st_mtime_ns)
    except (OSError, json.JSONDecodeError):
        return None


@st.cache_data(max_entries=64, show_spinner=False)
def _read(path: str, changed_ns: int) -> Any:
    return json.loads(Path(path).read_text(encoding="utf-8"))


def badge(kind: str) -> str:
    """The kind of a figure, as Markdown."""
    return f":{COLOURS[kind]}-badge[{t(f'what_if.kinds.{kind}')}]"


def figure_name(name: str) -> str:
    """For people: `ttft_s_p95/P0` is the p95 of P0."""
    machine, _, own = name.rpartition(" ")
    base, _, group = own.partition("/")
    if base.startswith("missed_at_"):
        seconds = base.removeprefix("missed_at_").removesuffix("_s")
        text = t("what_if.missed_at", seconds=seconds)
    else:
        text = t(f"what_if.figure.{base}") if base in FIGURES else base
    return plain_text(" ".join(part for part in (machine, text, group) if part))


def _value(one: Any) -> str:
    share = one.name.partition("/")[0].startswith("attainment")
    if share:
        return f"{one.value:.1%}"
    return str(one.text().partition(" (")[0])


def _interval(one: Any) -> str:
    if one.low == one.high == one.value:
        return "—"
    if one.name.partition("/")[0].startswith("attainment"):
        return t("what_if.range", low=f"{one.low:.1%}", high=f"{one.high:.1%}")
    low, _, high = one.text().partition(" (")[2].rpartition(", ")[0].partition(" to ")
    return t("what_if.range", low=low, high=high)


def word(question: str) -> str:
    """The question's name in the dictionary and in keys of widgets."""
    return question.replace("+", "").replace("-", "_")


__all__ = [
    "actions", "answer", "badge", "figure_name", "figures_table", "plain_text", "progress", "read",
    "report", "stands_on", "what_would_make_it_wrong", "word",
]  # fmt: skip
