"""Reading a server's metrics, and what the policy is told of them."""

from __future__ import annotations

import asyncio
import gzip
import logging
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from controller.upstream import scrape
from controller.upstream.replica import Replica
from controller.upstream.scrape import (
    NEEDED,
    CacheConfig,
    Page,
    PageError,
    Scraper,
    cache_config,
    lacking,
    parse,
)
from controller.upstream.steps import FILES_MOST, Said, Sums
from policy.cost import StepCost
from policy.events import Scraped, StepsRead
from tests.policy_support import up
from tests.upstream_support import Driver, page, served
from traces.steps import Header, ServerSettings, StepRow, encode_header, encode_row

if TYPE_CHECKING:
    from pathlib import Path


def test_the_needed_figures_are_found_among_hundreds_of_lines() -> None:
    assert parse(page().encode()) == Page(3, 1, 250, 7, 1234, 1.7959917904e09)
    assert cache_config(page().encode()) == CacheConfig(256, 128)


def test_where_steps_are_recorded_is_found() -> None:
    lines = (
        'twinkeel_steps_info{engine="0",path="/tmp/a b/steps-1-0.jsonl"} 1.0\n'
        'twinkeel_steps_info{engine="1",life="ab",path="/q\\\\\\"/steps-1-1.jsonl"} 1.0\n'
        'twinkeel_steps_info{engine="2",path="relative/steps-1-2.jsonl"} 1.0\n'
        'twinkeel_steps_info{engine="3"} 1.0\n'
    )
    said = (Said("/tmp/a b/steps-1-0.jsonl"), Said('/q\\"/steps-1-1.jsonl', "ab"))
    assert parse(lines.encode()) == Page(steps=said)
    assert parse(b'twinkeel_steps_info{path="/a\\\\n"} 1.0\n').steps == (Said("/a\\n"),)
    many = b'twinkeel_steps_info{path="/a"} 1.0\n' * 1000
    assert len(parse(many).steps) == FILES_MOST


def test_an_empty_or_foreign_page_says_nothing() -> None:
    assert parse(b"") == parse(b"<html>hello\n</html>") == Page()
    assert cache_config(b"") == CacheConfig(0, 0)


def test_figures_of_several_engines_are_added_up() -> None:
    lines = "".join(
        f'vllm:{name}{{engine="{engine}"}} {value}\n'
        for engine, value in (("0", 2), ("1", 3))
        for name in ("num_requests_running", "num_requests_waiting", "generation_tokens_total")
    )
    usage = 'vllm:kv_cache_usage_perc{engine="0"} 0.1\nvllm:kv_cache_usage_perc{engine="1"} 0.3'
    config = "".join(
        f'\nvllm:cache_config_info{{block_size="16",engine="{engine}",num_gpu_blocks="40"}} 1.0'
        for engine in "01"
    )
    both = parse((lines + usage).encode())
    assert (both.running, both.waiting, both.generation_tokens) == (5, 5, 5)
    assert both.kv_used_permille == 200
    assert cache_config(config.encode()) == CacheConfig(80, 16)


@pytest.mark.parametrize(
    ("line", "running"),
    [
        ("vllm:num_requests_running 4", 4),
        ("vllm:num_requests_running{} 4.0 1795991843000", 4),
        ('vllm:num_requests_running{model_name="a } b \\" 9"} 4e+00', 4),
        ("vllm:num_requests_running 4\r\n", 4),
        ("vllm:num_requests_running NaN", None),
        ("vllm:num_requests_running +Inf", None),
        ("vllm:num_requests_running", None),
        ("vllm:num_requests_running ", None),
        ("vllm:num_requests_running{", None),
        ("vllm:num_requests_running_by_tier 4", None),
        ("# vllm:num_requests_running 4", None),
        ("x_vllm:num_requests_running 4", None),
        ("vllm:num_requests_running -4", 0),
    ],
)
def test_lines_of_every_shape(line: str, running: int | None) -> None:
    for text in (line, f"a 1\n{line}\nb 2"):
        assert parse(text.encode()).running == running


@pytest.mark.parametrize("blocks", ["None", "", "-3", "1e3"])
def test_a_count_of_blocks_that_is_none(blocks: str) -> None:
    text = f'vllm:cache_config_info{{num_gpu_blocks="{blocks}",block_size="16"}} 1.0'
    assert cache_config(text.encode()) == CacheConfig(0, 16)


# Against a server


def brought_up(replica: Replica) -> Driver:
    replica.up = True
    return Driver(replica)


@pytest.mark.parametrize("decompress", [True, False])
def test_the_policy_is_told_what_the_server_says(decompress: bool) -> None:
    async def main() -> None:
        async with served(decompress=decompress) as (_, replica):
            driver = brought_up(replica)
            heard: list[Page] = []
            scraper = Scraper(driver, 5.0, lambda replica, page, asked_ns: heard.append(page))
            await scraper.scrape(replica)
            (event,) = driver.events
            assert isinstance(event, Scraped)
            assert (event.replica, event.running, event.waiting) == (0, 3, 1)
            assert (event.kv_used_permille, event.preemptions) == (250, 7)
            assert 0 < event.age_ns < 1_000_000_000
            assert heard == [parse(page().encode())]

    asyncio.run(main())


