"""One request's story, told from a decision log by replaying it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import msgspec

from policy.compose import restore
from policy.decisions import Alert, BreakerMoved, Dispatch, Rotated, Settled, Start, Stop
from policy.events import Arrived, FirstToken, Forecasted, GpuFault, ReplicaDown, ReplicaUp
from policy.log import LogError, read_segment
from policy.parameters import from_canonical

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from policy.contract import Policy
    from policy.log import Record

MEANWHILE = (Alert, BreakerMoved, Rotated, Start, Stop, ReplicaDown, GpuFault, Forecasted)
"""What may have mattered to it although it does not name it."""
MEANWHILE_MAX = 40
NS_PER_MS, NS_PER_S = 1_000_000, 1_000_000_000
POINTS_SHOWN = 15
"""Of a forecast, the nearest."""


@runtime_checkable
class Scoring(Protocol):
    """A policy that can say how it would weigh the replicas for a request in its present state."""

    def scores(self, event: Arrived) -> Sequence[msgspec.Struct]:
        """One row a replica."""
        ...


@dataclass(slots=True)
class Story:
    """What happened, in order; times in ns on the log's clock."""

    request: int
    arrived: Arrived | None = None
    """None: it arrived before the log that was given begins."""
    begin_ns: int = -1
    dispatched_ns: int = -1
    first_ns: int = -1
    settled_ns: int = -1
    settled: Settled | None = None
    lines: list[tuple[int, str]] = field(default_factory=list)
    scores: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    """(when, a row a replica), at each dispatch."""
    meanwhile_left_out: int = 0
    names: dict[int, str] = field(default_factory=dict)
    """Of replicas."""
    forecast: tuple[int, Forecasted] | None = None
    """The last one that was fed before it arrived, and when."""

    def after_ms(self, at_ns: int) -> float:
        """Milliseconds since it arrived, or since the log first mentions it."""
        return (at_ns - self.begin_ns) / NS_PER_MS


def tell(segments: Iterable[bytes], request: int) -> Story:
    """The story of ``request``; segments are read in order, as far as its settlement.

    Raises:
        LogError: a segment that cannot be read, or no mention of the request in any of them.
    """
    story = Story(request)
    policy: Policy | None = None
    for data in segments:
        if story.begin_ns < 0 and not _mentions(data, request):
            _learn_before(data, story)
            continue
        header, snapshot, records = read_segment(data)
        if policy is None:
            policy = restore(from_canonical(header.policy), snapshot)
        for record in records:
            _take(story, record, policy)
            policy.step(record.now_ns, record.event)
            if story.settled is not None:
                return story
    if story.begin_ns < 0:
        raise LogError(
            f"request {request} is in none of the segments: ids are whole numbers from 0"
        )
    return story


def _mentions(data: bytes, request: int) -> bool:
    return any(_about(record, request) for record in read_segment(data).records)


def _learn_before(data: bytes, story: Story) -> None:
    for record in read_segment(data).records:
        _before(story, record)


def _before(story: Story, record: Record) -> None:
    if isinstance(record.event, ReplicaUp):
        story.names[record.event.replica] = record.event.name
    elif isinstance(record.event, Forecasted):
        story.forecast = record.now_ns, record.event


def _about(record: Record, request: int) -> bool:
    return _names(record.event, request) or any(
        _names(decision, request) for decision in record.decisions
    )


def _names(value: object, request: int) -> bool:
    return getattr(value, "request", None) == request


def _take(story: Story, record: Record, policy: Policy) -> None:
    """``policy`` is in the state before the record."""
    now_ns, event = record.now_ns, record.event
    if story.begin_ns < 0:
        if not _about(record, story.request):
            _before(story, record)
            return
        story.begin_ns = now_ns
        if story.forecast is not None:
            at_ns, forecast = story.forecast
            story.lines.append((at_ns, f"before    {forecast_words(forecast)}"))
    elif isinstance(event, ReplicaUp):
        story.names[event.replica] = event.name
    if _names(event, story.request):
        if isinstance(event, Arrived):
            story.arrived = event
        elif isinstance(event, FirstToken):
            story.first_ns = now_ns
        story.lines.append((now_ns, f"event     {_words(event, story)}"))
    elif isinstance(event, MEANWHILE):
        _meanwhile(story, now_ns, event)
    for decision in record.decisions:
        if _names(decision, story.request):
            if isinstance(decision, Dispatch):
                story.dispatched_ns = now_ns
                _score(story, now_ns, policy)
            elif isinstance(decision, Settled):
                story.settled_ns, story.settled = now_ns, decision
            story.lines.append((now_ns, f"decision  {_words(decision, story)}"))
        elif isinstance(decision, MEANWHILE):
            _meanwhile(story, now_ns, decision)


def _score(story: Story, now_ns: int, policy: Policy) -> None:
    if story.arrived is not None and isinstance(policy, Scoring):
        rows = [msgspec.structs.asdict(row) for row in policy.scores(story.arrived)]
        story.scores.append((now_ns, rows))


def _meanwhile(story: Story, now_ns: int, value: msgspec.Struct) -> None:
    if sum(text.startswith("meanwhile") for _, text in story.lines) < MEANWHILE_MAX:
        story.lines.append((now_ns, f"meanwhile {_words(value, story)}"))
    else:
        story.meanwhile_left_out += 1


def _words(value: msgspec.Struct, story: Story) -> str:
    """The tag, and every field that is not at its default; prefixes by their number only."""
    if isinstance(value, Forecasted):
        return forecast_words(value)
    words = []
    for info in msgspec.structs.fields(type(value)):
        content = getattr(value, info.name)
        if info.name == "request" or content == info.default:
            continue
        if info.name == "replica" and content in story.names:
            content = f"{content} ({story.names[content]})"
        elif info.name == "prefix":
            content = f"{len(content)} blocks"
        words.append(f"{info.name}={content}")
    return f"{value.__struct_config__.tag}: {', '.join(words)}".removesuffix(": ")


def forecast_words(event: Forecasted) -> str:
    """Its figures, by how far ahead they are."""

    def row(values: Sequence[int], unit: int) -> str:
        shown = ", ".join(f"{value / unit:.10g}" for value in values[:POINTS_SHOWN])
        return f"{shown}, ..." if len(values) > POINTS_SHOWN else shown

    if not event.horizons_ns:
        return "forecast: nothing"
    return (
        f"forecast: in {row(event.horizons_ns, NS_PER_S)} s:"
        f" requests/s {row(event.requests_p50, 1000)} (p90 {row(event.requests_p90, 1000)}),"
        f" tokens/s {row(event.tokens_p50, 1)} (p90 {row(event.tokens_p90, 1)})"
    )
