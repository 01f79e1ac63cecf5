"""Random walks, seeded: longer and denser than the state machine's, with many retries in flight.

What the state machine shrinks to its core is found here first: queues behind failed replicas,
restored doubles, fleets that come and go.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from policy.events import Cancelled, ReplicaDown
from tests.policy_support import MS, Checked, S, parameters, up

SHAPES: tuple[dict[str, Any], ...] = (
    {"max_num_seqs": 3},
    {"kv_blocks": 600, "max_model_len": 8192},
    {"models": ("m",), "max_num_seqs": 2},
    {"pooling": True, "models": ("m", "light")},
)
POLICIES: dict[str, dict[str, Any]] = {
    "fifo": {"discipline": "fifo"},
    "tight": {
        "tiers": {"turbo_max_tflop": 10, "stable_max_tflop": 60, "fallback_model": "light",
                  "lend_wait_ms": 5},
        "shedding": {"queue_max": 20},
        "inflight": {"long_prefill_tokens": 2000, "long_prefill_cap_tokens": 4000},
        "history": {"keys_max": 2, "prefix_entries_max": 2},
    },
    "patient": {"shedding": {"enabled": False}, "inflight": {"engine_priority": True}},
    "stubborn": {
        "shedding": {"enabled": False},
        "retries": {"budget_permille": 1000, "budget_least": 1000, "tries_most": 10},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", POLICIES)
def test_walks(name: str) -> None:
    for seed in range(25):
        rng = random.Random(seed)  # noqa: S311
        checked = Checked(parameters(**POLICIES[name]))
        for replica in range(rng.randrange(4)):
            checked.bring_up(up(replica, **SHAPES[replica]))
        for _ in range(rng.randrange(10, 150)):
            checked.now_ns += rng.choice((0, 0, 1, MS, 40 * MS, S))
            move(checked, rng)
        checked.restore()
        checked.drain()
        assert checked.policy.snapshot() == checked.double.snapshot(), f"seed {seed}"


def move(checked: Checked, rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.4 or not checked.arrivals:
        fields = request(rng)
        for _ in range(rng.choice((1, 1, 3, 8))):
            checked.arrive(**fields)
    elif kind < 0.7 and checked.in_flight:
        chosen = rng.choice(sorted(checked.in_flight))
        if kind < 0.5:
            checked.first(chosen)
        else:
            checked.finish(chosen, rng.randrange(500))
    elif kind < 0.85 and checked.in_flight:
        kinds = ("timeout", "http_5xx", "oom", "replica_lost", "rejected")
        checked.fail(rng.choice(sorted(checked.in_flight)), rng.choice(kinds))
    elif kind < 0.88:
        checked.feed(Cancelled(rng.randrange(checked.next_request)))
    elif kind < 0.92:
        checked.tick()
    elif kind < 0.95:
        switch(checked, rng.randrange(len(SHAPES)))
    else:
        checked.restore()


def request(rng: random.Random) -> dict[str, Any]:
    return {
        "tokens": rng.choice((0, 1, 100, 900, 3000, 6000, 20_000)),
        "max_tokens": rng.choice((0, 50, 2000)),
        "sla": rng.choice(("", "P0", "P1", "P2")),
        "model": rng.choice(("m", "m", "m", "other")),
        "endpoint": rng.choice(("chat", "chat", "chat", "embeddings")),
        "user": rng.choice(("", "ann", "bob")),
        "stream": rng.random() < 0.8,
        "prefix": rng.choice(((), (1,), (1, 2, 3))),
        "prefix_block_bytes": 512,
    }


def switch(checked: Checked, replica: int) -> None:
    """A replica goes, failing what it held, or comes."""
    if checked.replicas.pop(replica, None) is None:
        checked.bring_up(up(replica, **SHAPES[replica]))
        return
    checked.feed(ReplicaDown(replica, "test"))
    for lost, where in sorted(checked.in_flight.items()):
        if where == replica:
            checked.fail(lost, "replica_lost")
