"""Calls that come to nothing: connections that break, processes that die, time-outs."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from policy.events import Failed, ReplicaDown

if TYPE_CHECKING:
    import simpy

    from policy.events import ErrorKind
    from twin.calls import Call
    from twin.engine import Sequence
    from twin.replicas import Replica
    from twin.world import World

QUIET_SWEEPS_MOST = 4
"""Twice a call's time-out: if nothing was settled for that long, nothing more will be."""


class Failures:
    """Tells the policy of each, once, unless it has closed the call itself."""

    __slots__ = ("_quiet_sweeps", "_settled", "_world")

    def __init__(self, world: World) -> None:
        self._world = world
        self._settled = 0
        """Requests that were settled by the last sweep."""
        self._quiet_sweeps = 0

    def begin(self) -> None:
        self._world.after(self._world.settings.call_timeout_ns // 2, self._sweep)

    def fail(self, call: Call, seq: Sequence, kind: ErrorKind, delay_ns: int) -> None:
        """Nothing will come of ``seq``: the policy hears so after a while, if it still matters."""
        world = self._world
        if call.second is not None and call.second.seq is seq:
            world.after(delay_ns, lambda event: world.errands.verification_failed(call, seq))
            return
        request, replica = seq.id, call.replica
        world.detach(call)

        def tell(event: simpy.Event) -> None:
            if seq.data is not None and call.gone is seq and call.seq is None:
                world.runner.feed(Failed(request, replica, kind))

        world.after(delay_ns, tell)

    def lost(self, replica: Replica, reason: str, out_of_memory: Sequence | None) -> None:
        """A replica's process is gone: each caller's connection breaks, then it is down."""
        world = self._world
        network_ns = world.settings.network_ns
        for call in list(world.calls.values()):
            seq = call.seq
            if seq is not None and call.replica == replica.id and call.answered_ns < 0:
                kind: ErrorKind = "oom" if seq is out_of_memory else "replica_lost"
                self.fail(call, seq, kind, network_ns)
            second = call.second
            if second is not None and second.replica == replica.id:
                self.fail(call, second.seq, "replica_lost", network_ns)
        down = ReplicaDown(replica.id, reason)
        world.after(network_ns, lambda event: world.runner.feed(down))

    def _sweep(self, event: simpy.Event) -> None:
        """Every half time-out: set a timer for each call whose time ends before the next sweep.

        A timer for every call would cost more than the rest of its driver.
        """
        world = self._world
        now_ns = world.now_ns
        limit_ns = world.settings.call_timeout_ns
        period_ns = limit_ns // 2
        for call in world.calls.values():
            seq = call.seq
            left_ns = call.dispatched_ns + limit_ns - now_ns
            if seq is not None and call.answered_ns < 0 and 0 < left_ns <= period_ns:
                world.after(left_ns, partial(self._time_out, call, seq))
            second = call.second
            if second is not None:
                left_ns = second.began_ns + limit_ns - now_ns
                if 0 < left_ns <= period_ns:
                    world.after(left_ns, partial(self._time_out_second, call, second.seq))
        self._look_for_life()
        if world.alive:
            world.after(period_ns, self._sweep)

    def _time_out(self, call: Call, seq: Sequence, event: simpy.Event) -> None:
        if call.seq is seq and call.answered_ns < 0:
            self.fail(call, seq, "timeout", 0)

    def _time_out_second(self, call: Call, seq: Sequence, event: simpy.Event) -> None:
        self._world.errands.verification_failed(call, seq)

    def _look_for_life(self) -> None:
        """A policy that loses a request must not keep the world going for ever."""
        world = self._world
        settled = world.arrived - len(world.calls)
        moved = settled != self._settled or world.expects_more
        self._quiet_sweeps = 0 if moved else self._quiet_sweeps + 1
        self._settled = settled
        if self._quiet_sweeps == QUIET_SWEEPS_MOST and world.calls:
            raise world.lost_requests()
