"""What is sent to a server: the caller's document, and what was added to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.config import Features
from controller.gateway.asking import Asked, read
from controller.upstream import outgoing
from policy.decisions import Dispatch

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = st.sampled_from(["logprobs", "top_logprobs", "priority", "stream_options", "seed", "x"])
OFF = Features(usage=False, extras=False)


@st.composite
def requests(draw: st.DrawFn) -> Asked:
    endpoint: Any = draw(st.sampled_from(["chat", "completions", "embeddings"]))
    document = draw(st.dictionaries(NAMES, JSON, max_size=4))
    document |= {"messages": [{"content": "Hi"}], "prompt": "Hi", "input": "Hi", "model": "m"}
    if draw(st.booleans()):
        document["stream"] = draw(st.booleans())
    names = draw(st.permutations(list(document)))
    indent = draw(st.sampled_from([None, 1]))
    space = draw(st.sampled_from([b"", b" \n"]))
    body = json.dumps({name: document[name] for name in names}, indent=indent).encode()
    return read(endpoint, {}, space + body + space, b"k" * 32)


FEATURES = st.builds(Features, usage=st.booleans(), confidence=st.booleans())
DISPATCHES = st.none() | st.builds(
    Dispatch,
    request=st.just(0),
    replica=st.just(0),
    tier=st.just("turbo"),
    priority=st.integers(0, 5),
    model=st.sampled_from(["", "lighter"]),
)


@given(requests(), FEATURES, DISPATCHES)
def test_the_document_with_additions_is_sent(
    asked: Asked, features: Features, dispatch: Dispatch | None
) -> None:
    sent = outgoing.body(asked, features, dispatch)
    expected = dict(asked.document)
    if asked.stream and features.usage and not asked.wants_usage:
        options = expected.get("stream_options")
        options = dict(options) if isinstance(options, dict) else {}
        expected["stream_options"] = options | {"include_usage": True}
    if features.confidence and asked.endpoint == "chat":
        own = expected.get("logprobs") is True and expected.get("top_logprobs")
        if not own:
            expected |= {"logprobs": True, "top_logprobs": features.logprobs}
    if (
        features.confidence
        and asked.endpoint == "completions"
        and (expected.get("logprobs") is None or expected["logprobs"] is False)
    ):
        expected["logprobs"] = features.logprobs
    if dispatch is not None and dispatch.model:
        expected["model"] = dispatch.model
    if dispatch is not None and (dispatch.priority or "priority" in expected):
        expected["priority"] = dispatch.priority
    assert json.loads(sent) == expected
    if expected == asked.document:
        assert json.loads(asked.body) == json.loads(sent)


@given(requests())
def test_with_nothing_added_the_bytes_are_the_callers(asked: Asked) -> None:
    assert outgoing.body(asked, OFF, None) is asked.body


def ask(body: bytes, endpoint: Any = "chat") -> Asked:
    return read(endpoint, {}, body, b"k" * 32)


def test_what_is_only_added_leaves_the_rest_as_it_was() -> None:
    text = b' {"messages" : [{"content":"\\u00e9"}] ,"x":1.50e3, "stream": true}\n'
    sent = outgoing.body(ask(text), Features(), None)
    assert sent.endswith(text.lstrip()[1:])
    assert json.loads(sent)["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("text", [b'{"input":"a"}', b'{ "input" : "a" }', b' {\n"input":"a"}'])
def test_the_comma_is_right(text: bytes) -> None:
    sent = outgoing.body(ask(text, "embeddings"), OFF, Dispatch(0, 0, "turbo", 3))
    assert json.loads(sent) == {"priority": 3, "input": "a"}


def test_numbers_of_any_size_survive_an_edit() -> None:
    text = b'{"messages":[{"content":"a"}],"stream":true,"stream_options":{},"x":%s}' % (b"9" * 40)
    assert json.loads(outgoing.body(ask(text), Features(), None))["x"] == 10**40 - 1


@pytest.mark.parametrize(
    ("given", "wants"),
    [(True, True), (5, True), (0, True), (False, False), (None, False)],
)
def test_who_wants_logprobs(given: object, wants: bool) -> None:
    body = json.dumps({"messages": [{"content": "a"}], "logprobs": given}).encode()
    assert outgoing.wants_logprobs(ask(body)) is wants
    assert not outgoing.wants_logprobs(ask(b'{"messages":[{"content":"a"}]}'))


def test_a_second_run_is_plain() -> None:
    body = json.dumps(
        {
            "messages": [{"content": "a"}],
            "stream": True,
            "stream_options": {},
            "priority": 1,
            "n": 1,
        }
    ).encode()
    sent = json.loads(outgoing.plain_body(ask(body)))
    assert sent == {"messages": [{"content": "a"}], "n": 1}
    plain = b'{"messages" : [{"content":"a"}]}'
    assert outgoing.plain_body(ask(plain)) == plain
