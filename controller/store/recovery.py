"""The policy as it was when the controller died: its last segment, replayed.

A segment begins with the policy's state, so the last one is all that is needed. Where it was
written by other policy code, its state is only trusted if replay gives the logged decisions byte
for byte; otherwise the policy starts afresh, with the clock and the request ids going on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from controller.store.log import segments
from policy.compose import build_policy, restore
from policy.decisions import Settled
from policy.events import Arrived
from policy.facts import Facts, FactsState, Open
from policy.files import code_hash
from policy.log import LogError, read_segment
from policy.parameters import Parameters, from_canonical
from policy.service import Service

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from policy.contract import Policy
    from policy.log import Record, Segment

_ENCODER = msgspec.msgpack.Encoder(order="sorted")


class Recovered(NamedTuple):
    """What goes on. The new process's clock begins above ``last_ns``."""

    policy: Policy
    parameters: Parameters
    """In force at the end, whatever the segment began with."""
    last_ns: int
    """The log's clock at the last record."""
    wall_ns_of_last: int
    """Time of day, since 1970, at the last record."""
    open: tuple[Open, ...]
    """Requests that the crash took with it, in order of arrival."""
    next_request: int
    """The first id that was not used yet."""
    segment: int
    records: int
    """Replayed."""
    note: str = ""
    """What someone should know, such as why the state could not be used."""

    @property
    def open_requests(self) -> int:
        return len(self.open)


def recover(folder: Path, fallback: Parameters | None = None) -> Recovered | None:
    """The policy at the end of the decision log in ``folder``; None: there is none.

    ``fallback`` is what a policy whose state cannot be used starts with; without it, the parameters
    that the segment begins with, or the defaults.

    A segment that cannot be read, since its beginning is torn or it is none, is put aside under the
    name ``*.torn``, and the one before is used.
    """
    notes: list[str] = []
    for index, path in reversed(segments(folder)):
        try:
            data = path.read_bytes()
            read_segment(data)
        except LogError as error:
            aside = path.with_name(f"{path.name}.torn")
            path.rename(aside)
            notes.append(f"segment {index} cannot be used ({error}), it is now {aside.name}")
            continue
        recovered = _resumed(data, notes) or _afresh(data, folder, fallback)
        return recovered._replace(note="; ".join(notes))
    return None


def _readable(segment: Segment, notes: list[str]) -> Iterator[Record]:
    """The records up to the first that cannot be read."""
    try:
        yield from segment.records
    except LogError as error:
        notes.append(f"segment {segment.header.segment} is used up to where it is damaged: {error}")


def _resumed(data: bytes, notes: list[str]) -> Recovered | None:
    """The policy that wrote the segment; None, with a note: its state cannot be used."""
    segment = read_segment(data)
    header = segment.header
    ours = header.code_hash == code_hash()
    try:
        parameters = from_canonical(header.policy)
        policy = restore(parameters, segment.snapshot)
        steps, last_ns = _replayed(policy, _readable(segment, notes), compare=not ours)
        facts = _facts(policy)
    except Exception as error:  # a state of other code can break in any way
        by = "" if ours else f", which other policy code wrote ({header.code_hash}),"
        notes.append(
            f"the state in segment {header.segment}{by} cannot be used, so the policy starts"
            f" without memory: {type(error).__name__}: {error}"
        )
        return None
    return Recovered(
        policy=policy,
        parameters=policy.parameters if isinstance(policy, Service) else parameters,
        last_ns=max(last_ns, header.start_ns),
        wall_ns_of_last=header.wall_ns + max(last_ns, header.start_ns),
        open=tuple(facts.open.values()),
        next_request=facts.highest + 1,
        segment=header.segment,
        records=steps,
    )


def _afresh(data: bytes, folder: Path, fallback: Parameters | None) -> Recovered:
    """A policy without memory, at the same clock and with request ids that go on."""
    segment = read_segment(data)
    header = segment.header
    parameters = fallback
    if parameters is None:
        try:
            parameters = from_canonical(header.policy)
        except msgspec.MsgspecError:
            parameters = Parameters()
    open_: dict[int, Open] = {}
    last_ns = header.start_ns
    for record in _readable(segment, []):  # what is damaged was noted before
        last_ns = record.now_ns
        if isinstance(record.event, Arrived):
            open_[record.event.request] = Open(record.event, record.now_ns)
        for decision in record.decisions:
            if isinstance(decision, Settled):
                open_.pop(decision.request, None)
    index = header.segment
    return Recovered(
        policy=build_policy(parameters),
        parameters=parameters,
        last_ns=last_ns,
        wall_ns_of_last=header.wall_ns + last_ns,
        open=tuple(open_.values()),
        next_request=_highest(folder, index) + 1,
        segment=index,
        records=0,
    )


def _replayed(policy: Policy, records: Iterator[Record], compare: bool) -> tuple[int, int]:
    """Feed the records; how many there were, and the clock at the last.

    Raises:
        ValueError: with ``compare``, a decision differs from the logged one.
    """
    step = policy.step
    steps = last_ns = 0
    for record in records:
        last_ns = record.now_ns
        decisions = tuple(step(last_ns, record.event))
        steps += 1
        if compare and _ENCODER.encode(decisions) != _ENCODER.encode(record.decisions):
            raise ValueError(f"replayed, it decides otherwise than it did at {last_ns} ns")
    return steps, last_ns


def _facts(policy: Policy) -> Facts:
    if isinstance(policy, Service):
        return policy.facts
    state = msgspec.msgpack.decode(policy.snapshot(), type=FactsState)  # all that fifo has
    return Facts.restored(state, 1, state.now_ns)


def _highest(folder: Path, last: int) -> int:
    """The highest request id in the youngest segment that has one; -1: there is none in any."""
    for index, path in reversed(segments(folder)):
        if index > last:
            continue
        try:
            records = read_segment(path.read_bytes()).records
            ids = [one.event.request for one in records if isinstance(one.event, Arrived)]
        except LogError:
            continue
        if ids:
            return max(ids)
    return -1
