"""Two versions of the tiny model, and a fleet of real vLLM that goes from one to the other."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING

from tests.fleet.reloading import NEW, OLD, Fleet, Story, play
from tests.live.server import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, SETTINGS
from tests.live.vllm_env.ensure import environment, python_of, tiny_model

if TYPE_CHECKING:
    from pathlib import Path

START_S_MOST = 900.0
RATE = 1.0
"""Requests per second: one core serves while another engine starts on the other."""


def real_reload(folder: Path) -> Story:
    """One replica and one cold standby, on a core each; its log is replayed."""
    folder.mkdir(parents=True, exist_ok=True)
    env = environment()
    for version in (OLD, NEW):
        shutil.copytree(tiny_model(env), folder / version)
    cores = sorted(os.sched_getaffinity(0))
    first, second = ({"env": {"VLLM_CPU_OMP_THREADS_BIND": str(core)}}
                     for core in (cores[0], cores[-1]))  # fmt: skip
    command = [
        python_of(env), "-m", "vllm.entrypoints.cli.main", "serve", "{weights}",
        "--served-model-name", "{model}", "--host", "{host}", "--port", "{port}",
        "--max-model-len", "8192", "--max-num-seqs", str(MAX_NUM_SEQS),
        "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS), "--enforce-eager",
        "--num-gpu-blocks-override", "512", "--disable-uvicorn-access-log",
        "--enable-per-request-metrics",
    ]  # fmt: skip
    model = {
        "versions": {OLD: str(folder / OLD)},
        "command": command, "env": SETTINGS, "profile": "cpu/tiny-qwen3", "replicas": [first],
        "start_s_most": START_S_MOST, "stop_s_most": 20.0,
    }  # fmt: skip
    standbys = ({**second, "warm": False},)
    fleet = Fleet(folder, 1, standbys, model=model, start_s_most=START_S_MOST, watch_ms=2000)
    controller = fleet.start()
    try:
        story = asyncio.run(
            play(controller, str(folder / NEW), rate=RATE, after_s=5.0, within_s=START_S_MOST)
        )
    finally:
        controller.stop()
    assert controller.complaints() == []
    controller.audit()
    return story
