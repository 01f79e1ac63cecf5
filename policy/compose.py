"""Puts a policy together from its parameters, or from a snapshot of itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policy.facts import Facts
from policy.fifo import Fifo
from policy.service import Service

if TYPE_CHECKING:
    from policy.contract import Policy
    from policy.parameters import Parameters


def build_policy(parameters: Parameters) -> Policy:
    """A fresh policy that knows no replica and no request."""
    if parameters.discipline == "fifo":
        return Fifo(parameters, Facts(parameters.history.keys_max))
    return Service(parameters)


def restore(parameters: Parameters, snapshot: bytes, now_ns: int | None = None) -> Policy:
    """The policy that gave ``snapshot``. It goes on with the clock it had, or, where ``now_ns`` is
    given, with a new clock that shows this: what was left of every deadline stays the same."""
    if parameters.discipline == "fifo":
        return Fifo.restored(parameters, snapshot, now_ns)
    return Service.restored(parameters, snapshot, now_ns)
