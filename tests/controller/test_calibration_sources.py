"""Step records: where they are looked for, and whose they are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec
import pytest

from controller.calibration import CalibrationError
from controller.calibration.sources import FileSource, LogSource, candidates, is_ours
from traces.steps import (
    KIND,
    STEPS_SCHEMA,
    Header,
    RequestRow,
    ServerSettings,
    StepRow,
    encode_header,
    encode_row,
)

if TYPE_CHECKING:
    from pathlib import Path

HEADER = Header(STEPS_SCHEMA, KIND, "0.32.0", "0.1.0", 0, 1, 1, True, ServerSettings())
STEP = StepRow(10, 1, 1, 16, 0, 9, 1, 0, 5, 0)
LINE = (
    "(EngineCore pid=7) INFO 11-30 01:53:{second:02} [core.py:700] Engine 000: Iteration({step}): "
    "0 context requests, 0 context tokens, 4 generation requests, 4 generation tokens, iteration "
    "elapsed time: 12.50 ms, GPU KV cache usage: 3.1%\n"
)


def request(id: str) -> RequestRow:
    return RequestRow(11, id, 16, 0, 1, 0, 1, 2, 3, 9, "length")


def write(path: Path, *rows: StepRow | RequestRow) -> Path:
    path.write_bytes(encode_header(HEADER) + b"".join(encode_row(row) for row in rows))
    return path


def append(path: Path, *rows: StepRow | RequestRow) -> None:
    with path.open("ab") as file:
        file.write(b"".join(encode_row(row) for row in rows))


def test_the_file_that_the_server_names_is_followed_from_now_on(tmp_path: Path) -> None:
    path = write(tmp_path / "steps-1-0.jsonl", STEP, request("cmpl-old-0-1"))
    (source,) = candidates((path,), None, None)
    assert source.header == HEADER
    assert source.drain() == []
    append(path, STEP._replace(step=2))
    assert source.drain() == [STEP._replace(step=2)]
    source.close()


def test_a_folder_gives_every_file_in_it_and_the_callers_word_goes_first(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    write(mine / "steps-1-0.jsonl")
    write(mine / "steps-2-0.jsonl")
    write(mine / "steps-2-0.jsonl.1")
    announced = write(tmp_path / "steps-9-0.jsonl")
    found = candidates((announced,), mine, None)
    names = [source.name for source in found]
    assert names == [str(mine / "steps-1-0.jsonl"), str(mine / "steps-2-0.jsonl")]
    for source in found:
        source.close()


def test_where_there_are_no_records_it_says_how_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"no step records.*TWINKEEL_STEPS.*--log"):
        candidates((), None, None)
    with pytest.raises(CalibrationError, match="TWINKEEL_STEPS"):
        candidates((), tmp_path, None)
    with pytest.raises(CalibrationError, match="no such file"):
        candidates((), tmp_path / "none.jsonl", None)
    with pytest.raises(CalibrationError, match="cannot be read here"):
        candidates((tmp_path / "elsewhere.jsonl",), None, None)
    with pytest.raises(CalibrationError, match="2 engines"):
        candidates((tmp_path / "a", tmp_path / "b"), None, None)
    with pytest.raises(CalibrationError, match="exclude each other"):
        candidates((), tmp_path, tmp_path)
    with pytest.raises(CalibrationError, match="No such file"):
        candidates((), None, tmp_path / "vllm.log")


def test_files_of_a_folder_that_cannot_be_read_do_not_hide_the_right_one(tmp_path: Path) -> None:
    old = msgspec.structs.replace(HEADER, schema=9)
    (tmp_path / "steps-1-0.jsonl").write_bytes(encode_header(old))
    with pytest.raises(CalibrationError, match="schema 9 is unknown"):
        candidates((), tmp_path, None)
    right = tmp_path / "steps-2-0.jsonl"
    right.write_bytes(encode_header(HEADER) + b"nonsense\n" + encode_row(STEP))
    (source,) = candidates((), tmp_path, None)
    assert source.name == str(right)
    append(right, STEP._replace(step=2))
    assert source.drain() == [STEP._replace(step=2)]
    source.close()


def test_a_broken_file_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "steps-1-0.jsonl")
    source = FileSource(path)
    with path.open("ab") as file:
        file.write(b'["x", 1]\n')
    with pytest.raises(CalibrationError, match="line 2"):
        source.drain()
    source.close()


def test_requests_of_the_load_are_known_by_their_id() -> None:
    assert is_ours(request("cmpl-cal.decode-4-16.17-0-8a2f"))
    assert not is_ours(request("cmpl-9f3-0-8a2f"))
    assert not is_ours(request("chatcmpl-local.cal.1"))
    assert not is_ours(request("")._replace(id=None))


def test_the_text_log_is_read_from_where_it_stood_and_stamped_with_our_clock(
    tmp_path: Path,
) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("INFO starting\n" + LINE.format(second=1, step=1))
    source = LogSource(log)
    assert source.drain() == []
    whole = LINE.format(second=2, step=2) + "something else\n" + LINE.format(second=4, step=3)
    with log.open("a") as file:
        file.write(whole + LINE.format(second=5, step=4)[:60])  # a torn line
    before_ns = time.monotonic_ns()
    rows = source.drain()
    assert [row.step for row in rows if isinstance(row, StepRow)] == [2, 3]
    last, first = rows[-1], rows[0]
    assert isinstance(last, StepRow)
    assert last.decode_requests == 4
    assert last.elapsed_ns == 12_500_000
    assert before_ns <= last.at_ns <= time.monotonic_ns()
    assert last.at_ns - first.at_ns == 2_000_000_000
    with log.open("a") as file:
        file.write(LINE.format(second=5, step=4)[60:])
    (late,) = source.drain()
    assert isinstance(late, StepRow)
    assert late.step == 4
    source.close()


def test_a_log_that_was_cut_off_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("INFO starting\n" * 100)
    source = LogSource(log)
    log.write_text(LINE.format(second=1, step=7))
    (row,) = source.drain()
    assert isinstance(row, StepRow)
    assert row.step == 7


def test_a_log_without_iterations_gives_nothing(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text("")
    source = LogSource(log)
    log.write_text("INFO Iteration( of what?\n")
    assert source.drain() == []
