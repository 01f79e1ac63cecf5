"""Everything at once for a long time: ``make soak``, and ``make soak-long`` for a million requests.

Answers of 16 tokens at 300 requests a second, a quarter of them streams, from twin-served replicas
that are killed, frozen, cut off, slowed down and made to answer rubbish. Every request must have
exactly one outcome: in the controller's decision log, and for its caller.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import statistics
import sys
from array import array
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import uvloop

from tests.bench.gateway import process
from tests.bench.gateway.chaos import TOKENS, Chaos
from tests.bench.gateway.client import Client
from tests.bench.gateway.drill import TOLD, prompt, user
from tests.bench.gateway.load import CHAT, chat, quantile
from tests.bench.gateway.logs import account, records
from tests.bench.gateway.yard import Twin
from tests.figures import Figure, require, write_figures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.gateway.client import Answer
    from tests.bench.gateway.logs import Account
    from tests.bench.gateway.process import Process

OUT = Path("build/soak")
FIGURES = Path("build/figures")
REQUIRED = ("requests", "failed_pct", "unaccounted", "rss_growth_pct")
REQUESTS = 200_000
LONG_REQUESTS = 1_000_000
PER_S = 300.0
POLICY = str(Path(__file__).with_name("gateway") / "soak.yaml")
REPLICAS = 3
BODIES = 4000
EVERY_S = 12.0
OPEN_MOST = 600
"""Requests open at once; more are not sent before some are answered, whatever the rate."""
SAY_S = 10.0
CALM_S = 6.0
"""Without faults, at both ends."""
ANY = ">= 0"


class Tally:
    """What callers got, counted as it comes."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.open = 0
        self.latencies_s = array("d")
        self.first: dict[str, Answer] = {}
        """One of each kind that is not ``ok``."""

    def took(self, answer: Answer) -> None:
        self.open -= 1
        self.kinds[answer.kind] += 1
        if answer.kind == "ok":
            self.latencies_s.append(answer.latency_s)
        else:
            self.first.setdefault(answer.kind, answer)

    @property
    def over(self) -> int:
        return sum(self.kinds.values())

    @property
    def begun(self) -> int:
        """Streams that broke off after their first token, and were told so."""
        return self.kinds["error_event"]

    @property
    def failed(self) -> int:
        """Requests without a useful answer that were not streams under way."""
        return sum(count for kind, count in self.kinds.items() if kind not in TOLD)


class Soak:
    """The run."""

    def __init__(
        self,
        requests: int,
        per_s: float,
        seed: int,
        replicas: int,
        every_s: float,
        more: Sequence[str],
    ) -> None:
        self._requests = requests
        self._per_s = per_s
        self._seed = seed
        self._every_s = every_s
        self._more = tuple(more)
        self.twins = [Twin(name, OUT) for name in "ABCD"[:replicas]]
        self.tally = Tally()
        self.sent = 0
        self.rss: list[tuple[int, int]] = []
        """Requests sent, and bytes that the controller held then."""
        self.took_s = 0.0
        self.gateway: Process
        self.client: Client
        self.chaos: Chaos

    async def run(self) -> None:
        shutil.rmtree(OUT, ignore_errors=True)
        try:
            await asyncio.gather(*(twin.start() for twin in self.twins))
            urls = [twin.url for twin in self.twins]
            options = ("--policy", POLICY, *self._more)
            self.gateway = process.controller(OUT / "controller.log", urls, self.data, options)
            await self.gateway.start()
            self.client = Client(self.gateway.said["serving"], timeout_s=30.0)
            await self._up()
            await self._soak()
            await self.client.close()
            await self.gateway.stop(signal.SIGTERM, 30.0)
        finally:
            for twin in self.twins:
                await twin.stop()
            if hasattr(self, "gateway"):
                await self.gateway.stop(signal.SIGKILL)

    @property
    def data(self) -> Path:
        return OUT / "data"

    async def _up(self) -> None:
        """Until the first answer; what is refused before is not part of the run."""
        end_s = monotonic() + 20.0
        while (await self._warm()).kind != "ok":
            if monotonic() > end_s:
                raise RuntimeError("the controller does not serve")
            await asyncio.sleep(0.1)
        await asyncio.sleep(2.0)

    async def _warm(self) -> Answer:
        self.sent += 1
        self.tally.open += 1
        answer = await self.client.ask(CHAT, chat(1))
        self.tally.took(answer._replace(kind="warm-up" if answer.kind != "ok" else "ok"))
        return answer

    async def _soak(self) -> None:
        self.chaos = Chaos(self.twins, self._seed, self._every_s)
        chaos: asyncio.Task[None] | None = None
        saying = asyncio.ensure_future(self._say())
        began_s = monotonic()
        try:
            first = int(CALM_S * self._per_s)
            await self._send(first)
            chaos = asyncio.ensure_future(self.chaos.run())
            await self._send(self._requests - 2 * first)
            chaos.cancel()
            await asyncio.gather(chaos, return_exceptions=True)
            await self._send(first)
            self.took_s = monotonic() - began_s
            end_s = monotonic() + 40.0
            while self.tally.open:
                if monotonic() > end_s:
                    break
                await asyncio.sleep(0.05)
        finally:
            saying.cancel()
            if chaos is not None:
                chaos.cancel()
            await asyncio.gather(saying, *([chaos] if chaos else []), return_exceptions=True)

    def _bodies(self) -> list[bytes]:
        """A quarter of them are streams."""
        return [
            self.client.request(
                "POST",
                CHAT,
                chat(TOKENS, stream=number % 4 == 0, text=prompt(number)),
                user(number % 1000),
            )
            for number in range(BODIES)
        ]

    async def _send(self, count: int) -> None:
        bodies = self._bodies()
        tally = self.tally
        began_s = monotonic()
        done = 0
        while done < count:
            due = min(count, int((monotonic() - began_s) * self._per_s) + 1)
            if due - done > self._per_s:  # far behind: the rate is what it is
                began_s = monotonic() - done / self._per_s
                continue
            while done < due and tally.open < OPEN_MOST:
                exchange = self.client.send(bodies[self.sent % BODIES])
                exchange.done.add_done_callback(lambda done: tally.took(done.result()))
                tally.open += 1
                self.sent += 1
                done += 1
            await asyncio.sleep(0.002)

    async def _say(self) -> None:
        began_s = monotonic()
        before = self.sent
        while True:
            await asyncio.sleep(SAY_S)
            per_s = (self.sent - before) / SAY_S
            before = self.sent
            self.rss.append((self.sent, self.gateway.rss_bytes()))
            kinds = {kind: count for kind, count in self.tally.kinds.items() if kind != "ok"}
            print(
                f"{monotonic() - began_s:6.0f} s {self.sent:8d} sent {per_s:6.1f}/s"
                f" {self.tally.open:4d} open {self.rss[-1][1] / 2**20:7.1f} MiB"
                f" {self.chaos.now or '-':<12} {kinds}",
                flush=True,
            )


