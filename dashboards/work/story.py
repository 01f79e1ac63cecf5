"""Tells the story of one request of a played scenario, under each of its policies."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from policy.log import LogError
from twin.report.files import plain, write_whole
from twin.report.requests import Requests, waterfall
from twin.story import tell as tell_story

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from twin.story import Story

_SEGMENT = re.compile(r"decisions\.(\d+)\.log")


def run(
    request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]
) -> None:  # fmt: skip
    """Write ``story.json``. The request has the job that has played it as ``replay``, and the
    ``row``, counted from 0, which is the request's number in the log too: a replay numbers what
    arrives in the trace's order.

    Raises:
        ValueError: the scenario has not been played here, or has no such request.
    """
    played = folder.parent / str(request["replay"])
    if not (played / "run.json").is_file():
        raise ValueError("this scenario has not been played here yet: run it first")
    about = json.loads((played / "run.json").read_text(encoding="utf-8"))
    row, labels, told = int(request["row"]), about["labels"], []
    for place, label in enumerate(labels):
        tell(place / len(labels), f"replaying the log of {label}")
        one = Requests(played / label / "requests.parquet").one(row)
        story = _story(played / label, row) if about["logged"] else None
        told.append({"label": label, "request": one, "story": story})
    chart = waterfall([one["request"] for one in told], labels)
    document = plain({"row": row, "policies": told, "waterfall": chart})
    write_whole(folder / "story.json", json.dumps(document, allow_nan=False, ensure_ascii=False))


def _story(folder: Path, row: int) -> dict[str, Any] | None:
    found = {path: _SEGMENT.fullmatch(path.name) for path in folder.iterdir()}
    numbers = {path: int(match[1]) for path, match in found.items() if match}
    segments = (path.read_bytes() for path in sorted(numbers, key=lambda path: numbers[path]))
    try:
        story = tell_story(segments, row)
    except LogError:
        return None
    return {
        "lines": [[story.after_ms(at_ns), text] for at_ns, text in story.lines],
        "scores": [[story.after_ms(at_ns), rows] for at_ns, rows in story.scores],
        "left_out": story.meanwhile_left_out,
        "sent_ms": _after(story, story.dispatched_ns),
        "first_ms": _after(story, story.first_ns),
        "settled_ms": _after(story, story.settled_ns),
        "why": story.settled.why if story.settled is not None else "",
    }


def _after(story: Story, at_ns: int) -> float | None:
    return story.after_ms(at_ns) if at_ns >= 0 else None
