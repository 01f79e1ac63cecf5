"""What is recorded live, the twin predicts: tiers, who is let in, and times."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.controller.processes import PROFILE, ROOT
from tests.controller.recording import load, play, predict

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Controllers, Twin


def test_the_twin_predicts_what_was_recorded(
    twins: list[Twin], controllers: Controllers, tmp_path: Path
) -> None:
    """Short, and on a machine that may be busy: exact times are the live test's business."""
    controller = controllers([twin.url for twin in twins])
    answers = asyncio.run(play(controller.url, load(1, 8.0, 6.0)))
    assert all(answer.good for answer in answers)
    assert controller.stop() == 0
    trace = controller.data / "trace" / "trace.parquet"
    seen = predict(trace, tmp_path)
    assert seen.requests == len(answers)
    assert seen.both_pct >= 95, seen
    assert seen.errors_pct["e2e_p50"] <= 25, seen

    # The same file, as it is, on the command line.
    command = [
        sys.executable, "-m", "twinkeel", "replay", str(trace), "--policy", "stable",
        "--profile", PROFILE, "--replicas", "2", "--out", str(tmp_path / "report"),
    ]  # fmt: skip
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "report").is_dir()
