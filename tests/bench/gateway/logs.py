"""What a controller's decision log says of its requests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from policy.decisions import Settled
from policy.events import Arrived
from policy.log import LogError, read_segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from policy.log import Record


class Account(NamedTuple):
    """Requests by what became of them."""

    arrived: int
    settled: int
    twice: int
    """Settled more than once."""
    open: int
    """Arrived, and never settled."""
    unknown: int
    """Settled, and never arrived."""
    outcomes: Counter[str]
    """Such as ``answered`` or ``failed stream_cut``."""

    @property
    def unaccounted(self) -> int:
        """Requests without exactly one outcome."""
        return self.twice + self.open + self.unknown


def segments(data: Path) -> list[Path]:
    """The files of the log in a data folder, oldest first."""
    files = (data / "log").glob("decisions.*.log")
    return sorted(files, key=lambda path: int(path.name.split(".")[1]))


def records(data: Path) -> Iterator[Record]:
    """Every record of the log, one segment in memory at a time."""
    for path in segments(data):
        try:
            segment = read_segment(path.read_bytes())
        except LogError:
            if path.stat().st_size == 0:
                continue  # killed as it was created
            raise
        yield from segment.records


def account(found: Iterable[Record]) -> Account:
    """Count arrivals and outcomes by request."""
    open_: set[int] = set()
    over: set[int] = set()
    twice = unknown = 0
    outcomes: Counter[str] = Counter()
    for record in found:
        if isinstance(record.event, Arrived):
            open_.add(record.event.request)
        for decision in record.decisions:
            if not isinstance(decision, Settled):
                continue
            request = decision.request
            if request in open_:
                open_.discard(request)
                over.add(request)
                outcomes[f"{decision.outcome} {decision.why}".strip()] += 1
            elif request in over:
                twice += 1
            else:
                unknown += 1
    settled = len(over)
    return Account(settled + len(open_), settled, twice, len(open_), unknown, outcomes)