def test_nothing_is_said_of_a_server_without_the_metrics() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            driver = brought_up(replica)
            scraper = Scraper(driver, 5.0)
            for metrics in (None, "", 'vllm:num_requests_running{engine="0"} 3.0\n'):
                server.metrics = metrics
                await scraper.scrape(replica)
            assert driver.events == []
            replica.attempts.add(asyncio.create_task(asyncio.sleep(0)))
            assert await scraper.read_progress(replica) is None

    asyncio.run(main())


def test_a_page_without_an_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "PAGE_BYTES_MOST", 10_000)

    async def main() -> None:
        async with served(decompress=False) as (server, replica):
            server.metrics = "a" * 10_001
            with pytest.raises(PageError, match="more than 10000 bytes"):
                await scrape.read_page(replica)

    asyncio.run(main())
    with pytest.raises(PageError, match="more than 10000 bytes"):
        scrape._plain("/metrics", gzip.compress(b"a" * 10_001))
    with pytest.raises(PageError, match="cannot be unpacked"):
        scrape._plain("/metrics", b"\x1f\x8bnonsense")


async def mixed(replica: Replica) -> None:
    """One attempt in flight that is no stream."""
    replica.attempts.add(asyncio.create_task(asyncio.sleep(0)))


def test_progress_follows_the_servers_counter() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            driver = brought_up(replica)
            scraper = Scraper(driver, 5.0)
            await mixed(replica)
            replica.tokens = 50
            assert await scraper.read_progress(replica) == 50, "the first one is where it begins"
            assert await scraper.read_progress(replica) == 50, "it stands still"
            server.metrics = page(generated=1240)
            assert await scraper.read_progress(replica) == 56
            replica.tokens += 4
            assert await scraper.read_progress(replica) == 60
            server.metrics = page(generated=3)  # another process
            assert await scraper.read_progress(replica) == 60, "it never falls"
            server.metrics = page(generated=5)
            assert await scraper.read_progress(replica) == 62
            assert driver.events == []

    asyncio.run(main())


def test_a_scrape_between_two_questions_takes_nothing_from_the_second() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            scraper = Scraper(brought_up(replica), 5.0)
            await mixed(replica)
            await scraper.read_progress(replica)
            server.metrics = page(generated=1240)
            await scraper.scrape(replica)
            assert await scraper.read_progress(replica) == 6

    asyncio.run(main())


def test_what_was_done_long_before_the_first_question_is_no_progress() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            scraper = Scraper(brought_up(replica), 5.0)
            await scraper.scrape(replica)
            server.metrics = page(generated=99_999)
            await scraper.scrape(replica)
            await mixed(replica)
            assert await scraper.read_progress(replica) == 0

    asyncio.run(main())


def test_streams_are_counted_as_they_come_without_asking() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            scraper = Scraper(brought_up(replica), 5.0)
            await mixed(replica)
            replica.streams = 1
            replica.tokens = 7
            assert await scraper.read_progress(replica) == 7
            assert server.asked == {}

    asyncio.run(main())


def test_no_answer_in_time_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "PROGRESS_S_MOST", 0.05)

    async def main() -> None:
        async with served() as (server, replica):
            scraper = Scraper(brought_up(replica), 5.0)
            await mixed(replica)
            server.asleep_s = 0.3
            assert await scraper.read_progress(replica) is None
            assert scraper.counts(replica), "as far as is known: its silence tells something"
            server.asleep_s = 0.0
            await scraper.scrape(replica)
            await server.stop()
            assert await scraper.read_progress(replica) is None
            assert scraper.counts(replica)

    asyncio.run(main())


def test_the_loop_goes_on_whatever_happens(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Driver):
        def feed(self, event: object) -> None:
            super().feed(event)  # type: ignore[arg-type]
            if len(self.events) == 2:
                raise RuntimeError("the policy is broken")

    async def main() -> None:
        async with served() as (server, replica):
            driver = Broken(replica)
            scraper = Scraper(driver, 0.1)
            scraper.start()
            await asyncio.sleep(0.15)
            assert server.asked == {}, "it is not up"
            replica.up = True
            await driver.until(lambda: len(driver.events) == 3)
            await server.stop()
            await asyncio.sleep(0.25)
            before = len(driver.events)
            await server.start()
            await driver.until(lambda: len(driver.events) > before)
            await scraper.close()
            told = len(driver.events)
            await asyncio.sleep(0.15)
            assert len(driver.events) == told

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    complaints = [each for each in caplog.records if each.name == scrape.__name__]
    assert len(complaints) == 1, "one a minute"


def test_replicas_are_read_one_after_the_other() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            others = [Replica(number, replica.upstream, replica.session) for number in range(4)]
            for other in others:
                other.up = True
            driver = Driver(*others)
            scraper = Scraper(driver, 4.0)
            scraper.start()
            await driver.until(lambda: len(driver.events) == 1)
            await asyncio.sleep(0.05)
            assert len(driver.events) == 1
            await driver.until(lambda: len(driver.events) == 4)
            await scraper.close()
            assert [event.replica for event in driver.events if isinstance(event, Scraped)] == [
                0, 1, 2, 3,
            ]  # fmt: skip
            assert server.asked == {"/metrics": 4}

    asyncio.run(main())


