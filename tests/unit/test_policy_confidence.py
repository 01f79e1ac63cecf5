"""How far an answer is trusted, and what a second run costs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from policy.confidence import Confidence, ConfidenceState
from policy.events import Finished
from policy.files import parse_policy
from policy.parameters.confidence import Confidence as Section
from tests.policy_support import S


def confidence(**fields: Any) -> Confidence:
    return Confidence(msgspec.convert(fields, Section))


def answer(mean: int, worst: int, close: int, contradiction: bool = False) -> Finished:
    return Finished(1, 0, 100, 0, 50, mean, worst, close, contradiction)


@pytest.mark.parametrize(
    ("features", "score"),
    [
        ((0, 0, 0), 1000),
        ((400, 2000, 20), 763),  # sure
        ((1000, 2800, 80), 493),  # unsure
        ((1800, 3000, 250), 101),  # lost
        ((2000, 3000, 300), 0),
        ((9000, 9000, 1000), 0),
        ((2000, 0, 300), 150),  # only the worst token is trusted
        ((0, 3000, 0), 850),
    ],
)
def test_a_score_is_the_weighted_mean_of_its_parts(
    features: tuple[int, int, int], score: int
) -> None:
    assert confidence().score(answer(*features)) == score


def test_no_logprobs_no_score() -> None:
    assert confidence().score(Finished(1, 0, 100, 0, 50)) == -1
    assert confidence().judge(-1, False, 100, True) == ("deliver", "")


def test_a_contradiction_caps_the_score_of_a_sure_answer() -> None:
    assert confidence().score(answer(0, 0, 0, True)) == 450
    assert confidence().score(answer(1800, 3000, 250, True)) == 101
    assert confidence(contradiction_most_permille=0).score(answer(0, 0, 0, True)) == 0


def test_a_trusted_answer_is_delivered() -> None:
    assert confidence().judge(650, False, 100, True) == ("deliver", "not_needed")


def test_a_doubtful_answer_is_verified_within_the_budget() -> None:
    judged = confidence()
    for _ in range(19):
        judged.served(100)
    assert judged.judge(649, False, 100, True) == ("degrade", "skipped_budget")
    judged.served(100)  # 5 % of 2,000 are 100
    assert judged.judge(649, False, 100, True) == ("verify", "")
    assert judged.judge(649, False, 100, True) == ("degrade", "skipped_budget")


def test_unused_budget_is_saved_up_to_the_burst() -> None:
    judged = confidence(burst_tokens=250)
    judged.served(1_000_000)
    actions = [judged.judge(500, False, 100, True)[0] for _ in range(4)]
    assert actions == ["verify", "verify", "degrade", "degrade"]


def test_a_hopeless_answer_is_degraded_at_once() -> None:
    judged = confidence()
    judged.served(1_000_000)
    assert judged.judge(299, False, 100, True) == ("degrade", "not_needed")
    assert judged.judge(300, False, 100, True) == ("verify", "")


def test_a_stream_is_out_already() -> None:
    judged = confidence()
    judged.served(1_000_000)
    for score in (0, 299, 649):
        assert judged.judge(score, True, 100, True) == ("deliver", "skipped_stream")
    assert judged.judge(650, True, 100, True) == ("deliver", "not_needed")


def test_without_another_replica_nothing_is_verified_or_paid() -> None:
    judged = confidence(budget_permille=1000, burst_tokens=100)
    judged.served(100)
    assert judged.judge(500, False, 100, False) == ("degrade", "skipped_budget")
    assert judged.judge(500, False, 100, True) == ("verify", "")


def test_everything_can_be_verified_as_a_baseline() -> None:
    judged = confidence(verify_below_permille=1001, degrade_below_permille=0, budget_permille=2000)
    for score in (0, 500, 1000):
        judged.served(300)
        assert judged.judge(score, False, 300, True) == ("verify", "")


def test_the_budget_is_remembered() -> None:
    judged = confidence()
    judged.served(2000)
    packed = msgspec.msgpack.encode(judged.state(5 * S))
    again = confidence()
    again.load(msgspec.msgpack.decode(packed, type=ConfidenceState), 0)
    assert again.judge(500, False, 100, True) == ("verify", "")
    assert again.judge(500, False, 1, True) == ("degrade", "skipped_budget")


def test_it_waits_for_no_time_and_holds_no_tables() -> None:
    judged = confidence()
    assert (judged.deadline_ns(), judged.ticked(S), judged.size(), judged.size_most()) == (
        None, (), 0, 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("{degrade_below_permille: 700}", "700, above verify_below_permille, 650"),
        ("{worst_weight_permille: 800}", "add up to 1050 per mille"),
        ("{actions: [template, template]}", "an action stands twice"),
        ("{budget_permille: 2001}", "2001"),
    ],
)
def test_what_makes_no_sense_is_refused(keys: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_policy(f"schema: 1\nconfidence: {keys}", "mine")
