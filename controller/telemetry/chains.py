"""Tells of the steps of chains: requests that are settled, and what clients report of their own."""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

from controller.listener import Listener
from controller.store.steps import LATE, OVER, ChainStep

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from controller.call import Call
    from controller.store.steps import Scalar, StepStore
    from controller.telemetry.metrics import Metrics
    from controller.telemetry.spans import Spans
    from policy.decisions import Settled

NS_PER_S = 1_000_000_000
PARTIAL_MOST = 10_000
"""Chains that are remembered as counted."""


class OwnStep(NamedTuple):
    """A step that a client ran itself, such as a query or a tool, and told of afterwards."""

    user: str
    chain: str
    line: str
    step: str
    began_ago_ns: int
    took_ns: int
    outcome: str
    """done, failed or late."""
    attributes: Mapping[str, Scalar]
    checkpoint: str = ""
    traceparent: str = ""


class ChainTeller(Listener):
    """Hands each step to the store, the spans and the metrics.

    Args:
        now_ns: the log's clock.
        replica_name: by its number.
        budget_s: of a chain of this business line, by the policy in force; None: chains have none.
        wall_s: time of day.
    """

    def __init__(
        self,
        store: StepStore,
        spans: Spans,
        metrics: Metrics,
        now_ns: Callable[[], int],
        replica_name: Callable[[int], str],
        budget_s: Callable[[str], float | None],
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._spans = spans
        self._metrics = metrics
        self._now_ns = now_ns
        self._replica_name = replica_name
        self._budget_s = budget_s
        self._wall_s = wall_s
        self._partial: OrderedDict[tuple[str, str], None] = OrderedDict()

    def settled(self, call: Call, settled: Settled) -> None:
        asked = call.asked
        if not asked.chain:
            return
        self._count("request", asked.user, asked.chain, settled.outcome, settled.why)
        at_zero_s = self._wall_s() - self._now_ns() / NS_PER_S
        hops = call.hops()
        served = call.prompt_tokens >= 0
        permille = settled.confidence_permille
        self._store.add(
            ChainStep(
                user=asked.user,
                chain=asked.chain,
                step=asked.step,
                request=call.name,
                began_s=at_zero_s + call.entered_ns / NS_PER_S,
                ended_s=at_zero_s + call.settled_ns / NS_PER_S,
                outcome=settled.outcome,
                line=asked.line,
                trace_id=call.trace[3:35],
                budget_s=self._budget_s(asked.line),
                left_s=_s(settled.left_ns),
                resumed=bool(asked.resume),
                why=settled.why,
                model=asked.model,
                tier=settled.tier or call.tier,
                replica="" if call.replica < 0 else self._replica_name(call.replica),
                prompt_tokens=call.prompt_tokens if served else None,
                output_tokens=call.output_tokens if served else None,
                gateway_s=_s(hops.gateway_ns),
                queue_s=_s(hops.queue_ns),
                schedule_s=_s(hops.schedule_ns),
                prefill_s=_s(hops.prefill_ns),
                decode_s=_s(hops.decode_ns),
                network_s=_s(hops.network_ns),
                checkpoint=settled.checkpoint,
                confidence=None if permille < 0 else permille / 1000,
                verification=settled.verification,
                attributes=_about(call),
            )
        )

    def own(self, own: OwnStep) -> None:
        """A client tells of a step that it ran itself."""
        trace_id = self._spans.own(own, self._now_ns())
        began_s = self._wall_s() - own.began_ago_ns / NS_PER_S
        self._count("client", own.user, own.chain, own.outcome, "")
        self._store.add(
            ChainStep(
                user=own.user,
                chain=own.chain,
                step=own.step,
                request="",
                began_s=began_s,
                ended_s=began_s + own.took_ns / NS_PER_S,
                outcome=own.outcome,
                line=own.line,
                trace_id=trace_id,
                checkpoint=own.checkpoint,
                external=True,
                attributes=dict(own.attributes),
            )
        )

    def _count(self, of: str, user: str, chain: str, outcome: str, why: str) -> None:
        self._metrics.chain_step(of, outcome)
        key = (user, chain)
        if (why == OVER or outcome == LATE) and key not in self._partial:
            self._metrics.chain_partial()
            self._partial[key] = None
            if len(self._partial) > PARTIAL_MOST:
                self._partial.popitem(last=False)


def _about(call: Call) -> dict[str, Scalar]:
    """What else is worth seeing, where it is not as usual."""
    about: dict[str, Scalar] = {}
    if call.tries > 1:
        about["tries"] = call.tries
    if call.cached_tokens:
        about["cached_tokens"] = call.cached_tokens
    if call.finish_reason not in ("", "stop"):
        about["finish_reason"] = call.finish_reason
    return about


def _s(ns: int) -> float | None:
    return None if ns < 0 else round(ns / NS_PER_S, 6)
