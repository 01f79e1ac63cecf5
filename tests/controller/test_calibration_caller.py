"""The caller against servers that do not do what they should."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import TYPE_CHECKING

import pytest
from aiohttp import web

from controller.calibration import CalibrationError
from controller.calibration.caller import Caller
from controller.calibration.plan import Ask, Phase, Room
from controller.calibration.server import Server
from traces.steps import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from controller.calibration.caller import Sent

ROOM = Room(
    ServerSettings(
        max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256, block_tokens=16, kv_blocks=12
    )
)


def play(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], phase: Phase
) -> tuple[list[Sent], Caller]:
    """Let a server with that handler meet a phase."""

    async def run() -> tuple[list[Sent], Caller]:
        app = web.Application()
        app.router.add_post("/v1/completions", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            async with Server(f"http://{host}:{port}") as server:
                caller = Caller(server, "m", ROOM, Random(1))  # noqa: S311
                return await caller.play(phase), caller
        finally:
            await runner.cleanup()

    return asyncio.run(run())


async def completion(request: web.Request) -> web.Response:
    body = await request.json()
    many = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
    return web.json_response({"usage": {"completion_tokens": body["max_tokens"] * len(many)}})


def test_requests_are_what_the_phase_says() -> None:
    seen: list[tuple[str, dict[str, object]]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.headers["X-Request-Id"], json.loads(await request.text())))
        return await completion(request)

    sent, caller = play(handler, Phase("decode-3-16", (Ask(16, 5, logprobs=True, prompts=3),)))
    ((id, body),) = seen
    assert id == sent[0].id == "cal.decode-3-16.1"
    assert body["ignore_eos"] is True
    assert (body["max_tokens"], body["logprobs"]) == (5, 5)
    prompts = body["prompt"]
    assert isinstance(prompts, list)
    assert [len(prompt) for prompt in prompts] == [16, 16, 16]
    assert all(10 <= token < 3000 for prompt in prompts for token in prompt)
    assert prompts[0] != prompts[1]
    assert (caller.sequences, sent[0].ttft_ns) == (3, None)


def test_a_connection_that_is_dropped_before_the_answer_is_tried_once_more() -> None:
    calls = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        if calls == 1:
            assert request.transport is not None
            request.transport.close()
        return await completion(request)

    sent, caller = play(handler, Phase("api", (Ask(4, 1),), one_by_one=True))
    assert (calls, len(sent), caller.sequences) == (2, 1, 1)


def test_a_server_that_drops_every_connection_is_given_up() -> None:
    calls = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal calls
        calls += 1
        assert request.transport is not None
        request.transport.close()
        return await completion(request)

    with pytest.raises(CalibrationError, match=r"cal\.api\.1: no answer from .*disconnected"):
        play(handler, Phase("api", (Ask(4, 1),), one_by_one=True))
    assert calls == 2


def test_a_stream_without_its_end_is_an_error_and_is_not_asked_for_again() -> None:
    calls = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal calls
        calls += 1
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"choices": []}\n\n')
        return answer

    with pytest.raises(CalibrationError, match="the stream broke off"):
        play(handler, Phase("api", (Ask(4, 1, stream=True),), one_by_one=True))
    assert calls == 1


def test_a_model_may_say_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"choices": [{"text":"error"}]}\n\ndata: [DONE]\n\n')
        return answer

    sent, _ = play(handler, Phase("api", (Ask(4, 1, stream=True),), one_by_one=True))
    assert len(sent) == 1


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (web.Response(status=503, text="full"), "answered 503: full"),
        (web.json_response({"usage": {"completion_tokens": 2}}), "asked for 1 tokens, got 2"),
        (web.Response(text="hello"), "no completion: hello"),
    ],
)
def test_a_wrong_answer_is_shown(answer: web.Response, told: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return answer

    with pytest.raises(CalibrationError, match=told):
        play(handler, Phase("api", (Ask(4, 1),), one_by_one=True))


def test_never_more_is_under_way_than_the_pool_holds() -> None:
    under_way = most = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.02)
        under_way -= 1
        return await completion(request)

    # 10 blocks of 16 tokens are used at most; each takes 3.
    sent, _ = play(handler, Phase("check", (Ask(40, 8),) * 9))
    assert len(sent) == 9
    assert most == 3


def test_one_failure_ends_the_others() -> None:
    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        if body["max_tokens"] == 1:
            return web.Response(status=500, text="broken")
        await asyncio.sleep(3600)
        return await completion(request)

    with pytest.raises(CalibrationError, match="broken"):
        play(handler, Phase("check", (Ask(4, 2), Ask(4, 1))))
