"""Drills that nobody publishes, and that operators would want."""

from __future__ import annotations

import asyncio
import signal
from time import monotonic
from typing import TYPE_CHECKING

from tests.bench.gateway.drill import (
    ANY,
    TOLD,
    Drill,
    Outcome,
    bad,
    begun,
    both,
    figure,
    shorts,
    streams,
    told,
)  # fmt: skip
from tests.bench.gateway.drills_load import says_why
from tests.bench.gateway.load import CHAT, chat, open_loop, quantile
from tests.bench.gateway.logs import account, records
from tests.bench.gateway.peers import Published

if TYPE_CHECKING:
    from tests.bench.gateway.client import Answer, Client
    from tests.bench.gateway.yard import Stand, Yard

BAD = ("null", "abort", "truncated", "no_end", "cut", "blank")
SLOW_FACTOR = 8.0
SLOW_S = 20.0
RESTART_MOST_S = 20.0


async def bad_answers(yard: Yard) -> Outcome:
    """Every way in which an answer can be worthless, each before a fresh controller."""
    passed: list[str] = []
    failed: list[str] = []
    for kind in BAD:
        async with yard.stand() as stand:
            await stand.a.fault(kind, after_tokens=4)
            answers = await open_loop(stand.client, both(stand), 60.0, 40)
        passed += [f"{kind}: {a.kind}" for a in answers if a.status == 200 and a.kind not in TOLD]
        failed += [f"{kind}: {a.kind}" for a in answers if a.status != 200]
    return Outcome(
        f"{len(passed)}",
        (
            figure("bad_answers_passed", len(passed), "1", "= 0",
                   f"of {40 * len(BAD)}, 40 of each; {sorted(set(passed))}"),
            figure("bad_answers_failed", len(failed), "1", ANY,
                   f"answered with an error instead of being tried again; {sorted(set(failed))}"),
        ),
    )  # fmt: skip


