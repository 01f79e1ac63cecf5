"""The readers, on hand-written rows."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from traces import TraceError, TraceWriter, open_trace
from traces.readers import ReadOptions, formats, guess_format, import_trace
from traces.readers.mapped import load_map

if TYPE_CHECKING:
    from traces.readers import ImportReport

SMALL, LARGE = 200_000, 600_000
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE_ROWS = (
    "2023-11-16 18:17:03.9799600,4808,10\n"
    "2023-11-16 18:17:04.0319600,3180,8\n"
    "2023-11-16 18:17:04.0000001,110,27\n"
)
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def run(
    tmp_path: Path, text: str | bytes, name: str = "src.csv", **options: Any
) -> tuple[ImportReport, list[dict[str, Any]]]:
    source, target = tmp_path / name, tmp_path / "out.parquet"
    source.write_bytes(text.encode() if isinstance(text, str) else text)
    format_name = options.pop("format", None)
    resolution_s = options.pop("resolution_s", None)
    report = import_trace(
        source,
        target,
        format=format_name,
        resolution_s=resolution_s,
        options=ReadOptions(**options),
    )
    return report, read(target)


def read(path: Path) -> list[dict[str, Any]]:
    return [row for batch in open_trace(path).batches() for row in batch.to_pylist()]


def refused(tmp_path: Path, text: str | bytes, message: str, **options: Any) -> None:
    name = options.get("name", "src.csv")
    with pytest.raises(TraceError, match=message):
        run(tmp_path, text, **options)
    assert set(os.listdir(tmp_path)) <= {name, "map.yaml"}


def test_azure_is_sorted_and_starts_at_zero(tmp_path: Path) -> None:
    report, rows = run(tmp_path, AZURE + AZURE_ROWS)
    assert (report.format, report.rows, report.rows_rejected) == ("azure", 3, 0)
    assert report.resolution_s == 0.0
    assert [row["arrival_s"] for row in rows] == [0.0, 0.0200401, 0.052]
    assert [row["prompt_tokens"] for row in rows] == [4808, 110, 3180]
    assert [row["output_tokens"] for row in rows] == [10, 27, 8]
    assert [row["request_id"] for row in rows] == [0, 1, 2]
    assert {row["provenance"] for row in rows} == {"real"}
    assert {row["trace_id"] for row in rows} == {"src"}
    assert {row["prompt_bytes"] for row in rows} == {None}


def test_azure_2024_stamps_and_gzip(tmp_path: Path) -> None:
    text = AZURE + ("2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10T00:00:00.017335Z,2399,6\n")
    report, rows = run(tmp_path, gzip.compress(text.encode()), "src.csv.gz")
    assert report.rows == 2
    assert rows[1]["arrival_s"] == 0.007405


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2023-11-16 18:17:05,x,10", "row 5: ContextTokens: 'x' is not a whole number"),
        ("2023-11-16 18:17:05,0,10", "row 5: ContextTokens is 0: a prompt holds at least one"),
        ("2023-11-16 18:17:05,1,-3", "row 5: GeneratedTokens is negative: -3"),
        ("2023-11-16 18:17:05,1,9999999999", "row 5: GeneratedTokens is too large"),
        ("yesterday,1,3", "row 5: TIMESTAMP: not an ISO 8601 stamp in UTC: 'yesterday'"),
        (",1,3", "row 5: TIMESTAMP"),
        ("9999-12-31 00:00:00,1,3", "row 5: TIMESTAMP: '9999-12-31 00:00:00' is not between the"),
        ("2023-11-16 18:17:05+02:00,1,3", "row 5: TIMESTAMP: not an ISO 8601 stamp in UTC"),
        ("2023-11-16 18:17:05,1", "row 5: the number of fields is not the header's"),
        ("2023-11-16 18:17:05,1,2,3", "row 5: the number of fields is not the header's"),
    ],
)
def test_a_bad_row_stops_or_is_skipped(tmp_path: Path, line: str, message: str) -> None:
    text = AZURE + AZURE_ROWS + line + "\n" + "2023-11-16 18:17:06,7,7\n"
    refused(tmp_path, text, rf"src\.csv: {message}.*--on-error skip")
    report, rows = run(tmp_path, text, on_error="skip")
    assert (report.rows, report.rows_rejected) == (4, 1)
    assert report.rejected_share == pytest.approx(0.2)
    assert message.split(":")[0] in report.examples[0]
    assert len(rows) == 4


def test_when_no_row_is_left_it_says_why(tmp_path: Path) -> None:
    text = AZURE + "a,b,c\nd,e,f\n"
    refused(tmp_path, text, r"no usable row; 2 of 2 rows were rejected, the first: .*row 2",
            on_error="skip")  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("\n\n", "the file is empty"),
        (AZURE, r"src\.csv: no request to import; the source has no usable row"),
        ("a,b\n1,2\n", r"no known format has these columns: a, b; .*--format.*--map"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (gzip.compress((AZURE + AZURE_ROWS).encode())[:-12], "damaged or cut short"),
        (b"PAR1 but no more", "a damaged Parquet file"),
        ("[" * 100_000, "nested too deeply"),
        (
            '{"timestamp": 1, "input_length": 5, "output_length": 6, "hash_ids": [1]}\n{"more": '
            + "[" * 100_000,
            "nested too deeply",
        ),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, text: str | bytes, message: str) -> None:
    refused(tmp_path, text, message)


def test_formats_by_name(tmp_path: Path) -> None:
    names = [known.name for known in formats()]
    assert len(set(names)) == len(names)
    refused(tmp_path, AZURE + AZURE_ROWS, "unknown format 'nix'; known: twinkeel", format="nix")
    refused(
        tmp_path,
        AZURE + AZURE_ROWS,
        "column 'Timestamp' is not in the header, which has: TIMESTAMP",
        format="burstgpt",
    )
    with pytest.raises(TraceError, match="no such file"):
        import_trace(tmp_path / "none.csv", tmp_path / "out.parquet")
    with pytest.raises(TraceError, match="folder does not exist"):
        import_trace(tmp_path / "src.csv", tmp_path / "no" / "out.parquet")


def test_limit_and_progress(tmp_path: Path) -> None:
    source = tmp_path / "src.csv"
    source.write_text(AZURE + AZURE_ROWS)
    seen: list[int] = []
    options = ReadOptions(limit=2)
    report = import_trace(
        source, tmp_path / "o.parquet", options=options, trace_id="mine", progress=seen.append
    )
    assert report.rows == 2
    assert seen == [2]
    assert {row["trace_id"] for row in read(tmp_path / "o.parquet")} == {"mine"}


def test_burstgpt(tmp_path: Path) -> None:
    text = BURST + (
        "5,ChatGPT,472,18,490,Conversation log\n"
        "45,GPT-4,1087,0,1087,API log\n"
        '118,ChatGPT,417,276,693,"Conversation log"\n'
    )
    report, rows = run(tmp_path, text)
    assert report.format == "burstgpt"
    assert report.resolution_s == 1.0
    assert [row["arrival_s"] for row in rows] == [0.0, 40.0, 113.0]
    assert [row["outcome"] for row in rows] == ["answered", "failed", "answered"]
    assert [row["output_tokens"] for row in rows] == [18, None, 276]
    assert [row["model"] for row in rows] == ["ChatGPT", "GPT-4", "ChatGPT"]
    assert [row["tenant_id"] for row in rows][1] == "API log"
    refused_text = BURST + "nan,ChatGPT,1,1,2,API log\n"
    (tmp_path / "out.parquet").unlink()
    refused(tmp_path, refused_text, "row 2: Timestamp is not finite")


def mooncake(stamp: float, blocks: list[int], **more: Any) -> str:
    line = {"timestamp": stamp, "input_length": 900, "output_length": 5, "hash_ids": blocks}
    return json.dumps(line | more) + "\n"


def test_mooncake_resolution_is_detected(tmp_path: Path) -> None:
    text = "".join(mooncake(3000 * (i // 4) - (i == 9), [0, i]) for i in range(200))
    report, rows = run(tmp_path, text, "src.jsonl")
    assert report.format == "mooncake"
    assert report.resolution_s == 3.0
    assert rows[3]["prefix_ids"] == [0, 3]
    assert {row["prefix_block_tokens"] for row in rows} == {512}
    assert {row["arrival_res_s"] for row in rows} == {3.0}
    exact = "".join(mooncake(i * i * 7, [i]) for i in range(200))
    assert run(tmp_path, exact, "src.jsonl")[0].resolution_s == 0.0
    assert run(tmp_path, exact, "src.jsonl", resolution_s=0.5)[0].resolution_s == 0.5


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"timestamp": 1}',
        mooncake(-1, [1]),
        mooncake(1, [1], input_length=-4),
        mooncake(1, [1], input_length=0),
        "[1]",
    ],
)
def test_mooncake_bad_lines(tmp_path: Path, line: str) -> None:
    text = mooncake(0, [1]) + line.strip() + "\n"
    refused(tmp_path, text, "row 2: ", name="src.jsonl")
    assert run(tmp_path, text, "src.jsonl", on_error="skip")[0].rows_rejected == 1


def otlp(name: str = "llm_request", start: int = 10**18, **attributes: Any) -> str:
    kinds = {int: "intValue", float: "doubleValue", str: "stringValue"}
    listed = [
        {"key": f"gen_ai.{key.replace('__', '.')}", "value": {kinds[type(v)]: v}}
        for key, v in attributes.items()
    ]
    span = {
        "name": name,
        "traceId": "ab",
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(start + 2 * 10**9),
        "attributes": listed,
    }
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}) + "\n"


def test_vllm_spans(tmp_path: Path) -> None:
    text = (
        otlp(start=10**18 + 500, usage__prompt_tokens=50, usage__completion_tokens=7,
             latency__time_to_first_token=0.25, latency__e2e=1.5, latency__time_in_queue=0.1,
             latency__time_in_model_prefill=0.12, latency__time_in_model_decode=1.2,
             request__max_tokens=64, response__model="m")
        + otlp("other")
        + otlp(usage__prompt_tokens=9)
    )  # fmt: skip
    report, rows = run(tmp_path, text, "src.jsonl")
    assert (report.format, report.rows, report.rows_rejected) == ("otlp", 2, 0)
    first, second = rows
    assert (first["prompt_tokens"], first["output_tokens"], first["e2e_s"]) == (9, None, 2.0)
    assert second["arrival_s"] == pytest.approx(5e-7)
    assert (second["model"], second["max_output_tokens"]) == ("m", 64)
    assert second["ttft_s"] == 0.25
    assert second["queue_s"] == pytest.approx(0.1)
    assert second["decode_s"] == pytest.approx(1.2)
    for bad in (
        "{}\n",
        "nothing\n",
        otlp(),
        otlp(usage__prompt_tokens=-1),
        otlp(usage__prompt_tokens=0),
    ):
        (tmp_path / "out.parquet").unlink(missing_ok=True)
        refused(tmp_path, text + bad, "row 4: ", name="src.jsonl", format="otlp")


MAP = """
schema: 1
format: csv
columns:
  arrival_s: {from: start, unit: ms}
  prompt_tokens: n_in
  output_tokens: n_out
  user_id: {from: user, hash: true}
  sla_class: {from: prio, values: {high: P0, low: P2}}
  ttft_s: {from: ttft, unit: ms}
