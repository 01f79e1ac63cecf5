"""Cards and their MIG slices, by the six things that placement looks at, and how well they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dashboards.parts.live.html import Html, badge, bar, html_of, joined, muted, table, whole
from dashboards.state import said, t

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from controller.gpus.view import CardView

LINE = "<br>"
FULL = 0.95
"""Share of the memory in use from which on it is nearly full."""
UUID_SHOWN = 12
CARDS_MOST = 256


def card_table(cards: Sequence[CardView], names: Mapping[int, str]) -> Html:
    """A row a card, and below it one for each of its slices.

    Args:
        names: of slots, by the number of their replica.
    """
    head = [
        t("live.card.card"), t("live.card.memory"), t("live.card.bandwidth"),
        t("live.card.closeness"), t("live.card.heat"), t("live.card.loaded"), t("live.card.labels"),
        t("live.card.health"),
    ]  # fmt: skip
    broken = {card.uuid for card in cards if card.broken and not card.parent}
    rows = [_row(card, names, card.parent in broken) for card in ordered(cards)[:CARDS_MOST]]
    return table(head, rows)


def ordered(cards: Sequence[CardView]) -> list[CardView]:
    """Slices right after their card; such as have none here, last."""
    whole_ones = [card for card in cards if not card.parent]
    known = {card.uuid for card in whole_ones}
    found: list[CardView] = []
    for card in whole_ones:
        found += [card, *(part for part in cards if part.parent == card.uuid)]
    return found + [part for part in cards if part.parent and part.parent not in known]


def _row(card: CardView, names: Mapping[int, str], on_broken: bool) -> list[Html]:
    loaded = [whole(names.get(number, str(number))) for number in card.replicas]
    return [
        _name(card), _memory(card), _lines(_bandwidth(card)), _lines(_closeness(card)),
        _lines(_heat(card)), joined(loaded, LINE) or muted(t("live.card.nothing")),
        _lines(_labels(card)), _lines(_health(card, on_broken)),
    ]  # fmt: skip


def _name(card: CardView) -> Html:
    uuid = muted(whole(card.uuid))
    if not card.parent:
        return joined([whole(card.name), uuid], LINE)
    named = whole(t("live.card.slice", profile=card.profile or t("live.unknown")))
    return Html(
        f'<div style="padding-left:1.4rem;border-left:2px solid currentColor">'
        f"{joined([named, uuid], LINE)}</div>"
    )


def _lines(parts: Iterator[object]) -> Html:
    return joined(parts, LINE)


def _unknown() -> Html:
    return muted(t("live.unknown"))


def _shared() -> Html:
    """A slice has none of its own."""
    return muted(t("live.card.as_card"))


def _of(value: int | None, most: int | None, unit: str) -> str:
    """As far as it is known."""
    if value is None:
        return t("live.unknown")
    if most is None:
        return f"{value} {unit}".strip()
    return t("live.card.of", value=value, most=most, unit=unit)


def _percent(permille: int | None) -> str:
    return t("live.unknown") if permille is None else f"{permille / 10:.0f} %"


def _memory(card: CardView) -> Html:
    free, total = card.memory_free_mb, card.memory_total_mb
    text = html_of(t("live.card.free", what=_of(free, total, "MB")))
    if free is None or not total:
        return text
    used = 1 - free / total
    return joined([text, bar(used, "--failed" if used >= FULL else "--p1")])


def _bandwidth(card: CardView) -> Iterator[object]:
    told = (card.pcie_rx_mb_s, card.pcie_tx_mb_s, card.pcie_permille, card.memory_busy_permille)
    if card.parent and all(each is None for each in told):
        yield _shared()
        return
    rx, tx, most = card.pcie_rx_mb_s, card.pcie_tx_mb_s, card.pcie_most_mb_s
    if rx is None and tx is None:
        yield t("live.card.pcie_unknown")
    else:
        yield t("live.card.pcie", rx=_of(rx, None, ""), tx=_of(tx, None, ""))
    if most is not None:
        yield t("live.card.pcie_share", percent=_percent(card.pcie_permille), most=most)
    yield t("live.card.memory_busy", percent=_percent(card.memory_busy_permille))


def _closeness(card: CardView) -> Iterator[object]:
    if card.parent:
        yield _shared()
        return
    if card.nvlinks == 0:
        yield t("live.card.no_nvlink")
    else:
        yield t("live.card.nvlink", up=_of(card.nvlinks_up, card.nvlinks, ""))
    for uuid, how in card.near:
        yield whole(f"{uuid[:UUID_SHOWN]}: {said(how)}")


def _heat(card: CardView) -> Iterator[object]:
    if card.parent and card.temperature_c is None and card.power_w is None:
        yield _shared()
        return
    yield t("live.card.temperature", what=_of(card.temperature_c, card.slowdown_c, "°C"))
    yield t("live.card.power", what=_of(card.power_w, card.power_limit_w, "W"))
    if card.throttled:
        yield badge(t("live.card.throttled"), "--failed")
    if card.clocks is None:
        yield muted(t("live.card.clocks_unknown"))
    else:
        yield ", ".join(map(said, card.clocks)) or t("live.card.full_clocks")


def _labels(card: CardView) -> Iterator[object]:
    if card.parent and not card.labels:
        yield _shared()
    elif not card.labels:
        yield _unknown()
    for label in card.labels:
        yield whole(label)


def _health(card: CardView, on_broken: bool) -> Iterator[object]:
    if on_broken and not card.broken:
        yield badge(t("live.card.on_broken"), "--failed")
    elif card.broken:
        yield badge(t("live.card.broken"), "--failed")
        yield said(card.broken.replace("_", " "))
    else:
        yield badge(t("live.card.well"), "--good")
    if card.last_xid is not None:
        yield t("live.card.xid", code=card.last_xid)
    elif not card.parent:
        yield muted(t("live.card.no_xid"))
    if card.parent:
        return
    if card.read_ms_ago is None:
        yield t("live.card.unread")
    elif card.ecc_corrected is None and card.ecc_uncorrected is None:
        yield muted(t("live.card.no_ecc"))
    else:
        yield t(
            "live.card.ecc", bad=_of(card.ecc_uncorrected, None, ""),
            mended=_of(card.ecc_corrected, None, ""),
        )  # fmt: skip
    if card.reset_pending:
        yield t("live.card.reset")
    if card.recovery not in (None, "none"):
        yield t("live.card.asks", what=card.recovery)
