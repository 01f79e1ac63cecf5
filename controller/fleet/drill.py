"""A drill that tells the policy of a broken card that is well: ``POST /fleet/drill``.

For fleets on which no card can be made to fail. It is said to be a drill in the log, in an alert,
and in the answer; what follows is real: the replica is isolated, and a standby takes its place.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from policy.events import GpuFault

if TYPE_CHECKING:
    from controller.fleet.contract import Feeder

log = logging.getLogger(__name__)


class DrillRefused(ValueError):
    """It cannot be done: why, with the HTTP status that says so."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


class DrilledFault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the policy is to believe."""

    replica: Annotated[int, Meta(ge=0, le=1_000_000)]
    kind: Literal["ecc_uncorrectable", "xid_fatal"]
    code: Annotated[int, Meta(ge=0, le=1000)] = 0
    """The Xid."""


read = msgspec.json.Decoder(DrilledFault).decode
"""Raises ``msgspec.DecodeError`` or ``msgspec.ValidationError``."""


def pretend(fault: DrilledFault, feeder: Feeder) -> str:
    """Tell the policy; what was told, in words.

    Raises:
        DrillRefused: there is no such replica, or it is not up.
    """
    replica = feeder.replicas.get(fault.replica)
    if replica is None:
        known = ", ".join(str(number) for number in sorted(feeder.replicas))
        raise DrillRefused(404, f"there is no replica {fault.replica}: there are {known}")
    if not replica.up:
        raise DrillRefused(409, f"replica {replica.name} is not up: a drill hits one that serves")
    code = f" (Xid {fault.code})" if fault.code else ""
    told = f"DRILL: the policy is told of {fault.kind}{code} on {replica.name}; its card is well"
    log.warning("%s", told)
    feeder.trouble(f"drill {replica.name}", told)
    feeder.feed(GpuFault(replica.id, fault.kind, fault.code))
    return told
