"""Up to four answers or plans side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from dashboards import state
from dashboards.jobs import JobsError
from dashboards.parts.charts import show_chart
from dashboards.parts.plain import plain_text
from dashboards.parts.what_if import settings as asked
from dashboards.parts.what_if.answer import badge, figure_name, read, word
from dashboards.parts.what_if.plan import cheapest, classes
from dashboards.state import t
from dashboards.work.ask import ANSWER
from dashboards.work.plan import PLAN
from twin.plan.charts import knee_charts
from twin.plan.show import estimate_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dashboards.jobs import Job


def compare() -> None:
    """The pinned ones; what is unlike between them, then their figures."""
    found = _pinned()
    if not found:
        st.info(t("what_if.nothing_pinned", pin=t("what_if.pin")))
        return
    unlike = _unlike([job.request for job in found])
    columns = st.columns(max(2, len(found)), gap="medium", border=True)
    for place, (column, job) in enumerate(zip(columns, found, strict=False)):
        with column:
            _one(place, job, unlike)
    _figures(found)
    plans = [(place, job) for place, job in enumerate(found) if job.kind == "plan"]
    if plans:
        st.markdown(f"**{t('what_if.knees')}**")
        for column, (place, job) in zip(st.columns(max(2, len(plans))), plans, strict=False):
            document = read(job, PLAN) or {"knee": None}
            charts = knee_charts(document)
            with column:
                st.caption(t("what_if.number", number=place + 1))
                if charts:
                    show_chart(charts["attainment"], f"wi_compare_{job.id}", keep=classes(document))


def _pinned() -> list[Job]:
    jobs, found = state.jobs(), []
    for number in asked.pins():
        try:
            job = jobs.get(number)
        except JobsError as error:
            _gone(number, str(error))
            continue
        if job.kind in ("ask", "plan") and job.state == "done" and _document(job) is not None:
            found.append(job)
        else:
            _gone(number, t("what_if.gone"))
    return found


def _gone(number: str, why: str) -> None:
    left, right = st.columns([5, 1], vertical_alignment="center")
    left.warning(t("what_if.pin_gone", why=plain_text(why)))
    right.button(t("what_if.unpin"), key=f"unpin_{number}", on_click=asked.pin, args=(number,))


def _one(place: int, job: Job, unlike: Sequence[str]) -> None:
    st.caption(t("what_if.number", number=place + 1))
    name = job.request.get("question")
    title = t(f"what_if.question.{word(name)}") if name else t("what_if.view.plan")
    st.markdown(f"**{title}**")
    document = _document(job)
    assert document is not None
    st.markdown(plain_text(document["sentences"][0]))
    facts = [
        f"{t(f'what_if.field.{field}')}: {plain_text(_short(job.request[field]))}"
        for field in unlike if field in job.request
    ]  # fmt: skip
    if facts:
        st.caption("  \n".join(facts))
    st.button(t("what_if.unpin"), key=f"unpin_{job.id}", on_click=asked.pin, args=(job.id,),
              icon=":material/keep_off:")  # fmt: skip


def _figures(found: Sequence[Job]) -> None:
    """A row each figure that one of them has, a column each of them."""
    own = [_by_name(job) for job in found]
    names = list(dict.fromkeys(name for one in own for name in one))
    table: dict[str, list[str]] = {t("what_if.figure_name"): [figure_name(n) for n in names]}
    for place, one in enumerate(own):
        head = t("what_if.number", number=place + 1)
        table[head] = [_cell(one[name]) if name in one else "—" for name in names]
    st.table(table, border="horizontal", hide_index=True)


def _by_name(job: Job) -> dict[str, Mapping[str, Any]]:
    document = _document(job)
    assert document is not None
    if job.kind == "ask":
        return {raw["name"]: raw for raw in document["figures"]}
    found: dict[str, Mapping[str, Any]] = {}
    for growth in document["growths"]:
        best = cheapest(document, growth)
        if best is not None:
            for raw in (best["replicas"], best["usd_per_month"],
                        best["usd_per_million_good_tokens"]):  # fmt: skip
                found[raw["name"] if growth == 1 else f"{raw['name']}/{growth:g}x"] = raw
    if document["knee"] is not None:
        found["knee"] = document["knee"]["multiple"]
    for cell in document["faults"]:
        if cell["size"]["growth"] == document["growths"][0] and cell["effects"]:
            worst = cell["effects"][0]
            found.setdefault(f"points/{cell['fault']}", worst["points"])
    return found


def _cell(raw: Mapping[str, Any]) -> str:
    one = estimate_of(raw)
    value, _, rest = one.text().partition(" (")
    ends = rest.rpartition(", ")[0]
    shown = f"{value} ({ends})" if ends else value
    return f"{plain_text(shown)} {badge(one.kind)}"


def _unlike(requests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Fields in which they differ."""
    names = list(dict.fromkeys(name for request in requests for name in request))
    seen = {
        name: {msgspec.json.encode(request.get(name), order="sorted") for request in requests}
        for name in names
    }
    return [name for name in names if name != "question" and len(seen[name]) > 1]


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_short(part)}" for name, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _document(job: Job) -> Any:
    return read(job, ANSWER if job.kind == "ask" else PLAN)


__all__ = ["compare"]
