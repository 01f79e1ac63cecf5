"""Who is told what happens, while it happens: telemetry, the trace's recorder, the webhook."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from controller.call import Call
    from policy.decisions import Decision, Settled
    from policy.events import Event
    from policy.parameters import Parameters


class Listener:
    """Called in the event loop, between two requests' work: never slow, never raising.

    Listeners override what they care about.
    """

    def arrived(self, call: Call) -> None:
        """The policy is about to be told of it; ``call.request`` is set."""

    def dispatched(self, call: Call) -> None:
        """It is about to be sent to ``call.replica``."""

    def first_token(self, call: Call) -> None:
        """Its first token came back."""

    def settled(self, call: Call, settled: Settled) -> None:
        """It has its outcome, and the caller has been told; its times are complete."""

    def lost(self, settled: Settled) -> None:
        """A request of an earlier process, which the crash took with it, has its outcome."""

    def decided(self, decision: Decision) -> None:
        """A decision about replicas, breakers, alerts: neither ``Dispatch`` nor ``Settled``."""

    def switched(self, parameters: Parameters) -> None:
        """Another policy file is in force."""

    def fed(self, now_ns: int, event: Event) -> None:
        """The policy was given ``event``."""
