"""The gateway before servers whose bytes the test decides: what callers get, whatever comes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import uvloop

from controller.config import Features, Limits
from controller.gateway.keys import Entry, Keys, digest_of, new_key
from policy.events import Arrived, Cancelled, Failed, Finished, FirstToken
from tests.core_support import (
    CHAT,
    COMPLETIONS,
    DONE,
    EMBEDDINGS,
    ROLE,
    STREAM,
    USAGE,
    Core,
    Got,
    Line,
    Question,
    Server,
    chat,
    completion,
    core,
    delta,
    event,
    good,
    post,
    whole,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PLAIN = Features(usage=False, extras=False)
ALONE: dict[str, Any] = {"health": {"enabled": False}}


def run(test: Callable[[Core], Awaitable[None]], *servers: Server, **options: Any) -> None:
    """Let ``test`` use a controller before these servers, and check its books."""

    async def main() -> None:
        async with asyncio.timeout(60), core(*servers, **options) as running:
            await test(running)

    uvloop.run(main())


def raw_request(body: bytes, *headers: bytes, version: str = "1.1") -> bytes:
    """A request whose headers are bytes, for a connection that is closed after it."""
    head = f"POST {CHAT} HTTP/{version}\r\nHost: test\r\nContent-Length: {len(body)}\r\n".encode()
    lines = b"".join(line + b"\r\n" for line in (b"Connection: close", *headers))
    return head + lines + b"\r\n" + body


async def exchange(url: str, data: bytes) -> bytes:
    """Send it; all that comes until the other side closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        async with asyncio.timeout(8):
            got = b""
            while data := await reader.read(65_536):
                got += data
                if got.endswith(b"}"):  # aiohttp reads on for a while what it refused
                    break
            return got
    finally:
        writer.close()
        await writer.wait_closed()


def answering(*parts: bytes, chunks: bool = True) -> Server:
    """A server that streams these bytes to whoever asks."""

    async def script(_: Question, line: Line) -> None:
        await line.stream(*parts)

    return Server(script)


async def silent(_: Question, line: Line) -> None:
    """Takes the question and says nothing."""
    await line.gone()


def saying(document: bytes | dict[str, Any], status: int = 200) -> Server:
    async def script(_: Question, line: Line) -> None:
        await line.whole(document, status)

    return Server(script)


# ---- good answers ----


def test_with_the_features_off_bytes_pass_exactly() -> None:
    odd = (
        b'{ "choices" : [{"message":{"content":"\xe4\xbd\xa0 \\u4f60"},'
        b'"finish_reason":"stop"}] } \n'
    )
    asked = b'{"model" : "m", "messages":[{"role":"user","content":"\\u00e9"}], "x": 1.50}'
    server = saying(odd)

    async def test(running: Core) -> None:
        got = await post(running.url, asked)
        assert (got.status, got.body) == (200, odd)
        assert server.questions[0].body == asked

    run(test, server, features=PLAIN)


def test_with_the_features_off_a_stream_passes_exactly_however_it_is_cut() -> None:
    text = delta("\N{CJK UNIFIED IDEOGRAPH-4F60}\N{GRINNING FACE}")
    whole_stream = b"".join((b": hello\n\n", ROLE, text, delta("b"), delta(None, "stop"), DONE))
    sizes = iter(range(1, 40))

    async def script(_: Question, line: Line) -> None:
        size = next(sizes)
        await line.head()
        for at in range(0, len(whole_stream), size):
            await line.part(whole_stream[at : at + size])
            if size > 30:
                await asyncio.sleep(0)
        await line.end()

    async def test(running: Core) -> None:
        for _ in range(12):
            got = await post(running.url, chat(stream=True))
            assert got.body == whole_stream

    run(test, Server(script), features=PLAIN)


def test_events_with_crlf_pass_exactly() -> None:
    parts = [each.replace(b"\n", b"\r\n") for each in STREAM]

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True))
        assert got.body == b"".join(parts)

    run(test, answering(*parts), features=PLAIN)


def test_usage_is_asked_for_and_taken_out_again() -> None:
    server = Server()

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True))
        assert server.questions[0].document["stream_options"] == {"include_usage": True}
        assert USAGE not in got.events
        assert got.events == [ROLE, delta("Good "), delta("day"), delta(None, "stop"), DONE]
        wants = chat(stream=True, stream_options={"include_usage": True})
        got = await post(running.url, wants)
        assert got.events == list(STREAM)
        assert server.questions[1].document == wants
        assert [each.prompt_tokens for each in running.events(Finished)] == [5, 5]

    run(test, server, features=Features(usage=True, extras=False))


def test_extras_are_in_the_last_event_and_nowhere_else() -> None:
    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True), headers={"X-Request-Id": "mine"})
        assert got.headers["x-request-id"] == "mine"
        assert [b"twinkeel" in each for each in got.events] == [False, False, False, True, False]
        extra = json.loads(got.events[3][6:])["twinkeel"]
        assert extra["request_id"] == "mine"
        assert got.events[:3] == list(STREAM[:3])
        got = await post(running.url, chat())
        assert got.document["twinkeel"]["request_id"] == got.headers["x-request-id"]
        assert "Server-Timing" in got.headers

    run(test, Server())


