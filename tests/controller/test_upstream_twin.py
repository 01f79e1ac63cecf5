"""A served twin is found, warmed, watched and read like a vLLM server."""

from __future__ import annotations

import asyncio
import signal

import aiohttp
import pytest

from controller.config import Upstream
from controller.upstream.replica import Replica
from controller.upstream.scrape import Scraper
from controller.upstream.warming import warm
from controller.upstream.watching import Watcher
from policy.events import ReplicaDown, ReplicaUp, Scraped, Warmed
from policy.files import load_profile
from tests.controller.processes import twin_process
from tests.upstream_support import Driver

PROFILE = "h100-sxm/qwen3-8b"


def fleet_events(driver: Driver) -> list[object]:
    return [event for event in driver.events if not isinstance(event, Scraped)]


def test_a_twin_is_found_without_being_told_its_profile() -> None:
    async def main(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            replica = Replica(0, Upstream(url), session)
            driver = Driver(replica)
            watcher = Watcher(driver, 0.2)
            scraper = Scraper(driver, 0.2, watcher.paged)
            watcher.start()
            scraper.start()
            await driver.until(lambda: any(isinstance(each, Scraped) for each in driver.events))
            up = replica.spec
            assert up is not None
            engine = load_profile(PROFILE).engine
            assert (up.kv_blocks, up.block_tokens) == (777, engine.block_tokens)
            assert (up.max_model_len, up.version, up.models) == (4096, "v3", ("qwen3-8b",))
            assert 0 < replica.network_ns < 1_000_000_000
            assert await warm(replica) == Warmed(0, "v3")
            replica.attempts.add(asyncio.create_task(asyncio.sleep(0)))
            first = await scraper.read_progress(replica)
            assert first is not None
            await ask(replica, 5)
            assert await scraper.read_progress(replica) == first + 5
            assert len(fleet_events(driver)) == 1
            await scraper.close()
            await watcher.close()

    options = ("--kv-blocks", "777", "--max-model-len", "4096", "--version", "v3")
    with twin_process(*options, profile=PROFILE) as twin:
        asyncio.run(main(twin.url))


async def ask(replica: Replica, tokens: int) -> None:
    body = b'{"model": "qwen3-8b", "prompt": "Hi", "max_tokens": %d, "ignore_eos": true}' % tokens
    headers = {"Content-Type": "application/json"}
    async with replica.post("/v1/completions", body, headers) as answer:
        assert answer.status == 200
        await answer.read()


def test_a_frozen_process_is_not_down_and_a_dead_one_is() -> None:
    async def main() -> None:
        with twin_process(profile=PROFILE) as twin:
            async with aiohttp.ClientSession() as session:
                replica = Replica(0, Upstream(twin.url), session)
                driver = Driver(replica)
                watcher = Watcher(driver, 0.2)
                watcher.start()
                await driver.until(lambda: replica.up)
                twin.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(1.5)
                assert replica.up
                twin.process.send_signal(signal.SIGCONT)
                await asyncio.sleep(0.5)
                assert replica.up
                twin.process.kill()
                await driver.until(lambda: not replica.up, within_s=20.0)
                await watcher.close()
                assert fleet_events(driver) == [
                    replica.spec, ReplicaDown(0, "connection refused"),
                ]  # fmt: skip

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["hang", "http_503"])
def test_a_fault_of_its_answers_does_not_make_it_down(kind: str) -> None:
    async def main() -> None:
        with twin_process(profile=PROFILE) as twin:
            async with aiohttp.ClientSession() as session:
                replica = Replica(0, Upstream(twin.url), session)
                driver = Driver(replica)
                watcher = Watcher(driver, 0.1)
                watcher.start()
                await driver.until(lambda: replica.up)
                twin.fault(kind)
                await asyncio.sleep(0.8)
                await watcher.close()
                assert [type(event) for event in fleet_events(driver)] == [ReplicaUp]

    asyncio.run(main())
