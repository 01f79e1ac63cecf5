"""Two controllers as processes, before served twins, with a real Redis between them."""

from __future__ import annotations

import asyncio
import json
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
from tests.controller.processes import PATIENT, eventually
from tests.controller.sharing import PATIENCE, Crowd, settled
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.controller.processes import Controller, Controllers

USER_PER_S = 5
LIMITED = f"{PATIENT}limits: {{model_per_s: 16}}\n"
WINDOWS_MOST = 8
NEVER_LOST = {"ANSWER_S": 10.0, "SILENCE_MS": 60_000}
NOBODY_GONE = {**NEVER_LOST, "GONE_MS": 60_000}
NEVER_LAPSED = {**NOBODY_GONE, "LEASE_MS": 60_000}
"""A busy machine is no lost store, and so on: where a test is not about that."""


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


class Kind(NamedTuple):
    """What a site is made of."""

    policy: str = PATIENT
    times: dict[str, float] | None = None
    """Of the store, where they are not what they are."""
    twins: int = 2


def kind(**how: Any) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("site", [Kind(**how)], indirect=True, ids=["site"])


@pytest.fixture
def site(
    controllers: Controllers, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Site]:
    """Two controllers before twins."""
    made: Kind = request.param
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server())
        twins = [stack.enter_context(recording_twin()) for _ in range(made.twins)]
        file = controllers.folder / "policy.yaml"
        file.write_text(made.policy)
        if made.times is not None:
            monkeypatch.setenv(PATIENCE, json.dumps(made.times))
            controllers.module = "tests.controller.sharing"
        more: dict[str, Any] = {"redis": redis.url, "drain_s": 2.0, "policy": str(file)}
        started = [controllers([twin.url for twin, _ in twins], **more) for _ in range(2)]
        yield Site(redis, started, [rows for _, rows in twins])


async def in_a_window(
    s: float, found: Callable[[float, float], Any], enough: Callable[[Any], bool]
) -> None:
    """In one of some windows of so many seconds there was enough: in another, some process may
    have had no turn for a while.

    Args:
        found: what there was between two times of day.
    """
    for turn in range(1, WINDOWS_MOST + 1):
        began_s = time.time()
        await asyncio.sleep(s)
        there = found(began_s, time.time())
        if enough(there):
            return
        assert turn < WINDOWS_MOST, there


def served(site: Site, users: Sequence[str]) -> Callable[[float, float], dict[str, int]]:
    def found(since_s: float, until_s: float) -> dict[str, int]:
        rows = [row for row in site.seen() if since_s <= row.came_ns / 1e9 < until_s]
        return dict(served_by(rows, users))

    return found


def answered(crowd: Crowd, user: str) -> Callable[[float, float], int]:
    def found(since_s: float, until_s: float) -> int:
        later_s = time.monotonic() - time.time()
        good = crowd.good(since_s + later_s, until_s + later_s)
        return sum(each.user == user for each in good)

    return found


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


@kind(times=NOBODY_GONE)
def test_a_user_s_limit_holds_over_both_and_is_whole_for_one(site: Site) -> None:
    async def story() -> None:
        await settled(site.controllers)
        users = [f"u{number}" for number in range(3)]
        async with Crowd(site.urls) as crowd:
            for user in users:
                crowd.flood(user)
            await in_a_window(
                6.0, served(site, users),
                lambda had: jain(had.values()) >= 0.95
                and min(had.values()) >= 0.8 * USER_PER_S * 6.0,
            )  # fmt: skip
        at = {each.asked for each in crowd.good() if each.user == "u0"}
        assert at == {0, 1}, "both let it through"
        async with Crowd(site.urls[:1]) as alone:  # the other has nothing of it any more
            alone.flood("u9")
            await asyncio.sleep(1.0)
            await in_a_window(
                3.0, answered(alone, "u9"), lambda had: had >= 0.9 * USER_PER_S * 3.0
            )  # one alone has all of it

    asyncio.run(story())
    held(site, {"user": USER_PER_S})


@kind(policy=LIMITED, times=NOBODY_GONE)
def test_equal_users_are_served_alike_where_a_model_s_limit_is_too_small(site: Site) -> None:
    async def story() -> None:
        await settled(site.controllers)
        users = [f"u{number}" for number in range(6)]
        async with Crowd(site.urls) as crowd:
            for user in users:
                crowd.flood(user, 2)
            await in_a_window(
                6.0, served(site, users),
                lambda had: jain(had.values()) >= 0.95 and sum(had.values()) >= 0.8 * 16 * 6.0,
            )  # fmt: skip

    asyncio.run(story())
    held(site, {"user": USER_PER_S, "model": 16})


