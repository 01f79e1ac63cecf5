"""Simulated answers: shares of the kinds, load, bad weights, verdicts, equal draws in every run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from twin.arrivals import Asked
from twin.drawn_answers import Answers, DrawnAnswers

SURE = {
    "share": 0.9,
    "loaded_share": 0.4,
    "entropy_mean": {"fixed": 300},
    "entropy_worst": {"fixed": 900},
    "close_permille": {"fixed": 10},
    "correct": 1.0,
}
UNSURE = {
    "share": 0.1,
    "loaded_share": 0.6,
    "entropy_mean": {"lognormal": {"mean": 1500, "sigma": 0.3}, "low": 1000},
    "entropy_worst": {"fixed": 900},
    "close_permille": {"fixed": 250},
    "correct": 0.5,
}
BAD = {**SURE, "share": 1.0, "loaded_share": None, "entropy_mean": {"fixed": 2500}, "correct": 0.2}
RULE = {
    "model": "m",
    "kinds": [SURE, UNSURE],
    "load": {"from_in_flight": 10, "to_in_flight": 30},
    "bad": BAD,
}
DRAWS = 4000


def answers(seed: int = 1, **changes: Any) -> DrawnAnswers:
    raw = {"rules": [RULE], **changes}
    return DrawnAnswers(msgspec.convert(raw, Answers), seed)


def ask(step: str = "", line: str = "") -> Asked:
    return Asked(prompt_tokens=1, output_tokens=1, step=step, line=line)


def draw(model: DrawnAnswers, request: int, **changes: Any) -> Any:
    where: dict[str, Any] = {
        "replica": 0, "version": "", "model": "m", "in_flight": 0, "shift_permille": 0, "now_ns": 5,
        **changes,
    }  # fmt: skip
    return model.features(request, ask(), 0, **where)


def unsure_share(**changes: Any) -> float:
    model = answers()
    drawn = [draw(model, request, **changes) for request in range(DRAWS)]
    return sum(features.close_permille == 250 for features in drawn) / DRAWS


@pytest.mark.parametrize(
    ("in_flight", "share"), [(0, 0.1), (10, 0.1), (20, 0.35), (30, 0.6), (500, 0.6)]
)
def test_a_model_loses_its_confidence_with_load(in_flight: int, share: float) -> None:
    assert unsure_share(in_flight=in_flight) == pytest.approx(share, abs=0.03)


def test_being_right_depends_on_the_kind() -> None:
    model = answers()
    drawn = [draw(model, request, in_flight=30) for request in range(DRAWS)]
    assert all(features.correct for features in drawn if features.close_permille == 10)
    unsure = [features.correct for features in drawn if features.close_permille == 250]
    assert sum(unsure) / len(unsure) == pytest.approx(0.5, abs=0.04)


def test_the_worst_token_is_never_surer_than_the_mean() -> None:
    model = answers()
    drawn = [draw(model, request, in_flight=30) for request in range(200)]
    assert all(one.entropy_worst_millinats >= one.entropy_mean_millinats for one in drawn)


def test_bad_weights_make_their_share_of_the_answers() -> None:
    model = answers()
    drawn = [draw(model, request, shift_permille=300) for request in range(DRAWS)]
    bad = [features for features in drawn if features.entropy_mean_millinats == 2500]
    assert len(bad) / DRAWS == pytest.approx(0.3, abs=0.03)
    assert sum(features.correct for features in bad) / len(bad) == pytest.approx(0.2, abs=0.04)


def test_a_second_run_draws_anew_and_a_repetition_draws_the_same() -> None:
    model = answers()
    first = [draw(model, request, in_flight=30) for request in range(100)]
    assert [draw(answers(), request, in_flight=30) for request in range(100)] == first
    for changes in ({"replica": 1}, {"now_ns": 6}):
        second = [draw(model, request, in_flight=30, **changes) for request in range(100)]
        differ = sum(a.correct != b.correct for a, b in zip(first, second, strict=True))
        assert 20 < differ < 60


def test_the_first_rule_that_fits_is_taken() -> None:
    rules = [
        {"version": "v2", "kinds": [{**SURE, "share": 1.0, "loaded_share": None}]},
        {"step": "plan", "kinds": [BAD]},
        {"line": "support", "kinds": [{**UNSURE, "share": 1.0, "loaded_share": None}]},
    ]
    model = answers(rules=rules)
    where: dict[str, Any] = {
        "replica": 0, "model": "x", "in_flight": 0, "shift_permille": 0, "now_ns": 0
    }  # fmt: skip
    plan = model.features(1, ask(step="plan", line="support"), 0, version="v1", **where)
    assert plan.entropy_mean_millinats == 2500
    newer = model.features(1, ask(step="plan"), 0, version="v2", **where)
    assert newer.entropy_mean_millinats == 300
    support = model.features(1, ask(line="support"), 0, version="", **where)
    assert support.close_permille == 250
    other = model.features(1, ask(), 0, version="", **where)
    assert other == (-1, -1, -1, False, True)


def test_two_right_answers_agree_and_others_by_chance() -> None:
    model = answers(match_otherwise=0.25)
    assert {model.verdict(request, True, True) for request in range(50)} == {"match"}
    for pair in ((True, False), (False, True), (False, False)):
        matches = sum(model.verdict(request, *pair) == "match" for request in range(DRAWS))
        assert matches / DRAWS == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"kinds": [{**SURE, "share": 0.5}]}, "share of the kinds must add up to 1, not 0.5"),
        ({"kinds": [SURE, {**UNSURE, "loaded_share": 0.1}]}, "loaded_share of the kinds"),
        ({**RULE, "load": {"from_in_flight": 9, "to_in_flight": 9}}, "must be more than"),
        ({**RULE, "kind": []}, "unknown field `kind`"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rule: dict[str, Any], said: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        answers(rules=[rule])
