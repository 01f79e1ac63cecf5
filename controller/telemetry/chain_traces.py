"""One trace for all steps of a chain.

A step whose caller sent a ``traceparent`` is in the caller's trace, and so are later steps of its
chain that came without one. The trace of a chain without any is derived from its user and name, so
every controller finds the same one; its steps lie below a span of the whole chain, whose id is
derived, too. That span is made once the chain has been quiet, by the controllers that served it.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanContext, TraceFlags

if TYPE_CHECKING:
    from collections.abc import Iterator

KEPT_MOST = 10_000
QUIET_NS = 60_000_000_000
"""After which a chain is taken to have ended, even with some of its budget left."""
KEEP_NS = 600_000_000_000
"""For so long after its last step a chain's trace is remembered."""


class ChainTrace:
    """What is remembered of a chain's trace."""

    __slots__ = (
        "began_ns", "chain", "due_ns", "ended_ns", "line", "open", "parent", "root_id", "sampled",
        "steps", "told", "trace_id", "why",
    )  # fmt: skip

    def __init__(self, chain: str, line: str, parent: SpanContext, root_id: int) -> None:
        self.chain = chain
        self.line = line
        self.parent = parent
        """Of its steps: the caller's span, or that of the whole chain."""
        self.root_id = root_id
        """Of the chain's own span; 0: its caller has one."""
        self.trace_id = parent.trace_id
        self.sampled = bool(parent.trace_flags & TraceFlags.SAMPLED)
        self.began_ns = self.ended_ns = -1
        self.due_ns = -1
        """When it has been quiet for long enough; -1: none of its steps has ended."""
        self.open = self.steps = 0
        self.why = ""
        """How its last step ended, where that was not well."""
        self.told = not (root_id and self.sampled)
        """Its own span was made, or there is none to make."""


class ChainTraces:
    """The traces of the youngest chains.

    Args:
        below: of 2**32: chains that are traced where their caller does not say.
    """

    def __init__(self, below: int) -> None:
        self._below = below
        self._kept: OrderedDict[tuple[str, str], ChainTrace] = OrderedDict()

    def of(
        self, user: str, chain: str, line: str, given: SpanContext | None
    ) -> tuple[ChainTrace, list[ChainTrace]]:
        """The chain's trace, and those that it takes the place of."""
        key = (user, chain)
        known = self._kept.get(key)
        gone: list[ChainTrace] = []
        if known is not None and given is not None and given != known.parent:
            gone.append(known)
        if known is None or (given is not None and given != known.parent):
            trace_id, root_id, share = derived(user, chain)
            if given is None:
                sampled = TraceFlags.SAMPLED if share < self._below else TraceFlags.DEFAULT
                parent = SpanContext(trace_id, root_id, True, TraceFlags(sampled))
                known = ChainTrace(chain, line, parent, root_id)
            else:
                known = ChainTrace(chain, line, given, 0)
            self._kept[key] = known
        self._kept.move_to_end(key)
        while len(self._kept) > KEPT_MOST:
            gone.append(self._kept.popitem(last=False)[1])
        return known, gone

    def quiet(self, now_ns: int) -> Iterator[ChainTrace]:
        """Those that have ended, as far as is known; what is long over is forgotten."""
        while self._kept:
            key, oldest = next(iter(self._kept.items()))
            if oldest.open or oldest.ended_ns + KEEP_NS > now_ns or not oldest.told:
                break
            del self._kept[key]
        for trace in self._kept.values():
            if not trace.told and not trace.open and 0 <= trace.due_ns <= now_ns:
                yield trace

    def left(self) -> Iterator[ChainTrace]:
        """Those whose span was not made yet."""
        return (trace for trace in self._kept.values() if not trace.told)


def derived(user: str, chain: str) -> tuple[int, int, int]:
    """(trace id, id of the chain's own span, a number below 2**32) of a chain: the same for every
    controller, and after a restart. None of the ids is 0."""
    name = f"{len(user)}:{user}{chain}".encode(errors="surrogatepass")
    digest = blake2b(name, digest_size=28, person=b"twinkeel chain").digest()
    trace_id = int.from_bytes(digest[:16], "big") or 1
    root_id = int.from_bytes(digest[16:24], "big") or 1
    return trace_id, root_id, int.from_bytes(digest[24:], "big")
