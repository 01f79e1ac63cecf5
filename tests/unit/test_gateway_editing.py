"""Edits change what they are for, and no other byte."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from controller.call import NOTHING
from controller.gateway import editing

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)  # fmt: skip
OBJECTS = st.dictionaries(st.text(), JSON, max_size=4)
SPACE = st.text(st.sampled_from(" \t\r\n"), max_size=3).map(str.encode)


@given(OBJECTS, st.text(), JSON, st.booleans(), SPACE, st.sampled_from([None, 1]))
def test_a_member_is_added(
    document: dict[str, Any], name: str, value: Any, plain: bool, space: bytes, indent: int | None
) -> None:
    assume(name not in document)
    body = json.dumps(document, ensure_ascii=plain, indent=indent).encode() + space
    edited = editing.with_member(body, name, value)
    assert json.loads(edited) == {**document, name: value}
    assert edited.startswith(body.rstrip()[:-1])


@given(OBJECTS, JSON, st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_a_member_is_added_to_an_event(document: dict[str, Any], value: Any, end: bytes) -> None:
    assume("twinkeel" not in document)
    event = b"data: " + json.dumps(document).encode() + end
    edited = editing.event_with_member(event, "twinkeel", value)
    assert edited.startswith(b"data: {")
    assert edited.endswith(end)
    assert edited.count(b"\n") == event.count(b"\n")
    assert json.loads(edited[6:]) == {**document, "twinkeel": value}


@pytest.mark.parametrize("body", [b"", b"[]", b"text", b"[1] \n", b": comment"])
def test_what_is_no_object_stays_as_it_is(body: bytes) -> None:
    assert editing.with_member(body, "a", 1) == body


def test_empty_objects_get_no_comma() -> None:
    for body in (b"{}", b"{ }", b" {\n}\n"):
        assert json.loads(editing.with_member(body, "a", 1)) == {"a": 1}


# ---- logprobs ----


def whole_with_logprobs(body: bytes, shown: int) -> bytes:
    return asyncio.run(editing.whole_with_logprobs(body, shown))


def chunk(*logprobs: Any) -> dict[str, Any]:
    choices = [{"index": at, "logprobs": each} for at, each in enumerate(logprobs)]
    return {"id": "\N{EURO SIGN}", "choices": choices, "x": {"logprobs": 7}}


@given(st.lists(st.sampled_from([None, {}, {"content": []}, {"content": [{"logprob": -1.5}]}])))
def test_logprobs_are_taken_out_and_nothing_else(logprobs: list[Any]) -> None:
    document = chunk(*logprobs)
    expected = chunk(*(None for _ in logprobs))
    body = json.dumps(document).encode()
    assert json.loads(whole_with_logprobs(body, NOTHING)) == expected
    event = b"data: " + body + b"\n\n"
    edited = editing.event_with_member(editing.event_with_logprobs(event, NOTHING), "t", 1)
    assert json.loads(edited[6:]) == {**expected, "t": 1}
    compact = b"data: " + json.dumps(document, separators=(",", ":")).encode() + b"\n\n"
    assert json.loads(editing.event_with_logprobs(compact, NOTHING)[6:]) == expected


def test_what_has_no_logprobs_keeps_its_bytes() -> None:
    for body in (b'{ "choices" : [ {"logprobs": null } ] }', b'{"choices": []}', b'{"a": 1 }'):
        assert whole_with_logprobs(body, NOTHING) == body
        event = b"data: " + body + b"\n\n"
        assert editing.event_with_logprobs(event, NOTHING) == event
    for event in (b"data: [DONE]\n\n", b": ping\n\n"):
        assert editing.event_with_logprobs(event, NOTHING) == event


def listed(count: int) -> list[dict[str, Any]]:
    return [{"token": f"t{at}", "logprob": -1.5 - at} for at in range(count)]


@pytest.mark.parametrize("asked", [0, 1, 2, 5])
def test_a_caller_gets_as_many_candidates_as_it_asked_for(asked: int) -> None:
    """As vLLM gives them, of a chat's token and of a completion's whose token is the likeliest."""

    def chats(count: int) -> dict[str, Any]:
        token = {"token": "t0", "logprob": -1.5, "bytes": [1], "top_logprobs": listed(count)}
        return {**chunk({"content": [token, dict(token)]}, None), "usage": {"total_tokens": 3}}

    def completions(count: int) -> dict[str, Any]:
        top = [{each["token"]: each["logprob"] for each in listed(count)}, None]
        logprobs = {"tokens": ["t0", "t1"], "text_offset": [0, 2], "top_logprobs": top}
        return chunk({**logprobs, "token_logprobs": [-1.5, None]})

    for came, expected in (
        (chats(20), chats(asked)),
        (completions(21), completions(max(1, asked))),
    ):
        body = json.dumps(came, separators=(",", ":")).encode()
        assert json.loads(whole_with_logprobs(body, asked)) == expected
        event = b"data: " + body + b"\n\n"
        assert json.loads(editing.event_with_logprobs(event, asked)[6:]) == expected


@pytest.mark.parametrize("rank", range(1, 8))
@pytest.mark.parametrize("asked", [0, 1, 2, 5])
def test_a_completions_token_is_listed_though_it_is_not_likely(rank: int, asked: int) -> None:
    """vLLM puts it first, then the likeliest so many, of which it may be one."""

    def vllm(count: int) -> dict[str, float]:
        likeliest = [(f"t{at}", -1.5 - at) for at in range(1, 8)]
        return dict([likeliest[rank - 1], *likeliest[:count]])

    body = json.dumps(chunk({"top_logprobs": [vllm(6)]})).encode()
    edited = json.loads(whole_with_logprobs(body, asked))
    (top,) = edited["choices"][0]["logprobs"]["top_logprobs"]
    assert list(top.items()) == list(vllm(asked).items())


PARTS = st.sampled_from(["content", "top_logprobs", "x"])


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PARTS, inner, max_size=3),
        max_leaves=12,
    )
)
def test_logprobs_of_any_shape_can_be_cut_down(logprobs: Any) -> None:
    body = json.dumps(chunk(logprobs)).encode()
    assert json.loads(whole_with_logprobs(body, 1))["id"] == "\N{EURO SIGN}"


# ---- a whole answer as a stream, and the reverse ----

CALLS = [
    {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    {"id": "2", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


def whole(*messages: dict[str, Any], finish: str = "stop", **more: Any) -> bytes:
    choices = [
        {"index": at, "message": {"role": "assistant", **each}, "finish_reason": finish}
        for at, each in enumerate(messages)
    ]
    document = {"id": "c", "object": "chat.completion", "model": "m", "choices": choices, **more}
    return json.dumps(document).encode()


def chunks(events: list[bytes]) -> list[dict[str, Any]]:
    assert events[-1] == b"data: [DONE]\n\n"
    assert all(each.startswith(b"data: ") and each.endswith(b"\n\n") for each in events)
    return [json.loads(each[6:]) for each in events[:-1]]


def test_a_chat_becomes_a_stream() -> None:
    body = whole({"content": "a"}, {"content": "b"}, usage={"prompt_tokens": 3})
    (only,) = chunks(editing.as_events(body, True, False))
    assert only["object"] == "chat.completion.chunk"
    assert [each["delta"]["content"] for each in only["choices"]] == ["a", "b"]
    assert [each["finish_reason"] for each in only["choices"]] == ["stop", "stop"]
    assert "message" not in only["choices"][0]
    assert "usage" not in only
    _, counts = chunks(editing.as_events(body, True, True))
    assert (counts["choices"], counts["usage"]) == ([], {"prompt_tokens": 3})


def test_tools_and_reasoning_are_in_the_stream() -> None:
    said = {"content": None, "tool_calls": CALLS, "reasoning": "well"}
    body = whole(said, finish="tool_calls")
    (only,) = chunks(editing.as_events(body, True, False))
    delta = only["choices"][0]["delta"]
    assert [each["index"] for each in delta["tool_calls"]] == [0, 1]
    assert [each["function"] for each in delta["tool_calls"]] == [c["function"] for c in CALLS]
    assert delta["reasoning"] == "well"


def test_a_completion_becomes_a_stream() -> None:
    body = json.dumps({"id": "c", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})
    (only,) = chunks(editing.as_events(body.encode(), False, False))
    assert only["choices"] == [{"index": 0, "text": "a", "finish_reason": "stop"}]


def payload(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def said(finish: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return payload({"id": "c", "model": "m", "choices": [choice]})


def test_a_stream_becomes_a_chat() -> None:
    other = {"index": 1, "delta": {"content": "other"}, "finish_reason": None}
    stream = [
        b"", said(role="assistant", content=""), said(content="Good "),
        payload({"id": "c", "choices": [other]}), said(content="day"), said("stop"),
        payload({"id": "c", "choices": [], "usage": {"prompt_tokens": 3}}), b"[DONE]",
    ]  # fmt: skip
    document = json.loads(editing.as_whole(stream, True))
    assert document["object"] == "chat.completion"
    assert (document["id"], document["model"]) == ("c", "m")
    (choice,) = document["choices"]
    assert choice["message"]["content"] == "Good day"
    assert choice["finish_reason"] == "stop"
    assert document["usage"] == {"prompt_tokens": 3}


def test_a_stream_of_tool_calls_becomes_a_chat_with_them() -> None:
    def call(index: int, arguments: str, **more: Any) -> dict[str, Any]:
        function = {"arguments": arguments} | ({"name": more.pop("name")} if more else {})
        return {"index": index, "function": function} | (
            {"id": str(index + 1), "type": "function"} if "name" in function else {}
        )

    stream = [
        said(role="assistant", content=None),
        said(tool_calls=[call(0, "", name="f")]),
        said(tool_calls=[call(0, '{"a":')]),
        said(tool_calls=[call(0, " 1}"), call(1, "{}", name="g")]),
        said("tool_calls"),
        b"[DONE]",
    ]
    document = json.loads(editing.as_whole(stream, True))
    message = document["choices"][0]["message"]
    assert document["choices"][0]["finish_reason"] == "tool_calls"
    kept = [
        {key: each[key] for key in ("id", "type", "function")} for each in message["tool_calls"]
    ]
    assert kept == CALLS


def test_a_stream_becomes_a_completion() -> None:
    def part(text: str, finish: str | None = None) -> bytes:
        return payload(
            {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": finish}]}
        )

    document = json.loads(editing.as_whole([part("Good "), part("day", "length")], False))
    assert document["choices"] == [{"index": 0, "text": "Good day", "finish_reason": "length"}]


@pytest.mark.parametrize("chat", [True, False])
def test_there_and_back(chat: bool) -> None:
    body = (
        whole({"content": "Good day"}) if chat
        else b'{"id": "c", "choices": [{"index": 0, "text": "Good day", "finish_reason": "stop"}]}'
    )  # fmt: skip
    payloads = [each[6:].strip() for each in editing.as_events(body, chat, False)]
    again = json.loads(editing.as_whole(payloads, chat))
    assert again["choices"] == json.loads(body)["choices"]


@pytest.mark.parametrize("chat", [True, False])
def test_the_end_of_a_stream_without_one(chat: bool) -> None:
    (only,) = chunks(editing.cut_off("tk-1", "m", chat))
    assert only["choices"][0]["finish_reason"] == "length"
    assert only["id"] == "tk-1"


def test_only_what_is_cut_down_is_written_anew() -> None:
    """Numbers, escapes and members that this version does not know keep their bytes."""
    token = b'{"logprob":-1.50e0,"x":1E2,"top_logprobs":[{"logprob":-0.10},{"logprob":-9.0}]}'
    body = (
        b'{"x":[1.50e3,1e999,"\\u00e9"],"choices":[{"y":1.0e1,"logprobs":{"content":[%b]}}]}'
        % token
    )
    cut = token.replace(b',{"logprob":-9.0}', b"")
    assert whole_with_logprobs(body, 1) == body.replace(token, cut)
    nothing = body.replace(b'{"content":[%b]}' % token, b"null")
    assert whole_with_logprobs(body, NOTHING) == nothing
    event = b"id: 7\ndata: " + body + b"\n\n"
    assert editing.event_with_logprobs(event, NOTHING) == b"id: 7\ndata: " + nothing + b"\n\n"
