"""The small scenarios that are shipped: their claims hold, with their own seeds."""

from __future__ import annotations

import pytest

from twin.scenario import load_scenario, run_scenario


@pytest.mark.parametrize("name", ["peak", "retries"])
def test_the_claims_hold(name: str) -> None:
    result = run_scenario(load_scenario(name))
    failed = [verdict.plain() for verdict in result.verdicts if not verdict.holds]
    assert not failed
    for results in result.runs.values():
        assert all(run.figures["refused_events"] == 0 for run in results)
