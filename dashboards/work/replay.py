"""Plays a scenario, exactly as ``twinkeel replay`` does, and makes what the page draws of it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from dashboards.scenario import Scenario, by_name
from dashboards.shelf import Shelf
from traces import open_trace
from twin.fleet import fleet_of
from twin.replay import ReplayOptions, named_policies
from twin.replay import replay as play
from twin.report import charts, write_html, write_json
from twin.report.figures import fleet_text, labels_of, slo_text
from twin.report.files import plain, write_whole
from twin.report.requests import METRICS, Requests, requests_over_time, slowest
from twin.report.texts import text_tables
from twin.summary import Slo

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from twin.replay import Replay

LOGGED_MOST = 300_000
"""Requests, of all policies together, whose decisions are written down; that takes some 350 bytes
each, and as much again where prompts share prefixes. Of longer runs no stories can be told."""
SLOWEST = 50
PLAYED = 0.9
"""Share of the work; the rest makes charts."""


def run(
    request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]
) -> None:  # fmt: skip
    """Write ``report.json`` and ``report.html`` as the command does, a folder a policy, and what
    the page draws.

    Raises:
        ValueError: the scenario cannot be played, and why.
    """
    scenario = msgspec.convert(request, Scenario)
    path_of = Shelf(folder.parents[1] / "uploads").path_of
    tell(0.0, "reading the trace")
    trace = open_trace(path_of(scenario.trace))
    fleet = fleet_of([(by_name(kind.profile), kind.replicas) for kind in scenario.fleet])
    policies = named_policies([str(path_of(name)) for name in scenario.policies])
    rows = round(trace.rows * scenario.scale)
    logged = rows * len(policies) <= LOGGED_MOST
    options = ReplayOptions(
        seed=scenario.seed, speed=scenario.speed, scale=scenario.scale,
        scale_lengths=scenario.scale_lengths, assume_output=scenario.assume_output,
        log="full" if logged else "hash", slo=Slo.parse(scenario.slo),
        faults=scenario.parsed_faults(),
    )  # fmt: skip
    replays: list[Replay] = []
    for place, (name, parameters) in enumerate(policies):
        settled = 0

        def progress(more: int, place: int = place, name: str = name) -> None:
            nonlocal settled
            settled += more
            share = (place + min(1.0, settled / max(1, rows))) / len(policies)
            tell(PLAYED * share, f"replay under {name}")

        played = play(
            trace, fleet, parameters, options, policy_name=name, out=folder / name,
            progress=progress,
        )  # fmt: skip
        # What a command says that keeps no log: the figures are the same.
        replays.append(replace(played, options=replace(options, log="hash")))
    tell(PLAYED, "making charts")
    write_json(replays, folder / "report.json")
    write_html(replays, folder / "report.html")
    _write(folder / "rows.json", text_tables(replays))
    _write(folder / "charts.json", _charts(replays))
    _requests(folder, replays, tell)
    _write(folder / "run.json", _about(replays, logged=logged))


def _write(path: Path, value: Any) -> None:
    text = json.dumps(plain(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    write_whole(path, text)


def _about(replays: Sequence[Replay], *, logged: bool) -> dict[str, Any]:
    first = replays[0]
    return {
        "labels": labels_of(replays), "logged": logged, "offered": first.summary.all.offered,
        "trace": first.trace, "fleet": fleet_text(first), "slo": slo_text(first),
        "wall_s": sum(run.wall_s for run in replays),
    }  # fmt: skip


def _charts(replays: Sequence[Replay]) -> dict[str, Any]:
    """By what the page calls them; None where there is nothing to draw."""
    labels = labels_of(replays)
    return {
        "distributions": charts.distributions(replays, labels),
        "hop_bars": charts.hop_bars(replays, labels),
        "hop_shares": charts.hop_shares(replays, labels),
        "attainment": charts.attainment_bars(replays, labels),
        "outcomes": charts.outcome_bars(replays, labels),
        "reasons": charts.reason_bars(replays, labels),
        "tier_ttft": charts.tier_ranges(replays, labels, "ttft_s"),
        "tier_queue": charts.tier_ranges(replays, labels, "queue_s"),
        "over_time": charts.over_time(replays, labels),
    }


def _requests(
    folder: Path, replays: Sequence[Replay], tell: Callable[[float | None, str], None]
) -> None:  # fmt: skip
    slow = {}
    for place, (label, played) in enumerate(zip(labels_of(replays), replays, strict=True)):
        tell(PLAYED + (1 - PLAYED) * place / len(replays), "making charts")
        requests = Requests(folder / played.policy / "requests.parquet")
        slow[label] = {metric: slowest(requests, metric, SLOWEST) for metric in METRICS}
        for metric in METRICS:
            chart = requests_over_time(requests, place, metric, played.options.faults)
            _write(folder / f"requests-{place}-{metric}.json", chart)
    _write(folder / "slowest.json", slow)
