"""The benchmarks' client and mock server against each other, and processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from tests.bench.gateway.chaos import MISHAPS, plan
from tests.bench.gateway.client import Client
from tests.bench.gateway.load import CHAT, chat, closed_loop, open_loop
from tests.bench.gateway.mock import ANSWER_S, EVENT_S, EVENTS, Counts, Server
from tests.bench.gateway.process import Process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@asynccontextmanager
async def mocked() -> AsyncIterator[tuple[Client, Counts]]:
    loop = asyncio.get_running_loop()
    counts = Counts()
    server = await loop.create_server(lambda: Server(counts, loop), "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client, counts
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def saying(*pieces: bytes, close: bool = True) -> AsyncIterator[Client]:
    """A server that answers anything with these bytes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        if not close:
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


def test_whole_answers_and_streams_on_kept_connections() -> None:
    async def run() -> None:
        async with mocked() as (client, counts):
            whole = await client.ask(CHAT, chat(16))
            assert (whole.kind, whole.status) == ("ok", 200)
            assert whole.latency_s >= ANSWER_S - 0.002
            assert json.loads(whole.body)["usage"]["completion_tokens"] == 16
            stream = await client.ask(CHAT, chat(50, stream=True, usage=True))
            assert stream.kind == "ok"
            assert stream.body.count(b'"content":" word"') == EVENTS
            assert b'"usage":{' in stream.body
            assert stream.latency_s >= ANSWER_S + (EVENTS - 1) * EVENT_S - 0.002
            assert stream.first_s - stream.sent_s < stream.latency_s / 2
            plain = await client.ask(CHAT, chat(50, stream=True))
            assert b'"usage":{' not in plain.body
            assert (counts.requests, counts.open, counts.left) == (3, 0, 0)
            assert len(client._all) == 1  # all on one connection

    asyncio.run(run())


def test_logprobs_come_when_they_are_asked_for() -> None:
    async def run() -> None:
        async with mocked() as (client, _):
            body = chat(16, logprobs=True, top_logprobs=5)
            answer = json.loads((await client.ask(CHAT, body)).body)
            assert len(answer["choices"][0]["logprobs"]["content"]) == 16
            page = await client.get("/v1/models")
            assert json.loads(page.body)["data"][0]["twinkeel_profile"] == "h100-sxm/qwen3-8b"
            assert (await client.get("/nowhere")).kind == "http_404"

    asyncio.run(run())


def test_loops_send_what_they_are_told_to() -> None:
    async def run() -> None:
        async with mocked() as (client, counts):
            requests = [client.request("POST", CHAT, chat(16, text=str(n))) for n in range(3)]
            began_s = time.monotonic()
            answers = await open_loop(client, requests, 200.0, 40)
            assert 0.19 <= time.monotonic() - began_s < 2.0
            assert [answer.kind for answer in answers] == ["ok"] * 40
            answers = await closed_loop(client, requests, 4, 0.1)
            assert 4 <= len(answers) <= 24
            assert counts.requests == 40 + len(answers)

    asyncio.run(run())


def test_a_client_that_leaves_is_noticed() -> None:
    async def run() -> None:
        async with mocked() as (client, counts):
            heard = asyncio.Event()
            exchange = client.send(
                client.request("POST", CHAT, chat(1, mock="idle")), on_event=heard.set
            )
            await heard.wait()
            assert counts.open == 1
            exchange.leave()
            exchange.leave()
            assert (await exchange.done).kind == "left"
            await asyncio.sleep(0.02)
            assert (counts.open, counts.left) == (0, 1)
            late = client.send(client.request("POST", CHAT, chat(1, mock="idle")), timeout_s=0.05)
            assert (await late.done).kind == "timeout"

    asyncio.run(run())


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n'
ERROR = b'data: {"error":{"code":"silent"}}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(payload: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(payload), payload)


@pytest.mark.parametrize(
    ("pieces", "kind"),
    [
        ((HEAD + chunk(EVENT) + chunk(DONE) + b"0\r\n\r\n",), "ok"),
        ((HEAD[:20],), "cut"),
        ((HEAD, chunk(EVENT)[:9], chunk(EVENT)[9:] + chunk(DONE)[:-1], b"\n0\r\n", b"\r\n"), "ok"),
        ((HEAD, chunk(EVENT)), "cut"),
        ((HEAD, chunk(EVENT), b"0\r\n\r\n"), "no_end"),
        ((HEAD, chunk(EVENT), chunk(ERROR), b"0\r\n\r\n"), "error_event"),
        ((HEAD, chunk(EVENT), chunk(ERROR)), "error_event"),
        ((b"HTTP/1.1 503 Nope\r\nContent-Length: 2\r\n\r\n{}",), "http_503"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",), "cut"),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",), "empty"),
        ((b"HTTP/1.0 200 OK\r\n\r\n", b"{"), "malformed"),
        ((), "cut"),
    ],
)
def test_every_end_has_its_name(pieces: tuple[bytes, ...], kind: str) -> None:
    async def run() -> None:
        async with saying(*pieces) as client:
            assert (await client.ask("/", b"{}", timeout_s=2.0)).kind == kind

    asyncio.run(run())


def test_comments_are_no_news() -> None:
    async def run() -> None:
        pieces = [HEAD, chunk(b": waiting\n\n"), b"", b"", b"", b"", chunk(EVENT), chunk(DONE)]
        async with saying(*pieces, b"0\r\n\r\n") as client:
            answer = await client.ask("/", b"{}")
            assert answer.kind == "ok"
            assert answer.first_s - answer.sent_s >= 0.02

    asyncio.run(run())


def test_nobody_listens() -> None:
    async def run() -> None:
        async with saying() as client:
            pass
        client = Client(client.url)
        assert (await client.ask("/", b"{}")).kind == "refused"
        await client.close()

    asyncio.run(run())


def test_a_process_is_watched_and_ended(tmp_path: Path) -> None:
    program = (
        "import time\nprint('ready on http://127.0.0.1:77, it says', flush=True)\n"
        "end = time.process_time() + 0.1\nwhile time.process_time() < end: pass\n"
        "print('worked', flush=True)\ntime.sleep(60)"
    )

    async def run() -> None:
        argv = [sys.executable, "-c", program]
        running = Process(argv, {"url": r"ready on ([^ ,]+)", "w": "(worked)"}, tmp_path / "log")
        await running.start()
        assert running.said["url"] == "http://127.0.0.1:77"
        assert 0.1 <= running.cpu_s() < 2.0
        assert running.rss_bytes() > 1_000_000
        assert running.files() >= 3
        assert await running.stop(signal.SIGTERM) == -signal.SIGTERM
        assert not running.alive()
        silent = Process([sys.executable, "-c", "pass"], {"url": "never (.*)"}, tmp_path / "other")
        with pytest.raises(RuntimeError, match="ended at once"):
            await silent.start()

    asyncio.run(run())


def test_the_plan_of_mishaps_depends_on_the_seed_alone() -> None:
    assert plan(1) == plan(1)
    assert plan(1) != plan(2)
    assert sorted(plan(7)) == sorted(MISHAPS)
