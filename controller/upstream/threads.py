"""Work that may hang for good, such as reading from a disk that is elsewhere.

The event loop's own threads look up names and read policy files, too, and are waited for without a
limit at the end: work that hangs must not be there.
"""

from __future__ import annotations

import asyncio
import contextlib
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


def in_thread(name: str, work: Callable[[], T]) -> asyncio.Future[T]:
    """Do it in a thread of its own, for which the process does not wait at its end."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T) -> None:
        if not future.done():
            future.set_result(result)

    def fail(error: Exception) -> None:
        if not future.done():
            future.set_exception(error)

    def run() -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            try:
                result = work()
            except Exception as error:  # whoever waits gets it
                loop.call_soon_threadsafe(fail, error)
            else:
                loop.call_soon_threadsafe(settle, result)

    Thread(target=run, name=name, daemon=True).start()
    return future
