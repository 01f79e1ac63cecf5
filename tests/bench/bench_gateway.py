"""What the gateway costs: ``make bench-gateway``.

The controller runs beside a bare aiohttp pass-through, before the same mock server, in one run and
in turn: every figure is a comparison of the two, so that a machine whose speed drifts does not
decide it. The controller has all policies on (the stable preset), decision log, trace and metrics,
and spans sampled at 1 % that go to a real endpoint. Requests name 1,000 users in turn. Where there
are two cores, gateways run on the first, and mock server and clients on the second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import resource
import shutil
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import uvloop

from tests.bench.gateway import process
from tests.bench.gateway.client import Client, Exchange
from tests.bench.gateway.load import (
    CHAT,
    chat,
    closed_loop,
    headers,
    kinds,
    open_loop,
    paced,
    quantile,
)  # fmt: skip
from tests.figures import Figure, require, write_figures

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from tests.bench.gateway.client import Answer
    from tests.bench.gateway.process import Process

OUT = Path("build/bench-gateway")
FIGURES = Path("build/figures/bench-gateway.json")
REQUIRED = (
    "cpu_ratio_short", "cpu_ratio_stream", "added_p50_ms_over_bare", "added_p99_ms_over_bare",
    "idle_streams",
)  # fmt: skip
PARTS = ("cpu", "latency", "max", "confidence", "idle")
USERS = 1000
SHORT_PER_S = 250
SHORT_COUNT = 750
STREAM_PER_S = 50
STREAM_COUNT = 150
PIECES_LEAST = 46
"""Of a stream with 50 events, the last of which come together."""
TRIES = 3
LATENCY_PER_S = 50
CALLERS = 64
IDLE_WANTED = 10_000
IDLE_PER_REPLICA = 900
"""Fewer than a replica's seats, and enough for one of them to speak every 2 s."""
IDLE_HOLD_S = 62.0
IDLE_OPEN_PER_S = 300
IDLE_STEP = 1000
FILES_SPARE = 120
ANY = ">= 0"
"""The goal of a figure that is only reported."""


class Pair(NamedTuple):
    """CPU of one phase each, in ms a request."""

    bare_ms: float
    ours_ms: float

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.bare_ms


class Bench:
    """The processes, and clients to both gateways."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self.gateways = frozenset(cores[:1]) if len(cores) > 1 else frozenset()
        self.rest = frozenset(cores[1:])
        self.more = tuple(more)
        self.running: list[Process] = []
        self.clients: list[Client] = []

    async def start(self) -> None:
        if self.rest:
            os.sched_setaffinity(0, self.rest)
        self.mock = await self.begin(process.mock(OUT / "mock.log", cpus=self.rest))
        url = self.mock.said["mock"]
        self.bare = await self.begin(process.bare(OUT / "bare.log", [url], self.gateways))
        self.ours = await self.gateway("ours", [url], self.more)
        self.to_bare = Client(self.bare.said["serving"])
        self.to_ours = Client(self.ours.said["serving"])
        self.clients = [self.to_bare, self.to_ours]

    async def begin(self, running: Process) -> Process:
        """Start it; it is stopped with the bench, if not before."""
        self.running.append(running)
        await running.start()
        return running

    async def gateway(self, name: str, urls: Sequence[str], more: Sequence[str]) -> Process:
        """Start a controller and wait until it answers."""
        data = OUT / f"{name}.data"
        shutil.rmtree(data, ignore_errors=True)
        spans = ("--otlp", self.mock.said["mock"].split()[0])
        ours = process.controller(OUT / f"{name}.log", urls, data, (*spans, *more), self.gateways)
        await self.begin(ours)
        await serving(ours.said["serving"])
        return ours

    @contextlib.contextmanager
    def first(self) -> Iterator[bool]:
        """Run before everything else on this machine, where that is allowed: what other programs
        do says nothing about a gateway's latency. Gives whether it is."""
        threads = [os.getpid()]
        for running in (self.mock, self.bare, self.ours):
            threads += running.threads()
        try:
            for thread in threads:
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))
        except PermissionError:
            yield False
            return
        try:
            yield True
        finally:
            for thread in threads:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))

    async def stop(self) -> None:
        for client in self.clients:
            await client.close()
        for running in self.running[::-1]:
            await running.stop(signal.SIGKILL)


