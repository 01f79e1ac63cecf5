"""Silent failures: found, told by their right name, and tried elsewhere as long as that can be."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.controller.asking import CHAT, Answer, ask, ask_all, chat, session
from tests.controller.inprocess import story_of
from tests.controller.processes import MODEL, Twin

if TYPE_CHECKING:
    from pathlib import Path

CUT = {"stream_cut", "replica_lost"}
BEFORE = [
    ("http_500", {}, {"http_5xx"}),
    ("http_503", {}, {"backpressure"}),
    ("hang", {}, {"silent"}),
    ("stall", {"after_tokens": 0}, {"silent"}),
    ("reset", {"after_tokens": 0}, CUT),
    ("cut", {"after_tokens": 0}, CUT),
    ("no_end", {"after_tokens": 0}, {"stream_cut", "empty", "malformed"}),
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


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("kind", "how", "expected"), BEFORE, ids=[each[0] for each in BEFORE])
def test_before_the_first_byte_it_is_tried_elsewhere(
    twins: list[Twin], tmp_path: Path, kind: str, how: dict[str, Any], expected: set[str],
    stream: bool,
) -> None:  # fmt: skip
    answers: list[Answer] = []

    async def play(url: str) -> None:
        twins[0].fault(kind, **how)
        asked = chat(MODEL, "a story", 8, stream=stream)
        answers.extend(await ask_all(url, [asked] * 2))  # one to each

    story = story_of([twin.url for twin in twins], tmp_path, play)
    assert [answer.status for answer in answers] == [200] * 2, [each.body for each in answers]
    for answer in answers:
        assert answer.good
        assert len(answer.text.split()) >= 8  # all of it came, and only once
    assert story.kinds(0), "nothing was ever sent to the faulty replica"
    assert story.kinds(0) <= expected
    assert not story.kinds(1)
    tries = [request.tries for request in story.requests.values()]
    assert sorted(tries) == [[0, 1], [1]]


@pytest.mark.parametrize(("kind", "expected"), MIDWAY, ids=[each[0] for each in MIDWAY])
def test_after_the_first_byte_the_caller_is_told_inside_the_stream(
    twins: list[Twin], tmp_path: Path, kind: str, expected: set[str]
) -> None:
    answers: list[Answer] = []

    async def play(url: str) -> None:
        twins[0].fault(kind, after_tokens=5)
        answers.extend(await ask_all(url, [chat(MODEL, "a story", 60)] * 4))

    story = story_of([twin.url for twin in twins], tmp_path, play)
    seen: set[int] = set()
    for answer in answers:
        assert answer.status == 200
        assert answer.text, "the first tokens came before it broke"
        request = story.requests[int(answer.headers["x-twinkeel-request"])]
        seen.add(request.tries[0])
        if request.tries == [1]:
            assert answer.good
            continue
        assert request.tries == [0], "a stream that has begun is never tried again"
        assert answer.error["code"] in expected
        assert {"message", "type", "param", "code"} <= set(answer.error)
        assert not answer.done, "it must not look like a whole answer"
        assert "error" in answer.chunks[-1], "nothing follows the error"
        assert request.settled[0].outcome == "failed"
        assert answer.e2e_s < 4.0
    assert seen == {0, 1}
    assert story.kinds(0) <= expected
    assert not story.kinds(1)


def test_errors_of_the_caller_are_passed_on_and_count_for_nothing(
    twins: list[Twin], tmp_path: Path
) -> None:
    async def play(url: str) -> None:
        for twin in twins:
            twin.fault("http_400")
        bad = await ask_all(url, [chat(MODEL, "?", 4, stream=False)] * 60)
        assert [answer.status for answer in bad] == [400] * 60
        assert all(answer.error["type"] == "BadRequestError" for answer in bad)  # its own words
        for twin in twins:
            twin.heal()
        good = await ask_all(url, [chat(MODEL, "!", 4, stream=False)] * 40)
        assert all(answer.good for answer in good)

    story = story_of([twin.url for twin in twins], tmp_path, play)
    assert not story.rotated
    assert not story.breakers
    assert all(len(request.tries) == 1 for request in story.requests.values())


def test_a_whole_fleet_that_fails_is_told_as_an_error_of_openais_shape(
    twins: list[Twin], tmp_path: Path
) -> None:
    async def play(url: str) -> None:
        for twin in twins:
            twin.fault("http_500")
        for answer in await ask_all(url, [chat(MODEL, "?", 4)] * 2):
            assert answer.status in (502, 503)
            assert {"message", "type", "param", "code"} <= set(answer.error)
            assert answer.headers["Content-Type"].startswith("application/json")
            assert answer.headers["x-request-id"]

    story_of([twin.url for twin in twins], tmp_path, play)


def test_headers_are_held_until_the_first_chunk(twins: list[Twin], tmp_path: Path) -> None:
    async def play(url: str) -> None:
        twins[0].fault("latency", delay_s=0.8)
        (answer,) = await ask_all(url, [chat(MODEL, "?", 4)])
        assert answer.good
        assert answer.headers_s - answer.sent_s >= 0.8
        assert not answer.comments

    story_of([twins[0].url], tmp_path, play)


@pytest.mark.parametrize(
    ("kind", "how"), [("latency", {"delay_s": 1.3}), ("slow", {"factor": 120})]
)
def test_silence_is_broken_by_comments(
    twins: list[Twin], tmp_path: Path, kind: str, how: dict[str, Any]
) -> None:
    """Before the first token, and between tokens."""

    async def play(url: str) -> None:
        twins[0].fault(kind, **how)
        times = [time.monotonic()]
        parts: list[bytes] = []
        asked = chat(MODEL, "?", 4)
        async with session() as client, client.post(f"{url}{CHAT}", json=asked) as got:
            async for part in got.content.iter_any():
                times.append(time.monotonic())
                parts.append(part)
        answer = Answer(200, {"Content-Type": "text/event-stream"}, b"".join(parts), clean=True)
        assert len(answer.comments) >= 3
        assert answer.good
        assert max(after - before for before, after in pairwise(times)) <= 0.3 + 0.2

    story_of([twins[0].url], tmp_path, play, limits={"comment_s": 0.3})


def test_the_first_comment_comes_within_15_s_by_default(twins: list[Twin], tmp_path: Path) -> None:
    policy = tmp_path / "patient.yaml"
    policy.write_text("schema: 1\nname: patient\nhealth:\n  enabled: false\n")

    async def play(url: str) -> None:
        twins[0].fault("latency", delay_s=15.6)
        async with session() as client:
            deadline = {"x-twinkeel-deadline-ms": "60000"}
            answer = await ask(client, url, chat(MODEL, "?", 4), deadline)
        assert answer.good
        assert len(answer.comments) == 1
        assert 9.0 <= answer.headers_s - answer.sent_s <= 15.2

    story_of([twins[0].url], tmp_path, play, policy=str(policy))
