"""Which prompt prefixes were sent to which replica: what its KV cache probably holds.

A prefix is a chain of block keys, each made from the one before it, so that a block is only found
behind the same beginning. A table holds every block together with the blocks before it, or none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policy.events import Arrived

_MASK = (1 << 61) - 1
_SHIFT = 20
_USERS = (1 << _SHIFT) - 1


def chain(event: Arrived, blocks_max: int) -> tuple[int, ...]:
    """The keys of a prompt's leading blocks."""
    key = event.prefix_block_bytes
    keys: list[int] = []
    for fingerprint in event.prefix[:blocks_max]:
        key = (key * 0x9E3779B97F4A7C15 + fingerprint + 1) & _MASK
        keys.append(key)
    return tuple(keys)


class PrefixTable:
    """Blocks sent to one replica: least recently used first, with how many in flight use each.

    At most ``entries_max`` blocks are kept, and those that something in flight uses.
    """

    __slots__ = ("entries", "entries_max", "held_tokens")

    def __init__(self, entries_max: int) -> None:
        self.entries_max = entries_max
        self.entries: dict[int, int] = {}
        """By key: the block's tokens, shifted, and its users in flight (see ``_USERS``)."""
        self.held_tokens = 0
        """Tokens of the blocks that something in flight uses, each counted once."""

    def cached_blocks(self, keys: tuple[int, ...]) -> int:
        """How many leading blocks the replica has probably cached."""
        entries = self.entries
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in entries:
                low = middle
            else:
                high = middle - 1
        return low

    def held_blocks(self, keys: tuple[int, ...]) -> int:
        """How many leading blocks take no new memory, since something in flight holds them."""
        entries = self.entries
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if entries.get(keys[middle - 1], 0) & _USERS:
                low = middle
            else:
                high = middle - 1
        return low

    def add(self, keys: tuple[int, ...], block_tokens: int) -> None:
        """A request with this prefix was sent."""
        entries = self.entries
        # The first block becomes the youngest: no block outlives one that comes before it.
        for key in reversed(keys):
            entry = entries.pop(key, block_tokens << _SHIFT)
            if not entry & _USERS:
                self.held_tokens += entry >> _SHIFT
            entries[key] = entry + 1
        for _ in range(4 * (len(entries) - self.entries_max)):
            if len(entries) <= self.entries_max:
                break
            key = next(iter(entries))
            entry = entries.pop(key)
            if entry & _USERS:  # in flight: it stays, as the youngest
                entries[key] = entry

    def remove(self, keys: tuple[int, ...]) -> None:
        """It is no longer in flight; what it left in the cache stays known."""
        entries = self.entries
        for key in keys:
            entry = entries[key] - 1
            entries[key] = entry
            if not entry & _USERS:
                self.held_tokens -= entry >> _SHIFT
