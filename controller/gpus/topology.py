"""How near the cards of one replica are to each other.

A model spread over several cards adds up its layers' results after every layer, so what its cards
are joined by is part of its step time. NVML tells whether NVLink joins two of them, and where in
the PCIe tree they meet.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pynvml  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

NVLINK_PERMILLE = 1000
"""450 GB/s a direction (H100), and no PCIe in between."""
PERMILLE_BY_LEVEL: dict[int, int] = {
    pynvml.NVML_TOPOLOGY_INTERNAL: 900,
    pynvml.NVML_TOPOLOGY_SINGLE: 800,
    pynvml.NVML_TOPOLOGY_MULTIPLE: 700,
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: 500,
    pynvml.NVML_TOPOLOGY_NODE: 400,
    pynvml.NVML_TOPOLOGY_SYSTEM: 200,
}
"""By where they meet. On one board or under one switch: their link's full speed (63 GB/s a
direction at PCIe 5.0 x16), from card to card. Several switches: the same link, shared with more.
The host bridge: through the CPU, which peers often cannot use directly, so it goes by way of its
memory. Another host bridge of the same socket: the CPU's inner fabric, too. Another socket: the
link between the sockets, shared with everything that goes there."""
UNKNOWN_PERMILLE = 200
"""Nothing is told: nothing good is assumed."""

WORDS: dict[int | None, str] = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "one socket",
    pynvml.NVML_TOPOLOGY_SYSTEM: "two sockets",
    None: "not told",
}


def closeness_permille(
    cards: Sequence[str], pairs: Mapping[tuple[str, str], tuple[bool, int | None]]
) -> int:
    """Of the two cards that are farthest apart; 1000 for a single one.

    Args:
        cards: UUIDs.
        pairs: of each two cards of the machine, in either order, what ``Nvml.near`` says.
    """
    nearest = NVLINK_PERMILLE
    for number, one in enumerate(cards):
        for other in cards[number + 1 :]:
            if one == other:
                continue
            told = pairs.get((one, other)) or pairs.get((other, one))
            nearest = min(nearest, _permille(told))
    return nearest


def _permille(told: tuple[bool, int | None] | None) -> int:
    if told is None:
        return UNKNOWN_PERMILLE
    nvlink, level = told
    if nvlink:
        return NVLINK_PERMILLE
    return UNKNOWN_PERMILLE if level is None else PERMILLE_BY_LEVEL.get(level, UNKNOWN_PERMILLE)


def joined(told: tuple[bool, int | None]) -> str:
    """In words."""
    nvlink, level = told
    return "NVLink" if nvlink else WORDS.get(level, f"level {level}")
