"""What else the admin API offers, as it says itself: drawn by its shape, not wired by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from dashboards.admin import AdminError
from dashboards.parts.live.door import Door, complain
from dashboards.parts.live.html import table
from dashboards.parts.live.tables import clock
from dashboards.parts.plain import plain_text
from dashboards.state import said, t

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dashboards.admin import Answer, Way

POLL_S = 5.0
DRAWN = frozenset(
    {
        "/status", "/fleet", "/openapi.json", "/alerts", "/chains", "/deployments",
        "/deployments/current",
    }
)  # fmt: skip
"""Paths that panels of this page or of the deployments' page show."""
TEXT_MOST = 20_000
ROWS_MOST = 100
COLUMNS_MOST = 12


def readable(ways: Sequence[Way]) -> list[Way]:
    """What can be read as it is, and no panel shows."""
    return [
        way for way in ways
        if way.method == "GET" and "{" not in way.path and way.path not in DRAWN
    ]  # fmt: skip


def acting(ways: Sequence[Way]) -> list[Way]:
    """What does something; it is listed, and never called from here."""
    return [way for way in ways if way.method != "GET"]


def found(door: Door) -> None:
    """The panel."""
    try:
        ways = _ways(door)
    except AdminError as error:
        complain(door, error)
        return
    shown = readable(ways)
    names = {way.path: way.summary for way in shown}
    path = st.pills(t("live.found_paths"), list(names), default=next(iter(names), None),
                    key="found_path")  # fmt: skip
    if path in names:
        st.caption(said(names[path]))
        _answer(door, path)
    with st.expander(t("live.found_acts")):
        head = [t("live.method"), t("live.path"), t("live.does")]
        rows = [[way.method, way.path, said(way.summary)] for way in acting(ways)]
        st.html(table(head, rows))


def _ways(door: Door) -> tuple[Way, ...]:
    """Asked once a session and controller: it changes with the controller's version alone."""
    known: dict[str, tuple[Way, ...]] = st.session_state.setdefault("live_ways", {})
    if door.admin.url not in known:
        known[door.admin.url] = door.admin.ways()
    return known[door.admin.url]


def _answer(door: Door, path: str) -> None:
    try:
        answer = door.admin.get(path)
    except AdminError as error:
        complain(door, error)
        return
    with st.container(height=300, border=True):
        draw(answer)


def draw(answer: Answer) -> None:
    """An answer by its shape: lists of objects as tables, objects by key, all else as text."""
    if answer.kind != "application/json":
        text = answer.body[:TEXT_MOST].decode("utf-8", "replace")
        st.code(text, language="yaml" if "yaml" in answer.kind else None)
        if len(answer.body) > TEXT_MOST:
            st.caption(t("live.cut", shown=TEXT_MOST, all=len(answer.body)))
        return
    try:
        value = msgspec.json.decode(answer.body)
    except msgspec.MsgspecError as error:
        st.error(plain_text(str(error)))
        return
    _value(value)


def _value(value: Any) -> None:
    if isinstance(value, dict):
        plain = {name: item for name, item in value.items() if not _is_table(item)}
        if plain:
            st.html(table([t("live.key"), t("live.value")],
                          [[name, _cell(item, name)] for name, item in plain.items()]))  # fmt: skip
        for name, item in value.items():
            if name not in plain:
                st.caption(str(name).replace("_", " "))
                _value(item)
    elif _is_table(value):
        keys = list(dict.fromkeys(key for row in value[:ROWS_MOST] for key in row))[:COLUMNS_MOST]
        st.html(
            table([key.replace("_", " ") for key in keys],
                  [[_cell(row.get(key), key) for key in keys] for row in value[:ROWS_MOST]])
        )  # fmt: skip
        if len(value) > ROWS_MOST:
            st.caption(t("live.cut", shown=ROWS_MOST, all=len(value)))
    elif isinstance(value, list):
        st.html(table([t("live.value")], [[_cell(item, "")] for item in value[:ROWS_MOST]]))
        if not value:
            st.caption(t("live.nothing"))
    else:
        st.write(_cell(value, ""))


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def _cell(value: Any, key: str) -> str:
    """A value in a table. Names that end in ``_s`` and values since 1970 make a time of day."""
    if isinstance(value, float) and key.endswith("at_s") and value > 1e9:
        return clock(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, dict | list):
        return msgspec.json.encode(value).decode()
    return "-" if value is None or value == "" else str(value)
