"""First come, first served: each request goes at once to the least loaded replica.

The honest baseline. It keeps no queue: the engines' own queues take whatever comes. It sheds only
what nothing can serve, and refuses only what can never fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.decisions import Abort, Dispatch, Refused, Settled
from policy.events import (
    Arrived,
    Cancelled,
    Failed,
    Finished,
    FirstToken,
    PolicySwitched,
    ReplicaDown,
    Restored,
)
from policy.facts import Facts, FactsState, Illegal
from policy.outcomes import CALLERS_FAULT, MAYBE_RUNNING, failed, too_large, unserved

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.events import Event
    from policy.facts import Open, Replica
    from policy.parameters import Parameters

_ENCODER = msgspec.msgpack.Encoder(order="sorted")
_DECODER = msgspec.msgpack.Decoder(FactsState)


class Fifo:
    """The baseline policy. All of its state is facts."""

    __slots__ = ("_bytes_per_token_most", "_facts", "_retry_after_ns")

    def __init__(self, parameters: Parameters, facts: Facts) -> None:
        self._facts = facts
        self._bytes_per_token_most = parameters.estimates.bytes_per_token_most
        self._retry_after_ns = parameters.shedding.retry_after_least_ms * 1_000_000

    @classmethod
    def restored(cls, parameters: Parameters, snapshot: bytes, now_ns: int | None) -> Fifo:
        state = _DECODER.decode(snapshot)
        keys_max = parameters.history.keys_max
        at_ns = state.now_ns if now_ns is None else now_ns
        return cls(parameters, Facts.restored(state, keys_max, at_ns))

    def snapshot(self) -> bytes:
        return _ENCODER.encode(self._facts.state())

    def deadline_ns(self) -> int | None:
        return None

    def step(self, now_ns: int, event: Event) -> tuple[Decision, ...]:
        try:
            if type(event) is Arrived:
                return (self._arrived(now_ns, event),)
            if type(event) is FirstToken:
                self._facts.first_token(now_ns, event)
                return ()
            if type(event) is Finished:
                opened = self._facts.finished(now_ns, event)
                if opened is None:
                    return ()
                self._facts.settle(now_ns, opened)
                return (Settled(event.request, "answered"),)
            if type(event) is Failed:
                return self._failed(now_ns, event)
            if type(event) is Cancelled:
                return self._cancelled(now_ns, event)
            if type(event) is Restored:
                return self._restored(now_ns, event)
            if type(event) is PolicySwitched:
                raise Illegal("a switch from discipline fifo needs a restart")
            self._facts.fleet(now_ns, event)
        except Illegal as illegal:
            return (Refused(type(event).__name__, str(illegal)),)
        return ()

    def _arrived(self, now_ns: int, event: Arrived) -> Decision:
        facts = self._facts
        opened = facts.arrive(now_ns, event)
        replicas = facts.eligible(event.model, event.endpoint == "embeddings")
        tokens = event.prompt_bytes // self._bytes_per_token_most + event.max_tokens
        best: Replica | None = None
        least = 0
        for replica in replicas:
            in_flight = replica.in_flight
            if (best is None or in_flight < least) and tokens <= replica.tokens_most:
                best = replica
                least = in_flight
        if best is None:
            facts.drop(opened)
            if replicas:
                return too_large(event.request)
            return unserved(event.request, "", self._retry_after_ns)
        facts.dispatch(now_ns, opened, best)
        return Dispatch(event.request, best.spec.replica, "")

    def _failed(self, now_ns: int, event: Failed) -> tuple[Decision, ...]:
        opened: Open | None = self._facts.failed(now_ns, event)
        if opened is None:
            return ()
        if event.kind in CALLERS_FAULT:
            self._facts.drop(opened)
        else:
            self._facts.settle(now_ns, opened, event.kind)
        settled = failed(event.request, event.kind, "", self._retry_after_ns)
        if event.kind in MAYBE_RUNNING:
            return (Abort(event.request, event.replica), settled)
        return (settled,)

    def _cancelled(self, now_ns: int, event: Cancelled) -> tuple[Decision, ...]:
        opened = self._facts.cancelled(now_ns, event)
        if opened is None:
            return ()
        replica = opened.replica
        self._facts.drop(opened)
        settled = Settled(event.request, "cancelled", "", "client", 499)
        return (settled,) if replica < 0 else (Abort(event.request, replica), settled)

    def _restored(self, now_ns: int, event: Restored) -> tuple[Decision, ...]:
        """After a crash: what was open is lost, and replicas count again when they come up."""
        facts = self._facts
        if event.down_ns < 0:
            raise Illegal(f"down_ns is {event.down_ns}: it must not be negative")
        facts.now_ns = now_ns
        lost = list(facts.open.values())
        for opened in lost:
            facts.drop(opened)
        for replica in list(facts.replicas):
            facts.fleet(now_ns, ReplicaDown(replica, "controller_lost"))
        return tuple(
            failed(opened.event.request, "controller_lost", "", self._retry_after_ns)
            for opened in lost
        )
