"""A hot reload with real vLLM: the tiny model in two folders, and callers all the while."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest

from policy.decisions import Rotated
from tests.controller.processes import records
from tests.fleet.reloading import NEW, OLD
from tests.fleet.support import members
from tests.live.reloading import real_reload

if TYPE_CHECKING:
    from pathlib import Path

    from tests.live.conftest import Ledger

pytestmark = pytest.mark.live


def test_real_vllm_changes_its_version_and_nobody_notices(tmp_path: Path, ledger: Ledger) -> None:
    story = real_reload(tmp_path)
    assert story.last["phase"] == "done", story.last
    assert story.bad == []
    assert story.wrong == []
    assert {answer.extras["model_version"] for answer in story.answers} == {OLD, NEW}
    assert members(tmp_path / "data" / "fleet") == []
    switches = [
        decision.why
        for record in records(story.controller.data)
        for decision in record.decisions
        if isinstance(decision, Rotated)
    ]
    assert switches == [f"rollout of {NEW}"] * 2  # one in, one draining
    times = sorted(1000 * answer.ttft_s for answer in story.answers)
    p99 = times[math.ceil(0.99 * len(times)) - 1]
    how = (
        f"p99 of TTFT of {len(times)} requests, real vLLM on the processor, while a version took"
        f" over in {story.seconds:.0f} s"
    )
    ledger.add("reload_live_ttft_ms_p99", p99, "ms", ">= 0", how)
    ledger.add("reload_live_5xx", story.errors, "1", "= 0", f"of {len(times)} requests")
