"""How fast plans are, and how right: ``python -m tests.bench.planning [speed] [truth] [live]``.

Right against held-out truth: days and drawn step times that the plan did not see; and, as ``live``,
against a real vLLM on this machine: its knee and its figures, beside the plan's intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from policy.files import load_policy
from tests.figures import Figure, show, write_figures
from tests.support import write_rows
from traces.generate import TraceSpec, spec_batches
from traces.pipeline import write_trace
from traces.store import open_trace
from twin.plan.estimates import predicted, wilson
from twin.plan.inputs import Prices, SloFile, load_slo, promise_of
from twin.plan.machines import machine_of
from twin.plan.planning import Setting, knee_of, size_of
from twin.plan.runs import Runs
from twin.plan.workload import workload_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.live.server import Vllm
    from twin.plan.cell import Outcome
    from twin.plan.estimates import Estimate
    from twin.plan.inputs import Promise
    from twin.plan.machines import Machine
    from twin.plan.planning import Knee

FIGURES = Path("build/planning/figures.json")
SLO = """
schema: 1
confidence_percent: 90
classes:
  P0: {ttft_s_p95: 0.8, attainment_percent: 90}
  P1: {ttft_s_p95: 2.5, attainment_percent: 95}
  P2: {attainment_percent: 90}
"""
GROWTHS = "1,1.5,2,3,4"
CASES = (8.0, 12.0, 16.0)
"""Growths of the small load whose sizes are held against the truth."""
HELD_OUT = 20
FIRST_UNSEEN = 1000
"""Days from this number on are seen by no plan."""
SMALL_ROWS = 1500
DEVIATES_MOST = 0.25
"""Two runs of the same load on a real server that differ by more are of a machine that is not
quiet, and nothing is measured on it."""
LIVE_MULTIPLES = (0.5, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.4)
LIVE_S = 40.0
LIVE_LIMIT_S = 1.0


def mixed_trace(path: Path, duration_s: float) -> Path:
    """Requests of the shipped mix ``bursts``, for as long."""
    text = (resources.files("traces") / "shipped" / "bursts.yaml").read_bytes()
    spec = msgspec.yaml.decode(text, type=TraceSpec)
    spec = msgspec.structs.replace(spec, duration_s=duration_s)
    write_trace(spec_batches(spec), path, rezero=False, renumber=True, resolution_s=0.0)
    return path


def speed(folder: Path) -> list[Figure]:
    """The what-if of 5 growths, 2 cards and 3 faults, as a user starts it."""
    trace = mixed_trace(folder / "mixed.parquet", 2100.0)
    slo = folder / "slo.yaml"
    slo.write_text(SLO, encoding="utf-8")
    out = folder / "plan.json"
    command = [
        sys.executable, "-c", "from twin.plan.cli import plan; plan()", "--trace", str(trace),
        "--slo", str(slo), "--grow", GROWTHS, "--gpus", "h100-sxm,h200", "--faults",
        "n-1,ecc,spike", "--draws", "3", "--jobs", "2", "--out", str(out),
    ]  # fmt: skip
    began_s = time.perf_counter()
    first_s: float | None = None
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if first_s is None and line.startswith("On the busiest"):
                first_s = time.perf_counter() - began_s
            print(line, end="", flush=True)
        code = process.wait()
    whole_s = time.perf_counter() - began_s
    cells = len(json.loads(out.read_text(encoding="utf-8"))["faults"]) if code == 0 else 0
    how = f"{cells} cells of 5 growths, 2 cards, 3 faults; {open_trace(trace).rows:,} requests"
    return [
        Figure("plan_30_cells_s", whole_s if cells == 30 else None, "s", "<= 180", how),
        Figure("plan_first_answer_s", first_s, "s", "<= 10", "process start to formula and a run"),
    ]


@dataclass(frozen=True)
class Truth:
    """One size against what days hold that the plan did not see."""

    growth: float
    found: int
    least: int
    """The least size that holds on as many unseen days as the confidence says."""
    undersized: bool
    inside: int
    """Figures of unseen days that lie in the plan's intervals, and of how many."""
    seen: int


def against_truth(folder: Path, runs: Runs) -> list[Figure]:
    """Sizes, intervals and a knee against held-out days."""
    trace = open_trace(mixed_trace(folder / "small.parquet", 600.0))
    load = workload_of(trace, folder / "small", model="qwen3-8b", rows=SMALL_ROWS)
    slo = folder / "small-slo.yaml"
    slo.write_text(SLO, encoding="utf-8")
    setting = Setting(load, load_slo(slo), load_policy("stable"), Prices())
    machine = machine_of("h100-sxm/qwen3-8b", folder / "machines")
    truths = [truth_of(machine, setting, runs, growth) for growth in CASES]
    for truth in truths:
        print(truth, flush=True)
    inside, seen = sum(t.inside for t in truths), sum(t.seen for t in truths)
    over = max(truth.found - truth.least for truth in truths)
    first = truths[0]
    knee, off = knee_error(machine, first.found, setting, runs, first.growth)
    return [
        Figure("plan_undersized", sum(truth.undersized for truth in truths), "1", "= 0",
               f"of {len(truths)} sizes, {HELD_OUT} held-out days each"),
        Figure("plan_oversized_most", over, "replicas", "<= 1", "found less the truth"),
        Figure("interval_coverage_twin_pct", 100 * inside / seen, "%", ">= 85",
               f"{seen} figures of held-out days"),
        Figure("interval_coverage_twin_most_pct", 100 * inside / seen, "%", "<= 97",
               "intervals are widened to hold the plan's own day"),
        Figure("knee_error_twin_pct", off, "%", "<= 10",
               f"{knee.multiple.text()}; median knee of {HELD_OUT // 2} held-out days"),
    ]  # fmt: skip


