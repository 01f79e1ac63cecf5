"""The deployment that is under way: how far it is, and what it is judged by."""

from __future__ import annotations

import math
import time
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st

from dashboards.admin import AdminError
from dashboards.parts.charts import show_chart
from dashboards.parts.deploy.plan import timeline
from dashboards.parts.live.door import complain
from dashboards.parts.live.html import Html, badge, bar, joined, strip, strong, table, title
from dashboards.parts.live.tables import HASH_SHOWN, span
from dashboards.state import said, t

if TYPE_CHECKING:
    from controller.deployment.measured import Measured
    from controller.deployment.views import Current, Row, Step
    from dashboards.parts.charts import Chart
    from dashboards.parts.live.door import Door

POLL_S = 1.0
POINTS_MOST = 900
VERDICTS = {"go_on": "--good", "hold": "--late", "roll_back": "--failed"}
ENDS = {"done": "--good", "rolled_back": "--failed", "refused": "--failed"}


class Point(NamedTuple):
    """The measured figures as they were at a poll."""

    at_s: float
    candidate: dict[str, float | None]
    live: dict[str, float | None]


def current(door: Door) -> None:
    """One round: ask, remember, draw."""
    try:
        running = door.admin.current()
        rows = door.admin.deployments() if running is None else ()
    except AdminError as error:
        complain(door, error)
        return
    if running is None:
        _nothing(rows)
        return
    _under_way(running)


def _nothing(rows: tuple[Row, ...]) -> None:
    if not rows:
        st.info(t("deploy.nothing_ever"))
        return
    last = rows[0]
    step = last.steps[-1] if last.steps else None
    st.html(
        strip([
            strong(t("deploy.nothing")),
            t("deploy.last", id=last.id, name=last.name, hash=last.hash[:HASH_SHOWN]),
            badge(said(last.stage.replace("_", " ")), ENDS.get(last.stage, "--p5")),
            why(last, step) if step is not None else "",
        ])
    )  # fmt: skip


def why(row: Row, step: Step) -> str:
    """A step's reason. That with which a controller starts is its policy's name, and no words."""
    return step.why if step.why == row.name else said(step.why)


def _under_way(running: Current) -> None:
    st.html(
        strip([
            strong(t("deploy.number", id=running.id, name=running.name,
                     hash=running.hash[:HASH_SHOWN])),
            t("deploy.against", name=running.against, hash=running.against_hash[:HASH_SHOWN]),
            badge(t("deploy.share_now", percent=f"{running.share_permille / 10:g}"), "--p0"),
            badge(said(running.verdict.replace("_", " ")) or t("deploy.no_verdict"),
                  VERDICTS.get(running.verdict, "--p5")),
            said(running.why),
        ])
    )  # fmt: skip
    if running.override:
        st.warning(t("deploy.override_is", why=running.override), icon=":material/warning:")
    if running.plan is not None:
        st.html(timeline(running.plan.stages, running.stage_number))
        _progress(running)
    points = _remember(running)
    left, right = st.columns([3, 2])
    with left:
        _band(running, points)
    with right:
        st.html(arm_table(running))
        st.html(budget_table(running))
    if running.shadow is not None:
        with st.container(key="shadow"):
            title(t("deploy.shadow"))
            st.caption(shadow_text(running.shadow))
            st.html(shadow_table(running.shadow))
    st.caption(t("live.age", s="0.0"))


def _progress(running: Current) -> None:
    plan = running.plan
    assert plan is not None
    stage = plan.stages[running.stage_number]
    of = "stable_requests" if stage.kind == "shadow" else "canary_requests"
    seen = int(running.figures.get(of, 0))
    left, right = st.columns(2)
    left.progress(
        _share(running.stage_s, stage.least_s),
        t("deploy.time_of", now=span(running.stage_s), least=span(stage.least_s)),
    )
    right.progress(
        _share(seen, stage.least_requests),
        t("deploy.requests_of", now=seen, least=stage.least_requests),
    )


def _share(now: float, least: float) -> float:
    return min(1.0, now / least) if least else 1.0


# Predicted against measured


def _remember(running: Current) -> deque[Point]:
    every: dict[int, deque[Point]] = st.session_state.setdefault("deploy_points", {})
    if running.id not in every:
        every.clear()
        every[running.id] = deque(maxlen=POINTS_MOST)
    points = every[running.id]
    points.append(
        Point(
            time.time(), {each.figure: each.candidate for each in running.measured},
            {each.figure: each.live for each in running.measured},
        )
    )  # fmt: skip
    return points


def _band(running: Current, points: deque[Point]) -> None:
    figures = {each.figure: each for each in running.measured}
    if not figures:
        return
    name = st.selectbox(
        t("deploy.figure"), list(figures), key="deploy_band", format_func=figure_name,
    )  # fmt: skip
    show_chart(band_chart(figures[name], points), "band_chart")
    if all(each.high is None for each in running.measured):
        st.info(t("deploy.no_band"), icon=":material/help:")
    st.html(band_table(running.measured))


def figure_name(figure: str) -> str:
    """A figure of the band for people."""
    kind, _, sla = figure.partition("/")
    what = said("share of missed requests") if kind == "slo_miss_share" else f"TTFT p{kind[-2:]}"
    return f"{what} · {sla}" if sla else what


