"""Twice the load that one vLLM can bear: who waits, waits in the controller, and nothing is lost.

The machine is shared and its speed changes from second to second, so vLLM is flooded directly and
through the controller in turns, and of the turns the middle one is taken: one in which the machine
itself stood still says nothing. Throughput is vLLM's own count of generated tokens, with an error
that the turns tell. How many requests vLLM runs at once hangs on nobody else: an engine that is fed
too little shows it there first.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from math import hypot, sqrt
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.controller.asking import COMPLETIONS, Answer, ask, session
from tests.controller.stories import read_story

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

    from tests.controller.processes import Controllers
    from tests.live.conftest import Ledger
    from tests.live.server import Vllm

pytestmark = pytest.mark.live

TURNS = 6
WINDOW_S = 4.5
FLOOD_SETTLES_S = 3.0
QUEUE_SETTLES_S = 4.0
FLOOD = 128
"""Twice as many as vLLM runs at once."""
SAMPLE_S = 0.2
POLICY = """\
schema: 1
name: near
discipline: tiered
# Of 64 seats the default would keep three free for Turbo, which is more than a hundredth or two.
inflight: {reserve_permille: 20}
# Nor is it tested what happens to a server that gets no processor for seconds.
health: {first_grace_ms: 30000, stall_ms: 30000}
"""
CLASSES = {"P0": 0.3, "P1": 0.4, "P2": 0.3}


@dataclass
class Window:
    """What vLLM did in one turn."""

    tokens_per_s: float = 0.0
    finished_per_s: float = 0.0
    waiting: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)

    @property
    def running_mean(self) -> float:
        return mean(self.running)


class Prompts:
    """Requests that are all different, with answers of 24 to 72 tokens; a quarter
    is streamed."""

    def __init__(self) -> None:
        self._dice = np.random.default_rng(3)
        self._made = 0

    def next(self) -> dict[str, Any]:
        self._made += 1
        return {
            "model": "tiny",
            "prompt": f"{self._made} of {time.time()}: def main(argv):",
            "max_tokens": int(self._dice.integers(24, 72)),
            "ignore_eos": True,
            "stream": self._made % 4 == 0,
        }

    def sla(self) -> str:
        return str(self._dice.choice(list(CLASSES), p=list(CLASSES.values())))

    def gap_s(self, rate: float) -> float:
        return float(self._dice.exponential(1 / rate))


async def _watch(server: Vllm, settles_s: float) -> Window:
    """Let it settle, and look on."""
    await asyncio.sleep(settles_s)
    window = Window()
    before, began_s = await asyncio.to_thread(server.samples), time.monotonic()
    while time.monotonic() < began_s + WINDOW_S:
        await asyncio.sleep(SAMPLE_S)
        samples = await asyncio.to_thread(server.samples)
        window.waiting.append(samples["vllm:num_requests_waiting"])
        window.running.append(samples["vllm:num_requests_running"])
    span_s = time.monotonic() - began_s
    for name, metric in (
        ("tokens_per_s", "generation_tokens"),
        ("finished_per_s", "request_success"),
    ):
        rate = (samples[f"vllm:{metric}_total"] - before[f"vllm:{metric}_total"]) / span_s
        setattr(window, name, rate)
    return window


async def _end(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _flooded(client: aiohttp.ClientSession, server: Vllm, prompts: Prompts) -> Window:
    async def again() -> None:
        while True:
            await ask(client, server.url, prompts.next(), path=COMPLETIONS)

    tasks = {asyncio.create_task(again()) for _ in range(FLOOD)}
    try:
        return await _watch(server, FLOOD_SETTLES_S)
    finally:
        await _end(tasks)


async def _controlled(
    client: aiohttp.ClientSession, server: Vllm, url: str, prompts: Prompts, rate: float,
    kept: list[tuple[str, Answer]],
) -> Window:  # fmt: skip
    async def one(sla: str) -> None:
        headers = {"x-twinkeel-sla": sla}
        kept.append((sla, await ask(client, url, prompts.next(), headers, COMPLETIONS)))

    tasks: set[asyncio.Task[None]] = set()

    async def offer() -> None:
        for _ in range(FLOOD):  # fills vLLM at once
            tasks.add(asyncio.create_task(one(prompts.sla())))
        while True:
            tasks.add(asyncio.create_task(one(prompts.sla())))
            await asyncio.sleep(prompts.gap_s(rate))

    offering = asyncio.create_task(offer())
    try:
        return await _watch(server, QUEUE_SETTLES_S)
    finally:
        await _end({offering})
        await asyncio.wait(tasks, timeout=1.0)
        await _end(tasks)


def test_twice_the_load(
    vllm: list[Vllm], profile: str, controllers: Controllers, ledger: Ledger, tmp_path: Path
) -> None:
    server = vllm[0]
    policy = tmp_path / "near.yaml"
    policy.write_text(POLICY)
    controller = controllers([server.upstream(profile)], policy=str(policy), scrape_s=5.0)
    flooded: list[Window] = []
    controlled: list[Window] = []
    answers: list[tuple[str, Answer]] = []

    async def run() -> None:
        prompts = Prompts()
        async with session() as client:
            for _ in range(TURNS):
                flooded.append(await _flooded(client, server, prompts))
                rate = 2 * mean(window.finished_per_s for window in flooded)
                controlled.append(
                    await _controlled(client, server, controller.url, prompts, rate, answers)
                )
            flooded.append(await _flooded(client, server, prompts))

    asyncio.run(run())
    controller.stop()
    for name, windows in (("flooded", flooded), ("controlled", controlled)):
        print(
            name, "running", [round(window.running_mean, 1) for window in windows],
            "tokens/s", [round(window.tokens_per_s) for window in windows],
        )  # fmt: skip
    waiting = [each for window in controlled for each in window.waiting]
    waiting_p95 = float(np.percentile(waiting, 95))
    here, there = ([each.tokens_per_s for each in windows] for windows in (controlled, flooded))
    share = 100 * median(here) / median(there)
    error = share * hypot(*(stdev(each) / mean(each) / sqrt(len(each)) for each in (here, there)))
    ledger.add(
        "overload_vllm_waiting_p95", waiting_p95, "requests", "<= 1",
        f"in vLLM's own queue at twice the load, {len(waiting)} samples",
    )  # fmt: skip
    ledger.add(
        "overload_throughput_pct", share, "%", ">= 97",
        f"of vLLM flooded directly, give or take {error:.1f}: {median(here):.0f} and"
        f" {median(there):.0f} tokens/s in the middle one of {TURNS} turns",
    )  # fmt: skip

    seats = 100 * median(each.running_mean for each in controlled)
    seats /= median(each.running_mean for each in flooded)
    ledger.add(
        "overload_seats_pct", seats, "%", ">= 97",
        "requests that vLLM runs at once at twice the load, of those when flooded; middle turns",
    )  # fmt: skip

    # How many are turned away before a turn ends, and not still queued then, is the machine's.
    story = read_story(controller.records())
    served = sum(answer.status == 200 for _, answer in answers)
    assert served < 0.8 * len(story.requests), "it was not overloaded"
    refused = [answer for _, answer in answers if answer.status != 200]
    assert refused, "nobody was turned away"
    for answer in refused:
        assert answer.status == 429, answer.body
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.error["code"] in ("deadline", "queue_full")
        assert answer.error["type"] == "rate_limit_error"
    assert all(len(request.settled) == 1 for request in story.requests.values())
    waits = {sla: story.waits_s(sla) for sla in CLASSES}
    p75 = {sla: float(np.percentile(each, 75)) for sla, each in waits.items()}
    offered = [request.arrived.sla for request in story.requests.values()]
    print(waiting_p95, share, error, seats, {sla: len(each) for sla, each in waits.items()}, p75)
    assert p75["P0"] <= p75["P1"] <= p75["P2"], "the more urgent, the sooner"
    for sla in CLASSES:
        assert len(waits[sla]) >= 0.05 * offered.count(sla), "no class starves"
    assert waiting_p95 <= 1
    # The figures say what was reached. On a machine that controller, callers and vLLM share, tokens
    # lack what the first two take of the processors, and a seat is filled as late as the controller
    # gets its turn, so only what is far off fails here.
    trouble = [*story.breakers, *story.rotated, *story.alerts]
    assert seats >= 90, trouble
    assert share >= 80, trouble
