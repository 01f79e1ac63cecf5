"""A pool of processes that are busy for long, one of which does not listen to SIGTERM."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

CHILDREN = 3


def run(request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]) -> None:
    """It never ends by itself."""
    tell(None, "busy")
    with ProcessPoolExecutor(CHILDREN) as pool:
        list(pool.map(busy, range(CHILDREN), [str(folder)] * CHILDREN))


def busy(number: int, folder: str) -> None:
    if number == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (Path(folder) / f"{os.getpid()}.child").write_text(str(number))
    time.sleep(3600)
