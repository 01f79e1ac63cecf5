"""The calibration as one page that opens without any network."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from twin.calibrate.contents import KINDS
from twin.report.files import write_whole
from twin.report.page import document

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from policy.cost import Coefficient, Profile
    from twin.calibrate.calibration import Calibration, StepsTable
    from twin.regression import Array

MOST_POINTS = 1500
"""Of one colour in a plot."""
COLOURS = {"decode": "--p1", "prefill": "--p0", "mixed": "--p2"}
NS_PER_MS = 1e6
ROWS = {"fitted_errors": "fitted", "held_out_errors": "held out"}


def write_report(calibration: Calibration, path_html: str | os.PathLike[str]) -> None:
    """One self-contained page: verdict, coefficients, residuals, errors.

    Raises:
        ReportError: the file cannot be written.
    """
    draft = calibration.draft
    title = "Calibration" if draft is None else f"Calibration of {draft.name}"
    charts: dict[str, Any] = {}
    sections = [_header(calibration, title), _errors(calibration.figures)]
    if calibration.steps is not None:
        sections.append(_plots(calibration.steps, charts))
    if draft is not None:
        sections.append(_coefficients(draft, charts))
    sections += [_requests(calibration.figures), _used(calibration.figures)]
    write_whole(path_html, document(title, sections, charts))


def _header(calibration: Calibration, title: str) -> str:
    draft, figures = calibration.draft, calibration.figures
    facts: dict[str, str] = {
        "Steps": f"{figures.get('steps', 0):,} recorded, {figures.get('fitted_steps', 0):,} "
        f"fitted, {figures.get('held_out_steps', 0):,} held out",
        "Stalls left out": f"{figures.get('stalled_steps', 0):,} steps, "
        f"{figures.get('stalled_percent', 0.0):.1f} % of the time",
        "Between rounds": f"{figures.get('run_to_run_percent', 0.0):.1f} % (standard deviation)",
    }
    if draft is not None:
        facts = {"Profile": f"{draft.name} on {draft.gpu}", "From": draft.trust.fitted_on} | facts
        facts |= {"Note" if number == 0 else f"Note {number + 1}": note
                  for number, note in enumerate(draft.trust.notes)}  # fmt: skip
    rows = "".join(f"<dt>{escape(key)}</dt><dd>{escape(text)}</dd>" for key, text in facts.items())
    if calibration.refusal:
        items = "".join(f"<li>{escape(reason)}</li>" for reason in calibration.refusal)
        verdict = f'<div class="warning">The fit is refused:<ul>{items}</ul></div>'
    else:
        held = figures["held_out_errors"]["all"]
        load = "held-out parts of the same load" if figures["same_load"] else "held-out load"
        whole = figures["requests_inside"].get("e2e")
        verdict = (
            f'<p class="verdict">The fit is good: on {load} it is off by '
            f"{held['bias_percent']:+.1f}&nbsp;% in all, and by "
            f"{held['mean_percent']:.1f}&nbsp;% on single steps, weighted by time. "
            + (
                "Whole requests were not judged.</p>"
                if whole is None
                else "Whole requests are off by "
                f"{whole['mean_error_percent']:+.1f}&nbsp;% in the mean, by the server's "
                "clock.</p>"
            )
        )
    return (
        '<header><div class="eyebrow">Twinkeel · calibration report</div>'
        f'<h1>{escape(title)}</h1>{verdict}<dl class="facts">{rows}</dl></header>'
    )


def _errors(figures: Mapping[str, Any]) -> str:
    lines: list[str] = []
    for key, name in ROWS.items():
        for kind, each in figures.get(key, {}).items():
            cells = "".join(
                f"<td>{each[column]:+.2f} %</td>" if column == "bias_percent"
                else f"<td>{each[column]:.2f} %</td>"
                for column in ("bias_percent", "mean_percent", "median_percent", "worst_percent")
            )  # fmt: skip
            lines.append(
                f'<tr><td class="l">{name}</td><td class="l">{kind}</td>'
                f"<td>{each['steps']:,.0f}</td>{cells}</tr>"
            )
    if not lines:
        return ""
    return (
        "<h2>Error of the formula on steps</h2>"
        '<p class="caption">Bias: sum predicted over sum measured, less one. Mean: what each step '
        "is off, weighted by its time. Median and worst: of the steps' relative errors.</p>"
        '<div class="card scroll"><table><tr><th class="l">load</th><th class="l">steps</th>'
        "<th>number</th><th>bias</th><th>mean</th><th>median</th><th>worst</th></tr>"
        f"{''.join(lines)}</table></div>"
    )


def _plots(steps: StepsTable, charts: dict[str, Any]) -> str:
    cards: list[str] = []
    legend = "".join(
        f'<span><span class="swatch" style="--colour:var({COLOURS[name]})"></span>{name}</span>'
        for name in KINDS
    )
    traces: list[dict[str, Any]] = []
    for place, name in enumerate(KINDS):
        rows = _thinned(np.flatnonzero(steps.kind == place))
        if not len(rows):
            continue
        measured, predicted = steps.measured_ns[rows], steps.predicted_ns[rows]
        traces.append(_dots(name, predicted / NS_PER_MS, measured / NS_PER_MS, "ms"))
        residual = (measured / np.maximum(predicted, 1.0) - 1) * 100
        across, unit = (
            (steps.prefill_tokens[rows], "new tokens") if name != "decode"
            else (steps.batch[rows], "sequences")
        )  # fmt: skip
        chart = _chart([_dots(name, across, residual, "%")], unit, "measured over predicted, %")
        # A few stalls must not press everything else flat.
        limit = max(10.0, float(np.quantile(np.abs(residual), 0.99)) * 1.2)
        chart["layout"]["yaxis"]["range"] = [-limit, limit]
        charts[f"residual-{name}"] = chart
        cards.append(_card(f"residual-{name}", chart, f"Residuals of {name} steps"))
    if traces:
        longest = max(max(trace["x"]) for trace in traces)
        traces.append({
            "type": "scatter", "mode": "lines", "x": [1e-3, longest], "y": [1e-3, longest],
            "line": {"color": "--ink", "width": 1, "dash": "dash"}, "hoverinfo": "skip",
        })  # fmt: skip
        chart = _chart(traces, "predicted, ms", "measured, ms")
        shortest = min(min(trace["x"]) for trace in traces[:-1])
        span = [float(np.log10(shortest * 0.7)), float(np.log10(longest * 1.4))]
        chart["layout"]["xaxis"] |= {"type": "log", "range": span}
        chart["layout"]["yaxis"] |= {"type": "log", "range": span}
        charts["predicted"] = chart
        cards.insert(0, _card("predicted", chart, "Predicted against measured (logarithmic)"))
    return (
        "<h2>Steps</h2>"
        f'<div class="legend">{legend}</div><div class="grid two">{"".join(cards)}</div>'
    )


def _thinned(rows: Any) -> Any:
    if len(rows) <= MOST_POINTS:
        return rows
    return rows[np.linspace(0, len(rows) - 1, MOST_POINTS).astype(np.int64)]


def _dots(name: str, x: Array, y: Array, unit: str) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "markers", "name": name,
        "x": [float(f"{value:.4g}") for value in x], "y": [float(f"{value:.4g}") for value in y],
        "marker": {"color": COLOURS[name], "size": 4, "opacity": 0.45},
        "hovertemplate": f"{name}: %{{x}}, %{{y}} {unit}<extra></extra>",
    }  # fmt: skip


def _chart(traces: list[dict[str, Any]], x_title: str, y_title: str) -> dict[str, Any]:
    layout = {"xaxis": {"title": {"text": x_title}}, "yaxis": {"title": {"text": y_title}}}
    return {"kind": "steps", "traces": traces, "layout": layout, "height": 300}


def _card(name: str, chart: Mapping[str, Any], title: str) -> str:
    style = f"height:{chart['height']}px"
    return f'<div class="card"><h3>{title}</h3><div id="{name}" style="{style}"></div></div>'


def _coefficients(profile: Profile, charts: dict[str, Any]) -> str:
    found: dict[str, Coefficient] = {}
    for part in (profile.step, profile.overheads):
        for name in part.__struct_fields__:
            value = getattr(part, name)
            if name.endswith("_ns") and value is not None:
                found[name] = value
    lines: list[str] = []
    shown: list[tuple[str, float, float, float]] = []
    for name, each in found.items():
        low, high = each.interval or (each.value, each.value)
        lines.append(
            f'<tr><td class="l">{name}</td><td>{_number(each.value)}</td>'
            f"<td>{_number(low)} to {_number(high)}</td>"
            f'<td class="l"><span class="note">{escape(each.source)}</span></td></tr>'
        )
        if each.value > 0:
            shown.append((name, 100 * (low / each.value - 1), 100 * (high / each.value - 1), 0.0))
    card = ""
    if shown:
        shown.reverse()
        chart = {
            "kind": "coefficients",
            "height": 40 + 26 * len(shown),
            "traces": [{
                "type": "scatter", "mode": "markers", "y": [row[0] for row in shown],
                "x": [row[3] for row in shown], "marker": {"color": "--accent", "size": 8},
                "error_x": {
                    "type": "data", "symmetric": False, "color": "--accent",
                    "array": [row[2] for row in shown],
                    "arrayminus": [-row[1] for row in shown],
                },
                "hovertemplate": "%{y}<extra></extra>",
            }],
            "layout": {
                "margin": {"l": 190},
                "xaxis": {
                    "title": {"text": "95 % interval, % of the value"},
                    "range": [-105, max(30.0, min(200.0, 1.1 * max(row[2] for row in shown)))],
                },
                "yaxis": {},
            },
        }  # fmt: skip
        charts["coefficients"] = chart
        card = _card("coefficients", chart, "How well each coefficient is known")
    return (
        "<h2>Coefficients</h2>"
        '<p class="caption">Nanoseconds. The intervals come from drawing blocks of consecutive '
        "steps anew; what all times have in common from one run to the next stands apart.</p>"
        f'<div class="grid">{card}<div class="card scroll"><table><tr><th class="l">name</th>'
        '<th>ns</th><th>95 % interval</th><th class="l">source</th></tr>'
        f"{''.join(lines)}</table></div></div>"
    )


def _number(value_ns: float) -> str:
    return f"{value_ns:,.0f}" if value_ns >= 1000 else f"{value_ns:.4g}"


def _requests(figures: Mapping[str, Any]) -> str:
    lines = [
        f'<tr><td class="l">{whose}</td><td class="l">{metric}</td><td class="l">{name}</td>'
        f"<td>{each[f'{name}_measured_ns'] / NS_PER_MS:,.2f}</td>"
        f"<td>{each[f'{name}_predicted_ns'] / NS_PER_MS:,.2f}</td>"
        f"<td>{each[f'{name}_error_percent']:+.1f} %</td></tr>"
        for whose, key in (("client", "requests"), ("server", "requests_inside"))
        for metric, each in (figures.get(key) or {}).items()
        for name in ("mean", "p99")
    ]
    if not lines:
        return ""
    return (
        "<h2>Whole requests of the held-out load</h2>"
        '<p class="caption">Its real arrivals, played through the twin\'s engine.</p>'
        '<div class="card scroll"><table><tr><th class="l">clock</th><th class="l">time</th>'
        '<th class="l"></th>'
        "<th>measured, ms</th><th>twin, ms</th><th>off by</th></tr>"
        f"{''.join(lines)}</table></div>"
    )


def _used(figures: Mapping[str, Any]) -> str:
    unusable = figures.get("unusable_steps") or {}
    rows = "".join(
        f'<tr><td class="l">{escape(str(key))}</td><td>{value:,}</td></tr>'
        for key, value in (*(figures.get("phases") or {}).items(), *unusable.items())
    )
    if not rows:
        return ""
    return (
        "<h2>What was used</h2>"
        '<p class="caption">Usable steps by phase of the load, then those left out, by reason.</p>'
        f'<div class="card scroll"><table>{rows}</table></div>'
    )