def test_every_endpoint_is_passed_on() -> None:
    async def test(running: Core) -> None:
        for path, document in (
            (CHAT, chat()),
            (COMPLETIONS, completion()),
            (EMBEDDINGS, {"model": "m", "input": ["a", "b"]}),
        ):
            assert (await post(running.url, document, path)).status == 200

    run(test, Server())


def test_choices_that_end_one_after_the_other_all_come() -> None:
    events = [
        delta("a", index=0), delta("b", index=1), delta(None, "stop", 0), delta("c", index=1),
        delta(None, "stop", 1), DONE,
    ]  # fmt: skip

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True, n=2))
        assert got.events == events

    run(test, answering(*events), features=PLAIN)


def test_a_last_event_that_holds_text_is_delivered() -> None:
    events = [ROLE, delta("all of it", "length"), DONE]

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True))
        assert got.events == events
        assert len(running.events(FirstToken)) == 1

    run(test, answering(*events), features=PLAIN)


def test_a_stream_answered_in_one_piece_is_streamed() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = whole(None)
    answer["choices"][0]["message"]["tool_calls"] = [call]

    async def test(running: Core) -> None:
        wants = chat(stream=True, stream_options={"include_usage": True})
        got = await post(running.url, wants)
        assert got.headers["Content-Type"].startswith("text/event-stream")
        assert got.events[-1] == DONE
        chunks = [json.loads(each[6:]) for each in got.events[:-1]]
        assert chunks[0]["choices"][0]["delta"]["tool_calls"][0]["function"] == call["function"]
        assert chunks[0]["choices"][0]["finish_reason"] == "stop"
        assert any(chunk.get("usage") for chunk in chunks)

    run(test, saying(answer), features=PLAIN)


def test_a_stream_that_was_not_asked_for_is_a_failure_not_an_empty_answer() -> None:
    async def test(running: Core) -> None:
        got = await post(running.url, chat())
        assert got.status == 502
        assert got.document["error"]["code"] == "malformed"

    run(test, answering(*STREAM))


@pytest.mark.parametrize("stream", [1, "true"])
def test_a_stream_that_is_asked_for_in_another_way_is_no_empty_answer(stream: object) -> None:
    """vLLM takes these as true."""

    async def script(question: Question, line: Line) -> None:
        if question.document["stream"] in (True, 1, "true"):
            await line.stream(*STREAM)
        else:
            await line.whole(whole())

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=stream))
        assert got.status == 400 or b"Good " in got.body

    run(test, Server(script))


# ---- bad answers ----

