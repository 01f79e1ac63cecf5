"""Silent failures: found, told by their right name, and tried elsewhere as long as that can be."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from tests.controller.asking import CHAT, Answer, ask, ask_all, chat, session
from tests.controller.inprocess import story_of
from tests.controller.processes import MODEL, PATIENT, Twin
from tests.controller.turns import Turns

if TYPE_CHECKING:
    from pathlib import Path

STALL_S = 5.0
"""Longer than a server stands still that has to wait for a processor."""
NOTICING = PATIENT.replace("30000, stall_ms: 30000", "5000, stall_ms: 5000")
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


@pytest.fixture
def noticing(tmp_path: Path) -> str:
    """A policy that takes nobody for silent who is only slow."""
    path = tmp_path / "noticing.yaml"
    path.write_text(NOTICING)
    return str(path)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize(("kind", "how", "expected"), BEFORE, ids=[each[0] for each in BEFORE])
def test_before_the_first_byte_it_is_tried_elsewhere(
    twins: list[Twin], tmp_path: Path, noticing: str, kind: str, how: dict[str, Any],
    expected: set[str], stream: bool,
) -> None:  # fmt: skip
    answers: list[Answer] = []

    async def play(url: str) -> None:
        twins[0].fault(kind, **how)
        asked = chat(MODEL, "a story", 8, stream=stream)
        answers.extend(await ask_all(url, [asked] * 2))  # one to each

    story = story_of([twin.url for twin in twins], tmp_path, play, policy=noticing)
    assert [answer.status for answer in answers] == [200] * 2, [each.body for each in answers]
    for answer in answers:
        assert answer.good
        assert len(answer.text.split()) >= 8  # all of it came, and only once
    assert story.kinds(0), "nothing was ever sent to the faulty replica"
    assert story.kinds(0) <= expected
    assert not story.kinds(1)
    tries = sorted(request.tries for request in story.requests.values())
    # The first may have come back before the second is placed, which may go there, too, then.
    assert tries in ([[0, 1], [1]], [[0, 1], [0, 1]])


@pytest.mark.parametrize(("kind", "expected"), MIDWAY, ids=[each[0] for each in MIDWAY])
def test_after_the_first_byte_the_caller_is_told_inside_the_stream(
    twins: list[Twin], tmp_path: Path, noticing: str, kind: str, expected: set[str]
) -> None:
    answers: list[Answer] = []

    async def play(url: str) -> None:
        twins[0].fault(kind, after_tokens=5)
        for _ in range(10):
            answers.extend(await ask_all(url, [chat(MODEL, "a story", 60)] * 4))
            if {answer.good for answer in answers} == {True, False}:
                break

    with Turns() as turns:
        story = story_of([twin.url for twin in twins], tmp_path, play, policy=noticing)
    seen: set[int] = set()
    for answer in answers:
        assert answer.status == 200
        assert answer.text, "the first tokens came before it broke"
        request = story.requests[int(answer.headers["x-twinkeel-request"])]
        if kind == "reset" and request.tries == [0, 1]:
            assert answer.good  # a reset takes along what was not read yet: it had not begun
            continue
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
        assert turns.between(answer.sent_s, answer.ended_s) < STALL_S + 2.0
    assert seen == {0, 1}
    assert story.kinds(0) <= expected
    assert not story.kinds(1)


def test_errors_of_the_caller_are_passed_on_and_count_for_nothing(
    twins: list[Twin], tmp_path: Path, noticing: str
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

    story = story_of([twin.url for twin in twins], tmp_path, play, policy=noticing)
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


def test_headers_are_held_until_the_first_chunk(
    twins: list[Twin], tmp_path: Path, noticing: str
) -> None:
    async def play(url: str) -> None:
        twins[0].fault("latency", delay_s=0.8)
        (answer,) = await ask_all(url, [chat(MODEL, "?", 4)])
        assert answer.good
        assert answer.headers_s - answer.sent_s >= 0.8
        assert not answer.comments

    story_of([twins[0].url], tmp_path, play, policy=noticing)


@pytest.mark.parametrize(
    ("kind", "how"), [("latency", {"delay_s": 4.0}), ("slow", {"factor": 120})]
)
def test_silence_is_broken_by_comments(
    twins: list[Twin], tmp_path: Path, noticing: str, kind: str, how: dict[str, Any]
) -> None:
    """Before the first token, and between tokens."""

    async def play(url: str) -> None:
        twins[0].fault(kind, **how)
        times = [time.monotonic()]
        parts: list[bytes] = []
        asked = chat(MODEL, "?", 6)
        with Turns() as turns:
            async with session() as client, client.post(f"{url}{CHAT}", json=asked) as got:
                async for part in got.content.iter_any():
                    times.append(time.monotonic())
                    parts.append(part)
        answer = Answer(200, {"Content-Type": "text/event-stream"}, b"".join(parts), clean=True)
        assert len(answer.comments) >= 3
        assert answer.good
        pauses_s = [turns.between(before, after) for before, after in pairwise(times)]
        assert max(pauses_s) <= 0.3 + 0.2

    story_of([twins[0].url], tmp_path, play, policy=noticing, limits={"comment_s": 0.3})


def test_the_first_comment_comes_within_15_s_by_default(twins: list[Twin], tmp_path: Path) -> None:
    policy = tmp_path / "patient.yaml"
    policy.write_text("schema: 1\nname: patient\nhealth:\n  enabled: false\n")

    async def play(url: str) -> None:
        twins[0].fault("latency", delay_s=15.6)
        with Turns() as turns:
            async with session() as client:
                deadline = {"x-twinkeel-deadline-ms": "60000"}
                answer = await ask(client, url, chat(MODEL, "?", 4), deadline)
        assert answer.good
        assert len(answer.comments) == 1
        assert answer.headers_s - answer.sent_s >= 9.0
        assert turns.between(answer.sent_s, answer.headers_s) <= 15.2

    story_of([twins[0].url], tmp_path, play, policy=str(policy))
