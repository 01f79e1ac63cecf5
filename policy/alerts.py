"""Whom to wake, once: the same trouble is told again only after it was quiet for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.decisions import Alert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from policy.parameters.alerts import Alerts as Section

NS_PER_MS = 1_000_000


class AlertsState(msgspec.Struct, array_like=True):
    """In canonical form: (key, when it was raised last), the one quiet longest first."""

    raised: list[tuple[str, int]]


class Alerts:
    """Remembers when each key was raised last, whether it was told or not."""

    __slots__ = ("_keys_max", "_quiet_ns", "_raised")

    def __init__(self, section: Section) -> None:
        self._quiet_ns = section.quiet_ms * NS_PER_MS
        self._keys_max = section.keys_max
        self._raised: dict[str, int] = {}
        """In order of the instants."""

    def raised(
        self,
        now_ns: int,
        key: str,
        cause: str,
        figures: tuple[tuple[str, int], ...] = (),
        action: str = "",
    ) -> Sequence[Alert]:
        """The alert, unless it is the trouble that was told already."""
        raised = self._raised
        last_ns = raised.pop(key, None)
        if last_ns is None and len(raised) >= self._keys_max:
            del raised[next(iter(raised))]
        raised[key] = now_ns
        if last_ns is not None and now_ns - last_ns < self._quiet_ns:
            return ()
        return (Alert(key, cause, figures, action),)

    def forget(self, key: str) -> None:
        """What is raised under this key from now on is another trouble than before."""
        self._raised.pop(key, None)

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        return ()

    def deadline_ns(self) -> int | None:
        return None

    def state(self, now_ns: int) -> AlertsState:
        return AlertsState([(key, at_ns - now_ns) for key, at_ns in self._raised.items()])

    def load(self, state: AlertsState, now_ns: int) -> None:
        self._raised = {key: at_ns + now_ns for key, at_ns in state.raised}

    def size(self) -> int:
        return len(self._raised)

    def size_most(self) -> int:
        return self._keys_max