constants: {model: qwen3-8b, endpoint: chat, priority: 3}
arrival_res_s: 0.5
"""
MAPPED = "start,n_in,n_out,user,prio,ttft\n2500,10,5,bob,high,120\n1000,20,,eve,low,\n"


def with_map(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "map.yaml"
    path.write_text(text)
    return path


def test_any_csv_by_a_map(tmp_path: Path) -> None:
    report, rows = run(tmp_path, MAPPED, map_path=with_map(tmp_path, MAP))
    assert report.format == "map"
    assert [row["arrival_s"] for row in rows] == [0.0, 1.5]
    assert [row["output_tokens"] for row in rows] == [None, 5]
    assert [row["sla_class"] for row in rows] == ["P2", "P0"]
    assert {row["arrival_res_s"] for row in rows} == {0.5}
    assert {(row["model"], row["priority"]) for row in rows} == {("qwen3-8b", 3)}
    assert rows[0]["user_id"] != rows[1]["user_id"]
    assert min(row["user_id"] for row in rows) >= 0
    assert rows[1]["ttft_s"] == pytest.approx(0.12)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("3000,x,5,bob,high,1", "row 4: n_in: 'x' is not a number"),
        ("3000,-1,5,bob,high,1", "row 4: n_in is negative"),
        ("3000,0,5,bob,high,1", "row 4: n_in is 0: a prompt holds at least one token"),
        ("3000,,5,bob,high,1", "row 4: n_in is missing"),
        (",1,5,bob,high,1", "row 4: "),
        ("3000,1,5,bob,medium,1", "row 4: prio: 'medium' is not among high, low"),
        ("3000,1,5,bob,high,inf", "row 4: ttft is not finite"),
    ],
)
def test_bad_rows_by_a_map(tmp_path: Path, row: str, message: str) -> None:
    path = with_map(tmp_path, MAP)
    refused(tmp_path, MAPPED + row + "\n", message, map_path=path)
    report, _ = run(tmp_path, MAPPED + row + "\n", map_path=path, on_error="skip")
    assert report.rows_rejected == 1


def test_json_lines_by_a_map(tmp_path: Path) -> None:
    mapping = """
