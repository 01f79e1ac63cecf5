"""What a forecast has shown: the load with bands, errors beside simple forecasters, its worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from dashboards.parts.charts import show_chart
from dashboards.parts.forecast.charts import bands_chart, errors_chart, worth_chart
from dashboards.parts.job_panel import job_panel
from dashboards.state import said, t
from dashboards.work.forecast import RESULT

if TYPE_CHECKING:
    from dashboards.jobs import Job

OURS, LAST = "forecaster", "last value"


def result(job: Job) -> None:
    """Draw it."""
    found = _read(str(job.folder / RESULT), job.ended_s)
    if found is None:
        st.error(t("forecast.gone"))
        return
    with st.container(key="forecast_result"):
        horizons = [band["horizon"] for band in found["bands"]]
        names = {
            place: t("forecast.minutes", n=f"{horizon * found['window_s'] / 60:g}")
            for place, horizon in enumerate(horizons)
        }
        place = st.segmented_control(
            t("forecast.shown"), list(names), default=min(1, len(names) - 1),
            key=f"forecast_shown_{job.id}", format_func=names.__getitem__,
        )  # fmt: skip
        place = 0 if place is None else place
        _numbers(found, horizons[place])
        st.markdown(t("forecast.bands"), help=t("forecast.bands_help"))
        show_chart(bands_chart(found, place), f"forecast_bands_{job.id}")
        for note in found["notes"]:
            st.caption(note)
        left, right = st.columns(2, gap="medium")
        with left:
            st.markdown(t("forecast.wape"), help=t("forecast.wape_help"))
            show_chart(errors_chart(found, "wape"), f"forecast_wape_{job.id}")
        with right:
            st.markdown(t("forecast.pinball"), help=t("forecast.pinball_help"))
            show_chart(errors_chart(found, "pinball"), f"forecast_pinball_{job.id}")
        _table(found)
    _worth(job, found)


def _numbers(found: dict[str, Any], horizon: int) -> None:
    """Of the horizon that is looked at."""
    by_name = {each["name"]: each for each in found["rated"] if each["horizon"] == horizon}
    if OURS not in by_name:
        return
    own, last = by_name[OURS], by_name[LAST]
    columns = st.columns(3)
    for column, figure in zip(columns, ("wape", "pinball"), strict=False):
        against = 100 * (own[figure] / last[figure] - 1) if last[figure] else None
        column.metric(
            t(f"forecast.{figure}_name"), f"{100 * own[figure]:.2f} %",
            None if against is None else t("forecast.than_last", percent=f"{against:+.0f}"),
            delta_color="inverse",
        )  # fmt: skip
    columns[2].metric(
        t("forecast.coverage"), f"{100 * own['coverage']:.1f} %",
        t("forecast.of_windows", n=own["windows"]), delta_color="off", delta_arrow="off",
        help=t("forecast.coverage_help"),
    )  # fmt: skip


def _table(found: dict[str, Any]) -> None:
    rows = []
    for name in dict.fromkeys(each["name"] for each in found["rated"]):
        row: dict[str, Any] = {t("forecast.who"): said(name)}
        for each in found["rated"]:
            if each["name"] == name:
                ahead = t("forecast.minutes", n=f"{each['horizon'] * found['window_s'] / 60:g}")
                row[ahead] = f"{100 * each['wape']:.2f} / {100 * each['pinball']:.2f}"
        rows.append(row)
    st.caption(t("forecast.table"))
    st.dataframe(rows, hide_index=True, width="stretch", key="forecast_table")


def _worth(job: Job, found: dict[str, Any]) -> None:
    st.subheader(t("forecast.worth"), divider="gray")
    st.caption(t("forecast.worth_about"))
    request = {"forecast": job.id, "seed": int(job.request["seed"])}
    done = job_panel(
        "forecast_worth", request, label=t("forecast.worth_run"), key="forecast_worth",
        disabled=found["tokens"],
    )  # fmt: skip
    if found["tokens"]:
        st.caption(t("forecast.worth_requests"))
    if done is None:
        return
    worth = _read(str(done.folder / "worth.json"), done.ended_s)
    if worth is None:
        st.error(t("forecast.gone"))
        return
    with st.container(key="forecast_worth_result"):
        hours, level = worth["hours"], f"{100 * worth['level']:g}"
        columns = st.columns(max(1, len(hours)))
        own = hours.get(OURS)
        for column, (name, value) in zip(columns, hours.items(), strict=False):
            bound = "≤ " if name in worth["at_most"] else ""
            change = None
            if own is not None and name != OURS and value and not bound:
                change = t(
                    "forecast.saves", bound="≤ " if OURS in worth["at_most"] else "",
                    percent=f"{100 * (own / value - 1):+.0f}",
                )  # fmt: skip
            column.metric(said(name), f"{bound}{value:.1f} GPU h", change, delta_color="off",
                          delta_arrow="off")  # fmt: skip
        left = [name for name in worth["curves"] if name not in hours]
        text = t(
            "forecast.worth_text",
            level=level,
            begin=f"{worth['begin_day']:.2f}",
            long=f"{worth['hours_long']:g}",
            offered=f"{worth['offered']:,}",
        )
        if left:
            never = t("forecast.worth_never", names=", ".join(map(said, left)), level=level)
            text = f"{text} {never}"
        st.caption(text)
        show_chart(worth_chart(worth), f"forecast_worth_{done.id}")


@st.cache_data(max_entries=50, show_spinner=False)
def _read(path: str, ended_s: float) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = msgspec.json.decode(Path(path).read_bytes())
    except OSError:
        return None
    return found
