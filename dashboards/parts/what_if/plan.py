"""The plan: the cheapest fleet, sizes by growth, the knee, what gives way, what faults cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import streamlit as st

from dashboards.parts.charts import show_chart
from dashboards.parts.what_if.answer import (
    actions,
    badge,
    plain_text,
    progress,
    read,
    stands_on,
    what_would_make_it_wrong,
    word,
)
from dashboards.state import language, t
from dashboards.work.plan import COARSE, FACTS, PLAN
from twin.plan.charts import knee_charts, sizes_chart
from twin.plan.show import estimate_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dashboards.jobs import Job


def first_answer(job: Job) -> None:
    """What the formula says, while the twin looks."""
    coarse = read(job, COARSE)
    if coarse is not None:
        st.markdown(f"**{t('what_if.coarse')}**")
        _sizes_table(coarse["sizes"])
        for text in coarse["said"]:
            st.caption(plain_text(text))
    progress(job)


def plan(job: Job) -> None:
    """All of it."""
    document, facts = read(job, PLAN), read(job, FACTS)
    if document is None or facts is None:
        st.warning(t("what_if.gone"))
        return
    if language() != "en":
        st.caption(t("what_if.in_english"))
    first, *others = document["sentences"]
    st.markdown(f"##### {plain_text(first)}")
    _headline(document)
    _knee(document)
    left, right = st.columns(2, gap="medium")
    with left:
        st.markdown(f"**{t('what_if.sizes')}**")
        chart = sizes_chart(document)
        if chart is not None:
            machines = {size["machine"] for size in document["sizes"]}
            show_chart(chart, "wi_sizes_chart", keep=machines)
    with right:
        _faults(document)
    _sizes_table(document["sizes"])
    left, right = st.columns([3, 2], gap="large")
    with left:
        with st.expander(t("what_if.sentences")):
            for text in others:
                st.markdown(plain_text(text))
        for one in {(r["name"], r["gate"], r["why"]): r for r in document["rejected"]}.values():
            st.warning(plain_text(f"{one['name']}: gate {one['gate']}: {one['why']}"))
        stands_on(facts)
    with right:
        what_would_make_it_wrong("plan", document, facts)
    actions(job, "plan")


def cheapest(document: Mapping[str, Any], growth: float) -> Mapping[str, Any] | None:
    """The size that costs least at this growth, as ``twin.plan.Plan.best`` chooses it."""
    own = [size for size in document["sizes"] if size["growth"] == growth and size["replicas"]]
    return min(own, key=lambda size: float(size["usd_per_month"]["value"]), default=None)


def classes(document: Mapping[str, Any]) -> set[str]:
    """Names of the classes in the knee's charts, which are no words to translate."""
    return {name for point in document["knee"]["curve"] for name in point["attainment"] if name}


def _headline(document: Mapping[str, Any]) -> None:
    """The four figures that are asked for first."""
    best = cheapest(document, document["growths"][0])
    if best is None:
        return
    count, month = estimate_of(best["replicas"]), estimate_of(best["usd_per_month"])
    columns = st.columns(4, gap="medium", border=True)
    with columns[0]:
        name = t("what_if.cheapest", growth=f"{document['growths'][0]:g}")
        fleet = t("what_if.times", count=f"{count.value:.0f}", machine=best["machine"])
        _figure(name, fleet, _between(count, "{:.0f}"), count.kind)
    with columns[1]:
        _figure(t("what_if.figure.usd_per_month"), f"USD {month.value:,.0f}",
                _between(month, "{:,.0f}"), month.kind)  # fmt: skip
    knee = document["knee"]
    if knee is None:
        return
    with columns[2]:
        multiple = estimate_of(knee["multiple"])
        _figure(t("what_if.figure.knee"), f"{multiple.value:.3g}x", _between(multiple, "{:.3g}x"),
                multiple.kind)  # fmt: skip
    with columns[3]:
        cause = knee["cause"]
        part = cause["part"].lower().replace(" ", "_")
        st.caption(t("what_if.bottleneck"))
        st.markdown(f"##### {t(f'what_if.part.{part}')}")
        st.caption(t("what_if.knob", knob=plain_text(cause["knob"])))


