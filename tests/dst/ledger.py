"""What a decision log says about a run, folded without any of the policy's own code.

The policy keeps books of its own; an invariant that is checked against those would share their
faults. So requests, replicas and breakers are followed here from events and decisions alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from policy.decisions import (
    Abort,
    BreakerMoved,
    Dispatch,
    LookUp,
    Rotated,
    SaveCheckpoint,
    Settled,
    Start,
    Stop,
    Verify,
    Warm,
)
from policy.events import (
    Arrived,
    CheckpointFailed,
    CheckpointSaved,
    Failed,
    Finished,
    FirstToken,
    GpuRead,
    LookedUp,
    PolicySwitched,
    ReplicaDown,
    ReplicaUp,
    Restored,
    Standby,
    Verified,
)
from policy.parameters import from_canonical

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.events import Event
    from policy.parameters import Parameters

NOWHERE = -1
HEALTH_STATES = {"ejected", "probing", "isolated"}


@dataclass(slots=True)
class Request:
    """One request's story so far."""

    event: Arrived
    arrived_ns: int
    replica: int = NOWHERE
    """Where it is in flight."""
    model: str = ""
    """What that replica was asked for."""
    dispatched_ns: int = -1
    """First of all; -1: never."""
    tries: int = 0
    tried: set[int] = field(default_factory=set)
    """Replicas that it is or was on."""
    failed_on: set[int] = field(default_factory=set)
    probe: bool = False
    """Its replica was being probed when it was sent there."""
    began: bool = False
    """The client has had a first token."""
    finished: Finished | None = None
    verifying: int = NOWHERE
    """Where its second run is in flight."""
    verify_probe: bool = False
    saving: bool = False
    looking_up: bool = False
    found: bool = False
    """A similar answer was kept, and is given instead."""
    outcome: Settled | None = None
    settled_ns: int = -1

    @property
    def waits(self) -> bool:
        """It is the policy's turn: nobody else has been asked for anything."""
        return (
            self.outcome is None
            and self.replica == NOWHERE
            and self.verifying == NOWHERE
            and not self.saving
            and not self.looking_up
        )


@dataclass(slots=True)
class Replica:
    """One replica's story so far."""

    spec: ReplicaUp
    ready: bool = True
    rotation: str = "in"
    """As it was last decided; "unclear" after a switch, until it is decided again."""
    read_ns: int | None = None
    """When its card was read last, and (next) whether it was throttled then."""
    throttled: bool = False
    in_flight: set[int] = field(default_factory=set)
    """Requests, first runs and second ones alike."""

    @property
    def usable(self) -> bool:
        """It may be sent new work."""
        return self.ready and self.rotation in ("in", "probing", "unclear")


