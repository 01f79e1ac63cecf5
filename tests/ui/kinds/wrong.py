"""Cannot be done, and says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def run(request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]) -> None:
    """``request``: what is wrong (``why``), and whose fault it is (``ours``)."""
    if request.get("ours"):
        raise KeyError(request["why"])
    raise ValueError(request["why"])