def truth_of(machine: Machine, setting: Setting, runs: Runs, growth: float) -> Truth:
    """Size it, then try every size around it on unseen days."""
    size = size_of(machine, setting, runs, growth)
    unseen = range(FIRST_UNSEEN, FIRST_UNSEEN + HELD_OUT)
    confidence = setting.promise.confidence

    def days(replicas: int) -> list[Outcome]:
        return runs.all([setting.cell(machine, replicas, growth, run) for run in unseen])

    holding = {
        n: sum(one.holds for one in days(n)) for n in range(max(1, size.count - 2), size.count + 3)
    }
    least = next((n for n, held_on in holding.items() if held_on >= confidence * HELD_OUT), 10**6)
    surely_less = wilson(holding[size.count], HELD_OUT)[1] < confidence
    inside, seen = coverage(size.figures, days(size.count))
    return Truth(growth, size.count, least, surely_less, inside, seen)


def coverage(figures: Sequence[Estimate], days: Sequence[Outcome]) -> tuple[int, int]:
    """How many figures of the days lie inside, and of how many."""
    inside = seen = 0
    for figure in figures:
        what, _, group = figure.name.partition("/")
        for day in days:
            one = day.groups[("class", group)]
            value = one.attainment if what == "attainment" else getattr(one, what)
            inside += figure.low <= value <= figure.high
            seen += 1
    return inside, seen