def growth_pct(rss: Sequence[tuple[int, int]], requests: int) -> float:
    """From a fifth of the run, when all is warm, to its end; medians of three readings."""
    if not rss:
        return 0.0
    at = next((i for i, (sent, _) in enumerate(rss) if sent >= requests / 5), len(rss) - 1)
    first = statistics.median(held for _, held in rss[at : at + 3])
    last = statistics.median(held for _, held in rss[-3:])
    return 100 * (last - first) / first


def figures_of(soak: Soak, found: Account) -> list[Figure]:
    """What the run showed, and what the log says of it."""
    tally = soak.tally
    warm = tally.kinds["warm-up"]
    requests = soak.sent - warm
    reached = soak.sent - tally.kinds["refused"]
    failed = tally.failed - warm
    answered = found.outcomes["answered"]
    lost = abs(found.arrived - reached) + tally.open
    per_s = requests / soak.took_s
    mishaps = ", ".join(f"{count} {name}" for name, count in sorted(soak.chaos.done.items()))
    kinds = dict(sorted(tally.kinds.items()))
    return [
        Figure("requests", requests, "1", f">= {REQUESTS}",
               f"{per_s:.0f} a second for {soak.took_s:.0f} s; {mishaps}"),
        Figure("failed_pct", 100 * failed / requests, "%", "<= .0017",
               f"{failed} without a useful answer: {kinds}. Streams that had begun when their"
               " replica broke, and were told, are counted in broken_streams_pct"),
        Figure("unaccounted", found.unaccounted + lost, "1", "= 0",
               f"not exactly one outcome in the log ({found.twice} twice, {found.open} open,"
               f" {found.unknown} unknown), {found.arrived} arrived of {reached} sent, {tally.open}"
               f" callers without an end; {dict(found.outcomes)}"),
        Figure("rss_growth_pct", growth_pct(soak.rss, requests), "%", "<= 5",
               "memory of the controller from a fifth of the run to its end"),
        Figure("told_otherwise", abs(tally.kinds["ok"] - answered), "1", "= 0",
               f"callers that have an answer: {tally.kinds['ok']}, and in the log: {answered}"),
        Figure("broken_streams_pct", 100 * tally.begun / requests, "%", ANY,
               f"{tally.begun} streams broke off after their first token, told by an error event"),
        Figure("rate_per_s", per_s, "1/s", ANY, f"{PER_S:.0f} a second were wanted"),
        Figure("latency_p50_ms", 1000 * quantile(tally.latencies_s, 0.5), "ms", ANY, "of all"),
        Figure("latency_p99_ms", 1000 * quantile(tally.latencies_s, 0.99), "ms", ANY, "the same"),
        Figure("latency_max_ms", 1000 * max(tally.latencies_s, default=0), "ms", ANY, "the same"),
    ]  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="A long run with everything going wrong.")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--long", action="store_true", help=f"{LONG_REQUESTS:,} requests")
    parser.add_argument("--per-s", type=float, default=PER_S)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=REPLICAS, choices=(2, 3, 4))
    parser.add_argument("--every-s", type=float, default=EVERY_S, help="from fault to fault")
    parser.add_argument("more", nargs="*", help="more options of `twinkeel serve`, after --")
    chosen = parser.parse_args(argv)
    requests = LONG_REQUESTS if chosen.long else chosen.requests
    soak = Soak(requests, chosen.per_s, chosen.seed, chosen.replicas, chosen.every_s, chosen.more)
    uvloop.run(soak.run())
    figures = figures_of(soak, account(records(soak.data)))
    for figure in figures:
        kept = "holds" if figure.holds else "MISSED"
        print(f"{figure.name:<20}{figure.value:>12.5g} {figure.unit:<4}{figure.goal:<10}{kept}")
        print(f"    {figure.how}")
    for kind, answer in soak.tally.first.items():
        print(f"the first {kind}: {answer.status} {answer.head[:80]!r} {answer.body[-300:]!r}")
    if requests < REQUESTS:
        return 0
    write_figures(FIGURES / ("soak-long.json" if chosen.long else "soak.json"), figures)
    print("\n".join(require(figures, REQUIRED)) or "all figures hold")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
