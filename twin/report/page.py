"""The report as one page that opens without any network."""

from __future__ import annotations

import json
import math
from html import escape
from typing import TYPE_CHECKING, Any

from twin.report import charts
from twin.report.assets import CSS, JS
from twin.report.figures import (
    NONE,
    Row,
    count,
    differences,
    duration,
    duration_rows,
    fleet_text,
    group_name,
    group_of,
    interval_texts,
    intervals,
    labels_of,
    names_in,
    overall_rows,
    share,
    slo_text,
    verdict,
)
from twin.report.files import plain, write_whole

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from policy.cost import Profile
    from twin.replay import Replay
    from twin.report.charts import Chart
    from twin.summary import Group

REPLICAS_SHOWN = 64
TRUST = {
    "fitted": "fitted",
    "untuned": "untuned, not fitted to a running server",
    "scaled": "scaled, not yet fitted",
}
CSP = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:"
)
"""The browser itself refuses every request to the network."""


def write_html(replays: Sequence[Replay], path: str | os.PathLike[str]) -> None:
    """One self-contained page, replays side by side.

    Raises:
        ReportError: there is no replay, or the file cannot be written.
    """
    labels = labels_of(replays)
    page = _Page(replays, labels)
    write_whole(path, page.html())


def document(title: str, sections: Sequence[str], drawn: Mapping[str, Any]) -> str:
    """A whole page that needs no network: sections of HTML, and Plotly charts by element id."""
    from plotly.offline import get_plotlyjs

    data = json.dumps(plain(drawn), allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # a script element ends at the first "</"
    return "\n".join([
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{CSP}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Twinkeel: {escape(title)}</title>",
        f"<style>{CSS}</style></head><body><main>",
        *sections,
        "</main>",
        f'<script id="charts" type="application/json">{data}</script>',
        f"<script>{get_plotlyjs()}</script>",
        f"<script>{JS}</script>",
        "</body></html>\n",
    ])  # fmt: skip


class _Page:
    """Builds the page from top to bottom and gathers its charts on the way."""

    def __init__(self, replays: Sequence[Replay], labels: Sequence[str]) -> None:
        self.replays = replays
        self.labels = labels
        self._charts: dict[str, Chart] = {}

    def html(self) -> str:
        title = f"{' and '.join(self.labels)} on {self.replays[0].trace}"
        sections = [
            self._header(title),
            self._legend(),
            self._headlines(),
            self._promises(),
            self._latency(),
            self._hops(),
            self._over_time(),
            self._tiers(),
            self._numbers(),
            self._replicas(),
            self._footer(),
        ]
        return document(title, sections, self._charts)

    def _chart(self, name: str, chart: Chart, title: str = "") -> str:
        self._charts[name] = chart
        head = f"<h3>{escape(title)}</h3>" if title else ""
        style = f"height:{chart['height']}px"
        return f'<div class="card">{head}<div id="{escape(name)}" style="{style}"></div></div>'

    # ---- top ----

    def _header(self, title: str) -> str:
        first = self.replays[0]
        options = first.options
        facts = {
            "Trace": f"{escape(first.trace)}, {count(first.summary.all.offered)} requests"
            + _scaling(first),
            "Fleet": escape(fleet_text(first)),
            "Profiles": "<br>".join(_trust(profile) for profile in _profiles(self.replays)),
            "SLO": escape(slo_text(first)),
            "Seed": str(options.seed),
        }
        said = interval_texts(self.replays)
        if said:
            said.append("Charts show the run itself; whiskers are intervals.")
            facts["Intervals"] = "<br>".join(map(escape, said))
        rows = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in facts.items())
        unlike = differences(self.replays)
        warning = ""
        if unlike:
            warning = (
                '<p class="warning">Not like with like; different besides the policy: '
                f"{escape(', '.join(unlike))}. What is said above is of the first run.</p>"
            )
        return (
            '<header><div class="eyebrow">Twinkeel · replay report</div>'
            f"<h1>{escape(title)}</h1>"
            f'<p class="verdict">{escape(verdict(self.replays)).replace(" %", "&nbsp;%")}</p>'
            f'<dl class="facts">{rows}</dl>{warning}</header>'
        )

    def _name(self, place: int) -> str:
        colour = charts.policy_colour(place)
        swatch = f'<i class="swatch" style="--colour:var({colour})"></i>'
        return f"<span>{swatch}{escape(self.labels[place])}</span>"

    def _legend(self) -> str:
        names = "".join(self._name(place) for place in range(len(self.labels)))
        note = ""
        if len(self.labels) > 1:
            note = '<span class="caption">Bold: better by more than 1 %.</span>'
        return f'<div class="legend">{names}{note}</div>'

    def _headlines(self) -> str:
        rows = {row.name: row for row in overall_rows(self.replays)}
        tails = duration_rows([run.summary.all for run in self.replays], self.replays)
        nothing = Row("", tuple(math.nan for _ in self.replays), duration)
        ttft = tails["ttft_s"]["p95"] if "ttft_s" in tails else nothing
        shed_shares = tuple(
            run.summary.all.shed / run.summary.all.offered if run.summary.all.offered else math.nan
            for run in self.replays
        )
        cards = [
            ("SLO attainment", rows["SLO attainment, of offered"],
             "of offered requests: shed and failed ones count as missed"),
            ("Goodput", rows["goodput"],
             "answers within every SLO, from first arrival to last settlement"),
            ("Time to first token, p95", ttft, "from arrival at the controller; answered requests"),
            ("Shed",
             Row("", shed_shares, share, "low",
                 intervals=intervals(self.replays, "all.shed_share")),
             "of offered requests, by the policy"),
            ("GPU busy", rows["GPU busy"],
             "share of time in which a step was running, mean over all replicas"),
            ("Price of a million good tokens", rows["price of 1 M good tokens"],
             "whole fleet's hours over output tokens of answers within SLO"),
        ]  # fmt: skip
        return (
            f'<section class="grid cards">{"".join(self._card(*card) for card in cards)}</section>'
        )

    def _card(self, name: str, row: Row, what: str) -> str:
        best = row.best()
        only = " only" if not best else ""
        lines = "".join(
            f'<div class="line">{self._name(place)}'
            f'<span class="figure{" best" if place in best else only}">{escape(text)}'
            f"{_range(between)}</span></div>"
            for place, (text, between) in enumerate(zip(row.texts(), row.ranges(), strict=True))
        )
        return (
            f'<div class="card kpi"><div class="name">{escape(name)}</div>{lines}'
            f'<div class="what">{escape(what)}</div></div>'
        )

    # ---- charts ----

    def _promises(self) -> str:
        kept = self._chart("attainment", charts.attainment_bars(self.replays, self.labels),
                           "SLO attainment by class")  # fmt: skip
        became = self._chart("outcomes", charts.outcome_bars(self.replays, self.labels),
                             "What became of the requests")  # fmt: skip
        reasons = charts.reason_bars(self.replays, self.labels)
        why = (
            self._chart("reasons", reasons, "Why requests were shed or failed")
            if reasons
            else '<div class="card caption">Nothing was shed and nothing failed.</div>'
        )
        return _section(
            "Were the promises kept?",
            "Left: full bars count every request that was offered, hatched bars only those that "
            "were answered. A gap between the two is what shedding cost. Right: a policy that "
            "sheds trades grey for yellow; it pays off where the green grows. An answer is "
            "within its SLO if both its first token and its pace were.",
            f'<div class="grid two">{kept}{became}</div><div class="grid" '
            f'style="margin-top:12px">{why}</div>',
        )

    def _latency(self) -> str:
        parts = []
        for name, by_metric in charts.distributions(self.replays, self.labels).items():
            sizes = [group_of(run, "sla", name) for run in self.replays]
            offered = max(group.offered for group in sizes if group)
            cells = []
            for metric in charts.CDF_METRICS:
                if metric in by_metric:
                    cells.append(self._chart(f"cdf-{len(self._charts)}", by_metric[metric]))
                else:
                    cells.append('<div class="card caption">no such answers</div>')
            parts.append(
                f'<div class="row">{escape(group_name("sla", name))} '
                f"<span>{count(offered)} requests offered</span></div>"
                f'<div class="grid three">{"".join(cells)}</div>'
            )
        buttons = (
            '<div><button class="view" data-view="all" aria-pressed="true">Distribution</button>'
            '<button class="view" data-view="tail" aria-pressed="false">Tail</button></div>'
        )
        return _section(
            "How long did requests take?",
            "Each curve says which share of the answered requests took at most that long: further "
            "left and steeper is better. Where a curve crosses the dashed SLO line is the share "
            "that kept it. Shed requests are not in these curves. A flat stretch separates two "
            "kinds of request, such as embeddings from chat. The classes share their axes, so that "
            "they can be compared from top to bottom. “Tail” shows the slowest "
            "few in a hundred enlarged.",
            buttons + "".join(parts),
        )

    def _hops(self) -> str:
        keys = "".join(
            f'<span><i class="swatch" style="--colour:var(--hop-{hop.removesuffix("_s")})"></i>'
            f"{name}</span>"
            for hop, name in charts.HOP_NAMES.items()
        )
        whole = self._chart("hops", charts.hop_bars(self.replays, self.labels),
                            "The whole answer")  # fmt: skip
        head = self._chart("hops-head", charts.hop_shares(self.replays, self.labels),
                           "Without decode: what the first token waits for, in shares")  # fmt: skip
        return _section(
            "Where did the time go?",
            "Mean of each hop over the answered requests. Waiting shows red (in the policy's "
            "queue, where it can still be put in order) or amber (in the engine's own queue, "
            "where it cannot). Prefill and decode are work; they grow when batches do.",
            f'<div class="keys">{keys}</div><div class="grid two">{whole}{head}</div>',
        )

    def _over_time(self) -> str:
        series = charts.over_time(self.replays, self.labels)
        titles = {
            "arrivals": "Arrivals",
            "running": "Running in the engines",
            "queued": "Waiting in the policy's queue",
            "waiting": "Waiting in the engines' queues",
            "kv": "KV cache of the generating replicas: mean (line), fullest (dotted)",
        }
        cells = [
            self._chart(f"time-{key}", series[key], title)
            for key, title in titles.items()
            if key in series
        ]
        return _section(
            "What happened over time?",
            "Look for where queues begin to grow and how long they take to empty again. A KV "
            "cache near 100 % means that running requests are thrown out and computed again. Long "
            "runs show about a thousand instants, so that brief peaks may be missing.",
            f'<div class="grid two">{"".join(cells)}</div>',
        )

    def _tiers(self) -> str:
        chart = charts.tier_ranges(self.replays, self.labels)
        if chart is None:
            return ""
        rows = []
        tiered = [place for place, run in enumerate(self.replays) if any(names_in([run], "tier"))]
        for name in names_in([self.replays[place] for place in tiered], "tier"):
            colour = charts.tier_colour(name)
            cells = [_tier_cells(self.replays[place], name) for place in tiered]
            rows.append(
                f'<tr><td class="l"><i class="swatch" style="--colour:var({colour})"></i>'
                f"{escape(group_name('tier', name))}</td>{''.join(cells)}</tr>"
            )
        heads = "".join(f'<th colspan="3" class="of">{self._name(place)}</th>' for place in tiered)
        subs = "<th>requests</th><th>shed</th><th>SLO kept</th>" * len(tiered)
        table = (
            f'<div class="card scroll"><h3>Requests by tier</h3><table><thead><tr><th></th>{heads}'
            f"</tr><tr><th></th>{subs}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        )
        ranges = self._chart("tiers", chart, "Time to first token by tier")
        return _section(
            "How did each tier fare?",
            "Each line runs from the median to p99; the large dot is p95. Policies without tiers "
            "are not shown. Shed requests count in the tier that they would have had.",
            f'<div class="grid two">{ranges}{table}</div>',
        )

    # ---- tables and end ----

    def _numbers(self) -> str:
        names = "".join(f"<th>{self._name(place)}</th>" for place in range(len(self.labels)))
        rows = "".join(
            f'<tr><td class="l{" sub" if row.name.startswith(" ") else ""}">'
            f'{escape(row.name.strip())} <span class="note">{escape(row.note)}</span></td>'
            f"{_cells([row])}</tr>"
            for row in overall_rows(self.replays)
        )
        heads = "".join(
            f'<th colspan="3" class="of">{self._name(i)}</th>' for i in range(len(self.labels))
        )
        subs = "<th>p50</th><th>p95</th><th>p99</th>" * len(self.labels)
        everyone = [run.summary.all for run in self.replays]
        body = "".join(_latency_rows("all", everyone, self.replays, "all"))
        for kind in ("sla", "line", "tier"):
            for name in names_in(self.replays, kind):
                if kind == "sla" or name:
                    groups = [group_of(run, kind, name) for run in self.replays]
                    title, path = f"{_KIND[kind]}{group_name(kind, name)}", f"by_{kind}.{name}"
                    body += "".join(_latency_rows(title, groups, self.replays, path))
        return _section(
            "All figures",
            f"Durations with their unit; “{NONE}” where there is none.",
            '<div class="grid"><div class="card scroll"><table><thead><tr><th class="l">'
            f"overall</th>{names}</tr></thead><tbody>{rows}</tbody></table></div>"
            '<div class="card scroll"><table><thead><tr><th></th><th></th>'
            f"{heads}</tr><tr><th></th><th></th>{subs}</tr></thead><tbody>{body}</tbody></table>"
            "</div></div>",
        )

    def _replicas(self) -> str:
        heads = "".join(f"<th>{self._name(place)}</th>" for place in range(len(self.labels)))
        most = max(self.replays, key=lambda run: len(run.fleet))
        rows = []
        for place, spec in enumerate(most.fleet[:REPLICAS_SHOWN]):
            busy = tuple(
                run.gpu_busy[place] if place < len(run.gpu_busy) else math.nan
                for run in self.replays
            )
            known = intervals(self.replays, f"gpu_busy_share.{place}")
            cells = _cells([Row("", busy, share, intervals=known)])
            rows.append(
                f'<tr><td class="l">{escape(spec.name)}</td>'
                f"<td>{count(spec.settings.kv_blocks)}</td>"
                f"<td>{spec.usd_per_hour:.2f}</td>{cells}</tr>"
            )
        left = len(most.fleet) - len(rows)
        more = f'<p class="caption">and {left} more replicas</p>' if left else ""
        return _section(
            "Replicas",
            "Busy: the share of the run in which the replica had a step running. It says nothing "
            "about how full the steps were.",
            '<div class="card scroll"><table><thead><tr><th class="l">replica</th>'
            f"<th>KV blocks</th><th>USD per hour</th>{heads}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table>{more}</div>",
        )

    def _footer(self) -> str:
        gpus = {spec.gpu.name: spec.gpu for run in self.replays for spec in run.fleet}
        prices = [
            f"Cost: {escape(gpu.name)} at {gpu.usd_per_hour:g} USD an hour "
            f"({escape(gpu.usd_source)}; <code>policy/profiles/gpus.yaml</code>). Every card "
            "of the fleet is paid for from first arrival to last settlement, busy or not."
            for gpu in gpus.values()
        ]
        world = self.replays[0].options.world
        items = [
            "These figures are simulated: engines follow vLLM's V1 scheduler, step times come from "
            "the profiles named at the top. Absolute times are only as good as those profiles.",
            "TTFT counts from arrival at the controller, so the policy's own queue is in it "
            "(vLLM's own metric leaves it out). For an embedding it is the time to the answer.",
            "TPOT is (end to end &minus; TTFT) / (output tokens &minus; 1), one figure a request.",
            "Quantiles come from histograms and are within 0.5 % of exact ones; figures less than "
            "1 % apart are not called better or worse.",
            "Hops are means over answered requests. A policy that sheds the slow ones looks better "
            "there: read them together with what was shed.",
            f"Assumed: {duration(world.gateway_ns / 1e9)} of the gateway's work a request and "
            f"{duration(world.network_ns / 1e9)} of network each way.",
            *prices,
            *(
                f"{escape(label)}: {count(run.decisions)} decisions, log hash "
                f"<code>{escape(run.log_hash[:16])}</code>; the same trace, fleet, policy and seed "
                "give the same hash."
                for label, run in zip(self.labels, self.replays, strict=True)
            ),
        ]
        rows = "".join(f"<li>{item}</li>" for item in items)
        return f"<footer><h2>Assumptions and limits</h2><ul>{rows}</ul></footer>"


_KIND = {"sla": "", "line": "line ", "tier": "tier "}


def _section(title: str, caption: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="caption">{caption}</p>{body}</section>'


def _latency_rows(
    name: str, groups: Sequence[Group | None], replays: Sequence[Replay], path: str
) -> Iterable[str]:
    for place, rows in enumerate(duration_rows(groups, replays, path).values()):
        head = escape(name) if place == 0 else ""
        first = ' class="first"' if place == 0 else ""
        yield (
            f'<tr{first}><td class="l">{head}</td><td class="l">{rows["p50"].name}</td>'
            f"{_cells(list(rows.values()))}</tr>"
        )


def _tier_cells(replay: Replay, name: str) -> str:
    group = group_of(replay, "tier", name)
    if group is None:
        return f"<td>{NONE}</td>" * 3
    figures = {
        "offered": (group.offered, count),
        "shed": (group.shed, count),
        "slo_attainment": (group.attainment(), share),
    }
    return _cells([
        Row(figure, (value,), write, intervals=intervals([replay], f"by_tier.{name}.{figure}"))
        for figure, (value, write) in figures.items()
    ])  # fmt: skip


def _cells(rows: Sequence[Row]) -> str:
    """Run by run, the figures of ``rows``."""
    marked = [(row.texts(), row.ranges(), row.best()) for row in rows]
    return "".join(
        f"<td class='{'best' if run in best else ''}'>{escape(texts[run])}{_range(ranges[run])}"
        "</td>"
        for run in range(len(rows[0].values))
        for texts, ranges, best in marked
    )


def _range(between: str) -> str:
    return f'<span class="range">{escape(between)}</span>' if between else ""


def _text(value: float, write: Callable[[float], str]) -> str:
    return NONE if math.isnan(value) else write(value)


def _scaling(replay: Replay) -> str:
    options = replay.options
    parts = []
    for value, text in (
        (options.speed, "played {} times as fast"),
        (options.scale, "rate &times; {}"),
        (options.scale_lengths, "lengths &times; {}"),
    ):
        if value != 1.0:
            parts.append(", " + text.format(f"{value:g}"))
    return "".join(parts)


def _profiles(replays: Sequence[Replay]) -> list[Profile]:
    found = {spec.profile.name: spec.profile for run in replays for spec in run.fleet}
    return list(found.values())


def _trust(profile: Profile) -> str:
    trust = profile.trust
    source = trust.fitted_on.removeprefix(f"{TRUST[trust.status]}: ").removeprefix("untuned: ")
    kind = "fitted" if trust.status == "fitted" else "unsure"
    held_out = [error.held_out_mean_percent for error in trust.errors]
    errors = ""
    known = [value for value in held_out if value is not None]
    if known:
        errors = f". Mean error of step times on held-out rows: {min(known):g} to {max(known):g} %"
    return (
        f'{escape(profile.name)} <span class="badge {kind}">{TRUST[trust.status]}</span>'
        f'<span class="caption">{escape(source)}{errors}</span>'
    )
