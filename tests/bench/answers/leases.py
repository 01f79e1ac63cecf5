"""Limits, sessions and what becomes of them, with two controllers that share a Redis.

Callers of equal weight ask both controllers for more than their limits allow, beside sessions that
stay at one. Then one controller is killed, and replaced; then the Redis is, for a while. All that
arrives at the servers counts, at the time at which a controller let it go on: how long it took on
its way to them is no matter of limits.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.controller.arrivals import (
    breaches_by,
    jain,
    overlaps,
    recording_twin,
    seen,
    unlogged,
    went,
)
from tests.controller.processes import MODEL, Controllers
from tests.controller.sharing import Crowd, settled
from tests.figures import Figure, show
from tests.redis_server import redis_server

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.controller.arrivals import Seen, Went
    from tests.controller.processes import Controller
    from tests.redis_server import RedisServer

USER_PER_S, SESSION_PER_S, MODEL_PER_S = 5, 20, 36
LIMITS = {"user": USER_PER_S, "session": SESSION_PER_S, "model": MODEL_PER_S}
POLICY = f"""\
schema: 1
name: shared
discipline: tiered
limits: {{user_per_s: {USER_PER_S}, session_per_s: {SESSION_PER_S}, model_per_s: {MODEL_PER_S}}}
"""
USERS, OPEN_MOST = 6, 2
SESSIONS = 12
ROUND_TRIP = re.compile(r'twinkeel_store_round_trip_seconds_bucket\{le="([^"]+)"\} (\S+)')


@dataclass
class Seconds:
    """How long each part goes on."""

    normal: float = 14.0
    killed: float = 7.0
    lost: float = 5.0
    back: float = 5.0


QUICK = Seconds(5.0, 4.0, 3.0, 2.5)


@dataclass
class Measured:
    """What was seen."""

    served: dict[str, int] = field(default_factory=dict)
    back_s: dict[str, float] = field(default_factory=dict)
    """Of the sessions of the controller that was killed."""
    round_trips: dict[float, float] = field(default_factory=dict)
    """Answers of the store by their bucket's bound in s, each counted once."""


def measure(quick: bool = False) -> list[Figure]:
    """All of it, once."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="twinkeel-leases-")))
        redis = stack.enter_context(redis_server())
        twins = [stack.enter_context(recording_twin()) for _ in range(2)]
        controllers = Controllers(folder)
        stack.callback(controllers.close)
        rows = [file for _, file in twins]
        found = asyncio.run(
            _story(
                redis, controllers, [twin.url for twin, _ in twins], QUICK if quick else Seconds()
            )
        )
        for each in controllers.started:
            each.stop()
        arrived = seen(rows)
        gone = [row for each in controllers.started for row in went(each.data)]
    return _figures(found, arrived, gone)


async def _story(
    redis: RedisServer, controllers: Controllers, urls: Sequence[str], seconds: Seconds
) -> Measured:
    file = controllers.folder / "policy.yaml"
    file.write_text(POLICY)

    def start() -> Controller:
        return controllers(urls, redis=redis.url, policy=str(file), drain_s=2.0)

    pair = [await asyncio.to_thread(start) for _ in range(2)]
    await settled(pair)
    found = Measured()
    async with Crowd([each.url for each in pair]) as crowd:
        _begin(crowd)
        await asyncio.sleep(1.5)  # until each has its share
        began_s = time.monotonic()
        await asyncio.sleep(seconds.normal)
        found.served = _served(crowd, began_s)
        found.round_trips = await asyncio.to_thread(_round_trips, pair)
        killed_s = time.monotonic()
        moved = [f"s{each}" for each in range(SESSIONS) if crowd.last_at(f"s{each}") == 0]
        await asyncio.to_thread(pair[0].kill)
        await asyncio.sleep(seconds.killed)
        found.back_s = {each: crowd.back_s(each, killed_s) for each in moved}
    pair[0] = await asyncio.to_thread(start)
    await settled(pair)
    async with Crowd([each.url for each in pair]) as crowd:
        _begin(crowd)
        await asyncio.sleep(2.0)
        await asyncio.to_thread(redis.kill)
        await asyncio.sleep(seconds.lost)
        await asyncio.to_thread(redis.start)
        await asyncio.sleep(seconds.back)
    return found


def _begin(crowd: Crowd) -> None:
    for number in range(USERS):
        crowd.flood(f"u{number}", OPEN_MOST)
    for number in range(SESSIONS):
        crowd.speak(f"v{number}", f"s{number}", number % 2)


def _served(crowd: Crowd, since_s: float) -> dict[str, int]:
    counts = {f"u{number}": 0 for number in range(USERS)}
    for each in crowd.good(since_s):
        if each.user in counts:
            counts[each.user] += 1
    return counts


def _round_trips(controllers: Sequence[Controller]) -> dict[float, float]:
    counts: dict[float, float] = {}
    for each in controllers:
        below = 0.0
        for bound, total in ROUND_TRIP.findall(each.metrics()):
            counts[float(bound)] = counts.get(float(bound), 0.0) + float(total) - below
            below = float(total)
    return counts


def _quantile_ms(counts: dict[float, float], share: float) -> float:
    """Within its bucket the answers count as evenly spread."""
    left = share * sum(counts.values())
    sooner = 0.0
    for bound, count in sorted(counts.items()):
        if left <= count and count:
            return 1000 * (sooner + (bound - sooner) * left / count)
        left -= count
        sooner = bound
    return float("inf")


def _breaches(arrived: Sequence[Seen], gone: Sequence[Went]) -> dict[str, dict[str, int]]:
    """By limit: where it was exceeded, and in how many windows."""
    found = {"in flight": {"sessions": count} if (count := len(overlaps(arrived))) else {}}
    missing = unlogged(arrived, gone)
    for name, limit in LIMITS.items():
        times = [(getattr(row, name), row.at_ns) for row in gone]
        times += [
            (MODEL if name == "model" else getattr(row, name), row.came_ns) for row in missing
        ]
        found[name] = breaches_by(times, limit)
    return found


def _figures(found: Measured, arrived: Sequence[Seen], gone: Sequence[Went]) -> list[Figure]:
    breaches = _breaches(arrived, gone)
    for name, by in breaches.items():
        if by:
            print(f"exceeded: {name}: {by}", file=sys.stderr)
    count = sum(sum(by.values()) for by in breaches.values())
    served = ", ".join(map(str, found.served.values()))
    moved = len(found.back_s)
    trips = found.round_trips
    return [
        Figure(
            "jain", jain(found.served.values()), "1", ">= 0.95",
            f"{USERS} equal users over two controllers, a model's limit too small: {served}",
        ),
        Figure(
            "failover_s", max(found.back_s.values()) if moved else None, "s", "<= 2",
            f"from kill -9 to the first answer elsewhere, the worst of {moved} sessions",
        ),
        Figure(
            "limit_breaches", count if arrived else None, "1", "= 0",
            f"seconds in which a user, session or model had too many, of {len(arrived)} requests"
            " over both, one killed and the Redis killed meanwhile",
        ),
        Figure(
            "lease_ms_p50", _quantile_ms(trips, 0.5), "ms", "<= 10",
            f"of {sum(trips.values()):.0f} answers of the Redis, with all on the same two cores",
        ),
        Figure("lease_ms_p99", _quantile_ms(trips, 0.99), "ms", "<= 50", "of the same"),
    ]  # fmt: skip


def main() -> None:
    """Measure and show."""
    show(measure("--quick" in sys.argv))


if __name__ == "__main__":
    main()
