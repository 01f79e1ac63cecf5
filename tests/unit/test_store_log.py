"""The live decision log: what reaches the disk, and what happens when it does not."""

from __future__ import annotations

import errno
import time
from typing import TYPE_CHECKING, Any

import pytest

from controller.store import log as log_module
from controller.store.log import LiveLog, next_index, open_file, segments
from policy.audit import replay
from policy.compose import build_policy
from policy.events import Cancelled, FirstToken, PolicySwitched
from policy.log import read_segment
from policy.parameters import canonical
from tests.policy_support import MS, arrived, parameters, up

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from policy.events import Event
    from policy.log import Sink


class Traffic:
    """A policy that is kept busy, and its log."""

    def __init__(self, folder: Path, discipline: str = "tiered", **options: Any) -> None:
        params = parameters(discipline)
        self.policy = build_policy(params)
        self.troubles: list[str] = []
        self.log = LiveLog(
            folder, self.policy, params, 1_000, on_trouble=self.troubles.append, **options
        )
        self.now_ns = 1_000
        self.requests = 0
        self.feed(up(0))

    def feed(self, event: Event) -> None:
        self.now_ns += MS
        self.log.append(self.now_ns, event, tuple(self.policy.step(self.now_ns, event)))

    def serve(self, count: int) -> None:
        """Requests that leave again, some after their first token."""
        for request in range(self.requests, self.requests + count):
            self.feed(arrived(request, user=f"u{request % 5}"))
            if request % 3:
                self.feed(FirstToken(request, 0))
            self.feed(Cancelled(request))
        self.requests += count


def on_disk(folder: Path) -> list[bytes]:
    return [path.read_bytes() for _, path in segments(folder)]


def records_in(folder: Path) -> int:
    return sum(len(list(read_segment(data).records)) for data in on_disk(folder))


def until(true: Callable[[], object], log: LiveLog | None = None) -> None:
    end_s = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end_s, "it never came true"
        if log is not None:
            log.flush()
        time.sleep(0.002)


class Disk:
    """The real disk, which fails on demand."""

    def __init__(self) -> None:
        self.full = False
        self.at_open = False
        self.part = 0
        self.held = False

    def open(self, path: Path) -> Sink:
        if self.full and self.at_open:
            raise OSError(errno.ENOSPC, "No space left on device")
        return File(self, open_file(path))


class File:
    def __init__(self, disk: Disk, file: Sink) -> None:
        self.disk = disk
        self.file = file

    def write(self, data: bytes) -> None:
        while self.disk.held:
            time.sleep(0.001)
        if self.disk.full:
            self.file.write(data[: self.disk.part])
            raise OSError(errno.ENOSPC, "No space left on device")
        self.file.write(data)

    def close(self) -> None:
        self.file.close()


def test_what_was_flushed_is_on_the_disk_at_once(tmp_path: Path) -> None:
    traffic = Traffic(tmp_path)
    traffic.serve(10)
    traffic.log.flush()
    until(lambda: not traffic.log.waiting_bytes)
    assert records_in(tmp_path) == traffic.log.count  # it is still open
    traffic.log.close()
    assert replay(on_disk(tmp_path)) is None
    assert not traffic.troubles
    assert traffic.log.dropped_bytes == 0


def test_the_header_says_when_and_by_what(tmp_path: Path) -> None:
    traffic = Traffic(tmp_path)
    traffic.log.close()
    header = read_segment(on_disk(tmp_path)[0]).header
    assert header.start_ns == 1_000
    assert abs(header.wall_ns + header.start_ns - time.time_ns()) < 10_000 * MS
    assert header.policy == canonical(parameters())


@pytest.mark.parametrize("discipline", ["fifo", "tiered"])
def test_segments_end_at_their_size_and_the_old_ones_go(tmp_path: Path, discipline: str) -> None:
    traffic = Traffic(tmp_path, discipline, segment_bytes=5_000, keep_bytes=60_000)
    for _ in range(60):
        traffic.serve(20)
        traffic.log.flush()
    traffic.log.close()
    numbers = [number for number, _ in segments(tmp_path)]
    assert numbers[0] > 0
    assert numbers == list(range(numbers[0], traffic.log.segment + 1))
    sizes = [len(data) for data in on_disk(tmp_path)]
    assert sum(sizes) <= 60_000 + max(sizes)
    assert replay(on_disk(tmp_path)) is None


def test_two_segments_are_kept_however_small_the_room(tmp_path: Path) -> None:
    traffic = Traffic(tmp_path, segment_bytes=1, keep_bytes=0)
    for _ in range(10):
        traffic.serve(1)
        traffic.log.flush()
    traffic.log.close()
    assert [number for number, _ in segments(tmp_path)] == [9, 10]


