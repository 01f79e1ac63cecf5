"""Servers that come, hang, go and come back as others: what the policy is told."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import pytest

from controller.upstream import watching
from controller.upstream.scrape import Scraper
from controller.upstream.watching import Watcher
from policy.events import ReplicaDown, ReplicaUp
from tests.upstream_support import Driver, card, page, served

if TYPE_CHECKING:
    from policy.events import Event

PROBE_S = 0.15


def kinds(driver: Driver) -> list[str]:
    return [
        f"down: {event.reason}" if isinstance(event, ReplicaDown) else type(event).__name__
        for event in driver.events
    ]


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == watching.__name__]


def test_a_server_that_starts_late_is_found_and_measured(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with served() as (server, replica):
            await server.stop()
            driver = Driver(replica)
            watcher = Watcher(driver, PROBE_S)
            watcher.start()
            await driver.until(lambda: bool(lines(caplog)))
            await asyncio.sleep(6 * PROBE_S)
            assert (driver.events, replica.up) == ([], False)
            server.models_status = 503
            await server.start()
            await driver.until(lambda: server.asked.get("/v1/models", 0) >= 3)
            assert driver.events == []
            server.models_status = 200
            await driver.until(lambda: replica.up)
            (event,) = driver.events
            assert isinstance(event, ReplicaUp)
            assert event is replica.spec
            assert event.kv_blocks == 256
            assert 0 < replica.network_ns < 1_000_000_000
            pings = server.asked["/health"]
            await driver.until(lambda: server.asked["/health"] > pings + 2)
            await watcher.close()
            assert len(driver.events) == 1, "it is up, and stays so"
            pings = server.asked["/health"]
            await asyncio.sleep(4 * PROBE_S)
            assert server.asked["/health"] == pings, "closed"

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    first, second, third = lines(caplog)
    assert "does not answer yet" in first
    assert "/v1/models answers 503" in second
    assert "is up: tiny, version tiny, 256 KV blocks of 128 tokens" in third


def test_a_server_that_is_gone_is_down_and_comes_back() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            driver = Driver(replica)
            watcher = Watcher(driver, PROBE_S)
            watcher.start()
            await driver.until(lambda: replica.up)
            await server.stop()
            await driver.until(lambda: not replica.up)
            server.cards = [card("other")]
            await server.start()
            await driver.until(lambda: replica.up)
            await watcher.close()
            assert kinds(driver) == ["ReplicaUp", "down: connection refused", "ReplicaUp"]
            assert replica.spec is not None
            assert replica.spec.models == ("other",)

    asyncio.run(main())


def test_a_suspicion_is_looked_into_at_once() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            driver = Driver(replica)
            watcher = Watcher(driver, 30.0)
            watcher.start()
            await driver.until(lambda: replica.up)
            await server.stop()
            watcher.suspect(replica)
            await driver.until(lambda: not replica.up, within_s=20.0)  # it looks every 30 s
            await watcher.close()
            assert kinds(driver) == ["ReplicaUp", "down: connection refused"]

    asyncio.run(main())


@pytest.mark.parametrize("health", [200, 503])
def test_a_server_that_hangs_or_is_unwell_is_left_to_the_policy(health: int) -> None:
    async def main() -> None:
        async with served() as (server, replica):
            driver = Driver(replica)
            watcher = Watcher(driver, PROBE_S)
            watcher.start()
            await driver.until(lambda: replica.up)
            server.health = health
            server.asleep_s = 10.0 if health == 200 else 0.04
            asked = server.asked["/health"]
            await driver.until(lambda: server.asked["/health"] > asked)
            usual_ns = replica.network_ns
            await driver.until(lambda: server.asked["/health"] >= asked + 10)
            assert kinds(driver) == ["ReplicaUp"]
            assert replica.network_ns == usual_ns, "what is no answer says nothing of the way"
            await watcher.close()

    asyncio.run(main())


def test_the_usual_time_is_a_median() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            driver = Driver(replica)
            watcher = Watcher(driver, 0.3)
            watcher.start()
            await driver.until(lambda: replica.up)
            server.asleep_s = 0.1
            asked = server.asked["/health"]
            await driver.until(lambda: server.asked["/health"] >= asked + 2)
            assert replica.network_ns < 90_000_000, "two slow ones of five"
            await driver.until(lambda: replica.network_ns > 100_000_000)
            await watcher.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    "metrics", [page(started=1.7959918e09), page(generated=3).replace("process_start", "no_start")]
)
def test_a_process_that_was_exchanged_unseen_is_noticed(metrics: str) -> None:
    async def main() -> None:
        async with served() as (server, replica):
            if "no_start" in metrics:
                server.metrics = page().replace("process_start", "no_start")
            driver = Driver(replica)
            watcher = Watcher(driver, 30.0)
            scraper = Scraper(driver, 0.05, watcher.paged)
            watcher.start()
            scraper.start()
            await driver.until(lambda: kinds(driver).count("Scraped") >= 2)
            server.metrics = metrics
            await driver.until(lambda: kinds(driver).count("ReplicaUp") == 2)
            await asyncio.sleep(0.2)
            await scraper.close()
            await watcher.close()
            told = [kind for kind in kinds(driver) if kind != "Scraped"]
            assert told == ["ReplicaUp", "down: restarted", "ReplicaUp"]

    asyncio.run(main())


def test_a_process_that_came_back_between_two_looks_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "AGAIN_S", 3.0)  # it comes back before the next look

    async def main() -> None:
        async with served() as (server, replica):
            driver = Driver(replica)
            watcher = Watcher(driver, 30.0)
            watcher.start()
            await driver.until(lambda: replica.up)
            await server.stop()
            watcher.suspect(replica)
            await driver.until(lambda: watcher._watches[replica.id].refused == 1)
            server.metrics = page(started=1.7959918e09)
            await server.start()
            await driver.until(lambda: len(driver.events) == 3)
            await watcher.close()
            assert kinds(driver) == ["ReplicaUp", "down: restarted", "ReplicaUp"]

    asyncio.run(main())


def test_a_short_refusal_of_the_same_process_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watching, "AGAIN_S", 3.0)  # it comes back before the next look

    async def main() -> None:
        async with served() as (server, replica):
            driver = Driver(replica)
            watcher = Watcher(driver, 30.0)
            watcher.start()
            await driver.until(lambda: replica.up)
            metrics = server.asked["/metrics"]
            await server.stop()
            watcher.suspect(replica)
            await driver.until(lambda: watcher._watches[replica.id].refused == 1)
            await server.start()
            await driver.until(lambda: server.asked["/metrics"] > metrics)
            await asyncio.sleep(0.1)
            await watcher.close()
            assert kinds(driver) == ["ReplicaUp"]

    asyncio.run(main())


def test_the_watch_goes_on_after_trouble_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Driver):
        broken = 3

        def feed(self, event: Event) -> None:
            self.broken -= 1
            if self.broken >= 0:
                raise RuntimeError("the policy is broken")
            super().feed(event)

    async def main() -> None:
        async with served() as (_, replica):
            driver = Broken(replica)
            watcher = Watcher(driver, PROBE_S)
            watcher.start()
            await driver.until(lambda: replica.up and bool(driver.events))
            await watcher.close()
            assert kinds(driver) == ["ReplicaUp"]

    asyncio.run(main())
    assert [line for line in lines(caplog) if "the policy is broken; going on" in line]