def _figure(name: str, value: str, between: str, kind: str) -> None:
    st.caption(name)
    st.markdown(f"##### {plain_text(value)}")
    st.markdown(f"{plain_text(between)} {badge(kind)}")


def _knee(document: Mapping[str, Any]) -> None:
    knee = document["knee"]
    if knee is None:
        return
    fleet = t("what_if.times", count=knee["replicas"], machine=knee["machine"])
    st.markdown(f"**{t('what_if.knee', fleet=plain_text(fleet))}**", help=t("what_if.knee_help"))
    charts = knee_charts(document)
    left, right = st.columns(2)
    with left:
        show_chart(charts["attainment"], "wi_knee_attainment", keep=classes(document))
    with right:
        show_chart(charts["ttft"], "wi_knee_ttft", keep=classes(document))
    st.caption(plain_text(knee["cause"]["why"]))
    if knee["outside"]:
        st.warning(t("what_if.outside", why=plain_text(knee["outside"])))


def _faults(document: Mapping[str, Any]) -> None:
    st.markdown(f"**{t('what_if.fault_costs')}**")
    if not document["faults"]:
        st.caption(t("what_if.no_faults"))
        return
    rows: dict[str, list[str]] = {
        name: []
        for name in (
            t("what_if.load"), t("what_if.fault_name"), t("what_if.holds"), t("what_if.loses"),
            t("what_if.even_so"),
        )
    }  # fmt: skip
    for cell in document["faults"]:
        worst = cell["effects"][0] if cell["effects"] else None
        lost = "—"
        if worst is not None:
            points = estimate_of(worst["points"])
            lost = t(
                "what_if.points", points=f"{points.value:.2g}", group=worst["group"],
                low=f"{points.low:.2g}", high=f"{points.high:.2g}",
            )  # fmt: skip
            lost = f"{plain_text(lost)} {badge(points.kind)}"
        more = cell["replicas"]
        machine = cell["size"]["machine"]
        values = (
            plain_text(f"{cell['size']['growth']:g}x {machine.partition('/')[0]}"),
            t(f"what_if.fault.{word(cell['fault'])}"),
            t("what_if.yes") if cell["holds"] else t("what_if.no"), lost,
            "—" if more is None else f"{more['value']:.0f}",
        )  # fmt: skip
        for column, value in zip(rows.values(), values, strict=True):
            column.append(value)
    st.table(rows, border="horizontal", hide_index=True)


def _sizes_table(sizes: Sequence[Mapping[str, Any]]) -> None:
    names = (t("what_if.load"), t("what_if.replica"), t("what_if.figure.replicas"),
             t("what_if.formula"), t("what_if.figure.usd_per_month"),
             t("what_if.figure.usd_per_million_good_tokens"), t("what_if.kind"))  # fmt: skip
    rows: dict[str, list[str]] = {name: [] for name in names}
    for size in sizes:
        head = (f"{size['growth']:g}x", plain_text(size["machine"]))
        bracket = t("what_if.range", low=size["bracket"][0], high=size["bracket"][1])
        if size["replicas"] is None:
            gate = t("what_if.gate", gate=size["refused"]["gate"])
            values: tuple[str, ...] = (*head, "—", bracket, "—", "—", gate)
        else:
            count = estimate_of(size["replicas"])
            million = size["usd_per_million_good_tokens"]
            values = (
                *head, f"**{count.value:.0f}** {_between(count, '{:.0f}')}", bracket,
                _money(size["usd_per_month"], "{:,.0f}"),
                "—" if million is None else _money(million, "{:.3g}"), badge(count.kind),
            )  # fmt: skip
        for column, value in zip(rows.values(), values, strict=True):
            column.append(value)
    st.table(rows, border="horizontal", hide_index=True)


def _money(raw: Mapping[str, Any], pattern: str) -> str:
    one = estimate_of(raw)
    return f"{pattern.format(one.value)} {_between(one, pattern)} {badge(one.kind)}"


def _between(one: Any, pattern: str) -> str:
    if one.low == one.high:
        return ""
    ends = t("what_if.range", low=pattern.format(one.low), high=pattern.format(one.high))
    return f"({ends})"


__all__ = ["cheapest", "classes", "first_answer", "plan"]