def test_an_answer_of_a_server_that_went_down_meanwhile_is_dropped() -> None:
    async def main() -> None:
        async with served() as (server, replica):
            driver = brought_up(replica)
            server.asleep_s = 0.05
            reading = asyncio.create_task(Scraper(driver, 5.0).scrape(replica))
            await asyncio.sleep(0.02)
            replica.up = False
            await reading
            assert driver.events == []

    asyncio.run(main())


# Step records


def tells_steps(replica: Replica) -> Driver:
    replica.spec = up(models=("tiny",))
    replica.cost = StepCost(5_000_000 * 1024, 0, 0, 0, 0, 0)
    return brought_up(replica)


def record(path: Path, numbers: range) -> None:
    """Steps that take 6.5 ms, 30 % more than they should."""
    with path.open("ab") as file:
        if not file.tell():
            told = ServerSettings(served_model="tiny", block_tokens=16, kv_blocks=1000)
            file.write(
                encode_header(Header(1, "vllm-steps", "0.32.0", "0.1.0", 0, 0, 0, True, told, "ab"))
            )
        for number in numbers:
            at_ns = number * 6_500_000
            row = StepRow(at_ns, number, 0, 0, 1, 1, 1, 0, 100_000, 0, 6_500_000)
            file.write(encode_row(row))


def test_what_steps_took_is_told_beside_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "steps-7-0.jsonl"

    async def main() -> None:
        async with served() as (server, replica):
            driver = tells_steps(replica)
            scraper = Scraper(driver, 5.0)
            server.metrics = page() + (
                f'twinkeel_steps_info{{engine="0",life="ab",path="{path}"}} 1.0\n'
            )
            await scraper.scrape(replica)
            record(path, range(0))
            await scraper.scrape(replica)
            record(path, range(100))
            await scraper.scrape(replica)
            assert not [each for each in driver.events if isinstance(each, StepsRead)], "it waits"
            await scraper.scrape(replica)
            (read,) = [each for each in driver.events if isinstance(each, StepsRead)]
            assert read == StepsRead(0, 100, 650_000, 500_000)
            replica.spec = up(models=("tiny",))  # what was told of one life is not told of another
            await scraper.scrape(replica)
            await scraper.scrape(replica)
            assert [each for each in driver.events if isinstance(each, StepsRead)] == [read]
            record(path, range(100, 120))
            await scraper.scrape(replica)
            await scraper.scrape(replica)
            assert driver.events[-1] == StepsRead(0, 20, 130_000, 100_000)
            await scraper.close()

    asyncio.run(main())


def test_a_disk_that_hangs_does_not_hold_up_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrape, "SCRAPE_S_MOST", 0.05)
    reads: list[float] = []

    class Slow(scrape.StepReader):
        def read(self, said: object) -> object:  # type: ignore[override]
            reads.append(time.monotonic())
            time.sleep(0.4)
            return scrape_sums

    scrape_sums = Sums(1, 1, 1)
    monkeypatch.setattr(scrape, "StepReader", Slow)

    async def main() -> None:
        async with served(steps=str(tmp_path)) as (_, replica):
            driver = tells_steps(replica)
            scraper = Scraper(driver, 5.0)
            for _ in range(3):
                await scraper.scrape(replica)
            assert [type(each) for each in driver.events] == [Scraped] * 3
            assert len(reads) == 1

    asyncio.run(main())


STUCK = """
import asyncio, threading, time
from functools import partial
from controller.upstream.threads import in_thread

async def main():
    for _ in range(50):
        in_thread("stuck", threading.Event().wait)
    print(await asyncio.wait_for(asyncio.to_thread(lambda: "others work"), 5))
    print(await in_thread("works", partial(int, "7")))
    try:
        await in_thread("fails", partial(int, "x"))
    except ValueError:
        print("told")

asyncio.run(main())
"""


def test_readings_that_are_stuck_hold_up_nothing_and_not_the_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=20, check=False
    )
    assert (done.returncode, done.stdout.split("\n")) == (
        0, ["others work", "7", "told", ""],
    ), done.stderr  # fmt: skip


def test_records_are_read_in_such_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    class Seen(scrape.StepReader):
        def read(self, said: object) -> Sums:
            threads.append(threading.current_thread())
            return Sums()

    monkeypatch.setattr(scrape, "StepReader", Seen)

    async def main() -> None:
        async with served(steps=str(tmp_path)) as (_, replica):
            driver = tells_steps(replica)
            await Scraper(driver, 5.0).scrape(replica)

    asyncio.run(main())
    (thread,) = threads
    assert thread.daemon
    assert thread.name == "step-records"


def test_what_a_page_lacks_is_named() -> None:
    body = b"vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.1\n"
    assert lacking(Page()) == tuple(NEEDED.values())
    assert NEEDED["kv_used_permille"] in lacking(parse(body))
    assert NEEDED["running"] not in lacking(parse(body))
