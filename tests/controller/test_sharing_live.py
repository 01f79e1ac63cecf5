"""Two controllers as processes, before served twins, with a real Redis between them."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.controller.arrivals import (
    Seen,
    breaches_by,
    jain,
    overlaps,
    recording_twin,
    seen,
    served_by,
    unlogged,
    went,
)
from tests.controller.sharing import Crowd, settled
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.controller.processes import Controller, Controllers

USER_PER_S = 5
POLICY = """\
schema: 1
name: shared
discipline: tiered
limits: {model_per_s: 16}
"""


class Site(NamedTuple):
    """All of it."""

    redis: RedisServer
    controllers: list[Controller]
    rows: list[Path]

    @property
    def urls(self) -> list[str]:
        return [each.url for each in self.controllers]

    def seen(self) -> list[Seen]:
        """What arrived at the servers."""
        return seen(self.rows)


@pytest.fixture
def site(controllers: Controllers, request: pytest.FixtureRequest) -> Iterator[Site]:
    """Two controllers before two twins; a parameter is their policy file's text."""
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        twins = [stack.enter_context(recording_twin()) for _ in range(2)]
        more: dict[str, Any] = {"redis": redis.url, "drain_s": 2.0}
        if hasattr(request, "param"):
            file = controllers.folder / "policy.yaml"
            file.write_text(request.param)
            more["policy"] = str(file)
        started = [controllers([twin.url for twin, _ in twins], **more) for _ in range(2)]
        yield Site(redis, started, [rows for _, rows in twins])


def held(site: Site, limits: dict[str, int]) -> None:
    """No limit was exceeded in any second, over both decision logs."""
    for controller in site.controllers:
        if controller.process.poll() is None:
            controller.stop()
    rows = [row for each in site.controllers for row in went(each.data)]
    missing = unlogged(site.seen(), rows)
    assert len(rows) > 10
    assert len(missing) < 5, "only the end of a log may be lost"
    for name, limit in limits.items():
        times = [(getattr(row, name), row.at_ns) for row in rows]
        times += [(getattr(row, name), row.came_ns) for row in missing if name != "model"]
        found = breaches_by(times, limit)
        assert not found, f"more than {limit} a second of {name}: {found}"
    assert not overlaps(site.seen()), "two of one session were in flight at once"


def in_order(rows: Sequence[Seen]) -> None:
    """Each session's requests arrived one after the other; some of them more than once."""
    last: dict[str, int] = {}
    for row in rows:
        if row.session:
            assert row.number >= last.get(row.session, 0), row
            last[row.session] = row.number


def test_a_user_s_limit_holds_over_both_and_is_whole_for_one(site: Site) -> None:
    async def story() -> None:
        await settled(site.controllers)
        async with Crowd(site.urls) as crowd:
            for number in range(3):
                crowd.flood(f"u{number}")
            began_s = time.monotonic()
            await asyncio.sleep(6.0)
        served = served_by(site.seen(), [f"u{number}" for number in range(3)])
        took_s = time.monotonic() - began_s
        assert jain(served.values()) >= 0.95, served
        for user, count in served.items():
            assert count >= 0.8 * USER_PER_S * 6.0, f"{user} had {count} in {took_s:.1f} s"
        at = {each.asked for each in crowd.good() if each.user == "u0"}
        assert at == {0, 1}, "both let it through"
        async with Crowd(site.urls[:1]) as alone:  # the other has nothing of it any more
            alone.flood("u9")
            began_s = time.monotonic()
            await asyncio.sleep(4.0)
            late = alone.good(began_s + 1.0, began_s + 4.0)
        assert len(late) >= 0.9 * USER_PER_S * 3.0, "one alone has all of it"

    asyncio.run(story())
    held(site, {"user": USER_PER_S})


@pytest.mark.parametrize("site", [POLICY], indirect=True)
def test_equal_users_are_served_alike_where_a_model_s_limit_is_too_small(site: Site) -> None:
    async def story() -> None:
        await settled(site.controllers)
        users = [f"u{number}" for number in range(6)]
        async with Crowd(site.urls) as crowd:
            for user in users:
                crowd.flood(user, 2)
            await asyncio.sleep(6.0)
        served = served_by(site.seen(), users)
        assert jain(served.values()) >= 0.95, served
        assert sum(served.values()) >= 0.8 * 16 * 6.0, served

    asyncio.run(story())
    held(site, {"user": USER_PER_S, "model": 16})


def test_a_session_is_served_in_order_though_it_goes_from_one_to_the_other(site: Site) -> None:
    async def story() -> None:
        await settled(site.controllers)
        async with Crowd(site.urls) as crowd:
            for number in range(4):
                crowd.speak(f"u{number}", f"s{number}", number % 2, turns=True)
            await asyncio.sleep(3.0)
            # At both at once: one after the other all the same.
            both = [crowd.ask(at, "u8", "s8", 1) for at in (0, 1, 0, 1)]
            assert all(answer.good for answer in await asyncio.gather(*both))
            await asyncio.sleep(1.0)
        for number in range(4):
            asked = {each.asked for each in crowd.good() if each.session == f"s{number}"}
            assert asked == {0, 1}
        assert not [each for each in crowd.told if not each.answer.good]

    asyncio.run(story())
    in_order(site.seen())
    held(site, {"user": USER_PER_S, "session": 20})


