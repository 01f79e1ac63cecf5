"""Ends: killed under load and back again, and told to stop with streams open."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from policy.events import Arrived, FirstToken, Restored
from tests.controller.asking import Answer, ask, ask_all, chat, session
from tests.controller.processes import MODEL, eventually, http, patient
from tests.controller.stories import read_story

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Controller, Controllers, Twin

BREAKS_SOON = """\
schema: 1
name: breaks-soon
discipline: tiered
health: {enabled: false}
breakers:
  rules:
    - {name: broken, by: [line], kinds: [http_5xx], consecutive_least: 3, consecutive_ms: 0,
       open_ms: 300000, open_most_ms: 300000}
"""
BAD = {"x-twinkeel-line": "bad"}
SETTLED = 4


def _open_breakers(controller: Controller) -> list[str]:
    return [each["key"] for each in controller.status()["breakers"] if each["state"] == "open"]


async def _killed_midway(controller: Controller) -> list[Answer]:
    """Six streams are under way when it dies, and that is on the disk."""
    begun: list[None] = []

    def written() -> bool:
        events = [record.event for record in controller.records()]
        last = [event.request for event in events if isinstance(event, Arrived)][-6:]
        rows = b"".join(path.read_bytes() for path in (controller.data / "trace").glob("*.rows"))
        begun_ones = {each.request for each in events if isinstance(each, FirstToken)}
        return begun_ones >= set(last) and rows.count(b"\n") >= SETTLED

    async with session() as client:
        asked = [
            asyncio.create_task(
                ask(client, controller.url, chat(MODEL, f"{n}", 4000),
                    began=lambda: begun.append(None))
            )
            for n in range(6)
        ]  # fmt: skip
        async with asyncio.timeout(25):
            while len(begun) < 6 or not await asyncio.to_thread(written):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await asyncio.to_thread(controller.kill)
        return list(await asyncio.gather(*asked))


def test_killed_under_load_it_comes_back_as_it_was(
    twins: list[Twin], controllers: Controllers
) -> None:
    controller = controllers([twin.url for twin in twins])
    status, said = controller.put_policy(BREAKS_SOON)
    assert status == 200, said
    for twin in twins:
        twin.fault("http_500")
    asyncio.run(ask_all(controller.url, [chat(MODEL, "?", 4)] * SETTLED, BAD, gap_s=0.05))
    broken = eventually("a breaker opens", lambda: _open_breakers(controller))
    for twin in twins:
        twin.heal()
    answers = asyncio.run(_killed_midway(controller))
    assert all(answer.text for answer in answers), "they were under way"
    assert not any(answer.clean for answer in answers), "a closed connection, no clean end"
    eventually("the servers are idle", lambda: all(twin.busy == 0 for twin in twins))

    again = controllers.again(controller.settings, controller.folder)
    assert again.status()["policy"]["name"] == "breaks-soon"
    assert _open_breakers(again) == broken
    assert again.status()["open_requests"] == 0
    before = sum(twin.state()["requests"] for twin in twins)
    (still_broken,) = asyncio.run(ask_all(again.url, [chat(MODEL, "?", 4)], BAD))
    assert still_broken.headers["x-twinkeel-degraded"] == "template"
    assert sum(twin.state()["requests"] for twin in twins) == before
    (fine,) = asyncio.run(ask_all(again.url, [chat(MODEL, "!", 4)]))
    assert fine.good
    trace = again.data / "trace"
    # A stop leaves what is still being merged to the next start.
    eventually("the first run's trace is made", lambda: any(trace.glob("trace-*.parquet")), 60.0)
    again.stop()
    records = again.records()
    assert sum(isinstance(record.event, Restored) for record in records) == 1
    story = read_story(records)
    assert not story.refused
    settled = [request.settled for request in story.requests.values()]
    assert all(len(each) == 1 for each in settled)
    assert sum(each[0].why == "controller_lost" for each in settled) == 6
    traces = sorted(trace.glob("trace-*.parquet"))
    recorded = [pq.read_table(path)["request_id"].to_pylist() for path in traces]
    assert len(recorded) == 2
    assert sorted(each for ids in recorded for each in ids) == sorted(story.requests)


def test_told_to_stop_it_finishes_every_stream(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    controller = controllers(
        [twin.url for twin in twins], unready_s=5.0, drain_s=60.0, policy=patient(tmp_path)
    )
    ready = f"{controller.url}/ready"
    assert http("GET", ready)[0] == 200
    begun: list[None] = []

    async def run() -> list[Answer]:
        async with session() as client:
            asked = [
                asyncio.create_task(
                    ask(client, controller.url, chat(MODEL, f"{n}", 1000),
                        began=lambda: begun.append(None))
                )
                for n in range(20)
            ]  # fmt: skip
            async with asyncio.timeout(20):
                while len(begun) < 20:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.01)
            controller.term()
            while (await asyncio.to_thread(http, "GET", ready))[0] == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            assert (await asyncio.to_thread(http, "GET", ready))[0] == 503, "readiness goes first"
            assert not any(each.done() for each in asked), "they were open"
            return list(await asyncio.gather(*asked))

    answers = asyncio.run(run())
    assert sum(not answer.good for answer in answers) == 0
    assert controller.process.wait(60) == 0
    with pytest.raises(OSError, match="refused"):
        http("GET", ready)