async def frozen(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        stand.a.server.send(signal.SIGSTOP)
        answers = await open_loop(stand.client, both(stand), 30.0, 120)
        stand.a.server.send(signal.SIGCONT)
    slowest_s = max(answer.latency_s for answer in answers)
    return Outcome(
        f"{bad(answers)}; slowest {slowest_s:.1f} s",
        (
            figure("frozen_lost", bad(answers), "1", "<= 2",
                   f"of 120 at 30 a second, A under SIGSTOP: {told(answers)}"),
            figure("frozen_slowest_s", slowest_s, "s", ANY, "of the same"),
        ),
    )  # fmt: skip


async def slow(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        usual = await open_loop(stand.client, streams(stand), 30.0, 60)
        await stand.a.fault("slow", factor=SLOW_FACTOR)
        answers = await open_loop(stand.client, streams(stand), 30.0, int(30 * SLOW_S))
        before = (await stand.a.state()).requests
        late = await open_loop(stand.client, streams(stand), 30.0, 90)
        share_pct = 100 * ((await stand.a.state()).requests - before) / len(late)
    ttft = [1000 * quantile([a.first_s - a.sent_s for a in side], 0.95) for side in (usual, late)]
    return Outcome(
        f"p95 {ttft[1]:.0f} ms, {share_pct:.0f} % to A",
        (
            figure("slow_errors", bad([*answers, *late]), "1", "= 0",
                   f"A takes {SLOW_FACTOR:.0f} times as long: {told([*answers, *late])}"),
            figure("slow_ttft_p95_ms", ttft[1], "ms", ANY,
                   f"after {SLOW_S:.0f} s; {ttft[0]:.0f} ms before it was slow"),
            figure("slow_share_pct", share_pct, "%", ANY, "of new requests still sent to A"),
        ),
    )  # fmt: skip


async def none_left(yard: Yard) -> Outcome:
    """Both replicas die, and come back."""
    async with yard.stand() as stand:
        for twin in stand.twins:
            twin.server.send(signal.SIGKILL)
        await asyncio.sleep(2.0)
        refused = await open_loop(stand.client, both(stand), 20.0, 20)
        await asyncio.gather(*(twin.start() for twin in stand.twins))
        back_s = await served_again(stand.client, monotonic())
    clear = sum(a.kind == "http_503" and says_why(a) for a in refused)
    return Outcome(
        f"{clear} of 20; {back_s:.1f} s",
        (
            figure("none_left_503", clear, "1", "= 20",
                   f"of 20, both replicas dead: 503, Retry-After and a reason; {told(refused)}"),
            figure("none_left_back_s", back_s, "s", "<= 3",
                   "from both replicas listening again to the first answer"),
        ),
    )  # fmt: skip


async def served_again(client: Client, from_s: float) -> float:
    """Seconds until a request is answered."""
    while True:
        answer = await client.ask(CHAT, chat(1), timeout_s=2.0)
        if answer.kind == "ok":
            return monotonic() - from_s
        if monotonic() - from_s > RESTART_MOST_S:
            return RESTART_MOST_S
        await asyncio.sleep(0.02)


async def restarted(yard: Yard) -> Outcome:
    """The controller itself is killed under load and started again on its data."""
    async with yard.stand() as stand:
        requests = [*shorts(stand), *streams(stand, tokens=200)]
        exchanges = [stand.client.send(request, timeout_s=10.0) for request in requests[-20:]]
        await begun(exchanges)
        task = asyncio.ensure_future(open_loop(stand.client, requests, 30.0, 60))
        await asyncio.sleep(1.0)
        killed_s = monotonic()
        await stand.gateway.stop(signal.SIGKILL)
        port = stand.client.url.rsplit(":", 1)[1]
        again = yard.gateway(stand.data, ("--port", port))
        stand.gateway = again
        await again.start()
        back_s = await served_again(stand.client, killed_s)
        answers = [*(await task), *[await exchange.done for exchange in exchanges]]
        await settled(stand)
        busy = await stand.busy()
        await again.stop(signal.SIGTERM)
        found = account(records(stand.data))
    silent = sum(a.kind not in (*TOLD, "cut", "refused", "http_503") for a in answers)
    return Outcome(
        f"serves after {back_s:.1f} s",
        (
            figure("restart_s", back_s, "s", "<= 5",
                   f"kill -9 to the next answer, start included; callers: {told(answers)}"),
            figure("restart_unaccounted", found.unaccounted, "1", "= 0",
                   f"requests without exactly one outcome: {found.arrived} arrived,"
                   f" {dict(found.outcomes)}"),
            figure("restart_untold", silent, "1", "= 0", "callers left without a clear end"),
            figure("restart_left_upstream", busy, "1", "= 0", "still running on the replicas"),
        ),
    )  # fmt: skip


async def settled(stand: Stand, within_s: float = 5.0) -> None:
    """Wait until the replicas have nothing to do."""
    end_s = monotonic() + within_s
    while await stand.busy():
        if monotonic() > end_s:
            return
        await asyncio.sleep(0.05)


async def rolling(yard: Yard) -> Outcome:
    """Each replica is restarted in turn, as an upgrade does it: SIGTERM, and no draining."""
    async with yard.stand() as stand:
        answers: list[Answer] = []
        task = asyncio.ensure_future(open_loop(stand.client, shorts(stand), 30.0, 240))
        for twin in stand.twins:
            await asyncio.sleep(0.5)
            await twin.server.stop(signal.SIGTERM)
            await twin.start()
            await asyncio.sleep(1.5)
        answers += await task
    return Outcome(
        f"{bad(answers)} of {len(answers)}",
        (
            figure("rolling_errors", bad(answers), "1", "= 0",
                   f"each replica restarted in turn under 30 requests/s: {told(answers)}"),
        ),
    )  # fmt: skip


DRILLS = (
    Drill(Published("A answers null, aborted, truncated, without end: passed on", bar="0"),
          bad_answers),
    Drill(Published("A frozen (SIGSTOP): lost of 120", bar="at most 2"), frozen),
    Drill(Published("A 8 times as slow: TTFT, and share still sent to it"), slow),
    Drill(Published("both replicas dead: told so, of 20; serving again", bar="20; at most 3 s"),
          none_left),
    Drill(Published("replicas restarted in turn: errors of 240", bar="0"), rolling),
    Drill(Published("controller killed and restarted under load", bar="5 s; none unaccounted"),
          restarted),
)  # fmt: skip
