"""Which 200s are answers, and what is wrong with the others."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.call import EngineTimes
from controller.upstream.judge import (
    Certainties,
    Text,
    engine_times,
    measured,
    of_error,
    of_status,
    text_of,
    whole,
)
from controller.upstream.sse import Choice, Metrics
from policy.signals import Said, certainty
from tests.unit.test_upstream_sse import JSON


def chat(finish: str | None = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish}]}


def text(said: str | None, finish: str = "stop") -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": said, "finish_reason": finish}]}


def two(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {"choices": first["choices"] + second["choices"]}


@pytest.mark.parametrize(
    ("document", "wrong"),
    [
        (chat(content="Hi"), None),
        (chat(content=""), "empty"),
        (chat(content=None), "empty"),
        (chat("length", content=""), None),  # the caller's max_tokens were too few
        (chat("tool_calls", content=None, tool_calls=[{"id": "1"}]), None),
        (chat(content=None, tool_calls=[]), "empty"),
        (chat(content=None, reasoning="well"), None),
        (chat(content=None, reasoning_content="well"), None),
        (chat(content=None, refusal="no"), None),
        (chat(content=None, audio={"id": "1"}), None),
        (chat(content=[{"type": "text", "text": "Hi"}]), None),
        (chat("abort", content="half of"), "stream_cut"),
        (text("Hi"), None),
        (text(""), "empty"),
        (text(None), "empty"),
        (text("Hi", "abort"), "stream_cut"),
        (two(chat(content="Hi"), chat(content="Ho")), None),
        (two(chat(content="Hi"), chat(content="")), "empty"),
        (two(chat(content="Hi"), chat("abort", content="Ho")), "stream_cut"),
        ({"choices": []}, "empty"),
        ({}, "empty"),
        ({"choices": None}, "malformed"),
        ([], "malformed"),
        ("Hi", "malformed"),
        ({"error": {"message": "boom"}}, "http_5xx"),
        ({"error": {"message": "bad", "code": 400}}, "rejected"),
    ],
)
def test_answers(document: object, wrong: str | None) -> None:
    assert whole(json.dumps(document).encode(), "chat")[0] == wrong


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        (b"", "empty"),
        (b" \n", "empty"),
        (b'{"choices": [{"mess', "malformed"),
        (b'{"choices": [{"text": "\xff", "finish_reason": "stop"}]}', "malformed"),
        (b"<html></html>", "malformed"),
        (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "malformed"),
    ],
)
def test_bytes(body: bytes, wrong: str) -> None:
    assert whole(body, "completions") == (wrong, None)


@pytest.mark.parametrize(
    ("data", "wrong"),
    [
        ([{"embedding": [0.1]}], None),
        ([{"embedding": "AAAA"}], None),
        ([{"embedding": []}], "empty"),
        ([{"embedding": ""}], "empty"),
        ([{"embedding": [0.1]}, {"embedding": []}], "empty"),
        ([{}], "empty"),
        ([], "empty"),
    ],
)
def test_embeddings(data: list[dict[str, Any]], wrong: str | None) -> None:
    assert whole(json.dumps({"data": data}).encode(), "embeddings")[0] == wrong


@given(JSON, st.sampled_from(["chat", "completions", "embeddings"]))
def test_judging_never_raises(document: object, endpoint: Any) -> None:
    wrong, answer = whole(json.dumps(document).encode(), endpoint)
    if wrong is None:
        assert answer is not None
        if endpoint != "embeddings":
            assert isinstance(text_of(answer), str)
        engine_times(answer.metrics)
        certainties = Certainties()
        for choice in answer.choices:
            certainties.add(choice.logprobs)
        assert all(-1 <= figure < 1 << 40 for figure in certainties.features())


@given(st.binary(max_size=80))
def test_judging_bytes_never_raises(body: bytes) -> None:
    whole(body, "chat")


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, b"", None),
        (301, b"", "malformed"),
        (400, b"", "rejected"),
        (404, b"", "rejected"),
        (422, b"", "rejected"),
        (429, b"", "backpressure"),
        (500, b"boom", "http_5xx"),
        (500, b"torch.OutOfMemoryError: CUDA out of memory", "oom"),
        (502, b"", "http_5xx"),
        (503, b"", "backpressure"),
    ],
)
def test_statuses(status: int, body: bytes, kind: str | None) -> None:
    assert of_status(status, body) == kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": 400, "message": "x"}, "rejected"),
        ({"code": 404}, "rejected"),
        ({"code": 429}, "backpressure"),
        ({"code": 503}, "backpressure"),
        ({"code": 500, "message": "x"}, "http_5xx"),
        ({"code": 500, "message": "CUDA Out of Memory"}, "oom"),
        ({"code": "invalid"}, "http_5xx"),
        ({"code": [400]}, "http_5xx"),
        ("boom", "http_5xx"),
        (True, "http_5xx"),
    ],
)
def test_errors_inside_an_answer(error: Any, kind: str) -> None:
    assert of_error(error) == kind


def test_engine_times_are_taken_only_whole() -> None:
    assert engine_times(None) is None
    assert engine_times(Metrics(2.0, 3.0, None)) is None
    assert engine_times(Metrics(2.0, 3.5, 0.25)) == EngineTimes(250_000, 2_000_000, 3_500_000)
    for odd in (-1.0, 1e308):
        assert engine_times(Metrics(2.0, 3.0, odd)) is None


def listed(*logprobs: object) -> dict[str, Any]:
    return {"content": [{"top_logprobs": [{"logprob": at} for at in logprobs]}]}


def test_certainties_of_chats_and_completions_are_alike() -> None:
    chats, completions = Certainties(), Certainties()
    chats.add(listed(-0.1, -2.5))
    completions.add({"top_logprobs": [{"a": -0.1, "b": -2.5}]})
    assert chats.features() == completions.features()
    assert chats.features()[0] > 0


def test_whole_numbers_are_logprobs_too() -> None:
    whole_number, fraction = Certainties(), Certainties()
    whole_number.add(listed(0, -20.0))
    fraction.add(listed(0.0, -20.0))
    assert whole_number.features() == fraction.features() == (0, 0, 0)


@pytest.mark.parametrize(
    "logprobs",
    [
        None, [], 3, {}, {"content": None}, {"content": [None]}, {"content": [{}]},
        {"content": [{"top_logprobs": [{}]}]}, {"top_logprobs": [None]}, {"top_logprobs": 1},
        listed("x", None, [1]), {"content": [{"top_logprobs": []}]},
    ],
)  # fmt: skip
def test_what_is_no_logprobs_has_no_features(logprobs: Any) -> None:
    certainties = Certainties()
    certainties.add(logprobs)
    assert certainties.features() == (-1, -1, -1)


def test_odd_logprobs_harm_nothing() -> None:
    for odd in (10**400, -(10**400), 1e308, -1e308, -9999.0):
        certainties = Certainties()
        certainties.add(listed(odd, -0.5))
        certainties.features()


def test_only_the_first_choice_is_compared() -> None:
    _, answer = whole(json.dumps(two(chat(content="a"), chat(content="b"))).encode(), "chat")
    assert answer is not None
    assert text_of(answer) == "a"
    _, answer = whole(json.dumps(chat(content=None, reasoning="a")).encode(), "chat")
    assert answer is not None
    assert text_of(answer) == ""


LIKELY = st.lists(st.floats(-12.0, -1.4), min_size=2, max_size=4)


@given(st.lists(LIKELY, min_size=1, max_size=3), st.integers(1, 300))
def test_long_answers_are_summed_up_as_they_come(kinds: list[list[float]], times: int) -> None:
    """As if all were kept, but for the rounding of each part's mean."""
    tokens = kinds * times
    certainties = Certainties(2)
    for logprobs in tokens:
        certainties.add(listed(*logprobs))
    mean, worst, close = certainties.features()
    expected = certainty(tokens, candidates=2)
    assert expected is not None
    assert abs(mean - expected.entropy_mean_millinats) <= 1
    assert (worst, close) == expected[1:]


