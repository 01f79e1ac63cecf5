"""The files of a replay, made or read only when they are asked for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import streamlit as st

from dashboards.state import t
from twin.timeline import write_timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dashboards.jobs import Job
    from dashboards.scenario import Scenario
    from twin.timeline import Which

TIMELINE_REQUESTS = 2000


def downloads(job: Job, labels: Sequence[str], scenario: Scenario) -> None:
    """The report as a page and as figures, and requests as a timeline."""
    page, figures, timeline, _ = st.columns([1, 1, 1, 1.4])
    page.download_button(
        t("replay.report_html"), partial(_read, job.folder / "report.html"), "report.html",
        "text/html", key="get_html", on_click="ignore", width="stretch",
    )  # fmt: skip
    figures.download_button(
        t("replay.report_json"), partial(_read, job.folder / "report.json"), "report.json",
        "application/json", key="get_json", on_click="ignore", width="stretch",
    )  # fmt: skip
    with timeline.popover(t("replay.timeline"), width="stretch"):
        _timeline(job, labels, scenario)


def _timeline(job: Job, labels: Sequence[str], scenario: Scenario) -> None:
    st.caption(t("replay.timeline_what", most=f"{TIMELINE_REQUESTS:,}"))
    label = st.selectbox(t("replay.policy"), labels, key="timeline_policy")
    which: Which = st.radio(
        t("replay.which"), ("slowest", "first"), key="timeline_which", horizontal=True,
        format_func=lambda name: t(f"replay.{name}", most=f"{TIMELINE_REQUESTS:,}"),
    )  # fmt: skip
    name = f"timeline-{label}-{which}-{TIMELINE_REQUESTS}.json"
    st.download_button(
        name, partial(_made, job.folder / label, scenario, which), name, "application/json",
        key="get_timeline", on_click="ignore", width="stretch",
    )  # fmt: skip


def _read(path: Path) -> bytes:
    return path.read_bytes()


def _made(folder: Path, scenario: Scenario, which: Which) -> bytes:
    with TemporaryDirectory() as scratch:
        target = Path(scratch) / "timeline.json"
        write_timeline(
            folder / "requests.parquet", target, faults=scenario.parsed_faults(), which=which,
            most=TIMELINE_REQUESTS,
        )  # fmt: skip
        return target.read_bytes()