def test_one_that_is_killed_takes_only_its_open_connections_along(site: Site) -> None:
    first = site.controllers[0]

    async def story() -> None:
        await settled(site.controllers)
        async with Crowd(site.urls) as crowd:
            for number in range(6):
                crowd.speak(f"v{number}", f"s{number}", number % 2)
            for number in range(2):
                crowd.flood(f"u{number}", 2)
            await asyncio.sleep(3.0)
            killed_s = time.monotonic()
            moved = [f"s{number}" for number in range(6) if crowd.last_at(f"s{number}") == 0]
            await asyncio.to_thread(first.kill)
            await asyncio.sleep(6.0)
        assert moved
        back_s = {each: crowd.back_s(each, killed_s) for each in moved}
        assert max(back_s.values()) <= 2.0, back_s
        failed = [each for each in crowd.told if not each.answer.good]
        assert failed
        assert {each.asked for each in failed} == {0}, "only its own connections broke"
        assert all(each.answer.ended_s >= killed_s - 0.05 for each in failed)
        late = [each for each in crowd.good(killed_s + 3.0, killed_s + 6.0) if each.user == "u0"]
        assert len(late) >= 0.85 * USER_PER_S * 3.0, "who is left has all of the limit"

    asyncio.run(story())
    in_order(site.seen())
    held(site, {"user": USER_PER_S, "session": 20})


@pytest.mark.parametrize("how", ["killed", "paused"])
def test_without_the_store_what_is_held_goes_on(site: Site, how: str) -> None:
    async def story() -> None:
        await settled(site.controllers)
        async with Crowd(site.urls) as crowd:
            for number in range(2):
                crowd.flood(f"u{number}", 2)
                crowd.speak(f"v{number}", f"s{number}", number)
            await asyncio.sleep(3.0)
            site.redis.kill() if how == "killed" else site.redis.pause()
            gone_s = time.monotonic()
            await asyncio.sleep(2.5)
            free = await crowd.ask(0, "", "", 1)  # it needs no lease of anything
            assert free.good
            assert free.e2e_s < 0.5
            new = await crowd.ask(1, "w", "new", 1)
            assert new.status == 503, new
            assert int(new.headers["retry-after"]) >= 1
            assert new.error["code"] == "session_elsewhere"
            for each in site.controllers:
                assert "twinkeel_store_up 0" in await asyncio.to_thread(each.metrics)
                alerts = await asyncio.to_thread(each.status)
                assert "store" in str(alerts["alerts"])
            site.redis.start() if how == "killed" else site.redis.resume()
            back_s = time.monotonic()
            while not (await crowd.ask(1, "w", "new", 2)).good:
                assert time.monotonic() - back_s < 4.0
                await asyncio.sleep(0.1)
            await asyncio.sleep(2.0)
        for session in ("s0", "s1"):
            gap_s = _longest_gap_s(crowd, session)
            assert gap_s < 1.0, f"{session} stood still for {gap_s:.2f} s"
        for user in ("u0", "u1"):
            count = sum(each.user == user for each in crowd.good(gone_s, back_s))
            assert count >= 0.7 * USER_PER_S * (back_s - gone_s), "its share goes on"

    asyncio.run(story())
    in_order(site.seen())
    held(site, {"user": USER_PER_S, "session": 20})


def _longest_gap_s(crowd: Crowd, session: str) -> float:
    ended = [each.answer.ended_s for each in crowd.good() if each.session == session]
    return max(later - sooner for sooner, later in pairwise(ended))


def test_one_that_ends_gives_its_sessions_back_at_once(site: Site) -> None:
    first, second = site.controllers

    async def story() -> None:
        await settled(site.controllers)
        async with Crowd(site.urls) as crowd:
            for number in range(8):
                assert (await crowd.ask(0, f"v{number}", f"s{number}", 1)).good
            await asyncio.to_thread(first.stop)
            since_s = time.monotonic()
            answers = await asyncio.gather(
                *(crowd.ask(1, f"v{number}", f"s{number}", 2) for number in range(8))
            )
            assert all(answer.good for answer in answers)
            assert time.monotonic() - since_s < 0.8
        assert "twinkeel_store_controllers 1.0" in await asyncio.to_thread(second.metrics)

    asyncio.run(story())
    held(site, {"session": 20})


def test_a_store_that_is_not_there_at_the_start_is_found_later(controllers: Controllers) -> None:
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        redis.kill()
        twin, _ = stack.enter_context(recording_twin())
        controller = controllers([twin.url], redis=redis.url)
        assert "twinkeel_store_up 0" in controller.metrics()
        assert "store" in str(controller.status()["alerts"])

        async def story() -> None:
            async with Crowd([controller.url]) as crowd:
                assert (await crowd.ask(0, "u", "", 1)).good
                assert (await crowd.ask(0, "u", "s", 1)).status == 503
                await asyncio.to_thread(redis.start)
                await asyncio.sleep(2.0)
                assert (await crowd.ask(0, "u", "s", 2)).good

        asyncio.run(story())
        assert "twinkeel_store_up 1" in controller.metrics()
