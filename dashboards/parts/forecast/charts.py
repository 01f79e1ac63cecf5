"""Charts of a forecast: a load with its bands, errors by horizon, GPU-hours against violations."""

from __future__ import annotations

from typing import Any

from dashboards.state import said, t

Chart = dict[str, Any]
COLOURS = {
    "forecaster": "--p0", "last value": "--p5", "seasonal": "--p2", "damped Holt": "--p3",
    "ARIMA": "--p1", "Kalman": "--p4",
    "HPA": "--p5", "5 s loop": "--p1", "perfect": "--p2",
}  # fmt: skip
"""The same for the same forecaster everywhere."""


def bands_chart(result: dict[str, Any], place: int) -> Chart:
    """History, and what was forecast of it so far ahead; at its end what comes next.

    Args:
        place: of the horizon, among ``result["bands"]``.
    """
    band, ahead = result["bands"][place], result["next"]
    traces = [
        *_band(band["day"], band["q50"], band["q950"], t("forecast.band")),
        {
            "type": "scatter", "mode": "lines", "name": t("forecast.actual"), "x": result["day"],
            "y": result["mean"], "line": {"color": "--ink", "width": 1.2},
            "hovertemplate": "%{y:.4g}<extra></extra>",
        },
        {
            "type": "scatter", "mode": "lines", "name": t("forecast.median"), "x": band["day"],
            "y": band["q500"], "line": {"color": "--p0", "width": 1.6},
            "hovertemplate": "%{y:.4g}<extra></extra>",
        },
        {
            "type": "scatter", "mode": "lines+markers", "name": t("forecast.next"),
            "x": ahead["day"], "y": ahead["q500"], "line": {"color": "--p2", "width": 2},
            "marker": {"size": 6},
            "error_y": {
                "type": "data", "symmetric": False, "color": "--p2",
                "array": [hi - mid for hi, mid in zip(ahead["q950"], ahead["q500"], strict=True)],
                "arrayminus": [
                    mid - lo for mid, lo in zip(ahead["q500"], ahead["q50"], strict=True)
                ],
            },
            "hovertemplate": "%{y:.4g}<extra></extra>",
        },
    ]  # fmt: skip
    unit = t("forecast.tokens_s" if result["tokens"] else "forecast.requests_s")
    first = max(0.0, min(result["held_day"] - 1.0, result["days"] - 2.0))
    layout = {
        "xaxis": {
            "title": {"text": t("forecast.days")},
            "range": [first, result["days"] * 1.005 + 0.02],
            "rangeslider": {"visible": True, "thickness": 0.12},
        },
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "shapes": [{
            "type": "line", "x0": result["held_day"], "x1": result["held_day"], "yref": "paper",
            "y0": 0, "y1": 1, "line": {"color": "--muted", "width": 1, "dash": "dot"},
        }],
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": 420}


def errors_chart(result: dict[str, Any], figure: str) -> Chart:
    """WAPE or pinball loss by horizon, of every forecaster."""
    traces = []
    for name in dict.fromkeys(each["name"] for each in result["rated"]):
        rows = [each for each in result["rated"] if each["name"] == name]
        ours = name == "forecaster"
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": said(name),
            "x": [row["horizon"] * result["window_s"] / 60 for row in rows],
            "y": [100 * row[figure] for row in rows],
            "line": {"color": COLOURS[name], "width": 3 if ours else 1.4},
            "hovertemplate": f"{said(name)}: %{{y:.3g}} %<extra></extra>",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": t("forecast.ahead_min")}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": t(f"forecast.{figure}_axis")}, "type": "log", "dtick": "D2"},
    }
    return {"traces": traces, "layout": layout, "height": 300}


def worth_chart(result: dict[str, Any]) -> Chart:
    """GPU-hours against violations, rule by rule."""
    traces = []
    for name, points in result["curves"].items():
        rows = sorted(points, key=lambda point: point["gpu_hours"])
        traces.append({
            "type": "scatter", "mode": "lines+markers", "name": said(name),
            "x": [row["gpu_hours"] for row in rows],
            # A log axis has no 0: none is drawn as half a one, and told as none.
            "y": [100 * max(row["missed"], 0.5) / row["offered"] for row in rows],
            "line": {"color": COLOURS[name], "width": 3 if name == "forecaster" else 1.6},
            "customdata": [[row["setting"], 100 * row["missed"] / row["offered"]] for row in rows],
            "hovertemplate": f"{said(name)} %{{customdata[0]}} ‰: %{{x:.3g}} h,"
            " %{customdata[1]:.2g} %"
            "<extra></extra>",
        })  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": t("forecast.gpu_hours")}},
        "yaxis": {"title": {"text": t("forecast.violations")}, "type": "log"},
    }
    return {"traces": traces, "layout": layout, "height": 320}


def _band(day: list[Any], low: list[Any], high: list[Any], name: str) -> list[dict[str, Any]]:
    edge = {"type": "scatter", "mode": "lines", "line": {"width": 0}, "hoverinfo": "skip"}
    return [
        edge | {"x": day, "y": low, "showlegend": False},
        edge | {
            "x": day, "y": high, "fill": "tonexty", "fillcolor": "rgba(217,123,28,0.25)",
            "name": name,
        },
    ]  # fmt: skip
