"""Scenario files: traffic, a fleet, faults and policies, and what is claimed to come of them.

- ``load_scenario``, ``parse_scenario`` give a ``Scenario``; ``scenario_names``, ``scenario_path``:
  the shipped ones (``files``, and ``spec``: the schema);
- ``run_scenario`` gives a ``ScenarioResult`` of ``RunResult`` (``play``, ``run``, ``result``);
- ``rack``: its fleet; ``happenings``, ``drill``: what happens besides requests, and by the seed;
- ``expect``: its claims, judged; ``table``: on the terminal; ``merge``: a variant on its base.
"""

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
