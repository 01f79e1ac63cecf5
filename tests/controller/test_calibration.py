"""The designed load and the whole command, on served twins that write step records."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from controller.calibration import CalibrationError, record_load
from policy.files import load_profile
from tests.controller.processes import ROOT, eventually, http, twin_process
from traces.steps import Header, Recording, StepRow, read_steps
from twin.calibrate import fit_profile, write_profile
from twin.serve import steps as twin_steps
from twin.serve.server import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from policy.cost import Profile
    from tests.controller.processes import Twin

SEQS, BUDGET = 16, 512
LOAD_S = 6.0
STEP_NS = {
    "decode_fixed_ns": 1_700_000.0,
    "decode_per_sequence_ns": 90_000.0,
    "decode_per_kv_token_ns": 300.0,
    "prefill_fixed_ns": 2_900_000.0,
    "prefill_per_token_ns": 17_000.0,
    "prefill_per_quad_ns": 9.0,
}


def known_profile(folder: Path) -> Path:
    """A profile with coefficients of our own, as a file."""
    base = load_profile("cpu/tiny-qwen3")
    step = base.step
    for name, value in STEP_NS.items():
        changed = msgspec.structs.replace(getattr(step, name), value=value)
        step = msgspec.structs.replace(step, **{name: changed})
    engine = msgspec.structs.replace(
        base.engine, max_num_seqs=SEQS, max_num_batched_tokens=BUDGET, kv_blocks=512,
        block_tokens=16, max_model_len=2048,
    )  # fmt: skip
    profile = msgspec.structs.replace(base, name="cpu/known", step=step, engine=engine)
    path = folder / "known.yaml"
    write_profile(profile, path)
    return path


@contextmanager
def recorded_twin(folder: Path) -> Iterator[Twin]:
    with twin_process("--steps", str(folder / "steps"), profile=str(known_profile(folder))) as twin:
        yield twin


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twin]:
    with recorded_twin(tmp_path_factory.mktemp("twin")) as started:
        yield started


@pytest.fixture(scope="module")
def kept(twin: Twin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording of the designed load."""
    told: list[tuple[str, float]] = []
    folder = tmp_path_factory.mktemp("kept") / "new"
    began_s = time.monotonic()
    record_load(
        twin.url, folder, load_s=LOAD_S, seed=1, progress=lambda *each: told.append(each)
    )  # fmt: skip
    assert time.monotonic() - began_s < 5 * LOAD_S
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    return folder


def client_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "client.jsonl").read_text().splitlines()]


def kind_of(phase: str) -> str:
    return phase.partition("-")[0]


def steps_between(recording: Recording, rows: list[dict[str, Any]]) -> list[StepRow]:
    """The steps of a phase's visit."""
    begin_ns = rows[0]["sent_ns"]
    end_ns = max(row["sent_ns"] + row["e2e_ns"] for row in rows)
    return [step for step in recording.steps if begin_ns <= step.at_ns <= end_ns]


# ---- what is recorded ----


def test_both_files_are_there_and_tell_of_the_same_requests(kept: Path) -> None:
    assert sorted(path.name for path in kept.iterdir()) == ["client.jsonl", "steps.jsonl"]
    recording = read_steps(kept / "steps.jsonl")
    rows = {row["id"]: row for row in client_rows(kept)}
    assert sum(row["prompts"] for row in rows.values()) == len(recording.requests)
    for _, request in recording.requests:
        assert request.id is not None
        row = rows[request.id.removeprefix("cmpl-").rsplit("-", 2)[0]]
        assert (request.prompt_tokens, request.output_tokens) == (
            row["prompt_tokens"], row["output_tokens"],
        )  # fmt: skip
        assert request.e2e_ns is not None
        assert 0 < request.e2e_ns <= row["e2e_ns"]
        assert (row["ttft_ns"] is not None) == row["stream"]
        assert row["id"].startswith(f"cal.{row['phase']}.")


def test_nothing_was_preempted_and_no_prompt_was_found_in_the_cache(kept: Path) -> None:
    recording = read_steps(kept / "steps.jsonl")
    assert sum(step.preemptions or 0 for step in recording.steps) == 0
    for _, request in recording.requests:
        assert (request.preemptions, request.cached_tokens) == (0, 0)
    assert max(step.running or 0 for step in recording.steps) == SEQS
    used = [step.kv_used_ppm or 0 for step in recording.steps]
    assert 100_000 < max(used) < 1_000_000


def test_settings_stand_in_the_header_as_the_server_has_them(kept: Path) -> None:
    settings = read_steps(kept / "steps.jsonl").header.settings
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (SEQS, BUDGET)
    assert (settings.block_tokens, settings.kv_blocks, settings.max_model_len) == (16, 512, 2048)


