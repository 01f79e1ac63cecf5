"""What a caller gets whose model is cut off: an answer that was kept, or a template, and how each
says what it is. In a process of its own the kept one is there again after a restart."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import uvloop

from controller.gateway.answers import LOOK_S_MOST
from controller.gateway.asking import read
from tests.controller.asking import ask, session
from tests.controller.asking import chat as twin_chat
from tests.controller.processes import MODEL, eventually
from tests.core_support import (
    CHAT,
    COMPLETIONS,
    DONE,
    USAGE,
    Got,
    Server,
    chat,
    completion,
    core,
    post,
    whole,
)
from tests.embeddings_server import embeddings_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.controller.asking import Answer
    from tests.controller.processes import Controllers, Twin
    from tests.core_support import Core, Line, Question

RULE = {
    "name": "any", "kinds": ["http_5xx"], "consecutive_least": 1, "consecutive_ms": 0,
    "open_ms": 30_000,
}  # fmt: skip


def cut_off(*actions: str) -> dict[str, Any]:
    """One failure opens the model's breaker, for the rest of the test."""
    return {
        "breakers": {"rules": [RULE], "actions": list(actions)}, "retries": {"tries_most": 1},
        "health": {"enabled": False}, "limits": {"enabled": False},
    }  # fmt: skip


def answering(*texts: str) -> Server:
    """Each once, as the answers to what comes; then only failures."""
    left = list(texts)

    async def script(question: Question, line: Line) -> None:
        if left:
            await line.whole(whole(left.pop(0)))
        else:
            await line.whole({"error": {"message": "boom"}}, 500)

    return Server(script)


