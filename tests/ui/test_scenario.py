"""A scenario lives in a URL, and is a command."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from dashboards.scenario import (
    NAMES,
    Kind,
    Scenario,
    ScenarioError,
    check,
    command,
    from_query,
    in_query,
    to_query,
)
from dashboards.shelf import Shelf
from policy.files import policy_names, profile_names
from traces import shipped_traces
from twin.cli import paired_profiles, replay_command
from twin.summary import Slo

if TYPE_CHECKING:
    from pathlib import Path

TEXTS = some.text(min_size=1, max_size=12)
FACTORS = some.floats(0.01, 1000, allow_nan=False)
SCENARIOS = some.builds(
    Scenario,
    trace=TEXTS,
    fleet=some.lists(
        some.builds(Kind, TEXTS, some.integers(1, 1000)), min_size=1, max_size=4
    ).map(tuple),
    policies=some.lists(TEXTS, min_size=1, max_size=4).map(tuple),
    faults=some.lists(TEXTS, max_size=4).map(tuple),
    slo=TEXTS,
    seed=some.integers(0, 1 << 32),
    speed=FACTORS, scale=FACTORS, scale_lengths=FACTORS,
    assume_output=some.integers(0, 1_000_000),
)  # fmt: skip
FAULTS = (
    "{kind: gpu_lost, at_s: 30, on: 0}",
    "{kind: slow_card, at_s: 1.5, on: 'host0', for_s: 10, factor_permille: 2000}",
    "{kind: traffic_spike, at_s: 60, for_s: 30, factor_permille: 2000}",
)
PLAYABLE = some.builds(
    Scenario,
    trace=some.sampled_from([f"shipped:{name}" for name in shipped_traces()]),
    fleet=some.lists(
        some.builds(Kind, some.sampled_from(list(profile_names())), some.integers(1, 9)),
        min_size=1, max_size=4,
    ).map(tuple),
    policies=some.lists(some.sampled_from(policy_names()), min_size=1, max_size=4).map(tuple),
    faults=some.lists(some.sampled_from(FAULTS), max_size=3).map(tuple),
    slo=some.sampled_from(["P0=1.5,P1=4,P2=10,tpot=0.1", "P0=0.8,tpot=0.05", "other=3"]),
    seed=some.integers(0, 1 << 32),
    speed=FACTORS, scale=FACTORS, scale_lengths=FACTORS,
    assume_output=some.integers(0, 1_000_000),
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(SCENARIOS)
def test_a_link_brings_the_same_scenario(scenario: Scenario) -> None:
    query = to_query(scenario)
    assert in_query(query)
    assert from_query(query) == scenario
    assert to_query(from_query(query)) == query


def test_what_a_link_leaves_out_is_as_usual() -> None:
    assert from_query({}) == Scenario()
    assert not in_query({"lang": ["zh"]})
    assert from_query({"seed": ["3"], "lang": ["zh"]}) == Scenario(seed=3)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"fleet": ["h100-sxm/qwen3-8b"]}, "write PROFILE*REPLICAS"),
        ({"fleet": ["h100-sxm/qwen3-8b*"]}, "write PROFILE*REPLICAS"),
        ({"fleet": ["a*-1"]}, "write PROFILE*REPLICAS"),
        ({"fleet": ["a*0"]}, "the link's fleet is 'a*0'"),
        ({"fleet": ["a*1"] * 5}, "the link's fleet is "),
        ({"seed": ["x"]}, "the link's seed is 'x'"),
        ({"seed": ["-1"]}, "the link's seed is '-1'"),
        ({"scale": ["nan"]}, "the link's scale is 'nan'"),
        ({"scale": ["inf"]}, "the link's scale is 'inf'"),
        ({"speed": ["0"]}, "the link's speed is '0'"),
        ({"lengths": ["many"]}, "the link's lengths is 'many'"),
        ({"output": ["1e99"]}, "the link's output is '1e99'"),
        ({"policy": ["a", "b", "c", "d", "e"]}, "the link's policy is 'a, b, c, d, e'"),
        ({"fault": ["x"] * 21}, "the link's fault is "),
    ],
)
def test_a_bad_link_is_a_sentence(query: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ScenarioError) as caught:
        from_query(query)
    assert said in str(caught.value)


@settings(max_examples=100, deadline=None)
@given(
    some.dictionaries(
        some.sampled_from(sorted(NAMES.values())), some.lists(some.text(max_size=9), max_size=3)
    )
)
def test_any_link_is_a_scenario_or_a_sentence(query: dict[str, list[str]]) -> None:
    try:
        found = from_query(query)
    except ScenarioError:
        return
    assert from_query(to_query(found)) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trace": "shipped:nothing"}, "no such trace"),
        ({"trace": "upload:x~0123456789abcdef.trace"}, "it is not among the uploads here"),
        ({"fleet": (Kind("h100-sxm/nothing", 1),)}, "h100-sxm/nothing"),
        ({"fleet": (Kind("mine.yaml", 1),)}, "mine.yaml is a file"),
        ({"policies": ("stabel",)}, "stable"),
        ({"policies": ("upload:x~0123456789abcdef.policy",)}, "it is not among the uploads here"),
        ({"faults": ("gpu_lost",)}, "gpu_lost"),
        ({"faults": ("{kind: gpu_lost}",)}, "at_s"),
        ({"slo": "P0=soon"}, "soon"),
    ],
)
def test_what_cannot_be_played_is_told_before(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ScenarioError, match=said):
        check(Scenario(**change), Shelf(tmp_path).path_of)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(scenario=PLAYABLE)
def test_the_command_plays_the_same(scenario: Scenario, tmp_path: Path) -> None:
    check(scenario, Shelf(tmp_path).path_of)
    words = shlex.split(command(scenario, Shelf(tmp_path).path_of))
    assert words[:2] == ["twinkeel", "replay"]
    with replay_command.make_context("replay", words[2:]) as context:
        given = context.params
    assert given["trace_path"] == scenario.trace
    pairs = paired_profiles(given["profiles"], given["replicas"])
    assert pairs == [(kind.profile, kind.replicas) for kind in scenario.fleet]
    assert given["policies"] == scenario.policies
    assert given["faults"] == scenario.parsed_faults()
    assert given["slo"] == Slo.parse(scenario.slo)
    for name in ("seed", "speed", "scale", "scale_lengths", "assume_output"):
        assert given[name] == getattr(scenario, name)


def test_a_scenario_is_plain_json() -> None:
    scenario = Scenario(faults=FAULTS)
    plain = msgspec.to_builtins(scenario)
    assert msgspec.convert(plain, Scenario) == scenario
