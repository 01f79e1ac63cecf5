"""One engine alone, without policy and world: what a bare server makes of a list of requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from twin.engine import Engine, Sequence

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policy.cost import Overheads, StepCost
    from twin.engine import EngineSettings


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it reaches the server. ``max_tokens`` 0: the answer ends where the caller's
    limit is, so the scheduler sees the end coming."""

    at_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int = 0
    priority: int = 0
    prefix: tuple[int, ...] = ()
    prefix_block_tokens: int = 0


@dataclass(slots=True)
class Served:
    """What became of it, in ns on the clock of ``Asked``; the way in and out is included.

    A request that the engine could never serve is refused with ``UnfitError``, as by a server.
    """

    at_ns: int
    scheduled_ns: int = -1
    """When it was first in a batch, on the engine's clock."""
    first_ns: int = -1
    last_ns: int = -1
    decode_ns: int = 0
    """From the first token to the last, on the engine's clock."""
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft_ns(self) -> int:
        return self.first_ns - self.at_ns

    @property
    def e2e_ns(self) -> int:
        return self.last_ns - self.at_ns


def serve_alone(
    settings: EngineSettings,
    cost: StepCost,
    asked: Iterable[Asked],
    overheads: Overheads | None = None,
) -> list[Served]:
    """Play requests through one engine; the results come in the order of ``asked``.

    Args:
        asked: in order of arrival.
        overheads: of the server around the engine; None: none.

    Raises:
        UnfitError: a request that could never be served.
        ValueError: arrivals out of order.
    """
    in_ns = out_ns = token_ns = 0
    if overheads is not None:
        in_ns = round(overheads.request_in_ns.value)
        out_ns = round(overheads.request_out_ns.value)
        token_ns = round(overheads.token_out_ns.value)
    served: list[Served] = []

    def first(seq: Sequence, at_ns: int) -> None:
        served[seq.id].first_ns = at_ns + token_ns * seq.turn

    def finish(seq: Sequence) -> None:
        each = served[seq.id]
        now_ns = engine.now_ns
        each.decode_ns = now_ns - (each.first_ns - token_ns * seq.turn)
        each.last_ns = seq.last_out_ns(now_ns - each.decode_ns, now_ns, token_ns) + out_ns
        each.scheduled_ns = seq.scheduled_ns
        each.cached_tokens = seq.cached_tokens
        each.preemptions = seq.preemptions

    engine = Engine(settings, cost, first, finish)
    for number, each in enumerate(asked):
        if served and each.at_ns < served[-1].at_ns:
            raise ValueError(f"request {number} arrives before the one in front of it")
        served.append(Served(each.at_ns))
        entry_ns = each.at_ns + in_ns
        while engine.next_wake_ns is not None and engine.next_wake_ns <= entry_ns:
            engine.wake(engine.next_wake_ns)
        seq = Sequence(
            number, each.prompt_tokens, each.output_tokens, each.max_tokens or each.output_tokens,
            each.priority, prefix=each.prefix, prefix_block_tokens=each.prefix_block_tokens,
        )  # fmt: skip
        engine.submit(seq, entry_ns)
    while engine.next_wake_ns is not None:
        engine.wake(engine.next_wake_ns)
    return served
