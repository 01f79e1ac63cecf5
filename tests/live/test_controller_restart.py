"""Ends, in front of real vLLM: killed under load, and told to stop with streams open.

And no text of what passed is kept.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from policy.events import Arrived, Restored
from tests.controller.asking import Answer, ask, ask_all, chat, session
from tests.controller.processes import eventually
from tests.controller.stories import read_story

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.controller.processes import Controller, Controllers
    from tests.live.conftest import Ledger
    from tests.live.server import Vllm

pytestmark = pytest.mark.live

STREAMS = 20
BEGUN_S = 300.0
FINISH_S = 600.0
MARKER = "xyzzy-plugh-secret-marker"


async def _streams(controller: Controller, tokens: int, then: Callable[[], object]) -> list[Answer]:
    """Open streams, and do something to the controller when all are under way."""
    under_way = asyncio.Semaphore(0)
    async with session() as client:
        asked = [
            asyncio.create_task(
                ask(
                    client, controller.url, chat("tiny", f"{MARKER} {n}", tokens),
                    began=under_way.release,
                )
            )
            for n in range(STREAMS)
        ]  # fmt: skip
        async with asyncio.timeout(BEGUN_S):
            for _ in asked:
                await under_way.acquire()
        await asyncio.to_thread(then)
        return list(await asyncio.gather(*asked))


def test_told_to_stop_it_finishes_every_stream_and_keeps_no_text(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers, ledger: Ledger
) -> None:
    controller = controllers(
        [server.upstream(profile) for server in vllm], policy=patient, drain_s=FINISH_S
    )
    answers = asyncio.run(_streams(controller, 1000, controller.term))
    assert controller.process.wait(FINISH_S) == 0
    cut = sum(not answer.good for answer in answers)
    ledger.add(
        "sigterm_cut", cut, "streams", "= 0", f"of {STREAMS} open streams of vLLM, at SIGTERM"
    )
    assert cut == 0
    said = {answer.text.strip()[:30].encode() for answer in answers}
    files = [path for path in controller.folder.rglob("*") if path.is_file()]
    recorded = [path for path in files if path.suffix == ".parquet"]
    assert recorded
    seen = [path.read_bytes() for path in files]
    seen += [repr(pq.read_table(path).to_pylist()).encode() for path in recorded]
    for content in seen:
        assert MARKER.encode() not in content
        assert not any(text in content for text in said if len(text) > 20)


def test_killed_under_load_nothing_else_is_lost(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers
) -> None:
    controller = controllers([server.upstream(profile) for server in vllm], policy=patient)

    def arrived() -> int:
        return sum(isinstance(each.event, Arrived) for each in controller.records())

    def kill() -> None:
        eventually("the log has them all", lambda: arrived() == STREAMS)
        controller.kill()

    # So long that none is over before all have begun, on whatever machine.
    answers = asyncio.run(_streams(controller, 2000, kill))
    assert all(answer.status == 200 for answer in answers)
    assert not any(answer.clean for answer in answers), "a closed connection, no clean end"
    eventually("vLLM is idle", lambda: not any(server.busy for server in vllm), 60.0)
    again = controllers.again(controller.settings, controller.folder)
    (fine,) = asyncio.run(ask_all(again.url, [chat("tiny", "again", 4)]))
    assert fine.good
    again.stop()
    records = again.records()
    assert sum(isinstance(record.event, Restored) for record in records) == 1
    settled = [request.settled for request in read_story(records).requests.values()]
    assert all(len(each) == 1 for each in settled)
    lost = sum(each[0].why == "controller_lost" for each in settled)
    assert lost == STREAMS
