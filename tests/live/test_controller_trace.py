"""What passed real vLLM is a trace that ``twinkeel replay`` takes as it is."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.controller.asking import ask_all, chat
from tests.controller.processes import ROOT

if TYPE_CHECKING:
    from pathlib import Path

    from tests.controller.processes import Controllers
    from tests.live.server import Vllm

pytestmark = pytest.mark.live


def test_the_recording_is_replayed_as_it_is(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers, tmp_path: Path
) -> None:
    controller = controllers([server.upstream(profile) for server in vllm], policy=patient)
    asked = [chat("tiny", f"{n} " + "word " * 20 * n, 6 + n, user=f"u{n % 3}") for n in range(12)]
    answers = asyncio.run(ask_all(controller.url, asked, {"x-twinkeel-sla": "P1"}, gap_s=0.1))
    assert all(answer.good for answer in answers)
    controller.stop()
    trace = controller.data / "trace" / "trace.parquet"
    rows = pq.read_table(trace).to_pylist()
    assert sorted(row["output_tokens"] for row in rows) == [6 + n for n in range(12)]
    assert {row["sla_class"] for row in rows} == {"P1"}
    assert {row["outcome"] for row in rows} == {"answered"}
    assert len({row["user_id"] for row in rows}) == 3
    assert all(row["prompt_tokens"] > 0 and row["decode_s"] > 0 for row in rows)

    command = [
        sys.executable, "-m", "twinkeel", "replay", str(trace), "--policy", "stable",
        "--profile", profile, "--replicas", "2", "--out", str(tmp_path / "report"),
    ]  # fmt: skip
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert run.returncode == 0, run.stderr
    assert list((tmp_path / "report").iterdir())
