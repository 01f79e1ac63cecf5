"""Timelines of a replay, as trace viewers read them."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from click.testing import CliRunner

from traces import TraceError, TraceWriter
from twin.cli import replay_command
from twin.faults import parse_fault
from twin.report.requests import Requests, requests_over_time, slowest, waterfall
from twin.timeline import timeline, write_timeline

if TYPE_CHECKING:
    from pathlib import Path

HOPS: dict[str, list[float | None]] = {
    "queue_s": [0.0, 0.5, 2.0],
    "gateway_s": [0.001, 0.001, None],
    "schedule_s": [0.02, 0.01, None],
    "prefill_s": [0.1, 0.1, None],
    "decode_s": [0.8786, 0.3886, None],
    "network_s": [0.0004, 0.0004, None],
    "ttft_s": [0.1214, 0.6114, None],
    "e2e_s": [1.0, 1.0, None],
}


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    """Two that overlap on a replica, and one that was shed after two seconds."""
    path = tmp_path / "requests.parquet"
    columns: dict[str, Any] = {
        "request_id": [10, 11, 12],
        "arrival_s": [0.0, 0.5, 0.6],
        "prompt_tokens": pa.array([100] * 3, pa.int32()),
        "sla_class": ["P0", "P1", "P2"],
        "outcome": ["answered", "answered", "shed"],
        "tier": ["turbo", "stable", "batch"],
        "replica": ["a#0", "a#0", None],
    }
    columns |= {name: pa.array(values, pa.float32()) for name, values in HOPS.items()}
    with TraceWriter(path) as writer:
        writer.write(pa.RecordBatch.from_pydict(columns))
    return path


def test_spans_nest_and_lanes_do_not_overlap(requests: Path) -> None:
    document, count = timeline(Requests(requests))
    assert count == 3
    spans = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    by_lane = defaultdict(list)
    for event in spans:
        by_lane[event["pid"], event["tid"]].append(event)
    assert len(by_lane) == 3  # two lanes of the replica, one of what was never sent
    for lane in by_lane.values():
        whole, *hops = lane
        assert hops[0]["ts"] == whole["ts"]
        for before, after in pairwise(hops):
            assert after["ts"] == pytest.approx(before["ts"] + before["dur"], abs=1e-3)
        end = hops[-1]["ts"] + hops[-1]["dur"]
        assert end <= whole["ts"] + whole["dur"] + 1e-6
        assert end == pytest.approx(whole["ts"] + whole["dur"], abs=1)
    names = {
        event["args"]["name"]
        for event in document["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    assert {"faults", "a#0", "never sent to a replica"} == names


def test_faults_are_marks(requests: Path) -> None:
    faults = [parse_fault("{kind: slow_card, at_s: 0.25, on: 0, factor_permille: 2000}")]
    document, _ = timeline(Requests(requests), faults=faults)
    mark, band = (event for event in document["traceEvents"] if event.get("cat") == "fault")
    assert (mark["ph"], mark["ts"], mark["name"]) == ("i", 250_000.0, "slow_card")
    assert band["dur"] == pytest.approx(350_000.0)  # to the last arrival, since it is for good


def test_the_slowest_are_kept(requests: Path, tmp_path: Path) -> None:
    target = tmp_path / "timeline.json"
    assert write_timeline(requests, target, most=1) == 1
    document = json.loads(target.read_text())
    assert document["otherData"] == {"requests": 1, "of": 3, "which": "slowest"}
    names = [event["name"] for event in document["traceEvents"] if event["ph"] == "X"]
    assert names[0] == "P2 #2"  # it waited longest
    assert write_timeline(requests, target, most=1, which="first") == 1
    document = json.loads(target.read_text())
    assert "P0 #0" in [event["name"] for event in document["traceEvents"]]


def test_single_requests(requests: Path) -> None:
    known = Requests(requests)
    assert [one["row"] for one in slowest(known, "ttft_s")] == [1, 0]
    chart = requests_over_time(known, 0, "e2e_s")
    drawn = {trace["name"]: trace["customdata"] for trace in chart["traces"]}
    assert drawn == {"turbo": [0], "stable": [1], "shed": [2]}
    with pytest.raises(TraceError, match="request 3: there are 3"):
        known.one(3)


def test_a_waterfall_begins_each_hop_where_the_last_ended(requests: Path) -> None:
    known = Requests(requests)
    chart = waterfall([known.one(1)], ["stable"])
    assert chart is not None
    ends = {trace["name"]: trace["base"][0] + trace["x"][0] for trace in chart["traces"]}
    assert ends["policy's queue"] == pytest.approx(500)
    assert ends["network"] == pytest.approx(1000, abs=0.01)
    starts = {trace["name"]: trace["base"][0] for trace in chart["traces"]}
    assert starts["gateway"] == pytest.approx(ends["policy's queue"])


def test_many_requests_become_bands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twin.report.requests.POINTS_MOST", 100)
    monkeypatch.setattr("twin.report.requests.SLOW_POINTS", 20)
    rows = 400
    path = tmp_path / "requests.parquet"
    columns: dict[str, Any] = {
        "request_id": list(range(rows)),
        "arrival_s": [float(row) for row in range(rows)],
        "prompt_tokens": pa.array([100] * rows, pa.int32()),
        "outcome": ["answered"] * rows,
        "e2e_s": pa.array([1.0 + row % 7 for row in range(rows)], pa.float32()),
    }
    with TraceWriter(path) as writer:
        writer.write(pa.RecordBatch.from_pydict(columns))
    chart = requests_over_time(Requests(path), 0, "e2e_s")
    assert [trace["name"] for trace in chart["traces"]] == ["p50", "p95", "p99", "answered"]
    assert len(chart["traces"][-1]["x"]) == 20
    assert all(len(trace["x"]) <= 150 for trace in chart["traces"][:3])


def test_the_command_writes_one_for_each_policy(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    columns: dict[str, Any] = {
        "request_id": list(range(20)),
        "arrival_s": [row / 10 for row in range(20)],
        "prompt_tokens": pa.array([100] * 20, pa.int32()),
        "output_tokens": pa.array([5] * 20, pa.int32()),
    }
    with TraceWriter(path) as writer:
        writer.write(pa.RecordBatch.from_pydict(columns))
    target = tmp_path / "out" / "timeline.json"
    words = [str(path), "--policy", "fifo", "--policy", "stable", "--replicas", "1", "--quiet",
             "--out", str(tmp_path / "report"), "--timeline", str(target)]  # fmt: skip
    result = CliRunner().invoke(replay_command, words)
    assert result.exit_code == 0, result.output
    assert "timeline.fifo.json (20 of 20 requests)" in result.output
    for name in ("fifo", "stable"):
        document = json.loads((target.parent / f"timeline.{name}.json").read_text())
        assert document["otherData"]["requests"] == 20
