"""Prometheus gauges of this machine's cards, by UUID."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from controller.gpus.view import CardView

MIB = 1 << 20
MB = 1_000_000
LABELS = ("uuid", "name", "parent", "profile")

GAUGES: tuple[tuple[str, str, Callable[[CardView], float | None]], ...] = (
    ("memory_free_bytes", "Free memory.", lambda v: _times(v.memory_free_mb, MIB)),
    ("memory_total_bytes", "All memory.", lambda v: _times(v.memory_total_mb, MIB)),
    ("memory_busy_ratio", "Share of time in which memory was read or written.",
     lambda v: _times(v.memory_busy_permille, 0.001)),
    ("pcie_receive_bytes_per_second", "Through PCIe, to the card.",
     lambda v: _times(v.pcie_rx_mb_s, MB)),
    ("pcie_transmit_bytes_per_second", "Through PCIe, from the card.",
     lambda v: _times(v.pcie_tx_mb_s, MB)),
    ("pcie_ratio", "Of the PCIe link's bandwidth, in the busier direction.",
     lambda v: _times(v.pcie_permille, 0.001)),
    ("nvlinks_up", "NVLink connections that are up.", lambda v: v.nvlinks_up),
    ("nvlinks", "NVLink connections that it has.", lambda v: v.nvlinks),
    ("temperature_celsius", "Temperature.", lambda v: v.temperature_c),
    ("slowdown_celsius", "Temperature from which it lowers its clocks.", lambda v: v.slowdown_c),
    ("power_watts", "Power that it draws.", lambda v: v.power_w),
    ("power_limit_watts", "Power that it may draw.", lambda v: v.power_limit_w),
    ("throttled", "1: it has lowered its clocks for heat or for want of power.",
     lambda v: v.throttled),
    ("ecc_corrected", "Corrected ECC errors since its last reset.", lambda v: v.ecc_corrected),
    ("ecc_uncorrected", "Uncorrected ECC errors since its last reset.",
     lambda v: v.ecc_uncorrected),
    ("reset_pending", "1: it has memory to set aside when it is reset.",
     lambda v: v.reset_pending),
    ("last_xid", "The last Xid that it told.", lambda v: v.last_xid),
    ("broken", "1: it cannot be used.", lambda v: bool(v.broken)),
    ("read_age_seconds", "Since it was read last.", lambda v: _times(v.read_ms_ago, 0.001)),
)  # fmt: skip
"""Names after ``twinkeel_gpu_``. What a card does not tell has no sample."""


def families(views: Iterable[CardView]) -> Iterator[GaugeMetricFamily]:
    """For ``Metrics.also``."""
    told = tuple(views)
    for name, help, figure in GAUGES:
        family = GaugeMetricFamily(f"twinkeel_gpu_{name}", help, labels=LABELS)
        for view in told:
            value = figure(view)
            if value is not None:
                labels = (view.uuid, view.name, view.parent, view.profile)
                family.add_metric(labels, float(value))
        if family.samples:
            yield family


def _times(value: int | None, factor: float) -> float | None:
    return None if value is None else value * factor
