"""What a real vLLM says of itself, and how it is watched."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from typing import TYPE_CHECKING

import aiohttp
import pytest

from controller.config import Upstream
from controller.upstream.discovery import DiscoveryError, describe
from controller.upstream.replica import Replica
from controller.upstream.scrape import Scraper, cache_config, parse
from controller.upstream.warming import warm
from controller.upstream.watching import Watcher
from policy.events import ReplicaUp, Scraped
from tests.live.server import vllm_servers
from tests.live.vllm_env.ensure import VLLM_VERSION, environment, tiny_model
from tests.upstream_support import Driver

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.live

BLOCKS = 256
PARSE_MS_MOST = 1.0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with vllm_servers(1, "--num-gpu-blocks-override", str(BLOCKS)) as (server,):
        yield server.url


async def watched(url: str) -> None:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        replica = Replica(0, Upstream(url, profile="cpu/tiny-qwen3", max_num_seqs=64), session)
        driver = Driver(replica)
        watcher = Watcher(driver, 0.2)
        scraper = Scraper(driver, 0.3, watcher.paged)
        watcher.start()
        scraper.start()
        await driver.until(lambda: any(isinstance(each, Scraped) for each in driver.events), 120.0)
        warmed = await warm(replica)
        assert warmed.ok
        assert warmed.version == str(tiny_model(environment()))
        replica.attempts.add(asyncio.create_task(asyncio.sleep(0)))
        first = await scraper.read_progress(replica)
        assert first is not None
        assert await scraper.read_progress(replica) == first, "it has nothing to do"
        await ask(replica, 16)
        async with asyncio.timeout(60.0):
            while (later := await scraper.read_progress(replica)) == first:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert later == first + 16
        await asyncio.sleep(1.0)
        await scraper.close()
        await watcher.close()
        ups = [each for each in driver.events if isinstance(each, ReplicaUp)]
        assert [each for each in driver.events if not isinstance(each, Scraped)] == ups
        (up,) = ups
        assert (up.kv_blocks, up.block_tokens, up.max_model_len) == (BLOCKS, 128, 8192)
        assert (up.models, up.max_num_seqs) == (("tiny",), 64)
        assert f"vllm={VLLM_VERSION}" in up.labels
        assert 0 < replica.network_ns < 100_000_000
        print(f"an empty request takes {replica.network_ns / 1e6:.2f} ms")


async def ask(replica: Replica, tokens: int) -> None:
    body = b'{"model": "tiny", "prompt": "def", "max_tokens": %d, "ignore_eos": true}' % tokens
    headers = {"Content-Type": "application/json"}
    async with replica.post("/v1/completions", body, headers) as answer:
        await answer.read()
        assert answer.status == 200


async def without_a_profile(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        replica = Replica(0, Upstream(url), session)
        with pytest.raises(DiscoveryError, match=r"serves tiny \(loaded from .*profile=NAME"):
            await describe(replica, replica.upstream)


def test_a_real_server_is_found_warmed_and_read(url: str) -> None:
    asyncio.run(watched(url))


def test_a_model_that_nobody_knows_needs_a_profile(url: str) -> None:
    asyncio.run(without_a_profile(url))


def test_its_page_is_read_quickly(url: str) -> None:
    with urllib.request.urlopen(f"{url}/metrics", timeout=20) as answer:
        body = answer.read()
    assert body.count(b"\n") > 500
    found = parse(body)
    assert None not in found
    assert found.started_s is not None
    assert 0 < time.time() - found.started_s < 3600
    assert cache_config(body) == (BLOCKS, 128)
    took_s = []
    for _ in range(50):
        begun_s = time.perf_counter()
        parse(body)
        took_s.append(time.perf_counter() - begun_s)
    print(f"{len(body)} bytes in {1000 * min(took_s):.3f} ms")
    assert 1000 * min(took_s) < PARSE_MS_MOST
