"""A chain as a picture: a row a step, what its time went to, and all that is known of it."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from dashboards.parts.live.html import (
    Html,
    badge,
    bar,
    html_of,
    joined,
    muted,
    strip,
    strong,
    table,
    whole,
)
from dashboards.state import said, t
from twin.report.figures import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from controller.store.steps import ChainView, StepView
    from dashboards.parts.charts import Chart

STEPS_MOST = 100
"""Rows."""
NAME_MOST = 28
"""Characters of a step's name beside its row."""
ATTRIBUTES_MOST = 12
VALUE_MOST = 80
ROW_PX = 24
LINE = "<br>"
OWN, REST = "own", "rest"
COLOURS = {
    "gateway": "--hop-gateway", "queue": "--hop-queue", "schedule": "--hop-schedule",
    "prefill": "--hop-prefill", "decode": "--hop-decode", "network": "--hop-network",
    REST: "--shed", OWN: "--p4",
}  # fmt: skip
"""Of the parts of a step, in their order; the client's own steps have one part."""
OUTCOMES = {
    "answered": "--good", "done": "--good", "degraded": "--late", "late": "--late",
    "shed": "--shed", "failed": "--failed", "cancelled": "--p5",
}  # fmt: skip
ENDED_BY_BUDGET = "chain_budget"
SHOWN_BEYOND = 0.5
"""The budget's end is drawn where it lies no further behind the last step than this share of the
chain: else it would leave the steps no room."""


def parts_of(step: StepView) -> list[tuple[str, float, float]]:
    """Name, begin and end of each part, in seconds since the chain began, one after another. What
    is not known of a step's time is ``rest``; parts that overlap are cut at the step's end."""
    if step.external:
        return [(OWN, step.began_s, step.ended_s)]
    found = []
    at_s = step.began_s
    for name in COLOURS:
        took_s = None if name in (REST, OWN) else getattr(step, f"{name}_s")
        end_s = min(step.ended_s, at_s + (took_s or 0.0))
        if end_s > at_s:
            found.append((name, at_s, end_s))
            at_s = end_s
    if step.ended_s > at_s:
        found.append((REST, at_s, step.ended_s))
    return found


def budget_end_s(chain: ChainView) -> float | None:
    """When the budget ends, in seconds since the chain began; None: it has none, or, where it had
    ended before the last step did, nobody knows any more."""
    if chain.left_s is None:
        return None
    total_s = _total_s(chain)
    if chain.left_s > 0.0:
        return total_s + chain.left_s
    if chain.budget_s is not None and chain.budget_s <= total_s:
        return chain.budget_s
    return None


def part_name(name: str) -> str:
    """For people."""
    if name == OWN:
        return t("live.chain.own")
    return t("live.chain.rest") if name == REST else said(name)


def waterfall(chain: ChainView) -> Chart:
    """The chart; its first row is the first step."""
    steps = chain.steps[:STEPS_MOST]
    labels = [_label(number, step) for number, step in enumerate(steps, 1)]
    told = [_hover(step) for step in steps]
    bars: dict[str, list[tuple[int, float, float]]] = {name: [] for name in COLOURS}
    for row, step in enumerate(steps):
        for name, from_s, to_s in parts_of(step):
            bars[name].append((row, from_s, to_s))
    traces: list[dict[str, Any]] = [
        {
            "type": "bar", "orientation": "h", "name": part_name(name),
            "y": [labels[row] for row, _, _ in found],
            "base": [from_s for _, from_s, _ in found],
            "x": [to_s - from_s for _, from_s, to_s in found],
            "marker": {"color": COLOURS[name]}, "hoverinfo": "text",
            "hovertext": [
                f"{escape(part_name(name), quote=False)}: {duration(to_s - from_s)}{LINE}"
                f"{told[row]}"
                for row, from_s, to_s in found
            ],
        }
        for name, found in bars.items() if found
    ]  # fmt: skip
    total_s = max(_total_s(chain), 1e-6)
    shapes, wide_s = _budget_line(budget_end_s(chain), total_s)
    layout = {
        "uirevision": f"chain {chain.user} {chain.chain}", "barmode": "overlay", "bargap": 0.25,
        "xaxis": {"title": {"text": "since the chain began, s"}, "range": [0, wide_s]},
        "yaxis": {
            "type": "category", "autorange": "reversed", "categoryorder": "array",
            "categoryarray": labels, "tickmode": "array", "tickvals": labels,
        },
        "shapes": shapes, "margin": {"l": 8},
    }  # fmt: skip
    return {"traces": traces, "layout": layout, "height": 84 + ROW_PX * len(steps)}


def _budget_line(end_s: float | None, total_s: float) -> tuple[list[dict[str, Any]], float]:
    """Where the budget ends, with a place in the legend, and up to where the axis goes."""
    if end_s is None or end_s > total_s * (1 + SHOWN_BEYOND):
        return [], 1.02 * total_s
    shape = {
        "type": "line", "x0": end_s, "x1": end_s, "yref": "paper", "y0": 0, "y1": 1,
        "line": {"color": "--failed", "width": 2, "dash": "dot"},
        "name": t("live.chain.budget_end"), "showlegend": True,
    }  # fmt: skip
    return [shape], 1.04 * max(end_s, total_s)


def _total_s(chain: ChainView) -> float:
    return max((step.ended_s for step in chain.steps), default=0.0)


def _label(number: int, step: StepView) -> str:
    """Of a row; names may be there twice, and Plotly takes them for marks."""
    name = step.step or t("live.chain.unnamed")
    if len(name) > NAME_MOST:
        name = name[: NAME_MOST - 1] + "…"
    return f"{number} {escape(name, quote=False)}"


