"""Step records: files, files that grow and are begun anew, and vLLM's text log."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from traces import Recording, StepTail, TraceError, read_iteration_log, read_steps
from traces.steps import (
    Header,
    RequestRow,
    ServerSettings,
    StepRow,
    encode_header,
    encode_row,
    older_half,
    read_both_halves,
    steps_file,
)

if TYPE_CHECKING:
    from pathlib import Path

SETTINGS = ServerSettings(model="tiny", max_num_seqs=64, block_tokens=128)
HEADER = Header(1, "vllm-steps", "0.32.0", "0.1.0", 0, 10**18, 5000, True, SETTINGS)


def step(number: int, **more: Any) -> StepRow:
    row = StepRow(1000 * number, number, 0, 0, 2, 700, 2, 0, 1500, 0, 990)
    return row._replace(**more)


def request(number: int, **more: Any) -> RequestRow:
    row = RequestRow(1000 * number, f"cmpl-{number}", 40, 0, 8, 0, 10, 20, 7000, 7100, "length")
    return row._replace(**more)


def write(path: Path, *rows: StepRow | RequestRow, torn: bytes = b"") -> Path:
    path.write_bytes(encode_header(HEADER) + b"".join(encode_row(row) for row in rows) + torn)
    return path


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


# ---- whole files ----


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    rows = [step(1), step(2), request(2), request(2, id=None), step(3), request(3)]
    recording = read_steps(write(tmp_path / "steps.jsonl", *rows))
    assert recording.header == HEADER
    assert recording.steps == [step(1), step(2), step(3)]
    assert recording.requests == [(1, request(2)), (1, request(2, id=None)), (2, request(3))]


def test_a_line_is_as_the_format_says() -> None:
    assert json.loads(encode_row(step(7, prefill_tokens=None))) == [
        "s", 7000, 7, 0, None, 2, 700, 2, 0, 1500, 0, 990,
    ]  # fmt: skip
    assert json.loads(encode_row(request(7))) == [
        "r", 7000, "cmpl-7", 40, 0, 8, 0, 10, 20, 7000, 7100, "length",
    ]  # fmt: skip
    first = json.loads(encode_header(HEADER))
    assert first["schema"] == 1
    assert first["settings"]["quantization"] is None


def test_rows_without_a_period_and_of_a_later_version_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl")
    append(path, b'["s",1,0,0,0,1,null,null,null,null,null]\n')
    append(path, b'["s",2,1,0,0,1,null,null,null,null,null,5,"a later column"]\n')
    assert [row.period_ns for row in read_steps(path).steps] == [None, 5]


def test_a_request_whose_step_is_in_the_file_before_has_none(tmp_path: Path) -> None:
    recording = read_steps(write(tmp_path / "steps.jsonl", request(1), step(2)))
    assert recording.requests == [(-1, request(1))]


@pytest.mark.parametrize("length", [1, 10, -1])
def test_a_torn_last_line_is_left_out(tmp_path: Path, length: int) -> None:
    torn = encode_row(step(3)).rstrip()[:length]
    recording = read_steps(write(tmp_path / "steps.jsonl", step(1), step(2), torn=torn))
    assert recording.steps == [step(1), step(2)]


def test_a_whole_last_line_counts_without_its_end(tmp_path: Path) -> None:
    torn = encode_row(step(2)).rstrip()
    assert read_steps(write(tmp_path / "steps.jsonl", step(1), torn=torn)).steps[-1] == step(2)


@pytest.mark.parametrize(
    "line",
    [
        b'["s",1,2]',
        b'["s",-1,0,0,0,1,null,null,null,null,null]',
        b'["s",1.5,0,0,0,1,null,null,null,null,null]',
        b'["x",1,0,0,0,1,null,null,null,null,null]',
        b'{"schema":1}',
        b"",
        b"\xff\xfe",
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = write(tmp_path / "steps.jsonl", step(1))
    append(path, line + b"\n" + encode_row(step(2)))
    with pytest.raises(TraceError, match=r"steps\.jsonl: line 3: not a step record"):
        read_steps(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2 is unknown here"),
        ({"kind": "decisions"}, "kind 'decisions'"),
        ({"kind": None}, "not a header"),
        ({"details": "yes"}, "broken header"),
        ({"settings": {"max_num_seqs": -1}}, "broken header"),
    ],
)
def test_another_header_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    first = {**json.loads(encode_header(HEADER)), **change}
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps(first) + "\n", encoding="utf-8")
    with pytest.raises(TraceError, match=f"line 1: .*{message}"):
        read_steps(path)


def test_a_missing_and_an_empty_file_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_steps(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(TraceError, match="line 1: no header yet"):
        read_steps(tmp_path / "empty.jsonl")


def test_unknown_header_fields_are_passed_over(tmp_path: Path) -> None:
    first = json.loads(encode_header(HEADER))
    first["settings"]["new_in_a_later_version"] = 3
    path = tmp_path / "steps.jsonl"
    path.write_text(json.dumps({**first, "more": []}) + "\n", encoding="utf-8")
    assert read_steps(path).header == HEADER


def test_of_a_folder_the_newest_file_of_the_engine_is_taken(tmp_path: Path) -> None:
    old = write(tmp_path / "steps-7-1.jsonl")
    new = write(tmp_path / "steps-3-1.jsonl")
    other = write(tmp_path / "steps-9-11.jsonl")
    for age, path in enumerate((other, new, old)):
        stamp = 10**18 - age * 10**10
        os.utime(path, ns=(stamp, stamp))
    assert steps_file(tmp_path, engine=1) == new
    assert steps_file(old) == old
    with pytest.raises(TraceError, match=r"no steps-\*-2\.jsonl"):
        steps_file(tmp_path, engine=2)


def test_both_halves_are_read_where_one_life_wrote_them(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl", request(2), step(3), request(3))
    assert read_both_halves(path) == read_steps(path)
    write(older_half(path), step(1), step(2))
    both = read_both_halves(path)
    assert both.steps == [step(1), step(2), step(3)]
    assert both.requests == [(1, request(2)), (2, request(3))]
    write(older_half(path), step(7))  # of an earlier process of that number
    assert read_both_halves(path) == read_steps(path)
    other = encode_header(msgspec.structs.replace(HEADER, life="other"))
    older_half(path).write_bytes(other + encode_row(step(1)))
    assert read_both_halves(path) == read_steps(path)


# ---- files that grow ----


def test_a_tail_reads_what_is_new_and_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    tail = StepTail(path)
    assert tail.read_new() == []
    assert tail.header is None
    line = encode_row(step(2))
    write(path, step(1), torn=line[:9])
    assert tail.read_new() == [step(1)]
    assert tail.header == HEADER
    assert tail.read_new() == []
    append(path, line[9:20])
    assert tail.read_new() == []
    append(path, line[20:] + encode_row(request(2)))
    assert tail.read_new() == [step(2), request(2)]
    tail.close()


def rotate(path: Path, *rows: StepRow | RequestRow) -> None:
    path.replace(older_half(path))
    write(path, *rows)


def test_a_tail_goes_on_in_the_file_that_was_begun_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl", step(1))
    tail = StepTail(path)
    assert tail.read_new() == [step(1)]
    append(path, encode_row(step(2)))
    rotate(path, step(3))
    assert tail.read_new() == [step(2), step(3)]
    rotate(path)
    assert tail.read_new() == []
    append(path, encode_row(step(4)))
    assert tail.read_new() == [step(4)]
    tail.close()


def test_a_tail_finds_the_file_in_between(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl", step(1))
    tail = StepTail(path)
    tail.read_new()
    append(path, encode_row(step(2)))
    rotate(path, step(3))
    rotate(path, step(4))
    assert tail.read_new() == [step(2), step(3), step(4)]
    tail.close()


def test_a_tail_waits_while_no_file_has_the_name(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl", step(1))
    tail = StepTail(path)
    tail.read_new()
    append(path, encode_row(step(2)))
    path.replace(older_half(path))
    assert tail.read_new() == [step(2)]
    write(path, step(3))
    assert tail.read_new() == [step(3)]
    tail.close()


def test_a_tail_goes_on_after_a_broken_line(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl")
    tail = StepTail(path)
    assert tail.read_new() == []
    append(path, encode_row(step(1)) + b"nonsense\n" + encode_row(step(2)))
    with pytest.raises(TraceError, match=r"line 3: not a step record: 'nonsense'"):
        tail.read_new()
    assert tail.read_new() == [step(1), step(2)]
    tail.close()


def test_many_broken_lines_cost_one_reading(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl")
    tail = StepTail(path)
    tail.read_new()
    for number in range(50):
        append(path, b"nonsense\n" + encode_row(step(number)))
    with pytest.raises(TraceError, match="line 2: not a step record"):
        tail.read_new()
    assert tail.read_new() == [step(number) for number in range(50)]
    assert tail._torn == b""
    tail.close()


def test_a_tail_gives_no_rows_of_an_unknown_schema(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    first = encode_header(msgspec.structs.replace(HEADER, schema=2))
    path.write_bytes(first + encode_row(step(1)))
    tail = StepTail(path)
    for _ in range(2):
        with pytest.raises(TraceError, match="schema 2 is unknown"):
            tail.read_new()
    write(path, step(2))
    assert tail.read_new() == [step(2)]
    tail.close()


# ---- the text log ----

LOG = """\
(APIServer pid=1) INFO 11-30 02:02:07 [api_server.py:1] Started Iteration of nothing
(APIServer pid=1) INFO 11-30 02:02:08 [loggers.py:210] Engine 000: Iteration(5): 2 context \
requests, 256 context tokens, 3 generation requests, 3 generation tokens, iteration elapsed \
time: 12.34 ms, CPU KV cache usage: 1.5%
(APIServer pid=1) INFO 11-30 02:02:08 [loggers.py:210] Engine 001: Iteration(9): 1 context \
requests, 1 context tokens, 0 generation requests, 0 generation tokens, iteration elapsed \
time: 1.00 ms, CPU KV cache usage: 0.0%
(APIServer pid=1) INFO 11-30 02:02:08 [loggers.py:210] Engine 000: Iteration(6): 0 context \
requests, 0 context tokens, 0 generation requests, 0 generation tokens, iteration elapsed \
time: 1.00 ms (dummy), CPU KV cache usage: 0.0%
\x1b[0;36m(EngineCore pid=2)\x1b[0;0m INFO 11-30 02:02:10 [core.py:386] Iteration(7): 0 context \
requests, 0 context tokens, 3 generation requests, 45 generation tokens, iteration elapsed \
time: 8.00 ms
"""


def test_the_text_log_gives_what_it_has(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG, encoding="utf-8")
    recording = read_iteration_log(path, SETTINGS)
    first, second = recording.steps
    assert first[1:] == (5, 2, 256, 3, 12_340_000, None, None, 15_000, None, None)
    # 42 tokens more than requests: they went on after a pre-emption and computed those again.
    assert second[1:] == (7, 0, 42, 3, 8_000_000, None, None, None, None, None)
    assert second.at_ns - first.at_ns == 2 * 10**9
    assert recording.requests == []
    assert recording.header.settings == SETTINGS
    assert recording.header.details
    assert [row.step for row in read_iteration_log(path, SETTINGS, engine=1).steps] == [9]


def test_with_speculation_generation_tokens_stay_such(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG, encoding="utf-8")
    settings = msgspec.structs.replace(SETTINGS, speculative="ngram")
    assert [row.prefill_tokens for row in read_iteration_log(path, settings).steps] == [256, 0]


def test_steps_of_one_second_follow_each_other(tmp_path: Path) -> None:
    lines = LOG.splitlines()
    path = tmp_path / "vllm.log"
    path.write_text("\n".join([lines[1], lines[1], lines[1]]), encoding="utf-8")
    stamps = [row.at_ns for row in read_iteration_log(path, SETTINGS).steps]
    assert [later - stamps[0] for later in stamps] == [0, 12_340_000, 24_680_000]


def test_the_log_goes_on_in_the_new_year(tmp_path: Path) -> None:
    line = LOG.splitlines()[1]
    path = tmp_path / "vllm.log"
    eve, day = (line.replace("11-30 02:02:08", at) for at in ("12-31 23:59:59", "01-01 00:00:01"))
    path.write_text(f"{eve}\n{day}\n{day.replace('00:00:01', '00:00:05')}\n", encoding="utf-8")
    stamps = [row.at_ns for row in read_iteration_log(path, SETTINGS).steps]
    assert [later - stamps[0] for later in stamps] == [0, 2 * 10**9, 6 * 10**9]


def test_a_log_without_such_lines_says_how_to_get_them(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(LOG.splitlines()[0], encoding="utf-8")
    with pytest.raises(TraceError, match="--enable-logging-iteration-details"):
        read_iteration_log(path, SETTINGS)
    with pytest.raises(TraceError, match="cannot be read"):
        read_iteration_log(tmp_path / "none.log", SETTINGS)


def test_a_recording_is_filled_row_by_row() -> None:
    recording = Recording(HEADER)
    for row in (request(1), step(2), request(2)):
        recording.add(row)
    assert recording == Recording(HEADER, [step(2)], [(-1, request(1)), (0, request(2))])
