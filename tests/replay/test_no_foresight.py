"""The policy sees nothing that a gateway could not know: not the true lengths, not the cache.

A trace is changed in what only the engine finds out, and every decision up to the first event that
could tell must stay the same.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from policy.compose import build_policy
from policy.events import Arrived, Finished, FirstToken, Scraped
from policy.files import load_policy
from tests.support import ListLog, play_rows
from twin.fleet import fleet_of
from twin.world import WorldSettings

if TYPE_CHECKING:
    from policy.decisions import Decision
    from policy.events import Event

POLICIES = pytest.mark.parametrize("policy", ["fifo", "stable"])
COUNT = 250
REPLICAS = 3
QUIET = WorldSettings(scrape_every_ns=0, sample_every_ns=0)

Columns = dict[str, Any]
Record = tuple[int, "Event", tuple["Decision", ...]]


def columns(seed: int) -> Columns:
    """All within half a second, so that much is decided before the first answer."""
    dice = np.random.default_rng(seed)
    prompts = dice.integers(200, 3000, COUNT)
    return {
        "arrival_s": np.sort(dice.uniform(0, 0.5, COUNT)),
        "prompt_tokens": prompts,
        "prompt_bytes": 4 * prompts,
        "output_tokens": dice.integers(100, 200, COUNT),
        "max_output_tokens": np.full(COUNT, 400),
        "user_id": dice.integers(0, 20, COUNT),
        "sla_class": [f"P{number}" for number in dice.integers(0, 3, COUNT)],
        "business_line": ["search"] * COUNT,
        "prefix_block_tokens": np.full(COUNT, 64),
        "prefix_ids": [[int(number)] * 2 for number in dice.integers(0, 5, COUNT)],
    }


def decided(rows: Columns, policy: str, settings: WorldSettings = QUIET) -> list[Record]:
    log = ListLog()
    fleet = fleet_of([("h100-sxm/qwen3-8b", REPLICAS)], kv_blocks_given=1500, max_model_len=20_000)
    play_rows(rows, fleet, build_policy(load_policy(policy)), log=log, settings=settings)
    return log.records


def until(records: list[Record], kind: type[Event]) -> list[Record]:
    at = next(place for place, (_, event, _) in enumerate(records) if isinstance(event, kind))
    return records[:at]


@POLICIES
@pytest.mark.parametrize("seed", [1, 2])
def test_output_lengths_do_not_show_before_the_first_answer(policy: str, seed: int) -> None:
    rows = columns(seed)
    other = {**rows, "output_tokens": 399 - rows["output_tokens"]}
    before, after = (until(decided(each, policy), Finished) for each in (rows, other))
    shorter = min(len(before), len(after))
    assert before[:shorter] == after[:shorter]
    assert shorter > COUNT  # first tokens came, too
    assert sum(bool(decisions) for _, _, decisions in before[:shorter]) > COUNT / 10


@POLICIES
@pytest.mark.parametrize("seed", [1, 2])
def test_true_prompt_lengths_do_not_show_before_the_first_token(policy: str, seed: int) -> None:
    """The bytes stay as they are: only the tokenizer would know."""
    rows = columns(seed)
    other = {**rows, "prompt_tokens": rows["prompt_tokens"] // 2 + 1}
    before, after = (until(decided(each, policy), FirstToken) for each in (rows, other))
    shorter = min(len(before), len(after))
    assert before[:shorter] == after[:shorter]
    assert shorter > 5
    assert any(decisions for _, _, decisions in before[:shorter])


@POLICIES
def test_they_do_show_afterwards(policy: str) -> None:
    """Else the tests above could not fail."""
    rows = columns(1)
    other = {**rows, "output_tokens": 399 - rows["output_tokens"]}
    assert decided(rows, policy) != decided(other, policy)


@POLICIES
def test_no_arrival_tells_more_whatever_the_trace_holds(policy: str) -> None:
    """What was observed when the trace was recorded is not for the policy's eyes either."""
    rows = columns(3)
    seen = {
        **rows,
        "output_tokens": 399 - rows["output_tokens"],
        "prompt_tokens": rows["prompt_tokens"] // 2 + 1,
        "reasoning_tokens": np.arange(COUNT),
        "ttft_s": np.linspace(0, 1, COUNT),
        "e2e_s": np.linspace(1, 2, COUNT),
        "outcome": ["failed"] * COUNT,
        "tier": ["turbo"] * COUNT,
        "replica": ["1"] * COUNT,
        "confidence": np.linspace(0, 1, COUNT),
        "retries": np.ones(COUNT, int),
    }
    plain, told = (
        [
            (now_ns, event)
            for now_ns, event, _ in decided(each, policy)
            if isinstance(event, Arrived)
        ]
        for each in (rows, seen)
    )
    assert plain == told
    assert len(plain) == COUNT


def test_an_arrival_has_no_field_for_what_a_gateway_cannot_know() -> None:
    """A new field must be added here too, by someone who asks how a gateway would know it."""
    fields = {field.name for field in msgspec.structs.fields(Arrived)}
    assert fields == {
        "request", "model", "endpoint", "prompt_bytes", "max_tokens", "sla", "line", "user",
        "session", "deadline_ns", "messages", "stream", "prefix", "prefix_block_bytes",
        "chain", "step", "resume",
    }  # fmt: skip


def test_metrics_are_not_younger_than_they_say() -> None:
    """A scrape tells of the engine as it was: work that came after it was written is not in it."""
    rows = columns(1)
    young = replace(QUIET, scrape_every_ns=100_000_000, scrape_age_ns=50_000_000)
    old = replace(young, scrape_age_ns=90_000_000)
    told = [
        [
            (now_ns - event.age_ns, event.replica, event.running, event.waiting)
            for now_ns, event, _ in decided(rows, "fifo", settings)
            if isinstance(event, Scraped)
        ]
        for settings in (young, old)
    ]
    assert sorted(told[0]) == sorted(told[1])
    assert any(waiting for _, _, _, waiting in told[0])
