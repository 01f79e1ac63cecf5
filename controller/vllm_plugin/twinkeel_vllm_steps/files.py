"""The file of one engine's records: opened, appended to, begun anew when half of its room is used.

A line is never left half-written in the middle of a file: what a full disk did not take is written
first when there is room again. The file is locked as long as its process lives. In a given folder
the group may read it: the controller need not be vLLM's own user.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from typing import TYPE_CHECKING, Any

import msgspec

from .options import is_private, make_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

LIVES_KEPT = 8
_ENCODER = msgspec.json.Encoder()


class StepFile:
    """Not thread-safe. `header` is asked for at the start of every file; `room_bytes` is for the
    file and its older half together."""

    def __init__(
        self, folder: Path, engine: int, room_bytes: int, header: Callable[[], dict[str, Any]]
    ) -> None:
        self._half_bytes = room_bytes // 2
        self._header = header
        self._pending = b""
        self._fd = -1
        self._size = 0
        self.path = folder / f"steps-{os.getpid()}-{engine}.jsonl"
        try:
            self._begin()
        # In a folder that machines share this number lives on another one; or the file is another
        # user's, who could read what is written to it.
        except (BlockingIOError, PermissionError):
            name = f"steps-{os.getpid()}.{secrets.token_hex(4)}-{engine}.jsonl"
            self.path = folder / name
            self._begin()

    def write(self, rows: Iterable[tuple[Any, ...]]) -> None:
        """Append the rows. Raises: OSError when they cannot be taken; then none of them was."""
        if self._fd < 0 or not self._in_place():
            self._begin()
        self._flush()
        if self._size >= self._half_bytes:
            self._begin()
            self._flush()
        self._pending = _ENCODER.encode_lines(rows)
        with contextlib.suppress(OSError):  # they were taken and wait; the next call will tell
            self._flush()

    def close(self) -> None:
        """End the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _begin(self) -> None:
        """A new file at `path`; what was there is kept as the older half.

        Raises: OSError when it cannot be made, BlockingIOError when another process has it,
            PermissionError when it is another user's.
        """
        make_folder(self.path.parent)
        fd = self._fd if self._fd >= 0 and self._in_place() else _open_locked(self.path)
        if os.fstat(fd).st_size:
            os.replace(self.path, self.path.with_name(self.path.name + ".1"))
            os.close(fd)
            self._fd = -1
            fd = _open_locked(self.path)
        elif self._fd not in (-1, fd):
            self.close()
        self._fd, self._size = fd, 0
        self._pending = _ENCODER.encode(self._header()) + b"\n"

    def _in_place(self) -> bool:
        """Whether `path` still is our file: temporary folders get cleared."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._fd)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def _flush(self) -> None:
        while self._pending:
            written = os.write(self._fd, self._pending)
            self._size += written
            self._pending = self._pending[written:]


def clear_old(folder: Path) -> None:
    """Of the files whose process is gone, delete all but the newest few. Where files cannot be
    locked, nobody knows which these are, and all stay."""
    aged: list[tuple[int, Path]] = []
    for path in folder.glob("steps-*.jsonl"):
        with contextlib.suppress(OSError):  # another one clears, too
            aged.append((path.lstat().st_mtime_ns, path))
    for _, path in sorted(aged)[:-LIVES_KEPT]:
        with contextlib.suppress(OSError):  # locked: it lives; or it is another user's
            fd = _open(path)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            finally:
                os.close(fd)
            path.unlink()
            path.with_name(path.name + ".1").unlink(missing_ok=True)


def _open(path: Path) -> int:
    """A descriptor that appends. Raises: PermissionError when the file is another user's."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    mode = 0o600 if is_private(path.parent) else 0o640
    with contextlib.suppress(FileExistsError):
        return os.open(path, flags | os.O_EXCL, mode)
    fd = os.open(path, flags, mode)
    if os.fstat(fd).st_uid != os.getuid():
        os.close(fd)
        raise PermissionError(f"{path} is another user's file")
    return fd


def _open_locked(path: Path) -> int:
    """As ``_open``. Raises: BlockingIOError, too, when another process has the lock."""
    fd = _open(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    except OSError:
        pass  # a file system without locks
    return fd
