"""A plan or an answer as one page that opens without any network, for whoever decides about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from twin.plan.charts import Chart, knee_charts, sizes_chart
from twin.plan.doubts import doubts
from twin.plan.show import estimate_of
from twin.plan.words import NAMES
from twin.report.files import write_whole
from twin.report.page import document

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable, Mapping, Sequence

BADGES = {"measured": "fitted", "fitted": "fitted"}
"""Style of a kind; the others are unsure."""


@dataclass(frozen=True, slots=True)
class Paper:
    """What a page is made from: the document of an answer or a plan, and what it stands on."""

    question: str
    """Its name, or ``plan``."""
    title: str
    document: Mapping[str, Any]
    """What ``show.document_of`` makes."""
    facts: Mapping[str, Any] | None
    """What ``Ready.facts`` says; None: the answer is arithmetic alone."""
    command: str
    """That gives the same figures."""
    scenario: Mapping[str, str] = field(default_factory=dict)
    """More of what was asked, by name."""


def write_page(paper: Paper, path: str | os.PathLike[str]) -> None:
    """
    Raises:
        ReportError: the file cannot be written.
    """
    write_whole(path, page(paper))


def page(paper: Paper) -> str:
    """The whole page."""
    own = paper.document
    drawn: dict[str, Chart] = {}
    sections = [_header(paper)]
    if "sizes" in own:
        sections += [_sizes(own, drawn), _knee(own, drawn), _faults(own), _rejected(own)]
    else:
        sections.append(_section(
            "Figures", "Each with its interval and its kind.", figures_table(own["figures"])
        ))  # fmt: skip
    sections += [_doubts(paper), _footer(paper)]
    return document(paper.title, [section for section in sections if section], drawn)


def figures_table(figures: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for raw in figures:
        one = estimate_of(raw)
        rows.append(
            f'<tr><td class="l">{escape(one.name)}</td><td class="l">{escape(one.text())}</td>'
            f"<td>{_badge(one.kind)}</td><td>{one.runs}</td></tr>"
        )
    return _table(("figure", "value, with where nine in ten lie", "kind", "runs"), rows)


def _header(paper: Paper) -> str:
    own, facts = paper.document, paper.facts
    first, *others = own["sentences"]
    rows = {}
    if facts is not None:
        notes = f" ({'; '.join(facts['notes'])})" if facts["notes"] else ""
        rows = {
            "Trace": f"{facts['trace']}: {facts['rows']:,} requests in {facts['span_s']:,.0f} s, "
            f"{facts['peak_rate_per_s']:.3g} a second at the peak{notes}",
            "Model": facts["model"],
            "Promised": f"{facts['promise']}; {facts['tpot_s']:g} s a token; "
            f"{facts['confidence']:.0%} sure, over {facts['draws']} days",
            "Policy": f"{facts['policy']}, a fleet of fixed size",
            "Profiles": "; ".join(f"{m['name']} ({m['fitted_on']})" for m in facts["machines"]),
        }
    rows |= paper.scenario
    listed = "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in rows.items())
    said = "".join(f"<li>{escape(text)}</li>" for text in others)
    return (
        '<header><div class="eyebrow">Twinkeel · capacity plan</div>'
        f'<h1>{escape(paper.title)}</h1><p class="verdict">{escape(first)}</p>'
        f'<ul>{said}</ul><dl class="facts">{listed}</dl></header>'
    )


def _sizes(own: Mapping[str, Any], drawn: dict[str, Chart]) -> str:
    rows = []
    for size in own["sizes"]:
        head = f'<td class="l">{size["growth"]:g}x</td><td class="l">{escape(size["machine"])}</td>'
        if size["replicas"] is None:
            why = size["refused"]
            said = escape(f"gate {why['gate']}: {why['why']}")
            rows.append(f'<tr>{head}<td class="l" colspan="4">{said}</td></tr>')
            continue
        figures = [
            escape(estimate_of(size[name]).text()) if size[name] is not None else ""
            for name in ("replicas", "usd_per_month", "usd_per_million_good_tokens")
        ]
        bracket = f"{size['bracket'][0]} to {size['bracket'][1]}"
        cells = "".join(f"<td>{text}</td>" for text in (figures[0], bracket, *figures[1:]))
        rows.append(f"<tr>{head}{cells}</tr>")
    table = _table(
        ("load", "replica", "fewest", "by formula", "a month", "a million good tokens"), rows
    )
    return _section(
        "How many does it take?",
        "Fewest replicas that hold every promise on the recorded day and on others like it. "
        "Whiskers: down to what holds on the recorded day alone.",
        _chart("sizes", sizes_chart(own), drawn, "Replicas by growth of the load") + table,
    )


def _knee(own: Mapping[str, Any], drawn: dict[str, Chart]) -> str:
    knee = own["knee"]
    if knee is None:
        return ""
    charts = knee_charts(own)
    drawings = "".join(
        _chart(f"knee-{name}", charts[name], drawn, title)
        for name, title in (("attainment", "SLO attainment"), ("ttft", "Time to first token, p95"))
    )
    cause = knee["cause"]
    body = (
        f"<p>Up to {escape(estimate_of(knee['multiple']).text())}. What gives way first is the "
        f"<b>{escape(cause['part'])}</b>: {escape(cause['why'])}. Next knob: "
        f"<b>{escape(cause['knob'])}</b>.</p>"
        f'<div class="grid two">{drawings}</div>'
    )
    return _section(
        "How much load does the cheapest fleet bear?",
        "Green: loads at which every promise holds. Yellow: where the knee lies on nine days in "
        "ten. Dashed: what is promised. A gap in a curve: more than one in twenty got no answer.",
        body,
    )


def _faults(own: Mapping[str, Any]) -> str:
    rows = []
    for cell in own["faults"]:
        size = cell["size"]
        worst = cell["effects"][0] if cell["effects"] else None
        points = escape(estimate_of(worst["points"]).text()) if worst else "none seen"
        lasts = escape(estimate_of(worst["lasts_s"]).text()) if worst else ""
        who = escape(worst["group"] or "other") if worst else ""
        rows.append(
            f'<tr><td class="l">{size["growth"]:g}x</td><td class="l">{escape(size["machine"])}'
            f"</td><td>{size['replicas']['value']:.0f}</td>"
            f'<td class="l">{escape(NAMES.get(cell["fault"], cell["fault"]))}</td>'
            f"<td>{'yes' if cell['holds'] else 'no'}</td><td>{who}</td><td>{points}</td>"
            f"<td>{lasts}</td></tr>"
        )
    if not rows:
        return ""
    heads = ("load", "replica", "of them", "fault", "holds", "hardest hit", "loses", "for")
    return _section(
        "What does a fault cost?", "Beside the same day without it.", _table(heads, rows)
    )


def _rejected(own: Mapping[str, Any]) -> str:
    texts = dict.fromkeys(
        f"{one['name']}: gate {one['gate']}: {one['why']}." for one in own["rejected"]
    )
    if not texts:
        return ""
    rows = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return _section("What was left out?", "And the gate that says so.", f"<ul>{rows}</ul>")


def _doubts(paper: Paper) -> str:
    texts = doubts(paper.question, paper.document, paper.facts)
    rows = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return _section("What would make it wrong?", "", f"<ul>{rows}</ul>")


def _footer(paper: Paper) -> str:
    items = ["These figures are simulated: only as good as the profiles named above."]
    items += [
        f"{one['name']}: {one['usd_per_hour']:g} USD an hour a card ({one['price_source']})."
        for one in (paper.facts or {"machines": ()})["machines"]
    ]
    rows = "".join(f"<li>{escape(text)}</li>" for text in items)
    return (
        f"<footer><h2>Assumptions</h2><ul>{rows}</ul><h2>The same again</h2>"
        f'<pre class="card scroll">{escape(paper.command)}</pre></footer>'
    )


def _section(title: str, caption: str, body: str) -> str:
    said = f'<p class="caption">{escape(caption)}</p>' if caption else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>"


def _chart(name: str, chart: Chart | None, drawn: dict[str, Chart], title: str) -> str:
    if chart is None:
        return ""
    layout = {**chart["layout"], "showlegend": True,
              "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
              "margin": {"t": 34}}  # fmt: skip
    drawn[name] = {**chart, "layout": layout}
    style = f"height:{chart['height']}px"
    return (
        f'<div class="card" style="margin-bottom:12px"><h3>{escape(title)}</h3>'
        f'<div id="{name}" style="{style}"></div></div>'
    )


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f'<th class="l">{escape(name)}</th>' for name in heads)
    return (
        f'<div class="card scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _badge(kind: str) -> str:
    return f'<span class="badge {BADGES.get(kind, "unsure")}">{escape(kind)}</span>'


__all__ = ["Paper", "figures_table", "page", "write_page"]
