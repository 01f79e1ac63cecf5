"""A mapping with a bound, for keys that callers invent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Bounded(Generic[T]):
    """Keeps at most ``keys_max`` values; keys that were quiet longest are forgotten first.

    Keys live in two generations. When the young one holds half the bound it becomes the old one,
    and what was not asked for since the last time is gone. A use costs one look-up.
    """

    __slots__ = ("half_max", "make", "old", "young")

    def __init__(self, keys_max: int, make: Callable[[], T]) -> None:
        self.resize(keys_max)
        self.make = make
        self.young: dict[str, T] = {}
        self.old: dict[str, T] = {}

    def resize(self, keys_max: int) -> None:
        """Another bound from now on; what is too much goes as keys are used."""
        self.half_max = max(1, keys_max // 2)

    def get(self, key: str) -> T | None:
        """The value, if it is still known. Does not count as a use."""
        value = self.young.get(key)
        return self.old.get(key) if value is None else value

    def use(self, key: str) -> T:
        """The value, made if it is not known."""
        value = self.young.get(key)
        if value is None:
            if len(self.young) >= self.half_max:
                self.old = self.young
                self.young = {}
            value = self.young[key] = self.old.pop(key) if key in self.old else self.make()
        return value

    def state(self) -> tuple[list[tuple[str, T]], list[tuple[str, T]]]:
        return list(self.young.items()), list(self.old.items())

    def load(self, state: tuple[list[tuple[str, T]], list[tuple[str, T]]]) -> None:
        self.young = dict(state[0])
        self.old = dict(state[1])
