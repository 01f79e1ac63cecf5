"""Second runs: what is compared, what the policy is told of them, and when they are given up."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from policy.events import Finished, Verified
from tests.controller.test_gateway_app import (
    CONFIDENT,
    SURE,
    UNSURE,
    VERIFYING,
    answering,
    logprobs,
    run,
    saying,
    scored,
)
from tests.core_support import (
    DONE,
    ROLE,
    Core,
    Line,
    Question,
    Server,
    chat,
    delta,
    post,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


def second(question: Question) -> bool:
    return "-second" in question.headers["x-request-id"]


def script(
    first: dict[str, Any], other: dict[str, Any]
) -> Callable[[Question, Line], Awaitable[None]]:
    async def play(question: Question, line: Line) -> None:
        await line.whole(other if second(question) else first)

    return play


FIRST = scored("x y z", SURE, UNSURE, SURE)


def with_token(text: str, gap: tuple[float, float]) -> dict[str, Any]:
    """Its middle token is another one, chosen so narrowly."""
    answer = scored(text, SURE, gap, SURE)
    answer["choices"][0]["logprobs"]["content"][1]["token"] = "w"
    return answer


@pytest.mark.parametrize(
    ("temperature", "other", "verdict"),
    [
        (0, with_token("x 17 z", (-0.69, -0.70)), "match"),  # a near-tie: batching flips it
        (0, with_token("x 17 z", (-0.05, -3.0)), "mismatch"),  # it was sure of another one
        (None, with_token("x 17 z", (-0.69, -0.70)), "mismatch"),  # sampled: by its words
    ],
)
def test_where_greedy_answers_part_decides(
    temperature: object, other: dict[str, Any], verdict: str
) -> None:
    play = script(FIRST, other)

    async def test(running: Core) -> None:
        for _ in range(3):
            await post(running.url, chat(temperature=temperature))
        assert running.events(Verified)[-1].verdict == verdict

    run(test, Server(play), Server(play), features=CONFIDENT, policy=VERIFYING)


def test_the_second_answer_is_scored_too() -> None:
    play = script(FIRST, scored("x y z", UNSURE, UNSURE, UNSURE))
    servers = Server(play), Server(play)

    async def test(running: Core) -> None:
        got = await post(running.url, chat(seed=7, temperature=0.5))
        assert got.document["choices"][0]["logprobs"] is None
        for _ in range(2):
            await post(running.url, chat(seed=7, temperature=0.5))
        event = running.events(Verified)[-1]
        assert event.close_permille == 1000
        assert event.entropy_mean_millinats > 600
        runs = [each for server in servers for each in server.questions if second(each)]
        assert runs[-1].document["top_logprobs"] == 20
        assert (runs[-1].document["seed"], runs[-1].document["temperature"]) == (7, 0.5)

    run(test, *servers, features=CONFIDENT, policy=VERIFYING)


def test_a_contradiction_of_the_second_answer_is_told() -> None:
    said = "Guests may bring dogs into the garden."
    contrary = scored("Guests may not bring dogs into the garden.", UNSURE)
    play = script(scored(said, UNSURE), contrary)
    messages = [{"role": "user", "content": f"{said} Repeat that."}]

    async def test(running: Core) -> None:
        for _ in range(3):
            await post(running.url, chat(messages=messages))
        assert running.events(Verified)[-1].contradiction
        assert not any(each.contradiction for each in running.events(Finished))

    run(test, Server(play), Server(play), features=CONFIDENT, policy=VERIFYING)


def test_a_second_run_ends_with_the_time_for_an_answer() -> None:
    gone: list[int] = []

    async def play(question: Question, line: Line) -> None:
        if second(question):
            await line.gone()  # until the connection is closed
            gone.append(1)
        else:
            await line.whole(FIRST)

    soon = {**VERIFYING, "classes": {"p1_answer_ms": 4000, "fallback_reserve_ms": 300}}

    async def test(running: Core) -> None:
        while not gone:
            got = await post(running.url, chat())
            assert got.status == 200
        await running.until(lambda: not running.driver.calls)

    run(test, Server(play), Server(play), features=CONFIDENT, policy=soon)


def test_logprobs_of_a_caller_are_cut_down_to_what_it_asked_for() -> None:
    async def play(question: Question, line: Line) -> None:
        assert question.document["top_logprobs"] == 20
        said = [delta("x", logprobs=logprobs(SURE)), delta(None, "stop", logprobs=None)]
        if question.document["stream"]:
            await line.stream(ROLE, *said, DONE)
        else:
            await line.whole(scored("x y", SURE, SURE))

    def listed(choice: dict[str, Any]) -> list[int]:
        return [len(token["top_logprobs"]) for token in choice["logprobs"]["content"]]

    async def test(running: Core) -> None:
        wanted = {"logprobs": True, "top_logprobs": 1}
        got = await post(running.url, chat(stream=False, **wanted))
        assert listed(got.document["choices"][0]) == [1, 1]
        assert got.document["twinkeel"]["confidence_score"] > 0.9
        got = await post(running.url, chat(stream=True, **wanted))
        chunks = [json.loads(event[6:]) for event in got.events if b"{" in event]
        told = [choice for chunk in chunks for choice in chunk["choices"] if choice.get("logprobs")]
        assert [listed(choice) for choice in told] == [[1]]
        assert chunks[-1]["twinkeel"]["confidence_score"] > 0.9

    run(test, Server(play), features=CONFIDENT)


LIKELY = logprobs(SURE)
END = delta(None, "stop", logprobs=None)


@pytest.mark.parametrize(
    ("events", "has_score"),
    [
        # Half of a sign has no text yet, and logprobs all the same.
        ([delta("", logprobs=LIKELY), delta("a", logprobs=LIKELY)], True),
        ([delta("a", logprobs=LIKELY), delta("", logprobs=LIKELY)], True),
        ([delta("a", logprobs=LIKELY), *[delta("b")] * 3], False),  # of a quarter only
        ([delta("a", logprobs=logprobs((20.0, 11.0)))], False),  # logits
        ([delta("a", logprobs=logprobs((-0.1, -0.1)))], False),  # more than all there is
        ([delta("a", logprobs=logprobs((-9999.0, -9999.0)))], False),  # none was possible
        ([delta("a", logprobs={"content": [{"token": "a", "top_logprobs": "x"}]})], False),
        ([delta("a", logprobs=LIKELY).replace(b"-8.0", b"-1e999")], False),
        ([delta("a", logprobs=LIKELY).replace(b'"choices":', b'"choices":\ndata: ')], True),
    ],
)  # fmt: skip
def test_a_stream_has_a_score_only_where_it_is_known_and_no_logprobs_unasked(
    events: list[bytes], has_score: bool
) -> None:
    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True))
        assert got.status == 200
        assert b"top_logprobs" not in got.body
        assert (b"confidence_score" in got.body) is has_score
        assert running.outcomes()[-1].outcome == "answered"

    run(test, answering(ROLE, *events, END, DONE), features=CONFIDENT)


@pytest.mark.parametrize(("tokens", "has_score"), [(3, True), (4, True), (30, False)])
def test_a_score_is_that_of_the_whole_answer(tokens: int, has_score: bool) -> None:
    answer = scored("a b c", SURE, SURE, SURE)  # an end that is not listed is none of it
    answer["usage"] = {"prompt_tokens": 1, "completion_tokens": tokens}

    async def test(running: Core) -> None:
        got = await post(running.url, chat())
        assert got.document["choices"][0]["logprobs"] is None
        assert ("confidence_score" in got.document["twinkeel"]) is has_score

    run(test, saying(answer), features=CONFIDENT)


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_gives_no_logprobs_answers_without_a_score(stream: bool) -> None:
    said = "Requested sample logprobs of 20, which is greater than max allowed: 5"

    async def play(question: Question, line: Line) -> None:
        if "logprobs" in question.document:
            await line.whole({"error": {"message": said, "code": 400}}, 400)
        elif stream:
            await line.stream(ROLE, delta("a"), END, DONE)
        else:
            await line.whole(whole("a"))

    server = Server(play)

    async def test(running: Core) -> None:
        for _ in range(2):
            got = await post(running.url, chat(stream=stream))
            assert got.status == 200
            assert b"confidence_score" not in got.body
        assert len(server.questions) == 3  # it is told once only
        running.down(0)
        running.up(0)  # perhaps with other settings
        await post(running.url, chat(stream=stream))
        assert len(server.questions) == 5

    run(test, server, features=CONFIDENT)


def test_what_a_server_refuses_for_another_reason_is_told_as_it_says() -> None:
    refusal = {"error": {"message": "the prompt is too long", "code": 400}}
    server = saying(refusal, 400)

    async def test(running: Core) -> None:
        for _ in range(2):
            got = await post(running.url, chat())
            assert (got.status, got.document) == (400, refusal)
        assert ["logprobs" in each.document for each in server.questions] == [True, False] * 2

    run(test, server, features=CONFIDENT)


@pytest.mark.parametrize("shown", [None, 5])
def test_a_long_answers_score_holds_nobody_up(shown: int | None) -> None:
    """4,000 tokens with 20 candidates each: by the time this thread works in one go."""
    top = [{"token": f"t{at}", "logprob": -1.0 - at, "bytes": [1, 2, 3]} for at in range(20)]
    tokens = [{**top[0], "top_logprobs": top}] * 4000
    answer = whole(" ".join(["word"] * 4000))
    answer["choices"][0]["logprobs"] = {"content": tokens}
    answer["usage"] = {"prompt_tokens": 1, "completion_tokens": 4000}
    body = json.dumps(answer).encode()
    wanted = {} if shown is None else {"logprobs": True, "top_logprobs": shown}
    pauses: list[float] = []

    async def watch() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            pauses.append(time.thread_time() - began)

    async def test(running: Core) -> None:
        watching = asyncio.create_task(watch())
        async with asyncio.timeout(60):
            while not running.events(Finished):
                await post(running.url, chat(**wanted))
        watching.cancel()
        assert running.events(Finished)[-1].close_permille == 0
        assert max(pauses) < 0.1  # one go over all of it took 0.4 s and more

    run(test, saying(body), features=CONFIDENT)


def test_a_template_has_not_the_score_of_the_answer_that_it_is_given_for() -> None:
    doubted = {"actions": ["template"], "verify_below_permille": 650, "degrade_below_permille": 650}

    async def test(running: Core) -> None:
        got = await post(running.url, chat())
        assert running.outcomes()[-1].confidence_permille >= 0
        assert got.headers["x-twinkeel-degraded"] == "template"
        assert "x-twinkeel-confidence" not in got.headers
        assert "confidence_score" not in got.document["twinkeel"]

    unsure = scored("a b", (-3.2, -3.21), (-3.2, -3.21))
    run(test, saying(unsure), features=CONFIDENT, policy={"confidence": doubted})