def band_chart(figure: Measured, points: deque[Point]) -> Chart:
    """What was measured of both policies, over the predicted band."""
    times = [
        datetime.fromtimestamp(point.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        for point in points
    ]  # fmt: skip
    misses = figure.figure.startswith("slo_miss_share")
    scale, unit = (100.0, "%") if misses else (1000.0, "ms")
    line: dict[str, Any] = {"type": "scatter", "x": times}
    traces: list[dict[str, Any]] = []
    if figure.low is not None and figure.high is not None:
        for name, value, more in (
            ("", figure.low, {"showlegend": False}),
            ("predicted band", figure.high, {"fill": "tonexty", "fillcolor": "--ok-bg"}),
        ):
            traces.append({
                **line, "mode": "lines", "name": name, "y": [scale * value] * len(times),
                "line": {"color": "--good", "width": 1}, "hoverinfo": "skip", **more,
            })  # fmt: skip
    for name, values, colour in (
        ("live policy", [point.live.get(figure.figure) for point in points], "--p1"),
        ("candidate", [point.candidate.get(figure.figure) for point in points], "--p0"),
    ):
        traces.append({
            **line, "mode": "lines", "name": name,
            "y": [None if value is None else scale * value for value in values],
            "line": {"color": colour, "width": 2},
            "hovertemplate": f"%{{y:.3g}} {unit}<extra></extra>",
        })  # fmt: skip
    label = "missed, % of requests" if misses else "time to first token, ms"
    layout = {
        "uirevision": figure.figure,
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "time, UTC"}, "type": "date"},
        "yaxis": {"title": {"text": label}, "rangemode": "tozero"},
    }
    return {"traces": traces, "layout": layout, "height": 210}


def band_table(measured: tuple[Measured, ...]) -> Html:
    rows = []
    for each in measured:
        verdict, colour = _where(each)
        band = "-"
        if each.low is not None and each.high is not None:
            band = f"{_shown(each.figure, each.low)} .. {_shown(each.figure, each.high)}"
        rows.append([
            figure_name(each.figure), band,
            f"{_shown(each.figure, each.candidate)} ({each.candidate_requests})",
            f"{_shown(each.figure, each.live)} ({each.live_requests})",
            badge(t(f"deploy.{verdict}"), colour),
        ])  # fmt: skip
    head = [
        t("deploy.figure"), t("deploy.predicted"), t("deploy.candidate"), t("deploy.live"), "",
    ]  # fmt: skip
    return table(head, rows, (1, 2, 3))


def _where(figure: Measured) -> tuple[str, str]:
    if figure.candidate is None:
        return "unknown", "--p5"
    if figure.low is None or figure.high is None:
        return "unpredicted", "--p5"
    if figure.candidate > figure.high:
        return "above", "--failed"
    return ("below", "--good") if figure.candidate < figure.low else ("inside", "--good")


def _shown(figure: str, value: float | None) -> str:
    if value is None:
        return "-"
    if figure.startswith("slo_miss_share"):
        return f"{100 * value:.1f} %"
    return f"{1000 * value:,.0f} ms"


# What it is judged by


def arm_table(running: Current) -> Html:
    """Both policies' requests in this stage."""
    rows = []
    for arm, colour in (("canary", "--p0"), ("stable", "--p1")):
        requests = int(running.figures.get(f"{arm}_requests", 0))
        misses = int(running.figures.get(f"{arm}_misses", 0))
        hards = int(running.figures.get(f"{arm}_hards", 0))
        name = t("deploy.candidate" if arm == "canary" else "deploy.live")
        share = f"{100 * misses / requests:.1f} %" if requests else "-"
        rows.append([badge(name, colour), requests, misses, share, hards])
    head = ["", t("live.requests"), t("deploy.missed"), t("live.share"), t("deploy.hard")]
    return table(head, rows, (1, 2, 3, 4))


def budget_table(running: Current) -> Html:
    """What it may cost, and how much of that is used up."""
    figures = running.figures
    rows: list[list[object]] = []
    hurt, budget, most = (
        figures.get(name, 0.0) for name in ("hurt", "hurt_budget", "hurt_most")
    )  # fmt: skip
    if most:
        used = max(0.0, hurt) / most
        rows.append([
            t("deploy.hurt"), t("deploy.hurt_of", hurt=f"{hurt:.1f}", budget=f"{budget:.0f}",
                                most=f"{most:.0f}"),
            bar(used, "--failed" if hurt > budget else "--late", budget / most),
        ])  # fmt: skip
    evidence = figures.get("evidence")
    if evidence is not None and running.plan is not None:
        limit = 1000 / running.plan.alpha_permille
        rows.append([
            t("deploy.harm"), t("deploy.harm_of", evidence=f"{evidence:.3g}", limit=f"{limit:.0f}"),
            bar(math.log10(max(1.0, evidence)) / math.log10(limit), "--failed"),
        ])  # fmt: skip
    ratio = figures.get("ratio_most")
    shown = t("deploy.ratio_is", ratio=f"{ratio:g}") if ratio is not None else t("deploy.ratio_not")
    rows.append([t("deploy.ratio"), shown, ""])
    rows.append([t("deploy.held"), f"{figures.get('held_windows', 0):.0f}", ""])
    return table([t("deploy.judged_by"), "", ""], rows)


# Shadow


def shadow_text(shadow: dict[str, int]) -> str:
    compared = shadow.get("compared", 0)
    if not compared:
        return t("deploy.shadow_none")
    same = 100 * shadow.get("same_replica", 0) / compared
    return t("deploy.shadow_same", percent=f"{same:.1f}", compared=compared)


def shadow_table(shadow: dict[str, int]) -> Html:
    """What it would have done, in columns, since these are many short rows."""
    items = [(said(name.replace("_", " ")), count) for name, count in shadow.items()]
    columns = 3
    each = -(-len(items) // columns)
    parts = [
        joined([
            Html('<div style="flex:1;min-width:200px">'),
            table([t("live.what"), t("live.count")], items[at : at + each], (1,)), Html("</div>"),
        ])
        for at in range(0, len(items), each)
    ]  # fmt: skip
    return Html(f'<div style="display:flex;gap:16px;flex-wrap:wrap">{joined(parts)}</div>')
