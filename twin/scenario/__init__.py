"""Scenario files: traffic, a fleet, faults and policies, and what is claimed to come of them."""

from twin.scenario.files import (
    Scenario,
    load_scenario,
    parse_scenario,
    scenario_names,
    scenario_path,
)
from twin.scenario.play import run_scenario
from twin.scenario.result import RunResult, ScenarioResult

__all__ = [
    "RunResult", "Scenario", "ScenarioResult", "load_scenario", "parse_scenario", "run_scenario",
    "scenario_names", "scenario_path",
]  # fmt: skip
