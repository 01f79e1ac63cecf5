"""A controller in the test's own event loop: up in an instant, and no less real."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import TYPE_CHECKING, Any

from controller.serve import serve
from tests.controller.processes import audit, records, settings_for
from tests.controller.stories import Story, read_story

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from controller.config import Settings
    from controller.serve import Running

UP_S_MOST = 20.0


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Running]:
    """Run it, with all of its servers up."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[Running] = loop.create_future()
    task = loop.create_task(serve(settings, ready.set_result))
    await asyncio.wait([ready, task], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    running = await ready
    try:
        async with asyncio.timeout(UP_S_MOST):
            replicas = running.driver.replicas.values()
            while not all(replica.up for replica in replicas):  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        yield running
    finally:
        running.stop()
        await task
        gc.unfreeze()  # it belongs to a process of its own
        gc.set_threshold(700, 10, 10)


def story_of(
    urls: Sequence[Any],
    folder: Path,
    play: Callable[[str], Awaitable[None]],
    **how: Any,
) -> Story:
    """Let ``play(url)`` happen in front of a controller; the story that its log tells. The log is
    replayed: it gives the same decisions."""
    settings = settings_for(urls, folder, **how)

    async def run() -> None:
        async with serving(settings) as running:
            await play(running.url)

    asyncio.run(run())
    audit(settings.data_path)
    story = read_story(records(settings.data_path))
    assert not story.refused
    for request in story.requests.values():
        assert len(request.settled) == 1, request
    return story
