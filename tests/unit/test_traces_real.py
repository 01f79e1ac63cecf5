"""The readers on the real public traces, where they are at hand."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from traces import open_trace, spread_ties
from traces.describe import describe_trace
from traces.readers import ReadOptions, import_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    Import = Callable[..., dict[str, Any]]

pytestmark = pytest.mark.skipif(
    "TWINKEEL_DATA" not in os.environ, reason="TWINKEEL_DATA is not set: no public traces"
)


@pytest.fixture
def imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Import:
    """Import a public trace, show the rejected share, and describe the result."""

    def run(name: str, **options: Any) -> dict[str, Any]:
        source = Path(os.environ["TWINKEEL_DATA"]) / "traces" / name
        out = tmp_path / "t.parquet"
        report = import_trace(source, out, options=ReadOptions(**options))
        with capsys.disabled():
            print(f"\n{name}: {report.rows} rows, rejected share {report.rejected_share:.4%}")
        assert report.rejected_share == 0.0
        return describe_trace(open_trace(out)) | {"resolution_s": report.resolution_s}

    return run


@pytest.mark.parametrize(
    ("name", "rows", "rate", "cv", "prompt", "answer"),
    [
        ("azure2023_code.csv.gz", 8819, 2.57, 13.2, (1469, 7303, 7436), (13, 90, 251)),
        ("azure2023_conv.csv.gz", 19366, 5.53, 1.09, (1020, 4083, 4142), (129, 451, 601)),
    ],
)
def test_azure_2023(
    imported: Import,
    name: str,
    rows: int,
    rate: float,
    cv: float,
    prompt: tuple[int, ...],
    answer: tuple[int, ...],
) -> None:
    got = imported(name)
    assert got["rows"] == rows
    assert got["rate_rps"] == pytest.approx(rate, abs=0.01)
    assert got["interarrival_cv"] == pytest.approx(cv, rel=0.01)
    assert got["resolution_s"] == 0.0
    for length, wanted in (("prompt_tokens", prompt), ("output_tokens", answer)):
        found = [got["lengths"][length][p] for p in ("p50", "p95", "p99")]
        assert found == pytest.approx(wanted, rel=0.01, abs=1)


@pytest.mark.parametrize(
    ("name", "rows", "rate", "hits", "resolution_s"),
    [
        ("mooncake_conversation.jsonl.gz", 12031, 3.40, 0.37, 3.0),
        ("mooncake_synthetic.jsonl.gz", 3993, 3.91, 0.64, 0.0),
    ],
)
def test_mooncake(
    tmp_path: Path,
    imported: Import,
    name: str,
    rows: int,
    rate: float,
    hits: float,
    resolution_s: float,
) -> None:
    got = imported(name)
    assert got["rows"] == rows
    assert got["rate_rps"] == pytest.approx(rate, abs=0.01)
    assert got["prefix"]["hit_share_blocks"] == pytest.approx(hits, abs=0.005)
    assert got["resolution_s"] == resolution_s
    columns = ["request_id", "arrival_s", "arrival_res_s"]
    batches = spread_ties(open_trace(tmp_path / "t.parquet").batches(columns), seed=1)
    arrivals = [at for batch in batches for at in batch.column(1).to_pylist()]
    assert arrivals == sorted(arrivals)
    if resolution_s:
        assert len(set(arrivals)) == rows


def test_agent_sessions(imported: Import) -> None:
    got = imported("claude_code_agent_sessions.parquet", limit=2000)
    assert got["rows"] == 2000
    assert got["rate_rps"] is None
    assert got["prefix"]["hit_share_blocks"] == pytest.approx(0.963, abs=0.03)
    assert got["null_share"]["arrival_s"] == 1.0
    timed = imported("claude_code_agent_sessions.parquet", limit=1000, session_rate=0.05)
    assert timed["duration_s"] > 0
    assert timed["resolution_s"] == 1.0


def test_lmcache_sessions(imported: Import) -> None:
    got = imported("lmcache_agent_sessions_sizes.parquet")
    assert (got["rows"], got["distinct"]["session_id"]) == (1619, 69)
    assert got["shares"]["provenance"] == {"derived": 1.0}
    imported("lmcache_agent_sessions_sizes.parquet", session_rate=0.1)


def test_servegen(imported: Import) -> None:
    name = "servegen_client_rates_10min.parquet"
    got = imported(name, models=("deepseek-r1",), window_s=(28_800, 29_400), seed=3)
    assert 2 < got["rate_rps"] < 43
    assert got["shares"]["provenance"] == {"derived": 1.0}
    assert got["lengths"]["reasoning_tokens"]["p50"] > 0
