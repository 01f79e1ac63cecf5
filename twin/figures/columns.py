"""What became of some thousands of requests, as numpy columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from traces.schema import OUTCOMES
from twin.figures.measure import gives_what_was_asked
from twin.world import Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twin.figures.measure import Measure
    from twin.summary import Slo

    Array = np.ndarray[Any, np.dtype[Any]]

NS = 1e9
CODES = {name: code for code, name in enumerate(OUTCOMES)}


class Row(NamedTuple):
    """A settled request and what its caller had said about it."""

    sla: str
    line: str
    deadline_ns: int
    result: Result


class Columns:
    """Rows side by side; seconds, NaN where it never came to that."""

    __slots__ = (
        "arrival_s", "degraded", "dropped", "e2e_s", "good", "line", "outcome", "output_tokens",
        "queue_s", "replica", "settled_s", "sla", "tier", "ttft_s", "useful", "verification", "why",
        "wrong",
    )  # fmt: skip

    def __init__(self, rows: Sequence[Row], slo: Slo, measure: Measure) -> None:
        sla, line, deadline, results = zip(*rows, strict=True)
        of = dict(zip(Result._fields, zip(*results, strict=True), strict=True))
        self.sla: tuple[str, ...] = sla
        self.line: tuple[str, ...] = line
        self.tier: tuple[str, ...] = of["tier"]
        self.why: tuple[str, ...] = of["why"]
        self.verification: tuple[str, ...] = of["verification"]
        self.replica = np.array(of["replica"])
        self.outcome = np.array([CODES[name] for name in of["outcome"]])
        self.output_tokens = np.array(of["output_tokens"])
        arrival, settled, dispatched, first_out = (
            np.array(of[name])
            for name in ("arrival_ns", "settled_ns", "dispatched_ns", "first_out_ns")
        )
        self.arrival_s = arrival / NS
        self.settled_s = settled / NS
        answered = self.outcome == CODES["answered"]
        self.degraded = self.outcome == CODES["degraded"]
        done = answered | self.degraded
        # Of an answer sent as a whole only its engine knew the first token.
        engines = answered | np.array([way.startswith("model ") for way in self.why])
        heard = np.where((first_out < 0) & engines, np.array(of["first_ns"]), first_out)
        first = np.where(heard >= 0, heard, settled)
        self.ttft_s = np.where(done, (first - arrival) / NS, np.nan)
        self.e2e_s = np.where(done, (settled - arrival) / NS, np.nan)
        waited = np.where(dispatched >= 0, dispatched, settled) - arrival
        self.queue_s = np.where(done, waited / NS, np.nan)
        correct = np.array(of["correct"])
        self.wrong = answered & (correct == 0)
        ways = measure.useful_degraded
        useful_way = np.array([gives_what_was_asked(why, ways) for why in self.why])
        # A kept answer takes the engine's place, so what the engine said does not matter.
        right = (correct != 0) | np.array([way == "cached" for way in self.why])
        self.useful = right & (answered | (self.degraded & useful_way))
        gaps = np.maximum(self.output_tokens - 1, 1)
        tpot_s = (self.e2e_s - self.ttft_s) / gaps
        own_s = np.array(deadline) / NS
        limit_s = np.where(own_s > 0, own_s, np.array([slo.limit_s(name) for name in sla]))
        self.good = done & (self.ttft_s <= limit_s) & (tpot_s <= slo.tpot_s)
        refused = (self.outcome == CODES["failed"]) | (self.outcome == CODES["shed"])
        in_time = (first_out < 0) & (self.settled_s - self.arrival_s < limit_s)
        self.dropped = refused & in_time & (np.array(of["tries"]) > 0)
