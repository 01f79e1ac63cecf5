"""Writes a report's files: whole, or not at all."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.report.figures import ReportError, labels_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twin.replay import Replay


def write_json(replays: Sequence[Replay], path: str | os.PathLike[str]) -> None:
    """All figures of ``replays``, keys in a fixed order; what is not a number is null.

    Raises:
        ReportError: there is no replay, or the file cannot be written.
    """
    labels = labels_of(replays)
    document = {
        "schema": 1,
        "replays": [
            {"label": label, **replay.figures()}
            for label, replay in zip(labels, replays, strict=True)
        ],
    }
    write_whole(path, json.dumps(plain(document), indent=2, allow_nan=False) + "\n")


def plain(value: Any) -> Any:
    """``value`` for JSON: NaN and infinity become None, names become strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` beside ``path`` and rename it: a reader never sees half a file."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    except OSError as error:
        raise ReportError(f"{target}: cannot write the report: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
