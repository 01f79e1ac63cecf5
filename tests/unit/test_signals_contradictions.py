"""Contradictions between a prompt and its answer: the labelled cases, the rules' file, bounds."""

from __future__ import annotations

import time
from importlib import resources

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policy.signals import contradictions, contradicts
from policy.signals.rules import RulesError, parse, stem
from policy.signals.words import Number, clauses, content, numbers, plain
from tests.bench.answers.contradictions import Score, load_cases, score

RULES = resources.files("policy.signals").joinpath("rules.yaml").read_text("utf-8")
CASES = load_cases()


def told(judged: Score) -> str:
    return "\n".join(
        [f"missed {case.prompt!r} {case.answer!r}" for case in judged.missed]
        + [f"false {case.prompt!r} {case.answer!r}" for case in judged.false]
    )


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("held_out", [False, True])
def test_the_cases_are_many_and_of_both_kinds(lang: str, held_out: bool) -> None:
    here = [case for case in CASES if case.lang == lang and case.held_out == held_out]
    contrary = sum(case.contradiction for case in here)
    assert len(here) >= (40 if held_out else 80)
    assert 0.4 <= contrary / len(here) <= 0.6
    assert len({case.kind for case in here}) >= 15
    assert len({(case.prompt, case.answer) for case in CASES}) == len(CASES) >= 240


def test_contradictions_are_found_and_few_others() -> None:
    judged = score([case for case in CASES if not case.held_out])
    assert judged.precision >= 0.95, told(judged)
    assert judged.recall >= 0.9, told(judged)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_neither_language_is_left_behind(lang: str) -> None:
    judged = score([case for case in CASES if case.lang == lang])
    assert judged.precision >= 0.9, told(judged)
    assert judged.recall >= 0.8, told(judged)


def test_nothing_contradicts_itself() -> None:
    assert [case for case in CASES if contradicts(case.prompt, case.prompt)] == []
    assert [case for case in CASES if contradicts(case.answer, case.answer)] == []


@pytest.mark.parametrize(
    ("prompt", "answer", "rule"),
    [
        ("Smoking is forbidden here.", "Smoking is allowed here.", "ruling"),
        ("The lid is sealed.", "The lid isn't sealed.", "negation"),
        ("价格上涨了5元。", "价格下跌了5元。", "antonym"),
        ("Anna is older than Ben.", "Ben is older than Anna.", "order"),
        ("甲方向乙方支付租金。", "乙方向甲方支付租金。", "parties"),
        ("Returns take 30 days.", "Returns take 90 days.", "number"),
    ],
)
def test_people_are_told_which_rule_found_it(prompt: str, answer: str, rule: str) -> None:
    found = contradictions(prompt, answer)
    assert [why.split(":")[0] for why in found] == [rule]
    assert answer.lower()[:7] in found[0]
    assert contradicts(prompt, answer)


def test_what_is_told_is_bounded() -> None:
    prompt = "".join([f"Room {at} of the tower is closed at noon. " for at in range(60)])
    found = contradictions(prompt, prompt.replace("closed", "open"))
    assert len(found) == 8
    assert all(len(why) < 300 for why in found)


def test_a_clause_is_its_words_its_numbers_and_what_turns_it() -> None:
    (clause,) = clauses(plain("Guests over 12 may not use the 3.50 m pool in May"))
    assert clause.words == {"guest", "use", "pool", "may"}
    assert clause.numbers == (Number("12", ""), Number("3.5", "m"))
    assert clause.negative
    assert clause.rules
    assert clause.stated
    (asked,) = clauses(plain("押金退不退？"))  # noqa: RUF001
    assert not asked.stated


def test_numbers_are_read_in_words_and_in_signs() -> None:
    assert numbers("seven days, 1,250.50 dollars, 十二个月, 两万元, 5万元") == {
        "7", "1250.5", "12", "20000", "50000",
    }  # fmt: skip
    assert numbers("张三借给李四两万元") == {"20000"}
    assert numbers("from -5 to .5 degrees") == {"-5", "0.5"}
    assert content("The 2 refunds") == {"2", "refund"}
    assert {stem(word) for word in ("supply", "supplies", "supplied")} == {"suppl"}


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("schema: 1", "schema: 2", "schema 2"),
        ("deeds:", "deads:", "deads"),
        ("forbids: [cannot,", "forbids: [cannot, [x],", r"\$\.forbids\[1\]"),
        ("forbids: [cannot,", "forbids: [cannot, '',", "forbids has an empty word"),
        ("forbids: [cannot,", "forbids: [cannot, can,", "'can' stands in allows and in forbids"),
        ("  order: true}", "  order: perhaps}", r"\$\.antonyms\[\d+\]\.order"),
        ("antonyms:", "antonyms: [", "no valid YAML"),
    ],
)
def test_a_wrong_entry_of_the_rules_is_named(old: str, new: str, complaint: str) -> None:
    assert old in RULES
    with pytest.raises(RulesError, match=complaint):
        parse(RULES.replace(old, new, 1))


LONG = [
    "The use of room 7 is allowed, that of hall 8 is forbidden. " * 1700,
    "大厅7内禁止吸烟，走廊8内允许饮食。" * 6000,  # noqa: RUF001
    "A pays B " * 12_000,
    "比" * 100_000,
    "十" * 100_000,
    "1," * 50_000,
    "9" * 100_000,
    "a." * 50_000,
    "no " * 34_000,
    "((((" * 25_000,
]


@pytest.mark.parametrize("at", range(len(LONG)))
def test_long_texts_take_milliseconds(at: int) -> None:
    contradicts("Read the rules.", "Once.")
    text = LONG[at]
    other = text.replace("allowed", "permitted now").replace("吸烟", "抽烟")
    began = time.process_time()
    contradicts(text, other)
    assert time.process_time() - began < 0.2  # about 0.013 s on an idle core


TEXT = st.text(
    st.sampled_from([*"不可以能禁止甲方向乙支付由被比高低长三十万天元。，？", *"ab01.,:-%$ ?\n'"]),  # noqa: RUF001
    max_size=80,
) | st.text(max_size=40)


@given(TEXT, TEXT)
@example("We sell 9" + "0" * 5000 + " apples and 8 pears.", "We sell 7 apples.")
@example("9" * 11 + "万元", "7万元")
@example("²³ ٣ days", "٤ days")
def test_any_two_texts_can_be_read(prompt: str, answer: str) -> None:
    assert contradicts(prompt, answer) == bool(contradictions(prompt, answer))
    assert not contradicts(prompt, prompt)
