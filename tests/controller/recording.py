"""A load played live, and the same load as the twin predicts it from the recorded trace alone."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from policy.files import load_policy
from tests.controller.asking import CHAT, Answer, ask, session
from tests.controller.processes import MODEL, PROFILE
from traces import open_trace
from twin.fleet import fleet_of
from twin.replay import ReplayOptions, replay
from twin.world import WorldSettings

if TYPE_CHECKING:
    from pathlib import Path

    from policy.cost import Profile

WORD = "keel "
NS = 1_000_000_000


@dataclass(frozen=True)
class Asking:
    """A request to come."""

    at_s: float
    document: dict[str, Any]
    headers: dict[str, str]
    path: str = CHAT


def load(
    seed: int, span_s: float, rate: float, burst: int = 0, tokens_most: int = 6000
) -> list[Asking]:
    """Requests of three classes and 24 users at random, lengths of prompts log-normal; a third
    begin with the same text. In the middle, a burst that is more than the fleet can take."""
    dice = np.random.default_rng(seed)
    system = " ".join(f"rule{number}" for number in range(300))
    times: list[float] = []
    at_s = 0.3
    while (at_s := at_s + dice.exponential(1 / rate)) < span_s:
        times.append(at_s)
    times += [span_s / 2 + 0.4 * dice.random() for _ in range(burst)]
    asked: list[Asking] = []
    for number, at_s in enumerate(sorted(times)):
        tokens = min(tokens_most, max(200, round(dice.lognormal(7.3, 0.7))))
        head = system if dice.random() < 0.33 else ""
        text = f"{head} {seed}-{number} {WORD * (tokens * 4 // len(WORD))}"
        document = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": int(dice.integers(10, 90)),
            "ignore_eos": True,
            "stream": True,
            "user": f"user{dice.integers(24)}",
        }
        sla = str(dice.choice(("P0", "P1", "P2"), p=(0.4, 0.4, 0.2)))
        asked.append(Asking(at_s, document, {"x-twinkeel-sla": sla}))
    return asked


async def play(url: str, asked: list[Asking]) -> list[Answer]:
    """Send each at its time, whatever became of those before."""
    bodies = [json.dumps(each.document).encode() for each in asked]
    async with session() as client:
        began_s = time.monotonic()
        waiting: list[asyncio.Task[Answer]] = []
        for each, body in zip(asked, bodies, strict=True):
            await asyncio.sleep(max(0.0, began_s + each.at_s - time.monotonic()))
            waiting.append(asyncio.create_task(ask(client, url, body, each.headers, each.path)))
        return list(await asyncio.gather(*waiting))


@dataclass(frozen=True)
class Comparison:
    """What was against what was predicted."""

    requests: int
    shed: int
    tier_pct: float
    """Of requests: the same tier."""
    admitted_pct: float
    """Of requests: admitted here as there, or shed here as there."""
    both_pct: float
    """Of requests: both."""
    errors_pct: dict[str, float] = field(default_factory=dict)
    """Predicted against measured, such as ``ttft_p50``."""
    told: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The same in ms: measured, predicted."""


def predict(trace: Path, folder: Path, replicas: int = 2, policy: str = "stable") -> Comparison:
    """Replay the recorded arrivals in the twin, with the network and gateway times that were seen,
    and compare request by request."""
    live = pq.read_table(trace).to_pydict()
    fleet = fleet_of([(PROFILE, replicas)])
    world = world_as_seen(live, fleet[0].profile)
    out = folder / "predicted"
    replay(
        open_trace(trace),
        fleet,
        load_policy(policy),
        ReplayOptions(world=world),
        out=out,
    )
    twin = pq.read_table(out / "requests.parquet").to_pydict()
    assert twin["request_id"] == live["request_id"]
    rows = range(len(live["request_id"]))
    tiers = [live["tier"][row] == twin["tier"][row] for row in rows]
    shed = [(live["outcome"][row] == "shed", twin["outcome"][row] == "shed") for row in rows]
    admitted = [here == there for here, there in shed]
    comparison = Comparison(
        requests=len(tiers),
        shed=sum(here for here, _ in shed),
        tier_pct=100 * float(np.mean(tiers)),
        admitted_pct=100 * float(np.mean(admitted)),
        both_pct=100 * float(np.mean([a and b for a, b in zip(tiers, admitted, strict=True)])),
    )
    for name in ("ttft", "e2e"):
        for percent in (50, 95):
            measured = _percentile(live[f"{name}_s"], percent)
            predicted = _percentile(twin[f"{name}_s"], percent)
            key = f"{name}_p{percent}"
            comparison.errors_pct[key] = 100 * abs(predicted - measured) / measured
            comparison.told[key] = (1e3 * measured, 1e3 * predicted)
    return comparison


def world_as_seen(live: dict[str, list[Any]], profile: Profile) -> WorldSettings:
    """The world around the engines with the network and gateway times of a recorded trace."""
    request_in_ns = round(profile.overheads.request_in_ns.value)
    return WorldSettings(
        gateway_ns=_entry_ns(live),
        # What the server's HTTP side takes is the profile's to know; live it is the network's.
        network_ns=max(0, _median_ns(live["network_s"]) - request_in_ns) // 2,
        scrape_every_ns=NS,
        scrape_age_ns=0,
    )


def _entry_ns(live: dict[str, list[Any]]) -> int:
    """What it takes to read a request and to send it on: of the time to first token, all that is
    neither queue, nor network, nor engine. The gateway's other work comes after the first token."""
    parts = zip(
        *(live[f"{hop}_s"] for hop in ("ttft", "queue", "schedule", "prefill", "network")),
        strict=True,
    )
    return max(0, _median_ns([ttft - sum(rest) for ttft, *rest in parts if None not in rest]))


def _median_ns(values: list[float | None]) -> int:
    known = [value for value in values if value is not None]
    return round(float(np.median(known)) * NS) if known else 0


def _percentile(values: list[float | None], percent: int) -> float:
    return float(np.percentile([value for value in values if value is not None], percent))
