"""The served twin as a process: how it starts, and how it goes away on SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = {"prompt": "p", "ignore_eos": True}


@contextmanager
def twin(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process and its URL; it is gone at the end."""
    command = [sys.executable, "-m", "twin.serve", "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("twin serving http://127.0.0.1:")
            yield process, line.split()[-1]
        finally:
            process.kill()


async def whole(session: aiohttp.ClientSession, tokens: int) -> tuple[int, dict[str, Any]]:
    async with session.post("/v1/completions", json={**PROMPT, "max_tokens": tokens}) as answer:
        return answer.status, await answer.json()


async def streamed(session: aiohttp.ClientSession, tokens: int) -> list[bytes]:
    body = {**PROMPT, "max_tokens": tokens, "stream": True}
    async with session.post("/v1/completions", json=body) as answer:
        text = await answer.read()
    return text.strip().split(b"\n\n")


async def at_work(session: aiohttp.ClientSession, requests: int) -> None:
    """Until so many requests run."""
    running = 0
    async with asyncio.timeout(20):
        while running < requests:
            async with session.get("/twin/state") as answer:
                running = (await answer.json())["running"]
            await asyncio.sleep(0.02)


def reason(event: bytes) -> str | None:
    found: str | None = json.loads(event[6:])["choices"][0]["finish_reason"]
    return found


def test_by_default_requests_in_flight_end_at_once_with_200_and_abort() -> None:
    async def run(process: subprocess.Popen[str], url: str) -> None:
        async with aiohttp.ClientSession(url) as session:
            long, stream = (
                asyncio.create_task(each)
                for each in (whole(session, 4000), streamed(session, 4000))
            )
            await at_work(session, 2)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):  # they would take longer
                status, body = await long
                events = await stream
        assert (status, body["choices"][0]["finish_reason"]) == (200, "abort")
        assert events[-1] == b"data: [DONE]"
        assert reason(events[-2]) == "abort"

    with twin() as (process, url):
        asyncio.run(run(process, url))
        assert process.wait(30) == 0


def test_with_a_shutdown_timeout_running_ones_finish_and_new_ones_get_500() -> None:
    async def run(process: subprocess.Popen[str], url: str) -> None:
        async with aiohttp.ClientSession(url) as session:
            running = [asyncio.create_task(whole(session, 1200)) for _ in range(3)]
            stream = asyncio.create_task(streamed(session, 1200))
            await at_work(session, 4)
            process.send_signal(signal.SIGTERM)
            status, body = await whole(session, 5)
            while status == 200:  # it had not heard of it yet
                status, body = await whole(session, 5)
            assert status == 500
            assert "cannot schedule new futures after shutdown" in body["error"]["message"]
            async with session.get("/health") as answer:
                assert answer.status == 200
            for status, body in await asyncio.gather(*running):
                assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
                assert body["usage"]["completion_tokens"] == 1200
            events = await stream
            assert reason(events[-2]) == "length"

    with twin("--shutdown-timeout", "60") as (process, url):
        asyncio.run(run(process, url))
        assert process.wait(30) == 0


def test_a_shutdown_timeout_that_runs_out_ends_the_rest() -> None:
    async def run(process: subprocess.Popen[str], url: str) -> None:
        async with aiohttp.ClientSession(url) as session:
            long = asyncio.create_task(whole(session, 4000))
            await at_work(session, 1)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(20):  # it would take longer
                _, body = await long
        assert body["choices"][0]["finish_reason"] == "abort"

    with twin("--shutdown-timeout", "0.5") as (process, url):
        asyncio.run(run(process, url))
        assert process.wait(30) == 0


def test_wrong_options_are_one_clear_line() -> None:
    for arguments, word in (
        (["--profile", "h100-sxm/typo"], "h100-sxm/typo"),
        (["--kv-blocks", "1"], "kv_blocks"),
    ):
        ended = subprocess.run(
            [sys.executable, "-m", "twin.serve", *arguments],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert ended.returncode == 2
        assert word in ended.stderr
        assert "Traceback" not in ended.stderr