NESTED = b"[" * 5000 + b"]" * 5000
BAD_WHOLE = {
    "blank": (b"", "empty"),
    "null": (whole(None), "empty"),
    "no choices": ({"choices": []}, "empty"),
    "abort": (whole("half of", "abort"), "stream_cut"),
    "truncated": (b'{"choices": [{"message": {"con', "malformed"),
    "no UTF-8": (b'{"choices":[{"text":"\xff","finish_reason":"stop"}]}', "malformed"),
    "list": (b"[]", "malformed"),
    "error inside": ({"error": {"message": "boom", "code": 500}}, "http_5xx"),
    "out of memory": ({"error": {"message": "CUDA out of memory", "code": 500}}, "oom"),
    "nested": (b'{"choices": [], "x": ' + NESTED + b"}", "malformed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_WHOLE)
def test_a_bad_answer_is_tried_elsewhere_and_told_by_its_name(name: str) -> None:
    body, kind = BAD_WHOLE[name]
    bad, good = saying(body), Server()

    async def test(running: Core) -> None:
        got = await post(running.url, chat())
        assert got.document["choices"][0]["message"]["content"] == "Good day"
        if bad.questions:
            assert [each.kind for each in running.events(Failed)] == [kind]
        running.down(1)
        got = await post(running.url, chat())
        assert got.document["error"]["code"] == kind
        assert got.status in (502, 503)
        assert got.headers["Content-Type"].startswith("application/json")

    run(test, bad, good)


ODD_WHOLE = {
    "negative tokens": whole(usage={"prompt_tokens": -5, "completion_tokens": -1}),
    "many tokens": whole(usage={"prompt_tokens": 10**30, "completion_tokens": 10**30}),
    "endless times": whole(
        metrics={
            "queue_time_ms": 1e308, "time_to_first_token_ms": 1e308, "generation_time_ms": -1e308,
        }
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD_WHOLE)
def test_odd_figures_of_a_server_harm_nothing(name: str) -> None:
    async def test(running: Core) -> None:
        got = await post(running.url, chat())
        assert got.status in (200, 502)
        assert (await post(running.url, chat())).status in (200, 502)

    run(test, saying(ODD_WHOLE[name]))


BAD_STREAM = {
    "no end": ([ROLE, delta("a"), delta(None, "stop")], "stream_cut"),
    "no finish": ([ROLE, delta("a"), DONE], "stream_cut"),
    "abort": ([ROLE, delta("a"), delta(None, "abort"), DONE], "stream_cut"),
    "truncated": ([ROLE, delta("a"), b'data: {"choi\n\n'], "malformed"),
    "error": ([ROLE, delta("a"), event({"error": {"message": "x", "code": 500}})], "http_5xx"),
    "nested": ([ROLE, delta("a"), b'data: {"x":' + NESTED + b"}\n\n"], "malformed"),
}


@pytest.mark.parametrize("name", BAD_STREAM)
def test_what_goes_wrong_in_a_stream_is_told_in_it(name: str) -> None:
    events, kind = BAD_STREAM[name]

    async def script(_: Question, line: Line) -> None:
        await line.head()
        for each in events:
            await line.part(each)
            await asyncio.sleep(0.02)
        await line.end()

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True))
        assert got.status == 200
        assert got.events[:2] == [ROLE, delta("a")]
        assert json.loads(got.events[-1][6:])["error"]["code"] == kind
        assert DONE not in got.events
        assert [each.kind for each in running.events(Failed)] == [kind]

    run(test, Server(script))


@pytest.mark.parametrize("how", ["reset", "close", "end"])
def test_a_stream_that_breaks_off_before_the_first_token_goes_elsewhere(how: str) -> None:
    async def script(_: Question, line: Line) -> None:
        await line.head()
        await line.part(ROLE)
        await asyncio.sleep(0.02)
        if how == "end":
            await line.end()
        else:
            line.reset() if how == "reset" else line.close()

    bad = Server(script)

    async def test(running: Core) -> None:
        for _ in range(2):
            got = await post(running.url, chat(stream=True))
            assert got.events == [ROLE, delta("Good "), delta("day"), delta(None, "stop"), DONE]
        assert {each.kind for each in running.events(Failed)} == {"stream_cut"}

    run(test, bad, Server(), features=Features(extras=False))


BAD_HTTP = {
    "garbage": (b"garbage\r\n\r\n", "malformed"),
    "redirect": (b"HTTP/1.1 302 X\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n", "malformed"),
    "short": (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{", "stream_cut"),
    "bad chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "malformed"),
    "not packed": (
        b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
        "stream_cut",
    ),
    "half a head": (b"HTTP/1.1 200 OK\r\nContent-Le", "replica_lost"),
    "nothing": (b"", "replica_lost"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_HTTP)
def test_what_is_no_http_is_tried_elsewhere(name: str, stream: bool) -> None:
    data, kind = BAD_HTTP[name]

    async def script(_: Question, line: Line) -> None:
        await line.raw(data)
        line.close()

    bad = Server(script)

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=stream))
        assert b"Good " in got.body
        assert [each.kind for each in running.events(Failed)] == [kind]

    run(test, bad, Server(), policy=ALONE)


def test_what_came_with_the_error_in_one_write_is_delivered_or_tried_elsewhere() -> None:
    async def script(_: Question, line: Line) -> None:
        await line.head()
        await line.part(ROLE + delta("half of ") + event({"error": {"message": "x", "code": 500}}))
        await line.end()

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True))
        half = got.status == 200 and b"half of " in got.body and b'"error"' in got.body
        assert half or b"Good " in got.body

    run(test, Server(script), Server())


def test_the_servers_own_refusal_is_passed_on() -> None:
    said = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}

    async def test(running: Core) -> None:
        for stream in (False, True):
            got = await post(running.url, chat(stream=stream))
            assert (got.status, got.document) == (400, said)
        assert [each.kind for each in running.events(Failed)] == ["rejected", "rejected"]

    run(test, saying(said, 400))


def test_a_refusal_inside_a_stream_is_passed_on_as_one() -> None:
    said = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True))
        assert (got.status, got.document) == (400, said)

    run(test, answering(event(said), DONE))


# ---- callers ----


def test_a_caller_that_leaves_is_taken_off_its_server() -> None:
    gone = 0

    async def script(question: Question, line: Line) -> None:
        nonlocal gone
        if question.document.get("stream"):
            await line.head()
            await line.part(ROLE)
            await line.part(delta("a"))
        await line.gone()
        gone += 1

    server = Server(script)

    async def test(running: Core) -> None:
        for document in (chat(), chat(stream=True)):
            task = asyncio.create_task(post(running.url, document))
            asked = 1 + document.get("stream", False)
            await running.until(lambda asked=asked: len(server.questions) == asked)
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await running.until(lambda: gone == 2)
        await running.until(lambda: len(running.heard.outcomes) == 2)
        assert len(running.events(Cancelled)) == 2
        assert [settled.outcome for _, settled in running.heard.outcomes] == ["cancelled"] * 2

    run(test, server, policy=ALONE)


