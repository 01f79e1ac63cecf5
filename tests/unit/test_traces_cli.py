"""The command group `trace`."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

import traces.readers
from traces import open_trace
from traces.cli import trace

if TYPE_CHECKING:
    from pathlib import Path

    from click.testing import Result

CSV = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.97,48,10\n"


def invoke(*args: object) -> Result:
    return CliRunner().invoke(trace, [str(arg) for arg in args])


def test_help_says_what_there_is() -> None:
    assert invoke("--help").exit_code == 0
    for command in ("import", "describe", "generate", "slice"):
        result = invoke(command, "--help")
        assert result.exit_code == 0
        assert "Examples:" in result.output
    shown = invoke("import", "--help").output
    assert all(known.name in shown for known in traces.readers.formats())
    assert all(key in shown for key in ("delimiter", "arrival_res_s", "strptime", "usage.n_out"))


def test_unknown_sla_classes_are_shown(tmp_path: Path) -> None:
    source, out = tmp_path / "a.csv", tmp_path / "a.parquet"
    source.write_text("at,in,class\n1,5,gold\n2,5,P1\n")
    (tmp_path / "m.yaml").write_text(
        "schema: 1\nformat: csv\ncolumns: {arrival_s: at, prompt_tokens: in, sla_class: class}\n"
    )
    result = invoke("import", source, "--map", tmp_path / "m.yaml", "-o", out)
    assert result.exit_code == 0
    assert "warning: sla_class 'gold' of 1 requests is none of P0, P1, P2" in result.stderr
    assert "gold (unknown) 50.0%" in invoke("describe", out).output
    described = json.loads(invoke("describe", out, "--json").output)
    assert described["unknown_sla_classes"] == ["gold"]


def test_import_describe_slice(tmp_path: Path) -> None:
    source, out = tmp_path / "a.csv", tmp_path / "a.parquet"
    source.write_text(CSV + "2023-11-16 18:17:05.97,x,10\n2023-11-16 18:17:06.97,9,10\n")
    result = invoke("import", source, "-o", out)
    assert result.exit_code == 2
    assert "row 3: ContextTokens: 'x' is not a whole number" in result.output
    assert not out.exists()
    result = invoke("import", source, "-o", out, "--on-error", "skip", "--trace-id", "mine")
    assert result.exit_code == 0
    assert "2 requests over 3.0 s from azure; 1 rows rejected (33.333%)" in result.output
    assert "rejected: " in result.output
    result = invoke("import", source, "-o", out, "--on-error", "skip")
    assert result.exit_code == 2
    assert "exists already" in result.output
    assert invoke("import", source, "-o", out, "--on-error", "skip", "--force").exit_code == 0
    result = invoke("describe", out, "--json")
    assert json.loads(result.output)["rows"] == 2
    assert "requests" in invoke("describe", out).output
    part = tmp_path / "part.parquet"
    assert invoke("slice", out, "--from", 2, "-o", part).exit_code == 0
    assert open_trace(part).duration_s == 1.0


def test_slice_filters(tmp_path: Path) -> None:
    out = tmp_path / "o.parquet"
    options = ("--line", "support", "--sla", "P1", "--sla", "P2", "--to", 60)
    assert invoke("slice", "shipped:demo", "-o", out, *options).exit_code == 0
    shares = json.loads(invoke("describe", out, "--json").output)["shares"]
    assert set(shares["sla_class"]) == {"P1", "P2"}
    assert set(shares["business_line"]) == {"support"}
    result = invoke("slice", "demo", "-o", tmp_path / "x.parquet", "--line", "nobody")
    assert result.exit_code == 2
    assert "no request is left" in result.output
    assert "business_line has: support" in result.output


def test_generate(tmp_path: Path) -> None:
    spec, out = tmp_path / "s.yaml", tmp_path / "s.parquet"
    spec.write_text(
        "schema: 1\nduration_s: 60\nstreams:\n- {name: a, business_line: b, sla_class: P0, "
        "model: m, endpoint: chat, arrivals: {law: poisson, rate_rps: 2}, "
        "prompt_tokens: {fixed: 9}, output_tokens: {fixed: 9}}\n"
    )
    assert invoke("generate", spec, "-o", out).exit_code == 0
    first = open_trace(out).duration_s
    assert invoke("generate", spec, "-o", out, "--seed", 8, "--force").exit_code == 0
    assert open_trace(out).duration_s != first
    bench = tmp_path / "b.parquet"
    assert "10,000 requests" in invoke("generate", "--bench", "w10k_r8", "-o", bench).output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "-o", "o.parquet"), "give either a SPEC file or --bench"),
        (("generate", "--bench", "nix", "-o", "o.parquet"), "no bench load 'nix'"),
        (("generate", "--bench", "w10k_r8", "--seed", "1", "-o", "o.parquet"), "seed of its own"),
        (("describe", "nothing"), "no such trace"),
        (("import", "a.csv", "-o", "no/o.parquet"), "no such folder"),
        (("import", "a.csv", "-o", "o.parquet", "--window", "5"), "write it as FROM:TO"),
        (("import", "a.csv", "-o", "o.parquet", "--format", "nix"), "unknown format 'nix'"),
        (("import", "b.csv", "-o", "o.parquet"), "does not exist"),
        (("import", "a.csv"), "Missing option"),
    ],
)
def test_errors_end_with_code_2_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text(CSV)
    result = invoke(*args)
    assert result.exit_code == 2
    assert message in result.output
    assert os.listdir(tmp_path) == ["a.csv"]


def test_an_arrow_error_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise OSError("Corrupt snappy compressed data.")

    monkeypatch.setattr(traces.readers, "write_trace", broken)
    (tmp_path / "a.csv").write_text(CSV)
    result = invoke("import", tmp_path / "a.csv", "-o", tmp_path / "o.parquet")
    assert "output: Corrupt snappy" in result.output


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(traces.readers, "write_trace", full)
    (tmp_path / "a.csv").write_text(CSV)
    result = invoke("import", tmp_path / "a.csv", "-o", tmp_path / "o.parquet")
    assert result.exit_code == 2
    assert "No space left on device" in result.output
