"""Any policy under any stream of events, legal or not, keeps the contract."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from policy.decisions import Refused
from policy.events import (
    Arrived,
    Cancelled,
    Failed,
    Finished,
    FirstToken,
    ReplicaDown,
    Scraped,
    StepsRead,
    Ticked,
)
from tests.policy_support import MS, Checked, S, arrived, parameters, up

KINDS = (
    "timeout", "oom", "http_5xx", "stream_cut", "empty", "malformed", "silent", "replica_lost",
    "too_large", "rejected", "backpressure", "controller_lost",
)  # fmt: skip
REPLICAS = st.integers(0, 3)
GAPS = st.sampled_from((0, 1, MS, 40 * MS, S, 5 * S))
REQUESTS = st.fixed_dictionaries(
    {
        "tokens": st.sampled_from((0, 1, 100, 900, 3000, 6000, 20_000, 200_000)),
        "max_tokens": st.sampled_from((0, 1, 50, 2000)),
        "sla": st.sampled_from(("", "P0", "P1", "P2", "P7")),
        "model": st.sampled_from(("m", "m", "other")),
        "endpoint": st.sampled_from(("chat", "chat", "completions", "embeddings")),
        "user": st.sampled_from(("", "ann", "bob")),
        "line": st.sampled_from(("", "search")),
        "stream": st.booleans(),
        "deadline_ns": st.sampled_from((0, 0, 1, 300 * MS, 60 * S)),
        "prefix": st.sampled_from(((), (1,), (1, 2), (1, 2, 3), (9, 8))),
        "prefix_block_bytes": st.sampled_from((0, 512)),
    }
)


class Contract(RuleBasedStateMachine):
    """Drives a policy and its restored double at random."""

    discipline = "fifo"
    sections: dict[str, Any] = {}  # noqa: RUF012

    @initialize(count=st.integers(0, 2))
    def start(self, count: int) -> None:
        self.checked = Checked(parameters(self.discipline, **self.sections))
        for replica in range(count):
            self.checked.bring_up(self.spec(replica))

    def spec(self, replica: int) -> Any:
        shapes: tuple[dict[str, Any], ...] = (
            {"max_num_seqs": 3},
            {"kv_blocks": 600, "max_model_len": 8192},
            {"models": ("m",), "max_num_seqs": 2},
            {"pooling": True, "models": ("m", "light")},
        )
        return up(replica, **shapes[replica])

    def pick(self, index: int) -> int:
        known = sorted(self.checked.in_flight)
        return known[index % len(known)]

    @rule(gap=GAPS, fields=REQUESTS, burst=st.integers(1, 6))
    def arrive(self, gap: int, fields: dict[str, Any], burst: int) -> None:
        for _ in range(burst):
            self.checked.arrive(gap, **fields)
            gap = 0

    @precondition(lambda self: self.checked.in_flight)
    @rule(gap=GAPS, index=st.integers(0, 99))
    def first(self, gap: int, index: int) -> None:
        self.checked.first(self.pick(index), gap)

    @precondition(lambda self: self.checked.in_flight)
    @rule(gap=GAPS, index=st.integers(0, 99), tokens=st.integers(0, 2000))
    def finish(self, gap: int, index: int, tokens: int) -> None:
        self.checked.finish(self.pick(index), tokens, gap)

    @precondition(lambda self: self.checked.in_flight)
    @rule(gap=GAPS, index=st.integers(0, 99), kind=st.sampled_from(KINDS))
    def fail(self, gap: int, index: int, kind: str) -> None:
        self.checked.fail(self.pick(index), kind, gap)

    @precondition(lambda self: self.checked.arrivals)
    @rule(gap=GAPS, index=st.integers(0, 999))
    def cancel(self, gap: int, index: int) -> None:
        self.checked.feed(Cancelled(index % self.checked.next_request), gap)

    @rule()
    def tick(self) -> None:
        self.checked.tick()

    @rule(gap=GAPS)
    def early_tick(self, gap: int) -> None:
        self.checked.feed(Ticked(), gap)

    @rule(replica=REPLICAS, gap=GAPS)
    def come_up(self, replica: int, gap: int) -> None:
        self.checked.now_ns += gap
        if replica not in self.checked.replicas:
            self.checked.bring_up(self.spec(replica))

    @precondition(lambda self: self.checked.replicas)
    @rule(replica=REPLICAS, gap=GAPS)
    def go_down(self, replica: int, gap: int) -> None:
        if self.checked.replicas.pop(replica, None) is not None:
            self.checked.feed(ReplicaDown(replica, "test"), gap)
            for request, where in sorted(self.checked.in_flight.items()):
                if where == replica:
                    self.checked.fail(request, "replica_lost")

    @rule(replica=REPLICAS, waiting=st.integers(0, 9), age=GAPS)
    def scrape(self, replica: int, waiting: int, age: int) -> None:
        self.checked.feed(Scraped(replica, 1, waiting, 500, 0, age))

    @rule(
        replica=REPLICAS, gap=GAPS, steps=st.integers(0, 500),
        permille=st.sampled_from((0, 700, 1000, 1300)),
    )  # fmt: skip
    def read_steps(self, replica: int, gap: int, steps: int, permille: int) -> None:
        self.checked.feed(StepsRead(replica, steps, 5 * steps * permille, 5000 * steps), gap)

    @rule(replica=st.integers(0, 5), request=st.integers(0, 50), data=st.data())
    def anything(self, replica: int, request: int, data: st.DataObject) -> None:
        """Events that may be legal, late or impossible; the driver learns what they mean."""
        checked = self.checked
        event = data.draw(
            st.sampled_from(
                (
                    Finished(request, replica, 10, 20, 5),
                    Finished(request, replica, 10, -1, 5),
                    FirstToken(request + 1000, replica),
                    Failed(request + 1000, replica, "timeout"),
                    Cancelled(request + 1000),
                    Cancelled(-1),
                    arrived(-5),
                    Arrived(checked.next_request + 7, "m", "chat", -1),
                    Arrived(checked.next_request + 7, "m", "chat", 1, -1),
                    ReplicaDown(9, "never there"),
                    Scraped(9, 0, 0, 0, 0, 0),
                    Scraped(0, -1, 0, 0, 0, 0),
                    StepsRead(0, -1, 0, 0),
                    StepsRead(9, 1, 1, 1),
                    up(replica, max_num_seqs=0),
                    up(replica, cost=(-1, 0, 0, 0, 0, 0)),
                )
            )
        )
        decisions = checked.feed(event)
        assert all(isinstance(decision, Refused) for decision in decisions)

    @rule()
    def restore(self) -> None:
        self.checked.restore()

    def teardown(self) -> None:
        if hasattr(self, "checked"):
            self.checked.restore()
            self.checked.drain()
            assert self.checked.policy.snapshot() == self.checked.double.snapshot()


class Fifo(Contract):
    """The baseline."""


class Stable(Contract):
    """The tiered queue, in tight quarters so that it sheds, lends, caps and holds."""

    discipline = "tiered"
    sections = {  # noqa: RUF012
        "tiers": {"turbo_max_tflop": 10, "stable_max_tflop": 60, "fallback_model": "light",
                  "lend_wait_ms": 5},
        "shedding": {"queue_max": 20},
        "inflight": {"long_prefill_tokens": 2000, "long_prefill_cap_tokens": 4000},
        "history": {"keys_max": 2, "prefix_entries_max": 2},
    }  # fmt: skip


class Throughput(Contract):
    """The tiered queue where nothing is shed for its deadline."""

    discipline = "tiered"
    sections = {"shedding": {"enabled": False}, "inflight": {"engine_priority": True}}  # noqa: RUF012


@pytest.mark.parametrize("machine", [Fifo, Stable, Throughput])
def test_contract(machine: type[Contract]) -> None:
    case = machine.TestCase
    case.settings = settings(
        max_examples=40, stateful_step_count=50, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    case("runTest").debug()
