"""Whether the twin and the controller run the same policy code, and what an audit of it finds.

A log is replayed, and its header compared with the code at hand; one byte of a log is changed, in
turn in all of its places; the imports between the packages are counted.
"""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from policy.audit import replay
from policy.files import code_hash
from policy.log import read_segment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[2]

PLACES = ("decision", "event", "time", "snapshot", "header", "length")
"""Where a byte lies: in a record's decisions, its event or its time; in the policy's snapshot or
the header that the segment begins with; in the length before a frame."""
_LENGTH = struct.Struct(">I")
_ENCODER = msgspec.msgpack.Encoder(order="sorted")


class Audited(NamedTuple):
    """What an audit of a folder's decision log gave."""

    events: int
    decisions: int
    equal: bool
    """Replay decides the same, byte for byte, and there is something to decide."""
    segments: int
    other_code: int
    """Segments whose header names other code than this."""
    policies: frozenset[str]
    """In canonical form, those of the headers."""


def audited(folder: Path) -> Audited:
    """Replay a decision log, and look at its headers.

    Raises:
        LogError: it is no log that this version reads.
    """
    segments = [path.read_bytes() for path in folder.glob("decisions.*.log")]
    headers = [read_segment(each).header for each in segments]
    records = [record for each in segments for record in read_segment(each).records]
    decisions = sum(len(record.decisions) for record in records)
    return Audited(
        len(records), decisions, bool(decisions) and replay(segments) is None, len(segments),
        sum(header.code_hash != code_hash() for header in headers),
        frozenset(header.policy for header in headers),
    )  # fmt: skip


def contracts_code() -> int:
    """The exit code of import-linter; 0: all contracts of pyproject.toml are kept."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


def import_chains(packages: Sequence[str]) -> dict[str, dict[str, int]]:
    """How many chains of imports, direct or not, lead from each package to each other one."""
    import grimp

    graph = grimp.build_graph(*packages, cache_dir=None)
    return {
        importer: {
            to: len(graph.find_shortest_chains(importer, to, as_packages=True))
            for to in packages
            if to != importer
        }
        for importer in packages
    }


def places(segment: bytes) -> dict[str, list[int]]:
    """The bytes of a segment, by place.

    Raises:
        ValueError: the segment is not laid out as this reads it.
    """
    found: dict[str, list[int]] = {place: [] for place in PLACES}
    frames = list(_frames(segment))
    for at, size in frames:
        found["length"] += range(at, at + _LENGTH.size)
        body = at + _LENGTH.size
        if at == frames[0][0]:
            found["header"] += range(body, body + size)
        elif at == frames[1][0]:
            found["snapshot"] += range(body, body + size)
    records = read_segment(segment).records
    for at, size in frames[2:]:
        body = segment[at + _LENGTH.size : at + _LENGTH.size + size]
        count, begins = _items(body)
        place = at + _LENGTH.size + begins
        for _ in range(count):
            record = next(records)
            parts = (("time", record.now_ns), ("event", record.event),
                     ("decision", record.decisions))  # fmt: skip
            place += 1  # the mark of a list of three
            for name, value in parts:
                data = _ENCODER.encode(value)
                if segment[place : place + len(data)] != data:
                    raise ValueError(f"byte {place}: a record's {name} was expected there")
                found[name] += range(place, place + len(data))
                place += len(data)
    return found


def _frames(segment: bytes) -> Iterator[tuple[int, int]]:
    at = 0
    while at + _LENGTH.size <= len(segment):
        (size,) = _LENGTH.unpack_from(segment, at)
        yield at, size
        at += _LENGTH.size + size


def _items(body: bytes) -> tuple[int, int]:
    """Of a list: how many items, and where the first begins."""
    if body[0] >> 4 == 9:
        return body[0] & 15, 1
    if body[0] == 0xDC:
        return int.from_bytes(body[1:3], "big"), 3
    raise ValueError(f"a frame begins with {body[:1]!r}, which is no list of records")


def is_found(segment: bytes) -> bool:
    """Whether the audit tells this log from one that the policy made, or refuses it."""
    try:
        return replay([segment]) is not None
    except Exception:  # whatever it is that can no longer be read, restored or told
        return True


def found_counts(segment: bytes, each: int, seed: int = 1) -> dict[str, tuple[int, int]]:
    """By place: how many changes of one byte were found, of how many. Each makes one random byte of
    that place another one; ``each``: how many are tried in every place."""
    draw = random.Random(seed)  # noqa: S311
    counts = {}
    for place, bytes_there in places(segment).items():
        hits = 0
        for _ in range(each):
            forged = bytearray(segment)
            forged[draw.choice(bytes_there)] ^= draw.randrange(1, 256)
            hits += is_found(bytes(forged))
        counts[place] = (hits, each)
    return counts
