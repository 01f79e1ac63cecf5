"""How far replicas are from their profile, as people are shown it."""

from __future__ import annotations

from controller.telemetry.drifts import Drifts, Steps
from policy.events import StepsRead


def test_the_last_reading_and_all_steps_since_it_came_up() -> None:
    drifts = Drifts()
    assert drifts.last(0) is None
    drifts.read(StepsRead(0, 100, 600_000, 500_000))
    drifts.read(StepsRead(0, 50, 250_000, 250_000))
    assert drifts.last(0) == Steps(150, 5.0, 5.0)
    assert drifts.permille(0) == round(1000 * 850 / 750) - 1000
    drifts.renewed(0)
    assert drifts.last(0) is None
