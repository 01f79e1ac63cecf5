"""Second runs: what is compared, what the policy is told of them, and when they are given up."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from policy.events import Verified
from tests.controller.test_gateway_app import (
    CONFIDENT,
    SURE,
    UNSURE,
    VERIFYING,
    logprobs,
    run,
    scored,
)
from tests.core_support import DONE, ROLE, Core, Line, Question, Server, chat, delta, post

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


def test_a_second_run_ends_with_the_time_for_an_answer() -> None:
    gone: list[int] = []

    async def play(question: Question, line: Line) -> None:
        if second(question):
            await line.gone()  # until the connection is closed
            gone.append(1)
        else:
            await line.whole(FIRST)

    soon = {**VERIFYING, "classes": {"p1_answer_ms": 900, "fallback_reserve_ms": 300}}

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
