"""The drills that other gateways were put through."""

from __future__ import annotations

import asyncio
import signal
from time import monotonic
from typing import TYPE_CHECKING

from tests.bench.gateway import peers
from tests.bench.gateway.drill import (
    ANY,
    TOLD,
    Drill,
    Outcome,
    Tries,
    bad,
    begun,
    both,
    burst,
    figure,
    shorts,
    streams,
    told,
    user,
)  # fmt: skip
from tests.bench.gateway.load import chat, open_loop

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.gateway.client import Answer, Exchange
    from tests.bench.gateway.yard import Stand, Yard

PER_S = 40.0
CALM_S = 8.0
"""How long a broken replica is watched after the drill."""


async def a500(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        await stand.a.fault("http_500")
        async with Tries(stand.a) as tries:
            answers = await open_loop(stand.client, both(stand), PER_S, 100)
            wasted = tries.so_far()
            from_s = monotonic()
            later = await open_loop(stand.client, both(stand), PER_S / 2, int(CALM_S * PER_S / 2))
            probes = tries.most_within(2.0, from_s)
    errors = bad(answers)
    how = f"of 100 at {PER_S:.0f} a second, half of them streams: {told(answers)}"
    return Outcome(
        f"{errors}; {wasted}, then {probes} in 2 s",
        (
            figure("a500_errors", errors, "1", "= 0", how),
            figure("a500_tries", wasted, "1", "<= 5", "requests that A saw during the 100"),
            figure("a500_probes", probes, "1", "<= 1", "most in any 2 s of the 8 s after them"),
            figure("a500_later_errors", bad(later), "1", "= 0", f"in these 8 s: {told(later)}"),
        ),
    )


async def killed(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        exchanges: list[Exchange] = []
        requests = shorts(stand)
        before = await open_loop(stand.client, requests, PER_S, 40)
        usual_s = max(answer.latency_s for answer in before)
        task = asyncio.ensure_future(open_loop(stand.client, requests, PER_S, 160))
        await asyncio.sleep(1.0)
        killed_s = monotonic()
        stand.a.server.send(signal.SIGKILL)
        answers = await task
        await stand.a.start()
        await stand.up()
        exchanges += [stand.client.send(request) for request in streams(stand, 20, tokens=500)]
        await begun(exchanges)
        caught = (await stand.a.state()).running
        stand.a.server.send(signal.SIGKILL)
        cut = [await exchange.done for exchange in exchanges]
    rough = [a for a in answers if a.kind != "ok" or a.latency_s > usual_s + 0.1]
    steady_s = max((a.last_s - killed_s for a in rough), default=0.0)
    errors = bad(answers)
    return Outcome(
        f"{errors}; {steady_s:.1f} s",
        (
            figure("killed_errors", errors, "1", "= 0",
                   f"of 160 at {PER_S:.0f} a second, A killed after 1 s: {told(answers)}"),
            figure("killed_steady_s", max(0.0, steady_s), "s", "<= 2",
                   "until no answer takes 0.1 s longer than the slowest before"),
            figure("killed_streams_untold", sum(a.kind not in TOLD for a in cut), "1", "= 0",
                   f"20 streams open as A, with {caught} of them, is killed: {told(cut)}"),
        ),
    )  # fmt: skip


async def overload(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        before = sum(await stand.tries())
        began_s = monotonic()
        for twin in stand.twins:
            await twin.fault("http_503", for_s=3.0)
        over_s = monotonic() + 3.0 - (monotonic() - began_s) / 2
        answers = await open_loop(stand.client, both(stand), 30.0, 150)
        tries = (sum(await stand.tries()) - before) / len(answers)
    return overload_outcome(answers, over_s, tries)


def overload_outcome(answers: Sequence[Answer], over_s: float, tries: float) -> Outcome:
    """Recovered: an answer came, and nothing fails any more."""
    good_s = min((a.last_s for a in answers if a.kind == "ok" and a.last_s >= over_s), default=1e9)
    bad_s = max((a.last_s for a in answers if a.kind != "ok"), default=0.0)
    recovery_s = max(good_s, bad_s) - over_s
    return Outcome(
        f"{tries:.2f}; {recovery_s:.2f} s; {told(answers)}",
        (
            figure("overload_tries", tries, "1", "<= 1.2",
                   f"tries a request, outage and recovery, 150 at 30 a second: {told(answers)}"),
            figure("overload_recovery_s", recovery_s, "s", "<= 1",
                   "from the end of the 503s to the first answer, and the last failure"),
        ),
    )  # fmt: skip


async def storm400(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        for twin in stand.twins:
            await twin.fault("http_400")
        storm = await open_loop(stand.client, both(stand), PER_S, 60)
        for twin in stand.twins:
            await twin.heal()
        answers = await open_loop(stand.client, both(stand), PER_S, 40)
    passed = sum(answer.kind == "http_400" for answer in storm)
    good = len(answers) - bad(answers)
    return Outcome(
        f"{good}",
        (
            figure("storm400_ok", good, "1", "= 40", f"of 40: {told(answers)}"),
            figure("storm400_passed", passed, "1", "= 60", f"of 60: {told(storm)}"),
        ),
    )


async def hang(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        await stand.a.fault("hang")
        async with Tries(stand.a) as tries:
            began_s = monotonic()
            answers = await open_loop(stand.client, both(stand), 30.0, 120)
            asked = [at_s - began_s for at_s, _ in tries.seen[1:]]
            wasted = tries.so_far()
        slowest_s = max(answer.latency_s for answer in answers)
    lost = bad(answers)
    out_s = max((at_s for at_s in asked if at_s < 3.0), default=0.0)
    return Outcome(
        f"{lost}; slowest {slowest_s:.1f} s",
        (
            figure("hang_lost", lost, "1", "<= 2", f"of 120 at 30 a second: {told(answers)}"),
            figure("hang_slowest_s", slowest_s, "s", ANY, f"{wasted} of them had been sent to A"),
            figure("hang_isolated_s", out_s, "s", "<= 2.5",
                   "A's last request but for probes; 1.5 s past the predicted prefill, and 0.7 s"
                   " between two readings"),
        ),
    )  # fmt: skip


async def stall(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        await stand.a.fault("stall", after_tokens=10)
        answers = await open_loop(stand.client, streams(stand, tokens=60), PER_S, 40)
    errors = [a for a in answers if a.kind == "error_event"]
    gap_s = max((a.gap_s for a in errors), default=0.0)
    lost = sum(answer.kind not in TOLD for answer in answers)
    return Outcome(
        f"{lost}; error event within {gap_s:.1f} s",
        (
            figure("stall_timeouts", lost, "1", "= 0", f"of 40: {told(answers)}"),
            figure("stall_told_s", gap_s, "s", "<= 3", "longest silence before an error event"),
        ),
    )


async def reset(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        await stand.a.fault("reset", after_tokens=10)
        answers = await burst(stand, streams(stand, 20, tokens=60))
    cut = sum(answer.kind not in TOLD for answer in answers)
    words = f"{cut} ({sum(a.kind == 'error_event' for a in answers)} error events)"
    return Outcome(words, (figure("reset_cut", cut, "1", "= 0", f"of 20: {told(answers)}"),))


async def empty(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        await stand.a.fault("empty")
        answers = await open_loop(stand.client, both(stand), PER_S, 60)
    passed = sum(answer.kind in ("empty", "no_end") for answer in answers)
    return Outcome(
        f"{passed}",
        (
            figure("empty_passed", passed, "1", "= 0", f"of 60: {told(answers)}"),
            figure("empty_errors", bad(answers), "1", "= 0", "the same, any failure"),
        ),
    )


async def sigterm(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        requests = streams(stand, 20, tokens=400)
        exchanges = [stand.client.send(request, timeout_s=20.0) for request in requests]
        await begun(exchanges)
        began_s = monotonic()
        stand.gateway.send(signal.SIGTERM)
        answers = [await exchange.done for exchange in exchanges]
        code = await stand.gateway.ended(15.0)
        took_s = monotonic() - began_s
    return Outcome(
        f"{bad(answers)}; ended after {took_s:.1f} s",
        (
            figure("sigterm_cut", bad(answers), "1", "= 0", f"of 20: {told(answers)}"),
            figure("sigterm_exit_code", -1 if code is None else code, "1", "= 0",
                   f"it ended {took_s:.1f} s after the signal"),
        ),
    )  # fmt: skip


async def busy(yard: Yard) -> Outcome:
    async with yard.stand() as stand:
        early = await left_early(stand)
        middle = await left_midway(stand)
    return Outcome(
        f"{middle} / {early} within 1 s",
        (
            figure("upstream_busy_after_1s", max(early, middle), "1", "= 0",
                   "running and waiting on both replicas 1 s after 20 clients left mid-stream"
                   " and 20 before the first byte, some of them still queued; the worse of both"),
        ),
    )  # fmt: skip


async def left_midway(stand: Stand) -> int:
    requests = streams(stand, 20, tokens=2000)
    exchanges = [stand.client.send(request) for request in requests]
    await begun(exchanges)
    await asyncio.sleep(0.2)
    if await stand.busy() == 0:
        raise RuntimeError("no stream was under way: the drill shows nothing")
    for exchange in exchanges:
        exchange.leave()
    await asyncio.sleep(1.0)
    return await stand.busy()


async def left_early(stand: Stand) -> int:
    """Prompts of 30,000 tokens take a second each, so some wait in the policy's queue."""
    exchanges = []
    for number in range(20):
        text = f"{number} " + "tide " * 24_000
        body = chat(16, stream=number % 2 == 0, text=text)
        exchanges.append(stand.client.send(stand.post(body, user(number))))
    await asyncio.sleep(0.5)
    if await stand.busy() == 0:
        raise RuntimeError("no prefill was under way: the drill shows nothing")
    for exchange in exchanges:
        exchange.leave()
    await asyncio.sleep(1.0)
    return await stand.busy()


DRILLS = (
    Drill(peers.A500, a500),
    Drill(peers.KILLED, killed),
    Drill(peers.OVERLOAD, overload),
    Drill(peers.STORM400, storm400),
    Drill(peers.HANG, hang),
    Drill(peers.STALL, stall),
    Drill(peers.RESET, reset),
    Drill(peers.EMPTY, empty),
    Drill(peers.SIGTERM, sigterm),
    Drill(peers.BUSY, busy),
)
