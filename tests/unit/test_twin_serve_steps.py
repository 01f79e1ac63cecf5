"""A served twin's step records: what a full disk costs, and how large they may become."""

from __future__ import annotations

import errno
import logging
from typing import TYPE_CHECKING

import pytest

from traces.steps import older_half, read_steps
from twin.serve import steps as module
from twin.serve.server import Options, spec_of
from twin.serve.steps import StepWriter

if TYPE_CHECKING:
    from pathlib import Path


class Disk:
    """Takes so much, a few bytes at a time."""

    def __init__(self, path: Path, room: int) -> None:
        self._file = path.open("ab", buffering=0)
        self.room = room

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._file.write(data[: min(self.room, 7)]) or 0
        self.room -= taken
        return taken

    def close(self) -> None:
        self._file.close()


def line(number: int) -> bytes:
    return b'["s",%d,%d,0,0,1,5,1,0,10,0,7]\n' % (number, number)


@pytest.fixture
def writer(tmp_path: Path) -> StepWriter:
    return StepWriter(tmp_path, spec_of(Options(profile="cpu/tiny-qwen3")), "m", "0.32.0")


def put(writer: StepWriter, *numbers: int) -> None:
    writer._lines += [line(number) for number in numbers]
    writer.flush()


def test_a_full_disk_costs_records_and_nothing_else(
    writer: StepWriter, caplog: pytest.LogCaptureFixture
) -> None:
    writer._file.close()
    disk = Disk(writer.path, 10**6)
    writer._file = disk  # type: ignore[assignment]
    put(writer, 1)
    disk.room = len(line(2)) + 5
    with caplog.at_level(logging.WARNING):
        for number in (2, 4, 6):
            put(writer, number, number + 1)
    (told,) = caplog.records
    assert "No space left on device" in told.getMessage()
    assert writer._lines == []
    disk.room = 10**6
    put(writer, 8)
    writer.close()
    found = read_steps(writer.path)
    assert [row.step for row in found.steps] == [1, 2, 3, 8], "3 was begun, and is ended"
    assert len(found.header.life) == 16


def test_the_file_begins_anew_at_its_size(
    writer: StepWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HALF_BYTES", 2000)
    for number in range(1000):
        put(writer, number)
    writer.close()
    halves = [older_half(writer.path), writer.path]
    assert all(half.stat().st_size < 3000 for half in halves)
    kept = [row.step for half in halves for row in read_steps(half).steps]
    assert kept == list(range(1000))[-len(kept) :]
    assert len(kept) > 40
