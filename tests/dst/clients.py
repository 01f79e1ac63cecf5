"""The clients of a random run: they lose patience, try again, and go on with their chains."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from policy.decisions import Settled

MS = 1_000_000
S = 1_000_000_000


class Door(Protocol):
    """Where clients come in."""

    def offer(self, fields: dict[str, Any]) -> int:
        """A request with these fields of ``Arrived`` arrives now; its id."""
        ...

    def cancel(self, request: int) -> None:
        """Its client goes away, if it still waits."""
        ...

    def later(self, delay_ns: int, what: Callable[[], None]) -> None:
        """Something happens that much later."""
        ...


class Clients:
    """All clients of one run."""

    def __init__(self, rng: random.Random, features: frozenset[str], door: Door) -> None:
        self._rng = rng
        self._features = features
        self._door = door
        self._coming: list[tuple[dict[str, Any], int, list[str]]] = []
        self._open: dict[int, tuple[dict[str, Any], int, list[str]]] = {}
        """(fields, tries left, steps of its chain still to come) by request."""

    def ask(
        self, fields: dict[str, Any], attempts: int | None = None, steps: list[str] | None = None
    ) -> None:
        """Send a request; ``attempts`` tries are left after it, by default drawn."""
        rng, door = self._rng, self._door
        if attempts is None:
            attempts = rng.choice((0, 1, 3)) if "retries" in self._features else 0
        self._coming.append((fields, attempts, steps or []))
        request = door.offer(fields)
        if self._coming:  # else it was settled at once
            self._open[request] = self._coming.pop()
        if "cancels" in self._features and rng.random() < 0.2:
            patience_ns = rng.choice((0, MS, 50 * MS, S, 5 * S))
            door.later(patience_ns, lambda: door.cancel(request))

    def go_on(self, fields: dict[str, Any], steps: list[str]) -> None:
        """A chain's next step; now and then two at once."""
        if not steps:
            return
        copies = 2 if self._rng.random() < 0.1 else 1
        for copy in range(copies):
            self.ask(fields | {"step": steps[0]}, 0, [] if copy else steps[1:])

    def settled(self, request: int, settled: Settled) -> None:
        """One of them has its answer, or none."""
        rng, door = self._rng, self._door
        known = self._open.pop(request, None) or (self._coming.pop() if self._coming else None)
        assert known is not None
        fields, attempts, steps = known
        if settled.outcome in ("shed", "failed") and attempts:
            wait_ns = rng.choice((0, min(settled.retry_after_ns, 3 * S)))
            door.later(wait_ns, lambda: self.ask(fields, attempts - 1))
        if steps and settled.outcome != "cancelled":
            if rng.random() < 0.15:
                steps = [fields["step"], *steps[1:]]  # it comes again
            think_ns = rng.choice((0, 10 * MS, S, 6 * S))
            resumed = fields | {"resume": settled.checkpoint}
            door.later(think_ns, lambda: self.go_on(resumed, steps))
