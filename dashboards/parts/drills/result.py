"""What came of a drill: four criteria, measured beside the twin, what people were told."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import streamlit as st

from controller.drills.measure import DrillResult
from dashboards.parts.drills.form import BUILT_IN, command, token_file
from dashboards.parts.job_panel import ended_badly, progress
from dashboards.parts.live.html import Html, badge, muted, strong, table
from dashboards.parts.live.tables import clock
from dashboards.parts.plain import plain_text
from dashboards.state import said, t
from dashboards.work.drill import RESULT, TAKEN_BACK

if TYPE_CHECKING:
    from dashboards.jobs import Job

FIGURES = {
    "isolated_s": "isolated_s", "recovered_s": "recovered_s", "offered": "", "answered": "",
    "late": "", "degraded": "degraded", "refused": "", "failed": "failed", "avoidable": "",
    "lost": "", "serving_least": "",
}  # fmt: skip
"""Those of ``DrillFigures`` that are shown, and which ``Difference`` is theirs; empty: none is."""


def shown(job: Job) -> None:
    """A drill that runs, or what came of it."""
    if job.open:
        st.markdown(f"**{_heading(job)}**")
        if job.request["target"] != BUILT_IN:
            st.caption(t("drills.cancel_about"))
        progress(job.id, "drill")
        return
    st.markdown(f"#### {_heading(job)}")
    if job.state == "done":
        found = found_by(job)
        if found is None:
            st.error(t("drills.gone"))
        else:
            result(job, found)
    elif job.state == "cancelled" and job.began_s:
        if (job.folder / TAKEN_BACK).exists():
            st.info(t("drills.taken_back"))
        else:
            st.warning(t("drills.not_taken_back", log=job.folder / "log.txt"))
    else:
        ended_badly(job)
        if job.state == "died" and job.request["target"] != BUILT_IN:
            st.warning(t("drills.look_after"))
    with st.expander(t("drills.command")):
        text = command(job.request, token_file(job.request["target"]))
        st.code(text, language="bash", wrap_lines=True)


def found_by(job: Job) -> DrillResult | None:
    """What a drill has found; None: it has not ended well, or its file is gone."""
    return _read(str(job.folder / RESULT), job.ended_s) if job.state == "done" else None


def result(job: Job, found: DrillResult) -> None:
    """All of it."""
    with st.container(key="drill_result"):
        failed = [each for each in found.criteria if not each.passed]
        if failed:
            st.error(t("drills.some_failed", count=len(failed), of=len(found.criteria)),
                     icon=":material/block:")  # fmt: skip
        else:
            st.success(t("drills.all_passed", of=len(found.criteria)), icon=":material/verified:")
        st.caption(t("drills.was_done", what=plain_text(found.what), at=clock(found.at)))
        if found.simulated:
            st.caption(t("drills.simulated", what=plain_text(found.simulated)))
        st.html(criteria_table(found))
        st.markdown(f"**{t('drills.figures')}**")
        st.html(figure_table(found))
        st.caption(t("drills.figures_about"))
        if found.not_predicted:
            st.info(t("drills.not_predicted", why=plain_text(found.not_predicted)))
        st.markdown(f"**{t('live.panels.alerts')}**")
        if found.measured.alerts:
            st.html(alert_table(found))
        else:
            st.caption(t("drills.no_alert"))
        if found.callers:
            counted = ", ".join(f"{said(name)} {count}" for name, count in found.callers.items())
            st.caption(t("drills.callers", counted=counted))
        st.download_button(
            t("drills.download"), msgspec.json.format(msgspec.json.encode(found)),
            f"drill-{job.id}.json", "application/json", key="drill_download",
        )  # fmt: skip


def criteria_table(found: DrillResult) -> Html:
    """Each with its reason."""
    rows = [
        [
            badge(t("drills.passed"), "--good") if each.passed
            else badge(t("drills.failed"), "--failed"),
            strong(said(each.name)), each.why,
        ]
        for each in found.criteria
    ]  # fmt: skip
    return table([t("drills.verdict"), t("drills.criterion"), t("live.why")], rows)


def figure_table(found: DrillResult) -> Html:
    """Measured, predicted, and how far that was off."""
    errors = {each.figure: f"{each.error_pct:.1f} %" for each in found.differences}
    rows = [
        [
            t(f"drills.figure.{name}"), _value(getattr(found.measured, name)),
            muted("-") if found.predicted is None else _value(getattr(found.predicted, name)),
            errors.get(difference, ""),
        ]
        for name, difference in FIGURES.items()
    ]  # fmt: skip
    head = [t("drills.what_of_it"), t("drills.measured"), t("drills.twin"), t("drills.off_by")]
    return table(head, rows, (1, 2, 3))


def alert_table(found: DrillResult) -> Html:
    """What people were told, and how soon."""
    rows = [
        [f"{each.after_s:.3f} s", strong(each.key), said(each.cause), said(each.action) or "-"]
        for each in found.measured.alerts
    ]
    head = [t("drills.after"), t("live.key"), t("live.cause"), t("live.action")]
    return table(head, rows, (0,))


def _heading(job: Job) -> str:
    asked = job.request
    target = t("drills.demo") if asked["target"] == BUILT_IN else asked["target"]
    return t(
        "drills.heading", kind=asked["kind"], target=plain_text(target),
        seconds=f"{asked['for_s']:g}", at=clock(asked["asked_s"]),
    )  # fmt: skip


def _value(value: float | int | None) -> str:
    if value is None:
        return t("drills.never")
    return f"{value:.3f} s" if isinstance(value, float) else str(value)


@st.cache_data(max_entries=50, show_spinner=False)
def _read(path: str, ended_s: float) -> DrillResult | None:
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=DrillResult)
    except (OSError, msgspec.MsgspecError):
        return None