def test_a_caller_that_leaves_while_it_waits_is_forgotten() -> None:
    server = Server(silent)

    async def test(running: Core) -> None:
        first = asyncio.create_task(post(running.url, chat()))
        await running.until(lambda: server.questions)
        waiting = [asyncio.create_task(post(running.url, chat(stream=True))) for _ in range(3)]
        await running.until(lambda: running.driver.open == 4)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await running.until(lambda: running.driver.open == 1)
        assert len(server.questions) == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    run(test, server, policy=ALONE, up={"max_num_seqs": 1})


async def flood(_: Question, line: Line) -> None:
    """A stream without an end."""
    await line.head()
    with contextlib.suppress(ConnectionError):
        while True:
            await line.part(delta("y" * 4000))


@pytest.mark.parametrize("taken", [0, 200_000, 3_000_000])
def test_a_caller_that_reads_no_more_is_let_go(taken: int) -> None:
    """The server is not to blame: its stream counts as held up."""

    async def test(running: Core) -> None:
        loop = asyncio.get_running_loop()
        with await stalled_caller(running, chat(stream=True)) as caller:
            blocked = running.driver.streams.blocked
            await running.until(lambda: blocked.get(0), 20.0)
            left = taken
            while left > 0:
                left -= len(await loop.sock_recv(caller, min(left, 65_536)))
                await asyncio.sleep(0)
            await running.until(lambda: blocked.get(0), 20.0)
            await running.until(lambda: not running.driver.open, 20.0)
        assert [each.outcome for each in running.outcomes()] == ["cancelled"]

    run(test, Server(flood), limits=Limits(unread_s_most=3.0), policy=ALONE)


async def stalled_caller(running: Core, document: dict[str, Any]) -> socket.socket:
    """One that has asked and reads nothing."""
    host, port = running.url.removeprefix("http://").split(":")
    loop = asyncio.get_running_loop()
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    caller.setblocking(False)
    await loop.sock_connect(caller, (host, int(port)))
    await loop.sock_sendall(caller, raw_request(json.dumps(document).encode()))
    return caller


def test_a_caller_that_does_not_read_the_end_is_let_go() -> None:
    begun: list[Core] = []

    async def script(_: Question, line: Line) -> None:
        await line.head()
        (call,) = begun[0].driver.calls.values()
        while not call.web.protocol.writing_paused:
            await line.part(delta("y" * 4000))
            await asyncio.sleep(0)
        await line.part(delta(None, "stop") + DONE)
        await line.end()

    async def test(running: Core) -> None:
        begun.append(running)
        with await stalled_caller(running, chat(stream=True)):
            await running.until(running.outcomes)
            await running.until(lambda: not running.driver.open, 20.0)
        assert len(running.outcomes()) == 1

    run(test, Server(script), limits=Limits(unread_s_most=0.5), policy=ALONE)


def test_a_caller_that_does_not_read_a_whole_answer_is_let_go() -> None:
    async def test(running: Core) -> None:
        with await stalled_caller(running, chat()):
            await running.until(running.outcomes)
            await running.until(lambda: not running.driver.open, 20.0)

    server = saying(whole("y" * 20_000_000))
    run(test, server, limits=Limits(unread_s_most=0.5), policy=ALONE)


def test_a_slow_reader_gets_every_byte() -> None:
    events = [delta(f"{number:05d}" + "z" * 2000) for number in range(1500)]

    async def script(_: Question, line: Line) -> None:
        await line.head()
        for each in events:
            await line.part(each)
        await line.part(delta(None, "stop") + DONE)
        await line.end()

    async def test(running: Core) -> None:
        async with (
            aiohttp.ClientSession(read_bufsize=1024) as session,
            session.post(running.url + CHAT, json=chat(stream=True)) as answer,
        ):
            await asyncio.sleep(0.5)
            body = await answer.read()
        assert body == b"".join(events) + delta(None, "stop") + DONE

    run(test, Server(script), features=PLAIN, policy=ALONE)


def test_silence_is_filled_with_comments_between_whole_events() -> None:
    async def script(_: Question, line: Line) -> None:
        await line.head()
        first = ROLE + delta("a")
        await asyncio.sleep(0.8)
        await line.part(first[:40])
        await asyncio.sleep(0.8)
        await line.part(first[40:])
        await asyncio.sleep(0.8)
        await line.part(delta(None, "stop") + DONE)
        await line.end()

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True))
        comments = [each for each in got.events if each.startswith(b":")]
        assert len(comments) >= 3
        rest = [each for each in got.events if not each.startswith(b":")]
        assert rest == [ROLE, delta("a"), delta(None, "stop"), DONE]
        assert got.events[0].startswith(b":")

    run(test, Server(script), limits=Limits(comment_s=0.2), features=PLAIN, policy=ALONE)


