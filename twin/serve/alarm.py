"""One timer of an event loop, to some ten microseconds.

Event loops count in milliseconds (uvloop rounds to them, selectors round up), which is a seventh of
a decode step. Linux has timers that are file descriptors, and those are exact; elsewhere the loop's
own timer has to do.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, TimerHandle
    from collections.abc import Callable

_CLOCK_MONOTONIC = 1
_NONBLOCKING_CLOEXEC = 0o2004000
_ABSOLUTE = 1
_NS = 1_000_000_000


class Alarm(Protocol):
    """Calls back once at the instant that was set last."""

    def set(self, at_ns: int) -> None:
        """Ring at ``at_ns`` on ``time.monotonic_ns``'s clock, at once if that is over."""

    def close(self) -> None:
        """Never ring again."""


class _Spec(ctypes.Structure):
    """C's ``struct itimerspec``."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class ExactAlarm:
    """A Linux timer file descriptor. Raises ``OSError`` where there is none."""

    def __init__(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            create, self._settime = libc.timerfd_create, libc.timerfd_settime
        except AttributeError as error:
            raise OSError("this system has no timer file descriptors") from error
        fd = create(_CLOCK_MONOTONIC, _NONBLOCKING_CLOEXEC)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._fd: int = fd
        self._spec = _Spec()
        self._pointer = ctypes.byref(self._spec)
        self._loop = loop
        self._ring = ring
        loop.add_reader(fd, self._rang)

    def set(self, at_ns: int) -> None:
        spec = self._spec
        spec.value_s, spec.value_ns = divmod(max(at_ns, 1), _NS)
        self._settime(self._fd, _ABSOLUTE, self._pointer, None)

    def _rang(self) -> None:
        with suppress(BlockingIOError):  # it was set anew in between
            os.read(self._fd, 8)
            self._ring()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


class LoopAlarm:
    """The loop's own timer: up to two milliseconds late."""

    def __init__(self, loop: AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: TimerHandle | None = None

    def set(self, at_ns: int) -> None:
        if self._handle is not None:
            self._handle.cancel()
        delay_ms = -(-(at_ns - monotonic_ns()) // 1_000_000)
        self._handle = self._loop.call_later(max(0, delay_ms) / 1000, self._ring)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()


def alarm(loop: AbstractEventLoop, ring: Callable[[], None]) -> Alarm:
    """The most exact one that this system has."""
    if sys.platform == "linux":
        with suppress(OSError):
            return ExactAlarm(loop, ring)
    return LoopAlarm(loop, ring)