async def serving(url: str, within_s: float = 20.0) -> None:
    """Wait until a request is answered."""
    client = Client(url)
    try:
        end_s = time.monotonic() + within_s
        while True:
            answer = await client.ask(CHAT, chat(1), timeout_s=5.0)
            if answer.kind == "ok":
                return
            if time.monotonic() > end_s:
                raise RuntimeError(f"{url} does not serve: {answer}")
            await asyncio.sleep(0.05)
    finally:
        await client.close()


def requests(
    client: Client, *, stream: bool, mock: str = "", deadline_s: float = 0.0
) -> list[bytes]:
    """One request of each user."""
    text = "How high does the water rise at the quay tonight, and when must the boat be out? " * 2
    body = chat(64, stream=stream, text=text, temperature=0.7, mock=mock)
    return [
        client.request("POST", CHAT, body, headers(f"user-{number}", deadline_s=deadline_s))
        for number in range(USERS)
    ]


def sure(answers: Sequence[Answer], what: str) -> None:
    """A benchmark of failures would be worth nothing."""
    bad = [answer for answer in answers if answer.kind != "ok"]
    if bad:
        raise RuntimeError(f"{what}: {dict(kinds(answers))}, such as {bad[0]}")


async def cost_ms(
    running: Process, client: Client, *, stream: bool, per_s: float, count: int
) -> float:
    """CPU of the gateway's process a request, at a rate that leaves it mostly idle.

    A gateway that is kept from running finds several events at once and passes them on in one
    piece, which costs less: such a phase is measured again.
    """
    sent = requests(client, stream=stream)
    cost = 0.0
    for _ in range(TRIES):
        pieces = Pieces()
        before_s = running.cpu_s()
        answers = await open_loop(client, sent, per_s, count, on_event=pieces.add)
        cost = 1000 * (running.cpu_s() - before_s) / count
        sure(answers, "the cost of a request")
        if not stream or pieces.count >= PIECES_LEAST * count:
            break
        say(f"  disturbed: {pieces.count / count:.0f} pieces a stream; again")
    return cost


class Pieces:
    """Counts what comes."""

    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


