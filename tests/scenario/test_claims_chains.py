"""Three shipped scenarios of chains and sessions, shortened: what decides must hold all the same.

One seed each; the files themselves say what is claimed of the whole.
"""

from __future__ import annotations

from typing import Any

import yaml

from twin.scenario import parse_scenario, run_scenario, scenario_path
from twin.scenario.merge import merged


def figures(name: str, runs: tuple[str, ...], changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By run, what came of a shipped scenario with some of its keys set otherwise."""
    path = scenario_path(name)
    raw = merged(yaml.safe_load(path.read_text(encoding="utf-8")), changes, name)
    result = run_scenario(parse_scenario(raw, name, path.parent), seeds=(1,), runs=runs)
    assert all(made.figures["refused_events"] == 0 for (made,) in result.runs.values())
    return {run: made.figures for run, (made,) in result.runs.items()}


def test_verification_storms_are_worse_than_what_they_check_and_a_budget_prevents_them() -> None:
    runs = ("no_fault", "unverified", "verify_all", "budget", "degrade")
    made = figures("verification-storm", runs, {"duration_s": 60})
    useful = {name: run["clients"]["agents"]["useful"] for name, run in made.items()}
    wrong = {name: run["all"]["wrong"] for name, run in made.items()}
    assert useful["verify_all"] < 0.6 * useful["no_fault"]
    assert useful["verify_all"] < 0.7 * useful["unverified"]
    assert useful["budget"] > 0.9 * useful["no_fault"]
    assert useful["degrade"] > 0.9 * useful["no_fault"]
    for name in ("verify_all", "budget", "degrade"):
        assert wrong[name] < 0.3 * wrong["unverified"]
    budget = made["budget"]
    assert 0 < budget["decisions"]["verify"] < 0.2 * made["verify_all"]["decisions"]["verify"]
    assert budget["all"]["verifications"]["skipped_budget"] > 0
    assert made["degrade"]["decisions"]["verify"] == 0


def test_limits_by_key_keep_sessions_in_order_and_let_chats_pass_pasted_texts() -> None:
    """A quarter of the users on one small replica."""
    users = {"chat": {"users": 450}, "power": {"users": 50}}
    changes = {
        "duration_s": 150,
        "traffic": {"clients": users},
        "fleet": {0: {"count": 1, "kv_blocks": 5500}},
        "measure": {"warm_up_s": 70},
        "runs": {
            "one_limit": {"policy": {"set": {"limits": {"global_in_flight_most": 150}}}},
            "by_key": {"policy": {"set": {"limits": {"model_in_flight_most": 50}}}},
        },
    }
    made = figures("sessions", ("one_limit", "by_key"), changes)
    one, keys = made["one_limit"], made["by_key"]
    assert one["contexts"]["mixed"] > 0
    assert keys["contexts"]["mixed"] == 0
    assert keys["all"]["shed"] == keys["all"]["failed"] == 0
    wait = {name: run["all"]["queue_s"]["mean"] for name, run in made.items()}
    assert wait["by_key"] < 0.5 * wait["one_limit"]
    assert keys["all"]["answered"] >= one["all"]["answered"], "not at the cost of throughput"
    chat = {name: run["by_line"]["chat"]["queue_s"]["mean"] for name, run in made.items()}
    assert chat["by_key"] < 0.25 * chat["one_limit"]


def test_a_budget_for_all_steps_bears_a_slow_database_and_a_fixed_limit_does_not() -> None:
    runs = ("budgets", "fixed", "budgets_light", "fixed_light")
    made = figures("chains", runs, {"duration_s": 60})
    chains = {name: run["clients"]["agents"] for name, run in made.items()}
    share = {name: chain["useful_share"] for name, chain in chains.items()}
    assert share["budgets"] > 0.88
    assert share["budgets"] - share["fixed"] > 0.15
    assert share["budgets_light"] >= share["fixed_light"]
    assert chains["fixed"]["slow_steps"] > 0
    assert all(chain["cut_steps"] == 0 for chain in chains.values())
    in_part = chains["budgets"]["useful"] - chains["budgets"]["complete"]
    assert in_part > 0, "some gave their draft"
