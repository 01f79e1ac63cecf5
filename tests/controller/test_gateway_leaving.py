"""Callers that leave free the server within a second, many at once, and are nobody's fault."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tests.controller.asking import CHAT, chat, session
from tests.controller.inprocess import story_of
from tests.controller.processes import MODEL

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Twin

CALLERS = 20
FREE_S_MOST = 1.0


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("phase", ["before_the_first_byte", "midway"])
def test_twenty_callers_leave(twins: list[Twin], tmp_path: Path, phase: str, stream: bool) -> None:
    async def play(url: str) -> None:
        if phase == "before_the_first_byte":
            for twin in twins:
                twin.fault("slow", factor=30)
        async with session() as client:

            async def call(number: int) -> None:
                asked = chat(MODEL, f"{number}", 4000, stream=stream)
                async with client.post(f"{url}{CHAT}", json=asked) as answer:
                    await answer.read()

            calls = [asyncio.create_task(call(number)) for number in range(CALLERS)]
            async with asyncio.timeout(10):
                while await _busy(twins) < CALLERS:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.02)
            if phase == "midway":
                await asyncio.sleep(0.3)
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        left_s = time.monotonic()
        async with asyncio.timeout(10):
            while await _busy(twins):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
        assert time.monotonic() - left_s <= FREE_S_MOST

    story = story_of([twin.url for twin in twins], tmp_path, play)
    outcomes = [request.settled[0].outcome for request in story.requests.values()]
    assert outcomes == ["cancelled"] * CALLERS
    assert not story.rotated
    assert not story.breakers


async def _busy(twins: list[Twin]) -> int:
    return sum([await asyncio.to_thread(lambda twin=twin: twin.busy) for twin in twins])
