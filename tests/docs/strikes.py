"""A user whose requests servers reject, again and again, is held back for a while."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from policy.decisions import Alert

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.decisions import Decision
    from tests.docs.strikes_section import Strikes as Section

NS_PER_MS = 1_000_000


class StrikesState(msgspec.Struct, array_like=True):
    """In canonical form: (user, rejections in a row, held for how long still, -1: not)."""

    users: list[tuple[str, int, int]]


class Strikes:
    """Counts rejections in a row, by user."""

    __slots__ = ("_section", "_users")

    def __init__(self, section: Section) -> None:
        self._section = section
        self._users: dict[str, tuple[int, int]] = {}
        """Rejections in a row, and until when it is held (-1: it is not); the quiet ones first."""

    def observe(self, now_ns: int, user: str, rejected: bool) -> Sequence[Decision]:
        """A request of this user came to its end."""
        count, until_ns = self._users.pop(user, (0, -1))
        if not rejected and until_ns < 0:
            return ()
        if len(self._users) >= self._section.users_max:
            del self._users[next(iter(self._users))]
        count = min(count + 1, self._section.rejections_least) if rejected else 0
        told: Sequence[Decision] = ()
        if until_ns < 0 and count >= self._section.rejections_least:
            until_ns = now_ns + self._section.hold_ms * NS_PER_MS
            told = (
                Alert(f"user {user}", "its requests are wrong", (("rejected", count),), "held"),
            )
        self._users[user] = (count, until_ns)
        return told

    def held(self, now_ns: int, user: str) -> bool:
        """Has it to wait?"""
        return now_ns < self._users.get(user, (0, -1))[1]

    # What every mechanism has

    def ticked(self, now_ns: int) -> Sequence[Decision]:
        self._users = {
            user: (count, until_ns)
            for user, (count, until_ns) in self._users.items()
            if until_ns < 0 or now_ns < until_ns
        }
        return ()

    def deadline_ns(self) -> int | None:
        held = (until_ns for _, until_ns in self._users.values() if until_ns >= 0)
        return min(held, default=None)

    def state(self, now_ns: int) -> StrikesState:
        return StrikesState(
            [
                (user, count, -1 if until_ns < 0 else max(0, until_ns - now_ns))
                for user, (count, until_ns) in self._users.items()
            ]
        )

    def load(self, state: StrikesState, now_ns: int) -> None:
        self._users = {
            user: (count, -1 if left_ns < 0 else now_ns + left_ns)
            for user, count, left_ns in state.users
        }

    def size(self) -> int:
        return len(self._users)

    def size_most(self) -> int:
        return self._section.users_max
