"""The command line works; bad input is one clear line, exit code 2, nothing half-written."""

from __future__ import annotations

import json
from importlib import resources
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from click.testing import CliRunner, Result

from traces import TraceWriter, open_trace
from twinkeel import main

if TYPE_CHECKING:
    from pathlib import Path


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "small.parquet"
    rows = 40
    with TraceWriter(path) as writer:
        writer.write(
            pa.RecordBatch.from_pydict(
                {
                    "request_id": pa.array(range(rows), pa.int64()),
                    "arrival_s": pa.array([0.1 * row for row in range(rows)]),
                    "prompt_tokens": pa.array([200] * rows, pa.int32()),
                    "output_tokens": pa.array([20] * rows, pa.int32()),
                    "sla_class": pa.array(["P0", "P2"] * (rows // 2)),
                }
            )
        )
    return path


def test_replay_compares_policies_and_writes_reports(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(
        "replay", trace, "--policy", "fifo", "--policy", "stable", "--replicas", 2, "--out", out,
        "--log", "full",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "fifo" in result.output
    assert "stable" in result.output
    figures = json.loads((out / "report.json").read_text())
    assert [run["all"]["answered"] for run in figures["replays"]] == [40, 40]
    assert (out / "report.html").stat().st_size > 1000
    assert open_trace(out / "fifo" / "requests.parquet").rows == 40
    assert (out / "stable" / "decisions.0.log").stat().st_size > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--replicas", 0), "0 replicas"),
        (("--replicas", -1), "-1 replicas"),
        (("--profile", "h100-sxm/qwen3-8x"), "qwen3-8x"),
        (("--policy", "stabel"), "stabel"),
        (("--speed", 0), "speed is 0"),
        (("--scale", -1), "scale is -1"),
        (("--max-model-len", -5), "-5"),
        (("--replicas", 1, "--replicas", 2), "--replicas"),
        (("--kv-blocks", 1), "kv_blocks is 1"),
        (("--uncertainty", 5), "takes 19 to"),
        (("--uncertainty", "many"), "--uncertainty many: that is no number of runs"),
        (("--jobs", -1), "--jobs"),
    ],
)
def test_bad_options_exit_2_and_write_nothing(
    trace: Path, tmp_path: Path, words: tuple[object, ...], said: str
) -> None:
    out = tmp_path / "out"
    result = run("replay", trace, "--out", out, *words)
    assert result.exit_code == 2
    assert said in result.output
    assert not out.exists()


def test_uncertainty_gives_every_figure_an_interval(trace: Path, tmp_path: Path) -> None:
    words = ("replay", trace, "--policy", "fifo", "--policy", "stable", "--replicas", 1)
    plain = run(*words, "--out", tmp_path / "plain")
    result = run(*words, "--out", tmp_path / "out", "--uncertainty", "--jobs", 1)
    assert (plain.exit_code, result.exit_code) == (0, 0), result.output
    assert "Intervals hold 90 %, from 20 more runs" in " ".join(result.output.split())
    assert "Not covered for h100-sxm/qwen3-8b" in " ".join(result.output.split())
    assert "Intervals" not in plain.output
    reports = [
        json.loads((tmp_path / name / "report.json").read_text())["replays"]
        for name in ("plain", "out")
    ]
    machine = {"wall_s", "cpu_s", "peak_mib"}
    for before, after in zip(*reports, strict=True):
        said = after.pop("uncertainty")
        assert {name: before[name] for name in before if name not in machine} == {
            name: after[name] for name in after if name not in machine
        }
        tail = said["intervals"]["by_sla.P0.ttft_s_p95"]
        assert tail["low"] < tail["high"] == tail["pessimistic"]
        assert tail["value"] == after["by_sla"]["P0"]["ttft_s_p95"]
    assert "Intervals hold 90 %" in (tmp_path / "out" / "report.html").read_text()
    assert "Intervals hold" not in (tmp_path / "plain" / "report.html").read_text()


def test_a_profile_whose_covariance_is_none_is_told_before_anything_is_played(
    trace: Path, tmp_path: Path
) -> None:
    text = (resources.files("policy") / "profiles/h100-sxm/qwen3-8b.yaml").read_text()
    profile = tmp_path / "mine.yaml"
    profile.write_text(
        text
        + "  uncertainty:\n    names: [decode_fixed_ns, prefill_fixed_ns]\n"
        + "    covariance_ns2: [[1.0, 2.0], [2.0, 1.0]]\n"
    )
    out = tmp_path / "out"
    result = run("replay", trace, "--profile", profile, "--out", out, "--uncertainty")
    assert result.exit_code == 2
    assert "covariance_ns2 is no covariance" in result.output
    assert not out.exists()


@pytest.mark.parametrize("log", ["full", "hash", "sample"])
def test_a_replay_that_fails_on_its_way_leaves_what_was_there(
    tmp_path: Path, trace: Path, log: str
) -> None:
    out = tmp_path / "out"
    assert run("replay", trace, "--policy", "fifo", "--out", out, "--log", log).exit_code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    bad = tmp_path / "bad.parquet"
    with TraceWriter(bad) as writer:
        for output_tokens in (5, None):  # the second batch has an answer of unknown length
            first = 0 if output_tokens else 3000
            writer.write(
                pa.RecordBatch.from_pydict(
                    {
                        "request_id": pa.array(range(first, first + 3000), pa.int64()),
                        "arrival_s": pa.array([float(first + row) for row in range(3000)]),
                        "prompt_tokens": pa.array([9] * 3000, pa.int32()),
                        "output_tokens": pa.array([output_tokens] * 3000, pa.int32()),
                    }
                )
            )
    result = run("replay", bad, "--policy", "fifo", "--out", out, "--log", log)
    assert result.exit_code == 2
    assert "--assume-output" in result.output
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_policies_of_one_name_keep_their_results_apart(trace: Path, tmp_path: Path) -> None:
    mine = tmp_path / "stable.yaml"
    mine.write_text(run("policy", "show", "stable").output)
    out = tmp_path / "out"
    result = run("replay", trace, "--policy", "stable", "--policy", mine, "--out", out)
    assert result.exit_code == 0, result.output
    assert open_trace(out / "stable" / "requests.parquet").rows == 40
    assert open_trace(out / "stable-2" / "requests.parquet").rows == 40


def test_a_policy_name_is_no_path(tmp_path: Path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text("schema: 1\nname: ../../evil\n")
    result = run("policy", "check", policy, "stable")
    assert result.exit_code == 2
    assert "../../evil" in result.output
    assert "stable: a valid policy file" in result.output


def test_the_slo_can_be_set(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("replay", trace, "--policy", "fifo", "--out", out, "--slo")
    assert run(*words, "P0=0.001,P2=0.001").exit_code == 0
    assert json.loads((out / "report.json").read_text())["replays"][0]["all"]["good"] == 0
    result = run(*words, "P0=fast")
    assert result.exit_code == 2
    assert "P0=fast" in result.output


def test_an_unknown_key_in_a_policy_file_is_named(trace: Path, tmp_path: Path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text("schema: 1\nname: mine\ndicsipline: fifo\n")
    for words in (("policy", "check", policy), ("replay", trace, "--policy", policy)):
        result = run(*words)
        assert result.exit_code == 2
        assert "dicsipline" in result.output
        assert "discipline" in result.output


def test_an_unknown_schema_number_is_refused_with_a_hint(tmp_path: Path) -> None:
    policy = tmp_path / "mine.yaml"
    policy.write_text("schema: 7\nname: mine\n")
    result = run("policy", "check", policy)
    assert result.exit_code == 2
    assert "schema 7" in result.output
    assert "schema: 1" in result.output


def test_a_missing_trace_and_a_file_that_is_no_trace(tmp_path: Path) -> None:
    text = tmp_path / "trace.parquet"
    text.write_text("hello")
    for path in (tmp_path / "none.parquet", text):
        result = run("replay", path, "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert path.name in result.output


def test_requests_that_can_never_fit_are_counted_not_lost(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("replay", trace, "--policy", "fifo", "--max-model-len", 100, "--out", out)
    assert result.exit_code == 0, result.output
    figures = json.loads((out / "report.json").read_text())["replays"][0]
    assert figures["all"]["failed"] == 40
    assert figures["all"]["offered"] == 40


def test_policy_show_names_every_default_with_its_reason() -> None:
    result = run("policy", "show", "--defaults")
    assert result.exit_code == 0
    assert "schema: 1" in result.output
    assert "#" in result.output


def test_a_shown_policy_is_a_valid_policy_file(tmp_path: Path) -> None:
    for name in ("fifo", "stable", "throughput"):
        shown = tmp_path / f"{name}.yaml"
        shown.write_text(run("policy", "show", name).output)
        assert run("policy", "check", shown).exit_code == 0


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_command(shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert "_TWINKEEL_COMPLETE" in result.output


def test_every_command_has_help() -> None:
    for words in ((), ("replay",), ("policy",), ("policy", "check"), ("policy", "show"),
                  ("trace",), ("trace", "import"), ("trace", "describe"), ("trace", "generate"),
                  ("trace", "slice"), ("completion",)):  # fmt: skip
        result = run(*words, "--help")
        assert result.exit_code == 0
        assert len(result.output) > 150
