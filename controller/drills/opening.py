"""How things stood when a segment of the decision log began, as records that could have led there.

A controller that runs for long has a long log, of which a drill needs the end only. What the policy
knew before that stands in the segment's snapshot: which replicas were up and in the rotation, which
standbys there were, what was open. Its own accounts of how well things went are not used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.capacity import DRAINING, STANDBY, pool_of
from policy.decisions import Dispatch, Rotated
from policy.events import FirstToken, Standby, Ticked
from policy.facts import FactsState
from policy.log import Record
from policy.parameters import from_canonical
from policy.service import ServiceState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from policy.capacity import Machine
    from policy.decisions import RotationState
    from policy.events import ReplicaUp
    from policy.fleet import FleetState
    from policy.log import Header


def opening(header: Header, snapshot: bytes) -> tuple[Record, ...]:
    """Records that stand for all before the segment.

    That a replica is up is told at the time at which it would be if all had been started when the
    log's clock was 0, as it is told by a controller that begins: so its time is how long a start
    takes, by what the policy knows. Requests have the times at which they came.

    Raises:
        msgspec.MsgspecError: the snapshot is of another version of the policy.
    """
    facts, fleet = _decoded(header, snapshot)
    machines: dict[int, Machine] = {}
    if fleet is not None and fleet.capacity is not None:
        machines = {machine.replica: machine for machine in fleet.capacity.machines}
    specs = [replica.spec for replica in facts.replicas]
    made = [Record(_start_ns(spec, machines), spec, ()) for spec in specs]
    made += _out(header.start_ns, specs, fleet, machines)
    made += _standbys(header.start_ns, specs, machines)
    return (*made, *_open(header.start_ns, facts))


def _decoded(header: Header, snapshot: bytes) -> tuple[FactsState, FleetState | None]:
    if from_canonical(header.policy).discipline == "fifo":
        return msgspec.msgpack.decode(snapshot, type=FactsState), None
    state = msgspec.msgpack.decode(snapshot, type=ServiceState)
    assert state.facts is not None, "only a candidate has none, and a log is the ruling policy's"
    return state.facts, state.fleet


def _start_ns(spec: ReplicaUp, machines: dict[int, Machine]) -> int:
    """How long it takes to start, or the slowest of its pool, where it never was a standby."""
    own = machines.get(spec.replica)
    if own is not None and own.start_ns:
        return own.start_ns
    pool = pool_of(spec.models, spec.pooling)
    return max((each.start_ns for each in machines.values() if each.pool == pool), default=0)


def _out(
    at_ns: int, specs: list[ReplicaUp], fleet: FleetState | None, machines: dict[int, Machine]
) -> list[Record]:
    """Those that are up and not in the rotation."""
    watches = fleet.health.watches if fleet is not None and fleet.health is not None else []
    bad = {watch.replica: watch.state for watch, _, _ in watches if watch.state != "in"}
    rollout = fleet.rollout if fleet is not None else None
    leaving = {replica for replica, _ in rollout.draining} if rollout is not None else set()
    leaving |= {each.replica for each in machines.values() if each.state == DRAINING}
    made: list[Record] = []
    for spec in specs:
        state: RotationState = "in"
        if spec.replica in bad:  # one that is tried by single requests is out, too
            state = "isolated" if bad[spec.replica] == "isolated" else "ejected"
        elif spec.replica in leaving:
            state = "draining"
        if state != "in":
            made.append(Record(at_ns, Ticked(), (Rotated(spec.replica, state, "before"),)))
    return made


def _standbys(at_ns: int, specs: list[ReplicaUp], machines: dict[int, Machine]) -> Iterator[Record]:
    """Of a standby only its place and its start are kept: else it is like those that are up."""
    for machine in machines.values():
        like = next(
            (spec for spec in specs if pool_of(spec.models, spec.pooling) == machine.pool), None
        )
        if machine.state == STANDBY and like is not None:
            standby = Standby(
                machine.replica, f"replica {machine.replica}", like.models, machine.start_ns,
                like.version, machine.domain, like.pooling,
            )  # fmt: skip
            yield Record(at_ns, standby, ())


def _open(at_ns: int, facts: FactsState) -> Iterator[Record]:
    """Requests without an outcome; the facts' times are relative to the snapshot's."""
    for opened in facts.open:
        request = opened.event.request
        sent = () if opened.replica < 0 else (Dispatch(request, opened.replica, "before"),)
        yield Record(at_ns + opened.arrived_ns, opened.event, sent)
        if opened.replica >= 0 and opened.first_ns is not None:
            yield Record(at_ns + opened.first_ns, FirstToken(request, opened.replica), ())
