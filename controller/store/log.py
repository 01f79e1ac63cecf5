"""The decision log of a live controller: ``policy.log``'s segments, written by a thread.

Records are appended in the event loop; ``flush`` encodes them and hands the bytes over, and one
thread writes them to ``decisions.N.log``. What was flushed is with the operating system a moment
later, so a killed process loses what it appended since the last flush. Nothing is synced: a machine
that loses its power may lose more.

Serving goes on when the disk does not take what it is given: what is lost is counted, and as the
state cannot be told from a log with a hole, a new segment, which begins with the state, is tried
until one is taken. So whatever is on the disk can be audited.
"""

from __future__ import annotations

import gc
import os
import re
import time
from queue import SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from policy.files import code_hash
from policy.log import FullLog, Header
from policy.parameters import canonical

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from policy.contract import Policy
    from policy.log import Sink
    from policy.parameters import Parameters

SEGMENT_BYTES = 3 * 1024 * 1024
"""Replayed within 2 s (50,000 records of plain prompts, 17,000 with 40 prefix blocks each, on 8
replicas); smaller ones would take the state, which holds the loop up, more often."""
KEEP_BYTES = 2 * 1024 * 1024 * 1024
QUEUE_BYTES = 64 * 1024 * 1024
RETRY_S = 1.0
RETRY_MOST = 32
"""A new segment is tried again after ``RETRY_S``, then after up to this many times as long."""
CLOSE_S_MOST = 10.0
KEEP_LEAST = 2
"""The segment being written and the one before are never deleted."""

_NAME = re.compile(r"^decisions\.(?P<number>\d+)\.log(?:\.torn)?$")


def segments(folder: Path) -> list[tuple[int, Path]]:
    """The segments in a folder, by number."""
    found = [(path, _NAME.match(path.name)) for path in folder.glob("decisions.*.log")]
    return sorted((int(match["number"]), path) for path, match in found if match)


def next_index(folder: Path) -> int:
    """Above every segment that was ever begun there, the torn ones included."""
    matches = [_NAME.match(path.name) for path in folder.glob("decisions.*")]
    return max((int(match["number"]) for match in matches if match), default=-1) + 1


def open_file(path: Path) -> Sink:
    """A new file whose every write goes to the operating system at once."""
    return _Unbuffered(path)


class LiveLog(FullLog):
    """A log for one process. All but ``segments`` of it belongs to the event loop's thread."""

    def __init__(
        self,
        folder: Path,
        policy: Policy,
        parameters: Parameters,
        start_ns: int,
        *,
        on_trouble: Callable[[str], object],
        segment_bytes: int = SEGMENT_BYTES,
        keep_bytes: int = KEEP_BYTES,
        queue_bytes: int = QUEUE_BYTES,
        retry_s: float = RETRY_S,
        open_file: Callable[[Path], Sink] = open_file,
    ) -> None:
        """
        Args:
            folder: made if need be. Numbers go on from the segments that lie there.
            policy: whose state a segment begins with.
            parameters: those that ``policy`` was built from; a switch is noticed.
            start_ns: the log's clock now.
            on_trouble: told in plain words, in the loop, once each time that writing fails.
            keep_bytes: older segments are deleted beyond this.
            queue_bytes: that may wait for the disk.
        """
        wall_ns = time.time_ns() - start_ns  # before anything that takes time
        folder.mkdir(parents=True, exist_ok=True)
        self.trouble = ""
        """What is wrong, until a new segment has held for a while; empty: nothing."""
        self.lost_bytes = 0
        """Never handed to the thread; ``dropped_bytes`` is all that did not reach the disk."""
        self._policy = policy
        self._parameters = parameters
        self._on_trouble = on_trouble
        self._queue_bytes = queue_bytes
        self._first_retry_s = self._retry_s = retry_s
        self._retry_at_s = self._well_at_s = 0.0
        self._gap = False
        self._opening = False
        self._writer = _Writer(folder, keep_bytes, open_file)
        header = Header(
            schema=1,
            code_hash=code_hash(),
            policy=canonical(parameters),
            wall_ns=wall_ns,
            segment=next_index(folder),
            start_ns=start_ns,
        )
        super().__init__(header, policy.snapshot, lambda _: _NO_SINK, segment_bytes)

    @property
    def segment(self) -> int:
        """Number of the segment being written."""
        return self._index

    @property
    def dropped_bytes(self) -> int:
        return self.lost_bytes + self._writer.dropped_bytes

    @property
    def waiting_bytes(self) -> int:
        """Handed over and not written yet."""
        return self._writer.waiting_bytes

    def flush(self) -> None:
        super().flush()
        self._look_after()

    def close(self) -> None:
        """Write what is there and wait for it."""
        super().flush()
        if self._gap or self._writer.broken == self._index:
            self._begin_anew()  # a last try, so that the state is not lost
        self._writer.stop(CLOSE_S_MOST)

    # What FullLog does with bytes

    def _take(self, body: bytes) -> None:
        if self._gap:
            self.lost_bytes += len(body)
        else:
            super()._take(body)

    def _begin(self) -> None:
        in_force = getattr(self._policy, "parameters", self._parameters)
        self._header = msgspec.structs.replace(self._header, policy=canonical(in_force))
        # Taking the state makes many objects and no garbage: looking for it doubles the time.
        collects = gc.isenabled()
        gc.disable()
        try:
            super()._begin()
        finally:
            if collects:
                gc.enable()

    def _open(self) -> None:
        self._opening = True

    def _write(self, data: bytes) -> None:
        if self._opening:
            self._opening = False
            self._writer.put(_Beginning(self._index, data))
        elif self._writer.waiting_bytes + len(data) > self._queue_bytes:
            self.lost_bytes += len(data)
            waiting = self._writer.waiting_bytes
            self._failed(f"the disk does not keep up: {waiting} bytes wait to be written")
        else:
            self._writer.put(data)

    def _end(self, kept: bool) -> None:
        """The thread closes a segment when it comes to the next one's beginning."""

    # Trouble

    def _look_after(self) -> None:
        writer = self._writer
        if not self._gap and writer.broken == self._index:
            self._failed(writer.why)
        if not self.trouble:
            return
        now_s = time.monotonic()
        if self._gap:
            if now_s >= self._retry_at_s and writer.waiting_bytes <= self._queue_bytes // 2:
                self._begin_anew()
        elif writer.begun >= self._index and now_s >= self._well_at_s:
            self.trouble = ""
            self._retry_s = self._first_retry_s

    def _failed(self, why: str) -> None:
        self._gap = True
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MOST * self._first_retry_s)
        if not self.trouble:
            self.trouble = (
                f"the decision log has a gap after segment {self._index}: {why}; serving goes on,"
                " make room or repair the disk"
            )
            self._on_trouble(self.trouble)

    def _begin_anew(self) -> None:
        self._gap = False
        self._well_at_s = time.monotonic() + 4 * self._first_retry_s
        self._index += 1
        self._begin()


