"""``Engine.outputs_at`` against a count kept beside the engine, step by step."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from tests.support import engine_settings, flat_cost
from twin.engine import Engine, Sequence, StepRecord

if TYPE_CHECKING:
    from policy.cost import StepCost
    from twin.engine import EngineSettings

BOTH = pytest.mark.parametrize("lag", [False, True], ids=["sync", "async"])


class Counted:
    """A stepping engine, and its outputs counted from what each step scheduled."""

    def __init__(self, settings: EngineSettings, cost: StepCost) -> None:
        self.engine = Engine(settings, cost, skip=False, on_step=self._note)
        self.seqs: dict[int, Sequence] = {}
        self._steps: list[list[int]] = []
        """Who gets a token of each step."""
        self._computed: dict[int, int] = {}
        self._outputs: dict[int, int] = {}
        self.ever_preempted: set[int] = set()

    def _note(self, record: StepRecord) -> None:
        for id in record.preempted:
            self._computed[id] = 0
            self.ever_preempted.add(id)
        out = []
        for id, tokens in record.scheduled:
            seq = self.seqs[id]
            known = seq.prompt_tokens + self._outputs.get(id, 0)
            self._computed[id] = self._computed.get(id, 0) + tokens
            if self._computed[id] >= known:
                self._outputs[id] = self._outputs.get(id, 0) + 1
                out.append(id)
        self._steps[-1] = out

    def wake(self, now_ns: int) -> None:
        self._steps.append([])  # what an idle engine decides is not recorded
        self.engine.wake(now_ns)

    def ended(self, lag: bool) -> dict[int, int]:
        """Outputs by id of the steps that have ended at the wake just taken."""
        counts = dict.fromkeys(self.seqs, 0)
        for out in self._steps[: len(self._steps) - 1 - lag]:
            for id in out:
                counts[id] = min(counts[id] + 1, self.seqs[id].outputs)
        return counts


def jobs(random: Random, count: int) -> list[tuple[int, int, int, int]]:
    """(when, prompt, output, limit)"""
    out = []
    at_ns = 0
    for _ in range(count):
        at_ns += random.choice([0, 300, 1700, 9000, 30_000])
        output = random.choice([1, 2, 5, 17, 40])
        out.append((at_ns, random.randint(1, 150), output, random.choice([0, output, 90])))
    return out


def submit_all(engine: Engine, work: list[tuple[int, int, int, int]]) -> dict[int, Sequence]:
    seqs = {}
    for id, (at_ns, prompt, output, limit) in enumerate(work):
        seqs[id] = Sequence(id, prompt, output, limit)
        engine.submit(seqs[id], at_ns)
    return seqs


def compare(settings: EngineSettings, seed: int) -> tuple[int, int]:
    """How many counts were compared, and how many of them were of tokens in flight."""
    lag = settings.async_scheduling
    work = jobs(Random(seed), 12)  # noqa: S311 - a workload
    cost = flat_cost(1000)
    counted = Counted(settings, cost)
    counted.seqs = submit_all(counted.engine, work)
    skipping = Engine(settings, cost)
    twins = submit_all(skipping, work)
    compared = early = 0
    while (wake_ns := counted.engine.next_wake_ns) is not None:
        counted.wake(wake_ns)
        while skipping.next_wake_ns is not None and skipping.next_wake_ns <= wake_ns:
            skipping.wake(skipping.next_wake_ns)
        if counted.engine.next_wake_ns is None:
            break
        ids = list(counted.seqs)
        stepped = counted.engine.outputs_at(counted.seqs.values(), wake_ns)
        skipped = skipping.outputs_at(twins.values(), wake_ns)
        assert skipped == stepped
        truth = counted.ended(lag)
        for id, count in zip(ids, stepped, strict=True):
            compared += 1
            if id in counted.ever_preempted and count == truth[id] + 1:
                early += 1
            else:
                assert count == truth[id], (wake_ns, id)
    return compared, early


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_tokens_count_from_the_end_of_their_step(lag: bool, seed: int) -> None:
    settings = engine_settings(async_scheduling=lag, prefix_caching=False, kv_blocks=2000)
    compared, early = compare(settings, seed)
    assert compared > 200
    assert not early


@BOTH
@pytest.mark.parametrize("seed", range(8))
def test_after_a_preemption_at_most_the_token_in_flight_counts_early(lag: bool, seed: int) -> None:
    settings = engine_settings(async_scheduling=lag, prefix_caching=False, kv_blocks=60)
    compared, early = compare(settings, seed)
    assert early <= compared // 20
    assert lag or not early


def test_between_two_wakes_of_a_skipping_engine_tokens_come_one_a_step() -> None:
    engine = Engine(engine_settings(async_scheduling=False), flat_cost(1000))
    seq = Sequence(1, 8, 10, 10)
    engine.submit(seq, 0)
    while engine.next_wake_ns is not None and engine.next_wake_ns < 2000:
        engine.wake(engine.next_wake_ns)
    counts = [engine.outputs_at([seq], at_ns)[0] for at_ns in (1000, 1001, 2000, 2001, 5500)]
    assert counts == [0, 1, 1, 2, 5]
