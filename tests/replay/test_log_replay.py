"""A log recorded by the runner, replayed: equal for the same policy, different for another."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from policy.audit import replay
from policy.compose import build_policy, restore
from policy.decisions import Decision, Dispatch
from policy.events import Cancelled, Failed, Finished, FirstToken, ReplicaDown
from policy.files import load_policy
from policy.log import FullLog, HashLog, Header, read_segment
from policy.parameters import Parameters, canonical
from policy.runner import Runner
from tests.policy_support import MS, arrived, up

REPLICAS = 3
USERS = tuple(f"user{number}" for number in range(20))


class Segments:
    """Log segments in memory."""

    def __init__(self) -> None:
        self.data: list[bytearray] = []

    def open(self, index: int) -> Segments:
        assert index == len(self.data)
        self.data.append(bytearray())
        return self

    def write(self, piece: bytes) -> None:
        self.data[-1] += piece

    def close(self) -> None:
        """Nothing to close."""

    def all(self) -> list[bytes]:
        return [bytes(data) for data in self.data]


def record(params: Parameters, requests: int = 600, segment_bytes: int = 20_000) -> Segments:
    """A busy hour in small: bursts, failures, a lost replica, cancellations, timers."""
    segments = Segments()
    policy = build_policy(params)
    header = Header(1, "c0de", canonical(params), 0)
    log = FullLog(header, policy.snapshot, segments.open, segment_bytes)
    drive(policy, log, requests)
    log.close()
    return segments


def drive(policy: Any, log: Any, requests: int) -> None:
    rng = random.Random(7)  # noqa: S311
    now_ns = 0
    flying: list[Dispatch] = []
    timers: list[int] = []

    def apply(decision: Decision) -> None:
        if isinstance(decision, Dispatch):
            flying.append(decision)

    runner = Runner(policy, lambda: now_ns, apply, timers.append, log)
    for replica in range(REPLICAS):
        runner.feed(up(replica, max_num_seqs=8))
    for request in range(requests):
        now_ns += rng.choice((0, MS, 5 * MS, 30 * MS))
        while timers and min(timers) <= now_ns:
            timers.remove(min(timers))
            runner.tick()
        runner.feed(
            arrived(
                request, rng.randrange(5000), sla=rng.choice(("P0", "P1", "P2")),
                user=rng.choice(USERS), stream=rng.random() < 0.9, prefix_block_bytes=512,
                prefix=(rng.randrange(4), rng.randrange(4)),
            )
        )  # fmt: skip
        for _ in range(rng.randrange(3)):
            if flying:
                end(runner, flying.pop(rng.randrange(len(flying))), rng)
        if request == requests // 2:
            runner.feed(ReplicaDown(1, "lost"))


def end(runner: Runner, sent: Dispatch, rng: random.Random) -> None:
    request, replica = sent.request, sent.replica
    end = rng.random()
    if end < 0.1:
        runner.feed(Failed(request, replica, rng.choice(("timeout", "http_5xx", "rejected"))))
    elif end < 0.15:
        runner.feed(Cancelled(request))
    else:
        runner.feed(FirstToken(request, replica))
        runner.feed(Finished(request, replica, 1000, 0, rng.randrange(1, 500)))


@pytest.mark.parametrize("name", ["fifo", "stable", "throughput"])
def test_the_same_policy_decides_the_same(name: str) -> None:
    segments = record(load_policy(name))
    assert len(segments.data) > 2
    assert replay(segments.all()) is None
    for data in segments.all():  # each segment stands on its own
        assert replay([data]) is None


def test_a_changed_parameter_decides_otherwise_and_the_place_is_named() -> None:
    segments = record(load_policy("stable"))
    other = msgspec.convert(
        {"schema": 1, "inflight": {"sequences_permille": 500}}, Parameters
    )  # fmt: skip
    found = replay(segments.all(), lambda _, snapshot: restore(other, snapshot))
    assert found is not None
    assert found.logged.decisions != found.replayed
    records = list(read_segment(bytes(segments.data[found.segment])).records)
    assert records[found.record] == found.logged


def test_a_tampered_record_is_found() -> None:
    segments = record(load_policy("fifo"), requests=40)
    data = bytes(segments.data[0])
    at = data.index(b"dispatch")
    forged = data[:at] + data[at:].replace(b"dispatch\x00\x00", b"dispatch\x00\x02", 1)
    assert forged != data
    found = replay([forged])
    assert found is not None
    assert (found.segment, found.record) == (0, REPLICAS)


def test_a_log_torn_by_a_crash_replays_up_to_the_tear() -> None:
    segments = record(load_policy("stable"), requests=900, segment_bytes=10**9)
    data = bytes(segments.data[0])
    assert replay([data[: len(data) * 3 // 4]]) is None


def test_the_log_does_not_depend_on_the_hash_seed() -> None:
    digests: set[str] = set()
    for seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", "from tests.replay.test_log_replay import digest; digest()"],
            env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        digests.add(done.stdout)
    assert len(digests) == 1


def digest() -> None:
    """Print the hash of a log and of the snapshot it leaves, for each preset."""
    for name in ("fifo", "stable", "throughput"):
        policy = build_policy(load_policy(name))
        log = HashLog()
        drive(policy, log, 600)
        print(log.hexdigest(), log.count, len(policy.snapshot()), policy.snapshot().hex()[-200:])
