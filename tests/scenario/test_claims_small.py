"""Three shipped scenarios with a fault, shortened: what is decided must not depend on their length.

One seed each, and a few runs only; the files themselves say what is claimed of the whole.
"""

from __future__ import annotations

from typing import Any

import yaml

from twin.scenario import parse_scenario, run_scenario, scenario_path
from twin.scenario.merge import merged


def figures(name: str, runs: tuple[str, ...], **changes: Any) -> dict[str, dict[str, Any]]:
    """By run, what came of a shipped scenario with some of its keys set otherwise."""
    path = scenario_path(name)
    raw = merged(yaml.safe_load(path.read_text(encoding="utf-8")), changes, name)
    result = run_scenario(parse_scenario(raw, name, path.parent), seeds=(1,), runs=runs)
    assert all(made.figures["refused_events"] == 0 for (made,) in result.runs.values())
    return {run: made.figures for run, (made,) in result.runs.items()}


def test_a_slice_out_of_memory_leaves_the_others_alone() -> None:
    runs = figures("mig-oom", ("chat_oom", "embedding_oom"), duration_s=100)
    chat, embedding = runs["chat_oom"], runs["embedding_oom"]
    for run in (chat, embedding):
        assert run["downs"] == {"oom": 1}
        assert run["alerts"] == {"down: oom": 1}
        assert run["all"]["why"]["oom"] == 1
    assert chat["by_line"]["support"]["refused"] > 0
    assert chat["by_class"]["P0"]["refused"] == 0
    assert embedding["by_line"]["files"]["refused"] > 0
    for line in ("support", "reports", "queries", "snippets"):
        assert embedding["by_line"][line]["refused"] == 0


def test_a_bad_card_is_replaced_and_nobody_hears_of_it_who_need_not() -> None:
    runs = figures("ecc", ("standby", "sudden"), duration_s=75)
    standby = runs["standby"]
    ecc = standby["faults"]["ecc_uncorrectable"]
    assert ecc["isolated_s"] == ecc["start_s"] == 1
    assert 29 <= ecc["up_s"] <= ecc["served_s"] <= 30
    assert standby["decisions"]["start"] == standby["decisions"]["alert"] == 1
    assert standby["all"]["dropped"] == 0
    sudden = runs["sudden"]
    assert sudden["all"]["failed"] > 0, "streams that had begun"
    assert sudden["all"]["dropped"] == 0
    assert sudden["decisions"]["start"] == sudden["decisions"]["alert"] == 1
    assert sudden["faults"]["ecc_uncorrectable"]["up_s"] <= 30


def test_a_model_that_lost_its_confidence_is_left_alone_until_it_is_well() -> None:
    rule = {
        "name": "doubt", "by": ["model", "line"], "low_confidence_below_permille": 300,
        "window_ms": 15_000, "windows_least": 3, "share_permille": 150, "volume_least": 20,
        "probes_most": 4, "successes_least": 25, "open_ms": 10_000, "open_most_ms": 20_000,
    }  # fmt: skip
    runs = figures(
        "bad-weights",
        ("breaker", "no_breaker"),
        duration_s=260,
        policy={"set": {"breakers": {"rules": [rule]}}},
        faults={0: {"at_s": 30, "for_s": 120}},
        measure={"spans": {"detected": {"from_s": 78, "to_s": 150}, "healed": {"from_s": 230}}},
    )
    breaker = runs["breaker"]
    moved = breaker["faults"]["bad_weights"]
    assert 45 <= moved["breaker_open_s"] <= 63
    assert 120 <= moved["breaker_closed_s"] <= 200
    assert breaker["breakers"]["incidents"] == 1
    assert breaker["alerts"] == {"breaker open: share": 1}
    kept, let_go = breaker["spans"]["detected"]["P1"], runs["no_breaker"]["spans"]["detected"]["P1"]
    assert set(kept["degraded_by"]) == {"model qwen3-4b"}
    assert 5 * kept["wrong"] < let_go["wrong"]
    assert breaker["all"]["refused"] == 0
    assert runs["no_breaker"]["breakers"]["opened"] == 0
