"""How evenly users were served in the last minutes: Jain's index over their tokens."""

from __future__ import annotations

SLOTS = 5
SLOT_NS = 60_000_000_000
USERS_MOST = 10_000
"""In a slot; those that come later are not counted."""


class Fairness:
    """Tokens by user in slots of a minute; the oldest slot leaves as a whole."""

    __slots__ = ("_begun", "_slots")

    def __init__(self) -> None:
        self._slots: list[dict[str, int]] = [{} for _ in range(SLOTS)]
        self._begun = 0
        """Slots since the clock was 0."""

    def add(self, now_ns: int, user: str, tokens: int) -> None:
        """A request of ``user`` is over. With 0 tokens it wanted service and got none."""
        slot = self._slot(now_ns)
        served = slot.get(user)
        if served is not None:
            slot[user] = served + tokens
        elif len(slot) < USERS_MOST:
            slot[user] = tokens

    def figures(self, now_ns: int) -> tuple[float, int]:
        """Jain's index, (sum x)^2 / (n sum x^2), and n: 1 where all users got the same, 1/n where
        one got everything; 1 also where nobody got anything."""
        served = self._served(now_ns)
        squares = sum(tokens * tokens for tokens in served.values())
        if not squares:
            return 1.0, len(served)
        return sum(served.values()) ** 2 / (len(served) * squares), len(served)

    def _served(self, now_ns: int) -> dict[str, int]:
        self._slot(now_ns)
        served: dict[str, int] = {}
        for slot in self._slots:
            for user, tokens in slot.items():
                served[user] = served.get(user, 0) + tokens
        return served

    def _slot(self, now_ns: int) -> dict[str, int]:
        number = now_ns // SLOT_NS
        if number > self._begun:
            for passed in range(min(number - self._begun, SLOTS)):
                self._slots[(number - passed) % SLOTS] = {}
            self._begun = number
        return self._slots[self._begun % SLOTS]
