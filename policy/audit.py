"""Proof that a log is what the policy does: replay, and compare byte for byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.compose import restore
from policy.log import read_segment
from policy.parameters import from_canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.log import Header, Record

_ENCODER = msgspec.msgpack.Encoder(order="sorted")


class Difference(msgspec.Struct, frozen=True):
    """The first step that replay decides otherwise."""

    segment: int
    record: int
    """Counted from 0 within the segment."""
    logged: Record
    replayed: tuple[Decision, ...]


def replay(
    segments: Iterable[bytes],
    policy_of: Callable[[Header, bytes], Policy] | None = None,
) -> Difference | None:
    """Feed each segment's events to the policy restored from its snapshot.

    Each segment stands on its own, so any of them can be given. ``policy_of`` makes the policy from
    a header and a snapshot; by default it is the one the header describes. Timers are not armed:
    the ticks come from the log.
    """
    for data in segments:
        header, snapshot, records = read_segment(data)
        policy = (policy_of or _described)(header, snapshot)
        for index, record in enumerate(records):
            decisions = tuple(policy.step(record.now_ns, record.event))
            if _ENCODER.encode(decisions) != _ENCODER.encode(record.decisions):
                return Difference(header.segment, index, record, decisions)
    return None


def _described(header: Header, snapshot: bytes) -> Policy:
    return restore(from_canonical(header.policy), snapshot)
