"""What a deployment has shown so far, in the figures that its evidence has predicted."""

from __future__ import annotations

import pytest

from controller.deployment.measured import RESULTS_MOST, Measuring
from policy.deployment import DeploymentPlan, Result
from policy.evidence import Band

S = 1_000_000_000
PLAN = DeploymentPlan(
    window_s=100, band=(Band("slo_miss_share/P0", 0.0, 0.1), Band("ttft_s_p95/P0", 0.1, 0.5))
)


def result(at_s: float, *, ours: bool = True, sla: str = "P0", missed: bool = False,
           ttft_s: float = 0.2, **more: object) -> Result:  # fmt: skip
    at_ns = round(at_s * S)
    return Result(at_ns, at_ns, "user a", ours, sla, 10, missed, False, round(ttft_s * S), **more)  # type: ignore[arg-type]


def test_each_figure_of_the_band_and_the_share_of_misses() -> None:
    measuring = Measuring(PLAN)
    for second in range(20):
        measuring.settled(result(second, missed=second < 3, ttft_s=second / 10))
        measuring.settled(result(second, ours=False, sla="P1"))
    misses, p0_misses, p0_ttft = measuring.figures(20 * S)
    assert (misses.figure, misses.low, misses.high) == ("slo_miss_share", None, None)
    assert (misses.candidate, misses.live) == (0.15, 0.0)
    assert (p0_misses.candidate, p0_misses.candidate_requests) == (0.15, 20)
    assert (p0_misses.live, p0_misses.live_requests) == (None, 0)
    assert (p0_ttft.low, p0_ttft.high) == (0.1, 0.5)
    assert p0_ttft.candidate == pytest.approx(1.8)


def test_of_the_last_window_and_the_present_stage_alone() -> None:
    measuring = Measuring(PLAN)
    measuring.settled(result(0, missed=True))
    measuring.settled(result(90))
    assert measuring.figures(120 * S)[0].candidate == 0.0
    measuring.begin(100 * S)
    measuring.settled(result(99))
    assert measuring.figures(120 * S)[0].candidate is None


def test_no_request_counts_twice_and_memory_is_bounded() -> None:
    measuring = Measuring(PLAN)
    measuring.settled(result(1, missed=True, ttft_s=-1, told="late"))
    measuring.settled(result(2, missed=True, ttft_s=2.0, told="end"))
    measuring.settled(result(2, told="refused"))
    misses, _, ttft = measuring.figures(3 * S)
    assert (misses.candidate, misses.candidate_requests) == (1.0, 1)
    assert (ttft.candidate, ttft.candidate_requests) == (2.0, 1)
    for _ in range(RESULTS_MOST + 10):
        measuring.settled(result(3))
    assert measuring.figures(4 * S)[0].candidate_requests == RESULTS_MOST
