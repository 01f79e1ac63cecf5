"""A status as tables in a terminal."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import RenderableType

    from controller.admin.status import PolicyView, ReplicaView, Status, TierView

ALERTS_SHOWN = 10
BREAKERS_SHOWN = 20
QUEUE_MS = {"queue_ms_p50": "time in queue, p50", "queue_ms_p95": "time in queue, p95"}
_GOOD, _BAD = "green", "red"


def tables(status: Status) -> Iterator[RenderableType]:
    """Everything an operator looks at first, the most important first."""
    mode = ", observing only" if status.observe else ""
    shadow = "" if status.shadow is None else f" in shadow {_policy(status.shadow)};"
    yield Text(
        f"{status.state}{mode}; policy {_policy(status.policy)};{shadow}"
        f" up {_span(status.uptime_s)}; {status.open_requests} open,"
        f" {status.settled_requests} settled, {status.lost_requests} lost in a crash before"
    )
    if status.deployment:
        yield Text(f"being deployed: {status.deployment} (see twinkeel policy status)")
    if status.refused_events:
        yield Text(
            f"{status.refused_events} events were refused as illegal: please report it", style=_BAD
        )
    yield replicas(status)
    yield tiers(status)
    yield hops(status)
    yield outcomes(status)
    yield from _answers(status)
    yield from _breakers(status)
    yield from _alerts(status)
    if status.observed is not None:
        yield _observed(status.observed)


def replicas(status: Status) -> Table:
    """Where each server stands."""
    table = _table("replicas", "name", "state", "rotation", "open", "engine waits", "KV %",
                   "network ms", "drift %", "model")  # fmt: skip
    for row in status.replicas:
        table.add_row(
            row.name,
            Text("up", _GOOD) if row.up else Text("down", _BAD),
            _rotation(row),
            str(row.in_flight),
            _known(row.waiting, str(row.waiting)),
            _known(row.kv_used_permille, f"{row.kv_used_permille / 10:.1f}"),
            _ms(row.network_ms),
            "-" if row.drift_permille is None else f"{row.drift_permille / 10:+.1f}",
            _model(row),
        )
    return table


def tiers(status: Status) -> Table:
    """How each tier keeps its promise."""
    table = _table("tiers (last 1000 calls)", "tier", "queued", "in flight", "calls",
                   "TTFT p50 ms", "TTFT p95 ms", "promise p95 ms")  # fmt: skip
    for row in status.tiers:
        table.add_row(
            row.tier, str(row.queued), str(row.in_flight), str(row.calls), _ms(row.ttft_ms_p50),
            _kept(row), _known(row.promise_ms, str(row.promise_ms)),
        )  # fmt: skip
    return table


def hops(status: Status) -> Table:
    """Where the time went."""
    table = _table("hops of answered calls (last 1000)", "hop", "calls", "p50 ms", "p95 ms")
    for row in status.hops:
        table.add_row(row.hop, str(row.calls), _ms(row.ms_p50), _ms(row.ms_p95))
    return table


def outcomes(status: Status) -> Table:
    """How requests ended."""
    table = _table("outcomes since the start", "outcome", "reason", "requests")
    for row in status.outcomes:
        table.add_row(row.outcome, row.why or "-", str(row.requests))
    return table


def _answers(status: Status) -> Iterator[RenderableType]:
    """How far answers could be trusted; nothing where none had a score."""
    answers = status.answers
    if answers is None or answers.confidence.mean_permille is None:
        return
    confidence, budget = answers.confidence, answers.budget
    said = (
        f"answers: {confidence.scored} scored, mean confidence"
        f" {answers.confidence.mean_permille / 1000:.3f}, {confidence.below_verify} too low to be"
        f" trusted; {answers.second_runs} second runs"
    )
    if budget is not None:
        said += f", {budget.saved_tokens} of {budget.burst_tokens} tokens saved for more"
    counted = ", ".join(f"{name} {count}" for name, count in answers.verification.items())
    yield Text(f"{said}; {counted}" if counted else said)


def _breakers(status: Status) -> Iterator[RenderableType]:
    if not status.breakers:
        yield Text("breakers: none has moved")
        return
    table = _table("breakers", "key", "state", "why", "bad / total", "moved")
    for row in status.breakers[:BREAKERS_SHOWN]:
        style = _GOOD if row.state == "closed" else _BAD
        table.add_row(row.key, Text(row.state, style), row.why, f"{row.bad} / {row.total}",
                      f"{_span(row.moved_ms_ago / 1000)} ago")  # fmt: skip
    yield table


def _alerts(status: Status) -> Iterator[RenderableType]:
    if not status.alerts:
        yield Text("alerts: none")
        return
    table = _table("alerts, the youngest first", "at (UTC)", "cause", "figures", "done about it")
    for row in status.alerts[:ALERTS_SHOWN]:
        at = datetime.fromtimestamp(row.at_s, UTC).strftime("%H:%M:%S")
        figures = ", ".join(f"{name} {value}" for name, value in row.figures.items())
        table.add_row(at, Text(f"{row.key}: {row.cause}"), figures or "-", row.action or "-")
    yield table


def _observed(observed: dict[str, int]) -> Table:
    table = _table("what the policy in shadow would have done", "what", "requests", "ms")
    for what, value in observed.items():
        if what in QUEUE_MS:
            table.add_row(QUEUE_MS[what], "", str(value))
        elif what != "off":
            table.add_row(what.replace("_", " "), str(value), "")
        elif value:
            table.add_row(Text("it is switched off: see the alerts", _BAD), "", "")
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _policy(view: PolicyView) -> str:
    return f"{view.name} ({view.discipline}, {view.hash[:12]})"


def _rotation(row: ReplicaView) -> Text:
    if row.rotation == "in":
        return Text("in", _GOOD if row.up else "")
    return Text(f"{row.rotation}: {row.rotation_why}", _BAD)


def _model(row: ReplicaView) -> str:
    """Its names, and its version where that says more; of a path the last part."""
    version = row.version.rstrip("/").rpartition("/")[2]
    return " ".join(dict.fromkeys([*row.models, version])).strip() or "-"


def _kept(row: TierView) -> Text:
    style = ""
    if row.promise_ms >= 0 and row.ttft_ms_p95 >= 0:
        style = _GOOD if row.ttft_ms_p95 <= row.promise_ms else _BAD
    return Text(_ms(row.ttft_ms_p95), style)


def _known(value: float, text: str) -> str:
    return "-" if value < 0 else text


def _ms(value: float) -> str:
    return _known(value, f"{value:.1f}")


def _span(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
