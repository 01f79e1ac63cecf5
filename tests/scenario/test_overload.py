"""A short peak: four times the base rate for twenty seconds, on two H100s that bear two and a half.

Three classes: search completions (P0), support chats (P1), long summaries (P2). What is asserted
holds with a wide margin for every seed here: fifo keeps about a third of P0 within its time to
first token, the tiered queue all of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from policy.compose import build_policy
from policy.decisions import Settled
from policy.files import load_policy
from tests.support import ListLog, S, play_rows
from twin.fleet import fleet_of

if TYPE_CHECKING:
    from twin.world import Result

SEEDS = pytest.mark.parametrize("seed", [1, 2, 3])
LIMIT_S = {"P0": 1.5, "P1": 4.0, "P2": 10.0}
RATE = {"P0": 8.0, "P1": 5.0, "P2": 2.2}
PROMPT = {"P0": 250, "P1": 900, "P2": 7000}
OUTPUT = {"P0": 30, "P1": 250, "P2": 300}
LENGTH_S, PEAK_S = 60, (20, 40)


@dataclass(frozen=True, slots=True)
class Outcome:
    sla: list[str]
    results: list[Result]
    settled: list[Settled]
    preemptions: int

    def of(self, sla: str) -> list[Result]:
        return [result for result, own in zip(self.results, self.sla, strict=True) if own == sla]

    def attainment(self, sla: str) -> float:
        """Share of those offered whose first token came in time."""
        results = self.of(sla)
        good = [
            result
            for result in results
            if result.outcome == "answered" and ttft_s(result) <= LIMIT_S[sla]
        ]
        return len(good) / len(results)


def ttft_s(result: Result) -> float:
    return (result.first_out_ns - result.arrival_ns) / S


def peak(seed: int, factor: float) -> dict[str, Any]:
    dice = np.random.default_rng(seed)
    rows: list[tuple[float, str, int, int, int]] = []
    for sla, rate in RATE.items():
        base = dice.uniform(0, LENGTH_S, dice.poisson(rate * LENGTH_S))
        extra = dice.uniform(*PEAK_S, dice.poisson(rate * (factor - 1) * (PEAK_S[1] - PEAK_S[0])))
        for arrival in (*base, *extra):
            prompt, output = (
                int(np.clip(dice.lognormal(np.log(median), 0.5), least, most))
                for median, least, most in ((PROMPT[sla], 10, 15_000), (OUTPUT[sla], 1, 1000))
            )
            rows.append((float(arrival), sla, prompt, output, int(dice.integers(300))))
    arrival_s, slas, prompts, outputs, users = zip(*sorted(rows), strict=True)
    return {
        "arrival_s": arrival_s,
        "sla_class": slas,
        "prompt_tokens": prompts,
        "prompt_bytes": [4 * tokens for tokens in prompts],
        "output_tokens": outputs,
        "max_output_tokens": [1024] * len(rows),
        "user_id": users,
    }


@cache
def run(policy: str, seed: int, factor: float = 4.0) -> Outcome:
    rows = peak(seed, factor)
    log = ListLog()
    world, results = play_rows(
        rows, fleet_of([("h100-sxm/qwen3-8b", 2)]), build_policy(load_policy(policy)), log=log
    )
    assert world.refused == 0
    settled = [
        decision
        for _, _, decisions in log.records
        for decision in decisions
        if isinstance(decision, Settled)
    ]
    preemptions = sum(replica.engine.preemptions for replica in world.replicas)
    return Outcome(list(rows["sla_class"]), results, settled, preemptions)


@SEEDS
def test_the_load_is_a_peak_that_fifo_cannot_bear(seed: int) -> None:
    """Else the rest would show nothing. At the base rate both bear it."""
    assert run("fifo", seed).attainment("P0") < 0.55
    assert run("fifo", seed, 1.0).attainment("P0") == 1.0


@SEEDS
def test_interactive_requests_stay_within_their_time(seed: int) -> None:
    """By at least 40 points more of P0 than fifo, and nearly all of P1."""
    stable, fifo = run("stable", seed), run("fifo", seed)
    assert stable.attainment("P0") >= 0.97
    assert stable.attainment("P0") >= fifo.attainment("P0") + 0.4
    assert stable.attainment("P1") >= 0.95
    assert stable.attainment("P1") >= fifo.attainment("P1") + 0.3


@SEEDS
def test_background_requests_pay_no_more_than_fifo_would_take_from_them(seed: int) -> None:
    assert run("stable", seed).attainment("P2") >= run("fifo", seed).attainment("P2") - 0.05


@SEEDS
@pytest.mark.parametrize("policy", ["fifo", "stable", "throughput"])
def test_no_request_is_lost_or_settled_twice(policy: str, seed: int) -> None:
    outcome = run(policy, seed)
    assert len(outcome.results) == len(outcome.sla) == len(outcome.settled)
    assert len({decision.request for decision in outcome.settled}) == len(outcome.settled)


@SEEDS
def test_background_requests_do_not_starve(seed: int) -> None:
    """In every five seconds of the peak some of them get their first token."""
    firsts = [
        result.first_out_ns / S
        for result in run("stable", seed).of("P2")
        if result.first_out_ns >= 0
    ]
    for start_s in range(PEAK_S[0], PEAK_S[1], 5):
        assert sum(start_s <= at_s < start_s + 5 for at_s in firsts) >= 3


@SEEDS
def test_only_what_cannot_be_in_time_is_shed_and_it_is_told_why(seed: int) -> None:
    outcome = run("stable", seed)
    assert {decision.outcome for decision in outcome.settled} == {"answered", "shed"}
    shed = [decision for decision in outcome.settled if decision.outcome == "shed"]
    assert Counter(outcome.sla[decision.request] for decision in shed).keys() == {"P2"}
    for decision in shed:
        assert (decision.why, decision.http_code) == ("deadline", 429)
        assert S <= decision.retry_after_ns <= 30 * S
        assert decision.tier
    # Who was not shed was in time, or nearly: admitting the late helps nobody.
    for sla, limit_s in LIMIT_S.items():
        late = [
            ttft_s(r) for r in outcome.of(sla) if r.outcome == "answered" and ttft_s(r) > limit_s
        ]
        assert len(late) <= 0.1 * len(outcome.of(sla))
        assert all(value < 1.5 * limit_s for value in late)


@SEEDS
def test_nothing_is_shed_while_there_is_room(seed: int) -> None:
    outcome = run("stable", seed, 1.0)
    assert {decision.outcome for decision in outcome.settled} == {"answered"}
    assert {outcome.attainment(sla) for sla in LIMIT_S} == {1.0}


@SEEDS
def test_without_shedding_everybody_is_answered_and_nobody_waits_for_ever(seed: int) -> None:
    """Waits end soon after the backlog of the peak is worked off, as fifo's do."""
    outcome, fifo = run("throughput", seed), run("fifo", seed)
    assert {decision.outcome for decision in outcome.settled} == {"answered"}
    longest = max(ttft_s(result) for result in outcome.results)
    assert longest < 2 * max(ttft_s(result) for result in fifo.results)
    assert outcome.attainment("P0") >= fifo.attainment("P0") + 0.3


@SEEDS
def test_replicas_are_not_filled_so_far_that_they_preempt(seed: int) -> None:
    assert run("stable", seed).preemptions == 0


@SEEDS
def test_the_same_work_is_done_no_slower(seed: int) -> None:
    """Holding requests back must not idle the cards: tokens by the end of the peak."""
    tokens = {}
    for policy in ("stable", "fifo"):
        outcome = run(policy, seed)
        rows = peak(seed, 4.0)
        tokens[policy] = sum(
            prompt + output
            for result, prompt, output in zip(
                outcome.results, rows["prompt_tokens"], rows["output_tokens"], strict=True
            )
            if result.outcome == "answered" and result.settled_ns < PEAK_S[1] * S
        )
    assert tokens["stable"] > 0.9 * tokens["fifo"]
