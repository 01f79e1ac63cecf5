"""A plan's charts, as plain values for plotly.js, from the document that ``show`` writes.

Colours are names (``twin.report.colours``); whoever draws them puts in those of the scheme.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twin.report.charts import log_ticks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Chart = dict[str, Any]
HEIGHT = 300
COLOURS = 6
DASHED = {"width": 1.4, "dash": "dash"}


def knee_charts(plan: Mapping[str, Any]) -> dict[str, Chart]:
    """Attainment and time to first token against the load, with the promises' lines and the loads
    that hold shaded; empty where the plan has no knee."""
    knee = plan["knee"]
    if knee is None:
        return {}
    needs = plan["promise"]["needs"]
    return {"attainment": _attainment(knee, needs), "ttft": _ttft(knee, needs)}


def sizes_chart(plan: Mapping[str, Any]) -> Chart | None:
    """The fewest replicas by growth of the load, a bar each machine; None: nothing holds."""
    sizes = [size for size in plan["sizes"] if size["replicas"] is not None]
    if not sizes:
        return None
    traces = []
    for place, name in enumerate(dict.fromkeys(size["machine"] for size in sizes)):
        own = [size for size in sizes if size["machine"] == name]
        counts = [size["replicas"] for size in own]
        traces.append({
            "type": "bar", "name": name, "x": [f"{size['growth']:g}x" for size in own],
            "y": [one["value"] for one in counts],
            "text": [f"{one['value']:.0f}" for one in counts], "textposition": "inside",
            "insidetextanchor": "start",
            "marker": {"color": f"--p{place % COLOURS}"},
            "error_y": {
                "type": "data", "symmetric": False, "color": "--muted",
                "array": [one["high"] - one["value"] for one in counts],
                "arrayminus": [one["value"] - one["low"] for one in counts],
            },
            "hovertemplate": f"{name}, %{{x}}: %{{y}} replicas<extra></extra>",
        })  # fmt: skip
    growths = [f"{growth:g}x" for growth in plan["growths"]]
    layout = {
        "barmode": "group", "bargap": 0.35,
        "xaxis": {
            "title": {"text": "load, times the recorded one"}, "type": "category",
            "categoryorder": "array", "categoryarray": growths,
        },
        "yaxis": {"title": {"text": "replicas"}, "rangemode": "tozero"},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": HEIGHT}


def _attainment(knee: Mapping[str, Any], needs: Sequence[Mapping[str, Any]]) -> Chart:
    traces = []
    for name, colour in _classes(knee):
        shares = [_percent(point["attainment"].get(name)) for point in knee["curve"]]
        traces.append(_curve(knee, name, colour, shares, "%{y:.1f} %"))
    limits = {need["limit"] for need in needs if need["what"] == "attainment"}
    traces += [_limit(knee, 100 * limit, f"promise {limit:.1%}", "--ink") for limit in limits]
    known = [share for one in traces for share in one["y"] if share is not None]
    least = min([*known, 90.0])
    axis = {"title": {"text": "attainment, % of offered"}, "range": [max(0.0, least - 4), 101.5]}
    return _chart(knee, traces, axis)


def _ttft(knee: Mapping[str, Any], needs: Sequence[Mapping[str, Any]]) -> Chart:
    traces = []
    for name, colour in _classes(knee):
        seconds = [point["ttft_s_p95"].get(name) for point in knee["curve"]]
        traces.append(_curve(knee, name, colour, seconds, "%{y:.3g} s"))
        for need in needs:
            if (need["kind"], need["group"], need["what"]) == ("class", name, "ttft_s_p95"):
                label = f"promise {need['limit']:g} s"
                traces.append(_limit(knee, need["limit"], f"{name or 'other'} {label}", colour))
    known = [value for one in traces for value in one["y"] if value]
    axis: dict[str, Any] = {"type": "log", "title": {"text": "time to first token, p95 (log)"}}
    if known:
        values, texts = log_ticks(min(known), max(known))
        axis |= {"tickvals": values, "ticktext": texts}
    return _chart(knee, traces, axis)


def _chart(knee: Mapping[str, Any], traces: list[Any], axis: Mapping[str, Any]) -> Chart:
    multiple = knee["multiple"]
    first, last = _ends(knee)
    high = last if multiple["high"] is None else min(multiple["high"], last)
    shapes: list[dict[str, Any]] = [
        _band(first, min(multiple["value"], last), "--ok-bg"),
        _band(max(multiple["low"], first), high, "--warn-bg"),
        {
            "type": "line", "yref": "paper", "y0": 0, "y1": 1, "x0": multiple["value"],
            "x1": multiple["value"], "line": {"color": "--muted", "width": 1.2},
        },
    ]  # fmt: skip
    layout = {
        "xaxis": {
            "title": {"text": "load, times the recorded one"}, "range": [first, last],
            "ticksuffix": "x",
        },
        "yaxis": dict(axis), "shapes": shapes,
        "annotations": [{
            "x": multiple["value"], "y": 0, "yref": "paper", "yanchor": "bottom",
            "showarrow": False,
            "xanchor": "left" if multiple["value"] < (first + last) / 2 else "right",
            "text": f" {multiple['value']:.3g}x ", "font": {"color": "--muted", "size": 12},
        }],
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": HEIGHT}


def _curve(
    knee: Mapping[str, Any], name: str, colour: str, values: Sequence[float | None], unit: str
) -> Chart:
    return {
        "type": "scatter", "mode": "lines+markers", "name": name or "other",
        "x": [point["multiple"] for point in knee["curve"]], "y": list(values),
        "line": {"color": colour, "width": 2}, "marker": {"size": 7},
        "hovertemplate": f"{name or 'other'} at %{{x:.3g}}x: {unit}<extra></extra>",
    }  # fmt: skip


def _limit(knee: Mapping[str, Any], value: float, name: str, colour: str) -> Chart:
    first, last = _ends(knee)
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": [first, last], "y": [value, value],
        "line": {"color": colour, **DASHED}, "hoverinfo": "skip",
    }  # fmt: skip


def _band(begin: float, end: float, colour: str) -> dict[str, Any]:
    return {
        "type": "rect", "layer": "below", "yref": "paper", "y0": 0, "y1": 1, "x0": begin, "x1": end,
        "fillcolor": colour, "line": {"width": 0},
    }  # fmt: skip


def _ends(knee: Mapping[str, Any]) -> tuple[float, float]:
    """Of the loads that the chart shows."""
    loads = [point["multiple"] for point in knee["curve"]]
    value = knee["multiple"]["value"]
    return 0.97 * min(*loads, value), 1.03 * max(*loads, value)


def _classes(knee: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each with its colour."""
    names = sorted(knee["curve"][0]["attainment"])
    return [(name, f"--p{place % COLOURS}") for place, name in enumerate(names)]


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
