"""The contract between the policy and whoever drives it: a twin or a live controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from policy.events import Event


class Policy(Protocol):
    """A state machine fed with events and a clock. It returns decisions and does nothing itself."""

    def step(self, now_ns: int, event: Event) -> Sequence[Decision]:
        """Take one event at ``now_ns`` (never less than before) and decide.

        An event that is illegal in the present state changes nothing and yields ``Refused``; an
        event about a request that is already settled yields nothing.
        """
        ...

    def deadline_ns(self) -> int | None:
        """When the policy next wants a ``Ticked``, or None."""
        ...

    def snapshot(self) -> bytes:
        """The whole state in canonical form; restoring it gives the same policy again."""
        ...
