"""A card or a slice as people see it: the six dimensions of placement, in figures."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from rich.table import Table

    from controller.gpus.nvml import Card, Reading, Slice

NS_PER_MS = 1_000_000


class CardView(msgspec.Struct, frozen=True):
    """A card, or a MIG slice. None: it does not tell."""

    uuid: str
    name: str
    parent: str = ""
    """UUID of a slice's card; empty: it is a card."""
    profile: str = ""
    """Of a slice, such as ``1g.10gb``."""
    instance: int | None = None
    """Id of a slice's GPU instance."""
    # Memory
    memory_total_mb: int | None = None
    memory_free_mb: int | None = None
    # Bandwidth
    pcie_rx_mb_s: int | None = None
    pcie_tx_mb_s: int | None = None
    pcie_most_mb_s: int | None = None
    pcie_permille: int | None = None
    memory_busy_permille: int | None = None
    # Closeness
    nvlinks_up: int | None = None
    nvlinks: int | None = None
    near: tuple[tuple[str, str], ...] = ()
    """Other cards, and what joins them with this one."""
    # Heat and power
    temperature_c: int | None = None
    slowdown_c: int | None = None
    heat_permille: int | None = None
    power_w: int | None = None
    power_limit_w: int | None = None
    power_permille: int | None = None
    clocks: tuple[str, ...] | None = None
    throttled: bool | None = None
    # What is loaded there, and labels
    replicas: tuple[int, ...] = ()
    labels: tuple[str, ...] = ()
    # Health
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    reset_pending: bool | None = None
    recovery: str | None = None
    """What the driver asks for."""
    last_xid: int | None = None
    broken: str = ""
    """Why it is; empty: it is well."""
    read_ms_ago: int | None = None
    """None: it could not be read."""


def view_of(
    card: Card,
    part: Slice | None,
    reading: Reading | None,
    *,
    uuid: str,
    pairs: Mapping[tuple[str, str], tuple[bool, int | None]],
    replicas: tuple[int, ...] = (),
    last_xid: int | None = None,
    broken: str = "",
) -> CardView:
    """Put together what is known.

    Args:
        part: the slice that it is; None: it is the card.
        reading: the last one; None: there was none.
        uuid: of the card or slice.
        pairs: of each two cards, how near they are.
    """
    from controller.gpus.topology import joined  # needs the extra `live`, where views do not

    own = {} if reading is None else msgspec.structs.asdict(reading)
    read_ns = own.pop("read_ns", None)
    own.pop("uuid", None)
    if reading is not None:
        own |= {
            "pcie_permille": reading.pcie_permille,
            "heat_permille": reading.heat_permille,
            "power_permille": reading.power_permille,
            "read_ms_ago": (time.monotonic_ns() - read_ns) // NS_PER_MS,
        }
    near = [
        (other if one == card.uuid else one, joined(told))
        for (one, other), told in pairs.items()
        if card.uuid in (one, other)
    ]
    labels = [f"driver={card.driver}" if card.driver else ""]
    labels.append(f"cuda={card.capability}" if card.capability else "")
    return CardView(
        uuid, card.name,
        parent="" if part is None else card.uuid,
        profile="" if part is None else part.profile,
        instance=None if part is None or part.instance < 0 else part.instance,
        near=tuple(near),
        replicas=replicas,
        labels=tuple(label for label in labels if label),
        last_xid=last_xid,
        broken=broken,
        **own,
    )  # fmt: skip


# ---- for the terminal ----

UNKNOWN = "-"


def table(views: Iterable[CardView], names: Mapping[int, str] | None = None) -> Table:
    """The six dimensions, one row a card or slice.

    Args:
        names: of replicas, by id.
    """
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("card", no_wrap=True)
    for heading in ("memory", "bandwidth", "closeness", "heat and power", "loaded"):
        made.add_column(heading)
    made.add_column("labels")
    made.add_column("health")
    for view in views:
        shared = "as its card" if view.parent else ""
        loaded = ", ".join((names or {}).get(number, str(number)) for number in view.replicas)
        made.add_row(
            _name(view), _memory(view), shared or _bandwidth(view), shared or _closeness(view),
            shared or _heat(view), loaded or UNKNOWN,
            shared or "\n".join(view.labels) or UNKNOWN, _health(view),
        )  # fmt: skip
    return made


def _name(view: CardView) -> str:
    if view.parent:
        return f"  {view.profile}\n  {view.uuid}"
    return f"{view.name}\n{view.uuid}"


def _of(value: int | None, most: int | None, unit: str) -> str:
    """``3 of 5 MB``, as far as it is known."""
    if value is None:
        return UNKNOWN
    return f"{value} {unit}" if most is None else f"{value} of {most} {unit}"


def _memory(view: CardView) -> str:
    return f"free {_of(view.memory_free_mb, view.memory_total_mb, 'MB')}"


def _share(permille: int | None) -> str:
    return UNKNOWN if permille is None else f"{permille / 10:.0f} %"


def _bandwidth(view: CardView) -> str:
    rx, tx = (_of(mb_s, None, "").strip() for mb_s in (view.pcie_rx_mb_s, view.pcie_tx_mb_s))
    return (
        f"PCIe in {rx}, out {tx} MB/s ({_share(view.pcie_permille)})\n"
        f"memory busy {_share(view.memory_busy_permille)}"
    )


def _closeness(view: CardView) -> str:
    links = f"NVLink {_of(view.nvlinks_up, view.nvlinks, 'up')}" if view.nvlinks else "no NVLink"
    return "\n".join([links, *(f"{uuid[:12]}: {how}" for uuid, how in view.near)])


def _heat(view: CardView) -> str:
    temperature = f"{_of(view.temperature_c, view.slowdown_c, 'C')}"
    power = _of(view.power_w, view.power_limit_w, "W")
    clocks = UNKNOWN if view.clocks is None else ", ".join(view.clocks) or "full clocks"
    return f"{temperature}, {power}\n{'THROTTLED: ' if view.throttled else ''}{clocks}"


def _health(view: CardView) -> str:
    lines = [f"broken: {view.broken}" if view.broken else "well"]
    if view.last_xid is not None:
        lines.append(f"last Xid {view.last_xid}")
    if view.parent:
        return "\n".join(lines)
    if view.read_ms_ago is None:
        lines.append("cannot be read")
    elif view.ecc_corrected is None and view.ecc_uncorrected is None:
        lines.append("no ECC")
    else:
        uncorrected = _of(view.ecc_uncorrected, None, "uncorrected")
        lines.append(f"ECC {uncorrected}, {_of(view.ecc_corrected, None, 'corrected')}")
    if view.reset_pending:
        lines.append("a reset is pending")
    if view.recovery not in (None, "none"):
        lines.append(f"the driver asks for: {view.recovery}")
    return "\n".join(lines)
