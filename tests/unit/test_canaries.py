"""Canaries played in the twin: small ones, from the traffic to the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest

from policy.deployment import DeploymentPlan, Stage
from policy.files import FileError, load_policy, parse_policy
from twin.canaries import Ground, faults, miss_share, play, play_many, streams

if TYPE_CHECKING:
    from pathlib import Path

GROUND = Ground(hours=0.5, rate_rps=1.0, users=400)
PLAN = DeploymentPlan(
    stages=(
        Stage("shadow", 0, 30, 1), Stage("canary", 300, 300, 10), Stage("full", 1000, 60, 1)
    ),
    warmup_least_s=10, warmup_most_s=60,
)  # fmt: skip
LIVE = load_policy("stable")
SAME = msgspec.structs.replace(LIVE, name="stable-again")
REFUSING = parse_policy(
    "schema: 1\nname: refusing\ndiscipline: tiered\nestimates: {bytes_per_token_most: 1}\n", "bad"
)


def test_an_equal_policy_is_not_rolled_back_and_does_not_hurt() -> None:
    plan = msgspec.structs.replace(PLAN, stages=PLAN.stages[:2])
    played = play(LIVE, SAME, plan, GROUND, 1)
    assert not played.rolled_back
    assert played.canary_requests > 100
    assert 0.2 < played.canary_requests / (played.canary_requests + played.stable_requests) < 0.4
    assert abs(played.hurt) < 10
    assert played == play(LIVE, SAME, plan, GROUND, 1)


def test_a_policy_that_refuses_long_documents_is_called_back_at_once() -> None:
    played = play(LIVE, REFUSING, PLAN, GROUND, 2)
    assert played.rolled_back
    assert "evidence" in played.ended or "hurt" in played.ended
    assert 3 <= played.hurt <= 50
    assert played.stage == 1
    assert played.lateness_s <= 5


def test_the_refusing_policy_misses_more_by_the_live_deadlines() -> None:
    ground = msgspec.structs.replace(GROUND, hours=0.2)
    requests, misses = miss_share(LIVE, LIVE, ground, 3)
    same, more = miss_share(REFUSING, LIVE, ground, 3)
    assert requests == same > 300
    assert more > 5 * max(1, misses)


def test_runs_are_kept_and_not_played_again(tmp_path: Path) -> None:
    ground = msgspec.structs.replace(GROUND, hours=0.1)
    out = tmp_path / "runs.jsonl"
    seen: list[int] = []

    def told(seeds: range) -> None:
        play_many(
            LIVE, SAME, PLAN, ground, seeds, out=out, progress=lambda each: seen.append(each.seed)
        )

    told(range(1))
    whole = out.read_bytes()
    out.write_bytes(whole + b'{"seed":9')  # cut short by a crash
    told(range(2))
    assert seen == [0, 0, 1]
    assert out.read_bytes().startswith(whole + b'{"seed":1')
    with pytest.raises(FileError, match="other policies"):
        play_many(LIVE, REFUSING, PLAN, ground, range(1), out=out)


def test_the_traffic_swings_and_bursts_and_a_replica_dies() -> None:
    hours = {streams(GROUND, seed)[0].arrivals.diurnal[0] for seed in range(30)}  # type: ignore[index]
    assert len(hours) > 5
    assert all(stream.arrivals.bursts is not None for stream in streams(GROUND, 0))
    times = {fault.at_s for seed in range(5) for fault in faults(GROUND, seed)}
    assert len(times) == 5
    assert max(times) < 1800
    assert faults(msgspec.structs.replace(GROUND, restart=False), 1) == ()
