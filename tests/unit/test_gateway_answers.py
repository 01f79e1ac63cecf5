"""Kept answers: only for the same question of the same tenant, within bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.gateway.answers import ANSWER_BYTES_MOST, OVERHEAD_BYTES, Answers
from controller.gateway.asking import Asked, read

S = 1_000_000_000


def asked(text: str = "Hi", tenant: str = "", endpoint: Any = "chat", **more: Any) -> Asked:
    document = {"model": "m", "messages": [{"content": text}], "prompt": text, **more}
    body = json.dumps(document).encode()
    return read(endpoint, {}, body, b"k" * 32, (tenant, "", ""))


def test_an_answer_is_found_again_with_its_age() -> None:
    answers = Answers()
    answers.keep(asked(), b"answer", 5 * S, 700)
    kept = answers.find(asked(), 9 * S)
    assert kept is not None
    assert (kept.body, kept.at_ns, kept.confidence_permille) == (b"answer", 5 * S, 700)
    answers.keep(asked(), b"younger", 6 * S, -1)
    kept = answers.find(asked(), 9 * S)
    assert kept is not None
    assert kept.body == b"younger"


@pytest.mark.parametrize(
    "other",
    [
        asked("Ho"), asked(tenant="shop"), asked(endpoint="completions"), asked(model="n"),
        asked(temperature=1), asked(tools=[{}]), asked(max_tokens=3), asked(response_format={}),
        asked(n=2), asked(other=1),
    ],
)  # fmt: skip
def test_another_question_finds_nothing(other: Asked) -> None:
    answers = Answers()
    answers.keep(asked(), b"answer", 0, -1)
    assert answers.find(other, 1) is None


def test_how_it_is_delivered_makes_no_other_question() -> None:
    answers = Answers()
    answers.keep(asked(), b"answer", 0, -1)
    same = asked(stream=True, stream_options={"include_usage": True}, user="ann", priority=3)
    assert answers.find(same, 1) is not None


def test_the_order_of_fields_makes_no_other_question() -> None:
    answers = Answers()
    body = b'{"messages": [{"content": "Hi", "role": "user"}], "model": "m", "a": {"b": 1, "c": 2}}'
    swapped = (
        b'{"a": {"c": 2, "b": 1}, "model": "m", "messages": [{"role": "user", "content": "Hi"}]}'
    )
    answers.keep(read("chat", {}, body, b""), b"answer", 0, -1)
    assert answers.find(read("chat", {}, swapped, b""), 1) is not None


def test_old_answers_are_gone() -> None:
    answers = Answers(age_most_ns=10 * S)
    answers.keep(asked(), b"answer", 0, -1)
    assert answers.find(asked(), 10 * S) is not None
    assert answers.find(asked(), 10 * S + 1) is None
    assert answers.find(asked(), 0) is None


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 120)), max_size=40))
def test_what_is_kept_is_bounded_and_the_youngest(kept: list[tuple[int, int]]) -> None:
    answers = Answers(bytes_most=3 * OVERHEAD_BYTES + 100)
    expected: dict[int, int] = {}
    for at, (name, size) in enumerate(kept):
        answers.keep(asked(str(name)), b"x" * size, at, -1)
        expected.pop(name, None)
        expected[name] = size
        while sum(expected.values()) + len(expected) * OVERHEAD_BYTES > 3 * OVERHEAD_BYTES + 100:
            del expected[next(iter(expected))]
    for name in range(6):
        found = answers.find(asked(str(name)), len(kept))
        assert (None if found is None else len(found.body)) == expected.get(name)


def test_a_large_answer_is_not_kept() -> None:
    answers = Answers()
    answers.keep(asked(), b"x" * (ANSWER_BYTES_MOST + 1), 0, -1)
    assert answers.find(asked(), 0) is None


def test_numbers_of_any_size_are_part_of_a_question() -> None:
    answers = Answers()
    answers.keep(asked(big=10**40), b"answer", 0, -1)
    assert answers.find(asked(big=10**40), 1) is not None
    assert answers.find(asked(big=10**40 + 1), 1) is None
