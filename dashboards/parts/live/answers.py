"""How far answers can be trusted: their scores, second runs, and what those are paid from.

The controller tells sums since it started. What it told before is kept here, in the session, while
the page polls.
"""

from __future__ import annotations

from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

import streamlit as st

from dashboards.parts.live.html import Html, badge, bar, joined, muted, strip, strong, table
from dashboards.state import said, t

if TYPE_CHECKING:
    from controller.admin.status import AnswersView, BudgetView, Status
    from dashboards.parts.charts import Chart

POINTS_MOST = 600
"""A quarter of an hour, where answers are scored all the time."""
WINDOW_S = 60.0
"""Over which the share of low scores is taken."""
STATUSES = {
    "match": "--good", "mismatch": "--failed", "skipped_budget": "--late",
    "skipped_stream": "--shed", "not_needed": "--p5",
}  # fmt: skip
"""What may become of a verification, in this order."""
STATUSES_MOST = 20


class Scores(NamedTuple):
    """What was scored by then, since the controller started."""

    at_s: float
    """When the page saw it, since 1970."""
    scored: int
    mean_permille: int
    below: int
    """Scores below the threshold of a second run."""


History = deque[Scores]


def history_of(controller: str) -> History:
    """What this session has seen of a controller's scores."""
    every: dict[str, History] = st.session_state.setdefault("live_scores", {})
    return every.setdefault(controller, deque(maxlen=POINTS_MOST))


def remember(history: History, status: Status, now_s: float) -> None:
    """Add what is new. A controller that began anew counts from 0, and so does the history."""
    if status.answers is None or status.answers.confidence.mean_permille is None:
        return
    told = status.answers.confidence
    if history and told.scored < history[-1].scored:
        history.clear()
    if not history or told.scored != history[-1].scored:
        history.append(Scores(now_s, told.scored, told.mean_permille or 0, told.below_verify))


def lately_below(history: History) -> list[float | None]:
    """At each point the share of low scores among those of the minute before, or since the point
    before, where that is older; None: there was none."""
    points = list(history)
    found: list[float | None] = []
    first = 0
    for place, point in enumerate(points):
        while first + 1 < place and points[first + 1].at_s <= point.at_s - WINDOW_S:
            first += 1
        before = points[first]
        scored = point.scored - before.scored
        found.append((point.below - before.below) / scored if scored > 0 else None)
    return found


def confidence_strip(answers: AnswersView) -> Html:
    """What was scored, in one line."""
    told = answers.confidence
    if told.mean_permille is None:
        return strip([t("live.score.scored", count=0)])
    share = 100 * told.below_verify / told.scored
    low = t("live.score.below", count=told.below_verify, percent=f"{share:.1f}")
    return strip([
        t("live.score.scored", count=f"{told.scored:,}"),
        strong(t("live.score.mean", value=f"{told.mean_permille / 1000:.3f}")),
        badge(low, "--late" if told.below_verify else "--good"),
    ])  # fmt: skip


def score_chart(history: History) -> Chart:
    """The mean so far, and how many of the last minute's scores were low on an axis of its own."""
    line: dict[str, Any] = {
        "type": "scatter", "mode": "lines",
        "x": [
            datetime.fromtimestamp(point.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
            for point in history
        ],
    }  # fmt: skip
    traces = [
        {
            **line, "name": "low of the last minute, %", "yaxis": "y2", "fill": "tozeroy",
            "y": [None if share is None else 100 * share for share in lately_below(history)],
            "line": {"color": "--late", "width": 1},
            "hovertemplate": "%{y:.1f} %<extra></extra>",
        },
        {
            **line, "name": "mean since the start",
            "y": [point.mean_permille / 1000 for point in history],
            "line": {"color": "--p1", "width": 2}, "hovertemplate": "%{y:.3f}<extra></extra>",
        },
    ]  # fmt: skip
    layout = {
        "uirevision": "scores", "hovermode": "x unified",
        "xaxis": {"title": {"text": "time, UTC"}, "type": "date"},
        "yaxis": {"title": {"text": "confidence"}, "range": [0, 1]},
        "yaxis2": {
            "title": {"text": "low, %"}, "overlaying": "y", "side": "right", "showgrid": False,
            "range": [0, 100],
        },
        "margin": {"r": 56},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": 180}


def verification_table(answers: AnswersView) -> Html:
    """Answers by what became of their verification."""
    told = answers.verification
    total = sum(told.values()) or 1
    names = [*STATUSES, *(name for name in told if name not in STATUSES)][:STATUSES_MOST]
    rows = [
        [
            badge(said(name.replace("_", " ")), STATUSES.get(name, "--p5")),
            t(f"live.verify.{name}") if name in STATUSES else "", count := told.get(name, 0),
            f"{100 * count / total:.1f} %", bar(count / total, STATUSES.get(name, "--p5")),
        ]
        for name in names
    ]  # fmt: skip
    head = [t("live.verify.status"), t("live.verify.means"), t("live.verify.answers"),
            t("live.share"), ""]  # fmt: skip
    return table(head, rows, (2, 3))


def budget_strip(answers: AnswersView) -> Html:
    """Second runs, and what is there for more."""
    runs = strong(t("live.verify.runs", count=f"{answers.second_runs:,}"))
    if answers.budget is None:
        return joined([strip([runs, muted(t("live.verify.no_budget"))])])
    return joined([strip([runs, _saved(answers.budget)]), _bar(answers.budget)])


def _saved(budget: BudgetView) -> str:
    return t(
        "live.verify.saved", saved=f"{budget.saved_tokens:,}", burst=f"{budget.burst_tokens:,}",
        percent=f"{budget.budget_permille / 10:g}",
    )  # fmt: skip


def _bar(budget: BudgetView) -> Html:
    share = budget.saved_tokens / budget.burst_tokens if budget.burst_tokens > 0 else 0.0
    return bar(share, "--good" if budget.saved_tokens > 0 else "--failed")
