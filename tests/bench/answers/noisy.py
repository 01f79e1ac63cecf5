"""How soon a replica with bad weights is out, and how many of its answers get to callers.

Three vLLM servers serve one model; the third one's weights have noise on them, as a broken copy
would. It answers fast and with status 200, and only what it says is worse: it is less sure of it,
and another replica says something else. Callers ask from the first second on; a part of them wants
streams, of which nothing can be taken back. What is counted is what they got as answered: made by
the noisy replica, from the first request to the last. Degraded answers are not: their callers know.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from policy.decisions import Dispatch, Rotated, Settled
from policy.events import Arrived, Verified
from tests.bench.answers.replicas import policy, questions, replicas, upstreams
from tests.controller.asking import ask, session
from tests.controller.inprocess import serving
from tests.controller.processes import audit, records, settings_for
from tests.figures import Figure, show

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from policy.log import Record
    from tests.controller.asking import Answer
    from tests.live.server import Vllm

NOISES = (0.1, 0.03)
NOISY = 2
"""The place of the noisy replica."""
LOAD_S, QUICK_LOAD_S = 90.0, 45.0
RATE = 4.0
"""Requests per second: three servers and their callers share two cores."""
TOKENS = 24
STREAMED_EVERY = 4
"""One request in so many is a stream."""
DOUBTING: dict[str, object] = {
    "verify_below_permille": 700, "degrade_below_permille": 300, "budget_permille": 500,
    "burst_tokens": 20_000,
}  # fmt: skip
"""About half of the sound answers score above, 0.68 is their median, and nearly none of those with
noise of .1; so many second runs of a small model are affordable."""
OUT = ("ejected", "doubtful")
NS = 1_000_000_000


class Seen(NamedTuple):
    """What the decision log says."""

    answered: int
    delivered: int
    """Answers of the noisy replica that callers got as answered."""
    streams: int
    """Of these."""
    open_s: float | None
    """From the first request until it was taken out; None: it never was."""
    clean_out: int
    """How often a sound replica was taken out."""
    scores: dict[bool, list[int]]
    """Of answers by whether the noisy replica made them, per mille."""
    verdicts: dict[bool, dict[str, int]]
    degraded: dict[bool, int]


def read(log: Iterable[Record]) -> Seen:
    """Count."""
    arrived: dict[int, Arrived] = {}
    last: dict[int, int] = {}
    began_ns = -1
    open_ns: int | None = None
    delivered = streams = answered = clean_out = 0
    scores: dict[bool, list[int]] = {False: [], True: []}
    verdicts: dict[bool, dict[str, int]] = {False: {}, True: {}}
    degraded = {False: 0, True: 0}
    for record in log:
        event = record.event
        if isinstance(event, Arrived):
            arrived[event.request] = event
            began_ns = record.now_ns if began_ns < 0 else began_ns
        elif isinstance(event, Verified) and event.request in last:
            told = verdicts[last[event.request] == NOISY]
            told[event.verdict] = told.get(event.verdict, 0) + 1
        for decision in record.decisions:
            if isinstance(decision, Dispatch):
                last[decision.request] = decision.replica
            elif isinstance(decision, Rotated) and (decision.state, decision.why) == OUT:
                if decision.replica != NOISY:
                    clean_out += 1
                elif open_ns is None:
                    open_ns = record.now_ns
            elif isinstance(decision, Settled) and decision.request in last:
                noisy = last[decision.request] == NOISY
                if decision.confidence_permille >= 0:
                    scores[noisy].append(decision.confidence_permille)
                degraded[noisy] += decision.outcome == "degraded"
                if decision.outcome == "answered":
                    answered += 1
                    delivered += noisy
                    streams += noisy and arrived[decision.request].stream
    open_s = None if open_ns is None else (open_ns - began_ns) / NS
    return Seen(
        answered, delivered, streams, open_s, clean_out, scores, verdicts, degraded
    )  # fmt: skip


def load(servers: Sequence[Vllm], folder: Path, seconds: float) -> tuple[list[Answer], Seen]:
    """Ask at a steady rate, and read what became of it."""
    settings = settings_for(
        upstreams(servers), folder,
        policy=policy(folder / "doubting.yaml", **DOUBTING), features={"confidence": True},
    )  # fmt: skip
    documents = questions(round(seconds * RATE), TOKENS)

    async def run() -> list[Answer]:
        async with serving(settings) as running, session() as client:
            tasks = []
            for number, document in enumerate(documents):
                body = {**document, "stream": number % STREAMED_EVERY == 0}
                tasks.append(asyncio.create_task(ask(client, running.url, body)))
                await asyncio.sleep(1 / RATE)
            return list(await asyncio.gather(*tasks))

    answers = asyncio.run(run())
    audit(settings.data_path)
    return answers, read(records(settings.data_path))


def figures(noise: float, seconds: float, seen: Seen) -> list[Figure]:
    """Of one amount of noise; the worse one has the plain names."""
    name = "noisy_replica" if noise == NOISES[0] else "slightly_noisy_replica"
    usual = [sorted(each)[len(each) // 2] if each else -1 for each in seen.scores.values()]
    how = (
        f"noise {noise} on one of three vLLM servers, {RATE:g} requests/s for {seconds:.0f} s, one"
        f" in {STREAMED_EVERY} a stream, temperature 0: {seen.answered} answered, {seen.streams} of"
        f" the noisy ones streams; median scores {usual[0]} sound, {usual[1]} noisy; second runs"
        f" {seen.verdicts[False]} sound, {seen.verdicts[True]} noisy; degraded"
        f" {seen.degraded[False]} sound, {seen.degraded[True]} noisy; sound replicas taken out"
        f" {seen.clean_out} times"
    )
    until = "from the first request until it was out of rotation"
    return [
        Figure(f"{name}_answers_delivered", float(seen.delivered), "answers", "<= 20", how),
        Figure(f"{name}_open_s", seen.open_s, "s", "<= 60", until),
    ]


def measure(quick: bool = False) -> list[Figure]:
    """Both amounts of noise."""
    seconds = QUICK_LOAD_S if quick else LOAD_S
    found: list[Figure] = []
    for noise in NOISES:
        with (
            tempfile.TemporaryDirectory(prefix="twinkeel-noisy-") as folder,
            replicas([0, 0, noise]) as servers,
        ):
            found += figures(noise, seconds, load(servers, Path(folder), seconds)[1])
    return found


def main() -> None:
    """Measure, and show."""
    show(measure())


if __name__ == "__main__":
    main()
