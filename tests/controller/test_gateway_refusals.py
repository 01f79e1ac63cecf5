"""Who is not served is told why: 429 while others go first, 503 when nothing can serve."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

from tests.controller.asking import Answer, ask, ask_all, chat, session
from tests.controller.inprocess import story_of
from tests.controller.processes import MODEL, eventually, http

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Controllers, Twin


def test_429_tells_when_to_come_again_and_why(twins: list[Twin], tmp_path: Path) -> None:
    async def play(url: str) -> None:
        async with session() as client:
            first = asyncio.create_task(ask(client, url, chat(MODEL, "long", 300)))
            await asyncio.sleep(0.3)
            deadline = {"x-twinkeel-deadline-ms": "200"}
            late = [
                await ask(client, url, chat(MODEL, "?", 4, stream=each), deadline)
                for each in (True, False)
            ]
            assert (await first).good
        for answer in late:
            assert answer.status == 429
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.error["code"] == "deadline"
            assert answer.error["type"] == "rate_limit_error"
            assert answer.headers["x-twinkeel-outcome"] == "shed"

    upstream = {"url": twins[0].url, "max_num_seqs": 1}
    story = story_of([upstream], tmp_path, play)
    assert [request.tries for request in story.requests.values()] == [[0], [], []]


def test_503_only_when_nothing_can_serve(twins: list[Twin], controllers: Controllers) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        nobody = f"http://127.0.0.1:{held.getsockname()[1]}"
    controller = controllers([nobody], wait=False)
    assert http("GET", f"{controller.url}/ready")[0] == 503
    (answer,) = asyncio.run(ask_all(controller.url, [chat(MODEL, "?", 4)]))
    assert answer.status == 503
    assert int(answer.headers["Retry-After"]) >= 1
    assert answer.error["code"] == "no_replica"
    assert answer.error["type"] == "service_unavailable_error"

    served = controllers([twins[0].url, nobody], wait=False)
    served.wait_up(1)
    eventually("it is ready", lambda: http("GET", f"{served.url}/ready")[0] == 200)
    answers: list[Answer] = asyncio.run(ask_all(served.url, [chat(MODEL, "?", 4)] * 4))
    assert all(answer.good for answer in answers)