def test_a_failure_after_a_comment_is_told_in_the_stream_or_goes_elsewhere() -> None:
    async def slow_failure(_: Question, line: Line) -> None:
        await asyncio.sleep(2.6)
        await line.whole({"error": {"message": "boom"}}, 500)

    async def test(running: Core) -> None:
        got = await post(running.url, chat(stream=True))
        assert got.status == 200
        assert got.events[0].startswith(b":")
        assert json.loads(got.events[-1][6:])["error"]["code"] == "http_5xx"

    run(test, Server(slow_failure), limits=Limits(comment_s=0.2), policy=ALONE)


# ---- odd requests ----


def test_bytes_in_headers_that_are_no_text_harm_nothing() -> None:
    names = [
        "x-twinkeel-user", "x-twinkeel-line", "x-twinkeel-session", "x-twinkeel-chain",
        "x-twinkeel-step", "x-twinkeel-resume", "x-twinkeel-sla", "x-twinkeel-deadline-ms",
        "x-request-id", "traceparent", "tracestate", "Authorization", "Content-Type", "X-Other",
    ]  # fmt: skip
    body = json.dumps(chat()).encode()

    async def test(running: Core) -> None:
        for name in names:
            for value in (b"\xff", b"a\xc3", b"\xc3\xa9", b"a\tb"):
                got = await exchange(running.url, raw_request(body, name.encode() + b": " + value))
                assert got.split(b" ")[1] in (b"200", b"400"), (name, value, got)
        running.records()  # they can be written

    run(test, Server())


def test_a_body_that_is_not_what_it_says_is_the_callers_mistake() -> None:
    body = json.dumps(chat()).encode()

    async def test(running: Core) -> None:
        got = await exchange(running.url, raw_request(body, b"Content-Encoding: gzip"))
        assert got.split(b" ")[1] == b"400"
        assert b"invalid_request_error" in got
        packed = gzip.compress(body)
        got = await exchange(running.url, raw_request(packed, b"Content-Encoding: gzip"))
        assert got.split(b" ")[1] == b"200"
        bomb = gzip.compress(b" " * 4_000_000)
        got = await exchange(running.url, raw_request(bomb, b"Content-Encoding: gzip"))
        assert got.split(b" ")[1] in (b"400", b"413")

    run(test, Server(), limits=Limits(body_bytes_most=1_000_000))


def test_bodies_too_long_or_too_slow_are_refused() -> None:
    async def test(running: Core) -> None:
        got = await post(running.url, b" " * 2000)
        assert (got.status, got.document["error"]["code"]) == (413, "body_too_long")
        slow = raw_request(b"x" * 100)[:-50]
        got_raw = await exchange(running.url, slow)
        assert got_raw.split(b" ")[1] == b"408"
        assert b"slow_body" in got_raw

    run(test, Server(), limits=Limits(body_bytes_most=1000, body_s_most=0.2))


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PUT", "DELETE"])
def test_other_methods_are_refused_in_openais_shape(method: str) -> None:
    async def test(running: Core) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.request(method, running.url + CHAT) as answer:
                assert answer.status == 405
                assert answer.headers["Allow"] == "POST"
                if method != "HEAD":
                    assert (await answer.json())["error"]["code"] == "method_not_allowed"
            async with session.get(running.url + "/nowhere") as answer:
                assert (await answer.json())["error"]["type"] == "not_found_error"

    run(test, Server())


def test_http_1_0_is_served() -> None:
    async def test(running: Core) -> None:
        body = json.dumps(chat(stream=True)).encode()
        got = await exchange(running.url, raw_request(body, version="1.0"))
        head, _, stream = got.partition(b"\r\n\r\n")
        assert b"chunked" not in head.lower()
        assert stream == b"".join(STREAM[:4]) + DONE
        body = json.dumps(chat()).encode()
        got = await exchange(running.url, raw_request(body, version="1.0"))
        assert json.loads(got.partition(b"\r\n\r\n")[2])["choices"]

    run(test, Server(), features=Features(extras=False))


def test_nested_bodies_are_answered_or_refused() -> None:
    async def test(running: Core) -> None:
        for depth in (100, *range(880, 992)):
            body = b'{"model":"m","messages":[{"role":"user","content":"Hi"}],"x":%s}'
            got = await post(running.url, body % (b"[" * depth + b"]" * depth))
            assert got.status in (200, 400), depth

    run(test, Server())


def test_an_unknown_model_is_the_callers_mistake() -> None:
    async def test(running: Core) -> None:
        got = await post(running.url, chat(model="other"))
        assert (got.status, got.document["error"]["code"]) == (404, "model_not_found")
        running.down(0)
        got = await post(running.url, chat())
        assert got.status == 503
        assert int(got.headers["Retry-After"]) >= 1
        assert got.document["error"]["code"] == "no_replica"

    run(test, Server())


