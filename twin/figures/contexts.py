"""Mixed-up contexts: two requests of one session in flight at the engines at the same time.

Which of the two an engine answers first is then a matter of luck, and the later message is computed
without the answer to the one before.
"""

from __future__ import annotations

from typing import Any


class Contexts:
    """Counts requests that were sent while another of their session was in flight."""

    __slots__ = ("_in_flight", "_open", "mixed", "sent")

    def __init__(self) -> None:
        self._open: dict[int, list[Any]] = {}
        """Request to [session, whether it is in flight]."""
        self._in_flight: dict[str, int] = {}
        self.sent = 0
        """Requests with a session that came to a replica."""
        self.mixed = 0

    def arrived(self, request: int, session: str) -> None:
        self._open[request] = [session, False]

    def dispatched(self, request: int) -> None:
        entry = self._open.get(request)
        if entry is None or entry[1]:
            return
        entry[1] = True
        session = entry[0]
        others = self._in_flight.get(session, 0)
        self._in_flight[session] = others + 1
        self.sent += 1
        self.mixed += others > 0

    def settled(self, request: int) -> None:
        entry = self._open.pop(request, None)
        if entry is None or not entry[1]:
            return
        session = entry[0]
        left = self._in_flight[session] - 1
        if left:
            self._in_flight[session] = left
        else:
            del self._in_flight[session]

    def figures(self) -> dict[str, Any]:
        share = self.mixed / self.sent if self.sent else None
        return {"sent": self.sent, "mixed": self.mixed, "mixed_share": share}
