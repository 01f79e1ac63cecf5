"""One of the planner's twelve questions."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from dashboards.work.plan import counted, opened, write_facts
from twin.plan.catalogue import question_of
from twin.plan.show import write_json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ANSWER = "answer.json"
MANY = 15
"""Runs after which most answers are nearly there."""


def run(request: dict[str, Any], folder: Path, tell: Callable[[float | None, str], None]) -> None:
    began_s = time.perf_counter()
    question = question_of(request["question"])
    if question.plain:
        write_json(question.answer(None, request["parameters"]), folder / ANSWER)
        return
    tell(0.02, "Reading the trace")
    with opened(request, folder) as ready:

        def done(played: int) -> None:
            tell(0.05 + 0.9 * (1 - math.exp(-played / MANY)), "Playing days of the trace")

        done(0)
        with counted(folder, done) as runs:
            asking = ready.asking(runs, request["have"])
            answer = question.answer(asking, request["parameters"])
        write_json(answer, folder / ANSWER)
        write_facts(ready, runs, began_s, folder)
