"""Real vLLM that fails in silence: its engine is frozen, then killed, while ``/health`` says 200.

The last of these leaves the second server dead, so this file comes last of those that need it.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.controller.asking import Answer, ask, ask_all, chat, session
from tests.controller.processes import http
from tests.controller.stories import read_story

if TYPE_CHECKING:
    from tests.controller.processes import Controller, Controllers
    from tests.live.server import Vllm

pytestmark = pytest.mark.live

STREAMS, TOKENS = 6, 2000
"""So long that none is over when all have begun, on whatever machine."""
SILENT_S = 10
"""No server that is only short of a processor says nothing for so long."""
GRACE_S = 30.0
"""Of the policy that is patient with everything."""
BEGUN_S = 300.0


async def _struck(
    controller: Controller, server: Vllm, number: signal.Signals, documents: int, tokens: int
) -> list[Answer]:
    """Streams are under way when the server's engine gets the signal."""
    under_way = asyncio.Semaphore(0)
    async with session() as client:
        asked = [
            asyncio.create_task(
                ask(client, controller.url, chat("tiny", f"{n}", tokens), began=under_way.release)
            )
            for n in range(documents)
        ]
        async with asyncio.timeout(BEGUN_S):
            for _ in asked:
                await under_way.acquire()
        server.signal_engine(number)
        return list(await asyncio.gather(*asked))


def _check(controller: Controller, answers: list[Answer], codes: set[str], sick: int) -> None:
    """Of those on the sick server each was told so in its stream; the others are whole."""
    story = read_story(controller.records())
    replicas = set()
    for answer in answers:
        assert answer.status == 200
        request = story.requests[int(answer.headers["x-twinkeel-request"])]
        replicas.add(request.tries[0])
        if request.tries[0] != sick:
            assert answer.good
            continue
        assert answer.error["code"] in codes
        assert not answer.done
        assert "error" in answer.chunks[-1]
        assert request.settled[0].outcome == "failed"
        assert request.settled[0].why in codes
    assert replicas == {0, 1}


def test_a_frozen_engine(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers, tmp_path: Path
) -> None:
    policy = tmp_path / "silent.yaml"
    wary = {"first_grace_ms": 1000 * SILENT_S, "stall_ms": 1000 * SILENT_S}
    document = yaml.safe_load(Path(patient).read_text())
    policy.write_text(yaml.safe_dump(document | {"health": document["health"] | wary}))
    controller = controllers([server.upstream(profile) for server in vllm], policy=str(policy))
    sick = vllm[1]
    try:
        answers = asyncio.run(_struck(controller, sick, signal.SIGSTOP, STREAMS, TOKENS))
        assert http("GET", f"{sick.url}/health")[0] == 200
        (moved,) = asyncio.run(ask_all(controller.url, [chat("tiny", "before the first", 4)]))
        assert moved.good
    finally:
        sick.signal_engine(signal.SIGCONT)
    controller.stop()
    _check(controller, answers, {"silent"}, 1)


def test_a_killed_engine(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers
) -> None:
    """vLLM ends such streams with an error event, ``[DONE]`` and a clean end, all under a 200."""
    controller = controllers([server.upstream(profile) for server in vllm], policy=patient)
    answers = asyncio.run(_struck(controller, vllm[1], signal.SIGKILL, STREAMS, TOKENS))
    began_s = time.monotonic()
    after = asyncio.run(ask_all(controller.url, [chat("tiny", f"{n}", 4) for n in range(6)]))
    assert all(answer.good for answer in after), "the other server takes it all"
    assert time.monotonic() - began_s < GRACE_S, "nobody has waited for the dead one"
    controller.stop()
    _check(controller, answers, {"http_5xx", "stream_cut"}, 1)
