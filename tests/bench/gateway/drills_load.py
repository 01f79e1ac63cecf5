"""Drills under load: two replicas that run 16 requests each at a time."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from tests.bench.gateway import peers
from tests.bench.gateway.client import Client
from tests.bench.gateway.drill import (
    ANY,
    Drill,
    Outcome,
    bad,
    figure,
    prompt,
    told,
)  # fmt: skip
from tests.bench.gateway.load import CHAT, chat, headers, kinds, paced, quantile

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.gateway.client import Answer, Exchange
    from tests.bench.gateway.yard import Stand, Yard

SEATS = 16
TOKENS = 200
FLOOD_S = 6.0
FLOOD_SKIP_S = 2.0
OVERLOAD_S = 15.0
TENANTS = 12
CLASSES = (("P0", 0.4), ("P1", 0.4), ("P2", 0.2))
P0_COUNT = 1000
P0_PER_S = 25.0
P0_TOKENS = 16
P0_MOST_S = 3.0
FAULT_AFTER_S = 10.0
FAULT_S = 10.0


async def capacity_per_s(stand: Stand) -> float:
    """Answers of ``TOKENS`` tokens a second that the replicas can give, measured by a flood."""
    requests = [
        stand.post(chat(TOKENS, text=prompt(number)), headers(f"flood-{number}", deadline_s=60.0))
        for number in range(3 * SEATS)
    ]
    began_s = monotonic()
    times: list[float] = []

    async def caller(request: bytes) -> None:
        while monotonic() - began_s < FLOOD_S:
            answer = await stand.client.send(request, timeout_s=30.0).done
            if answer.kind != "ok":
                raise RuntimeError(f"the flood was answered with {answer}")
            times.append(answer.last_s - began_s)

    await asyncio.gather(*(caller(request) for request in requests))
    counted = sum(FLOOD_SKIP_S <= at_s < FLOOD_S for at_s in times)
    return counted / (FLOOD_S - FLOOD_SKIP_S)


class Load:
    """Poisson arrivals of several streams of requests, each with its answers."""

    def __init__(self, stand: Stand, seed: int) -> None:
        self._stand = stand
        self._dice = random.Random(seed)  # noqa: S311
        self.exchanges: dict[str, list[Exchange]] = {}

    async def offer(self, name: str, requests: Sequence[bytes], per_s: float, for_s: float) -> None:
        """Send the requests in turn at random instants."""
        mine = self.exchanges.setdefault(name, [])
        at_s = monotonic()
        end_s = at_s + for_s
        while True:
            at_s += self._dice.expovariate(per_s)
            if at_s >= end_s:
                return
            await asyncio.sleep(max(0.0, at_s - monotonic()))
            request = requests[len(mine) % len(requests)]
            mine.append(self._stand.client.send(request, timeout_s=60.0))

    async def answers(self) -> dict[str, list[Answer]]:
        return {name: [await e.done for e in mine] for name, mine in self.exchanges.items()}


def jain(shares: Sequence[float]) -> float:
    """Jain's index: 1 where all have the same, 1/n where one has all."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0