def knee_error(
    machine: Machine, replicas: int, setting: Setting, runs: Runs, known: float
) -> tuple[Knee, float]:
    """The plan's knee, and how far it lies off the median of unseen days, in per cent."""
    knee = knee_of(machine, replicas, setting, runs, known=known, curve=())
    found = []
    for first in range(FIRST_UNSEEN, FIRST_UNSEEN + HELD_OUT // 2):
        other = replace(setting, draws=1)

        def holds(multiple: float, run: int = first, own: Setting = other) -> bool:
            return runs.see(own.cell(machine, replicas, multiple, run, whole=False)).holds

        low, high = knee.multiple.value / 2, knee.multiple.value * 2
        for _ in range(5):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if holds(middle) else (low, middle)
        found.append(math.sqrt(low * high))
    return knee, 100 * abs(knee.multiple.value / median(found) - 1)


# ---- a real server ----


@dataclass(frozen=True)
class Asked:
    """A request of the live load."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def live_load(seed: int, per_s: float, duration_s: float) -> list[Asked]:
    """Poisson arrivals of short prompts and answers."""
    dice = np.random.default_rng(seed)
    out = []
    at_s = 0.0
    while (at_s := at_s + float(dice.exponential(1 / per_s))) < duration_s:
        out.append(Asked(at_s, int(dice.integers(32, 192)), int(dice.integers(8, 40))))
    return out


def live_rows(asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """The same as a trace."""
    return [
        {"arrival_s": one.at_s, "prompt_tokens": one.prompt_tokens, "sla_class": "P0",
         "output_tokens": one.output_tokens, "model": "tiny-qwen3", "endpoint": "completions"}
        for one in asked
    ]  # fmt: skip


async def ttfts(url: str, asked: Sequence[Asked], seed: int) -> list[float]:
    """Seconds to the first token of each, as the caller sees them; infinite: none came."""
    import aiohttp

    dice = np.random.default_rng(seed)
    prompts = [dice.integers(10, 3000, one.prompt_tokens).tolist() for one in asked]
    timeout = aiohttp.ClientTimeout(total=120)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began_s = time.perf_counter()

        async def ask(one: Asked, prompt: list[int]) -> float:
            await asyncio.sleep(max(0.0, began_s + one.at_s - time.perf_counter()))
            sent_s = time.perf_counter()
            body = {"model": "tiny", "prompt": prompt, "max_tokens": one.output_tokens,
                    "ignore_eos": True, "stream": True}  # fmt: skip
            first_s = math.inf
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                async for line in answer.content:
                    if math.isinf(first_s) and line.startswith(b"data: {"):
                        first_s = time.perf_counter() - sent_s
            return first_s

        return list(await asyncio.gather(*map(ask, asked, prompts)))


def live_promise() -> Promise:
    target = {"ttft_s_p95": LIVE_LIMIT_S, "attainment_percent": 95}
    raw = {"schema": 1, "tpot_s": 100.0, "classes": {"P0": target}}
    return promise_of(msgspec.convert(raw, SloFile))


def live(server: Vllm, profile: Path, folder: Path, duration_s: float = LIVE_S) -> list[Figure]:
    """The knee of one real server and the plan's intervals at several loads, in six minutes.

    The plan is made from a recorded load that no live run repeats; the server is given fresh ones.
    """
    from tests.live.server import MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

    machine = machine_of(str(profile), folder / "machines", max_num_seqs=MAX_NUM_SEQS,
                         max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS)  # fmt: skip
    recorded = write_rows(folder / "live.parquet", live_rows(live_load(1, 3.0, 10 * duration_s)))
    load = workload_of(recorded, folder / "live", model="tiny-qwen3")
    setting = Setting(load, live_promise(), load_policy("fifo"), Prices())
    with Runs(1) as runs:
        knee = knee_of(machine, 1, setting, runs, curve=())
        centre = knee.multiple.value
        p95: dict[float, list[float]] = {}
        inside = seen = 0
        for number, part in enumerate(LIVE_MULTIPLES):
            multiple = part * centre
            asked = live_load(100 + number, 3.0 * multiple, duration_s)
            got = np.array(asyncio.run(ttfts(server.url, asked, number)))
            p95.setdefault(part, []).append(float(np.quantile(got, 0.95, method="higher")))
            told = told_at(machine, setting, runs, 3.0 * multiple, duration_s, folder, number)
            real = {"ttft_s_p95": p95[part][-1], "attainment": float((got <= LIVE_LIMIT_S).mean())}
            for what, figure in told.items():
                inside += figure.low <= real[what] <= figure.high
                seen += 1
            print(f"{part:g} of the knee: {real}, told {[f.text() for f in told.values()]}")
    first, second = p95[LIVE_MULTIPLES[0]][:2]
    noise = abs(math.log(first / second))
    how = f"{seen} figures; the same load twice differs by {noise:.0%}"
    if noise > DEVIATES_MOST:
        how = f"not measured: the machine is not quiet, {how}"
    quiet = noise <= DEVIATES_MOST
    at = crossing({part: max(values) for part, values in p95.items()}, LIVE_LIMIT_S)
    off = None if at is None or not quiet else 100 * abs(1 / at - 1)
    covered = 100 * inside / seen if quiet else None
    return [
        Figure("knee_error_pct", off, "%", "<= 10", f"{knee.multiple.text()}; {how}"),
        Figure("interval_coverage_pct", covered, "%", ">= 85", how),
        Figure("interval_coverage_most_pct", covered, "%", "<= 95", how),
    ]


def told_at(
    machine: Machine, setting: Setting, runs: Runs, per_s: float, duration_s: float, folder: Path,
    number: int,
) -> dict[str, Estimate]:  # fmt: skip
    """What the plan says of a run as long as the live one, at this rate: over fresh loads of the
    same law, with drawn step times."""
    seen = []
    for run in range(6):
        asked = live_load(10_000 + 100 * number + run, per_s, duration_s)
        trace = write_rows(folder / f"told-{number}-{run}.parquet", live_rows(asked))
        load = workload_of(trace, folder / f"told-{number}-{run}", model="tiny-qwen3")
        cell = replace(setting, load=load).cell(machine, 1, 1.0, 0)
        one = runs.see(replace(cell, run=0)) if not run else runs.see(replace(cell, run=run))
        seen.append(one.groups["class", "P0"])
    return {
        "ttft_s_p95": predicted("ttft_s_p95", [s.ttft_s_p95 for s in seen], "s", "fitted"),
        "attainment": predicted("attainment", [s.attainment for s in seen], "", "fitted",
                                share=True, of=seen[0].offered),
    }  # fmt: skip


def crossing(p95: dict[float, float], limit_s: float) -> float | None:
    """The load at which p95 passes the limit, between two that were measured."""
    points = sorted(p95.items())
    for (low, before), (high, after) in pairwise(points):
        if before <= limit_s < after:
            if math.isinf(after):
                return math.sqrt(low * high)
            share = math.log(limit_s / before) / math.log(after / before)
            return low * (high / low) ** share
    return None


PARTS = ("speed", "truth", "live")


def figures(parts: Sequence[str] = PARTS) -> list[Figure]:
    """What the parts measure."""
    found: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="planning-") as name:
        folder = Path(name)
        if "speed" in parts:
            found += speed(folder)
        if "truth" in parts:
            with Runs(2) as runs:
                found += against_truth(folder, runs)
        if "live" in parts:
            from tests.live.server import measured_profile, vllm_servers

            with vllm_servers(1, "--enable-per-request-metrics",
                              "--max-num-batched-tokens", "256") as servers:  # fmt: skip
                found += live(servers[0], measured_profile(servers[0], folder), folder)
    return found


def main() -> int:
    """Measure, show, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[*PARTS])
    found = figures(parser.parse_args().parts)
    write_figures(FIGURES, found)
    show(found)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
