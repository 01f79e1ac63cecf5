"""Streams are cut into whole events, whatever the pieces they come in, and no byte is lost."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.upstream.sse import (
    BROKEN,
    DONE,
    ERROR,
    FINISH,
    NOTHING,
    TEXT,
    USAGE,
    Splitter,
    bounded,
    payload,
    read,
    says_something,
)

LINES = st.text(
    st.characters(exclude_characters="\r\n", exclude_categories=("Cs",)), min_size=1, max_size=20
)


@st.composite
def events(draw: st.DrawFn) -> bytes:
    """One event, with the blank line that ends it."""
    names = st.sampled_from(["data: ", "data:", "event: ", ": ", "id: ", ""])
    end = draw(st.sampled_from([b"\n", b"\r\n"]))
    lines = draw(st.lists(st.tuples(names, LINES), min_size=1, max_size=3))
    return b"".join((name + text).encode() + end for name, text in lines) + end


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(at)]


@given(st.lists(events(), max_size=8), st.lists(st.integers(0, 10_000), max_size=40))
def test_any_pieces_give_the_same_events(sent: list[bytes], cuts: list[int]) -> None:
    splitter = Splitter()
    got = [event for piece in pieces(b"".join(sent), cuts) for event in splitter.feed(piece)]
    assert got == sent
    assert splitter.rest == b""


@given(st.lists(events(), max_size=4))
def test_byte_by_byte_too(sent: list[bytes]) -> None:
    splitter = Splitter()
    data = b"".join(sent)
    got = [event for at in range(len(data)) for event in splitter.feed(data[at : at + 1])]
    assert got == sent


@given(st.lists(st.sampled_from([b"a", b"data: ", b"\n", b"\r\n", b"\r", b"\xff"]), max_size=40),
       st.lists(st.integers(0, 200), max_size=10))  # fmt: skip
def test_no_byte_is_lost_of_anything(parts: list[bytes], cuts: list[int]) -> None:
    data = b"".join(parts)
    splitter = Splitter()
    got = [event for piece in pieces(data, cuts) for event in splitter.feed(piece)]
    assert b"".join(got) + splitter.rest == data
    assert all(event.endswith((b"\n\n", b"\n\r\n")) for event in got)
    assert b"\n\n" not in splitter.rest


def test_the_end_of_an_event_is_awaited() -> None:
    splitter = Splitter()
    assert splitter.feed(b"data: a\n") == []
    assert splitter.feed(b"\ndata: \xe4\xbd") == [b"data: a\n\n"]
    assert splitter.rest == b"data: \xe4\xbd"
    assert splitter.feed(b"\xa0\n\n") == ["data: \N{CJK UNIFIED IDEOGRAPH-4F60}\n\n".encode()]


@pytest.mark.parametrize(
    ("event", "data"),
    [
        (b"data: x\n\n", b"x"),
        (b"data:x\r\n\r\n", b"x"),
        (b": a comment\n\n", b""),
        (b"\n\n", b""),
        (b"event: error\ndata: x\n\n", b"x"),
        (b"data: x\ndata: y\n\n", b"x\ny"),
        (b"id: 1\n\n", b""),
    ],
)
def test_payload(event: bytes, data: bytes) -> None:
    assert payload(event) == data


def chunk(**members: Any) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def choice(finish: str | None = None, **said: Any) -> dict[str, Any]:
    return {"index": 0, "delta": said, "finish_reason": finish}


KINDS = [
    (chunk(choices=[choice(content="a")]), TEXT),
    (chunk(choices=[choice(reasoning="a")]), TEXT),
    (chunk(choices=[choice(reasoning_content="a")]), TEXT),
    (chunk(choices=[choice(refusal="no")]), TEXT),
    (chunk(choices=[choice(tool_calls=[{"index": 0}])]), TEXT),
    (chunk(choices=[choice(content=""), choice(content="b")]), TEXT),
    (chunk(choices=[{"index": 0, "text": "a", "finish_reason": None}]), TEXT),
    (chunk(choices=[choice(content="", role="assistant")]), NOTHING),
    (chunk(choices=[choice(tool_calls=[])]), NOTHING),
    (chunk(choices=[{"index": 0, "text": ""}]), NOTHING),
    (chunk(choices=[choice("stop")]), FINISH),
    (chunk(choices=[choice("length", content="a")]), FINISH),
    (chunk(choices=[choice(content="b"), choice("stop")]), FINISH),
    (chunk(choices=[], usage={"prompt_tokens": 3, "completion_tokens": 4}), USAGE),
    (chunk(choices=[choice(content="a")], usage={"prompt_tokens": 3}), TEXT),
    (chunk(choices=[]), NOTHING),
    (chunk(error={"message": "x"}), ERROR),
    (b"data: [DONE]\n\n", DONE),
    (b"data:[DONE]\r\n\r\n", DONE),
    (b": ping\n\n", NOTHING),
    (b'data: {"choices": [\n\n', BROKEN),
    (b"data: []\n\n", BROKEN),
    (b"data: nonsense\n\n", BROKEN),
    (b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n', BROKEN),
    (b'data: {"x": ' + b"[" * 5000 + b"]" * 5000 + b"}\n\n", BROKEN),
]


@pytest.mark.parametrize(("event", "kind"), KINDS)
def test_what_an_event_is(event: bytes, kind: int) -> None:
    assert read(event)[0] == kind


def test_whether_a_last_event_says_something() -> None:
    for said, event in (
        (True, chunk(choices=[choice("stop", content="a")])),
        (False, chunk(choices=[choice("stop", content="")])),
        (True, chunk(choices=[choice("stop"), choice(content="b")])),
    ):
        _, found = read(event)
        assert found is not None
        assert says_something(found) is said


@given(st.binary(max_size=60))
def test_reading_never_raises(data: bytes) -> None:
    kind, found = read(b"data: " + data + b"\n\n")
    assert 0 <= kind <= BROKEN
    assert kind not in (TEXT, FINISH, USAGE, ERROR) or found is not None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(
            ["choices", "delta", "content", "text", "finish_reason", "usage", "prompt_tokens",
             "error", "code", "logprobs", "metrics", "queue_time_ms"]
        ),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_reading_any_json_never_raises(document: object) -> None:
    kind, found = read(b"data: " + json.dumps(document).encode() + b"\n\n")
    if found is not None and found.usage is not None:
        assert 0 <= found.usage.cached_tokens <= bounded(found.usage.prompt_tokens)
    if kind == FINISH:
        assert found is not None
        says_something(found)


@pytest.mark.parametrize(
    ("said", "tokens"), [(None, 0), (-5, 0), (7, 7), (10**30, 1 << 40), (0, 0)]
)
def test_counts_are_bounded(said: int | None, tokens: int) -> None:
    assert bounded(said) == tokens


def test_cached_tokens_are_part_of_the_prompt() -> None:
    for prompt, cached, expected in ((10, 4, 4), (10, 40, 10), (-5, 3, 0), (10, -1, 0)):
        usage = {"prompt_tokens": prompt, "prompt_tokens_details": {"cached_tokens": cached}}
        _, found = read(chunk(choices=[], usage=usage))
        assert found is not None
        assert found.usage is not None
        assert found.usage.cached_tokens == expected
    _, found = read(chunk(choices=[], usage={"prompt_tokens": 3, "prompt_tokens_details": None}))
    assert found is not None
    assert found.usage is not None
    assert found.usage.cached_tokens == 0
