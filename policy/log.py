"""The decision log: encoding and decoding. Where the bytes go is the driver's business.

A segment is a row of frames, each a 4-byte big-endian length and a msgpack body: first the header,
then a snapshot of the policy, then frames of records, ``[[now_ns, event, [decisions]], ...]``, one
record for each step of the policy. Time is the log's own clock, which starts with the first segment
and runs on through the others. A last frame cut short by a crash is legal. The hash covers the
records only, so it does not depend on where frames and segments end or when the run took place.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

# msgspec reads these annotations when the program runs.
from policy.decisions import Decision  # noqa: TC001
from policy.events import Event  # noqa: TC001

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SCHEMA = 1
SEGMENT_BYTES = 64 * 1024 * 1024
BATCH_RECORDS = 512

_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder(order="sorted")


class LogError(ValueError):
    """A log that cannot be read: what is wrong with it, and where."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a segment begins with."""

    schema: int
    code_hash: str
    """Of the policy's sources (``policy.files.code_hash``)."""
    policy: str
    """The policy file in canonical form (``policy.parameters.canonical``)."""
    wall_ns: int
    """Time of day, since 1970, when the log's clock was 0; 0 in a simulated world."""
    segment: int = 0
    start_ns: int = 0
    """The log's clock when the segment began."""


class Record(msgspec.Struct, frozen=True, array_like=True):
    """One step of the policy."""

    now_ns: int
    event: Event
    decisions: tuple[Decision, ...]


class Segment(NamedTuple):
    header: Header
    snapshot: bytes
    records: Iterator[Record]


class Sink(Protocol):
    """Where a segment's bytes go, such as an open binary file."""

    def write(self, data: bytes, /) -> object: ...
    def close(self) -> object: ...


class HashLog:
    """Keeps a rolling hash of all records, and nothing else."""

    def __init__(self) -> None:
        self._pending: list[tuple[int, Event, tuple[Decision, ...]]] = []
        self._hash = blake2b(digest_size=32)
        self._flushed = 0
        self.last_ns = 0

    @property
    def count(self) -> int:
        """Records appended so far."""
        return self._flushed + len(self._pending)

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None:
        # Values never change, so they can be encoded later: 512 at once cost a third.
        pending = self._pending
        pending.append((now_ns, event, decisions))
        if len(pending) >= BATCH_RECORDS:
            self.flush()

    def flush(self) -> None:
        """Encode, hash and pass on what is pending. A live driver calls this on a timer."""
        pending = self._pending
        if not pending:
            return
        body = _ENCODER.encode(pending)
        self._hash.update(memoryview(body)[_array_header_bytes(len(pending)) :])
        self._flushed += len(pending)
        self.last_ns = pending[-1][0]
        pending.clear()
        self._take(body)

    def hexdigest(self) -> str:
        """Of everything appended so far."""
        self.flush()
        return self._hash.hexdigest()

    def close(self) -> None:
        self.flush()

    def _take(self, body: bytes) -> None:
        """What a log does with a frame's body, once it is hashed."""


class FullLog(HashLog):
    """Writes everything, in segments that can each be replayed on its own.

    ``open_segment(index)`` gives the sink for a segment; ``snapshot()`` is the policy's.
    """

    def __init__(
        self,
        header: Header,
        snapshot: Callable[[], bytes],
        open_segment: Callable[[int], Sink],
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        super().__init__()
        self._header = header
        self._snapshot = snapshot
        self._open_segment = open_segment
        self._segment_bytes = segment_bytes
        self._index = header.segment
        self.last_ns = header.start_ns
        self._written = 0
        self._sink: Sink | None = None
        self._begin()

    def close(self) -> None:
        super().close()
        self._end(kept=True)

    def _take(self, body: bytes) -> None:
        self._write(_frame(body))
        self._written += len(body) + _LENGTH.size
        if self._written >= self._segment_bytes:
            # Every record up to here is in the state, so the snapshot fits the next record.
            self._end(kept=False)
            self._index += 1
            self._begin()

    def _begin(self) -> None:
        self._written = 0
        header = msgspec.structs.replace(self._header, segment=self._index, start_ns=self.last_ns)
        self._open()
        self._write(_frame(_ENCODER.encode(header)) + _frame(self._snapshot()))

    def _open(self) -> None:
        self._sink = self._open_segment(self._index)

    def _write(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.write(data)

    def _end(self, kept: bool) -> None:
        """A segment is complete; ``kept`` is for logs that choose."""
        if self._sink is not None:
            self._sink.close()
            self._sink = None


class SampleLog(FullLog):
    """Hashes everything; keeps each ``every``-th segment (0: none) and the last one.

    The segment being filled is held in memory until it is known whether it is kept.
    """

    def __init__(
        self,
        header: Header,
        snapshot: Callable[[], bytes],
        open_segment: Callable[[int], Sink],
        segment_bytes: int = SEGMENT_BYTES,
        every: int = 0,
    ) -> None:
        self._every = every
        self._held: list[bytes] = []
        self._before: list[bytes] = []
        """The segment before, until the held one has records: then it is not the last."""
        super().__init__(header, snapshot, open_segment, segment_bytes)

    def _take(self, body: bytes) -> None:
        self._before.clear()
        super()._take(body)

    def _open(self) -> None:
        self._held = []

    def _write(self, data: bytes) -> None:
        self._held.append(data)

    def _end(self, kept: bool) -> None:
        if kept and self._before and not self._written:
            self._keep(self._index - 1, self._before)  # the last one with anything in it
        elif kept or (self._every > 0 and self._index % self._every == 0):
            self._keep(self._index, self._held)
        else:
            self._before = self._held
        self._held = []

    def _keep(self, index: int, pieces: list[bytes]) -> None:
        sink = self._open_segment(index)
        for data in pieces:
            sink.write(data)
        sink.close()


def _array_header_bytes(items: int) -> int:
    """How many bytes msgpack puts before an array's items."""
    return 1 if items < 16 else 3 if items < 65_536 else 5


def _frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


# Reading


class _AnySchema(msgspec.Struct):
    schema: int = 0


def read_segment(data: bytes) -> Segment:
    """The header, the snapshot, and the records one by one."""
    frames = _frames(data)
    first = next(frames, None)
    if first is None:
        raise LogError("the segment ends before its header is complete: nothing can be read")
    header = _header(first[1])
    snapshot = next(frames, None)
    if snapshot is None:
        raise LogError(
            f"segment {header.segment} ends before its snapshot is complete: use the one before it"
        )
    return Segment(header, snapshot[1], _records(frames))


def _header(body: bytes) -> Header:
    try:
        schema = msgspec.msgpack.decode(body, type=_AnySchema).schema
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise LogError(
            f"this is not a decision log: its first frame is no header ({error})"
        ) from None
    if schema != SCHEMA:
        raise LogError(
            f"the log has schema {schema}, and this version reads schema {SCHEMA}: read it with"
            " the version that wrote it"
        )
    return msgspec.msgpack.decode(body, type=Header)


def _frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(data):
        (size,) = _LENGTH.unpack_from(data, at)
        if at + 4 + size > len(data):
            return  # torn: the writer died in the middle of it
        yield at, data[at + 4 : at + 4 + size]
        at += 4 + size


def _records(frames: Iterator[tuple[int, bytes]]) -> Iterator[Record]:
    decoder = msgspec.msgpack.Decoder(list[Record])
    for at, body in frames:
        try:
            records = decoder.decode(body)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise LogError(f"the frame at byte {at} holds no records: {error}") from None
        yield from records
