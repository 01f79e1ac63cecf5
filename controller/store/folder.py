"""The data folder belongs to one controller at a time."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING

from policy.files import FileError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder; it is let go with the process, however that ends.

    Raises:
        FileError: another controller has it.
    """
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(
                str(folder), "another controller uses this data folder",
                hint="give each its own with --data",
            ) from None  # fmt: skip
        yield
