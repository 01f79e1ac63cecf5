"""The fleet as a map: hosts, their cards, the slices of a card, and how each replica fares."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.parts.live.html import Html, badge, bar, html_of, joined, muted
from dashboards.state import colours, said, t

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from controller.admin.status import ReplicaView

ROTATION = {
    "in": "--good", "probing": "--late", "draining": "--shed", "ejected": "--failed",
    "isolated": "--failed", "out": "--p5",
}  # fmt: skip
STALE_MS = 5000
"""Figures of an engine that are older are greyed."""
BUSY = 0.9
"""Share of the KV cache from which on it is nearly full."""
DRIFT_PERMILLE = 100
"""From here on the drift is marked."""
TILES_MOST = 256


def fleet_map(replicas: Sequence[ReplicaView]) -> Html:
    """All replicas, by failure domain."""
    shown = sorted(
        replicas[:TILES_MOST], key=lambda each: (each.domain == "", each.domain, each.id)
    )
    hosts: dict[str, list[ReplicaView]] = {}
    for replica in shown:
        hosts.setdefault(replica.domain.partition("/")[0], []).append(replica)
    boxes = "".join(_host(name, here) for name, here in hosts.items())
    more = len(replicas) - len(shown)
    rest = html_of(t("live.fleet_more", count=more)) if more else ""
    return Html(
        f'<div style="display:flex;flex-wrap:wrap;gap:10px;align-items:flex-start">{boxes}</div>'
        f"{rest}"
    )


def _host(name: str, replicas: Iterable[ReplicaView]) -> str:
    palette = colours()
    tiles = "".join(_tile(replica) for replica in replicas)
    title = html_of(name or t("live.no_domain"))
    return (
        f'<div style="border:1px solid {palette["--line"]};border-radius:8px;padding:6px 8px">'
        f'<div style="font-size:.78rem;font-weight:600;color:{palette["--muted"]};'
        f'padding-bottom:4px">{title}</div>'
        f'<div style="display:flex;flex-wrap:wrap;gap:8px">{tiles}</div></div>'
    )


def _tile(replica: ReplicaView) -> str:
    palette = colours()
    colour = ROTATION.get(replica.rotation, "--p5")
    where = replica.domain.partition("/")[2]
    seen = replica.scraped_ms_ago >= 0
    lines = [
        Html(
            f'<div style="display:flex;justify-content:space-between;gap:8px">'
            f'<span style="font-weight:600">{html_of(replica.name)}</span>'
            f"{badge(said(replica.rotation), colour)}</div>"
        )
    ]
    if where:
        lines.append(muted(where.replace("/", " · ")))
    if replica.rotation_why:
        why = html_of(said(replica.rotation_why.replace("_", " ")))
        lines.append(Html(f'<span style="color:{palette[colour]}">{why}</span>'))
    lines.append(html_of(t("live.in_flight", count=replica.in_flight)))
    if seen:
        lines.append(html_of(t("live.engine", running=replica.running, waiting=replica.waiting)))
    lines.append(_kv(replica))
    lines.append(_drift(replica))
    old = seen and replica.scraped_ms_ago > STALE_MS
    age_s = f"{replica.scraped_ms_ago / 1000:.1f}"
    lines.append(muted(t("live.scraped_ago", s=age_s) if seen else t("live.never_scraped")))
    body = "".join(f"<div>{line}</div>" for line in lines)
    return (
        f'<div style="width:186px;border-left:4px solid {palette[colour]};border-radius:6px;'
        f"padding:5px 9px;background:{palette['--card']};font-size:.76rem;line-height:1.45;"
        f'opacity:{0.5 if old or not replica.up else 1}">{body}</div>'
    )


def _kv(replica: ReplicaView) -> Html:
    if replica.kv_used_permille < 0:
        return muted(t("live.kv_unknown"))
    share = replica.kv_used_permille / 1000
    text = html_of(t("live.kv", percent=f"{100 * share:.1f}"))
    return joined([text, bar(share, "--failed" if share >= BUSY else "--p1")])


def _drift(replica: ReplicaView) -> Html:
    if replica.drift_permille is None:
        return muted(t("live.drift_unknown"))
    text = t("live.drift", percent=f"{replica.drift_permille / 10:+.1f}")
    if abs(replica.drift_permille) < DRIFT_PERMILLE:
        return html_of(text)
    return Html(
        f'<span style="color:{colours()["--failed"]};font-weight:600">{html_of(text)}</span>'
    )
