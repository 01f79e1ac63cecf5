"""Charts of a trace, from its description (``traces.describe``): rate, lengths, shared prefixes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from twin.report.charts import Chart

HEIGHT = 215
LENGTHS = {"prompt_tokens": ("prompt", "--p1"), "output_tokens": ("answer", "--p0")}
LENGTH_LEAST = 1.0


def rate_chart(description: Mapping[str, Any]) -> Chart | None:
    """Requests per second over time; None where the trace knows no arrivals."""
    pairs = description["rate_over_time"]
    if not pairs:
        return None
    seconds, unit, per = _over_time([at for at, _ in pairs], description["duration_s"])
    trace = {
        "type": "scatter", "mode": "lines", "name": "requests", "x": seconds,
        "y": [_digits(rate) for _, rate in pairs], "fill": "tozeroy",
        "line": {"color": "--p1", "width": 1.6, "shape": "hv"},
        "hovertemplate": "%{y:.3g} /s<extra></extra>",
    }  # fmt: skip
    layout: Chart = {
        "xaxis": {"title": {"text": f"time in the trace, {unit}"},
                  "range": [0, description["duration_s"] / per]},
        "yaxis": {"title": {"text": "requests per second"}, "rangemode": "tozero"},
    }  # fmt: skip
    return {"traces": [trace], "layout": layout, "height": HEIGHT}


def length_chart(description: Mapping[str, Any]) -> Chart:
    """The distributions of prompt and answer lengths, on a log axis."""
    traces: list[Chart] = []
    longest = LENGTH_LEAST
    for column, (name, colour) in LENGTHS.items():
        points = description["length_curves"].get(column)
        if not points:
            continue
        lengths = [max(tokens, LENGTH_LEAST) for tokens, _ in points]
        longest = max(longest, lengths[-1])
        traces.append({
            "type": "scatter", "mode": "lines", "name": name,
            "x": lengths[:1] + lengths, "y": [0.0, *(_digits(share) for _, share in points)],
            "line": {"color": colour, "width": 2, "shape": "vh"},
            "hovertemplate": f"{name}: %{{y:.0%}} up to %{{x:,}} tokens<extra></extra>",
        })  # fmt: skip
    powers = range(math.ceil(math.log10(longest * 1.2)) + 1)
    layout: Chart = {
        "xaxis": {"type": "log", "title": {"text": "tokens (log)"},
                  "range": [0, math.log10(longest * 1.2)],
                  "tickvals": [10**power for power in powers],
                  "ticktext": [f"{10**power:,}" for power in powers]},
        "yaxis": {"range": [0, 1.02], "tickformat": ".0%", "title": {"text": "share of requests"}},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": HEIGHT}


def prefix_chart(description: Mapping[str, Any]) -> Chart | None:
    """How much of the prompts an earlier prompt began with, over time; None without prefix ids."""
    pairs = description["prefix_over_time"]
    if description["prefix"] is None or not pairs:
        return None
    seconds, unit, per = _over_time([at for at, _ in pairs], description["duration_s"])
    shared = [_digits(share) for _, share in pairs]
    trace = {
        "type": "scatter", "mode": "lines", "name": "shared", "x": seconds, "y": shared,
        "fill": "tozeroy", "line": {"color": "--p2", "width": 1.6, "shape": "hv"},
        "hovertemplate": "%{y:.1%}<extra></extra>",
    }  # fmt: skip
    layout: Chart = {
        "xaxis": {"title": {"text": f"time in the trace, {unit}"},
                  "range": [0, description["duration_s"] / per]},
        "yaxis": {"range": [0, 1.02], "tickformat": ".0%",
                  "title": {"text": "prompt tokens seen before"}},
    }  # fmt: skip
    return {"traces": [trace], "layout": layout, "height": HEIGHT}


def _over_time(seconds: Sequence[float], duration_s: float) -> tuple[list[float], str, int]:
    """In seconds, minutes or hours, as fits; the unit, and its seconds."""
    per, unit = (1, "s") if duration_s <= 900 else (60, "min")
    per, unit = (3600, "h") if duration_s > 4 * 3600 else (per, unit)
    return [_digits(at / per) for at in seconds], unit, per


def _digits(value: float) -> float:
    return float(f"{value:.5g}")