def _hover(step: StepView) -> str:
    """All of a step, in lines for Plotly."""
    took = duration(step.ended_s - step.began_s)
    facts = [
        ("", f"<b>{escape(step.step[:VALUE_MOST] or t('live.chain.unnamed'), quote=False)}</b>"),
        (t("live.chain.took"), took),
        (t("live.outcome"), " ".join(part for part in (said(step.outcome), _why(step)) if part)),
        (t("live.chain.where"), " · ".join(_where(step))),
        (t("live.chain.tokens"), _tokens(step)),
        (t("live.chain.trust"), " · ".join(_trust(step))),
        (t("live.chain.checkpoint"), step.checkpoint),
        *_attributes(step),
    ]
    return LINE.join(
        f"{escape(name, quote=False)}: {escape(text[:VALUE_MOST], quote=False)}" if name else text
        for name, text in facts if text and text != "-"
    )  # fmt: skip


# In words


def head_strip(chain: ChainView) -> Html:
    """The chain in a few lines: whose, how long, what was left, whether it is partial."""
    parts: list[object] = [strong(chain.chain)]
    if chain.partial:
        parts.append(badge(t("live.chain.partial"), "--failed"))
    if chain.over:
        parts.append(badge(t("live.chain.over"), "--p5"))
    if chain.user:
        parts.append(t("live.chain.of_user", user=chain.user))
    if chain.line:
        parts.append(t("live.chain.of_line", line=chain.line))
    parts.append(t("live.chain.steps_in", count=len(chain.steps), time=duration(_total_s(chain))))
    parts.append(_budget(chain))
    if chain.trace_id:
        parts.append(muted(t("live.chain.trace", id=chain.trace_id)))
    return strip(parts)


def _budget(chain: ChainView) -> str:
    if chain.left_s is None:
        if chain.budget_s is None:
            return t("live.chain.no_budget")
        return t("live.chain.budget", budget=duration(chain.budget_s))
    left = duration(chain.left_s)
    if chain.budget_s is None:
        return t("live.chain.left", left=left)
    return t("live.chain.left_of", left=left, budget=duration(chain.budget_s))


def budget_bar(chain: ChainView) -> Html | None:
    """What was left of the budget; None: that is not known."""
    if chain.left_s is None or not chain.budget_s:
        return None
    return bar(chain.left_s / chain.budget_s, "--good" if chain.left_s > 0.0 else "--failed")


def step_table(steps: Sequence[StepView]) -> Html:
    """A row a step, with what the chart has no room for."""
    head = [
        t("live.chain.step"), t("live.chain.began"), t("live.chain.took"), t("live.outcome"),
        t("live.chain.where"), t("live.chain.tokens"), t("live.chain.trust"),
        t("live.chain.checkpoint"), t("live.chain.attributes"),
    ]  # fmt: skip
    rows = [
        [
            _name(number, step), duration(step.began_s), duration(step.ended_s - step.began_s),
            _outcome(step), joined(map(whole, _where(step)), LINE) or "-", _tokens(step),
            joined(map(whole, _trust(step)), LINE) or "-",
            _narrow(step.checkpoint) if step.checkpoint else "-", _attribute_lines(step),
        ]
        for number, step in enumerate(steps[:STEPS_MOST], 1)
    ]  # fmt: skip
    return table(head, rows, (1, 2, 5))


def _name(number: int, step: StepView) -> Html:
    name: object = step.step or muted(t("live.chain.unnamed"))
    parts: list[object] = [joined([f"{number} ", name])]
    if step.external:
        parts.append(badge(t("live.chain.own"), COLOURS[OWN]))
    if step.request:
        parts.append(muted(_narrow(step.request)))
    return joined(parts, LINE)


def _narrow(number: str) -> Html:
    """One long word, broken anywhere: it would push the last columns out of sight."""
    return Html(
        f'<span style="display:inline-block;min-width:7rem;overflow-wrap:anywhere">'
        f"{html_of(number)}</span>"
    )


def _outcome(step: StepView) -> Html:
    shown = badge(said(step.outcome), OUTCOMES.get(step.outcome, "--p5"))
    if step.why == ENDED_BY_BUDGET:
        return joined([shown, badge(_why(step), "--failed")], LINE)
    return joined([shown, _why(step)], LINE) if step.why else shown


def _why(step: StepView) -> str:
    return said(step.why.replace("_", " "))


def _where(step: StepView) -> list[str]:
    parts = [step.model, said(step.tier), step.replica]
    return [part for part in parts if part]


def _tokens(step: StepView) -> str:
    if step.prompt_tokens is None and step.output_tokens is None:
        return "-"
    known = [
        t("live.unknown") if count is None else f"{count:,}"
        for count in (step.prompt_tokens, step.output_tokens)
    ]
    return " + ".join(known)


def _trust(step: StepView) -> list[str]:
    found = []
    if step.confidence is not None:
        found.append(f"{step.confidence:.3f}")
    if step.verification:
        found.append(said(step.verification.replace("_", " ")))
    return found


def _attributes(step: StepView) -> Iterator[tuple[str, str]]:
    for name, value in list(step.attributes.items())[:ATTRIBUTES_MOST]:
        yield name, _value(value)


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= VALUE_MOST else text[: VALUE_MOST - 1] + "…"


def _attribute_lines(step: StepView) -> Html:
    lines: list[object] = [
        joined([muted(f"{name} "), html_of(value)]) for name, value in _attributes(step)
    ]
    more = len(step.attributes) - ATTRIBUTES_MOST
    if more > 0:
        lines.append(muted(t("live.fleet_more", count=more)))
    return joined(lines, LINE) or html_of("-")
