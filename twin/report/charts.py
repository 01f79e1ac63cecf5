"""The page's charts, as plain values for plotly.js.

Colours are names of CSS variables (``--p0`` for the first policy): the page puts in those of the
light or the dark scheme.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from twin.faults import kind_of
from twin.faults import span_s as span_s_of
from twin.report.figures import (
    TIERS,
    between,
    count,
    duration,
    duration_rows,
    group_name,
    group_of,
    intervals,
    names_in,
    reasons,
    share,
)
from twin.results import HOPS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twin.faults import Fault
    from twin.intervals import Interval
    from twin.replay import Replay
    from twin.summary import Group, Histogram
    from twin.world import Sample

Chart = dict[str, Any]
ClassRow = tuple[str, str, "Group"]
"""SLA class, policy, and what came of the two."""

CURVE_POINTS = 240
TAIL_FROM = 0.98
"""Above this share every bin of a curve is kept: the tail is what one looks for."""
TAIL_POINTS = 120
RATE_OVER_S = 5.0
COLOURS = 6
"""Policy colours of the page; with more policies they repeat."""
HOP_NAMES = {
    "gateway_s": "gateway",
    "queue_s": "policy's queue",
    "schedule_s": "engine's queue",
    "prefill_s": "prefill",
    "decode_s": "decode",
    "network_s": "network",
}
CDF_METRICS = {"ttft_s": "time to first token", "tpot_s": "time per output token",
               "e2e_s": "end to end"}  # fmt: skip
TIER_METRICS = {"ttft_s": "time to first token", "queue_s": "wait in the policy's queue"}
LEAST_SHOWN_S = 1e-3
"""On a log axis there is no 0."""


def policy_colour(place: int) -> str:
    return f"--p{place % COLOURS}"


def tier_colour(name: str) -> str:
    return f"--tier-{name}" if name in TIERS else "--muted"


# ---- latency distributions ----


def distributions(replays: Sequence[Replay], labels: Sequence[str]) -> dict[str, dict[str, Chart]]:
    """By SLA class and metric."""
    names = names_in(replays, "sla")
    edges = {metric: _range(replays, metric) for metric in CDF_METRICS}
    out: dict[str, dict[str, Chart]] = {}
    for name in names:
        groups = [group_of(replay, "sla", name) for replay in replays]
        out[name] = {}
        for metric in CDF_METRICS:
            if any(group and group.metrics[metric].count for group in groups):
                limit_s = _limit_s(replays[0], metric, name)
                out[name][metric] = _distribution(groups, labels, metric, edges[metric], limit_s)
    return out


def _limit_s(replay: Replay, metric: str, sla: str) -> float | None:
    slo = replay.options.slo
    return {"ttft_s": slo.limit_s(sla), "tpot_s": slo.tpot_s}.get(metric)


def _distribution(
    groups: Sequence[Group | None], labels: Sequence[str], metric: str,
    edges: tuple[float, float], limit_s: float | None,
) -> Chart:  # fmt: skip
    traces: list[Chart] = []
    for place, (group, label) in enumerate(zip(groups, labels, strict=True)):
        if group is None or not group.metrics[metric].count:
            continue
        seconds, shares = curve(group.metrics[metric])
        # The first is drawn broad and the later ones thinner, so that equal curves show as one
        # with a rim.
        traces.append({
            "type": "scatter", "mode": "lines", "name": label,
            "x": seconds[:1] + seconds, "y": [0.0, *shares],
            "line": {"color": policy_colour(place), "width": max(1.6, 3.2 - 1.4 * place)},
            "hovertemplate": f"{label}: %{{y:.2%}} within %{{x:.3s}}s<extra></extra>",
        })  # fmt: skip
    low, high = edges
    if limit_s is not None:
        low, high = min(low, limit_s / 1.5), max(high, limit_s * 1.5)
        traces.append({
            "type": "scatter", "mode": "lines", "name": "SLO", "x": [limit_s, limit_s],
            "y": [1e-9, 1], "hoverinfo": "skip", "role": "limit",
            "line": {"color": "--ink", "width": 1.3, "dash": "dash"},
        })  # fmt: skip
    values, texts = log_ticks(low, high)
    layout: Chart = {
        "xaxis": {
            "type": "log", "range": [math.log10(low), math.log10(high)],
            "tickvals": values, "ticktext": texts,
            "title": {"text": f"{CDF_METRICS[metric]} (log)"},
        },
        "yaxis": {
            "range": [0, 1.02], "tickvals": [0, 0.25, 0.5, 0.75, 0.95],
            "ticktext": ["0 %", "25 %", "50 %", "75 %", "95 %"],
            "title": {"text": "share of requests"},
        },
    }  # fmt: skip
    layout["margin"] = {"t": 20}
    if limit_s is not None:
        layout["annotations"] = [{
            "x": math.log10(limit_s), "y": 1, "yref": "paper", "xanchor": "center",
            "yanchor": "bottom", "text": f"SLO {duration(limit_s)}", "showarrow": False,
            "font": {"size": 11},
        }]  # fmt: skip
    return {"kind": "cdf", "traces": traces, "layout": layout, "height": 215}


def curve(histogram: Histogram) -> tuple[list[float], list[float]]:
    """The distribution in at most a few hundred points, its tail kept in detail."""
    seconds, shares = histogram.curve()
    body = [place for place, value in enumerate(shares) if value < TAIL_FROM]
    tail = list(range(len(body), len(shares)))
    kept = _spread(body, CURVE_POINTS) + _spread(tail, TAIL_POINTS)
    return [_digits(seconds[place]) for place in kept], [_digits(shares[place]) for place in kept]


def _spread(places: list[int], most: int) -> list[int]:
    """At most ``most`` of them, evenly, first and last among them."""
    if len(places) <= most:
        return places
    step = (len(places) - 1) / (most - 1)
    return [places[round(step * number)] for number in range(most)]


def _digits(value: float) -> float:
    return float(f"{value:.5g}")


def _range(replays: Sequence[Replay], metric: str) -> tuple[float, float]:
    """Of an axis that all classes share: leaves out the lowest thousandth."""
    known = [run.summary.all.metrics[metric] for run in replays]
    known = [histogram for histogram in known if histogram.count]
    if not known:
        return 1e-3, 1.0
    low = min(histogram.quantile_s(0.001) for histogram in known)
    high = max(histogram.largest for histogram in known)
    return max(low, 1e-6) / 1.2, max(high, 2e-6) * 1.2


def log_ticks(low: float, high: float) -> tuple[list[float], list[str]]:
    """Round durations between ``low`` and ``high``: 100 ms, 1 s, 10 s."""
    steps = (1,) if high / low > 300 else (1, 3) if high / low > 30 else (1, 2, 5)
    values = [
        step * 10.0**power
        for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for step in steps
    ]
    values = [value for value in values if low <= value <= high]
    return values, [_tick(value) for value in values]


def _tick(seconds: float) -> str:
    for limit, factor, unit in ((0.99e-3, 1e6, "µs"), (0.99, 1e3, "ms")):
        if seconds < limit:
            return f"{seconds * factor:g} {unit}"
    return f"{seconds:g} s"


# ---- where the time went ----


def hop_bars(replays: Sequence[Replay], labels: Sequence[str]) -> Chart:
    """Mean time of each hop, stacked, by SLA class and policy."""
    rows = _class_rows(replays, labels)
    totals = [sum(group.hops.values()) / _answered(group) for _, _, group in rows]
    scale, unit = (1.0, "s") if max(totals, default=0.0) >= 1 else (1e3, "ms")
    chart = _stacked(rows, list(HOPS), [scale] * len(rows))
    chart["traces"].append({
        "type": "scatter", "mode": "text", "y": _places(rows),
        "x": [total * scale for total in totals],
        "text": [f" {duration(total)}" for total in totals], "textposition": "middle right",
        "hoverinfo": "skip", "textfont": {"size": 11}, "cliponaxis": False,
        "showlegend": False,
    })  # fmt: skip
    chart["layout"]["xaxis"] = {
        "title": {"text": f"mean time per answered request, {unit}"},
        "range": [0, 1.16 * scale * max(totals, default=1.0)],
    }
    return chart


def hop_shares(replays: Sequence[Replay], labels: Sequence[str]) -> Chart:
    """What the time before decoding was made of, as shares, with its mean at the end."""
    rows = _class_rows(replays, labels)
    hops = [hop for hop in HOPS if hop != "decode_s"]
    totals = [sum(group.hops[hop] for hop in hops) / _answered(group) for _, _, group in rows]
    chart = _stacked(rows, hops, [1 / total if total else 0.0 for total in totals])
    chart["traces"].append({
        "type": "scatter", "mode": "text", "y": _places(rows), "x": [1.0] * len(rows),
        "text": [f" {duration(total)}" for total in totals], "textposition": "middle right",
        "hoverinfo": "skip", "textfont": {"size": 11}, "cliponaxis": False,
        "showlegend": False,
    })  # fmt: skip
    chart["layout"]["xaxis"] = {
        "title": {"text": "share of the mean time without decode; at the end that time"},
        "range": [0, 1.16], "tickformat": ".0%", "tickvals": [0, 0.25, 0.5, 0.75, 1],
    }  # fmt: skip
    return chart


def _stacked(rows: Sequence[ClassRow], hops: Sequence[str], factors: Sequence[float]) -> Chart:
    """Bars of the mean hops, each row's times its factor."""
    traces: list[Chart] = []
    for hop in hops:
        means = [group.hops[hop] / _answered(group) for _, _, group in rows]
        traces.append({
            "type": "bar", "orientation": "h", "name": HOP_NAMES[hop], "y": _places(rows),
            "x": [_digits(mean * factor) for mean, factor in zip(means, factors, strict=True)],
            "marker": {"color": f"--hop-{hop.removesuffix('_s')}"},
            "customdata": [duration(mean) for mean in means],
            "hovertemplate": f"{HOP_NAMES[hop]}: %{{customdata}}<extra></extra>",
        })  # fmt: skip
    layout: Chart = {
        "barmode": "stack", "bargap": 0.3, "margin": {"l": 100},
        "yaxis": {"autorange": "reversed", "ticks": "", "showgrid": False},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": 110 + 27 * len(rows)}


def _class_rows(replays: Sequence[Replay], labels: Sequence[str]) -> list[ClassRow]:
    """SLA classes and, in each, the policies that answered anything."""
    return [
        (group_name("sla", name), label, group)
        for name in names_in(replays, "sla")
        for label, replay in zip(labels, replays, strict=True)
        if (group := group_of(replay, "sla", name)) and _answered(group)
    ]


def _places(rows: Sequence[ClassRow]) -> list[list[str]]:
    return [[name for name, _, _ in rows], [label for _, label, _ in rows]]


def _answered(group: Group) -> int:
    return group.answered + group.degraded


# ---- how well the promises were kept ----


def attainment_bars(replays: Sequence[Replay], labels: Sequence[str]) -> Chart:
    """By SLA class: share within the SLO, of what was offered and of what was answered."""
    names = names_in(replays, "sla")
    shown = ["all", *(group_name("sla", name) for name in names)]
    traces: list[Chart] = []
    for place, (replay, label) in enumerate(zip(replays, labels, strict=True)):
        groups = [replay.summary.all, *(group_of(replay, "sla", name) for name in names)]
        paths = ["all", *(f"by_sla.{name}" for name in names)]
        for suffix, pattern in (("of offered", ""), ("of admitted", "/")):
            values = [_share(group, admitted=bool(pattern)) if group else None for group in groups]
            figure = "slo_attainment_admitted" if pattern else "slo_attainment"
            known = [intervals([replay], f"{path}.{figure}")[0] for path in paths]
            room = "%{customdata}" if any(known) else ""
            traces.append({
                "type": "bar", "name": f"{label}, {suffix}", "x": shown, "y": values,
                "marker": {
                    "color": policy_colour(place),
                    "pattern": {"shape": pattern, "fillmode": "replace", "size": 5},
                    "line": {"color": policy_colour(place), "width": 1},
                },
                "text": _labels(values, known), "textfont": {"size": 10},
                "textposition": "outside", "textangle": 0, "cliponaxis": False,
                "hovertemplate": f"{label}, %{{x}}: %{{y:.1%}}{room} {suffix}<extra></extra>",
                **_whiskers(values, known),
            })  # fmt: skip
    layout: Chart = {
        "barmode": "group", "bargap": 0.25, "bargroupgap": 0.06, "showlegend": False,
        "yaxis": {"range": [0, 1.1], "tickvals": [0, 0.25, 0.5, 0.75, 1], "tickformat": ".0%",
                  "title": {"text": "requests within their SLO"}},
        "xaxis": {"title": {"text": "SLA class"}, "showgrid": False},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": 300}


def _whiskers(values: Sequence[float | None], known: Sequence[Interval | None]) -> Chart:
    """Of a bar chart, from the bars' ends to those of their intervals; nothing without any."""
    if not any(known):
        return {}
    pairs = list(zip(values, known, strict=True))
    said = [between(one.low, one.high, share) if one else "" for one in known]
    return {
        "customdata": [f" ({text})" if text else "" for text in said],
        "error_y": {
            "type": "data", "symmetric": False, "color": "--ink", "thickness": 1, "width": 3,
            "array": [one.high - value if one and value is not None else 0.0
                      for value, one in pairs],
            "arrayminus": [value - one.low if one and value is not None else 0.0
                           for value, one in pairs],
        }
    }  # fmt: skip


def _labels(values: Sequence[float | None], known: Sequence[Interval | None]) -> list[str]:
    """Of a bar chart; a whisker stands where its bar's label would."""
    return [
        "" if one and one.low < one.high else _percent(value)
        for value, one in zip(values, known, strict=True)
    ]


def _percent(value: float | None) -> str:
    """Without a decimal, unless it would round to all of them."""
    if value is None:
        return ""
    percent = 100 * value
    return f"{min(percent, 99.9):.1f}" if 99.5 <= percent < 100 else f"{percent:.0f}"


def _share(group: Group, *, admitted: bool) -> float | None:
    value = group.attainment_admitted() if admitted else group.attainment()
    return None if math.isnan(value) else _digits(value)


def outcome_bars(replays: Sequence[Replay], labels: Sequence[str]) -> Chart:
    """What became of all requests, by SLA class and policy, as shares."""
    names = names_in(replays, "sla")
    rows = [
        (group_name("sla", name), label, group)
        for name in names
        for label, replay in zip(labels, replays, strict=True)
        if (group := group_of(replay, "sla", name)) and group.offered
    ]
    places = [[name for name, _, _ in rows], [label for _, label, _ in rows]]
    parts = {
        "within SLO": ("--good", [group.good for _, _, group in rows]),
        "answered late": ("--late", [_answered(group) - group.good for _, _, group in rows]),
        "shed": ("--shed", [group.shed for _, _, group in rows]),
        "failed": ("--failed", [group.failed for _, _, group in rows]),
        "cancelled": ("--muted", [group.cancelled for _, _, group in rows]),
    }
    traces = [
        {
            "type": "bar", "orientation": "h", "name": name, "y": places,
            "x": [_digits(n / group.offered) for n, (_, _, group) in zip(ns, rows, strict=True)],
            "customdata": [count(n) for n in ns], "marker": {"color": colour},
            "hovertemplate": f"{name}: %{{x:.1%}} (%{{customdata}})<extra></extra>",
        }
        for name, (colour, ns) in parts.items()
        if any(ns)
    ]  # fmt: skip
    layout: Chart = {
        "barmode": "stack", "bargap": 0.3, "margin": {"l": 100}, "showlegend": True,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0,
                   "traceorder": "normal"},
        "xaxis": {"range": [0, 1.01], "tickformat": ".0%", "tickvals": [0, 0.25, 0.5, 0.75, 1],
                  "title": {"text": "of requests offered"}},
        "yaxis": {"autorange": "reversed", "ticks": "", "showgrid": False},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": max(300, 120 + 24 * len(rows))}


def reason_bars(replays: Sequence[Replay], labels: Sequence[str]) -> Chart | None:
    """Why requests were shed or failed; None where none was."""
    shown = reasons(replays)
    if not shown:
        return None
    traces: list[Chart] = []
    for place, (replay, label) in enumerate(zip(replays, labels, strict=True)):
        numbers = [replay.summary.shed_why.get(reason, 0) for reason in shown]
        offered = replay.summary.all.offered
        traces.append({
            "type": "bar", "orientation": "h", "name": label, "y": shown, "x": numbers,
            "marker": {"color": policy_colour(place)},
            "text": [f"{count(n)} ({share(n / offered)})" if n else "0" for n in numbers],
            "textposition": "outside", "cliponaxis": False,
            "hovertemplate": f"{label}: %{{text}}<extra></extra>",
        })  # fmt: skip
    most = max(max(run.summary.shed_why.values(), default=0) for run in replays)
    layout: Chart = {
        "barmode": "group", "showlegend": False, "margin": {"l": 190},
        "xaxis": {"title": {"text": "requests"}, "range": [0, 1.3 * most]},
        "yaxis": {"autorange": "reversed", "ticks": "", "showgrid": False},
    }  # fmt: skip
    return {
        "traces": traces,
        "layout": layout,
        "height": 90 + (14 + 22 * len(replays)) * len(shown),
    }


def tier_ranges(
    replays: Sequence[Replay], labels: Sequence[str], metric: str = "ttft_s"
) -> Chart | None:
    """A duration by tier and policy: a line from p50 to p99, a dot at p95. None without any.

    What is shorter than ``LEAST_SHOWN_S``, such as no wait at all, is drawn there.
    """
    names = [name for name in names_in(replays, "tier") if name]
    alone = sum(any(names_in([run], "tier")) for run in replays) == 1
    traces: list[Chart] = []
    lows, highs = [], []
    for name in names:
        for label, replay in zip(labels, replays, strict=True):
            group = group_of(replay, "tier", name)
            rows = duration_rows([group]).get(metric) if group else None
            if rows is None:
                continue
            known = [rows[part].values[0] for part in ("p50", "p95", "p99")]
            drawn = [max(seconds, LEAST_SHOWN_S) for seconds in known]
            lows.append(drawn[0])
            highs.append(drawn[-1])
            place = [name] * 3 if alone else [[name] * 3, [label] * 3]
            traces.append({
                "type": "scatter", "mode": "lines+markers", "x": drawn, "y": place,
                "line": {"color": tier_colour(name), "width": 5},
                "marker": {"size": [7, 13, 7], "color": tier_colour(name)},
                "text": [f"{part} {duration(seconds)}"
                         for part, seconds in zip(("p50", "p95", "p99"), known, strict=True)],
                "hovertemplate": f"{name}, {label}: %{{text}}<extra></extra>",
            })  # fmt: skip
    if not lows:
        return None
    low, high = min(lows) / 1.6, max(highs) * 1.6
    values, texts = log_ticks(low, high)
    layout: Chart = {
        "showlegend": False, "margin": {"l": 125},
        "xaxis": {"type": "log", "range": [math.log10(low), math.log10(high)], "tickvals": values,
                  "ticktext": texts, "title": {"text": f"{TIER_METRICS[metric]} (log)"}},
        "yaxis": {"autorange": "reversed", "ticks": "", "showgrid": False},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": 90 + 28 * len(traces)}


# ---- over time ----


def over_time(replays: Sequence[Replay], labels: Sequence[str]) -> dict[str, Chart]:
    """Queues, KV usage and, where it was noted, the arrival rate."""
    span_s = max(run.samples[-1].at_ns if run.samples else 0 for run in replays) / 1e9
    per, unit = (1, "s") if span_s <= 900 else (60, "min") if span_s <= 4 * 3600 else (3600, "h")
    axis = {"title": {"text": f"time in the trace, {unit}"}, "range": [0, span_s / per]}
    charts: dict[str, Chart] = {}
    series: dict[str, tuple[str, list[Any]]] = {
        "queued": ("requests", [_queued]),
        "waiting": ("requests", [_waiting]),
        "running": ("requests", [_running]),
        "kv": ("KV cache in use", [_kv_mean, _kv_max]),
    }
    for key, (title, readers) in series.items():
        traces: list[Chart] = []
        for place, (replay, label) in enumerate(zip(replays, labels, strict=True)):
            seconds = [_digits(sample.at_ns / 1e9 / per) for sample in replay.samples]
            for number, reader in enumerate(readers):
                name = label if len(readers) == 1 else f"{label}, {('mean', 'fullest')[number]}"
                values = [reader(sample, replay) for sample in replay.samples]
                traces.append(_line(name, seconds, values, place, thin=number > 0))
        charts[key] = {
            "traces": traces, "height": 225,
            "layout": {"xaxis": axis, "yaxis": {"title": {"text": title}, "rangemode": "tozero"}},
        }  # fmt: skip
    charts["kv"]["layout"]["yaxis"] |= {"range": [0, 1.03], "tickformat": ".0%"}
    rates = [_arrivals(run.samples, per) for run in replays]
    if any(rates):
        same = all(one == rates[0] for one in rates)
        lines = [
            _line("all policies" if same else label, [x for x, _ in one], [y for _, y in one],
                  place, thin=False)
            for place, (one, label) in enumerate(zip(rates, labels, strict=True))
        ]  # fmt: skip
        if same:
            lines = lines[:1]
            lines[0]["line"]["color"] = "--ink"
        charts["arrivals"] = {
            "traces": lines, "height": 225,
            "layout": {"xaxis": axis, "yaxis": {"title": {"text": "arrivals per second"},
                                                "rangemode": "tozero"}},
        }  # fmt: skip
    bands = fault_bands(replays[0].options.faults, span_s, per)
    for chart in charts.values():
        chart["layout"] |= bands
    return charts


def fault_bands(faults: Sequence[Fault], span_s: float, per: float) -> Chart:
    """Parts of a layout: a band, or a line where it has no length, for each fault."""
    shapes, notes = [], []
    for fault in faults:
        start_s, end_s = span_s_of(fault)
        shapes.append({
            "type": "rect", "yref": "paper", "y0": 0, "y1": 1, "x0": start_s / per,
            "x1": min(end_s if end_s is not None else span_s, max(span_s, start_s)) / per,
            "fillcolor": "--tier-fallback", "opacity": 0.15, "layer": "below",
            "line": {"color": "--tier-fallback", "width": 1},
        })  # fmt: skip
        notes.append({
            "x": start_s / per, "y": 1, "yref": "paper", "text": kind_of(fault),
            "showarrow": False, "xanchor": "left", "yanchor": "top",
            "font": {"size": 10, "color": "--muted"},
        })  # fmt: skip
    return {"shapes": shapes, "annotations": notes} if shapes else {}


def _line(name: str, x: list[float], y: list[float], place: int, *, thin: bool) -> Chart:
    line: Chart = {"color": policy_colour(place), "width": 1 if thin else 1.8}
    if thin:
        line["dash"] = "dot"
    return {
        "type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, "line": line,
        "hovertemplate": f"{name}: %{{y}}<extra></extra>",
    }  # fmt: skip


def _queued(sample: Sample, _: Replay) -> float:
    return sample.queued


def _waiting(sample: Sample, _: Replay) -> float:
    return sample.waiting


def _running(sample: Sample, _: Replay) -> float:
    return sample.running


def _kv_mean(sample: Sample, replay: Replay) -> float:
    used = _kv_used(sample, replay)
    return _digits(sum(used) / len(used) / 1000)


def _kv_max(sample: Sample, replay: Replay) -> float:
    return max(_kv_used(sample, replay)) / 1000


def _kv_used(sample: Sample, replay: Replay) -> list[int]:
    """Of the replicas that generate: embeddings hold KV blocks for an instant only."""
    all_used = sample.kv_used_permille
    used = [
        value
        for value, spec in zip(all_used, replay.fleet, strict=True)
        if spec.profile.task != "pooling"
    ]
    return used or list(all_used)


def _arrivals(samples: Sequence[Sample], per: int) -> list[tuple[float, float]]:
    """Arrivals per second, over at least ``RATE_OVER_S``; empty where they were not counted."""
    counted = [(sample.at_ns, getattr(sample, "arrived", None)) for sample in samples]
    out: list[tuple[float, float]] = []
    from_ns, so_far = counted[0] if counted else (0, None)
    for at_ns, arrived in counted[1:]:
        if arrived is None or so_far is None:
            break
        seconds = (at_ns - from_ns) / 1e9
        if seconds >= RATE_OVER_S:
            out.append((_digits(at_ns / 1e9 / per), _digits((arrived - so_far) / seconds)))
            from_ns, so_far = at_ns, arrived
    return out