@kind(times=NOBODY_GONE)
def test_a_session_is_served_in_order_though_it_goes_from_one_to_the_other(site: Site) -> None:
    async def story() -> None:
        await settled(site.controllers)
        async with Crowd(site.urls) as crowd:
            for number in range(4):
                crowd.speak(f"u{number}", f"s{number}", number % 2, turns=True)
            await _each_answered(crowd, 4, times=5)
            # At both at once: one after the other all the same.
            both = [crowd.ask(at, "u8", "s8", 1) for at in (0, 1, 0, 1)]
            assert all(answer.good for answer in await asyncio.gather(*both))
        for number in range(4):
            asked = {each.asked for each in crowd.good() if each.session == f"s{number}"}
            assert asked == {0, 1}
        assert not [each for each in crowd.told if not each.answer.good]

    asyncio.run(story())
    in_order(site.seen())
    held(site, {"user": USER_PER_S, "session": 20})


@kind(times=NEVER_LOST)
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
            await _each_answered(crowd, 6)
            killed_s = time.monotonic()
            moved = [f"s{number}" for number in range(6) if crowd.last_at(f"s{number}") == 0]
            await asyncio.to_thread(first.kill)
            await asyncio.sleep(3.0)
            await in_a_window(
                3.0, answered(crowd, "u0"), lambda had: had >= 0.85 * USER_PER_S * 3.0
            )  # who is left has all of the limit
        assert moved
        back_s = {each: crowd.back_s(each, killed_s) for each in moved}
        assert max(back_s.values()) <= 2.0, back_s
        failed = [each for each in crowd.told if not each.answer.good]
        assert failed
        assert {each.asked for each in failed} == {0}, "only its own connections broke"
        assert all(each.answer.ended_s >= killed_s - 0.05 for each in failed)

    asyncio.run(story())
    in_order(site.seen())
    held(site, {"user": USER_PER_S, "session": 20})


async def _each_answered(crowd: Crowd, sessions: int, times: int = 1) -> None:
    """Until each of the sessions was, so often."""

    def least() -> int:
        good = [each.session for each in crowd.good()]
        return min(good.count(f"s{number}") for number in range(sessions))

    async with asyncio.timeout(60):
        while least() < times:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("how", ["killed", "paused"])
@kind(twins=1)
def test_without_the_store_what_is_held_goes_on(site: Site, how: str) -> None:
    async def story() -> None:
        await settled(site.controllers)
        async with Crowd(site.urls) as crowd:
            for number in range(2):
                crowd.flood(f"u{number}", 2)
                crowd.speak(f"v{number}", f"s{number}", number)
                crowd.speak("", "", number)  # it needs no lease of anything
            await asyncio.sleep(3.0)
            await _each_answered(crowd, 2)
            site.redis.kill() if how == "killed" else site.redis.pause()
            both = [answered(crowd, f"u{number}") for number in range(2)]
            await in_a_window(
                2.5, lambda *when: [found(*when) for found in both],
                lambda had: min(had) >= 0.7 * USER_PER_S * 2.5,
            )  # fmt: skip
            quick = [await crowd.ask(0, "", "", number) for number in range(5)]
            assert all(answer.good for answer in quick)
            assert min(answer.e2e_s for answer in quick) < 0.5
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
                assert time.monotonic() - back_s < 30.0
                await asyncio.sleep(0.1)
            await asyncio.sleep(2.0)
        # Beside what needs no lease: the same controller and server may stand still for both.
        for at, session in enumerate(("s0", "s1")):
            gap_s, usual_s = _longest_gap_s(crowd, session, at), _longest_gap_s(crowd, "", at)
            assert gap_s < 1.0 + usual_s, f"{session} stood still for {gap_s:.2f} s"

    asyncio.run(story())
    in_order(site.seen())
    held(site, {"user": USER_PER_S, "session": 20})


def _longest_gap_s(crowd: Crowd, session: str, at: int) -> float:
    """Of the session, or of what has neither a session nor a user, at one of the controllers."""
    ended = [
        each.answer.ended_s for each in crowd.good()
        if each.session == session and each.asked == at and (session or not each.user)
    ]  # fmt: skip
    return max(later - sooner for sooner, later in pairwise(ended))


@kind(times=NEVER_LAPSED)
def test_one_that_ends_gives_its_sessions_back_at_once(site: Site) -> None:
    first, second = site.controllers

    async def story() -> None:
        await settled(site.controllers)
        async with Crowd(site.urls) as crowd:
            for number in range(8):
                assert (await crowd.ask(0, f"v{number}", f"s{number}", 1)).good
            await asyncio.to_thread(first.stop)
            answers = await asyncio.gather(
                *(crowd.ask(1, f"v{number}", f"s{number}", 2) for number in range(8))
            )
            assert all(answer.good for answer in answers), "they would not lapse for a minute"

    asyncio.run(story())
    alone = "twinkeel_store_controllers 1.0"
    eventually("it knows that it is alone", lambda: alone in second.metrics())
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
                async with asyncio.timeout(30):
                    while not (await crowd.ask(0, "u", "s", 2)).good:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)

        asyncio.run(story())
        eventually("it is there", lambda: "twinkeel_store_up 1" in controller.metrics())
