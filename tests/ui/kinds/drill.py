"""Takes back what it has done when it is told to end, which takes a while; and keeps what it was
told in secret to itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from tests.ui.kinds.count import GO

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TAKES_S = 1.0
"""Longer than others are given."""


def run(request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]) -> None:
    """Until there is a file ``go`` in its folder."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(number)

    signal.signal(signal.SIGTERM, end)
    (folder / "told").write_text(sha256(sys.stdin.read().encode()).hexdigest())
    helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        (folder / "broken").touch()
        while not (folder / GO).exists():
            time.sleep(0.02)
    finally:
        time.sleep(TAKES_S)
        if helper.poll() is None:  # it is needed to take it back
            (folder / "broken").unlink()
        helper.kill()
        helper.wait()
