"""A thread that writes what the engine's output loop leaves for it, so that the loop neither waits
for a disk nor sees an error. What does not fit or cannot be written is dropped and counted."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

PERIOD_S = 0.2
BUFFER = 4_000
"""Entries: at a thousand steps a second, those of 4 s. Each keeps vLLM's own statistics, among them
a number for every running sequence."""
AT_ONCE = 256
"""Entries that are made into text in one go; the other threads have their turn in between."""


class File(Protocol):
    """Where rows go."""

    def write(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Take the rows, or raise."""

    def close(self) -> None:
        """End it."""


class Writer:
    """Takes entries from one thread and writes the rows that `rows_of` makes of them.

    `tell` gets a text the first time that something went wrong; `on_dropped` gets every number of
    entries that were lost.
    """

    def __init__(
        self,
        file: File,
        rows_of: Callable[..., list[tuple[Any, ...]]],
        tell: Callable[[str], None],
        on_dropped: Callable[[int], None],
    ) -> None:
        self._file = file
        self._rows_of = rows_of
        self._tell = tell
        self._on_dropped = on_dropped
        self._entries: deque[tuple[Any, ...]] = deque()
        self._overflow = 0
        self._told = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="twinkeel-steps", daemon=True)

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def put(self, entry: tuple[Any, ...]) -> None:
        """Leave an entry: the arguments of `rows_of`. Never waits."""
        if len(self._entries) < BUFFER:
            self._entries.append(entry)
        else:
            self._overflow += 1

    def close(self) -> None:
        """Write what is left and end."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(2.0)
        if not self._thread.is_alive():
            self._drain()
            self._file.close()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._drain()

    def _drain(self) -> None:
        if self._overflow:
            lost, self._overflow = self._overflow, 0
            self._lost(lost, f"more than {BUFFER} entries wait for the disk")
        while self._entries:
            count = min(AT_ONCE, len(self._entries))
            try:
                rows: list[tuple[Any, ...]] = []
                for entry in [self._entries.popleft() for _ in range(count)]:
                    rows += self._rows_of(*entry)
                self._file.write(rows)
            except Exception as error:  # whatever it is: the engine must not feel it
                self._lost(count, f"{type(error).__name__}: {error}")

    def _lost(self, count: int, why: str) -> None:
        self._on_dropped(count)
        if not self._told:
            self._told = True
            self._tell(f"step records are lost, this is said once: {why}")
