"""A fleet as a table in a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from controller.fleet.contract import FleetView, SlotState

STYLES: dict[SlotState, str] = {
    "serving": "green", "warm": "green", "waiting": "red", "broken": "red", "starting": "yellow",
    "warming": "yellow", "stopping": "yellow",
}  # fmt: skip
UNITS = ((86_400, "d"), (3600, "h"), (60, "min"))


def table(fleet: FleetView) -> Table:
    """Each slot with what runs in it, and why it is as it is."""
    shown = Table(title=f"fleet ({fleet.kind})", box=box.SIMPLE_HEAD, title_justify="left")
    for name in ("id", "slot", "model", "version", "state", "since", "pid", "starts", "place",
                 "url", "why"):  # fmt: skip
        right = name in ("id", "pid", "starts", "since")
        shown.add_column(name, justify="right" if right else "left", overflow="fold")
    for slot in fleet.slots:
        role = " (standby)" if slot.standby else ""
        shown.add_row(
            str(slot.replica), f"{slot.name}{role}", slot.model or "-", slot.version or "-",
            Text(slot.state, style=STYLES.get(slot.state, "")), span(slot.since_s),
            str(slot.pid) if slot.pid else "-", str(slot.starts) if slot.starts else "-",
            slot.domain or "-", slot.url, slot.why or "-",
        )  # fmt: skip
    return shown


def span(s: float) -> str:
    """A time that has passed, in its largest unit."""
    for size, unit in UNITS:
        if s >= size:
            return f"{s / size:.1f} {unit}"
    return f"{s:.0f} s"
