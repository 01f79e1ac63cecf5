"""The plug-in's own parts, without vLLM: its rows, its file, its thread, its options."""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from controller.vllm_plugin.twinkeel_vllm_steps import files, options
from controller.vllm_plugin.twinkeel_vllm_steps.files import StepFile, clear_old
from controller.vllm_plugin.twinkeel_vllm_steps.options import make_folder, read_options
from controller.vllm_plugin.twinkeel_vllm_steps.rows import RowMaker, header
from controller.vllm_plugin.twinkeel_vllm_steps.writer import BUFFER, Writer
from traces.steps import (
    STEPS_FILE,
    RequestRow,
    StepRow,
    StepTail,
    decode_row,
    older_half,
    read_steps,
    steps_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOM = 2**16


def config(**more: Any) -> SimpleNamespace:
    """As much of vLLM's configuration as the header needs."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="qwen/tiny",
            served_model_name=["tiny", "alias"],
            dtype="torch.bfloat16",
            quantization=None,
            max_model_len=8192,
            enforce_eager=True,
            runner_type="generate",
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            block_size=16,
            num_gpu_blocks=1000,
            enable_prefix_caching=True,
            gpu_memory_utilization=0.9,
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=256,
            max_num_seqs=64,
            policy="priority",
            async_scheduling=True,
            long_prefill_token_threshold=0,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        device_config=SimpleNamespace(device_type="cpu"),
        speculative_config=None,
        **more,
    )


def first_line() -> dict[str, Any]:
    return header(config(), engine=0, engines=1, version="0.32.0", details=True, life="ab12")


def opened(folder: Path, engine: int = 0, room: int = ROOM) -> StepFile:
    file = StepFile(folder, engine, room, first_line)
    file.write(())
    return file


def row(number: int) -> tuple[Any, ...]:
    return ("s", number, number, 0, 0, 1, 5, 1, 0, 10, 0, 7)


def step_of(number: int) -> StepRow:
    return StepRow(*row(number)[1:])


# ---- header and rows ----


def test_the_header_is_what_the_reader_reads(tmp_path: Path) -> None:
    file = opened(tmp_path)
    file.close()
    read = read_steps(file.path).header
    assert (read.vllm, read.engine, read.details, read.life) == ("0.32.0", 0, True, "ab12")
    assert read.settings.served_model == "tiny"
    assert read.settings.dtype == read.settings.kv_cache_dtype == "bfloat16"
    assert read.settings.kv_blocks == 1000
    assert read.settings.scheduling_policy == "priority"
    assert abs(time.time_ns() - time.monotonic_ns() - (read.wall_ns - read.mono_ns)) < 10**9


def test_engines_share_the_blocks_and_an_unknown_setting_is_null() -> None:
    settings = header(config(), 1, 4, "0.32.0", True, "")["settings"]
    assert settings["kv_blocks"] == 250
    bare = header(SimpleNamespace(), 0, 1, "0.19.0", False, "")["settings"]
    assert bare.pop("task") == "generate"
    assert set(bare.values()) == {None}


def stats(details: Any = None, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        num_running_reqs=3,
        num_waiting_reqs=4,
        num_skipped_waiting_reqs=1,
        kv_cache_usage=0.25,
        iteration_details=details,
        **more,
    )


def details(**more: Any) -> SimpleNamespace:
    given = {
        "iteration_index": 17,
        "num_ctx_requests": 1,
        "num_ctx_tokens": 200,
        "num_generation_requests": 2,
        "num_generation_tokens": 2,
        "elapsed_ms": 1.5,
        "is_dummy": False,
    }
    return SimpleNamespace(**{**given, **more})


def iteration(*latencies: float, finished: tuple[Any, ...] = ()) -> SimpleNamespace:
    return SimpleNamespace(
        inter_token_latencies_iter=list(latencies),
        num_preempted_reqs=1,
        finished_requests=list(finished),
    )


def ended(**more: Any) -> SimpleNamespace:
    given = {
        "request_id": "cmpl-a",
        "num_prompt_tokens": 40,
        "num_cached_tokens": 16,
        "num_generation_tokens": 8,
        "num_preemptions": 2,
        "queued_time": 0.001,
        "prefill_time": 0.002,
        "decode_time": 0.003,
        "e2e_latency": 0.007,
        "finish_reason": "stop",
    }
    return SimpleNamespace(**{**given, **more})


def made(maker: RowMaker, *given: Any) -> list[StepRow | RequestRow]:
    """The rows as a reader gets them."""
    lines = [files._ENCODER.encode(each) for each in maker.rows(*given)]
    return [decode_row(line, "here") for line in lines]


def test_a_step_and_the_request_that_it_finished() -> None:
    found = made(
        RowMaker(False), 99, stats(details()), iteration(0.02, 0.01, finished=(ended(),)), True
    )
    assert found == [
        StepRow(99, 17, 1, 200, 2, 1_500_000, 3, 5, 250_000, 1, 10_000_000),
        RequestRow(99, "cmpl-a", 40, 16, 8, 2, 10**6, 2 * 10**6, 3 * 10**6, 7 * 10**6, "stop"),
    ]


def test_a_step_without_output_counts_and_one_without_work_does_not() -> None:
    maker = RowMaker(False)
    [chunk] = made(
        maker, 1, stats(details(num_generation_requests=0, num_generation_tokens=0)), None, True
    )
    assert isinstance(chunk, StepRow)
    assert (chunk.prefill_tokens, chunk.decode_requests, chunk.preemptions) == (200, 0, 0)
    assert made(maker, 2, stats(), None, True) == []
    assert made(maker, 2, stats(details(is_dummy=True)), None, True) == []
    assert made(maker, 2, None, None, True) == []
    [gone] = made(maker, 3, stats(), iteration(finished=(ended(),)), True)
    assert isinstance(gone, RequestRow)


def test_tokens_computed_again_are_prefill_unless_they_may_be_guesses() -> None:
    told = stats(details(num_generation_tokens=102))
    [again] = made(RowMaker(False), 1, told, None, True)
    [guessed] = made(RowMaker(True), 1, told, None, True)
    assert [each[3] for each in (again, guessed)] == [300, 200]


def test_without_details_what_is_not_known_is_null() -> None:
    maker = RowMaker(False)
    old = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=4, kv_cache_usage=0.25)
    rows = [*made(maker, 1, old, iteration(0.01, 0.01), False), *made(maker, 2, old, None, False)]
    assert rows == [
        StepRow(1, 0, None, None, 2, None, 3, 4, 250_000, 1, 10_000_000),
        StepRow(2, 1, None, None, 0, None, 3, 4, 250_000, 0, None),
    ]


def test_a_stamp_that_never_came_is_null() -> None:
    never = ended(queued_time=-5.0, request_id=None)
    [found] = made(RowMaker(False), 1, None, iteration(finished=(never,)), True)
    assert isinstance(found, RequestRow)
    assert found.queued_ns is None
    assert found.id is None
    [step] = made(RowMaker(False), 1, stats(details()), iteration(-0.001, 0.02), True)
    assert isinstance(step, StepRow)
    assert step.period_ns is None


# ---- the file ----


def test_half_of_the_room_is_filled_then_the_file_begins_anew(tmp_path: Path) -> None:
    file = opened(tmp_path)
    tail = StepTail(file.path)
    seen: list[StepRow | RequestRow] = []
    for number in range(4000):
        file.write([row(number)])
        if number % 100 == 0:
            seen += tail.read_new()
    file.close()
    seen += tail.read_new()
    tail.close()
    assert seen == [step_of(number) for number in range(4000)]
    halves = [older_half(file.path), file.path]
    assert all(half.stat().st_size <= ROOM // 2 + 60 for half in halves)
    kept = [each for half in halves for each in read_steps(half).steps]
    assert kept == seen[-len(kept) :]
    assert len(kept) > 600


def test_the_file_of_an_earlier_process_of_this_number_is_kept(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.write([row(1)])
    first.close()
    second = opened(tmp_path)
    second.write([row(2)])
    second.close()
    assert first.path == second.path
    assert read_steps(older_half(first.path)).steps == [step_of(1)]
    assert read_steps(second.path).steps == [step_of(2)]


def test_a_file_in_use_is_left_alone(tmp_path: Path) -> None:
    first = opened(tmp_path)
    second = opened(tmp_path)  # as another machine with this process number would
    first.write([row(1)])
    second.write([row(2)])
    assert first.path != second.path
    assert read_steps(first.path).steps == [step_of(1)]
    assert read_steps(second.path).steps == [step_of(2)]
    assert steps_file(tmp_path) in (first.path, second.path)
    for each in (first, second):
        assert STEPS_FILE.fullmatch(each.path.name), "a reader knows it by its name"
    first.close()
    second.close()


def test_a_file_that_another_user_made_is_not_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / f"steps-{os.getpid()}-0.jsonl"
    theirs.touch()
    really = os.fstat

    def foreign(fd: int) -> os.stat_result | SimpleNamespace:
        status = really(fd)
        if not os.path.samestat(status, theirs.stat()):
            return status
        return SimpleNamespace(st_uid=os.getuid() + 1, st_size=0)

    monkeypatch.setattr(os, "fstat", foreign)
    file = opened(tmp_path)
    file.write([row(1)])
    file.close()
    assert theirs.read_bytes() == b""
    assert read_steps(file.path).steps == [step_of(1)]


def test_the_group_may_read_what_is_in_a_given_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.umask(0o022)
    try:
        given = tmp_path / "given"
        given.mkdir(mode=0o770)
        given.chmod(0o2770)
        file = opened(given)
        assert file.path.stat().st_mode & 0o777 == 0o640
        assert given.stat().st_mode & 0o7777 == 0o2770, "it is left as it was"
        file.close()
        monkeypatch.setattr(options, "default_folder", lambda: tmp_path / "own")
        file = opened(tmp_path / "own")
        assert file.path.stat().st_mode & 0o777 == 0o600
        assert file.path.parent.stat().st_mode & 0o777 == 0o700
        file.close()
    finally:
        os.umask(before)


def test_a_file_that_was_cleared_away_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "steps"
    file = opened(folder)
    file.write([row(1)])
    file.path.unlink()
    folder.rmdir()
    file.write([row(2)])
    file.close()
    assert read_steps(file.path).steps == [step_of(2)]


def test_a_full_disk_leaves_no_broken_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = opened(tmp_path)
    file.write([row(1)])
    really = os.write
    room = [20]

    def small_disk(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = min(room[0], len(data))
        room[0] -= taken
        return really(fd, data[:taken])

    monkeypatch.setattr(os, "write", small_disk)
    file.write([row(2), row(3)])  # taken, though a part of it waits
    for _ in range(3):
        with pytest.raises(OSError, match="No space"):
            file.write([row(4)])
    assert read_steps(file.path).steps == [step_of(1)]
    room[0] = 10**6
    file.write([row(5)])
    file.close()
    assert read_steps(file.path).steps == [step_of(1), step_of(2), step_of(3), step_of(5)]


def test_of_processes_that_are_gone_only_the_newest_files_stay(tmp_path: Path) -> None:
    living = opened(tmp_path)
    for number in range(files.LIVES_KEPT + 3):
        for name in (f"steps-9{number}-0.jsonl", f"steps-9{number}-0.jsonl.1"):
            path = tmp_path / name
            path.write_text("old", encoding="utf-8")
            os.utime(path, ns=(10**18 + number, 10**18 + number))
    os.utime(living.path, ns=(10**17, 10**17))  # by its age it would go
    clear_old(tmp_path)
    kept = {path.name for path in tmp_path.glob("*.jsonl")}
    assert kept == {living.path.name} | {
        f"steps-9{number}-0.jsonl" for number in range(3, files.LIVES_KEPT + 3)
    }
    assert len(list(tmp_path.glob("*.1"))) == files.LIVES_KEPT
    living.close()


def test_clearing_is_not_disturbed_by_another_that_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(files.LIVES_KEPT + 3):
        (tmp_path / f"steps-9{number}-0.jsonl").touch()
        os.utime(tmp_path / f"steps-9{number}-0.jsonl", ns=(10**18 + number, 10**18 + number))
    really = Path.lstat

    def gone(path: Path) -> os.stat_result:
        if path.name == "steps-91-0.jsonl":
            raise FileNotFoundError(path)
        return really(path)

    monkeypatch.setattr(Path, "lstat", gone)
    clear_old(tmp_path)
    assert not (tmp_path / "steps-90-0.jsonl").exists()
    assert (tmp_path / "steps-93-0.jsonl").exists()


def test_where_files_cannot_be_locked_none_is_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    for number in range(files.LIVES_KEPT + 3):
        (tmp_path / f"steps-9{number}-0.jsonl").touch()
    monkeypatch.setattr(files.fcntl, "flock", unknown)
    clear_old(tmp_path)
    assert len(list(tmp_path.iterdir())) == files.LIVES_KEPT + 3


# ---- the thread ----


class Disk:
    """A file that fails when it is told to."""

    def __init__(self) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.error: Exception | None = None
        self.closed = False

    def write(self, rows: Iterable[tuple[Any, ...]]) -> None:
        if self.error is not None:
            raise self.error
        self.rows += rows

    def close(self) -> None:
        self.closed = True


def numbered(number: int) -> list[tuple[Any, ...]]:
    if number == 13:
        raise AttributeError("vLLM changed")
    return [row(number)]


def test_entries_become_rows_in_the_background_and_at_the_end() -> None:
    disk, told, lost = Disk(), list[str](), list[int]()
    writer = Writer(disk, numbered, told.append, lost.append)
    writer.start()
    for number in (1, 2, 3):
        writer.put((number,))
    deadline_s = time.monotonic() + 5
    while len(disk.rows) < 3 and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert disk.rows == [row(1), row(2), row(3)]
    writer.put((4,))
    writer.close()
    assert disk.rows[-1] == row(4)
    assert disk.closed
    assert (told, lost) == ([], [])


def test_what_cannot_be_written_is_counted_and_said_once() -> None:
    disk, told, lost = Disk(), list[str](), list[int]()
    writer = Writer(disk, numbered, told.append, lost.append)
    disk.error = OSError(errno.ENOSPC, "No space left on device")
    for _ in range(2):
        writer.put((1,))
        writer._drain()
    disk.error = None
    for number in (13, 1):
        writer.put((number,))
        writer._drain()
    assert lost == [1, 1, 1]
    assert [text for text in told if "No space" in text] == told
    assert len(told) == 1
    assert disk.rows == [row(1)]


def test_the_buffer_is_bounded() -> None:
    disk, told, lost = Disk(), list[str](), list[int]()
    writer = Writer(disk, lambda number: [row(number)], told.append, lost.append)
    for number in range(BUFFER + 7):
        writer.put((number,))
    writer._drain()
    assert lost == [7]
    assert len(disk.rows) == BUFFER


# ---- the class that vLLM makes ----


@pytest.fixture(scope="module")
def plugin() -> Iterator[Any]:
    """The module `logger`, with as much of vLLM as it imports."""
    stats_of_vllm: dict[str, Any] = {"iteration_details": None}
    parts = {
        "vllm": {"__version__": "0.32.0"},
        "vllm.v1": {},
        "vllm.v1.metrics": {},
        "vllm.v1.metrics.loggers": {"StatLoggerBase": type("StatLoggerBase", (), {})},
        "vllm.v1.metrics.stats": {"SchedulerStats": type("SchedulerStats", (), stats_of_vllm)},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, members in parts.items():
            module = ModuleType(name)
            module.__dict__.update(members)
            patch.setitem(sys.modules, name, module)
        from controller.vllm_plugin.twinkeel_vllm_steps import logger

        yield logger


def observed(details: bool = True) -> SimpleNamespace:
    told = SimpleNamespace(enable_logging_iteration_details=details)
    return config(observability_config=told)


def test_it_records_and_tells_where(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINKEEL_STEPS", str(tmp_path))
    for number in range(files.LIVES_KEPT + 1):
        (tmp_path / f"steps-9{number}-7.jsonl").touch()
    given = observed()
    recorders = [plugin.StepRecorder(given, engine) for engine in (0, 1)]
    recorders[0].record(stats(details()), iteration(0.01), engine_idx=0)  # before it was told
    recorders[1].log_engine_initialized()
    recorders[1].record(stats(details(iteration_index=3)), None, mm_cache_stats=None, new_one=1)
    for recorder in recorders:
        recorder.close()
        recorder.record(stats(details()), None)  # no more
    found = [read_steps(steps_file(tmp_path, engine)) for engine in (0, 1)]
    assert [[step.step for step in each.steps] for each in found] == [[17], [3]]
    assert [each.header.settings.kv_blocks for each in found] == [500, 500]
    metrics = generate_latest(REGISTRY).decode()
    path = steps_file(tmp_path, 1)
    life = found[1].header.life
    assert len(life) == 16
    assert f'twinkeel_steps_info{{engine="1",life="{life}",path="{path}"}} 1.0' in metrics
    left = list(tmp_path.glob("steps-9*-7.jsonl"))
    assert len(left) < files.LIVES_KEPT, "in a given folder old ones are cleared, too"


def test_loggers_made_anew_take_over(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINKEEL_STEPS", str(tmp_path))
    given = observed(details=False)
    for place in range(2):
        recorder = plugin.StepRecorder(given, 0)
        recorder.log_engine_initialized()
        recorder.record(stats(), iteration(*[0.01] * (place + 1)))
    recorder.close()
    path = steps_file(tmp_path)
    halves = [read_steps(older_half(path)), read_steps(path)]
    assert [[step.decode_requests for step in half.steps] for half in halves] == [[1], [2]]
    assert not halves[0].header.details


@pytest.mark.parametrize("variable", ["TWINKEEL_STEPS=off", "TWINKEEL_STEPS_MIB=much"])
def test_without_a_file_it_does_nothing(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv(*variable.split("=", 1))
    recorder = plugin.StepRecorder(observed(), 0)
    recorder.log_engine_initialized()
    recorder.record(stats(details()), iteration(0.01))
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told_and_no_error(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWINKEEL_STEPS", str(tmp_path / "file" / "steps"))
    recorder = plugin.StepRecorder(observed(), 3)
    for _ in range(3):
        recorder.record(stats(details()), iteration(0.01))
    told = [
        each.message for each in caplog.records if "no step records of engine 3" in each.message
    ]
    assert len(told) == 1


def test_only_the_lines_of_the_steps_are_stopped(
    plugin: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TWINKEEL_STEPS", str(tmp_path))
    target = logging.getLogger(plugin.VLLM_LOGGER)
    monkeypatch.setattr(target, "filters", [])
    line = "%sIteration(%d): %d context requests"
    with caplog.at_level(logging.INFO, target.name):
        for quiet in ("0", "1"):
            monkeypatch.setenv("TWINKEEL_STEPS_QUIET", quiet)
            recorder = plugin.StepRecorder(observed(), 0)
            recorder.log_engine_initialized()
            target.info(line, "Engine 000: ", 1, 2)
            target.info("Engine %s: Avg prompt throughput", quiet)
            recorder.close()
    assert [each.message for each in caplog.records if each.name == target.name] == [
        "Engine 000: Iteration(1): 2 context requests",
        "Engine 0: Avg prompt throughput",
        "Engine 1: Avg prompt throughput",
    ]


# ---- options ----


def test_the_options_have_defaults_and_say_what_is_wrong(tmp_path: Path) -> None:
    usual = read_options({})
    assert usual.folder == options.default_folder()
    assert (usual.room_bytes, usual.quiet) == (32 * 2**20, True)
    given = read_options(
        {"TWINKEEL_STEPS": str(tmp_path), "TWINKEEL_STEPS_MIB": "1.5", "TWINKEEL_STEPS_QUIET": "0"}
    )
    assert (given.folder, given.room_bytes) == (tmp_path, 3 * 2**19)
    assert not given.quiet
    assert read_options({"TWINKEEL_STEPS": "OFF"}).folder is None
    for room in ("much", "0", "nan", "inf"):
        with pytest.raises(ValueError, match=f"TWINKEEL_STEPS_MIB is '{room}'"):
            read_options({"TWINKEEL_STEPS_MIB": room})


def test_the_default_folder_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "twinkeel-steps"
    monkeypatch.setattr(options, "default_folder", lambda: folder)
    folder.mkdir(mode=0o755)
    make_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="not this user's own folder"):
        make_folder(folder)