def says(text: str, **more: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": text}], **more)


async def break_down(running: Core) -> None:
    assert (await post(running.url, says("what breaks it"))).status == 502


def run(
    test: Callable[[Core], Awaitable[None]], *servers: Server, embedded: bool = False, **how: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            if not embedded:
                async with core(*servers, **how) as running:
                    await test(running)
                return
            async with embeddings_server() as vectors:
                vectors.same = True
                async with core(*servers, embeddings=vectors.url, **how) as running:
                    await test(running)

    uvloop.run(main())


def extras(got: Got, stream: bool) -> dict[str, Any]:
    document = json.loads(got.events[-2][6:]) if stream else got.document
    found: dict[str, Any] = document["twinkeel"]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["How do I enable 2FA?", "Hi, how can I enable 2FA"])
def test_a_kept_answer_is_labelled_with_age_and_similarity(text: str, stream: bool) -> None:
    async def test(running: Core) -> None:
        assert (await post(running.url, says("How do I enable 2FA?"))).status == 200
        await running.answers.embedded()
        await break_down(running)
        got = await post(running.url, says(text, stream=stream))
        assert (got.status, got.headers["x-twinkeel-outcome"]) == (200, "degraded")
        assert b"enable it so" in got.body
        assert got.headers["x-twinkeel-degraded"] == "cached"
        assert 0 <= float(got.headers["x-twinkeel-age-s"]) < 10
        assert float(got.headers["x-twinkeel-similarity"]) == 1.0
        said = extras(got, stream)
        assert said["degraded"] == "cached"
        assert said["request_id"] == got.headers["x-request-id"]
        assert 0 < said["age_s"] < 10
        assert said["similarity"] == 1.0
        assert "confidence_score" not in said  # it was never scored
        if stream:
            assert got.events[-1] == DONE
        other = await post(running.url, says("How do I disable 2FA?", stream=stream))
        assert other.headers["x-twinkeel-degraded"] == "template"
        assert "x-twinkeel-age-s" not in other.headers
        assert "x-twinkeel-similarity" not in other.headers

    run(test, answering("enable it so"), embedded=True, policy=cut_off("cached", "template"))


def test_a_kept_answer_has_the_confidence_that_it_was_given() -> None:
    async def test(running: Core) -> None:
        await break_down(running)
        document = says("How do I enable 2FA?")
        asked = read("chat", {}, json.dumps(document).encode(), b"")
        spec = running.driver.replicas[0].spec
        assert spec is not None
        running.answers.keep(asked, json.dumps(whole("so")).encode(), 812, spec.version)
        got = await post(running.url, document)
        assert got.headers["x-twinkeel-degraded"] == "cached"
        assert got.headers["x-twinkeel-confidence"] == "0.812"
        assert got.document["twinkeel"]["confidence_score"] == 0.812
        running.down(0)
        running.up(0, version="another")
        other = await post(running.url, document)
        assert other.headers["x-twinkeel-degraded"] == "template"

    run(test, answering(), policy=cut_off("cached", "template"))


def part(path: str, text: str | None, finish: str | None = None) -> bytes:
    """A chunk of a stream, written as vLLM does, so that most pass without being decoded."""
    said: dict[str, Any] = {} if text is None else {"content": text}
    choice = {"delta": said} if path == CHAT else {"text": text or ""}
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    document = {"id": "c", "object": kind, "choices": [{"index": 0, **choice,
                "finish_reason": finish}]}  # fmt: skip
    return b"data: " + msgspec.json.encode(document) + b"\n\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_answer_of_a_stream_is_kept_too(path: str, stream: bool) -> None:
    parts = [part(path, text) for text in ("so ", "it ", "goes")]

    async def script(question: Question, line: Line) -> None:
        if "breaks" in json.dumps(question.document):
            await line.whole({"error": {"message": "boom"}}, 500)
        else:
            assert question.document["stream"] is True
            await line.head()
            for each in (*parts, part(path, None, "stop"), USAGE, DONE):
                await line.part(each)
                await asyncio.sleep(0.01)
            await line.end()

    async def test(running: Core) -> None:
        document = chat if path == CHAT else completion
        first = await post(running.url, document(stream=True), path)
        assert first.events[-1] == DONE
        await break_down(running)
        got = await post(running.url, document(stream=stream), path)
        assert got.headers["x-twinkeel-degraded"] == "cached"
        choice = (json.loads(got.events[0][6:]) if stream else got.document)["choices"][0]
        said = choice["delta" if stream else "message"] if path == CHAT else choice
        assert said["content" if path == CHAT else "text"] == "so it goes"
        assert choice["finish_reason"] == "stop"
        if not stream:
            assert got.document["usage"]["completion_tokens"] == 2
            kind = "chat.completion" if path == CHAT else "text_completion"
            assert got.document["object"] == kind
        for more in ({"n": 2}, {"logprobs": True}):
            other = await post(running.url, document(stream=stream, **more), path)
            assert other.headers["x-twinkeel-degraded"] == "template"

    run(test, Server(script), policy=cut_off("cached", "template"))


def test_without_embeddings_only_the_same_question_finds_it() -> None:
    async def test(running: Core) -> None:
        assert (await post(running.url, says("How do I enable 2FA?"))).status == 200
        await break_down(running)
        same = await post(running.url, says(" How do I enable  2FA?"))
        assert same.headers["x-twinkeel-degraded"] == "cached"
        other = await post(running.url, says("How can I enable 2FA?"))
        assert other.headers["x-twinkeel-degraded"] == "template"

    run(test, answering("enable it so"), policy=cut_off("cached", "template"))


def test_what_was_degraded_is_not_kept() -> None:
    async def test(running: Core) -> None:
        await break_down(running)
        for _ in range(2):
            got = await post(running.url, says("How do I enable 2FA?"))
            assert got.headers["x-twinkeel-degraded"] == "template"

    run(test, answering(), policy=cut_off("cached", "template"))


@pytest.mark.parametrize("leaves", [True, False])
def test_a_look_up_that_ends_too_late_touches_nothing(leaves: bool) -> None:
    """Its caller went away, or its time was over: nobody is told twice, and nothing is refused."""

    async def test(running: Core) -> None:
        assert (await post(running.url, says("How do I enable 2FA?"))).status == 200
        await break_down(running)
        find = running.answers.find
        began, ended = asyncio.Event(), asyncio.Event()

        async def slow(*what: Any) -> Any:
            began.set()
            kept = await find(*what)
            await asyncio.sleep(0.8)
            ended.set()
            return kept

        running.answers.find = slow  # type: ignore[method-assign]
        document = says("How do I enable 2FA?")
        if leaves:
            caller = asyncio.create_task(post(running.url, document))
            await began.wait()
            caller.cancel()
            await asyncio.gather(caller, return_exceptions=True)
        else:
            got = await post(running.url, document)
            assert got.headers["x-twinkeel-degraded"] == "template"
            assert b"enable it so" not in got.body
        await ended.wait()
        await asyncio.sleep(0.05)
        assert running.driver.refused == 0, running.driver.refusal
        running.answers.find = find  # type: ignore[method-assign]
        assert (await post(running.url, document)).headers["x-twinkeel-degraded"] == "cached"

    soon = {"classes": {"p0_answer_ms": 500, "p1_answer_ms": 500, "fallback_reserve_ms": 100}}
    run(test, answering("enable it so"), policy=cut_off("cached", "template") | soon)


def test_a_look_up_that_fails_or_hangs_leaves_the_next_of_the_actions() -> None:
    async def test(running: Core) -> None:
        await break_down(running)
        store: Any = running.answers.store

        async def broken(*what: Any) -> Any:
            raise ValueError("a fault of ours")

        async def hanging(*what: Any) -> Any:
            await asyncio.sleep(60)

        loop = asyncio.get_running_loop()
        for find in (broken, hanging):
            store.find = find
            began_s = loop.time()
            got = await post(running.url, says("How do I enable 2FA?"))
            assert got.headers["x-twinkeel-degraded"] == "template"
            assert loop.time() - began_s < LOOK_S_MOST + 1.0

    run(test, answering(), policy=cut_off("cached", "template"))


def test_a_kept_answer_is_found_though_the_first_token_came_too_late() -> None:
    """The caller's own deadline is that of the first token: others count afterwards."""

    async def hang(question: Question, line: Line) -> None:
        await asyncio.sleep(3)

    async def test(running: Core) -> None:
        document = says("How do I enable 2FA?")
        asked = read("chat", {}, json.dumps(document).encode(), b"")
        spec = running.driver.replicas[0].spec
        assert spec is not None
        running.answers.keep(asked, json.dumps(whole("enable it so")).encode(), 900, spec.version)
        head = {"x-twinkeel-deadline-ms": "300"}
        got = await post(running.url, document, headers=head)
        assert got.headers["x-twinkeel-degraded"] == "cached", got.headers

    policy = cut_off("cached", "template") | {"classes": {"p1_answer_ms": 1_500}}
    run(test, Server(hang), policy=policy)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
        {"structured_outputs": {"json": {"type": "object"}}},
        {"guided_json": {"type": "object"}},
    ],
)
def test_a_template_is_json_where_json_was_asked_for(
    form: dict[str, Any], path: str, stream: bool
) -> None:
    async def test(running: Core) -> None:
        await break_down(running)
        document = chat if path == CHAT else completion
        got = await post(running.url, document(stream=stream, **form), path)
        assert (got.status, got.headers["x-twinkeel-degraded"]) == (200, "template")
        name = got.headers["x-request-id"]
        choice = (json.loads(got.events[0][6:]) if stream else got.document)["choices"][0]
        part = "delta" if stream else "message"
        text = choice[part]["content"] if path == CHAT else choice["text"]
        said = json.loads(text)
        assert said["request_id"] == name
        assert said["error"] == "no_answer"
        assert choice["finish_reason"] == "stop"
        assert extras(got, stream)["request_id"] == name

    run(test, answering(), policy=cut_off("template"))