class Ledger:
    """Requests by id, the open ones among them in order of arrival, and replicas by id."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        """In force now."""
        self.requests: dict[int, Request] = {}
        self.open: dict[int, Request] = {}
        self.replicas: dict[int, Replica] = {}
        self.standbys: dict[int, Standby] = {}
        self.breakers: dict[str, str] = {}
        """State by key, of those that ever moved."""
        self.checkpoints: set[str] = set()
        """Ids of what was saved."""
        self.switches = 0
        self.tries_most = parameters.retries.tries_most
        """The most that was ever in force: whoever waits for another try may keep it."""

    # Events

    def learn(self, now_ns: int, event: Event) -> None:
        """Fold an event that the policy did not refuse."""
        if isinstance(event, Arrived):
            request = Request(event, now_ns)
            self.requests[event.request] = self.open[event.request] = request
        elif isinstance(event, PolicySwitched):
            self._switch(from_canonical(event.new))
        elif isinstance(event, ReplicaUp | ReplicaDown | Standby):
            self._learn_of_fleet(event)
        elif isinstance(event, GpuRead):
            self._learn_of_card(now_ns, event)
        elif isinstance(event, Restored):  # replicas tell again that they are up
            for replica in self.replicas.values():
                replica.ready = False
        elif isinstance(
            event, FirstToken | Finished | Failed | Verified | CheckpointSaved | CheckpointFailed
            | LookedUp,
        ):  # fmt: skip
            request_or_none = self.open.get(event.request)
            if request_or_none is not None:
                self._learn_of_request(request_or_none, event)

    def _switch(self, new: Parameters) -> None:
        """What is judged by other rules now is judged anew; a broken GPU stays broken."""
        old, self.parameters = self.parameters, new
        self.switches += 1
        self.tries_most = max(self.tries_most, new.retries.tries_most)
        forgiven: set[str] = set()
        if old.health != new.health:
            acts = new.health.enabled and new.health.enforce
            forgiven |= {"ejected", "probing"} if acts else HEALTH_STATES
        if (old.capacity, old.rollout) != (new.capacity, new.rollout):
            forgiven |= {"draining", "warming"}
        for replica in self.replicas.values():
            if replica.rotation in forgiven:
                replica.rotation = "unclear"
        if old.breakers != new.breakers:
            self.breakers.clear()

    def _learn_of_card(self, now_ns: int, event: GpuRead) -> None:
        replica = self.replicas.get(event.replica)
        read_ns = now_ns - event.age_ns
        if replica is not None and (replica.read_ns is None or read_ns >= replica.read_ns):
            replica.read_ns = read_ns
            replica.throttled = event.throttled

    def _learn_of_fleet(self, event: ReplicaUp | ReplicaDown | Standby) -> None:
        if isinstance(event, Standby):
            self.standbys[event.replica] = event
        elif isinstance(event, ReplicaUp):
            before = self.replicas.get(event.replica)
            self.replicas[event.replica] = Replica(event)
            if before is not None:  # what it held and was not failed yet still counts
                self.replicas[event.replica].in_flight = before.in_flight
        elif event.replica in self.replicas:
            self.replicas[event.replica].ready = False

    def _learn_of_request(
        self,
        request: Request,
        event: FirstToken | Finished | Failed | Verified | CheckpointSaved | CheckpointFailed
        | LookedUp,
    ) -> None:  # fmt: skip
        if isinstance(event, LookedUp):
            request.looking_up = False
            request.found = event.found
        elif isinstance(event, CheckpointSaved):
            request.saving = False
            self.checkpoints.add(event.checkpoint)
        elif isinstance(event, CheckpointFailed):
            request.saving = False
        elif isinstance(event, Verified):
            if event.replica == request.verifying:
                self._second_run_ends(request)
        elif isinstance(event, Failed) and event.replica == request.verifying:
            self._second_run_ends(request)
        elif event.replica == request.replica:  # else it is about an earlier try
            if isinstance(event, FirstToken):
                request.began = True
            else:
                if isinstance(event, Finished):
                    request.finished = event
                else:
                    request.failed_on.add(event.replica)
                self._run_ends(request)

    # Decisions

    def carry(self, now_ns: int, decision: Decision) -> None:
        """Fold a decision that may be."""
        if isinstance(decision, Rotated | Warm | Stop):
            replica = self.replicas.get(decision.replica)
            if replica is None:
                return
            if isinstance(decision, Rotated):
                replica.rotation = decision.state
            else:  # a new version waits for the rest of its wave; then it is rotated in
                replica.rotation = "warming" if isinstance(decision, Warm) else "stopping"
        elif isinstance(decision, Start):
            del self.standbys[decision.replica]
        elif isinstance(decision, BreakerMoved):
            self.breakers[decision.key] = decision.state
        elif isinstance(decision, Dispatch | Abort | Settled | Verify | SaveCheckpoint | LookUp):
            self._carry_for_request(now_ns, self.requests[decision.request], decision)

    def _carry_for_request(
        self,
        now_ns: int,
        request: Request,
        decision: Dispatch | Abort | Settled | Verify | SaveCheckpoint | LookUp,
    ) -> None:
        if isinstance(decision, Dispatch):
            request.replica = decision.replica
            request.model = decision.model or request.event.model
            request.tries += 1
            if request.dispatched_ns < 0:
                request.dispatched_ns = now_ns
            request.probe = self._begins(request, decision.replica)
        elif isinstance(decision, Verify):
            request.verifying = decision.replica
            request.verify_probe = self._begins(request, decision.replica)
        elif isinstance(decision, Abort):
            if decision.replica == request.replica:
                request.failed_on.add(decision.replica)
                self._run_ends(request)
            elif decision.replica == request.verifying:
                self._second_run_ends(request)
        elif isinstance(decision, SaveCheckpoint):
            request.saving = True
        elif isinstance(decision, LookUp):
            request.looking_up = True
        else:
            request.outcome = decision
            request.settled_ns = now_ns
            del self.open[decision.request]

    def forget(self, number: int) -> None:
        """The step that settled it is over: whatever still ran for it is nobody's any more."""
        request = self.requests[number]
        if request.replica != NOWHERE:
            self._run_ends(request)
        if request.verifying != NOWHERE:
            self._second_run_ends(request)

    def _begins(self, request: Request, number: int) -> bool:
        """It is in flight there now. Is it a probe?"""
        replica = self.replicas[number]
        replica.in_flight.add(request.event.request)
        request.tried.add(number)
        return replica.rotation == "probing"

    def _run_ends(self, request: Request) -> None:
        self.replicas[request.replica].in_flight.discard(request.event.request)
        request.replica = NOWHERE
        request.probe = False

    def _second_run_ends(self, request: Request) -> None:
        self.replicas[request.verifying].in_flight.discard(request.event.request)
        request.verifying = NOWHERE
        request.verify_probe = False
