"""Does an answer contradict its prompt? Do two answers say the same?"""

from __future__ import annotations

import pytest

from policy.signals import answers_match, contradicts

CONTRADICTIONS = [
    ("Smoking is forbidden in the lobby.", "Smoking is allowed in the lobby."),
    ("You must not share the key.", "You may share the key."),
    ("You may share the report.", "Sharing the report is prohibited."),
    ("Export of the data is not allowed.", "Data export is not prohibited."),
    ("Withdrawals before 2025 are permitted.", "Withdrawals before 2025 cannot be made."),
    ("Guests can’t use the pool.", "As asked: guests can use the pool."),  # noqa: RUF001
    ("大厅内禁止吸烟。", "大厅内允许吸烟。"),
    ("吸烟在大厅内禁止。", "大厅内可以吸烟。"),
    ("员工不得泄露客户资料", "员工可以泄露客户资料"),
    ("本商品不能退款。", "您好，本商品可以退款。"),  # noqa: RUF001
    ("本商品可以退款。", "本商品不可以退款。"),
]
AGREEMENTS = [
    ("You must not share the key.", "You must not share the key with anyone."),
    ("Export of the data is not allowed.", "The export of data isn't permitted."),
    ("Is smoking allowed in the lobby?", "Smoking is forbidden in the lobby."),
    ("Smoking is forbidden indoors.", "Smoking is allowed outside."),
    ("Pets are forbidden. Guide dogs are allowed.", "Guide dogs are allowed."),
    ("Dogs are forbidden. Guide dogs are allowed.", "Guide dogs are allowed."),
    ("Refunds within 30 days are allowed.", "Refunds within 90 days are forbidden."),
    ("Say hello.", "Smoking is forbidden."),
    ("Allowed.", "Forbidden."),
    ("大厅内禁止吸烟。", "大厅内不允许吸烟。"),
    ("请问可以退款吗？", "本商品不能退款。"),  # noqa: RUF001
    ("", ""),
]


@pytest.mark.parametrize(("prompt", "reply"), CONTRADICTIONS)
def test_what_is_forbidden_and_then_allowed_contradicts(prompt: str, reply: str) -> None:
    assert contradicts(prompt, reply)
    assert not contradicts(prompt, prompt)
    assert not contradicts(reply, reply)


@pytest.mark.parametrize(("prompt", "reply"), AGREEMENTS)
def test_what_says_the_same_or_of_something_else_does_not(prompt: str, reply: str) -> None:
    assert not contradicts(prompt, reply)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("42", "42"),
        ("The answer is 42.", "It is 42."),
        ("The capital of France is Paris.", "Paris is the capital of France."),
        ("It costs 1,000 dollars.", "It costs 1000 dollars."),
        ("退款需要5个工作日", "退款一般需要5个工作日"),
        ("  same\nwords ", "same words"),
    ],
)
def test_answers_in_other_words_match(first: str, second: str) -> None:
    assert answers_match(first, second)
    assert answers_match(second, first)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("42", "43"),
        ("Yes", "No"),
        ("The refund takes 5 days.", "The refund takes 7 days."),
        ("Enable 2FA in the settings.", "Disable 2FA in the settings."),
        ("The bridge is safe.", "The bridge is unsafe."),
        ("The bridge is safe.", "The bridge is not safe."),
        ("Guests can use the pool.", "Guests cannot use the pool, they never could."),
        ("The cat sat on the mat.", "Quantum physics has rules."),
        ("可以退款", "不可以退款"),
        ("是", "不是"),
        ("", ""),
    ],
)
def test_answers_that_say_another_thing_do_not_match(first: str, second: str) -> None:
    assert not answers_match(first, second)
    assert not answers_match(second, first)


def test_a_long_text_is_read_in_bounded_time() -> None:
    text = "The use of room {} is allowed, that of hall {} is forbidden. "
    long = "".join([text.format(at, at) for at in range(3000)])
    assert not contradicts(long, long)