def test_the_list_of_models_and_readiness() -> None:
    async def test(running: Core) -> None:
        async with aiohttp.ClientSession() as session:
            async with session.get(running.url + "/v1/models") as answer:
                assert [each["id"] for each in (await answer.json())["data"]] == ["m", "n"]
            async with session.get(running.url + "/ready") as answer:
                assert answer.status == 200
            running.driver.draining = True
            async with session.get(running.url + "/ready") as answer:
                assert answer.status == 503
            async with session.get(running.url + "/health") as answer:
                assert answer.status == 200
            running.gateway.closed = True
            got = await post(running.url, chat())
            assert (got.status, got.document["error"]["code"]) == (503, "draining")

    run(test, Server(), models=("m", "n"))


def test_no_more_than_so_many_requests_are_open() -> None:
    release = asyncio.Event()

    async def script(_: Question, line: Line) -> None:
        await release.wait()
        await line.whole(whole())

    async def test(running: Core) -> None:
        first = asyncio.create_task(post(running.url, chat()))
        await running.until(lambda: running.driver.open == 1)
        got = await post(running.url, chat())
        assert (got.status, got.document["error"]["code"]) == (503, "too_many")
        assert got.headers["Retry-After"] == "1"
        release.set()
        assert (await first).status == 200
        assert (await post(running.url, chat())).status == 200

    run(test, Server(script), limits=Limits(open_most=1))


def test_with_api_keys_only_tenants_are_served() -> None:
    key = new_key()
    keys = Keys([Entry(digest_of(key), "shop", sla="P0", line="sales")])
    server = Server()

    async def test(running: Core) -> None:
        for headers in ({}, {"Authorization": "Bearer tk-wrong"}, {"Authorization": key}):
            got = await post(running.url, chat(), headers=headers)
            assert got.status == 401
            assert got.document["error"]["code"] == "invalid_api_key"
        got = await post(running.url, chat(), headers={"Authorization": f"Bearer {key}"})
        assert got.status == 200
        assert "authorization" not in server.questions[0].headers
        (arrived,) = running.events(Arrived)
        assert (arrived.user, arrived.sla, arrived.line) == ("shop", "P0", "sales")
        async with (
            aiohttp.ClientSession() as session,
            session.get(running.url + "/v1/models") as answer,
        ):
            assert answer.status == 401

    run(test, server, keys=keys)


def test_without_api_keys_the_callers_goes_to_the_server() -> None:
    server = Server()

    async def test(running: Core) -> None:
        headers = {"Authorization": "Bearer x", "traceparent": "00-1-2-01", "Cookie": "a=b"}
        await post(running.url, chat(), headers=headers)
        passed = server.questions[0].headers
        assert passed["authorization"] == "Bearer x"
        assert "cookie" not in passed
        assert passed["x-request-id"].startswith("tk-")

    run(test, server)


# ---- chains ----


async def step(running: Core, name: str, chain: str = "c", **more: Any) -> Got:
    headers = {"x-twinkeel-chain": chain, "x-twinkeel-step": name}
    headers |= {f"x-twinkeel-{key}": value for key, value in more.items() if key != "stream"}
    return await post(running.url, chat(stream=more.get("stream", False)), headers=headers)


def counting() -> Server:
    """Each of its answers says its number."""
    count = 0

    async def script(question: Question, line: Line) -> None:
        nonlocal count
        count += 1
        if question.document.get("stream"):
            await line.stream(ROLE, delta("answer "), delta(f"{count}"), delta(None, "stop"), DONE)
        else:
            await line.whole(whole(f"answer {count}"))

    return Server(script)


def test_a_step_that_is_done_is_not_paid_for_again() -> None:
    server = counting()

    async def test(running: Core) -> None:
        first = await step(running, "plan")
        again = await step(running, "plan")
        assert len(server.questions) == 1
        assert first.document["choices"] == again.document["choices"]
        assert again.headers["x-twinkeel-checkpoint"] == first.headers["x-twinkeel-checkpoint"]
        streamed = await step(running, "plan", stream=True)
        assert b"answer 1" in streamed.body
        assert streamed.events[-1] == DONE
        assert len(server.questions) == 1

    run(test, server)


def test_a_streamed_step_is_given_again() -> None:
    server = counting()

    async def test(running: Core) -> None:
        first = await step(running, "plan", stream=True)
        assert b"answer " in first.body
        for stream in (False, True):
            again = await step(running, "plan", stream=stream)
            assert again.status == 200
            assert b"answer " in again.body, again.body
            assert b"1" in again.body

    run(test, server)


def test_two_users_may_call_their_chains_and_steps_the_same() -> None:
    async def test(running: Core) -> None:
        await step(running, "plan", user="ann")
        await step(running, "plan", user="bob")
        again = await step(running, "plan", user="ann")
        assert again.document["choices"][0]["message"]["content"] == "answer 1"

    run(test, counting())


