"""The data folder belongs to one controller at a time."""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder; it is let go with the process, however that ends.

    Raises:
        ValueError: another controller has it.
    """
    with (folder / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another controller uses the data folder {folder}: give each its own with --data"
            ) from None
        yield
