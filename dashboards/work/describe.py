"""Describes a trace that is too long to be read while a page waits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from dashboards.shelf import Shelf
from traces import open_trace
from traces.describe import describe_trace
from twin.report.files import plain, write_whole

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def run(
    request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]
) -> None:  # fmt: skip
    """Write ``description.json`` of the request's ``trace``.

    Raises:
        TraceError: it cannot be read.
    """
    trace = open_trace(Shelf(folder.parents[1] / "uploads").path_of(request["trace"]))
    rows = 0

    def progress(more: int) -> None:
        nonlocal rows
        rows += more
        tell(rows / trace.rows, "reading the trace")

    description = describe_trace(trace, progress)
    write_whole(folder / "description.json", json.dumps(plain(description), allow_nan=False))