async def fair(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        each_per_s = await capacity_per_s(stand) / TENANTS
    equal = await served(yard, each_per_s, (2.0,) * TENANTS)
    greedy = await served(yard, each_per_s, (5.0,) * 3 + (1.2,) * (TENANTS - 3))
    index, skewed = (jain([float(count) for count in counts]) for counts, _ in (equal, greedy))
    how = f"{TENANTS} tenants for {OVERLOAD_S:.0f} s, answers of {TOKENS} tokens"
    return Outcome(
        f"{index:.3f}; {skewed:.3f} with greedy ones",
        (
            figure("jain", index, "1", ">= .95",
                   f"{how}, all ask for twice their fair share and get {equal[0]}; {equal[1]}"),
            figure("jain_greedy", skewed, "1", ANY,
                   f"{how}, the first three ask for 5 times their fair share, the others for 1.2,"
                   f" and get {greedy[0]}; {greedy[1]}"),
        ),
    )  # fmt: skip


async def served(yard: Yard, each_per_s: float, times: Sequence[float]) -> tuple[list[int], str]:
    """Answers that tenants get who ask for so many times their fair share."""
    async with yard.stand() as stand:
        load = Load(stand, seed=1)
        await asyncio.gather(*(
            load.offer(f"tenant-{number}", prompts(stand, f"tenant-{number}", "", 100 * number),
                       asked * each_per_s, OVERLOAD_S)
            for number, asked in enumerate(times)
        ))  # fmt: skip
        answers = await load.answers()
    counts = [sum(answer.kind == "ok" for answer in mine) for mine in answers.values()]
    return counts, told([answer for mine in answers.values() for answer in mine])


def prompts(stand: Stand, who: str, sla: str, first: int, tokens: int = TOKENS) -> list[bytes]:
    """A hundred different requests of one user."""
    return [
        stand.post(chat(tokens, text=prompt(number)), headers(who, sla))
        for number in range(first, first + 100)
    ]


def crowd(stand: Stand, sla: str, first: int, tokens: int = TOKENS) -> list[bytes]:
    """Five hundred different requests, of as many users."""
    return [
        stand.post(chat(tokens, text=prompt(number)), headers(f"user-{number}", sla))
        for number in range(first, first + 500)
    ]


class Watch(NamedTuple):
    """What was seen beside the load."""

    waiting: list[int]
    pages_s: list[float]
    bytes_most: int


async def watch(stand: Stand, until_s: float) -> Watch:
    """Look at the engines' own queues, and read the metrics page."""
    seen = Watch([], [], 0)
    most = 0
    client = Client(stand.admin, timeout_s=10.0) if stand.admin else None
    while monotonic() < until_s:
        states = await asyncio.gather(*(twin.state() for twin in stand.twins))
        seen.waiting.extend(state.waiting for state in states)
        if client is not None:
            answer = await client.get("/metrics", stand.token)
            seen.pages_s.append(answer.latency_s if answer.status == 200 else 10.0)
            most = max(most, len(answer.body))
        await asyncio.sleep(0.1)
    if client is not None:
        await client.close()
    return seen._replace(bytes_most=most)


async def lowest(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        offered_per_s = 2.0 * await capacity_per_s(stand)
        load = Load(stand, seed=2)
        watching = asyncio.ensure_future(watch(stand, monotonic() + OVERLOAD_S))
        await asyncio.gather(*(
            load.offer(sla, crowd(stand, sla, 500 * number), share * offered_per_s, OVERLOAD_S)
            for number, (sla, share) in enumerate(CLASSES)
        ))  # fmt: skip
        answers = await load.answers()
        seen = await watching
    served = {sla: sum(a.kind == "ok" for a in mine) for sla, mine in answers.items()}
    share_pct = 100 * served["P2"] / max(1, sum(served.values()))
    refused = [a for mine in answers.values() for a in mine if a.status in (429, 503)]
    unclear = sum(not says_why(answer) for answer in refused)
    counts = Counter(kind for mine in answers.values() for kind in kinds(mine).elements())
    how = f"answered of P0, P1, P2: {list(served.values())}; offered 40, 40, 20 %; {dict(counts)}"
    return Outcome(
        f"{share_pct:.0f} %",
        (
            figure("lowest_tier_share_pct", share_pct, "%", ">= 5", how),
            figure("engine_waiting_p95", quantile(seen.waiting, 0.95), "1", "<= 1",
                   f"vLLM's own queue at 2x load, {len(seen.waiting)} readings"),
            figure("refused_without_reason", unclear, "1", "= 0",
                   f"of {len(refused)} with 429 or 503: Retry-After and a reason as one word"),
            figure("metrics_page_p99_ms", 1000 * quantile(seen.pages_s, 0.99), "ms", "<= 500",
                   f"{len(seen.pages_s)} readings at 2x load, of {seen.bytes_most} bytes at most"),
        ),
    )  # fmt: skip


def says_why(answer: Answer) -> bool:
    """A refusal that a program can act on."""
    try:
        code = json.loads(answer.body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return False
    return bool(code) and answer.header("retry-after").isdigit()


async def p0(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        full_per_s = await capacity_per_s(stand)
        usual = await stand.client.ask(CHAT, chat(P0_TOKENS))
        taken = P0_PER_S * usual.latency_s / (2 * SEATS)
        load = Load(stand, seed=3)
        background = asyncio.ensure_future(
            load.offer(
                "background",
                crowd(stand, "P1", 2000),
                max(0.1, 0.8 - taken) * full_per_s,
                P0_COUNT / P0_PER_S,
            )
        )
        requests = crowd(stand, "P0", 1000, P0_TOKENS)
        exchanges: list[Exchange] = []

        def send(number: int) -> None:
            exchanges.append(stand.client.send(requests[number % len(requests)], timeout_s=30.0))

        sending = asyncio.ensure_future(paced(P0_PER_S, P0_COUNT, send))
        await asyncio.sleep(FAULT_AFTER_S)
        await stand.a.fault("hang", for_s=FAULT_S)
        await sending
        answers = [await exchange.done for exchange in exchanges]
        await background
        rest = (await load.answers())["background"]
    late = sum(a.kind != "ok" or a.latency_s > P0_MOST_S for a in answers)
    slowest_s = max(answer.latency_s for answer in answers)
    how = (
        f"{P0_PER_S:.0f} a second beside other work, {full_per_s:.1f} answers/s being full load; A"
        f" hangs for {FAULT_S:.0f} s; {told(answers)}, slowest {slowest_s:.2f} s; the other work:"
        f" {told(rest)}"
    )
    return Outcome(
        f"{late}; slowest {slowest_s:.1f} s",
        (
            figure("p0_over_3s", late, "1", "= 0", how),
            figure("p0_slowest_s", slowest_s, "s", ANY, f"of {len(answers)}"),
        ),
    )


async def divergence(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        before = await stand.tries()
        body = chat(64, temperature=0.0, seed=1)
        texts: Counter[str] = Counter()
        answers: list[Answer] = []
        for _ in range(4):  # more at a time than one of them can run
            answers += await asyncio.gather(*(stand.client.ask(CHAT, body) for _ in range(25)))
        for answer in answers:
            if answer.kind == "ok":
                texts[json.loads(answer.body)["choices"][0]["message"]["content"]] += 1
        tries = [now - old for now, old in zip(await stand.tries(), before, strict=True)]
    usual = max(texts.values(), default=0)
    pct = 100 * (1 - usual / max(1, sum(texts.values())))
    return Outcome(
        f"{pct:.0f} %",
        (
            figure("divergence_pct", pct, "%", ANY,
                   f"of 100 answers, {tries[0]} from A and {tries[1]} from B: {told(answers)}"),
            figure("divergence_errors", bad(answers), "1", "= 0", "of the same 100"),
        ),
    )  # fmt: skip


DRILLS = (
    Drill(peers.FAIR, fair),
    Drill(peers.LOWEST, lowest),
    Drill(peers.P0, p0),
    Drill(peers.DIVERGENCE, divergence),
)
