"""Charts that the twin describes as plain values, drawn in the browser's theme and language."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import streamlit as st

from dashboards.state import colours, said, t
from twin.report.colours import coloured

if TYPE_CHECKING:
    from collections.abc import Collection

Chart = dict[str, Any]
CONFIG = {"displaylogo": False, "displayModeBar": False, "responsive": True}


def show_chart(
    chart: Chart, key: str, *, legend: bool = True, select: bool = False,
    keep: Collection[str] = (),
) -> Any:  # fmt: skip
    """Draw ``chart``: ``traces``, ``layout`` and ``height``, as ``twin.report.charts`` makes them,
    with names of colours and English texts.

    Args:
        select: points can be clicked; then what was clicked is returned, as ``st.plotly_chart``
            says it.
        keep: names that are no words, such as those of policies: they are not translated.
    """
    layout = chart["layout"]
    ink, grid, line = "--ink", "--grid", "--line"
    axes = {
        name: {"gridcolor": grid, "linecolor": line, "zerolinecolor": line, "automargin": True}
        | value
        for name, value in layout.items() if name.startswith(("xaxis", "yaxis"))
    }  # fmt: skip
    dress = {
        "height": chart["height"] + (40 if legend else 0), "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)", "font": {"size": 12, "color": ink},
        "hoverlabel": {"bgcolor": "--card", "bordercolor": line, "font": {"color": ink}},
        "showlegend": legend, "legend": {
            "orientation": "h", "y": 1.02, "yanchor": "bottom", "traceorder": "normal",
        },
        "hovermode": "closest",
    } | layout | axes  # fmt: skip
    dress["margin"] = {"l": 56, "r": 14, "t": 34 if legend else 10, "b": 44} | layout.get(
        "margin", {}
    )
    traces = [{k: v for k, v in one.items() if k != "role"} for one in chart["traces"]]
    figure = _translated(coloured({"data": traces, "layout": dress}, colours()), keep)
    figure = _checked(msgspec.json.encode(figure))
    how: dict[str, Any] = {"on_select": "rerun", "selection_mode": "points"} if select else {}
    return st.plotly_chart(figure, key=key, theme=None, config=CONFIG, width="stretch", **how)


@st.cache_resource(show_spinner=False, max_entries=256)
def _checked(figure: bytes) -> Any:
    """As Plotly's own figure, whose checks take far longer than all the rest: once for each."""
    from plotly.graph_objects import Figure

    return Figure(msgspec.json.decode(figure))


def tail(chart: Chart) -> Chart:
    """A distribution as the share of what is slower, on a log axis: there the tail shows."""
    traces = []
    for one in chart["traces"]:
        if one.get("role") == "limit":
            traces.append({**one, "y": [1e-9, 1]})
            continue
        points = [(x, 1 - y) for x, y in zip(one["x"], one["y"], strict=True) if y < 1]
        hover = f"{one['name']}: %{{y:.2%}}, %{{x:.3s}}s<extra></extra>"
        traces.append({**one, "x": [x for x, _ in points], "y": [y for _, y in points],
                       "hovertemplate": hover})  # fmt: skip
    axis = {
        "type": "log", "range": [-4, 0.03], "tickvals": [1e-4, 1e-3, 1e-2, 0.1, 1],
        "ticktext": [".01 %", ".1 %", "1 %", "10 %", "100 %"],
        "title": {"text": t("charts.slower")},
    }  # fmt: skip
    return {**chart, "traces": traces, "layout": {**chart["layout"], "yaxis": axis}}


def _translated(value: Any, keep: Collection[str], key: str = "") -> Any:
    """Titles, names and tick texts in the session's language."""
    if isinstance(value, dict):
        return {name: _translated(item, keep, name) for name, item in value.items()}
    if key == "ticktext" and isinstance(value, list):
        return [said(item) if isinstance(item, str) else item for item in value]
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [_translated(item, keep) for item in value]
    shown = key in ("text", "name") and isinstance(value, str) and value not in keep
    return said(value) if shown else value