def test_numbers_go_on_above_what_is_there_torn_or_not(tmp_path: Path) -> None:
    (tmp_path / "decisions.11.log.torn").touch()
    (tmp_path / "decisions.4.log").touch()
    (tmp_path / "decisions.old.log").touch()
    (tmp_path / ".decisions.12.tmp").touch()
    assert next_index(tmp_path) == 12
    traffic = Traffic(tmp_path)
    traffic.log.close()
    assert [number for number, _ in segments(tmp_path)] == [4, 12]
    assert not (tmp_path / ".decisions.12.tmp").exists()


def test_a_switch_is_in_the_next_segments_header(tmp_path: Path) -> None:
    traffic = Traffic(tmp_path, segment_bytes=1)
    old, new = parameters(), parameters(name="other", tiers={"lend_wait_ms": 7})
    traffic.feed(PolicySwitched(canonical(old), canonical(new)))
    traffic.serve(2)
    traffic.log.flush()
    traffic.serve(2)
    traffic.log.flush()
    traffic.log.close()
    headers = [read_segment(data).header.policy for data in on_disk(tmp_path)]
    assert headers == [canonical(old), canonical(new), canonical(new)]
    assert replay(on_disk(tmp_path)) is None


@pytest.mark.parametrize("at_open", [False, True])
@pytest.mark.parametrize("part", [0, 3, 40])
def test_a_full_disk_leaves_a_gap_and_everything_there_audits(
    tmp_path: Path, at_open: bool, part: int
) -> None:
    disk = Disk()
    disk.at_open, disk.part = at_open, part
    traffic = Traffic(tmp_path, retry_s=0.01, open_file=disk.open)
    traffic.serve(20)
    traffic.log.flush()
    until(lambda: not traffic.log.waiting_bytes)
    before = records_in(tmp_path)

    disk.full = True
    for _ in range(20):
        traffic.serve(5)
        traffic.log.flush()
        time.sleep(0.005)
    assert traffic.log.trouble
    assert len(traffic.troubles) == 1, "told once"
    assert "segment 0" in traffic.troubles[0]
    assert "No space left" in traffic.troubles[0]
    lost = traffic.log.dropped_bytes
    assert lost > 0
    assert len(on_disk(tmp_path)) == 1, "a segment without a whole beginning is none"

    disk.full = False
    until(lambda: not traffic.log.trouble, traffic.log)
    traffic.serve(20)
    traffic.log.close()
    assert len(on_disk(tmp_path)) == 2
    assert before + 20 * 3 - 10 < records_in(tmp_path) < traffic.log.count
    assert replay(on_disk(tmp_path)) is None
    assert not list(tmp_path.glob("*.tmp"))
    assert not list(tmp_path.glob(".*"))

    disk.full = True  # another trouble is told again
    assert len(traffic.troubles) == 1


def test_a_second_trouble_is_told_again(tmp_path: Path) -> None:
    disk = Disk()
    traffic = Traffic(tmp_path, retry_s=0.001, open_file=disk.open)
    for told in (1, 2):
        disk.full = True
        traffic.serve(3)
        until(lambda told=told: len(traffic.troubles) == told, traffic.log)
        disk.full = False
        until(lambda: not traffic.log.trouble, traffic.log)
    traffic.log.close()
    assert replay(on_disk(tmp_path)) is None


def test_a_disk_that_does_not_keep_up_costs_records_not_memory(tmp_path: Path) -> None:
    disk = Disk()
    traffic = Traffic(tmp_path, retry_s=0.001, queue_bytes=20_000, open_file=disk.open)
    disk.held = True
    most = 0
    for _ in range(300):
        traffic.serve(5)
        traffic.log.flush()
        most = max(most, traffic.log.waiting_bytes)
    assert 10_000 < most <= 20_000 + 5_000
    assert len(traffic.troubles) == 1
    assert "does not keep up" in traffic.troubles[0]
    disk.held = False
    until(lambda: not traffic.log.trouble, traffic.log)
    traffic.serve(5)
    traffic.log.close()
    assert replay(on_disk(tmp_path)) is None
    assert traffic.log.dropped_bytes > 0
    assert records_in(tmp_path) < traffic.log.count


def test_the_last_state_is_saved_when_it_ends_in_a_gap(tmp_path: Path) -> None:
    disk = Disk()
    traffic = Traffic(tmp_path, retry_s=60.0, open_file=disk.open)
    traffic.serve(3)
    disk.full = True
    until(lambda: traffic.troubles, traffic.log)
    traffic.serve(3)
    disk.full = False
    traffic.log.close()
    assert read_segment(on_disk(tmp_path)[-1]).snapshot == traffic.policy.snapshot()


def test_close_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "CLOSE_S_MOST", 0.05)
    disk = Disk()
    traffic = Traffic(tmp_path, open_file=disk.open)
    until(lambda: not traffic.log.waiting_bytes)
    disk.held = True
    traffic.serve(1)
    traffic.log.close()
    disk.held = False
