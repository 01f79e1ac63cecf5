"""The pure parts of the gateway's benchmarks: what counts as a good answer, and the sums."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest

from policy.decisions import Dispatch, Settled
from policy.events import Arrived, Ticked
from policy.log import Record
from tests.bench.bench_gateway import FILES_SPARE, seats
from tests.bench.gateway.client import Answer
from tests.bench.gateway.drills_faults import overload_outcome
from tests.bench.gateway.drills_load import jain, says_why
from tests.bench.gateway.judge import judge_body, judge_stream, tells_error
from tests.bench.gateway.load import chat, headers, kinds, quantile
from tests.bench.gateway.logs import account
from tests.bench.gateway.mock import END, SHORT, STREAM_HEAD, TOKEN
from tests.bench.soak import Tally, growth_pct


def body(content: str | None = "hi", end: str | None = "stop", **more: object) -> bytes:
    message = {"role": "assistant", "content": content}
    choices = [{"index": 0, "message": message, "finish_reason": end}]
    return json.dumps({"choices": choices, **more}).encode()


def event(content: str | None = "hi", end: str | None = None, **more: object) -> bytes:
    choices = [{"index": 0, "delta": {"content": content}, "finish_reason": end}]
    return b"data: " + json.dumps({"choices": choices, **more}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"x","code":"silent"},"twinkeel":{"request_id":"tk-1"}}\n\n'


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (body(), "ok"),
        (body(end="length"), "ok"),
        (body(""), "empty"),
        (body(None), "empty"),
        (b"", "empty"),
        (body(end="abort"), "abort"),
        (body(end=None), "no_end"),
        (body()[:-9], "malformed"),
        (body(twinkeel={"degraded": "template"}), "degraded"),
        (body(twinkeel={"tier": "stable"}), "ok"),
        (b'{"error":{"message":"x"}}', "error_body"),
    ],
)
def test_whole_answers_are_judged(data: bytes, verdict: str) -> None:
    assert judge_body(data) == verdict


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (event() + event("", "stop") + DONE, "ok"),
        (b": waiting\n\n" + event() + event("", "stop") + DONE, "ok"),
        (event() + event("", "stop"), "no_end"),
        (event() + DONE, "no_end"),
        (event("") + event("", "stop") + DONE, "empty"),
        (event() + event("", "abort") + DONE, "abort"),
        (event() + ERROR, "error_event"),
        (event() + event()[:-2], "malformed"),
        (event() + b'data: {"choi\n\n' + DONE, "malformed"),
    ],
)
def test_streams_are_judged(data: bytes, verdict: str) -> None:
    assert judge_stream(data) == verdict


def test_an_error_event_counts_though_the_connection_is_cut_after_it() -> None:
    assert tells_error(event() + ERROR)
    assert tells_error(event() + ERROR + b"data: {")
    assert not tells_error(event() + event())
    assert not tells_error(b"")


def test_the_mock_server_gives_answers_that_a_caller_can_use() -> None:
    for top in SHORT:
        assert judge_body(SHORT[top].partition(b"\r\n\r\n")[2]) == "ok"
    assert b"chunked" in STREAM_HEAD
    payload = b"".join(chunk.partition(b"\r\n")[2][:-2] for chunk in (TOKEN[0], TOKEN[5]))
    assert judge_stream(payload + DONE) == "no_end"
    assert b"usage" in END[True]
    assert b"usage" not in END[False]


def test_jains_index() -> None:
    assert jain([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([1.0, 2.0]) == pytest.approx(0.9)
    assert jain([0.0, 0.0]) == 0.0


def test_quantiles_take_a_value_that_was_seen() -> None:
    assert quantile([3, 1, 2], 0.5) == 2
    assert quantile(list(range(100)), 0.99) == 99
    assert quantile([], 0.5) == 0.0


def test_requests_say_what_is_wanted() -> None:
    asked = msgspec.json.decode(chat(7, stream=True, usage=True, text="x", temperature=0.0))
    assert asked["max_tokens"] == 7
    assert asked["stream_options"] == {"include_usage": True}
    assert asked["temperature"] == 0.0
    assert "stream" not in msgspec.json.decode(chat(7))
    assert headers("a", "P0", 1.5) == (
        b"x-twinkeel-user: a\r\nx-twinkeel-sla: P0\r\nx-twinkeel-deadline-ms: 1500\r\n"
    )


def answer(
    kind: str, last_s: float, status: int = 200, head: bytes = b"", data: bytes = b""
) -> Answer:
    return Answer(kind, status, last_s - 0.1, last_s - 0.05, last_s, head, data, 0.0)


def test_recovery_ends_with_the_last_failure() -> None:
    over_s = 10.0
    answers = [answer("ok", 9.0), answer("http_429", 9.5, 429), answer("ok", 10.2)]
    recovered = {f.name: f.value for f in overload_outcome(answers, over_s, 1.0).figures}
    assert recovered["overload_recovery_s"] == pytest.approx(0.2)
    answers.append(answer("http_503", 13.0, 503))
    recovered = {f.name: f.value for f in overload_outcome(answers, over_s, 1.0).figures}
    assert recovered["overload_recovery_s"] == pytest.approx(3.0)
    assert kinds(answers) == Counter(ok=2, http_429=1, http_503=1)


def test_a_refusal_needs_a_reason_and_a_time() -> None:
    head = b"HTTP/1.1 429 Too Many Requests\r\nRetry-After: 2"
    data = b'{"error":{"code":"deadline"}}'
    assert says_why(answer("http_429", 1.0, 429, head, data))
    assert not says_why(answer("http_429", 1.0, 429, b"HTTP/1.1 429 x", data))
    assert not says_why(answer("http_429", 1.0, 429, head, b'{"error":{}}'))
    assert not says_why(answer("http_429", 1.0, 429, head, b"<html>"))


def arrived(request: int) -> Record:
    return Record(request, Arrived(request, "m", "chat", 10), (Dispatch(request, 0, "stable"),))


def over(request: int, outcome: str = "answered", why: str = "") -> Record:
    return Record(
        100 + request,
        Ticked(),
        (Settled(request, outcome, why=why),),  # type: ignore[arg-type]
    )


def test_the_account_finds_requests_without_exactly_one_outcome() -> None:
    good = [arrived(1), over(1), arrived(2), over(2, "failed", "silent")]
    found = account(good)
    assert (found.arrived, found.settled, found.unaccounted) == (2, 2, 0)
    assert found.outcomes == Counter({"answered": 1, "failed silent": 1})
    assert account([*good, arrived(3)]).open == 1
    assert account([*good, over(2)]).twice == 1
    assert account([*good, over(9)]).unknown == 1
    assert account([*good, arrived(3), over(2), over(9)]).unaccounted == 3


def test_memory_is_compared_with_a_fifth_of_the_run() -> None:
    rss = [(sent, 100 + (sent < 200) * -50) for sent in range(100, 1100, 100)]
    assert growth_pct(rss, 1000) == 0.0
    grown = [*rss[:-3], (800, 120), (900, 120), (1000, 120)]
    assert growth_pct(grown, 1000) == pytest.approx(20.0)
    assert growth_pct([], 1000) == 0.0


def test_idle_streams_share_the_open_files_there_are() -> None:
    def under_way(seats_each: int, replicas: int) -> int:
        return replicas * (seats_each * 1020 // 1000 * 950 // 1000)

    few = under_way(seats(10_000, 12, 20_000), 12)
    assert 9_700 < few <= 20_000 - FILES_SPARE - 10_000
    enough = under_way(seats(10_000, 12, 65_536), 12)
    assert enough > 9_900


def test_what_breaks_midway_is_no_failure_if_it_was_told() -> None:
    tally = Tally()
    for kind in ("ok", "error_event", "http_502", "cut"):
        tally.open += 1
        tally.took(answer(kind, 1.0))
    assert (tally.over, tally.begun, tally.failed, tally.open) == (4, 1, 2, 0)
    assert set(tally.first) == {"error_event", "http_502", "cut"}
