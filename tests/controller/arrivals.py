"""A served twin that writes down what arrives, and what this says about limits.

``python -m tests.controller.arrivals FILE`` is one. Who asked stands in the prompt, as ``mark``
puts it there: callers' names do not go on to servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import sys
import tempfile
import time
from bisect import bisect_left
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from policy.decisions import Dispatch
from policy.events import Arrived
from policy.log import read_segment
from tests.controller.processes import MODEL, PROFILE, Twin, segments, serving
from twin.serve.server import Options, Server, spec_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from aiohttp import web

SECOND_NS = 1_000_000_000
MARK = re.compile(rb"user=(\S*) session=(\S*) number=(\d+)")


class Seen(NamedTuple):
    """A request, as the server saw it. Times are the machine's time of day."""

    user: str
    session: str
    number: int
    came_ns: int
    ended_ns: int


def mark(user: str, session: str, number: int) -> str:
    """A prompt that says who asks."""
    return f"user={user} session={session} number={number} tell me a story"


class Recording(Server):
    """Writes a line when a request has ended."""

    out: Path

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        came_ns = time.time_ns()
        try:
            return await super()._handle(request)
        finally:
            body = request._read_bytes or b""
            found = MARK.search(body)
            if found is not None:
                user, session, number = (part.decode() for part in found.groups())
                row = Seen(user, session, int(number), came_ns, time.time_ns())
                with self.out.open("a") as sink:
                    sink.write(json.dumps(row) + "\n")


@contextlib.contextmanager
def recording_twin() -> Iterator[tuple[Twin, Path]]:
    """One on a free port, and the file that it writes."""
    with (
        tempfile.NamedTemporaryFile(prefix="twinkeel-seen-") as rows,
        serving(["tests.controller.arrivals", rows.name]) as twin,
    ):
        yield twin, Path(rows.name)


def seen(files: Iterable[Path]) -> list[Seen]:
    """All that arrived, in order."""
    rows = [Seen(*json.loads(line)) for each in files for line in each.read_text().splitlines()]
    return sorted(rows, key=lambda row: row.came_ns)


# ---- what it says ----


def breaches(times_ns: Iterable[int], limit: int, window_ns: int = SECOND_NS) -> int:
    """Half-open windows, each begun by a request, in which there were more than ``limit``."""
    times = sorted(times_ns)
    return sum(bisect_left(times, at_ns + window_ns) - at > limit for at, at_ns in enumerate(times))


def breaches_by(
    rows: Iterable[tuple[str, int]], limit: int, window_ns: int = SECOND_NS
) -> dict[str, int]:
    """The same for each name that stands beside a time; only those that there are."""
    by: dict[str, list[int]] = defaultdict(list)
    for name, at_ns in rows:
        if name:
            by[name].append(at_ns)
    counted = {name: breaches(times, limit, window_ns) for name, times in by.items()}
    return {name: count for name, count in counted.items() if count}


def overlaps(rows: Sequence[Seen]) -> list[tuple[Seen, Seen]]:
    """Two of one session that were there at once."""
    found, last = [], dict[str, Seen]()
    for row in rows:
        if not row.session:
            continue
        before = last.get(row.session)
        if before is not None and row.came_ns < before.ended_ns:
            found.append((before, row))
        if before is None or row.ended_ns > before.ended_ns:
            last[row.session] = row
    return found


class Went(NamedTuple):
    """A request that a controller let go on. The time is the machine's time of day."""

    user: str
    session: str
    model: str
    at_ns: int


def went(data: Path) -> list[Went]:
    """The first dispatches in a controller's decision log: a second try is not counted again."""
    arrived: dict[int, Arrived] = {}
    found: list[Went] = []
    for each in segments(data):
        segment = read_segment(each)
        for record in segment.records:
            if isinstance(record.event, Arrived):
                arrived[record.event.request] = record.event
            for decision in record.decisions:
                if isinstance(decision, Dispatch):
                    event = arrived.pop(decision.request, None)
                    if event is not None:
                        at_ns = segment.header.wall_ns + record.now_ns
                        found.append(Went(event.user, event.session, event.model, at_ns))
    return found


def unlogged(rows: Iterable[Seen], gone: Iterable[Went]) -> list[Seen]:
    """What arrived and stands in no decision log: a controller that is killed takes the end of its
    log along. Each of the others arrived after it went on."""
    logged: dict[tuple[str, str], deque[int]] = defaultdict(deque)
    for each in sorted(gone, key=lambda each: each.at_ns):
        logged[each.user, each.session].append(each.at_ns)
    found = []
    for row in rows:
        times = logged[row.user, row.session]
        if times and times[0] <= row.came_ns:
            times.popleft()
        else:
            found.append(row)
    return found


def jain(values: Iterable[float]) -> float:
    """1: all the same; 1/n: one has everything."""
    given = list(values)
    squares = sum(value * value for value in given)
    return sum(given) ** 2 / (len(given) * squares) if squares else 0.0


def served_by(rows: Iterable[Seen], users: Iterable[str]) -> Mapping[str, int]:
    counts = dict.fromkeys(users, 0)
    for row in rows:
        if row.user in counts:
            counts[row.user] += 1
    return counts


def main() -> None:
    """Serve until told to stop."""
    import uvloop

    Recording.out = Path(sys.argv[1])

    async def run() -> None:
        ended = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        options = Options(PROFILE, model=MODEL)
        server = Recording(options, spec_of(options))
        await server.start("127.0.0.1", 0)
        print(f"twin serving {server.url}", flush=True)
        await ended.wait()
        await server.stop()

    uvloop.run(run())


if __name__ == "__main__":
    main()
