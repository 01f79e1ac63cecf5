"""The decision log: frames, segments, hashes, torn ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from policy.decisions import Dispatch, Refused, Settled
from policy.events import Cancelled, FirstToken
from policy.log import (
    BATCH_RECORDS,
    FullLog,
    HashLog,
    Header,
    LogError,
    Record,
    SampleLog,
    read_segment,
)
from tests.policy_support import arrived, up

if TYPE_CHECKING:
    from policy.log import Log

HEADER = Header(schema=1, code_hash="c0de", policy="{}", wall_ns=123)
RECORDS = [
    Record(5, up(3, models=("m",)), ()),
    Record(6, arrived(0, prefix=(1, 2**61), prefix_block_bytes=64), (Dispatch(0, 3, "turbo"),)),
    Record(6, FirstToken(0, 3), (Refused("FirstToken", "why"),)),
    Record(2**60, Cancelled(0), (Settled(0, "cancelled", "", "client", 499),)),
]


class Disk:
    """Segments in memory."""

    def __init__(self) -> None:
        self.segments: dict[int, bytearray] = {}
        self.closed: list[int] = []

    def open(self, index: int) -> File:
        assert index not in self.segments, "a segment is opened once"
        self.segments[index] = bytearray()
        return File(self, index)


class File:
    def __init__(self, disk: Disk, index: int) -> None:
        self.disk = disk
        self.index = index

    def write(self, data: bytes) -> int:
        self.disk.segments[self.index] += data
        return len(data)

    def close(self) -> None:
        self.disk.closed.append(self.index)


def fill(log: Log, records: list[Record]) -> None:
    for record in records:
        log.append(record.now_ns, record.event, record.decisions)
    log.close()


def test_what_is_written_is_read_back() -> None:
    disk = Disk()
    fill(FullLog(HEADER, lambda: b"state", disk.open), RECORDS)
    header, snapshot, records = read_segment(bytes(disk.segments[0]))
    assert header == HEADER
    assert snapshot == b"state"
    assert list(records) == RECORDS
    assert disk.closed == [0]


@pytest.mark.parametrize("count", [1, 15, 16, BATCH_RECORDS, 3 * BATCH_RECORDS + 7])
@pytest.mark.parametrize("flush_every", [1, 7, 10**9])
def test_the_hash_does_not_depend_on_how_the_log_was_cut(count: int, flush_every: int) -> None:
    records = [Record(at, Cancelled(at), ()) for at in range(count)]
    hashed = HashLog()
    fill(hashed, records)
    disk = Disk()
    full = FullLog(HEADER, lambda: b"s", disk.open, segment_bytes=300)
    for record in records:
        full.append(record.now_ns, record.event, record.decisions)
        if record.now_ns % flush_every == 0:
            full.flush()
    full.close()
    sample = SampleLog(HEADER, lambda: b"s", Disk().open, segment_bytes=300)
    fill(sample, records)
    assert full.hexdigest() == hashed.hexdigest() == sample.hexdigest()
    assert full.count == hashed.count == sample.count == count
    again = [r for index in sorted(disk.segments) for r in segment(disk, index)]
    assert again == records


def segment(disk: Disk, index: int) -> list[Record]:
    return list(read_segment(bytes(disk.segments[index])).records)


def test_other_decisions_give_another_hash() -> None:
    digests = set[str]()
    for replica in (1, 2):
        log = HashLog()
        log.append(1, arrived(0), (Dispatch(0, replica, ""),))
        digests.add(log.hexdigest())
    assert len(digests) == 2


def test_a_new_segment_begins_with_the_state_at_that_point() -> None:
    disk = Disk()
    done = 0
    log = FullLog(HEADER, lambda: b"%d" % done, disk.open, segment_bytes=1)
    for at in range(3 * BATCH_RECORDS):
        done += 1
        log.append(at, Cancelled(at), ())
    log.close()
    read = [read_segment(bytes(data)) for data in disk.segments.values()]
    assert [int(part.snapshot) for part in read] == [0, 512, 1024, 1536]
    assert [part.header.segment for part in read] == [0, 1, 2, 3]
    assert [part.header.start_ns for part in read] == [0, 511, 1023, 1535]


def test_a_sample_keeps_every_nth_segment_and_the_last() -> None:
    records = [Record(at, Cancelled(at), ()) for at in range(BATCH_RECORDS * 7 + 1)]
    for every, segment_bytes, kept in ((0, 2000, [7]), (3, 2000, [0, 3, 6, 7]), (0, 1, [7])):
        disk = Disk()
        fill(SampleLog(HEADER, lambda: b"s", disk.open, segment_bytes, every), records)
        assert sorted(disk.segments) == kept
        assert segment(disk, 7) == records[-1:]


def test_a_torn_last_frame_is_legal_wherever_it_is_torn() -> None:
    disk = Disk()
    log = FullLog(HEADER, lambda: b"state", disk.open)
    log.append(1, Cancelled(1), ())
    log.flush()
    whole = len(disk.segments[0])
    log.append(2, Cancelled(2), ())
    log.close()
    data = bytes(disk.segments[0])
    for end in range(whole, len(data)):
        assert [record.now_ns for record in read_segment(data[:end]).records] == [1]
    for end in range(60):
        with pytest.raises(LogError, match="ends before"):
            read_segment(data[:end])


def test_an_unknown_schema_is_refused_with_a_hint() -> None:
    body = msgspec.msgpack.encode({"schema": 9, "whatever": 1})
    with pytest.raises(LogError, match=r"has schema 9.*reads schema 1.*version that wrote it"):
        read_segment(len(body).to_bytes(4, "big") + body)


def test_what_is_no_log_is_refused() -> None:
    with pytest.raises(LogError, match="not a decision log"):
        read_segment(b"\x00\x00\x00\x02hi")


def test_a_frame_without_records_is_named_by_its_place() -> None:
    disk = Disk()
    fill(FullLog(HEADER, lambda: b"state", disk.open), [])
    data = bytes(disk.segments[0])
    _, _, records = read_segment(data + b"\x00\x00\x00\x01\x07")
    with pytest.raises(LogError, match=f"frame at byte {len(data)} holds no records"):
        list(records)
