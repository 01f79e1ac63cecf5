"""Time as a process has it whose processors others want, too."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left


class Turns:
    """Counts the time in which this process had its turns, by a thread that wakes up 100 times a
    second: what other processes take of the processors is none of it."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        """Between two calls of ``noted``."""
        self._beats: list[float] = []
        self._noted = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Turns:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def s(self) -> float:
        """Since it began."""
        return 0.01 * len(self._beats)

    def between(self, since_s: float, until_s: float) -> float:
        """Between two times of the monotonic clock, in s."""
        return 0.01 * (bisect_left(self._beats, until_s) - bisect_left(self._beats, since_s))

    def noted(self) -> None:
        """Whoever is watched had its turn."""
        beats = len(self._beats)
        self.longest_s = max(self.longest_s, 0.01 * (beats - self._noted))
        self._noted = beats

    def _beat(self) -> None:
        while not self._over.wait(0.01):
            self._beats.append(time.monotonic())
