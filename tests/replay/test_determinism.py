"""A seed, a trace, a profile and a policy file give the same decision log, on every run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from policy.audit import replay as audit
from policy.compose import restore
from policy.files import load_policy
from policy.log import read_segment
from policy.parameters import canonical, from_canonical
from tests.support import write_rows
from traces import open_trace
from twin.fleet import fleet_of
from twin.replay import LogMode, Replay, ReplayOptions, replay

ROOT = Path(__file__).parents[2]
POLICIES = ("fifo", "stable")

RUN = """
import sys
from policy.files import load_policy
from traces import open_trace
from twin.fleet import fleet_of
from twin.replay import replay
fleet = fleet_of([("h100-sxm/qwen3-8b", 2)], kv_blocks_given=3000, max_model_len=20_000)
print(replay(open_trace(sys.argv[1]), fleet, load_policy(sys.argv[2])).log_hash)
"""


@dataclass(frozen=True, slots=True)
class Traces:
    exact: Path
    coarse: Path


def rows(coarse: bool) -> list[dict[str, Any]]:
    """Half a minute of users with shared prompts, too much for two replicas for some seconds."""
    dice = np.random.default_rng(7)
    arrivals = np.sort(np.r_[dice.uniform(0, 30, 250), dice.uniform(12, 16, 350)])
    made = []
    for arrival in np.floor(arrivals) if coarse else arrivals:
        sla = str(dice.choice(["P0", "P1", "P2"]))
        prompt = int(dice.lognormal(7.5 if sla == "P2" else 6, 0.6)) + 64
        output = int(dice.lognormal(4.5, 0.6)) + 1
        made.append(
            {
                "arrival_s": float(arrival),
                "arrival_res_s": 1.0 if coarse else 0.0,
                "prompt_tokens": min(prompt, 9000),
                "output_tokens": min(output, 900),
                "max_output_tokens": 1024,
                "endpoint": "chat",
                "user_id": int(dice.zipf(1.5)) % 50,
                "session_id": int(dice.integers(100)),
                "sla_class": sla,
                "business_line": str(dice.choice(["search", "support"])),
                "prefix_block_tokens": 32,
                "prefix_ids": [int(dice.integers(3)), int(dice.integers(2))],
            }
        )
    return made


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    folder = tmp_path_factory.mktemp("traces")
    for name in ("exact", "coarse"):
        write_rows(folder / f"{name}.parquet", rows(name == "coarse"))
    return Traces(folder / "exact.parquet", folder / "coarse.parquet")


def run(
    path: Path, policy: str, *, seed: int = 0, log: LogMode = "hash", out: Path | None = None,
    skip: bool = True,
) -> Replay:  # fmt: skip
    fleet = fleet_of([("h100-sxm/qwen3-8b", 2)], kv_blocks_given=3000, max_model_len=20_000)
    options = ReplayOptions(seed=seed, log=log, skip=skip)
    return replay(open_trace(path), fleet, load_policy(policy), options, out=out)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_log_does_not_depend_on_the_hash_seed(traces: Traces, policy: str) -> None:
    hashes = [
        subprocess.run(
            [sys.executable, "-c", RUN, str(traces.exact), policy],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT, check=True, capture_output=True, text=True, timeout=120,
        ).stdout.strip()
        for seed in ("0", "1", "4242")
    ]  # fmt: skip
    assert len(hashes[0]) == 64
    assert hashes == [run(traces.exact, policy).log_hash] * 3


@pytest.mark.parametrize("policy", POLICIES)
def test_the_seed_spreads_coarse_stamps_and_nothing_else(traces: Traces, policy: str) -> None:
    coarse = [run(traces.coarse, policy, seed=seed).log_hash for seed in (1, 1, 2)]
    assert coarse[0] == coarse[1] != coarse[2]
    exact = [run(traces.exact, policy, seed=seed).log_hash for seed in (1, 2)]
    assert exact[0] == exact[1]


def test_policies_decide_differently(traces: Traces) -> None:
    assert len({run(traces.exact, policy).log_hash for policy in POLICIES}) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_the_hash_is_the_same_however_much_of_the_log_is_kept(
    traces: Traces, policy: str, tmp_path: Path
) -> None:
    modes: tuple[LogMode, ...] = ("hash", "full", "sample")
    runs = [run(traces.exact, policy, log=mode, out=tmp_path / mode) for mode in modes]
    assert len({kept.log_hash for kept in runs}) == 1
    assert len({kept.decisions for kept in runs}) == 1
    assert not list((tmp_path / "hash").glob("*.log"))


@pytest.mark.parametrize("policy", POLICIES)
def test_skipping_does_not_show_in_the_log(traces: Traces, policy: str) -> None:
    assert run(traces.exact, policy).log_hash == run(traces.exact, policy, skip=False).log_hash


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_log_is_what_the_policy_does(traces: Traces, policy: str, tmp_path: Path) -> None:
    made = run(traces.exact, policy, log="full", out=tmp_path)
    segments = [path.read_bytes() for path in sorted(tmp_path.glob("decisions.*.log"))]
    header, _, records = read_segment(segments[0])
    assert len(list(records)) == made.decisions
    assert header.policy == canonical(load_policy(policy))
    assert audit(segments) is None


def test_a_changed_parameter_shows(traces: Traces, tmp_path: Path) -> None:
    run(traces.exact, "stable", log="full", out=tmp_path)
    segments = [path.read_bytes() for path in sorted(tmp_path.glob("decisions.*.log"))]

    def other(header: Any, snapshot: bytes) -> Any:
        parameters = from_canonical(header.policy)
        inflight = msgspec.structs.replace(parameters.inflight, kv_permille=500)
        return restore(msgspec.structs.replace(parameters, inflight=inflight), snapshot)

    difference = audit(segments, other)
    assert difference is not None
    assert difference.replayed != difference.logged.decisions
    assert difference.record > 100  # the first requests find room either way


def test_a_changed_decision_shows(traces: Traces, tmp_path: Path) -> None:
    """The policy file is the same; one byte of one decision is not."""
    run(traces.exact, "fifo", log="full", out=tmp_path)
    data = (tmp_path / "decisions.0.log").read_bytes()
    at = data.rindex(b"answered")
    difference = audit([data[:at] + b"degraded" + data[at + 8 :]])
    assert difference is not None
    assert "degraded" in repr(difference.logged)
