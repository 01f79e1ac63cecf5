"""What every mechanism of the policy has in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import msgspec

    from policy.decisions import Decision

State = TypeVar("State", bound="msgspec.Struct")


class Mechanism(Protocol[State]):
    """One kind of judgement, in one file, built from its section of the policy file.

    What else it is told and asked differs from one to the next; this much all have.
    """

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        """Its deadline may have passed: what follows. Afterwards the deadline lies later."""
        ...

    def deadline_ns(self) -> int | None:
        """When it next wants to be ticked."""
        ...

    def state(self, now_ns: int) -> State:
        """Its memory in canonical form, times relative to ``now_ns``."""
        ...

    def load(self, state: State, now_ns: int) -> None:
        """Go on from a state, with a clock that shows ``now_ns``."""
        ...

    def size(self) -> int:
        """Entries in all its tables."""
        ...

    def size_most(self) -> int:
        """What ``size`` never exceeds."""
        ...