async def pairs(
    bench: Bench, ours: Process, client: Client, rounds: int, *, stream: bool
) -> list[Pair]:
    """Phases in turn: bare, ours, ours, bare, bare, ours and so on."""
    per_s, count = (STREAM_PER_S, STREAM_COUNT) if stream else (SHORT_PER_S, SHORT_COUNT)
    for running, to in ((bench.bare, bench.to_bare), (ours, client)):
        await cost_ms(running, to, stream=stream, per_s=per_s, count=count // 3)
    found = []
    for number in range(rounds):
        sides = [(bench.bare, bench.to_bare), (ours, client)]
        costs = {}
        for running, to in sides if number % 2 == 0 else sides[::-1]:
            costs[running.pid] = await cost_ms(running, to, stream=stream, per_s=per_s, count=count)
        pair = Pair(costs[bench.bare.pid], costs[ours.pid])
        what = "stream" if stream else "short"
        say(f"  {what}: bare {pair.bare_ms:.3f} ms, ours {pair.ours_ms:.3f} ms, {pair.ratio:.2f}")
        found.append(pair)
    return found


def say(text: str) -> None:
    print(text, flush=True)


async def cpu(bench: Bench, rounds: int) -> list[Figure]:
    """CPU a request and a stream, beside the floor."""
    short = await pairs(bench, bench.ours, bench.to_ours, rounds, stream=False)
    stream = await pairs(bench, bench.ours, bench.to_ours, rounds, stream=True)
    return [*ratio("short", "<= 3", short), *ratio("stream", "<= 1.6", stream)]


def ratio(name: str, goal: str, found: Sequence[Pair]) -> list[Figure]:
    """The median over the phases, and what it is made of."""
    ratios = [pair.ratio for pair in found]
    spread = f"{len(ratios)} phases in turn, {min(ratios):.2f} to {max(ratios):.2f}"
    how = f"process CPU a request, ours over bare: {spread}; 1,000 users"
    bare_ms = statistics.median(pair.bare_ms for pair in found)
    ours_ms = statistics.median(pair.ours_ms for pair in found)
    return [
        Figure(f"cpu_ratio_{name}", statistics.median(ratios), "1", goal, how),
        Figure(f"cpu_ms_{name}", ours_ms, "ms", ANY, "CPU of the controller"),
        Figure(f"cpu_ms_{name}_bare", bare_ms, "ms", ANY, "CPU of the bare pass-through"),
    ]


async def latency(bench: Bench, for_s: float) -> list[Figure]:
    """Both gateways are asked in turn, request by request, 50 a second each."""
    count = int(2 * LATENCY_PER_S * for_s)
    took: dict[str, tuple[list[float], list[float]]] = {}
    for kind, per_s in (("", 2 * LATENCY_PER_S), ("ttft_", LATENCY_PER_S)):
        stream = kind != ""
        sent = [requests(to, stream=stream) for to in (bench.to_bare, bench.to_ours)]
        exchanges: tuple[list[Exchange], list[Exchange]] = ([], [])

        def send(
            number: int,
            sent: list[list[bytes]] = sent,
            exchanges: tuple[list[Exchange], list[Exchange]] = exchanges,
        ) -> None:
            side = number % 2
            client = (bench.to_bare, bench.to_ours)[side]
            exchanges[side].append(client.send(sent[side][number // 2 % USERS]))

        gc.collect()
        with bench.first() as undisturbed:
            await paced(per_s, count if not stream else count // 4, send)
            answers = [[await exchange.done for exchange in side] for side in exchanges]
        sure([*answers[0], *answers[1]], "latency")
        bare, ours = (
            [1000 * ((a.first_s if stream else a.last_s) - a.sent_s) for a in side]
            for side in answers
        )
        took[kind] = (bare, ours)
    figures = []
    for kind, (bare, ours) in took.items():
        for share, goal in ((0.50, "<= .5"), (0.99, "<= 1.5")):
            at = (quantile(bare, share), quantile(ours, share))
            name = f"added_{kind}p{round(100 * share)}_ms_over_bare"
            how = (
                f"{at[1]:.2f} ms less {at[0]:.2f} ms; {len(ours)} each, asked in turn;"
                f" {'before' if undisturbed else 'beside'} all other programs"
            )
            figures.append(Figure(name, at[1] - at[0], "ms", ">= -1000" if kind else goal, how))
            say(f"  {name}: {at[1] - at[0]:.2f} ms ({how})")
    return figures


async def most(bench: Bench, for_s: float) -> list[Figure]:
    """Requests a second with 64 callers that never pause."""
    found: dict[str, list[float]] = {"bare": [], "ours": []}
    for name in ("bare", "ours", "ours", "bare"):
        client = bench.to_bare if name == "bare" else bench.to_ours
        began_s = time.monotonic()
        answers = await closed_loop(client, requests(client, stream=False), CALLERS, for_s)
        sure(answers, "the most requests")
        found[name].append(len(answers) / (time.monotonic() - began_s))
        say(f"  most: {name} {found[name][-1]:.0f} requests/s")
    where = "gateway on a core of its own" if bench.gateways else "all on one core"
    how = f"{CALLERS} callers without pause, twice {for_s:.0f} s; {where}"
    return [
        Figure("most_per_s", statistics.mean(found["ours"]), "1/s", ANY, how),
        Figure("most_per_s_bare", statistics.mean(found["bare"]), "1/s", ANY, how),
    ]


async def confidence(bench: Bench, rounds: int) -> list[Figure]:
    """The same with confidence on: logprobs asked for, judged and taken out again."""
    url = bench.mock.said["mock"]
    ours = await bench.gateway("confidence", [url], (*bench.more, "--confidence"))
    client = Client(ours.said["serving"])
    try:
        short = await pairs(bench, ours, client, rounds, stream=False)
        stream = await pairs(bench, ours, client, rounds, stream=True)
    finally:
        await client.close()
        await ours.stop()
    figures = [*ratio("short_confidence", ANY, short), *ratio("stream_confidence", ANY, stream)]
    return [figure for figure in figures if not figure.name.endswith("_bare")]


async def opened(client: Client, count: int) -> AsyncIterator[list[Exchange]]:
    """Open idle streams; each step yields all so far."""
    sent = requests(client, stream=True, mock="idle", deadline_s=3600.0)
    exchanges: list[Exchange] = []

    def send(number: int) -> None:
        exchanges.append(client.send(sent[number % USERS], timeout_s=900.0))

    while len(exchanges) < count:
        await paced(IDLE_OPEN_PER_S, min(IDLE_STEP, count - len(exchanges)), send)
        yield exchanges


def seats(count: int, replicas: int, files: int) -> int:
    """How many streams each replica shall take. A stream under way needs two open files, one that
    waits only one; where the system allows too few files for all, some have to wait."""
    under_way = min(count, files - FILES_SPARE - count) // replicas
    # The stable preset sends 2 % more than the seats, and leaves 5 % of that to Turbo.
    return max(1, int((under_way + 1) / 0.95 / 1.02))


async def idle(bench: Bench, count: int) -> list[Figure]:
    """Hold streams that bring one event a minute."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    replicas = count // IDLE_PER_REPLICA + 1
    mock = await bench.begin(process.mock(OUT / "idle-mock.log", replicas, bench.rest))
    part = f",max_num_seqs={min(1024, seats(count, replicas, hard))}"
    urls = [url + part for url in mock.said["mock"].split()]
    ours = await bench.gateway("idle", urls, bench.more)
    client = Client(ours.said["serving"])
    to_mock = Client(mock.said["mock"].split()[0])
    try:
        before = ours.rss_bytes()
        exchanges: list[Exchange] = []
        async for exchanges in opened(client, count):
            say(f"  idle: {len(exchanges)} opened, {ours.rss_bytes() / 2**20:.0f} MiB")
        await asyncio.sleep(2.0)
        full = ours.rss_bytes()
        cpu_s = ours.cpu_s()
        held_s = time.monotonic()
        await asyncio.sleep(IDLE_HOLD_S)
        cpu_share = (ours.cpu_s() - cpu_s) / (time.monotonic() - held_s)
        now_s = time.monotonic()
        held = [e for e in exchanges if not e.done.done() and now_s - e.heard_s < IDLE_HOLD_S]
        waiting = sum(not exchange.first_s for exchange in held)
        ended = kinds(e.done.result() for e in exchanges if e.done.done())
        for exchange in exchanges:
            exchange.leave()
        gone_s = await let_go(to_mock)
    finally:
        await client.close()
        await to_mock.close()
        await ours.stop()
        await mock.stop()
    each = (full - before) / max(1, len(held)) / 1024
    how = (
        f"open streams, each heard of in the last {IDLE_HOLD_S:.0f} s, at one event a minute;"
        f" {waiting} of them wait in the queue for their first, as the limit of {hard} open files"
        f" allows; ended: {dict(ended)}"
    )
    say(f"  idle: {len(held)} held, {waiting} of them queued; {each:.0f} KiB each; {how}")
    return [
        Figure("idle_streams", len(held), "1", f">= {IDLE_WANTED}", how),
        Figure("idle_stream_kib", each, "KiB", ANY, "memory of the controller a stream"),
        Figure("idle_cpu_pct", 100 * cpu_share, "%", ANY, "CPU of a core while they idle"),
        Figure("idle_gone_s", gone_s, "s", "<= 15",
               f"until nothing is left upstream after {len(held)} clients left at once"),
    ]  # fmt: skip


async def let_go(to_mock: Client) -> float:
    """Seconds until the mock server has no open request any more, at most 30."""
    began_s = time.monotonic()
    while time.monotonic() - began_s < 30.0:
        if json.loads((await to_mock.get("/mock/counts")).body)["open"] == 0:
            break
        await asyncio.sleep(0.1)
    return time.monotonic() - began_s


async def run(parts: Sequence[str], quick: bool, more: Sequence[str]) -> list[Figure]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    bench = Bench(more)
    rounds = 2 if quick else 6
    figures: list[Figure] = []
    try:
        await bench.start()
        for part in parts:
            say(part)
            if part == "cpu":
                figures += await cpu(bench, rounds)
            elif part == "latency":
                figures += await latency(bench, 5.0 if quick else 30.0)
            elif part == "max":
                figures += await most(bench, 2.0 if quick else 5.0)
            elif part == "confidence":
                figures += await confidence(bench, 1 if quick else 3)
            elif part == "idle":
                figures += await idle(bench, 1000 if quick else IDLE_WANTED)
    finally:
        await bench.stop()
    return figures


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="What the gateway costs.")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this part")
    parser.add_argument("--quick", action="store_true", help="shorter; writes no figures")
    parser.add_argument("more", nargs="*", help="more options of `twinkeel serve`, after --")
    chosen = parser.parse_args(argv)
    parts = [part for part in PARTS if part in (chosen.only or PARTS)]
    figures = uvloop.run(run(parts, chosen.quick, chosen.more))
    for figure in figures:
        held = "" if figure.goal == ANY else "holds" if figure.holds else "MISSED"
        print(f"{figure.name:<32}{figure.value:>12.4g} {figure.unit:<5}{figure.goal:<10}{held}")
    if chosen.quick or chosen.only:
        return 0
    write_figures(FIGURES, figures)
    print("\n".join(require(figures, REQUIRED)) or "all figures hold")
    return int(bool(set(REQUIRED) - {figure.name for figure in figures}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