def test_a_chain_resumed_under_another_name_has_the_steps_before() -> None:
    async def test(running: Core) -> None:
        first = await step(running, "plan", "old")
        checkpoint = first.headers["x-twinkeel-checkpoint"]
        again = await step(running, "plan", "new", resume=checkpoint)
        assert again.document["choices"][0]["message"]["content"] == "answer 1"

    run(test, counting())


def test_a_store_that_fails_costs_no_answer() -> None:
    async def test(running: Core) -> None:
        first = await step(running, "plan")
        assert "x-twinkeel-checkpoint" in first.headers
        store: Any = running.chains
        await store._run(lambda: store._checkpoints._db.execute("DROP TABLE checkpoints"))
        second = await step(running, "act")
        assert second.document["choices"][0]["message"]["content"] == "answer 2"
        again = await step(running, "plan")
        assert again.status < 500 or again.status == 503
        assert again.headers["Content-Type"].startswith("application/json")

    run(test, counting())


def test_a_stream_that_its_chains_budget_ends_says_so() -> None:
    async def script(_: Question, line: Line) -> None:
        await line.head()
        await line.part(ROLE + delta("half of "))
        await line.gone()

    async def test(running: Core) -> None:
        got = await step(running, "plan", stream=True)
        assert b"half of " in got.body
        assert running.outcomes()[0].why == "chain_budget"
        # A clean end with nothing more would look like a whole answer.
        assert b"chain_budget" in got.events[-1] or b"chain_budget" in got.events[-2]

    budget = {"chains": {"default": {"budget_ms": 3000}}}
    run(test, Server(script), policy=ALONE | budget)


# ---- an open breaker ----


def cut_off(*actions: str) -> dict[str, Any]:
    """One failure opens the model's breaker, for the rest of the test."""
    rule = {
        "name": "any",
        "kinds": ["http_5xx"],
        "consecutive_least": 1,
        "consecutive_ms": 0,
        "open_ms": 30_000,
    }
    return ALONE | {
        "breakers": {"rules": [rule], "actions": list(actions)},
        "retries": {"tries_most": 1},
        "tiers": {"fallback_model": "light"},
    }


def failing_later(good_answers: int) -> Server:
    """So many good answers, then failures of model m; model light is well."""
    left = good_answers

    async def script(question: Question, line: Line) -> None:
        nonlocal left
        if question.document["model"] == "light":
            await good(question, line)
        elif left:
            left -= 1
            await line.whole(whole("kept answer"))
        else:
            await line.whole({"error": {"message": "boom"}}, 500)

    return Server(script)


async def opened(running: Core) -> None:
    """Keep an answer to the usual question, and open the breaker with another."""
    assert (await post(running.url, chat())).status == 200
    assert (await post(running.url, chat(seed=2, temperature=2))).status == 502


@pytest.mark.parametrize("stream", [False, True])
def test_behind_an_open_breaker_the_same_question_gets_the_kept_answer(stream: bool) -> None:
    async def test(running: Core) -> None:
        await opened(running)
        got = await post(running.url, chat(stream=stream))
        assert (got.status, got.headers["x-twinkeel-outcome"]) == (200, "degraded")
        assert got.headers["x-twinkeel-degraded"] == "cached"
        assert b"kept answer" in got.body
        said = json.loads(got.events[-2][6:]) if stream else got.document
        assert said["twinkeel"]["degraded"] == "cached"
        assert said["twinkeel"]["age_s"] > 0
        if stream:
            assert got.headers["Content-Type"].startswith("text/event-stream")
            assert got.events[-1] == DONE

    run(test, failing_later(1), policy=cut_off("cached"))


