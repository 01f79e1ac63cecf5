"""`twinkeel calibrate` on a real vLLM: settings, records and a profile, or the reasons against it.

Whether the machine is quiet enough for a good fit is not in the test's hands: a refusal with its
reasons is as right as a profile. How good fits are is measured by `make fidelity`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from policy.cost import Coefficient, StepCost
from policy.files import load_profile
from tests.live.server import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, Vllm
from traces.steps import read_iteration_log, read_steps
from twin.calibrate import drift, fit_profile, write_profile
from twin.calibrate.client import read_client
from twin.calibrate.contents import read_contents

pytestmark = pytest.mark.live

ROOT = Path(__file__).parents[2]
NOISE = ("held-out", "rounds differ", "stall", "run the designed load longer")
PHASES = ("prefill-", "chunks-", "decode-", "mixed", "logprobs-", "api", "check")


@dataclass(frozen=True)
class Ran:
    """What the command said and left behind."""

    code: int
    text: str
    profile: Path
    folder: Path
    log: Path
    """vLLM's own, of its whole life."""


def calibrate(*options: object) -> tuple[int, str]:
    """Run the command; its exit code and all that it printed."""
    command = [sys.executable, "-m", "twinkeel", "calibrate", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=2000)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def ran(vllm: list[Vllm], tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("calibrate")
    out = folder / "here.yaml"
    code, text = calibrate(
        "--engine", vllm[0].url, "--gpu", "cpu-2core", "--model", "tiny-qwen3",
        "--out", out, "--keep", folder / "kept",
    )  # fmt: skip
    return Ran(code, text, out, folder / "kept", vllm[0].log)


def test_it_ends_with_a_profile_or_with_reasons(ran: Ran) -> None:
    assert ran.code in (0, 1), ran.text
    assert ran.profile.with_suffix(".html").stat().st_size > 10_000
    if ran.code:
        assert not ran.profile.exists()
        assert "no profile: the fit is not good enough" in ran.text, ran.text
        reasons = [line for line in ran.text.splitlines() if line.startswith("- ")]
        assert reasons
        for reason in reasons:  # of a machine that is slow or not quiet, and no others
            assert any(word in reason for word in NOISE), reason
        return
    profile = load_profile(ran.profile)
    assert profile.trust.status == "fitted"
    assert profile.trust.uncertainty is not None
    recording = read_steps(ran.folder / "steps.jsonl")
    off = drift(StepCost.from_profile(profile), recording)
    assert off.ratio == pytest.approx(1, abs=0.1), "it was fitted on most of these steps"


def test_settings_are_read_from_the_server(ran: Ran) -> None:
    settings = read_steps(ran.folder / "steps.jsonl").header.settings
    assert settings.max_num_seqs == MAX_NUM_SEQS
    assert settings.max_num_batched_tokens == MAX_NUM_BATCHED_TOKENS
    assert (settings.kv_blocks, settings.block_tokens) == (512, 128)
    assert (settings.scheduling_policy, settings.async_scheduling) == ("priority", False)


def test_every_phase_ran_and_every_step_is_known(ran: Ran) -> None:
    phases = {row.phase for row in read_client(ran.folder / "client.jsonl")}
    for begin in PHASES:
        assert any(phase.startswith(begin) for phase in phases), (begin, phases)
    recording = read_steps(ran.folder / "steps.jsonl")
    contents = read_contents(recording)
    assert np.mean(contents.usable) >= 0.98, contents.unusable
    assert not any(row.preemptions for row in recording.steps)
    found = fit_profile(ran.folder, name="cpu/here", gpu="cpu-2core", model="tiny-qwen3")
    assert found.draft is not None
    assert found.draft.step.decode_fixed_ns.value > 0
    assert found.draft.step.prefill_per_token_ns.value > 0


def test_the_text_log_tells_the_same_steps(ran: Ran) -> None:
    """The fall-back for a server without the plug-in."""
    kept = read_steps(ran.folder / "steps.jsonl")
    logged = {row.step: row for row in read_iteration_log(ran.log, kept.header.settings).steps}
    for row in kept.steps:
        twin = logged[row.step]
        assert twin.prefill_tokens == row.prefill_tokens
        assert twin.decode_requests == row.decode_requests
        assert twin.elapsed_ns == pytest.approx(row.elapsed_ns, abs=6_000)  # two decimals of a ms


def test_a_profile_of_a_faster_machine_is_told_as_drift(ran: Ran, tmp_path: Path) -> None:
    found = fit_profile(ran.folder, name="cpu/here", gpu="cpu-2core", model="tiny-qwen3")
    assert found.draft is not None
    step = found.draft.step
    faster = {
        name: msgspec.structs.replace(part, value=part.value / 2, interval=None)
        for name in step.__struct_fields__
        if isinstance(part := getattr(step, name), Coefficient)
    }
    half = msgspec.structs.replace(
        found.draft, step=msgspec.structs.replace(step, **faster, batch_padding=())
    )
    path = tmp_path / "half.yaml"
    write_profile(half, path)
    code, text = calibrate("--from", ran.folder / "steps.jsonl", "--against", path)
    assert code == 3, text