schema: 1
format: jsonl
columns:
  arrival_s: {from: at, time: iso}
  prompt_tokens: usage.in
  prefix_ids: blocks
  request_id: id
constants: {prefix_block_tokens: 64}
"""
    lines = [
        {"at": "2024-01-01T00:00:01Z", "usage": {"in": 5}, "blocks": [1, 2], "id": 9},
        {"at": "2024-01-01T00:00:00.25Z", "usage": {"in": 6}, "id": 4},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path = with_map(tmp_path, mapping)
    _, rows = run(tmp_path, text, "src.jsonl", map_path=path)
    assert [(r["request_id"], r["arrival_s"], r["prompt_tokens"]) for r in rows] == [
        (4, 0.0, 6),
        (9, 0.75, 5),
    ]
    assert [r["prefix_ids"] for r in rows] == [None, [1, 2]]
    own = mapping.replace("time: iso", 'time: "%d.%m.%Y %H:%M"')
    own_text = json.dumps({"at": "01.02.2024 10:30", "usage": {"in": 5}, "id": 1}) + "\n"
    path = with_map(tmp_path, own)
    assert run(tmp_path, own_text, "src.jsonl", map_path=path)[0].rows == 1
    (tmp_path / "out.parquet").unlink()
    refused(tmp_path, text, "row 1: time data", name="src.jsonl", map_path=path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("schema: 1", "schema: 2"), "the map's schema is unknown here; write schema: 1"),
        (
            ("arrival_res_s", "arival_res_s"),
            r"unknown key 'arival_res_s'; did you mean arrival_res_s\? known: schema, format",
        ),
        (("{from: prio,", "{from: prio, vales: {},"), r"'vales' in columns\[...\]; .* values\?"),
        (("output_tokens", "outputs"), "unknown trace column 'outputs'"),
        (("prompt_tokens", "prompt_bytes"), "prompt_tokens must be mapped"),
        (("model:", "sla_class:"), "'sla_class' is both mapped and constant"),
        (("unit: ms}\n  prompt", "unit: min}\n  prompt"), "Invalid enum value 'min'"),
        (("user_id", "turn"), "hash is for"),
        (("{from: prio,", "{from: prio, time: iso,"), "time is for arrival_s"),
        (("{from: prio,", "{from: prio, unit: ms,"), "unit is for columns in seconds"),
        (("schema: 1", "schema: ["), "cannot be read"),
    ],
)
def test_bad_maps(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        load_map(with_map(tmp_path, MAP.replace(*change)))


def test_embeddings_may_have_no_token(tmp_path: Path) -> None:
    text = MAPPED + "3000,0,5,bob,high,1\n"
    path = with_map(tmp_path, MAP.replace("endpoint: chat", "endpoint: embeddings"))
    assert run(tmp_path, text, map_path=path)[0].rows == 3
    again = tmp_path / "again.parquet"
    assert import_trace(tmp_path / "out.parquet", again).rows == 3
    own = MAP.replace(", endpoint: chat", "").replace(
        "ttft_s: {from: ttft, unit: ms}", "endpoint: ttft"
    )
    text = "start,n_in,n_out,user,prio,ttft\n1,0,5,bob,high,embeddings\n2,0,5,bob,high,\n"
    refused_path = with_map(tmp_path, own)
    report, _ = run(tmp_path, text, map_path=refused_path, on_error="skip")
    assert (report.rows, report.rows_rejected) == (1, 1)
    assert "row 3: n_in is 0" in report.examples[0]


def test_unknown_sla_classes_are_reported(tmp_path: Path) -> None:
    path = with_map(tmp_path, MAP.replace("{from: prio, values: {high: P0, low: P2}}", "prio"))
    text = MAPPED.replace("high", "P0") + "".join(f"{i},1,1,eve,gold,\n" for i in range(2000))
    report, rows = run(tmp_path, text, map_path=path)
    assert len(rows) == 2002
    assert [text.split(" is none of")[0] for text in report.warnings] == [
        "sla_class 'gold' of 2,000 requests",
        "sla_class 'low' of 1 requests",
    ]
    again = import_trace(tmp_path / "out.parquet", tmp_path / "again.parquet")
    assert again.warnings == report.warnings
    many = MAPPED + "".join(f"{i},1,1,eve,c{i},\n" for i in range(9))
    assert run(tmp_path, many, map_path=path)[0].warnings[-1] == (
        "and 6 more unknown values of sla_class"
    )
    assert run(tmp_path, AZURE + AZURE_ROWS)[0].warnings == ()


def test_damaged_data_names_the_source(tmp_path: Path) -> None:
    for table, named in ((session_table(), "agent-sessions"), (None, "twinkeel")):
        source = tmp_path / f"{named}.parquet"
        if table is None:
            run(tmp_path, AZURE + AZURE_ROWS)
            (tmp_path / "out.parquet").rename(source)
        else:
            pq.write_table(table, source)
        data = bytearray(source.read_bytes())
        footer = int.from_bytes(data[-8:-4], "little") + 8
        data[4:-footer] = b"\xab" * (len(data) - 4 - footer)
        source.write_bytes(data)
        with pytest.raises(TraceError, match=rf"{named}\.parquet: cannot be read as {named}: "):
            import_trace(source, tmp_path / "no.parquet")
        assert not (tmp_path / "no.parquet").exists()


MEMORY = """
import sys
from pathlib import Path
from traces.readers import import_trace
report = import_trace(sys.argv[1], sys.argv[2])
status = Path("/proc/self/status").read_text()
print(report.rows, next(l.split()[1] for l in status.splitlines() if l.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc")
def test_importing_takes_bounded_memory(tmp_path: Path) -> None:
    peaks: dict[int, int] = {}
    for rows in (SMALL, LARGE):
        source = tmp_path / f"{rows}.csv"
        stamps = np.datetime64("2024-05-10T00:00:00.000000") + np.arange(rows) * 400_009 % 10**11
        with source.open("w") as file:
            file.write(AZURE)
            file.writelines(f"{stamp},{9 + i % 4000},{i % 900}\n" for i, stamp in enumerate(stamps))
        command = [sys.executable, "-c", MEMORY, str(source), str(tmp_path / f"{rows}.parquet")]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        written, peak_kib = map(int, result.stdout.split())
        assert written == rows
        peaks[rows] = peak_kib * 1024
    # New ids take 8 bytes a row, and the check that they are unique one.
    assert peaks[LARGE] - peaks[SMALL] < 40 * 2**20 + 9 * (LARGE - SMALL)


def test_map_trouble_at_reading(tmp_path: Path) -> None:
    refused(tmp_path, MAPPED, "needs a map file: --map", format="map")
    path = with_map(tmp_path, MAP.replace("priority: 3", "priority: high"))
    refused(tmp_path, MAPPED, "constant priority", map_path=path)
    path = with_map(tmp_path, MAP.replace("n_out", "answer"))
    refused(tmp_path, MAPPED, "column 'answer' is not in the header", map_path=path)


def session_table() -> pa.Table:
    calls = [
        ("s1", "main", 0, 0.0, 0, [1, 2], 4.0, 0.0),
        ("s1", "main.1", 0, 0.0, 0, [7], 1.0, 0.0),
        ("s1", "main.1", 1, 2.0, 1, [8], 1.0, 0.5),
        ("s1", "main", 2, 30.0, 2, [3], None, 9.0),
        ("s2", "main", 0, 0.0, 0, [1], 1.0, None),
    ]
    names = ("session_id", "agent", "idx", "t_s", "shared_prefix_blocks", "new_hash_ids")
    columns = dict(
        zip((*names, "api_time_s", "think_time_s"), zip(*calls, strict=True), strict=True)
    )
    count = len(calls)
    return pa.table(
        {
            **{name: list(values) for name, values in columns.items()},
            "model": ["opus"] * count,
            "input_tokens": [200] * count,
            "output_tokens": [20] * count,
            "ttft_s": pa.array([None] * count, pa.float32()),
        }
    )  # fmt: skip


def test_agent_sessions(tmp_path: Path) -> None:
    source, target = tmp_path / "c.parquet", tmp_path / "o.parquet"
    pq.write_table(session_table(), source)
    report = import_trace(source, target)
    assert report.format == "agent-sessions"
    rows = read(target)
    assert {row["arrival_s"] for row in rows} == {None}
    assert [row["parent_request_id"] for row in rows] == [None, 0, 1, 0, None]
    assert [row["step"] for row in rows] == ["main", "main.1", "main.1", "main", "main"]
    one, two = 1 << 32, 2 << 32
    assert [row["prefix_ids"] for row in rows] == [
        [one + 1, one + 2],
        [one + 7],
        [one + 7, one + 8],
        [one + 1, one + 2, one + 3],
        [two + 1],
    ]
    assert [row["think_time_s"] for row in rows] == [None, 0.0, 0.5, 9.0, None]
    assert [row["chain_id"] for row in rows] == [1, 1, 1, 1, 2]


def test_agent_sessions_with_a_rate(tmp_path: Path) -> None:
    source, target = tmp_path / "c.parquet", tmp_path / "o.parquet"
    pq.write_table(session_table(), source)
    import_trace(source, target, options=ReadOptions(session_rate=0.001, seed=5))
    rows = read(target)
    ours = [row for row in rows if row["session_id"] == 1]
    assert [round(row["arrival_s"] - ours[0]["arrival_s"], 6) for row in ours] == [0, 4, 6, 30]
    assert [row["arrival_s"] for row in rows] == sorted(row["arrival_s"] for row in rows)
    again = tmp_path / "again.parquet"
    import_trace(source, again, options=ReadOptions(session_rate=0.001, seed=5), trace_id="c")
    assert read(again) == rows
    split = session_table().take([0, 4, 1])
    pq.write_table(split, source)
    with pytest.raises(TraceError, match="row 3: session 's1' goes on after another"):
        import_trace(source, tmp_path / "no.parquet")
    bad = session_table().set_column(9, "input_tokens", pa.array([200, -1, 1, 1, 1]))
    pq.write_table(bad, source)
    with pytest.raises(TraceError, match="row 2: input_tokens is negative: -1"):
        import_trace(source, tmp_path / "no.parquet")
    report = import_trace(source, tmp_path / "y.parquet", options=ReadOptions(on_error="skip"))
    assert (report.rows, report.rows_rejected) == (4, 1)


def test_lmcache_sizes(tmp_path: Path) -> None:
    source, target = tmp_path / "l.parquet", tmp_path / "o.parquet"
    pq.write_table(
        pa.table(
            {
                "agent": ["tau"] * 3,
                "session_id": ["a", "a", "b"],
                "idx": [0, 1, 0],
                "timestamp_us": [10**15, 10**15 + 1_500_000, 10**15],
                "input_chars": [600, 1200, 3],
                "output_chars": [40, 0, 4],
                "shared_prefix_chars": [0, 600, 0],
            }
        ),
        source,
    )
    report = import_trace(source, target, options=ReadOptions(session_rate=1e-6))
    assert report.format == "lmcache-sessions"
    rows = {row["request_id"]: row for row in read(target)}
    assert rows[1]["arrival_s"] - rows[0]["arrival_s"] == pytest.approx(1.5)
    assert [rows[i]["prompt_tokens"] for i in range(3)] == [150, 300, 1]
    assert [rows[i]["output_tokens"] for i in range(3)] == [10, None, 1]
    assert rows[1]["prefix_ids"][:2] == rows[0]["prefix_ids"]
    assert len(rows[1]["prefix_ids"]) == 4
    assert rows[1]["parent_request_id"] == 0
    assert rows[0]["provenance"] == "derived"


def servegen(tmp_path: Path, **change: Any) -> Path:
    rates = {
        "model": ["m"] * 4,
        "client_id": [0, 0, 1, 1],
        "t_s": [0, 600, 0, 600],
        "rate_rps": [2.0, 1.0, 0.5, 3.0],
        "dist": ["Gamma", "Gamma", "Weibull", "Weibull"],
        "shape": [0.5, 0.5, 1.2, 1.2],
    }
    path = tmp_path / "rates.parquet"
    pq.write_table(pa.table(rates | change), path)
    lengths = {
        "model": ["m", "m"],
        "client_id": [0, 0],
        "t_s": [0, 21600],
        "input_tokens_q": [list(np.linspace(10.0, 100.0, 28)), list(np.linspace(10.0, 100.0, 28))],
        "output_tokens_q": [[7.0] * 28, [9.0] * 28],
        "reason_ratio_mean": [None, None],
    }
    pq.write_table(pa.table(lengths), tmp_path / "lengths.parquet")
    return path


def test_servegen_generates_the_rates(tmp_path: Path) -> None:
    source, target = servegen(tmp_path), tmp_path / "o.parquet"
    options = ReadOptions(lengths_path=tmp_path / "lengths.parquet", seed=1)
    report = import_trace(source, target, options=options)
    rows = read(target)
    assert report.format == "servegen"
    expected = 600 * 6.5
    assert abs(report.rows - expected) < 5 * np.sqrt(2 * expected)
    assert {row["provenance"] for row in rows} == {"derived"}
    assert {row["output_tokens"] for row in rows if row["tenant_id"] == "client-0"} == {7}
    assert all(10 <= row["prompt_tokens"] <= 100 for row in rows)
    import_trace(source, tmp_path / "again.parquet", options=options, trace_id="rates")
    assert read(tmp_path / "again.parquet") == rows
    few = ReadOptions(lengths_path=options.lengths_path, limit=100, rate_scale=0.5)
    assert import_trace(source, tmp_path / "few.parquet", options=few).rows == 100


def test_servegen_errors(tmp_path: Path) -> None:
    source, out = servegen(tmp_path), tmp_path / "o.parquet"
    lengths = tmp_path / "lengths.parquet"
    with pytest.raises(TraceError, match="no lengths table; say where it is: --lengths"):
        import_trace(source, out)
    with pytest.raises(TraceError, match="no window is left; models are: m"):
        import_trace(source, out, options=ReadOptions(lengths_path=lengths, models=("x",)))
    with pytest.raises(TraceError, match="choose with --model and --window"):
        import_trace(source, out, options=ReadOptions(lengths_path=lengths, rate_scale=1e6))
    source = servegen(tmp_path, shape=[0.5, -1.0, 1.2, 1.2])
    with pytest.raises(TraceError, match="row 2: no renewal law"):
        import_trace(source, out, options=ReadOptions(lengths_path=lengths))
    skip = ReadOptions(lengths_path=lengths, on_error="skip", window_s=(0, 1200))
    assert import_trace(source, out, options=skip).rows_rejected == 1


def test_own_parquet_is_checked_and_sorted(tmp_path: Path) -> None:
    first, out = tmp_path / "a.parquet", tmp_path / "o.parquet"
    with TraceWriter(first) as writer:
        writer.write(
            pa.RecordBatch.from_pydict(
                {
                    "request_id": [7, 3, 5],
                    "arrival_s": [1.0, 2.0, 3.0],
                    "prompt_tokens": pa.array([1, 2, 3], pa.int32()),
                }
            )
        )
    table = pq.read_table(first)
    table = table.set_column(2, table.schema.field(2), pa.array([3.0, 2.0, 1.0]))
    table = table.set_column(5, table.schema.field(5), pa.array([4, -4, None], pa.int32()))
    unsorted = tmp_path / "u.parquet"
    pq.write_table(table, unsorted)
    assert guess_format(unsorted).name == "twinkeel"
    with pytest.raises(TraceError, match="row 2: output_tokens is negative: -4"):
        import_trace(unsorted, out)
    report = import_trace(unsorted, out, options=ReadOptions(on_error="skip"))
    assert report.rows_rejected == 1
    assert [(r["request_id"], r["arrival_s"]) for r in read(out)] == [(5, 0.0), (7, 2.0)]
    assert import_trace(first, tmp_path / "one.parquet", options=ReadOptions(limit=1)).rows == 1
