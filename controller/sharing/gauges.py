"""Prometheus families of the store that several controllers share."""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

ROUND_TRIP_S = (
    0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15,
    0.25, 0.5, 1.0,
)  # fmt: skip


class RoundTrips:
    """How long answers took, in s."""

    def __init__(self) -> None:
        self._counts = [0] * (len(ROUND_TRIP_S) + 1)
        self._sum_s = 0.0

    def add(self, s: float) -> None:
        self._counts[bisect_left(ROUND_TRIP_S, s)] += 1
        self._sum_s += s

    def family(self) -> Metric:
        family = HistogramMetricFamily(
            "twinkeel_store_round_trip_seconds",
            "From asking the shared store for leases until its answer.",
        )
        total, buckets = 0, []
        for bound, count in zip((*map(str, ROUND_TRIP_S), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric((), buckets, self._sum_s)
        return family


class Counts:
    """What is told of it."""

    def __init__(self) -> None:
        self.up = False
        self.controllers = 1
        self.losses = 0
        self.differ = False
        self.leases: dict[str, int] = {}
        """Answers, by what was asked for."""
        self.round_trips = RoundTrips()

    def families(self) -> Iterator[Metric]:
        """For ``Metrics.also``."""
        yield GaugeMetricFamily(
            "twinkeel_store_up", "1: the store shared with other controllers answers.",
            float(self.up),
        )  # fmt: skip
        yield GaugeMetricFamily(
            "twinkeel_store_controllers",
            "Controllers that share it, as far as this one knows.", float(self.controllers),
        )  # fmt: skip
        yield CounterMetricFamily(
            "twinkeel_store_losses", "How often it was lost.", float(self.losses)
        )
        yield GaugeMetricFamily(
            "twinkeel_store_policies_differ",
            "1: controllers that share it run different policies or versions, and have for long.",
            float(self.differ),
        )  # fmt: skip
        leases = CounterMetricFamily(
            "twinkeel_store_leases", "Answers to questions for a share or a session.",
            labels=("kind",),
        )  # fmt: skip
        for kind, count in self.leases.items():
            leases.add_metric((kind,), float(count))
        yield leases
        yield self.round_trips.family()
