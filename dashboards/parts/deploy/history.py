"""Which policies were deployed, by whom, and what became of each; what differs between any two."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec
import streamlit as st

from dashboards.admin import AdminError
from dashboards.parts.deploy.current import ENDS, why
from dashboards.parts.live.door import complain
from dashboards.parts.live.html import Html, badge, joined, muted, table
from dashboards.parts.live.tables import HASH_SHOWN
from dashboards.state import said, t

if TYPE_CHECKING:
    from collections.abc import Sequence

    from controller.deployment.views import Diff, Row
    from dashboards.parts.live.door import Door

POLL_S = 5.0
ROWS_MOST = 25
TABLE_PX = 320


def history(door: Door) -> None:
    """The table, the steps of one, and the difference of two."""
    try:
        rows = door.admin.deployments()
    except AdminError as error:
        complain(door, error)
        return
    if not rows:
        st.caption(t("deploy.nothing_ever"))
        return
    st.html(history_table(rows[:ROWS_MOST]))
    if len(rows) > ROWS_MOST:
        st.caption(t("live.cut", shown=ROWS_MOST, all=len(rows)))
    by_id = {row.id: row for row in rows}

    def label(number: int | None) -> str:
        if number is None:
            return t("deploy.what_ruled")
        return f"{number} · {by_id[number].name}"

    left, right = st.columns(2)
    number = left.selectbox(t("deploy.of"), list(by_id), key="history_of", format_func=label)
    before = right.selectbox(
        t("deploy.compared"), [None, *by_id], key="history_before", format_func=label
    )
    with left, st.container(height=TABLE_PX, border=False):
        st.html(step_table(by_id[number]))
    with right, st.container(height=TABLE_PX, border=False):
        try:
            st.html(diff_table(door.admin.diff(number, before)))
        except AdminError as error:
            complain(door, error)


def history_table(rows: Sequence[Row]) -> Html:
    head = [
        "#", t("live.when"), t("deploy.policy"), t("deploy.hash"), t("deploy.by"),
        t("deploy.stage"), t("deploy.evidence"), t("live.why"),
    ]  # fmt: skip
    body = [
        [
            row.id, _time(row.at_s), row.name, row.hash[:HASH_SHOWN], row.by,
            badge(said(row.stage.replace("_", " ")), ENDS.get(row.stage, "--p0")),
            t("deploy.with" if row.evidence else "deploy.without"),
            joined([
                badge(t("deploy.override_short", why=row.override), "--late")
                if row.override else "",
                why(row, row.steps[-1]) if row.steps else "",
            ], " "),
        ]
        for row in rows
    ]  # fmt: skip
    return table(head, body)


def step_table(row: Row) -> Html:
    """Each step of a deployment, with its time and reason."""
    rows = [
        [
            _time(step.at_s), said(step.stage.replace("_", " ")),
            f"{step.share_permille / 10:g} %",
            joined([why(row, step), muted(_figures(step.figures))], "<br>"),
        ]
        for step in row.steps
    ]  # fmt: skip
    return table([t("live.when"), t("deploy.stage"), t("live.share"), t("live.why")], rows)


def diff_table(diff: Diff) -> Html:
    if not diff.changes:
        return muted(t("deploy.same"))
    rows = [[change.key, _value(change.before), _value(change.after)] for change in diff.changes]
    return table([t("live.key"), t("deploy.was"), t("deploy.is")], rows)


def _figures(figures: dict[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in figures.items())


def _value(value: object) -> str:
    return "-" if value is None else msgspec.json.encode(value).decode()


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")
