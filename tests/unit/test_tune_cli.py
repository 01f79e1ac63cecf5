"""The command: what it leaves, and what it says where it cannot."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from policy.files import load_policy
from tests.tune_support import small_trace
from twin.tune.cli import tune_command

if TYPE_CHECKING:
    from pathlib import Path

SPACE = """\
schema: 1
space:
  inflight.prefill_steps_milli: [1000, 100]
  shedding.enabled: [true, false]
"""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(tune_command, list(arguments))


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


@pytest.fixture
def space(tmp_path: Path) -> str:
    path = tmp_path / "space.yaml"
    path.write_text(SPACE, encoding="utf-8")
    return str(path)


def test_a_tuning_leaves_its_files_and_says_what_it_found(tmp_path: Path, space: str) -> None:
    out = tmp_path / "out"
    given = [
        space, "--trace", small_trace(), "--held-out", small_trace(8), "--replicas", "1",
        "--trials", "4", "--jobs", "1", "--seeds", "1", "--held-seeds", "1", "--out", str(out),
    ]  # fmt: skip
    done = run(*given)
    assert done.exit_code == 0, done.output
    assert "Pareto front" in done.output
    assert "on held-out traffic" in done.output
    assert "+  prefill_steps_milli: 100  # 1000 before" in done.output
    best = load_policy(out / "best.yaml")
    assert best.inflight.prefill_steps_milli == 100
    assert "# The dynamic tiered queue" in (out / "best.yaml").read_text(encoding="utf-8")
    rows = table(out / "front.csv")
    assert rows[0]["role"] == "parent"
    assert json.loads((out / "front.json").read_text(encoding="utf-8"))["front"]
    assert len(table(out / "trials.csv")) == 4
    result = json.loads((out / "result.json").read_text(encoding="utf-8"))
    assert result["figures"]["goodput"]["gain_low"] < result["figures"]["goodput"]["gain"]
    assert result["why"] in done.output
    assert [load_policy(path) for path in (out / "front").glob("trial-*.yaml")]
    again = run(*given)
    assert again.output == done.output, "the study is done: nothing is played but the confirmation"


def test_a_scenario_is_tuned_with_its_own_policy_as_the_parent(tmp_path: Path) -> None:
    scenario = tmp_path / "small.yaml"
    scenario.write_text(
        """
schema: 1
name: small
about: Two lines of traffic.
seeds: [1, 2]
duration_s: 20
traffic:
  clients:
    - kind: calls
      name: callers
      stream: false
      source:
        streams:
          - {name: chat, business_line: support, sla_class: P1, model: qwen3-8b, endpoint: chat,
             arrivals: {law: poisson, rate_rps: 3}, prompt_tokens: {fixed: 900},
             output_tokens: {fixed: 40}}
fleet:
  - {profile: h100-sxm/qwen3-8b}
answers:
  rules:
    - kinds:
        - {share: 1, entropy_mean: {lognormal: {mean: 900, sigma: 0.3}}, correct: 0.6,
           entropy_worst: {fixed: 2600}, close_permille: {fixed: 100}}
policy: {preset: stable, set: {tiers: {aging_ms: 9000}}}
""",
        encoding="utf-8",
    )
    space = tmp_path / "space.yaml"
    space.write_text(
        "schema: 1\nobjectives: [wrong, goodput, gpu_hours]\nspace:\n"
        "  confidence.enabled: [true, false]\n  chains.enabled: [true, false]\n",
        encoding="utf-8",
    )  # fmt: skip
    out = tmp_path / "out"
    done = run(str(space), "--scenario", str(scenario), "--trials", "4", "--jobs", "1",
               "--seeds", "2", "--out", str(out))  # fmt: skip
    assert done.exit_code == 0, done.output
    rows = table(out / "trials.csv")
    wrong = {row["confidence.enabled"]: float(row["wrong"]) for row in rows}
    assert wrong["True"] < wrong["False"], "unsure answers are not given out as answers"
    assert float(rows[0]["gpu_hours"]) == pytest.approx(20 / 3600, rel=0.2)
    assert load_policy(out / "best.yaml").tiers.aging_ms == 9000


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "give one of --trace and --scenario"),
        (["--trace", "shipped:demo", "--scenario", "peak"], "give one of --trace and --scenario"),
        (["--trace", "shipped:dmo"], "no such trace"),
        (["--trace", "shipped:demo", "--held-out", "shipped:demo"], "the trace that is tuned on"),
        (["--trace", "shipped:demo", "--run", "base"], "--run is of a scenario"),
        (["--trace", "shipped:demo", "--objective", "gpu_hours"], "tune it with --scenario"),
        (["--trace", "shipped:demo", "--constraint", "goodput > 3"], "write FIGURE >= NUMBER"),
        (["--trace", "shipped:demo", "--policy", "stabel"], "did you mean stable"),
        (["--trace", "shipped:demo", "--prune", "0.1,2"], "write shares between 0 and 1"),
        (["--trace", "shipped:demo", "--replicas", "0"], "replica"),
        (["--trace", "shipped:demo", "--storage", "file.db"], "no such storage"),
        (["--scenario", "peek"], "did you mean peak"),
        (["--scenario", "verification-storm"], "has several runs, name one"),
        (["--scenario", "verification-storm", "--run", "budgt"], "did you mean budget"),
        (["--scenario", "peak", "--held-out", "shipped:demo"], "confirmed with further seeds"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    tmp_path: Path, space: str, options: list[str], said: str
) -> None:
    done = run(space, *options, "--out", str(tmp_path / "out"))
    assert done.exit_code == 2, done.output
    assert said in done.output
    assert done.output.count("\n") == 1


def test_a_space_that_is_wrong_names_file_and_key(tmp_path: Path) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("schema: 1\nspace: {tiers.lend_wait: {around: x2}}\n", encoding="utf-8")
    done = run(str(path), "--trace", "shipped:demo", "--out", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert "space.tiers.lend_wait: no policy has this key" in done.output
    assert run(str(tmp_path / "none.yaml"), "--trace", "shipped:demo").exit_code == 2


def test_the_command_is_light_to_import() -> None:
    import subprocess
    import sys

    code = (
        "import sys, twin.tune.cli; "
        "print(sorted({'optuna', 'ray', 'pyarrow', 'simpy', 'plotly'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
