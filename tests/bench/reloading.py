"""What a hot reload costs callers: a controller, its fleet of served twins, and a steady load.

    python -m tests.bench.reloading [--out build/figures/reloading.json]

A good version takes over twice; versions that are no good in five ways are rolled back; and the
time to the first token is compared with and without a reload, in turns. With VLLM=1 the first is
done with two real vLLM servers on the processor as well.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.controller.asking import ask, chat, session
from tests.controller.processes import eventually
from tests.figures import Figure, require, show, write_figures
from tests.fleet.loaded import weights
from tests.fleet.reloading import (
    MODEL,
    NEW,
    OLD,
    OVER,
    Fleet,
    Story,
    ask_for,
    play,
    slots,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.controller.processes import Controller

OUT = Path("build/figures/reloading.json")
RATE = 6.0
"""Requests per second of the good reload and of the bad ones."""
PAIRS = 5
WINDOW_S = 16.0
EVERY_S = 0.4
PROMPT_WORDS = 1500
TOKENS = 24
SLOW = "l40s/qwen3-8b"
"""Tens of ms a step: what other processes take of this machine is little beside it."""
BAD: dict[str, dict[str, Any]] = {
    "does not start": {"code": 1},
    "is another version": {"version": "v0.9"},
    "answers garbage": {"fault": {"kind": "same"}},
    "is unsure": {"fault": {"kind": "unsure"}},
    "turns bad later": {},
}


def good(folder: Path) -> Story:
    """Two replicas and one standby: two waves."""
    controller = Fleet(folder, 2, ({},)).start()
    try:
        return asyncio.run(play(controller, weights(folder / NEW, NEW), rate=RATE))
    finally:
        controller.stop()


def bad(folder: Path) -> tuple[list[str], int, int]:
    """(kinds that were not rolled back, with what was said; wrong labels; answers)."""
    controller = Fleet(folder, 1, watch_ms=120_000).start()
    missed: list[str] = []
    wrong = answers = 0
    try:
        for kind, how in BAD.items():
            version = f"bad-{kind.replace(' ', '-')}"
            path = weights(folder / version, **{"version": version, **how})

            async def harm(how: dict[str, Any] = how) -> None:
                if not how:
                    await asyncio.to_thread(_kill_new, controller)

            story = asyncio.run(play(controller, path, version, RATE, meanwhile=harm))
            last = story.answers[-1]
            back = last.good and last.extras.get("model_version") == OLD
            if story.last["phase"] != "rolled back" or not story.last["why"] or not back:
                missed.append(f"{kind}: {story.last['phase']}, {story.last['why']}")
            wrong += len(story.wrong)
            answers += len(story.answers)
            _settled(controller)
    finally:
        controller.stop()
    return missed, wrong, answers


def _kill_new(controller: Controller) -> None:
    until(controller, ["watching", *OVER])
    for slot in slots(controller):
        if slot["version"] != OLD and slot["pid"]:
            os.kill(slot["pid"], signal.SIGKILL)


def _settled(controller: Controller) -> None:
    def rests() -> bool:
        states = sorted(slot["state"] for slot in slots(controller))
        return states in (["cold", "serving"], ["serving", "warm"])

    eventually("one serves, and one can be started", rests, 60.0, 0.1)


# ---- the time to the first token ----


def p99_change_pct(folder: Path) -> tuple[float, list[tuple[float, float]]]:
    """By how much p99 of TTFT is higher while a reload goes on; and all pairs, (without, with), in
    ms."""
    controller = Fleet(folder, 1, watch_ms=300, profile=SLOW).start()
    pairs: list[tuple[float, float]] = []
    try:
        asyncio.run(_ttft_ms(controller, "", ""))  # the first requests of a controller
        for number in range(PAIRS):
            path = weights(folder / f"v2.{number}", f"v2.{number}", profile=SLOW)
            found: dict[str, float] = {}
            for version in ("", f"v2.{number}") if number % 2 else (f"v2.{number}", ""):
                found[version] = asyncio.run(_ttft_ms(controller, version, path))
                _settled(controller)
            pairs.append((found[""], found[f"v2.{number}"]))
    finally:
        controller.stop()
    return statistics.median(100 * (after / before - 1) for before, after in pairs), pairs


async def _ttft_ms(controller: Controller, version: str, path: str) -> float:
    """p99 of a steady load, during which a version is reloaded, or none."""
    async with session() as client:
        asking: list[asyncio.Task[Any]] = []
        reloading = None
        for number in range(round(WINDOW_S / EVERY_S)):
            text = f"{version} {number} {os.urandom(4).hex()} {'sea ' * PROMPT_WORDS}"
            document = chat(MODEL, text, TOKENS)
            asking.append(asyncio.create_task(ask(client, controller.url, document)))
            if version and number == 2:
                reloading = asyncio.create_task(
                    asyncio.to_thread(ask_for, controller, version, path)
                )
            await asyncio.sleep(EVERY_S)
        answers = await asyncio.gather(*asking)
    if reloading is not None:
        status, said = await reloading
        assert status == 202, said
        last = await asyncio.to_thread(until, controller, OVER)
        assert last["phase"] == "done", last
    assert all(answer.good for answer in answers), [each.body[-200:] for each in answers]
    times = sorted(1000 * answer.ttft_s for answer in answers)
    return times[math.ceil(0.99 * len(times)) - 1]


# ---- all of it ----


def measure() -> list[Figure]:
    """The figures."""
    with tempfile.TemporaryDirectory(prefix="twinkeel-reload-") as scratch:
        folder = Path(scratch)
        stories = [good(folder / f"good{number}") for number in range(2)]
        real = ""
        if os.environ.get("VLLM") == "1":
            from tests.live.reloading import real_reload

            stories.append(real_reload(folder / "vllm"))
            real = ", and one with real vLLM on the processor"
        wrong_good = sum(len(story.wrong) for story in stories)  # while their logs are there
        missed, wrong_bad, answers_bad = bad(folder / "bad")
        change, pairs = p99_change_pct(folder / "p99")
    asked = sum(len(story.answers) for story in stories)
    over = all(story.last["phase"] == "done" for story in stories)
    took = ", ".join(f"{story.seconds:.1f}" for story in stories)
    wrong = wrong_good + wrong_bad
    told = "; ".join(f"{before:.0f} and {after:.0f} ms" for before, after in pairs)
    return [
        Figure("reload_5xx", sum(story.errors for story in stories) if over else None,
               "1", "= 0", f"of {asked} requests, streams and whole, while a version took over in"
               f" two waves on served twins, twice{real}: {took} s"),
        Figure("reload_wrong_version", wrong, "1", "= 0",
               f"of {asked + answers_bad} answers: labelled otherwise than the decision log says"
               " who answered, or sent to the old version after the switch"),
        Figure("reload_p99_change_pct", round(change, 2), "%", "<= 5",
               f"p99 of TTFT with a reload against without, median of {len(pairs)} pairs in turns,"
               f" {1 / EVERY_S:g} requests/s to a served {SLOW}: {told}"),
        Figure("bad_version_rolled_back", (len(BAD) - len(missed)) / len(BAD), "1", "= 1",
               f"share of {len(BAD)} kinds ({', '.join(BAD)}) that were rolled back with a reason"
               + (f"; not: {'; '.join(missed)}" if missed else "")),
    ]  # fmt: skip


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="What a hot reload costs callers.")
    parser.add_argument("--out", type=Path, default=OUT)
    out = parser.parse_args(argv).out
    figures = measure()
    show(figures)
    write_figures(out, figures)
    complaints = require(figures, [figure.name for figure in figures])
    print("\n".join(complaints))
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
