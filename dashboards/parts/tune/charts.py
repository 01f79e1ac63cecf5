"""Charts of a tuning: the trials with their front, and which keys matter."""

from __future__ import annotations

from typing import Any

from dashboards.state import t

Chart = dict[str, Any]
KEYS_MOST = 12


def trials_chart(progress: dict[str, Any]) -> Chart:
    """Two objectives against each other with the front; one: over the trials, with the best so far.

    Args:
        progress: as the job ``tune`` writes it.
    """
    return _plane(progress) if progress["objectives"] > 1 else _line(progress)


def importance_chart(shares: dict[str, float]) -> Chart:
    """Bars, the most important on top."""
    rows = sorted(shares.items(), key=lambda row: row[1])[-KEYS_MOST:]
    bars = {
        "type": "bar", "orientation": "h", "y": [key for key, _ in rows],
        "x": [100 * share for _, share in rows], "marker": {"color": "--accent"},
        "hovertemplate": "%{y}: %{x:.0f} %<extra></extra>",
    }  # fmt: skip
    axis = {"title": {"text": t("tune.importance_axis")}, "rangemode": "tozero"}
    layout = {"xaxis": axis, "yaxis": {"type": "category"}, "bargap": 0.35}
    return {"traces": [bars], "layout": layout, "height": 80 + 24 * len(rows)}


def _plane(progress: dict[str, Any]) -> Chart:
    trials = progress["trials"]
    front = set(progress["front"])
    groups = {
        "stopped": [one for one in trials if not one["whole"]],
        "broken": [one for one in trials if one["whole"] and not one["kept"]],
        "tried": [
            one for one in trials if one["whole"] and one["kept"] and one["n"] not in front
        ],
    }  # fmt: skip
    looks = {
        "stopped": {"color": "--muted", "size": 6, "symbol": "x-thin-open", "opacity": 0.6},
        "broken": {"color": "--failed", "size": 7, "symbol": "circle-open"},
        "tried": {"color": "--p1", "size": 7},
    }  # fmt: skip
    traces = [
        _points(t(f"tune.points.{name}"), rows, looks[name])
        for name, rows in groups.items()
        if rows
    ]
    ahead = sorted(
        (one for one in trials if one["n"] in front), key=lambda one: one["values"][0] or 0.0
    )
    mode = "lines+markers" if progress["objectives"] == 2 else "markers"
    line = {"color": "--p0", "width": 2}
    traces.append(
        _points(t("tune.points.front"), ahead, {"color": "--p0", "size": 10})
        | {"mode": mode, "line": line}
    )
    own = [one for one in trials if one["n"] == progress["parent"]]
    star = {"color": "--ink", "size": 15, "symbol": "star-open", "line": {"width": 2}}
    traces.append(_points(t("tune.points.parent"), own, star))
    first, second = progress["figures"][:2]
    layout = {"xaxis": _axis(first), "yaxis": _axis(second)}
    return {"traces": traces, "layout": layout, "height": 380}


def _points(name: str, rows: list[dict[str, Any]], marker: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name, "marker": marker,
        "x": [one["values"][0] for one in rows], "y": [one["values"][1] for one in rows],
        "customdata": [one["n"] for one in rows],
        "hovertemplate": f"{t('tune.trial')} %{{customdata}}: %{{x:.4g}}, %{{y:.4g}}"
        f"<extra>{name}</extra>",
    }  # fmt: skip


def _line(progress: dict[str, Any]) -> Chart:
    figure = progress["figures"][0]
    whole = [one for one in progress["trials"] if one["whole"] and one["values"][0] is not None]
    good = [one for one in whole if one["kept"]] or whole
    best: list[float] = []
    for one in good:
        value = one["values"][0]
        better = not best or (value - best[-1]) * figure["better"] > 0
        best.append(value if better else best[-1])
    name = t("tune.points.tried")
    points = {
        "type": "scatter", "mode": "markers", "name": name, "marker": {"color": "--p1", "size": 7},
        "x": [one["n"] for one in whole], "y": [one["values"][0] for one in whole],
        "hovertemplate": f"{t('tune.trial')} %{{x}}: %{{y:.4g}}<extra>{name}</extra>",
    }  # fmt: skip
    so_far = {
        "type": "scatter", "mode": "lines", "name": t("tune.points.best"),
        "line": {"color": "--p0", "width": 2, "shape": "hv"}, "hoverinfo": "skip",
        "x": [one["n"] for one in good], "y": best,
    }  # fmt: skip
    own = [one for one in whole if one["n"] == progress["parent"]]
    star = {
        "type": "scatter", "mode": "markers", "name": t("tune.points.parent"),
        "x": [one["n"] for one in own], "y": [one["values"][0] for one in own],
        "marker": {"color": "--ink", "size": 15, "symbol": "star-open", "line": {"width": 2}},
        "hovertemplate": "%{y:.4g}<extra></extra>",
    }  # fmt: skip
    layout = {"xaxis": {"title": {"text": t("tune.trial")}}, "yaxis": _axis(figure)}
    return {"traces": [points, so_far, star], "layout": layout, "height": 340}


def _axis(figure: dict[str, Any]) -> dict[str, Any]:
    """With its unit and which way is better."""
    unit = f", {figure['unit']}" if figure["unit"] else ""
    way = t("tune.more" if figure["better"] > 0 else "tune.less")
    return {"title": {"text": f"{figure['name']}{unit} ({way})"}}
