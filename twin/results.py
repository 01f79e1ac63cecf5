"""What became of each request, as columns: of the results file and for the summary.

Results are a trace again, in the same schema and order: the rows that were replayed, with the
observed columns filled in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from traces.schema import category_column

if TYPE_CHECKING:
    from twin.arrivals import Chunk
    from twin.fleet import ReplicaSpec
    from twin.world import WorldSettings

    Array = np.ndarray[Any, np.dtype[Any]]

HOPS = ("gateway_s", "queue_s", "schedule_s", "prefill_s", "decode_s", "network_s")
"""Where the time of an answered request went; they add up to ``e2e_s``. What is done with an answer
once it is back (a second run to compare with, a checkpoint) is the gateway's time."""


class Observed:
    """The results of one chunk as numpy columns; seconds, NaN where it never came to that."""

    __slots__ = (
        "answered", "cached_tokens", "columns", "confidence_permille", "correct", "outcome",
        "output_tokens", "preemptions", "replica", "settled_ns", "tier", "tries", "verification",
        "whole", "why",
    )  # fmt: skip

    def __init__(self, chunk: Chunk, fleet: list[ReplicaSpec], settings: WorldSettings) -> None:
        (
            outcome, why, tier, _, replica, tries, arrival, settled, dispatched, scheduled,
            first, last, first_out, cached, output_tokens, preemptions, confidence_permille,
            verification, correct, answered, turn,
        ) = zip(*chunk.results, strict=True)  # fmt: skip
        self.outcome: tuple[str, ...] = outcome
        self.why: tuple[str, ...] = why
        self.tier: tuple[str, ...] = tier
        self.replica = np.array(replica)
        self.tries = np.array(tries)
        self.settled_ns = np.array(settled)
        self.cached_tokens = np.array(cached)
        self.output_tokens = np.array(output_tokens)
        self.preemptions = np.array(preemptions)
        self.confidence_permille = np.array(confidence_permille)
        self.verification: tuple[str, ...] = verification
        self.correct = np.array(correct)
        self.answered = np.array([value in ("answered", "degraded") for value in outcome])
        self.whole = self._whole()
        """Those that got an answer worth the name: a template, or a part of a chain, is none."""
        of = (arrival, dispatched, scheduled, first, last, first_out, answered, turn)
        self.columns = self._hops(fleet, settings, *(np.array(value) for value in of))

    def _whole(self) -> Array:
        if "degraded" not in self.outcome:
            return self.answered
        lesser = [
            outcome == "degraded" and not (why == "cached" or why.startswith("model "))
            for outcome, why in zip(self.outcome, self.why, strict=True)
        ]
        whole: Array = self.answered & ~np.array(lesser)
        return whole

    def _hops(
        self, fleet: list[ReplicaSpec], settings: WorldSettings, arrival: Array,
        dispatched: Array, scheduled: Array, first: Array, last: Array, first_out: Array,
        answered: Array, turn: Array,
    ) -> dict[str, Array]:  # fmt: skip
        """See ``twin.world`` for the way of a request."""
        token_out = np.array([spec.profile.overheads.token_out_ns.value for spec in fleet] + [0.0])
        token_out = np.rint(token_out)[self.replica]
        has_first = first >= 0
        done = self.answered & (answered >= 0)
        kept = self.whole & ~done  # from a cache or a checkpoint, without an engine
        held_ns = np.where(done, self.settled_ns - answered, 0)
        held_ns = np.where(kept, self.settled_ns - dispatched - settings.gateway_ns, held_ns)
        entered = dispatched + settings.gateway_ns + settings.network_ns
        # An embedding has no first token: all of its engine time is prefill.
        prefilled = np.where(has_first, first + token_out * turn, last)
        e2e = self.settled_ns - arrival
        # Of an answer sent as a whole only its engine knew the first token.
        heard = np.where(first_out >= 0, first_out, first)
        ttft = np.where(has_first & ~kept, heard, self.settled_ns) - arrival
        tokens = self.output_tokens
        gaps = np.maximum(tokens - 1, 1)
        nan = np.nan

        def seconds(values: Array, where: Array) -> Array:
            return np.where(where, values / 1e9, nan)

        was_dispatched = dispatched >= 0
        return {
            "gateway_s": seconds(settings.gateway_ns + held_ns, was_dispatched),
            "queue_s": seconds(
                np.where(was_dispatched, dispatched, self.settled_ns) - arrival,
                np.ones_like(has_first),
            ),
            "schedule_s": seconds(scheduled - entered, done),
            "prefill_s": seconds(prefilled - scheduled, done),
            "decode_s": seconds(answered - settings.network_ns - prefilled, done),
            "network_s": seconds(np.full_like(arrival, 2 * settings.network_ns), done),
            "ttft_s": seconds(ttft, done | kept | (has_first & (first_out >= 0))),
            "e2e_s": seconds(e2e, done | kept),
            "tpot_s": seconds((e2e - ttft) / gaps, done & has_first & (tokens > 1)),
        }


def results_batch(chunk: Chunk, seen: Observed, fleet: list[ReplicaSpec]) -> pa.RecordBatch:
    """The chunk's rows with the observed columns filled in; lengths stay as the trace has them."""
    batch = chunk.batch
    names = [spec.name for spec in fleet]
    categories: dict[str, list[str | None]] = {
        "outcome": list(seen.outcome),
        "error_kind": [
            why if outcome == "failed" else None
            for outcome, why in zip(seen.outcome, seen.why, strict=True)
        ],
        "degraded_how": [
            why if outcome == "degraded" else None
            for outcome, why in zip(seen.outcome, seen.why, strict=True)
        ],
        "tier": list(seen.tier),
        "replica": [names[index] if index >= 0 else None for index in seen.replica.tolist()],
    }
    if any(seen.verification):
        categories["verification_status"] = [status or None for status in seen.verification]
    codes = [result.http_code for result in chunk.results]
    columns: dict[str, pa.Array] = {
        name: category_column(values) for name, values in categories.items()
    }
    columns["http_code"] = pa.array(codes, pa.int16())
    columns["retries"] = pa.array(np.clip(seen.tries - 1, 0, 127), pa.int8())
    told = seen.confidence_permille >= 0
    if told.any():
        confidence = np.where(told, seen.confidence_permille / 1000, np.nan)
        columns["confidence"] = pa.array(confidence, pa.float32(), from_pandas=True)
    for name, values in seen.columns.items():
        columns[name] = pa.array(values, pa.float32(), from_pandas=True)
    for name in ("verification_status", "confidence"):
        if name not in columns:  # what the trace had there was not observed here
            columns[name] = pa.nulls(len(codes), batch.schema.field(name).type)
    arrays = [columns.get(field.name, batch.column(i)) for i, field in enumerate(batch.schema)]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)
