"""Silent failures: found, told by their right name, and tried elsewhere as long as that can be."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.controller.asking import Answer, ask, ask_all, chat, session
from tests.controller.processes import MODEL, Controllers, Twin
from tests.controller.stories import Story, read_story

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Controller

CUT = {"stream_cut", "replica_lost"}
BEFORE = [
    ("http_500", {}, {"http_5xx"}),
    ("http_503", {}, {"backpressure"}),
    ("hang", {}, {"silent"}),
    ("stall", {"after_tokens": 0}, {"silent"}),
    ("reset", {"after_tokens": 0}, CUT),
    ("cut", {"after_tokens": 0}, CUT),
    ("no_end", {"after_tokens": 0}, {"stream_cut", "empty"}),
    ("empty", {}, {"empty"}),
    ("null", {}, {"empty"}),
    ("abort", {"after_tokens": 0}, {"stream_cut"}),
    ("truncated", {"after_tokens": 0}, {"malformed", "stream_cut"}),
    ("blank", {}, {"empty", "stream_cut"}),
]
MIDWAY = [
    ("stall", {"silent"}),
    ("reset", {"stream_cut"}),
    ("cut", {"stream_cut"}),
    ("no_end", {"stream_cut"}),
    ("abort", {"stream_cut"}),
    ("truncated", {"malformed", "stream_cut"}),
]


def _story(controller: Controller) -> Story:
    """After it has ended."""
    controller.stop()
    story = read_story(controller.records())
    assert not story.refused
    for request in story.requests.values():
        assert len(request.settled) == 1, request
    return story


def _replica(story: Story, answer: Answer) -> int:
    """Where an answer came from."""
    return story.requests[int(answer.headers["x-twinkeel-request"])].tries[-1]


@pytest.mark.parametrize(("kind", "how", "expected"), BEFORE, ids=[each[0] for each in BEFORE])
def test_before_the_first_byte_it_is_tried_elsewhere(
    twins: list[Twin], controllers: Controllers, kind: str, how: dict[str, Any], expected: set[str]
) -> None:
    controller = controllers([twin.url for twin in twins])
    twins[0].fault(kind, **how)
    documents = [chat(MODEL, f"story {number}", 8, stream=number % 2 == 0) for number in range(6)]
    answers = asyncio.run(ask_all(controller.url, documents, gap_s=0.02))
    assert [answer.status for answer in answers] == [200] * 6, [each.body for each in answers]
    for answer in answers:
        assert answer.good
        assert len(answer.text.split()) >= 8  # all of it came, and only once
    story = _story(controller)
    assert story.kinds(0) <= expected
    assert story.kinds(0), "nothing was ever sent to the faulty replica"
    assert not story.kinds(1)
    moved = [each for each in story.requests.values() if each.tries[0] == 0]
    assert moved
    assert all(each.tries[-1] == 1 for each in moved)


@pytest.mark.parametrize(("kind", "expected"), MIDWAY, ids=[each[0] for each in MIDWAY])
def test_after_the_first_byte_the_caller_is_told_inside_the_stream(
    twins: list[Twin], controllers: Controllers, kind: str, expected: set[str]
) -> None:
    controller = controllers([twin.url for twin in twins])
    twins[0].fault(kind, after_tokens=5)
    documents = [chat(MODEL, f"story {number}", 60) for number in range(6)]
    answers = asyncio.run(ask_all(controller.url, documents, gap_s=0.02))
    story = _story(controller)
    assert {_replica(story, answer) for answer in answers} == {0, 1}
    for answer in answers:
        assert answer.status == 200
        assert answer.text, "the first tokens came before it broke"
        if _replica(story, answer) == 1:
            assert answer.good
            continue
        request = story.requests[int(answer.headers["x-twinkeel-request"])]
        assert request.tries == [0], "a stream that has begun is never tried again"
        assert answer.error["code"] in expected
        assert {"message", "type", "param", "code"} <= set(answer.error)
        assert not answer.done, "it must not look like a whole answer"
        assert "error" in answer.chunks[-1], "nothing follows the error"
        assert request.settled[0].outcome == "failed"
        assert answer.e2e_s < 4.0
    assert story.kinds(0) <= expected
    assert not story.kinds(1)


def test_errors_of_the_caller_are_passed_on_and_count_for_nothing(
    twins: list[Twin], controllers: Controllers
) -> None:
    controller = controllers([twin.url for twin in twins])
    for twin in twins:
        twin.fault("http_400")
    bad = asyncio.run(ask_all(controller.url, [chat(MODEL, "?", 4, stream=False)] * 60))
    assert [answer.status for answer in bad] == [400] * 60
    assert all(answer.error["type"] == "BadRequestError" for answer in bad)  # the server's words
    for twin in twins:
        twin.heal()
    good = asyncio.run(ask_all(controller.url, [chat(MODEL, "!", 4, stream=False)] * 40))
    assert all(answer.good for answer in good)
    story = _story(controller)
    assert not story.rotated
    assert not story.breakers
    assert all(len(request.tries) == 1 for request in story.requests.values())


def test_a_whole_fleet_that_fails_is_told_as_an_error_of_openais_shape(
    twins: list[Twin], controllers: Controllers
) -> None:
    controller = controllers([twin.url for twin in twins])
    for twin in twins:
        twin.fault("http_500")
    answers = asyncio.run(ask_all(controller.url, [chat(MODEL, "?", 4)] * 2))
    for answer in answers:
        assert answer.status in (502, 503)
        assert {"message", "type", "param", "code"} <= set(answer.error)
        assert answer.headers["Content-Type"].startswith("application/json")
        assert answer.headers["x-request-id"]


def test_headers_are_held_until_the_first_chunk(
    twins: list[Twin], controllers: Controllers
) -> None:
    controller = controllers([twins[0].url])
    twins[0].fault("latency", delay_s=0.8)
    (answer,) = asyncio.run(ask_all(controller.url, [chat(MODEL, "?", 4)]))
    assert answer.good
    assert answer.headers_s - answer.sent_s >= 0.8
    assert not answer.comments


def test_silence_is_broken_by_comments(twins: list[Twin], controllers: Controllers) -> None:
    controller = controllers([twins[0].url], limits={"comment_s": 0.3})
    twins[0].fault("latency", delay_s=1.3)  # before the first token

    async def gaps(document: dict[str, Any]) -> tuple[list[float], bytes]:
        loop = asyncio.get_running_loop()
        async with session() as client:
            times = [loop.time()]
            parts: list[bytes] = []
            async with client.post(f"{controller.url}/v1/chat/completions", json=document) as got:
                async for part in got.content.iter_any():
                    times.append(loop.time())
                    parts.append(part)
        return [after - before for before, after in pairwise(times)], b"".join(parts)

    silences, body = asyncio.run(gaps(chat(MODEL, "?", 4)))
    answer = Answer(200, {"Content-Type": "text/event-stream"}, body, clean=True)
    assert len(answer.comments) >= 3
    assert answer.good
    assert max(silences) <= 0.3 + 0.15
    twins[0].heal()
    twins[0].fault("slow", factor=120)  # between tokens
    silences, body = asyncio.run(gaps(chat(MODEL, "!", 4)))
    answer = Answer(200, {"Content-Type": "text/event-stream"}, body, clean=True)
    assert len(answer.comments) >= 3
    assert answer.good
    assert max(silences) <= 0.3 + 0.15


def test_the_first_comment_comes_after_15_s_by_default(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    policy = tmp_path / "patient.yaml"
    policy.write_text("schema: 1\nname: patient\nhealth:\n  enabled: false\n")
    controller = controllers([twins[0].url], policy=str(policy))
    twins[0].fault("latency", delay_s=15.6)

    async def one() -> Answer:
        async with session() as client:
            deadline = {"x-twinkeel-deadline-ms": "60000"}
            return await ask(client, controller.url, chat(MODEL, "?", 4), deadline)

    answer = asyncio.run(one())
    assert answer.good
    assert len(answer.comments) == 1
    assert 9.0 <= answer.headers_s - answer.sent_s <= 15.2
