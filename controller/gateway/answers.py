"""Answers that are kept for a while, for callers whose model is cut off.

Only the same question of the same tenant to the same model finds one: texts that merely look alike
may ask for opposite things.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from controller.gateway.asking import Asked

BYTES_MOST = 8 * 1024 * 1024
OVERHEAD_BYTES = 400
"""Of an answer, beside its own: key, entry, objects."""
ANSWER_BYTES_MOST = 256 * 1024
AGE_MOST_NS = 3_600_000_000_000
_PASSING = frozenset({"stream", "stream_options", "user", "priority", "seed"})
"""Fields that do not change what is asked."""
_encode = msgspec.json.Encoder(order="deterministic").encode


class Kept(NamedTuple):
    """An answer, whole, and how it looked."""

    body: bytes
    at_ns: int
    confidence_permille: int
    version: str = ""
    """Of the model that made it."""


class Answers:
    """The youngest answers, up to a number of bytes. Only in memory."""

    def __init__(self, bytes_most: int = BYTES_MOST, age_most_ns: int = AGE_MOST_NS) -> None:
        self._bytes_most = bytes_most
        self._age_most_ns = age_most_ns
        self._bytes = 0
        self._kept: OrderedDict[bytes, Kept] = OrderedDict()

    def keep(
        self, asked: Asked, body: bytes, at_ns: int, confidence_permille: int, version: str = ""
    ) -> None:
        if len(body) > ANSWER_BYTES_MOST:
            return
        key = _key(asked)
        self._drop(key)
        self._kept[key] = Kept(body, at_ns, confidence_permille, version)
        self._bytes += len(body) + OVERHEAD_BYTES
        while self._bytes > self._bytes_most:
            self._drop(next(iter(self._kept)))

    def find(self, asked: Asked, now_ns: int) -> Kept | None:
        key = _key(asked)
        kept = self._kept.get(key)
        if kept is not None and now_ns - kept.at_ns > self._age_most_ns:
            self._drop(key)
            return None
        return kept

    def _drop(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._bytes -= len(kept.body) + OVERHEAD_BYTES


def _key(asked: Asked) -> bytes:
    question = {name: value for name, value in asked.document.items() if name not in _PASSING}
    return blake2b(_encode([asked.tenant, asked.endpoint, question]), digest_size=16).digest()
