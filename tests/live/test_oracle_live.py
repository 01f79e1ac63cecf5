"""Fresh schedules of vLLM's own scheduler, on seeds that the recorded ones do not have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.differential.oracle import record, recorded, report_on
from tests.differential.workloads import workloads

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.live

WORKLOADS = 260
FIRST_SEED = 50_000


def test_fresh_schedules_are_equal(tmp_path: Path) -> None:
    recording = tmp_path / "recorded.jsonl"
    record(recording, workloads(WORKLOADS, FIRST_SEED))
    report = report_on(recorded(recording))
    assert report.total.workloads == WORKLOADS
    assert report.total.paths["preempted"] > 500
    assert not report.differences, "\n".join(str(found) for found in report.differences[:3])
