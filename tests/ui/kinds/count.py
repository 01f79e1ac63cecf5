"""Counts, a file a number, and goes on where it was; waits where it was told to."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

GO = "go"
"""A file in the job's folder: it need not wait any more."""


def run(request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]) -> None:
    """``request``: how far (``to``), and before which number, or at its end, it waits (``waits``;
    none: nowhere)."""
    begun = len(list(folder.glob("*.number")))
    for number in range(begun, request["to"] + 1):
        tell(number / request["to"], f"counting {number}")
        while number == request.get("waits") and not (folder / GO).exists():
            time.sleep(0.02)
            tell(number / request["to"], f"counting {number}")
        if number < request["to"]:
            (folder / f"{number}.number").write_text(str(number))
    (folder / "result.json").write_text(json.dumps({"began_at": begun}))