def read_said(document: dict[str, Any]) -> Said:
    _, answer = whole(json.dumps(document).encode(), "chat")
    assert answer is not None
    return asyncio.run(measured(answer, 20))[1]


def test_what_an_answer_says_is_kept_with_how_sure_it_was() -> None:
    top = [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]
    tokens = [
        {"token": "a", "top_logprobs": top},
        {"token": "b", "top_logprobs": top[::-1]},  # the sampled one comes first
        {"token": "c", "top_logprobs": top[:1]},
    ]
    document = chat("length", content="abc")
    document["choices"][0]["logprobs"] = {"content": tokens}
    gap = round(1000 * (0.60653 - 0.22313))
    assert read_said(document) == Said("abc", ("a", "b", "c"), (gap, gap, -1), cut=True)

    document = text("abc")
    top_of_each: list[Any] = [{"a": -0.5, "b": -1.5}, {"b": -1.5, "a": -0.5}, {"c": -0.5}]
    document["choices"][0]["logprobs"] = {"tokens": ["a", "b", "c"], "top_logprobs": top_of_each}
    assert read_said(document) == Said("abc", ("a", "b", "c"), (gap, gap, -1))
    assert read_said(two(chat(content="a"), chat(content="b"))) == Said("a")


def test_calls_of_tools_are_said_as_json() -> None:
    def calling(arguments: Any) -> Said:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return read_said(chat("tool_calls", content=None, tool_calls=[call]))

    assert calling('{"a": 1, "b": 2}') == calling('{"a":1,"b":2}')
    assert calling('{"a": 1}') != calling('{"a": 2}')
    for odd in ("no json", None, 3, '{"a": '):
        assert calling(odd).text
    assert read_said(chat(content=None, reasoning="hm")).text == "hm"


def test_the_text_of_a_stream_is_kept_up_to_a_bound() -> None:
    kept = Text()
    kept.add(Choice(text="a"))
    kept.add(Choice(index=1, text="b"))
    kept.add(Choice(text=None))
    assert kept.so_far() == "a"
    for _ in range(100):
        kept.add(Choice(text="x" * 1000))
    assert len(kept.so_far()) == 64 * 1024