class _Beginning(NamedTuple):
    """A segment's header and snapshot."""

    segment: int
    data: bytes


class _Writer:
    """The thread. Each figure is written by one side only."""

    def __init__(self, folder: Path, keep_bytes: int, open_file: Callable[[Path], Sink]) -> None:
        self.broken = -1
        """The last segment that could not be written to its end."""
        self.begun = -1
        """The last segment whose beginning is on the disk."""
        self.why = ""
        self.dropped_bytes = 0
        self._put_bytes = 0
        self._taken_bytes = 0
        self._folder = folder
        self._keep_bytes = keep_bytes
        self._open_file = open_file
        self._file: Sink | None = None
        self._index = -1
        self._queue: SimpleQueue[_Beginning | bytes | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="decision-log", daemon=True)
        for scratch in folder.glob(".decisions.*.tmp"):
            scratch.unlink(missing_ok=True)
        self._thread.start()

    # The loop's side

    @property
    def waiting_bytes(self) -> int:
        return self._put_bytes - self._taken_bytes

    def put(self, item: _Beginning | bytes) -> None:
        self._put_bytes += _size(item)
        self._queue.put(item)

    def stop(self, s_most: float) -> None:
        self._queue.put(None)
        self._thread.join(s_most)

    # The thread's side

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if isinstance(item, _Beginning):
                    self._begin(item)
                elif self._file is not None:
                    self._file.write(item)
                else:  # of a segment that is broken
                    self.dropped_bytes += len(item)
            except Exception as error:  # whatever it is, the thread has to go on
                self.dropped_bytes += _size(item)
                self._break(error)
            self._taken_bytes += _size(item)
        self._close()

    def _begin(self, item: _Beginning) -> None:
        """A segment gets its name once its beginning is whole: without it nothing can be read."""
        self._close()
        self._index = item.segment
        scratch = self._folder / f".decisions.{item.segment}.tmp"
        self._file = self._open_file(scratch)
        try:
            self._file.write(item.data)
            os.rename(scratch, self._folder / f"decisions.{item.segment}.log")
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise
        self.begun = item.segment
        self._prune()

    def _break(self, error: Exception) -> None:
        self.why = f"{type(error).__name__}: {error}"
        self.broken = self._index
        try:
            self._close()
        except OSError:
            self._file = None

    def _close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _prune(self) -> None:
        found = segments(self._folder)
        sizes = [path.stat().st_size for _, path in found]
        kept_bytes = sum(sizes)
        for (_, path), size in zip(found[:-KEEP_LEAST], sizes, strict=False):
            if kept_bytes <= self._keep_bytes:
                return
            path.unlink()
            kept_bytes -= size


class _Unbuffered:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, data: bytes, /) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        os.close(self._file)


class _NoSink:
    """``LiveLog`` hands its bytes to the thread itself."""

    def write(self, data: bytes, /) -> None:
        raise RuntimeError("the thread writes, not this")

    def close(self) -> None:
        raise RuntimeError("the thread writes, not this")


_NO_SINK = _NoSink()


def _size(item: _Beginning | bytes) -> int:
    return len(item.data) if isinstance(item, _Beginning) else len(item)
