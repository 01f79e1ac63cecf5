"""The recorded RTX 4090 run: how its rows are counted, and that the twin meets them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from policy.files import load_profile
from tests.bench.fidelity import rtx4090
from tests.bench.fidelity.rtx4090 import ROWS, Measured, Replayed
from twin import fit_operators

needs_data = pytest.mark.skipif(
    "TWINKEEL_DATA" not in os.environ, reason="TWINKEEL_DATA is not set: no run to compare with"
)


def write_run(folder: Path, output_toks: int = 3) -> None:
    (folder / "vllm_run").mkdir()
    tokens = [list(range(40)), [*range(16), *range(50, 70)]]
    run = [
        {
            "request_id": f"bench-{number}", "input_toks": len(ids), "output_toks": output_toks,
            "arrival_time": 1000.0 + number, "queued_ts": 50.5 + 2 * number,
            "first_token_ts": 60.0, "last_token_ts": 64.0,
        }
        for number, ids in enumerate(tokens)
    ]  # fmt: skip
    asked = [{"input_tok_ids": ids, "output_toks": 3} for ids in tokens]
    for name, rows in (("vllm_run/requests.jsonl", run), (rtx4090.WORKLOAD, asked)):
        (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")


def test_a_run_is_read_on_one_clock_with_its_shared_blocks(tmp_path: Path) -> None:
    write_run(tmp_path)
    real = rtx4090.read_run(tmp_path, 16)
    assert real.queued_s.tolist() == [0.0, 2.0]
    assert real.arrived_s.tolist() == [0.0, 1.0], "the least delay before the queue counts as none"
    assert real.prompts == [(40, (0, 1)), (36, (0, 2))]
    rows = real.own_rows_ms
    assert rows["TTFT mean"] == pytest.approx(8500)
    assert rows["TPOT P99"] == pytest.approx(2000)
    assert rows["Latency P90"] == pytest.approx(13_300)


def test_a_workload_of_other_requests_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, output_toks=4)
    with pytest.raises(ValueError, match=r"bench-0 is not the request in sharegpt"):
        rtx4090.read_run(tmp_path, 16)


def test_errors_are_told_by_row_and_the_worst_counts() -> None:
    zero, ones = np.zeros(2), np.ones(2)
    real = Measured(zero, zero, ones, 3 * ones, 3 * ones, [])
    run = Replayed(zero, 1.01 * ones, 2.97 * ones, 0, 0)
    errors = run.errors_percent(real)
    assert set(errors) == set(ROWS)
    assert errors["TTFT median"] == pytest.approx(1)
    assert errors["TPOT mean"] == pytest.approx(-2)
    assert errors["Latency P95"] == pytest.approx(-1)
    assert run.worst_percent(real) == pytest.approx(2)


@needs_data
def test_every_row_of_the_real_run_is_met_within_one_percent() -> None:
    folder = Path(os.environ["TWINKEEL_DATA"]) / fit_operators.FOLDER
    profile = load_profile(fit_operators.PROFILE)
    real = rtx4090.read_run(folder, profile.engine.block_tokens)
    summary = rtx4090.read_summary(folder)
    assert set(summary) == set(ROWS)
    for name, value in real.own_rows_ms.items():
        assert value == pytest.approx(summary[name][0], abs=0.0501), name
    run = rtx4090.replay(real, profile, real.queued_s, None)
    assert run.worst_percent(real) < 1
    assert run.preemptions > 100, "the run is overloaded on purpose"
    assert run.cached_tokens > 0, "some prompts share their beginning"