def test_every_round_has_every_kind_and_single_requests_are_forty(kept: Path) -> None:
    rows = client_rows(kept)
    kinds = {"prefill", "chunks", "decode", "mixed", "logprobs", "api", "check"}
    for number in range(1, 5):
        assert {kind_of(row["phase"]) for row in rows if row["round"] == number} == kinds
    assert {row["phase"] for row in rows if row["round"] == 0} == {"warm"}
    assert Counter(row["phase"] for row in rows)["api"] == 40
    assert {row["logprobs"] for row in rows if row["phase"].startswith("logprobs")} == {True}


def test_decode_phases_are_pure_decode_for_a_good_while(kept: Path) -> None:
    recording, rows = read_steps(kept / "steps.jsonl"), client_rows(kept)
    visits: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["phase"].startswith("decode"):
            visits.setdefault((row["phase"], row["round"]), []).append(row)
    assert {int(phase.split("-")[1]) for phase, _ in visits} >= {1, 2, 4, 8, 16}
    for (phase, _), asked in visits.items():
        batch = int(phase.split("-")[1])
        steps = steps_between(recording, asked)
        full = [step for step in steps if (step.decode_requests, step.prefill_tokens) == (batch, 0)]
        assert len(full) >= 8, phase


def test_prompts_alone_meet_an_idle_engine(kept: Path) -> None:
    recording, rows = read_steps(kept / "steps.jsonl"), client_rows(kept)
    for row in rows:
        if row["phase"].startswith("prefill"):
            (step,) = steps_between(recording, [row])
            assert (step.prefill_tokens, step.decode_requests) == (row["prompt_tokens"], 0)
        elif row["phase"].startswith("chunks"):
            steps = steps_between(recording, [row])
            tokens = [step.prefill_tokens for step in steps]
            assert len(tokens) >= 3
            assert tokens[0] == BUDGET
            assert sum(each or 0 for each in tokens) == row["prompt_tokens"]


# ---- what the fit makes of it ----


def test_the_fit_gives_back_the_twins_own_coefficients(kept: Path) -> None:
    found = fit_profile(kept, name="cpu/found", gpu="cpu-2core", model="tiny-qwen3")
    assert found.refusal == ()
    assert found.profile is not None
    for name, value in STEP_NS.items():
        assert getattr(found.profile.step, name).value == pytest.approx(value, rel=0.03), name
    engine = found.profile.engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens) == (SEQS, BUDGET)