@pytest.mark.parametrize("stream", [False, True])
def test_behind_an_open_breaker_a_lighter_model_answers(stream: bool) -> None:
    async def test(running: Core) -> None:
        await opened(running)
        got = await post(running.url, chat(stream=stream, messages=[{"content": "other"}]))
        assert (got.status, b"Good " in got.body) == (200, True)
        assert b'"degraded":"model light"' in got.body
        if stream:
            assert got.events[-1] == DONE

    run(test, failing_later(1), policy=cut_off("cached", "lighter"), models=("m", "light"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_behind_an_open_breaker_a_template_says_so(stream: bool, path: str) -> None:
    async def test(running: Core) -> None:
        await opened(running)
        document = chat(stream=stream) if path == CHAT else completion(stream=stream)
        got = await post(running.url, document, path)
        assert (got.status, got.headers["x-twinkeel-degraded"]) == (200, "template")
        assert got.headers["x-request-id"].encode() in got.body
        if stream:
            assert got.events[-1] == DONE
            assert json.loads(got.events[0][6:])["choices"][0]["finish_reason"] == "stop"
        else:
            assert got.document["choices"][0]["finish_reason"] == "stop"

    run(test, failing_later(1), policy=cut_off("template"))


def test_behind_an_open_breaker_with_nothing_left_it_is_refused() -> None:
    async def test(running: Core) -> None:
        await opened(running)
        for stream in (False, True):
            got = await post(running.url, chat(stream=stream))
            assert got.status == 503
            assert got.document["error"]["code"].startswith("breaker")
            assert int(got.headers["Retry-After"]) >= 1

    run(test, failing_later(1), policy=cut_off())


# ---- confidence ----


def logprobs(*pairs: tuple[float, float]) -> dict[str, Any]:
    """Of tokens, the two likeliest candidates each."""
    return {
        "content": [
            {
                "token": "x",
                "logprob": pair[0],
                "top_logprobs": [{"token": "x", "logprob": at} for at in pair],
            }
            for pair in pairs
        ]
    }


SURE, UNSURE = (-0.001, -8.0), (-0.69, -0.70)
CONFIDENT = Features(confidence=True)


def scored(text: str, *pairs: tuple[float, float]) -> dict[str, Any]:
    answer = whole(text)
    answer["choices"][0]["logprobs"] = logprobs(*pairs)
    return answer


def test_logprobs_are_asked_for_and_taken_out_again() -> None:
    async def script(question: Question, line: Line) -> None:
        if question.document.get("stream"):
            said = [delta("Good day", logprobs=logprobs(SURE)), delta(None, "stop", logprobs=None)]
            await line.stream(ROLE, *said, DONE)
        else:
            await line.whole(scored("Good day", SURE))

    server = Server(script)

    async def test(running: Core) -> None:
        got = await post(running.url, chat())
        assert server.questions[0].document["logprobs"] is True
        assert server.questions[0].document["top_logprobs"] == 20
        assert got.document["choices"][0]["logprobs"] is None
        assert got.document["twinkeel"]["confidence_score"] > 0.9
        got = await post(running.url, chat(stream=True))
        assert b"top_logprobs" not in got.body
        assert json.loads(got.events[-2][6:])["twinkeel"]["confidence_score"] > 0.9
        got = await post(running.url, chat(logprobs=True, top_logprobs=2))
        assert got.document["choices"][0]["logprobs"] == logprobs(SURE)

    run(test, server, features=CONFIDENT)


VERIFYING: dict[str, Any] = {
    "confidence": {
        "verify_below_permille": 950, "degrade_below_permille": 1, "budget_permille": 1000,
        "burst_tokens": 100_000,
    },
    "health": {"enabled": False},
}  # fmt: skip


def doubtful(second: dict[str, Any] | None) -> Callable[[Question, Line], Awaitable[None]]:
    """First runs are unsure; a second run gets ``second``, or nothing."""

    async def script(question: Question, line: Line) -> None:
        if "-second" not in question.headers["x-request-id"]:
            await line.whole(scored("The answer is 42", SURE, UNSURE, SURE))
        elif second is not None:
            await line.whole(second)
        else:
            await line.gone()

    return script


@pytest.mark.parametrize(
    ("text", "outcome", "verification"),
    [("The answer is 42", "answered", "match"), ("No, it is 17", "degraded", "mismatch")],
)
def test_a_doubtful_answer_is_run_again(text: str, outcome: str, verification: str) -> None:
    script = doubtful(whole(text))

    async def test(running: Core) -> None:
        for _ in range(3):  # the budget for a second run fills with what is served
            got = await post(running.url, chat())
            assert got.status == 200
        assert got.headers["x-twinkeel-verification"] == verification
        assert got.headers["x-twinkeel-outcome"] == outcome
        assert got.document["twinkeel"]["verification_status"] == verification

    run(test, Server(script), Server(script), features=CONFIDENT, policy=VERIFYING)


def test_a_caller_that_leaves_during_the_second_run_ends_it() -> None:
    script = doubtful(None)
    servers = Server(script), Server(script)

    def seconds() -> int:
        asked = [each for server in servers for each in server.questions]
        return sum("-second" in each.headers["x-request-id"] for each in asked)

    async def test(running: Core) -> None:
        while not seconds():
            task = asyncio.create_task(post(running.url, chat()))
            await running.until(lambda task=task: task.done() or seconds())
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await running.until(lambda: not running.driver.calls)

    run(test, *servers, features=CONFIDENT, policy=VERIFYING)


def test_a_second_run_on_a_server_that_goes_down_is_given_up() -> None:
    script = doubtful(None)
    servers = Server(script), Server(script)

    def seconds_at() -> list[int]:
        return [
            number for number, server in enumerate(servers)
            if any("-second" in each.headers["x-request-id"] for each in server.questions)
        ]  # fmt: skip

    async def test(running: Core) -> None:
        task: asyncio.Task[Got] | None = None
        at: list[int] = []
        while not at:
            task = asyncio.create_task(post(running.url, chat()))
            await running.until(lambda task=task: task.done() or seconds_at())
            at = seconds_at()
        assert task is not None
        running.down(at[0])
        async with asyncio.timeout(8):
            got = await task
        assert got.headers["x-twinkeel-verification"] == "skipped_budget"

    run(test, *servers, features=CONFIDENT, policy=VERIFYING)
