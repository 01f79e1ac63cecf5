"""What the step recorder costs a real vLLM, in per cent of its steps.

    python -m tests.bench.fidelity.plugin

The step's period is measured in a real server of the tiny model, by the recorder itself (the engine
core's clock), with 1 and with 64 sequences decoding. What recording costs is processor time of
vLLM's two processes together, measured apart with vLLM's own objects (`plugin_in_vllm.py`): in a
server under load it drowns in the noise. Their ratio is what the server would lose if it all came
on top of the step, on the same core; the greater one of both loads counts. The tiny model's steps
are shorter than those of any model in use, but for the smallest on the fastest GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.controller.processes import http
from tests.live.server import MAX_NUM_SEQS, MODEL, SETTINGS, Vllm, vllm_servers
from tests.live.vllm_env.ensure import environment, python_of
from traces.steps import read_steps, steps_file

IN_VLLM = Path(__file__).with_name("plugin_in_vllm.py")
LOADS = (1, MAX_NUM_SEQS)
OUTPUT_TOKENS = 96
FEWEST_STEPS = 24
GOAL_PERCENT = 1.0


def plugin_overhead_pct() -> tuple[float, str]:
    """The recorder's cost in per cent of the step's period, at the worse load, and how it was
    found. Starts one vLLM; takes about two minutes on two cores."""
    with tempfile.TemporaryDirectory(prefix="twinkeel-steps-") as scratch:
        periods_s = step_periods_s(Path(scratch) / "server")
        found = {load: _parts_us(Path(scratch) / "alone", periods_s[load], load) for load in LOADS}
    shares = {load: sum(found[load].values()) / periods_s[load] / 1e4 for load in LOADS}
    said = "; ".join(
        f"{load} decoding: step {periods_s[load] * 1e3:.2f} ms, "
        + " + ".join(f"{name} {cost:.1f} us" for name, cost in found[load].items())
        + f" = {shares[load]:.3f} %"
        for load in LOADS
    )
    return max(shares.values()), f"processor time a step, both processes of vLLM, {said}"


def step_periods_s(folder: Path) -> dict[int, float]:
    """The median period of steps that decode so many sequences of the tiny model."""
    options = ["--enable-logging-iteration-details", "--max-num-batched-tokens", "256"]
    with vllm_servers(1, *options, variables={"TWINKEEL_STEPS": str(folder)}) as [server]:
        for load in LOADS:
            _decode(server, load)
        time.sleep(0.6)  # three of the writer's periods
        steps = read_steps(steps_file(folder)).steps
    periods: dict[int, float] = {}
    for load in LOADS:
        found = [
            row.period_ns / 1e9
            for row in steps
            if row.period_ns and row.decode_requests == load and not row.prefill_tokens
        ]
        if len(found) < FEWEST_STEPS:
            raise RuntimeError(
                f"{len(found)} steps decoded {load} sequences, {FEWEST_STEPS} are needed; "
                "run again on a machine with less else to do"
            )
        periods[load] = median(found)
    return periods


def _decode(server: Vllm, sequences: int) -> None:
    """All at once, as one request: else the first would be done before the last came."""
    prompts = [
        [(number * 7919 + place * 31) % 3000 + 10 for place in range(8)]
        for number in range(sequences)
    ]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    status, answer = http("POST", f"{server.url}/v1/completions", body)
    assert status == 200, answer


def _parts_us(folder: Path, period_s: float, sequences: int) -> dict[str, float]:
    command = [python_of(environment()), str(IN_VLLM), str(folder), str(period_s), str(sequences)]
    done = subprocess.run(
        command,
        env={**os.environ, **SETTINGS, "VLLM_LOGGING_LEVEL": "INFO"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{IN_VLLM.name} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def main() -> None:
    """Print the figure."""
    value, how = plugin_overhead_pct()
    print(f"{value:.3f} % (goal: below {GOAL_PERCENT:g} %): {how}")


if __name__ == "__main__":
    main()
