"""What is sent to a server: the caller's document, and what was added to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.call import AS_ASKED, AS_IT_CAME, NOTHING
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
    candidates=st.sampled_from([0, 2, 20]),
)
SCORED = Dispatch(0, 0, "turbo", candidates=20)
CONFIDENT = Features(usage=False, confidence=True)


@given(requests(), FEATURES, DISPATCHES)
def test_the_document_with_additions_is_sent(
    asked: Asked, features: Features, dispatch: Dispatch | None
) -> None:
    wanted = outgoing.logprobs(asked, features, dispatch)
    sent = outgoing.body(asked, features, dispatch, wanted)
    expected = dict(asked.document)
    if asked.stream and features.usage and not asked.wants_usage:
        options = expected.get("stream_options")
        options = dict(options) if isinstance(options, dict) else {}
        expected["stream_options"] = options | {"include_usage": True}
    expected |= wanted.added
    if dispatch is not None and dispatch.model:
        expected["model"] = dispatch.model
    if dispatch is not None and (dispatch.priority or "priority" in expected):
        expected["priority"] = dispatch.priority
    assert json.loads(sent) == expected
    if expected == asked.document:
        assert json.loads(asked.body) == json.loads(sent)


@given(requests(), FEATURES, DISPATCHES)
def test_logprobs_are_asked_for_only_where_a_score_is_wanted(
    asked: Asked, features: Features, dispatch: Dispatch | None
) -> None:
    wanted = outgoing.logprobs(asked, features, dispatch)
    candidates = 0 if dispatch is None else dispatch.candidates
    if not features.confidence or not candidates or asked.endpoint == "embeddings":
        assert wanted == AS_ASKED
    elif wanted.scored:
        assert wanted.candidates >= candidates
        sent = {**asked.document, **wanted.added}
        name = "top_logprobs" if asked.endpoint == "chat" else "logprobs"
        assert sent[name] == wanted.candidates
    else:
        assert not wanted.added


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


CHAT, TEXT = "chat", "completions"


@pytest.mark.parametrize(
    ("endpoint", "document", "sent", "shown"),
    [
        (CHAT, {}, (True, 20), NOTHING),
        (CHAT, {"logprobs": None, "top_logprobs": None}, (True, 20), NOTHING),
        (CHAT, {"logprobs": False, "top_logprobs": 0}, (True, 20), NOTHING),
        (CHAT, {"logprobs": True}, (True, 20), 0),
        (CHAT, {"logprobs": True, "top_logprobs": 3}, (True, 20), 3),
        (CHAT, {"logprobs": True, "top_logprobs": 20}, (True, 20), AS_IT_CAME),
        (CHAT, {"logprobs": True, "top_logprobs": 25}, (True, 25), AS_IT_CAME),
        (TEXT, {}, (20, None), NOTHING),
        (TEXT, {"logprobs": 0}, (20, None), 0),
        (TEXT, {"logprobs": 5}, (20, None), 5),
        (TEXT, {"logprobs": 20}, (20, None), AS_IT_CAME),
    ],
)
def test_a_caller_gets_the_logprobs_that_it_asked_for(
    endpoint: str, document: dict[str, Any], sent: tuple[Any, Any], shown: int
) -> None:
    asked = ask(json.dumps({"messages": [{"content": "a"}], "prompt": "a", **document}).encode(),
                endpoint)  # fmt: skip
    wanted = outgoing.logprobs(asked, CONFIDENT, SCORED)
    body = json.loads(outgoing.body(asked, CONFIDENT, SCORED, wanted))
    assert (body.get("logprobs"), body.get("top_logprobs")) == sent
    assert (wanted.shown, wanted.scored) == (shown, True)
    second = json.loads(outgoing.plain_body(asked, wanted))
    assert (second.get("logprobs"), second.get("top_logprobs")) == sent


@pytest.mark.parametrize(
    ("endpoint", "document"),
    [
        (CHAT, {"logprobs": "yes"}),
        (CHAT, {"logprobs": 0}),  # nor is it false
        (CHAT, {"logprobs": True, "top_logprobs": -1}),
        (CHAT, {"top_logprobs": 3}),  # the server says what is wrong with it
        (CHAT, {"logprobs": True, "logprob_token_ids": [3]}),
        (TEXT, {"logprobs": -1}),
        (TEXT, {"logprobs": True}),
        (TEXT, {"echo": True}),  # the prompt's logprobs would come, too
        (TEXT, {"use_beam_search": True}),
    ],
)
def test_what_has_no_measure_is_sent_as_it_came(endpoint: str, document: dict[str, Any]) -> None:
    asked = ask(json.dumps({"messages": [{"content": "a"}], "prompt": "a", **document}).encode(),
                endpoint)  # fmt: skip
    wanted = outgoing.logprobs(asked, CONFIDENT, SCORED)
    assert wanted == AS_ASKED
    assert outgoing.body(asked, CONFIDENT, SCORED, wanted) is asked.body


@pytest.mark.parametrize(
    ("temperature", "greedy"),
    [(0, True), (0.0, True), (0.1, False), (None, False), ("0", False), (False, False)],
)
def test_who_wants_the_likeliest_tokens(temperature: object, greedy: bool) -> None:
    body = json.dumps({"messages": [{"content": "a"}], "temperature": temperature}).encode()
    assert outgoing.greedy(ask(body)) is greedy
    assert not outgoing.greedy(ask(b'{"messages":[{"content":"a"}]}'))


def test_a_second_run_is_plain() -> None:
    body = json.dumps(
        {
            "messages": [{"content": "a"}],
            "stream": True,
            "stream_options": {},
            "priority": 1,
            "seed": 5,
        }
    ).encode()
    sent = json.loads(outgoing.plain_body(ask(body)))
    assert sent == {"messages": [{"content": "a"}], "seed": 5}
    plain = b'{"messages" : [{"content":"a"}]}'
    assert outgoing.plain_body(ask(plain)) == plain


def test_counts_that_its_caller_does_not_get_do_not_come() -> None:
    options = {"include_usage": False, "continuous_usage_stats": True}
    body = {"messages": [{"content": "a"}], "stream": True, "stream_options": options}
    sent = json.loads(outgoing.body(ask(json.dumps(body).encode()), Features(), None))
    assert sent["stream_options"] == {"include_usage": True, "continuous_usage_stats": False}
