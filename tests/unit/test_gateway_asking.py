"""What is read of a caller's request, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.gateway.asking import (
    DEADLINE_MS_MOST,
    NAME_MOST,
    PREFIX_BLOCK_BYTES,
    PREFIX_BLOCKS_MOST,
    Asked,
    BadRequest,
    fingerprints,
    prompt_text,
    read,
    sendable,
)
from policy.events import Arrived

SECRET = b"k" * 32
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "text", "tool_calls", "include_usage"]), inner,
        max_size=3,
    ),
    max_leaves=8,
)  # fmt: skip
DOCUMENTS = st.dictionaries(
    st.sampled_from(
        ["model", "messages", "prompt", "input", "stream", "stream_options", "user", "max_tokens",
         "max_completion_tokens", "tools", "other"]
    ),
    JSON | st.lists(st.fixed_dictionaries({"content": JSON}), min_size=1, max_size=2),
)  # fmt: skip
NAMES = [
    f"x-twinkeel-{name}"
    for name in ("sla", "line", "user", "session", "chain", "step", "resume", "deadline-ms")
]
HEADERS = st.dictionaries(
    st.sampled_from([*NAMES, "traceparent"]),
    st.binary(max_size=12).map(lambda value: value.decode("utf-8", "surrogateescape"))
    | st.sampled_from(["P0", "P3", "100", "-1", "x" * 300]),
)


def ask(
    document: object, endpoint: Any = "chat", tenant: Any = ("", "", ""), **headers: str
) -> Asked:
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    named = {f"x-twinkeel-{name.replace('_', '-')}": value for name, value in headers.items()}
    return read(endpoint, named, body, SECRET, tenant)


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **more}


def check(endpoint: Any, headers: dict[str, str], body: bytes) -> None:
    """It is read, and can be logged; or refused, and its caller told."""
    try:
        asked = read(endpoint, headers, body, SECRET)
    except BadRequest as refused:
        bad = refused
    else:
        check_read(asked, body)
        return
    assert 400 <= bad.status < 500
    str(bad).encode()


def check_read(asked: Asked, body: bytes) -> None:
    assert asked.body == body
    prompt_text(asked)
    arrived = Arrived(
        0, asked.model, asked.endpoint, asked.prompt_bytes, asked.max_tokens, asked.sla,
        asked.line, asked.user, asked.session, asked.deadline_ns, asked.messages, asked.stream,
        asked.prefix, asked.prefix_block_bytes, asked.chain, asked.step, asked.resume,
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(arrived), type=Arrived) == arrived
    assert asked.traceparent.isascii()


@given(st.sampled_from(["chat", "completions", "embeddings"]), HEADERS, DOCUMENTS)
def test_any_document_is_read_or_refused(
    endpoint: Any, headers: dict[str, str], document: dict[str, Any]
) -> None:
    check(endpoint, headers, json.dumps(document).encode())


@given(st.sampled_from(["chat", "completions", "embeddings"]), JSON)
def test_any_json_is_read_or_refused(endpoint: Any, document: object) -> None:
    check(endpoint, {}, json.dumps(document).encode())


@given(st.binary(max_size=60), HEADERS)
def test_any_bytes_are_read_or_refused(body: bytes, headers: dict[str, str]) -> None:
    check("chat", headers, body)
    check("completions", headers, b'{"prompt": "' + body + b'"}')


@pytest.mark.parametrize("depth", [*range(480, 500, 3), *range(960, 1010), 100_000])
def test_deep_json_is_read_or_refused(depth: int) -> None:
    nested = b"[" * depth + b"]" * depth
    check("chat", {}, b'{"messages": [{"content": "a", "tool_calls": ' + nested + b"}]}")
    check("chat", {}, b'{"messages": [{"content": "a"}], "tools": ' + nested + b"}")


def test_numbers_of_any_size_are_read() -> None:
    asked = ask(b'{"model":"m","messages":[{"content":"a"}],"tools":[%s]}' % (b"9" * 40))
    assert asked.document["tools"] == [10**40 - 1]
    check("chat", {}, b'{"messages":[{"content":"a"}],"seed":1e999}')


@pytest.mark.parametrize(
    ("document", "param"),
    [
        (b"", ""),
        (b"{", ""),
        (b"[]", ""),
        (b'"\xff"', ""),
        ({"model": 3}, "model"),
        (chat(model=None), "model"),
        (chat(model="a\nb"), "model"),
        (chat(messages=None), "messages"),
        (chat(messages=[]), "messages"),
        (chat(messages="Hi"), "messages"),
        (chat(messages=["Hi"]), "messages"),
        (chat(stream=1), "stream"),
        (chat(stream="true"), "stream"),
    ],
)
def test_what_is_refused(document: object, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ask(document)
    assert (caught.value.param, caught.value.status) == (param, 400)


@pytest.mark.parametrize("prompt", [None, 3, {}, [], [None], [{}]])
def test_what_is_no_prompt(prompt: object) -> None:
    for endpoint, name in (("completions", "prompt"), ("embeddings", "input")):
        with pytest.raises(BadRequest) as caught:
            ask({"model": "m", name: prompt}, endpoint)
        assert caught.value.param == name


def test_no_text_is_told() -> None:
    for document in (
        {"model": ["secret"], "messages": []},
        chat(messages=[["secret"]]),
        chat(stream="secret"),
    ):
        with pytest.raises(BadRequest) as caught:
            ask(document)
        assert "secret" not in str(caught.value)


def test_sizes() -> None:
    assert ask(chat()).prompt_bytes == 2
    two = [{"content": "a\N{EURO SIGN}"}, {"content": [{"text": "bc"}, {"image_url": {}}, "x"]}]
    asked = ask(chat(messages=two))
    assert (asked.prompt_bytes, asked.messages) == (6, 2)
    assert ask({"model": "m", "prompt": ["ab", "c"]}, "completions").prompt_bytes == 3
    assert ask({"model": "m", "prompt": [[1, 2, 3], [4]]}, "completions").prompt_bytes == 16
    assert ask({"model": "m", "prompt": [1, 2]}, "completions").prompt_bytes == 8
    assert ask({"model": "m", "input": "abc"}, "embeddings").prompt_bytes == 3
    with_tools = ask(chat(tools=[{"type": "function"}]))
    assert with_tools.prompt_bytes > 2
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert ask(chat(messages=[call])).prompt_bytes == len(b'[{"id":"1"}]')


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ({"max_tokens": None}, 0),
        ({"max_tokens": -1}, 0),
        ({"max_tokens": True}, 0),
        ({"max_tokens": 2.0}, 0),
        ({"max_tokens": 10**30}, 0),
        ({"max_completion_tokens": "9", "max_tokens": 5}, 5),
        ({}, 0),
    ],
)
def test_max_tokens(given: dict[str, Any], tokens: int) -> None:
    assert ask(chat(**given)).max_tokens == tokens


def test_streams() -> None:
    assert ask(chat(stream=True)).stream
    assert not ask(chat(stream=False)).stream
    assert not ask(chat(stream=None)).stream
    assert not ask(chat()).stream
    assert not ask({"model": "m", "input": "a", "stream": True}, "embeddings").stream
    assert ask(chat(stream_options={"include_usage": True})).wants_usage
    for options in (None, [], {"include_usage": 1}, {"include_usage": False}):
        assert not ask(chat(stream_options=options)).wants_usage


def test_names_come_from_headers() -> None:
    asked = ask(
        chat(user="body"), sla="P0", line="shop", user="\N{LATIN SMALL LETTER U WITH DIAERESIS}",
        session="s", chain="c", step="t", resume="r", deadline_ms="1500",
    )  # fmt: skip
    assert (asked.sla, asked.line, asked.session) == ("P0", "shop", "s")
    assert asked.user == "\N{LATIN SMALL LETTER U WITH DIAERESIS}"
    assert (asked.chain, asked.step, asked.resume) == ("c", "t", "r")
    assert asked.deadline_ns == 1_500_000_000


def test_the_user_of_the_body_is_taken_where_no_header_names_one() -> None:
    assert ask(chat(user="ann")).user == "ann"
    assert ask(chat(user="x" * 999)).user == "x" * NAME_MOST
    assert ask(chat(user=7)).user == ""
    assert ask(chat(user="Jean\N{NO-BREAK SPACE}Luc")).user == "Jean\N{NO-BREAK SPACE}Luc"


def test_a_tenants_users_are_its_own() -> None:
    tenant = ("shop", "P1", "sales")
    asked = ask(chat(user="ann"), tenant=tenant)
    assert (asked.user, asked.tenant, asked.sla, asked.line) == ("shop/ann", "shop", "P1", "sales")
    assert ask(chat(), tenant=tenant).user == "shop"
    asked = ask(chat(), tenant=tenant, sla="P2", line="other")
    assert (asked.sla, asked.line) == ("P2", "other")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "x" * (NAME_MOST + 1)) for name in ("user", "line", "session", "chain", "step")),
        *((name, "\udcff") for name in ("user", "line", "session", "chain", "step", "resume")),
        ("user", "a\x00b"),
        ("sla", "p0"),
        ("sla", "\udcff"),
        *(("deadline_ms", value) for value in ("1.5", "-1", "x", "1" * 10, "\N{SUPERSCRIPT TWO}")),
    ],
)
def test_headers_that_are_refused(name: str, value: str) -> None:
    with pytest.raises(BadRequest) as caught:
        ask(chat(), **{name: value})
    assert caught.value.param == f"x-twinkeel-{name.replace('_', '-')}"
    str(caught.value).encode()


def test_deadlines_have_a_bound() -> None:
    assert ask(chat(), deadline_ms="999999999").deadline_ns == DEADLINE_MS_MOST * 1_000_000
    assert ask(chat(), deadline_ms="0").deadline_ns == 0
    assert ask(chat(), deadline_ms="").deadline_ns == 0


def test_a_trace_context_that_cannot_be_sent_is_dropped() -> None:
    body = json.dumps(chat()).encode()
    for value, kept in (("00-1-2-01", "00-1-2-01"), ("\udcff", ""), ("a\tb", ""), ("", "")):
        assert read("chat", {"traceparent": value}, body, SECRET).traceparent == kept
    assert sendable(None) == ""
    assert sendable("Bearer abc") == "Bearer abc"


# ---- fingerprints ----


def test_equal_beginnings_have_equal_fingerprints() -> None:
    one = ask(chat(messages=[{"content": "a" * 2000}, {"content": "b"}]))
    two = ask(chat(messages=[{"content": "a" * 2000}, {"content": "c" * 3000}]))
    other = ask(chat(messages=[{"content": "x" + "a" * 1999}]))
    blocks = 2000 // PREFIX_BLOCK_BYTES
    assert len(one.prefix) == blocks
    assert two.prefix[:blocks] == one.prefix
    assert len(two.prefix) == 5001 // PREFIX_BLOCK_BYTES
    assert not set(other.prefix) & set(one.prefix)
    assert one.prefix_block_bytes == PREFIX_BLOCK_BYTES
    assert ask(chat()).prefix == ()
    assert ask(chat()).prefix_block_bytes == 0


def test_fingerprints_tell_nothing_without_the_secret_and_fit_a_trace() -> None:
    text = b"a" * PREFIX_BLOCK_BYTES * (PREFIX_BLOCKS_MOST + 9)
    prints = fingerprints([text], SECRET)
    assert len(prints) == len(set(prints)) == PREFIX_BLOCKS_MOST
    assert not set(prints) & set(fingerprints([text], b"j" * 32))
    assert all(0 <= each < 1 << 63 for each in prints)


@given(st.lists(st.binary(max_size=900), max_size=6))
def test_a_longer_prompt_keeps_its_fingerprints(texts: list[bytes]) -> None:
    prints = fingerprints(texts, SECRET)
    assert fingerprints([*texts, b"more"], SECRET)[: len(prints)] == prints


def test_the_texts_of_a_prompt() -> None:
    two = [{"content": "a"}, {"content": [{"text": "b"}]}]
    assert prompt_text(ask(chat(messages=two))) == "a\nb"
    assert prompt_text(ask({"model": "m", "prompt": ["a", "b"]}, "completions")) == "a\nb"
    assert prompt_text(ask({"model": "m", "input": "a"}, "embeddings")) == "a"
