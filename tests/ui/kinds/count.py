"""Counts, a file a number, and goes on where it was."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def run(request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]) -> None:
    """``request``: how far (``to``), and how long a number takes (``each_s``)."""
    begun = len(list(folder.glob("*.number")))
    for number in range(begun, request["to"]):
        tell(number / request["to"], f"counting {number}")
        time.sleep(request["each_s"])
        (folder / f"{number}.number").write_text(str(number))
    (folder / "result.json").write_text(json.dumps({"began_at": begun}))
