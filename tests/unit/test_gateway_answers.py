"""Kept answers: the same question of the same tenant finds one, and one that only looks alike
finds none, whatever a server of embeddings says."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import yaml

from controller.cli import make_settings, parse_embeddings
from controller.gateway.answers import (
    ANSWER_BYTES_MOST,
    EMBED_S_MOST,
    STREAMS_MOST,
    Answers,
    gathers,
    versions_of,
)
from controller.gateway.asking import Asked, read
from controller.gateway.gauges import families
from controller.gateway.questions import key_of, likeness_of
from controller.gateway.telling import worth_keeping
from controller.http import session
from controller.store.answers import KeptAnswers
from controller.upstream.embeddings import REST_S, Embeddings
from policy.decisions import Settled
from policy.files import FileError
from tests.embeddings_server import Served, embeddings_server
from tests.policy_support import parameters as made_parameters

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

V = ("v1",)
LOOKED = ("same", "alike", "none")
PAIRS = [
    pytest.param(pair["first"], pair["second"], pair["same"], id=f"{at}-{pair['kind']}")
    for at, pair in enumerate(
        yaml.safe_load((Path(__file__).parent / "question_pairs.yaml").read_text(encoding="utf-8"))
    )
]


def asked(text: Any = "Hi", tenant: str = "", endpoint: Any = "chat", **more: Any) -> Asked:
    chat = {"messages": [{"role": "user", "content": text}]}
    document = {"model": "m", **(chat if endpoint == "chat" else {"prompt": text}), **more}
    return read(endpoint, {}, json.dumps(document).encode(), b"k" * 32, (tenant, "", ""))


class Bench(NamedTuple):
    answers: Answers
    server: Served | None
    troubles: list[str]


@contextlib.asynccontextmanager
async def open_answers(folder: Path, embedded: bool = False, **how: Any) -> AsyncIterator[Bench]:
    troubles: list[str] = []
    async with contextlib.AsyncExitStack() as stack:
        store = KeptAnswers(
            folder / "answers.sqlite",
            **{"bytes_most": 1 << 24, "s_most": 3600.0, "on_trouble": troubles.append, **how},
        )
        stack.callback(store.close)
        server = embeddings = None
        if embedded:
            server = await stack.enter_async_context(embeddings_server())
            client = await stack.enter_async_context(session())
            embeddings = Embeddings(client, server.url, "", troubles.append)
        answers = Answers(store, embeddings)
        stack.push_async_callback(answers.close)
        yield Bench(answers, server, troubles)


def run(
    folder: Path, test: Callable[[Bench], Awaitable[None]], embedded: bool = False, **how: Any
) -> None:
    async def main() -> None:
        async with open_answers(folder, embedded, **how) as bench:
            await test(bench)

    asyncio.run(main())


# ---- the same question ----


def test_an_answer_is_found_again_with_its_age(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.answers.keep(asked(), b"answer", 700, "v1")
        kept = await bench.answers.find(asked(), V)
        assert kept is not None
        assert kept[0] == b"answer"
        assert kept[2:] == (700, "v1", 1.0)
        assert 0 <= kept.age_ns < 10**9
        bench.answers.keep(asked(), b"younger", -1, "v1")
        kept = await bench.answers.find(asked(), V)
        assert kept is not None
        assert kept.body == b"younger"

    run(tmp_path, test)


@pytest.mark.parametrize("embedded", [False, True])
@pytest.mark.parametrize(
    "other",
    [
        asked("Ho"), asked(tenant="shop"), asked(endpoint="completions"), asked(model="n"),
        asked(temperature=1), asked(tools=[{}]), asked(max_tokens=3), asked(response_format={}),
        asked(n=2), asked(other=1), asked("hi  there"), asked("HI"),
        asked(messages=[{"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi"}]),
        asked(messages=[{"role": "assistant", "content": "Hi"}]),
    ],
)  # fmt: skip
def test_another_question_finds_nothing(tmp_path: Path, other: Asked, embedded: bool) -> None:
    """Even where all vectors are one."""

    async def test(bench: Bench) -> None:
        if bench.server is not None:
            bench.server.same = True
        bench.answers.keep(asked(), b"answer", -1, "v1")
        await bench.answers.embedded()
        assert await bench.answers.find(other, V) is None
        assert await bench.answers.find(asked(), V) is not None

    run(tmp_path, test, embedded)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Hi", " Hi\n"), ("a b", "a  \t b"), ("a\r\nb", "a\r\nb\n"), ("caf\u00e9", "cafe\u0301"),
        ([{"type": "text", "text": "a b"}], [{"type": "text", "text": "a  b "}]),
    ],
)  # fmt: skip
def test_white_space_makes_no_other_question(tmp_path: Path, first: Any, second: Any) -> None:
    async def test(bench: Bench) -> None:
        bench.answers.keep(asked(first), b"answer", -1, "v1")
        assert await bench.answers.find(asked(second), V) is not None

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("first", "second"),
    [("5\u00b2", "52"), ('"a  b"', '"a b"'), ("f:\n  x\ny", "f:\n  x\n  y"), ("  x\ny", "x\ny")],
)
def test_white_space_and_forms_that_mean_something_do(
    tmp_path: Path, first: str, second: str
) -> None:
    async def test(bench: Bench) -> None:
        bench.answers.keep(asked(first), b"answer", -1, "v1")
        assert await bench.answers.find(asked(second), V) is None

    run(tmp_path, test)


def test_how_it_is_delivered_makes_no_other_question(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.answers.keep(asked(), b"answer", -1, "v1")
        same = asked(stream=True, stream_options={"include_usage": True}, user="ann", priority=3)
        assert await bench.answers.find(same, V) is not None

    run(tmp_path, test)


def test_the_order_of_fields_makes_no_other_question(tmp_path: Path) -> None:
    body = b'{"messages": [{"content": "Hi", "role": "user"}], "model": "m", "a": {"b": 1, "c": 2}}'
    swapped = (
        b'{"a": {"c": 2, "b": 1}, "model": "m", "messages": [{"role": "user", "content": "Hi"}]}'
    )

    async def test(bench: Bench) -> None:
        bench.answers.keep(read("chat", {}, body, b""), b"answer", -1, "v1")
        assert await bench.answers.find(read("chat", {}, swapped, b""), V) is not None

    run(tmp_path, test)


def test_only_the_versions_that_are_served_now_will_do(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.answers.keep(asked(), b"old", -1, "v1")
        bench.answers.keep(asked(), b"new", -1, "v2")
        for versions, body in ((("v1",), b"old"), (("v2",), b"new"), (("v1", "v2"), b"new")):
            kept = await bench.answers.find(asked(), versions)
            assert kept is not None
            assert kept.body == body
        assert await bench.answers.find(asked(), ("v3",)) is None
        assert await bench.answers.find(asked(), ()) is None

    run(tmp_path, test)


def test_what_is_not_kept(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.answers.keep(asked(), b"x" * (ANSWER_BYTES_MOST + 1), -1, "v1")
        assert await bench.answers.find(asked(), V) is None
        vectors = asked(endpoint="embeddings", input="Hi")
        bench.answers.keep(vectors, b"answer", -1, "v1")
        assert await bench.answers.find(vectors, V) is None

    run(tmp_path, test)


@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[{"delta":'
         b'{"content":"b"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n', "ab"),
        (b': waiting\n\ndata: {"choices":[{"delta":{"content":"a"}}]}\n\n', "a"),
        (b'data: {"choices":[{"delta":{"reasoning":"a"},"finish_reason":"stop"}]}\n\n', None),
        (b'data: {"choices":[{"delta":{"con\n\n', None), (b"data: [DONE]\n\n", None),
    ],
)  # fmt: skip
def test_a_stream_is_given_in_one_piece_or_not_at_all(
    tmp_path: Path, stream: bytes, said: str | None
) -> None:
    async def test(bench: Bench) -> None:
        bench.answers.keep(asked(), stream, -1, "v1")
        kept = await bench.answers.find(asked(), V)
        if said is None:
            assert kept is None
        else:
            assert kept is not None
            assert json.loads(kept.body)["choices"][0]["message"]["content"] == said

    run(tmp_path, test)


def test_numbers_of_any_size_are_part_of_a_question(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.answers.keep(asked(big=10**40), b"answer", -1, "v1")
        assert await bench.answers.find(asked(big=10**40), V) is not None
        assert await bench.answers.find(asked(big=10**40 + 1), V) is None

    run(tmp_path, test)


# ---- one that says the same ----


@pytest.mark.parametrize(("first", "second", "same"), PAIRS)
def test_equal_words_are_never_those_of_another_question(
    first: str, second: str, same: bool
) -> None:
    """By the words alone, as if all vectors were one."""
    one, other = asked(first), asked(second)
    if not same:
        assert key_of(one) != key_of(other)
        ours, theirs = likeness_of(one), likeness_of(other)
        assert ours is None or theirs is None or ours.alike != theirs.alike


def test_the_pairs_are_many_and_of_both_languages() -> None:
    chinese = sum("\u4e00" <= param.values[0][0] <= "\u9fff" for param in PAIRS)
    assert len(PAIRS) >= 120
    assert chinese >= 30
    assert sum(param.values[2] for param in PAIRS) >= 40


def test_who_says_the_same_finds_the_answer(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        assert bench.server is not None
        bench.server.same = True
        bench.answers.keep(asked("How do I enable 3FA?"), b"so", 900, "v1")
        bench.answers.keep(asked("How do I disable 3FA?"), b"not so", 900, "v1")
        await bench.answers.embedded()
        kept = await bench.answers.find(asked("Hi, how can I enable 3FA", stream=True), V)
        assert kept is not None
        assert (kept.body, kept.similarity) == (b"so", pytest.approx(1.0))
        for other in (
            asked("Hi, how can I enable 3FA", tenant="shop"), asked("how can I enable 3FA", n=2),
            asked("how can I enable 3FA", model="n"),
        ):  # fmt: skip
            assert await bench.answers.find(other, V) is None
        assert await bench.answers.find(asked("how can I enable 3FA"), ("v2",)) is None
        assert await bench.answers.find(asked("How do I enable 3FA?"), V) is not None
        samples = [each for one in families(bench.answers) for each in one.samples]
        found = {(each.name, *each.labels.values()): each.value for each in samples}
        assert found["twinkeel_kept_answers",] == 2
        assert found["twinkeel_kept_answers_bytes",] > 2 * 384 * 4
        assert found["twinkeel_kept_answers_left_out_total",] == 0
        looked = [found["twinkeel_kept_answers_look_ups_total", each] for each in LOOKED]
        assert looked == [1, 1, 4]
        assert found["twinkeel_embeddings_calls_total",] == 2
        assert found["twinkeel_embeddings_failures_total",] == 0

    run(tmp_path, test, embedded=True)


def test_a_vector_that_is_far_finds_nothing(tmp_path: Path) -> None:
    """Equal words, and a server that finds them different."""

    async def test(bench: Bench) -> None:
        server = bench.server
        assert server is not None
        server.body = {"data": [{"embedding": [1.0, 0.0]}]}
        bench.answers.keep(asked("How do I enable 2FA?"), b"so", 900, "v1")
        await bench.answers.embedded()
        other = asked("How can I enable 2FA?")
        for near, found in ((0.89, False), (0.91, True), (-1.0, False)):
            server.body = {"data": [{"embedding": [near, (1 - near * near) ** 0.5]}]}
            kept = await bench.answers.find(other, V)
            assert (kept is not None) == found
            if kept is not None:
                assert kept.similarity == pytest.approx(near)
        server.body = {"data": [{"embedding": [1.0, 0.0, 0.0]}]}  # another model by the same name
        assert await bench.answers.find(other, V) is None

    run(tmp_path, test, embedded=True)


def test_it_is_asked_only_where_a_vector_can_decide(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        server = bench.server
        assert server is not None
        for _ in range(3):
            bench.answers.keep(asked("How do I enable 2FA?"), b"so", 900, "v1")
            await bench.answers.embedded()
        assert server.texts == ["How do I enable 2FA?"]  # its vector stays
        assert await bench.answers.find(asked("How do I enable 2FA?"), V) is not None
        assert await bench.answers.find(asked("How do I disable 2FA?"), V) is None
        assert len(server.texts) == 1
        bench.answers.keep(asked('Say "a"'), b"so", 900, "v1")
        bench.answers.keep(asked("Several\nlines"), b"so", 900, "v1")
        await bench.answers.embedded()
        assert len(server.texts) == 1

    run(tmp_path, test, embedded=True)


@pytest.mark.parametrize(
    "how",
    [
        {"status": 500}, {"delay_s": 10 * EMBED_S_MOST}, {"body": {"data": []}}, {"body": [1]},
        {"body": {"data": [{"embedding": []}]}}, {"body": {"data": [{"embedding": [0, 0]}]}},
        {"body": {"data": [{"embedding": ["x"]}]}},
        {"body": {"data": [{"embedding": [1e308, 1e308]}]}},
    ],
)  # fmt: skip
def test_where_it_fails_only_the_same_question_finds_an_answer(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    async def test(bench: Bench) -> None:
        server = bench.server
        assert server is not None
        bench.answers.keep(asked("How do I enable 2FA?"), b"so", 900, "v1")
        await bench.answers.embedded()
        for name, value in how.items():
            setattr(server, name, value)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await bench.answers.find(asked("How can I enable 2FA?"), V) is None
        assert loop.time() - began_s < EMBED_S_MOST + 0.2
        assert await bench.answers.find(asked("How do I enable 2FA?"), V) is not None
        assert len(bench.troubles) == 1
        assert "only the very same questions" in bench.troubles[0]
        calls = len(server.texts)
        assert await bench.answers.find(asked("How can I enable 2FA?"), V) is None
        assert len(server.texts) == calls, f"it is left alone for {REST_S} s"

    run(tmp_path, test, embedded=True)


def test_a_caller_with_little_time_says_nothing_of_the_server(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        server = bench.server
        assert server is not None
        server.same = True
        bench.answers.keep(asked("How do I enable 2FA?"), b"so", 900, "v1")
        await bench.answers.embedded()
        server.delay_s = 0.1
        other = asked("How can I enable 2FA?")
        assert await bench.answers.find(other, V, 0.05) is None
        assert await bench.answers.find(other, V) is not None
        assert not bench.troubles

    run(tmp_path, test, embedded=True)


def test_vectors_of_another_model_are_not_compared(tmp_path: Path) -> None:
    async def main() -> None:
        async with open_answers(tmp_path, embedded=True) as bench:
            assert bench.server is not None
            bench.server.same = True
            bench.answers.keep(asked("How do I enable 2FA?"), b"so", 900, "v1")
            await bench.answers.embedded()
            async with session() as client:
                other = Embeddings(client, bench.server.url, "other")
                again = Answers(bench.answers.store, other)
                assert await again.find(asked("How can I enable 2FA?"), V) is None
        async with open_answers(tmp_path, embedded=True) as bench:  # it learns the model's name
            assert bench.server is not None
            bench.server.same = True
            assert await bench.answers.find(asked("How can I enable 2FA?"), V) is not None

    asyncio.run(main())


@pytest.mark.parametrize(
    ("text", "url", "model"),
    [("http://e:1", "http://e:1", ""), ("http://e:1,model=bge,m3", "http://e:1", "bge,m3")],
)
def test_the_server_of_embeddings_is_an_option(text: str, url: str, model: str) -> None:
    options = {"upstreams": ["http://a:1"], **parse_embeddings(text)}
    settings = make_settings(None, options)
    assert (settings.embeddings, settings.embeddings_model) == (url, model)


@pytest.mark.parametrize("text", ["http://e:1,bge", "http://e:1,name=bge", "http://e:1,model=",
                                  "e:1", "http://e:1/v1"])  # fmt: skip
def test_one_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(FileError):
        make_settings(None, {"upstreams": ["http://a:1"], **parse_embeddings(text)})


# ---- what is kept, and of which versions ----


@pytest.mark.parametrize(
    ("settled", "kept"),
    [
        (Settled(1, "answered"), True),
        (Settled(1, "answered", confidence_permille=650), True),
        (Settled(1, "answered", confidence_permille=649), False),
        (Settled(1, "answered", confidence_permille=400, verification="match"), True),
        (Settled(1, "answered", confidence_permille=400, verification="skipped_budget"), False),
        (Settled(1, "answered", why="checkpoint"), False),
        (Settled(1, "degraded", why="cached"), False),
        (Settled(1, "degraded", why="model light"), False),
        (Settled(1, "degraded", why="low_confidence", confidence_permille=200), False),
        (Settled(1, "failed", why="timeout"), False),
    ],
)
def test_only_good_answers_are_kept(settled: Settled, kept: bool) -> None:
    assert worth_keeping(made_parameters(), settled) == kept


def test_without_the_action_nothing_is() -> None:
    none = {"actions": ["template"]}
    parameters = made_parameters(breakers=none, confidence=none)
    assert not worth_keeping(parameters, Settled(1, "answered"))
    assert not gathers(asked(), parameters, 1)
    assert not gathers(asked(), made_parameters(discipline="fifo"), 1)


def test_only_streams_of_one_plain_choice_are_gathered_and_not_too_many_at_once() -> None:
    parameters = made_parameters()
    assert gathers(asked(), parameters, STREAMS_MOST)
    assert not gathers(asked(), parameters, STREAMS_MOST + 1)
    for more in ({"n": 2}, {"logprobs": True}, {"logprobs": 0}, {"prompt": ["a", "b"]}):
        assert not gathers(asked(**more), parameters, 1)
    assert gathers(asked(n=1, logprobs=False), parameters, 1)


class _Spec(NamedTuple):
    version: str
    models: tuple[str, ...]


class _Replica(NamedTuple):
    up: bool
    spec: _Spec | None


def test_the_versions_are_those_of_servers_that_are_up() -> None:
    one, two = _Spec("v1", ("m",)), _Spec("v2", ("m", "n"))

    def of(model: str, *replicas: _Replica) -> tuple[str, ...]:
        return versions_of(replicas, model)  # type: ignore[arg-type]

    assert of("m", _Replica(True, one), _Replica(True, two)) == ("v1", "v2")
    assert of("m", _Replica(False, one), _Replica(True, two)) == ("v2",)
    assert of("m", _Replica(False, one), _Replica(False, two)) == ("v1", "v2")
    assert of("n", _Replica(True, one), _Replica(False, two)) == ("v2",)
    assert of("o", _Replica(True, one)) == ()
    assert of("o", _Replica(True, _Spec("v3", ()))) == ("v3",)
    assert of("m", _Replica(True, None)) == ()
