"""Controllers that share a Redis and run different policies, or different code, say so: after a
while, since a change of all of them takes one."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from controller.sharing import agreeing
from controller.sharing import store as storing
from controller.sharing.agreeing import GRACE_NS, Agreeing
from controller.sharing.leases import Sharing
from controller.sharing.store import RUNS, Store
from policy.parameters import policy_hash
from tests.controller.processes import Controllers, Twin, eventually
from tests.policy_support import parameters as made_parameters
from tests.redis_server import RedisServer, redis_server

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from policy.parameters import Parameters

ONE = made_parameters(name="one")
TWO = made_parameters(name="two", limits={"enabled": False})
SECOND = 1_000_000_000


class Driver:
    """Hears what a controller's driver is told."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.troubles: list[str] = []
        self.replicas: dict[int, Any] = {0: SimpleNamespace(up=False)}

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def feed(self, event: object) -> None:
        pass

    def trouble(self, key: str, text: str) -> None:
        self.troubles.append(f"{key}: {text}")


class Controller:
    def __init__(self, url: str, parameters: Parameters, tells: bool = True) -> None:
        self.driver = Driver(parameters)
        compares = Agreeing(lambda: self.driver.parameters) if tells else None
        self.sharing = Sharing(self.driver, Store(url), compares)  # type: ignore[arg-type]

    @property
    def differ(self) -> float:
        for family in self.sharing.counts.families():
            for sample in family.samples:
                if sample.name == "twinkeel_store_policies_differ":
                    return sample.value
        raise AssertionError("there is no such metric")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    monkeypatch.setattr(storing, "ANSWER_S", 3.0)
    monkeypatch.setattr(agreeing, "GRACE_NS", SECOND)
    with redis_server() as started:
        yield started


def play(story: Callable[..., Awaitable[None]], *controllers: Controller) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            for each in controllers:
                await each.sharing.begin()
            try:
                await story(*controllers)
            finally:
                for each in controllers:
                    await each.sharing.close()

    asyncio.run(main())


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def test_what_differs_for_long_is_told_and_taken_back_when_they_agree(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "twinkeel")

    async def story(one: Controller, two: Controller) -> None:
        await until(lambda: bool(one.driver.troubles and two.driver.troubles))
        assert (one.differ, two.differ) == (1, 1)
        said = one.driver.troubles[0]
        assert said.startswith("policies: for ")
        assert said.index(f"policy one ({policy_hash(ONE)[:12]}") < said.index(
            f"policy two ({policy_hash(TWO)[:12]}"
        )
        two.driver.parameters = ONE  # as a deployment does
        await until(lambda: one.differ == two.differ == 0)
        assert "run the same again" in caplog.text
        told = len(one.driver.troubles)
        await asyncio.sleep(1.5)
        assert len(one.driver.troubles) == told

    play(story, Controller(server.url, ONE), Controller(server.url, TWO))


def test_those_who_agree_say_nothing_and_nothing_is_left_of_who_is_gone(
    server: RedisServer,
) -> None:
    async def story(one: Controller, two: Controller, other: Controller) -> None:
        from redis.asyncio import Redis

        async with Redis.from_url(server.url) as plain:
            await until(lambda: one.sharing.counts.controllers == 3)
            assert await plain.hlen(RUNS) == 3
            await other.sharing.close()  # it differed for a moment, as in a change of all
            await until(lambda: one.sharing.counts.controllers == 2)
            assert await plain.hlen(RUNS) == 2
            assert 0 < await plain.pttl(RUNS) <= 15_000
        await asyncio.sleep(1.5)
        for each in (one, two, other):
            assert not each.driver.troubles
            assert each.differ == 0

    controllers = [Controller(server.url, each) for each in (ONE, made_parameters(name="one"), TWO)]
    play(story, *controllers)


def test_one_of_an_older_version_tells_nothing_and_is_missed(server: RedisServer) -> None:
    async def story(one: Controller, older: Controller) -> None:
        await until(lambda: bool(one.driver.troubles))
        assert "1 by an older version" in one.driver.troubles[0]
        assert not older.driver.troubles
        await older.sharing.close()
        await until(lambda: one.differ == 0)

    play(story, Controller(server.url, ONE), Controller(server.url, ONE, tells=False))


def test_a_real_controller_tells_what_is_in_force_now(
    server: RedisServer, controllers: Controllers, twins: list[Twin]
) -> None:
    import redis

    controller = controllers([twin.url for twin in twins], redis=server.url)
    with redis.Redis.from_url(server.url) as plain:

        def told() -> list[str]:
            return [each.decode().split(" ", 1)[0] for each in plain.hvals(RUNS)]

        def in_force() -> str:
            return str(json.loads(controller.admin("GET", "/status")[1])["policy"]["hash"])

        first = in_force()
        eventually("it tells", lambda: told() == [first])
        policy = "schema: 1\nname: other\nchains: {default: {budget_ms: 2500}}\n"
        assert controller.put_policy(policy)[0] < 300
        assert in_force() != first
        eventually("it tells of the new one", lambda: told() == [in_force()])


# ---- without a server ----


def test_it_is_told_after_a_minute_and_not_before() -> None:
    compares = Agreeing(lambda: ONE)
    own, other = compares.own(), Agreeing(lambda: TWO).own()
    assert not compares.heard(5 * SECOND, own, (own, other), 2)
    assert not compares.heard(5 * SECOND + GRACE_NS - 1, own, (other, own), 2)
    assert not compares.differ
    assert "for 60 s" in compares.heard(5 * SECOND + GRACE_NS, own, (own, other), 2)
    assert compares.differ
    assert not compares.heard(6 * SECOND + GRACE_NS, own, (own, own), 2)
    assert not compares.differ
    assert not compares.heard(7 * SECOND + GRACE_NS, own, (own, other), 2)  # from the start again


def test_the_same_policy_by_other_code_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    compares = Agreeing(lambda: ONE)
    own = compares.own()
    monkeypatch.setattr(agreeing, "code_hash", lambda: "f" * 32)
    other = Agreeing(lambda: ONE).own()
    compares.heard(0, own, (own, other, other), 3)
    said = compares.heard(GRACE_NS, own, (own, other, other), 3)
    assert f"2 by policy one ({policy_hash(ONE)[:12]}, code {'f' * 12})" in said


@pytest.mark.parametrize("told", ["", "x", "x y", " ", "a b c d\n"])
def test_what_cannot_be_read_differs_and_breaks_nothing(told: str) -> None:
    compares = Agreeing(lambda: ONE)
    own = compares.own()
    compares.heard(0, own, (own, told), 2)
    assert "1 by policy" in compares.heard(GRACE_NS, own, (own, told), 2)


def test_a_long_list_of_others_is_cut_short() -> None:
    compares = Agreeing(lambda: ONE)
    own = compares.own()
    told = (own, *(f"{number} c {'n' * 1000}" for number in range(50)))
    compares.heard(0, own, told, 51)
    assert len(compares.heard(GRACE_NS, own, told, 51)) < 1000
