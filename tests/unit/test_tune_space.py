"""Spaces: keys, bounds, what is refused, and the policies that come of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from policy.files import FileError, load_policy, parse_policy
from twin.tune.space import Space, parse_space, tunable

STABLE = load_policy("stable")


def space(keys: dict[str, Any], parent: Any = STABLE, **more: Any) -> Space:
    return parse_space({"schema": 1, "space": keys, **more}, "space.yaml", parent)


def refused(keys: dict[str, Any], parent: Any = STABLE) -> str:
    with pytest.raises(FileError) as error:
        space(keys, parent)
    return str(error.value)


def test_a_range_has_the_schemas_type_and_its_own_bounds() -> None:
    (knob,) = space({"tiers.lend_wait_ms": {"low": 100, "high": 900, "log": True}}).knobs
    assert (knob.kind, knob.low, knob.high, knob.log, knob.parent) == ("int", 100, 900, True, 400)


def test_bounds_that_are_not_given_are_those_of_the_schema() -> None:
    (knob,) = space({"tiers.batch_least_permille": {"high": 400}}).knobs
    assert (knob.low, knob.high) == (0, 400)


def test_around_spans_ratios_and_stays_inside_the_schema() -> None:
    (knob,) = space({"tiers.lend_wait_ms": {"around": "x2"}}).knobs
    assert (knob.low, knob.high, knob.log) == (200, 800, True)
    (knob,) = space({"confidence.verify_below_permille": {"around": "x2"}}).knobs
    assert (knob.low, knob.high) == (325, 1001)


def test_choices_of_words_switches_and_lists() -> None:
    found = space({
        "shedding.enabled": [True, False],
        "discipline": ["tiered", "fifo"],
        "confidence.actions": [["cached", "lighter", "template"], ["template"]],
    })  # fmt: skip
    assert [knob.kind for knob in found.knobs] == ["choice"] * 3
    assert found.points() == 8
    policy = found.policy({"shedding.enabled": False, "confidence.actions": ["template"]})
    assert policy.shedding.enabled is False
    assert policy.confidence.actions == ("template",)


def test_entries_of_a_list_go_by_their_name() -> None:
    found = space({"breakers.rules.doubt.share_permille": {"around": "x2"}})
    policy = found.policy({"breakers.rules.doubt.share_permille": 99})
    assert [rule.share_permille for rule in policy.breakers.rules] == [5, 0, 99, 400]
    assert found.policy(found.incumbent) == STABLE


def test_business_lines_of_the_parent_can_be_tuned() -> None:
    parent = parse_policy("schema: 1\nclasses: {lines: {search: {deadline_ms: 800}}}", "p.yaml")
    found = space({"classes.lines.search.deadline_ms": {"around": "x2"}}, parent)
    policy = found.policy({"classes.lines.search.deadline_ms": 500})
    assert policy.classes.lines["search"].deadline_ms == 500


def test_everything_named_in_a_policy_file_is_known() -> None:
    keys = {key for key, _, _ in tunable(STABLE)}
    assert {"tiers.turbo_max_tflop", "capacity.floor_quantile_permille", "discipline"} <= keys
    assert not {"schema", "name"} & keys


def test_points_are_counted_where_they_can_be() -> None:
    assert space({"tiers.fallback_strikes": {"low": 1, "high": 4}}).points() == 4
    keys = {"tiers.fallback_strikes": {"low": 1, "high": 4}, "shedding.enabled": [True, False]}
    assert space(keys).points() == 8


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"tiers.lend_wait": {"around": "x2"}}, "did you mean tiers.lend_wait_ms"),
        ({"tiers.lend_wait_ms": {"low": -1}}, "low -1 lies outside what a policy can have"),
        ({"tiers.lend_wait_ms": {"low": 900, "high": 500}}, "low 900 lies above high 500"),
        ({"tiers.lend_wait_ms": {"low": 500}}, "leaves out the parent's own value, 400"),
        ({"tiers.lend_wait_ms": {"low": 0, "log": True}}, "low must lie above 0"),
        ({"tiers.lend_wait_ms": {"low": 1.5}}, "is a whole number, got low 1.5"),
        ({"tiers.lend_wait_ms": {"around": "2"}}, "write x2"),
        ({"tiers.lend_wait_ms": {"around": "x1"}}, "write x2"),
        ({"tiers.lend_wait_ms": {"around": f"x{10**400}"}}, "write x2"),
        ({"tiers.lend_wait_ms": {"high": math.inf}}, "high inf is no number"),
        ({"tiers.lend_wait_ms": 5}, "5 is neither a range nor a list"),
        ({"tiers.lend_wait_ms": {"lo": 5}}, "lo: unknown key"),
        ({"tiers.lend_wait_ms": {"around": "x2", "low": 3}}, "either around, or low and high"),
        ({"limits.model_per_s": {"around": "x2"}}, "which has no half and no double"),
        ({"shedding.enabled": {"low": 0}}, "is no number"),
        ({"shedding.enabled": [True, "no"]}, "Expected `bool`"),
        ({"discipline": ["fifo"]}, 'own value, "tiered", is not among the choices'),
        ({"discipline": ["tiered", "fito"]}, "Invalid enum value 'fito'"),
        ({"tiers.lend_wait_ms": {"choices": [400], "low": 3}}, "choices go without"),
        ({"name": ["a", "b"]}, "no policy has this key"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(keys: dict[str, Any], said: str) -> None:
    text = refused(keys)
    assert said in text
    assert f"space.{next(iter(keys))}" in text


def test_values_that_make_no_policy_together_are_told() -> None:
    found = space({"tiers.turbo_max_tflop": {"high": 1000}})
    with pytest.raises(FileError, match="above stable_max_tflop"):
        found.policy({"tiers.turbo_max_tflop": 300})


def test_an_unknown_key_of_the_file_is_refused() -> None:
    with pytest.raises(FileError, match="objektives"):
        space({"tiers.lend_wait_ms": {"around": "x2"}}, objektives=["goodput"])