def test_the_command_makes_a_profile_and_finds_no_drift_from_it(kept: Path, tmp_path: Path) -> None:
    out = tmp_path / "made.yaml"
    names = ["--gpu", "cpu-2core", "--model", "tiny-qwen3", "--name", "cpu/made"]
    done = run("--from", str(kept), *names, "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert "decode_per_sequence" in done.stdout
    made: Profile = load_profile(out)
    assert made.name == "cpu/made"
    assert made.trust.uncertainty is not None
    assert out.with_suffix(".html").stat().st_size > 1000

    steps = str(kept / "steps.jsonl")
    same = run("--from", steps, "--against", str(out))
    assert same.returncode == 0, same.stderr
    other = run("--from", steps, "--against", "h100-sxm/qwen3-8b")
    assert other.returncode == 3
    assert "above the alarm of 10 %" in other.stderr


def test_a_folder_is_compared_and_logprobs_are_no_drift(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load's own file, and the plug-in's folder, in the place of a file."""
    found = fit_profile(kept, name="cpu/found", gpu="cpu-2core", model="tiny-qwen3")
    assert found.profile is not None
    out = tmp_path / "made.yaml"
    write_profile(found.profile, out)
    same = run("--from", str(kept), "--against", str(out), "--alarm", "3")
    assert same.returncode == 0, same.stderr
    folder = tmp_path / "records"
    folder.mkdir()
    (folder / "steps-7-0.jsonl").write_bytes((kept / "steps.jsonl").read_bytes())
    again = run("--from", str(folder), "--against", str(out), "--alarm", "3")
    assert again.returncode == 0, again.stderr
    steps = [int(done.stdout.split()[0]) for done in (same, again)]
    assert steps[0] > steps[1], "without its callers, phases with logprobs are left out"


def test_names_that_are_given_count_for_live_traffic_too(kept: Path, tmp_path: Path) -> None:
    base, out = str(known_profile(tmp_path)), tmp_path / "live.yaml"
    steps = str(kept / "steps.jsonl")
    done = run("--from", steps, "--base", base, "--name", "cpu/mine", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert load_profile(out).name == "cpu/mine"


# ---- what is refused ----


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twinkeel", "calibrate", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


MINE = ["--gpu", "cpu-2core", "--model", "tiny-qwen3"]
LONG = {"prompt": "p", "max_tokens": 1500, "ignore_eos": True}


def test_a_server_at_work_for_somebody_else_is_left_alone(twin: Twin, tmp_path: Path) -> None:
    caller = threading.Thread(target=http, args=("POST", f"{twin.url}/v1/completions", LONG))
    caller.start()
    try:
        eventually("it works", lambda: twin.busy == 1)
        with pytest.raises(CalibrationError, match=r"at work for somebody else \(1 requests"):
            record_load(twin.url, tmp_path / "none")
    finally:
        caller.join()
    assert not (tmp_path / "none").exists()


def test_traffic_that_comes_in_between_ends_the_load(twin: Twin, tmp_path: Path) -> None:
    def told(what: str, share: float) -> None:
        if share > 0.1 and not sent:
            short = {**LONG, "max_tokens": 2}
            sent.append(http("POST", f"{twin.url}/v1/completions", short)[0])

    sent: list[int] = []
    with pytest.raises(CalibrationError, match="had other traffic during the calibration"):
        record_load(twin.url, tmp_path / "none", load_s=LOAD_S, progress=told)
    assert sent == [200]
    assert not (tmp_path / "none").exists()
    eventually("nothing of ours is left in it", lambda: twin.busy == 0)


def test_records_of_another_server_are_refused(
    twin: Twin, kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.calibration.recording.KNOCK_S_MOST", 0.3)
    other = tmp_path / "steps-1-0.jsonl"
    other.write_bytes((kept / "steps.jsonl").read_bytes())
    with pytest.raises(CalibrationError, match="belongs to another server"):
        record_load(twin.url, tmp_path / "none", steps=other)
    log = tmp_path / "vllm.log"
    log.write_text("INFO started\n")
    with pytest.raises(CalibrationError, match="--enable-logging-iteration-details"):
        record_load(twin.url, tmp_path / "none", log=log)


def test_records_without_details_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = twin_steps._header

    def without_details(*arguments: Any) -> Header:
        return msgspec.structs.replace(whole(*arguments), details=False)

    monkeypatch.setattr(twin_steps, "_header", without_details)

    async def play() -> None:
        profile = str(known_profile(tmp_path))
        async with serving(profile, steps=str(tmp_path / "steps")) as url:
            with pytest.raises(CalibrationError, match="--enable-logging-iteration-details"):
                await asyncio.to_thread(record_load, url, tmp_path / "none")

    asyncio.run(play())


def test_a_twin_without_records_says_how_to_get_them(tmp_path: Path) -> None:
    async def play() -> None:
        async with serving(str(known_profile(tmp_path))) as url:
            with pytest.raises(CalibrationError, match="writes no step records"):
                await asyncio.to_thread(record_load, url, tmp_path / "none")

    asyncio.run(play())


def test_where_nobody_serves_it_is_one_clear_line(tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "p.yaml"), "--gpu", "cpu-2core", "--model", "tiny-qwen3"]
    done = run("--engine", "http://127.0.0.1:9", *out)
    assert done.returncode == 2
    assert "is vLLM serving there?" in done.stderr
    assert "Traceback" not in done.stderr
    wrong = run("--engine", "127.0.0.1:9", *out)
    assert (wrong.returncode, "write http://HOST:PORT" in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "--engine"),
        (["--engine", "http://a", "--from", "."], "--engine"),
        (["--engine", "http://a"], "--out"),
        (["--engine", "http://a", "--against", "x"], "--from"),
        (["--engine", "http://a", "--out", "x"], "--gpu is missing"),
        (["--engine", "http://a", "--out", "x", "--gpu", "h100"], "h100-sxm"),
        (["--engine", "http://a", "--out", "x", "--alarm", "5"], "--alarm does nothing"),
        (["--from", ".", "--out", "x", "--quick"], "--quick does nothing with --from"),
        (["--from", ".", "--out", "x", "--no-async-scheduling"], "--async-scheduling does nothing"),
        (["--from", ".", "--out", "x", "--alarm", "10"], "--alarm does nothing with --from"),
        (["--from", ".", "--against", "x", "--out", "y"], "--out does nothing with --against"),
        (["--engine", "http://127.0.0.1:9", *MINE, "--out", "none/x"], "there is no folder none"),
        (["--engine", "http://127.0.0.1:9", *MINE, "--out", "tests"], "this is a folder"),
        (["--from", "tests/unit", "--against", "cpu/tiny-qwen3"], "no steps-*-0.jsonl"),
    ],
)
def test_what_the_command_lacks_is_named(arguments: list[str], told: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert told in done.stderr


def test_an_interrupted_run_says_so_and_leaves_nothing(twin: Twin, tmp_path: Path) -> None:
    out = tmp_path / "p.yaml"
    command = [
        sys.executable, "-m", "twinkeel", "calibrate", "--engine", twin.url, "--out", str(out),
        "--gpu", "cpu-2core", "--model", "tiny-qwen3",
    ]  # fmt: skip
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        before = twin.state()["finished"]
        eventually("the load runs", lambda: twin.state()["finished"] > before + 20, 30.0)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=20)
    assert process.returncode == 2
    assert "interrupted: nothing was written" in told
    assert "Traceback" not in told
    assert list(tmp_path.iterdir()) == []
    eventually("nothing of ours is left in it", lambda: twin.busy == 0)