def test_a_template_is_plain_text_elsewhere() -> None:
    async def test(running: Core) -> None:
        await break_down(running)
        got = await post(running.url, chat(response_format={"type": "text"}))
        text = got.document["choices"][0]["message"]["content"]
        assert text.startswith("The service has no answer")
        assert got.headers["x-request-id"] in text

    run(test, answering(), policy=cut_off("template"))


# ---- in processes ----

POLICY = """schema: 1
name: one failure opens the breaker
discipline: tiered
health: {enabled: false}
retries: {tries_most: 1}
breakers:
  actions: [cached, template]
  rules:
    - {name: any, kinds: [http_5xx], consecutive_least: 1, consecutive_ms: 0, open_ms: 60000,
       open_most_ms: 60000}
"""


def test_it_is_there_after_a_restart_and_only_for_the_version_that_made_it(
    twins: list[Twin], controllers: Controllers
) -> None:
    controller = controllers([{"url": twins[0].url, "version": "v1"}])
    assert controller.put_policy(POLICY)[0] == 200

    def asked(url: str, text: str, stream: bool = False) -> Answer:
        async def main() -> Answer:
            async with session() as client:
                return await ask(client, url, twin_chat(MODEL, text, 8, stream=stream))

        return asyncio.run(main())

    first = asked(controller.url, "How do I enable 2FA?")
    streamed = asked(controller.url, "What is 2FA?", stream=True)
    assert first.good
    assert streamed.good
    twins[0].fault("http_500")
    assert asked(controller.url, "anything").status == 502
    text = first.document["choices"][0]["message"]["content"]
    before = twins[0].state()["requests"]

    def kept(url: str, stream: bool) -> float:
        answer = asked(url, "How do I enable 2FA?", stream)
        assert answer.good
        assert answer.text == text
        assert answer.headers["x-twinkeel-degraded"] == "cached"
        assert answer.headers["x-twinkeel-model-version"] == "v1"
        assert answer.extras["degraded"] == "cached"
        return float(answer.headers["x-twinkeel-age-s"])

    ages_s = [kept(controller.url, False), kept(controller.url, True)]
    for stream in (False, True):
        again_streamed = asked(controller.url, "What is 2FA?", stream)
        assert again_streamed.headers["x-twinkeel-degraded"] == "cached"
        assert again_streamed.text == streamed.text
    assert 'twinkeel_kept_answers_look_ups_total{found="same"} 4' in controller.metrics()
    other = asked(controller.url, "How do I disable 2FA?")
    assert other.headers["x-twinkeel-degraded"] == "template"
    controller.stop()

    again = controllers.again(controller.settings, controller.folder)
    ages_s += [kept(again.url, True), kept(again.url, False)]
    assert ages_s == sorted(ages_s)
    assert 0 <= ages_s[0] < ages_s[-1] < 60
    assert twins[0].state()["requests"] == before, "it was cut off all the time"
    again.kill()

    upstream = again.settings.upstreams[0]
    upstream = msgspec.structs.replace(upstream, version="v2")
    newer = msgspec.structs.replace(again.settings, upstreams=(upstream,))
    third = controllers.again(newer, controller.folder)
    eventually("its version is known", lambda: third.status()["replicas"][0]["up"])
    answer = asked(third.url, "How do I enable 2FA?")
    assert answer.headers.get("x-twinkeel-degraded") != "cached"
