"""Predicted against measured: what each replica's profile says of its steps, and what they took.

The controller tells the last reading. What it told before is kept here, in the session, while the
page polls.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st

from dashboards.state import t

if TYPE_CHECKING:
    from controller.admin.status import Status
    from dashboards.parts.charts import Chart

POINTS_MOST = 600
"""Of each replica: an hour, where steps are read every 5 s."""
REPLICAS_MOST = 300
WINDOW_S = 300.0
"""Over which the running error is taken."""


class Point(NamedTuple):
    """A reading of a replica's steps."""

    at_s: float
    """When the page saw it, since 1970."""
    read: int
    """Steps that were read by then."""
    measured_ms: float
    predicted_ms: float

    @property
    def error(self) -> float:
        """Measured over predicted, less 1."""
        return self.measured_ms / self.predicted_ms - 1


History = dict[str, deque[Point]]


def history_of(controller: str) -> History:
    """What this session has seen of a controller's replicas, by their names."""
    every: dict[str, History] = st.session_state.setdefault("live_history", {})
    return every.setdefault(controller, {})


def remember(history: History, status: Status, now_s: float) -> None:
    """Add what is new."""
    for replica in status.replicas:
        if replica.step_ms_predicted <= 0 or replica.steps_read <= 0:
            continue
        if replica.name not in history and len(history) >= REPLICAS_MOST:
            continue
        points = history.setdefault(replica.name, deque(maxlen=POINTS_MOST))
        if not points or points[-1].read != replica.steps_read:
            points.append(
                Point(now_s, replica.steps_read, replica.step_ms_measured,
                      replica.step_ms_predicted)
            )  # fmt: skip


def chosen(history: History, replica: str) -> list[Point]:
    """The points of one replica, or, with an empty name, of all, in order."""
    if replica:
        return list(history.get(replica, ()))
    return sorted(point for points in history.values() for point in points)


def running_error(points: list[Point], now_s: float) -> tuple[float, float, int] | None:
    """Of the last minutes: the error as it is, its size on average, and of how many readings;
    None: there were none."""
    recent = [point.error for point in points if now_s - point.at_s <= WINDOW_S]
    if not recent:
        return None
    return mean(recent), mean(abs(error) for error in recent), len(recent)


def predicted_chart(points: list[Point]) -> Chart:
    """Both lines, and the error beside them on an axis of its own."""
    times = [
        datetime.fromtimestamp(point.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
        for point in points
    ]  # fmt: skip
    line: dict[str, Any] = {"type": "scatter", "x": times}
    traces = [
        {
            **line, "mode": "lines", "name": "error, %", "yaxis": "y2",
            "y": [100 * point.error for point in points], "fill": "tozeroy",
            "line": {"color": "--shed", "width": 1},
            "hovertemplate": "%{y:+.2f} %<extra></extra>",
        },
        {
            **line, "mode": "lines+markers", "name": "measured", "marker": {"size": 5},
            "y": [point.measured_ms for point in points], "line": {"color": "--p1", "width": 2},
            "hovertemplate": "%{y:.3f} ms<extra></extra>",
        },
        {
            **line, "mode": "lines", "name": "predicted",
            "y": [point.predicted_ms for point in points],
            "line": {"color": "--p0", "width": 2, "dash": "dot"},
            "hovertemplate": "%{y:.3f} ms<extra></extra>",
        },
    ]  # fmt: skip
    widest = max([5.0, *(120 * abs(point.error) for point in points)])
    layout = {
        "uirevision": "predicted", "hovermode": "x unified",
        "xaxis": {"title": {"text": "time, UTC"}, "type": "date"},
        "yaxis": {"title": {"text": "a step, ms"}, "rangemode": "tozero"},
        "yaxis2": {
            "title": {"text": "error, %"}, "overlaying": "y", "side": "right", "showgrid": False,
            "range": [-widest, widest], "tickmode": "auto", "nticks": 5,
        },
        "margin": {"r": 56},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": 220}


def error_text(points: list[Point], now_s: float) -> str:
    """The running error in words."""
    found = running_error(points, now_s)
    if found is None:
        return t("live.no_error_yet")
    error, size, readings = found
    return t(
        "live.running_error", error=f"{100 * error:+.2f}", size=f"{100 * size:.2f}",
        readings=readings, minutes=f"{WINDOW_S / 60:.0f}",
    )  # fmt: skip
