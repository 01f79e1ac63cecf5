"""What a recording's steps held is rebuilt exactly, whatever the load and the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.unit.test_calibrate_synthetic import COST, ENGINE, MS, Ask, Dice, Made, make
from traces.steps import Recording
from twin.calibrate.contents import Contents, read_contents

if TYPE_CHECKING:
    from twin.engine import EngineSettings

SEEDS = 60


def load(dice: Dice, engine: EngineSettings, cached: bool) -> list[Ask]:
    asks: list[Ask] = []
    at_ns = 0
    room = min(engine.max_model_len, (engine.kv_blocks - 1) * engine.block_tokens)
    for _ in range(dice.randint(1, 60)):
        at_ns += round(dice.expovariate(1.0) * dice.choice([0, 2, 20, 200]) * MS)
        outputs = dice.randint(1, max(1, min(80, room // 4)))
        prompt = dice.randint(1, max(1, min(dice.choice([40, 600, 3000]), room - outputs - 1)))
        ends_itself = dice.random() < 0.3
        asks.append(
            Ask(
                at_ns,
                dice.choice(["mixed", "check", "api"]),
                prompt,
                outputs,
                max_tokens=min(room - prompt, outputs + dice.randint(1, 9)) if ends_itself else 0,
                priority=dice.randint(0, 2),
                logprobs=dice.random() < 0.2,
                prefix=(dice.randint(1, 3), 7) if cached else (),
                prefix_block_tokens=64 if cached else 0,
            )
        )
    return asks


def check(made: Made) -> Contents:
    """Every usable step is what it truly was."""
    asked = {row["id"] for row in made.client if row["logprobs"]}
    contents = read_contents(made.recording, asked)
    truth = made.truth
    for place in np.flatnonzero(contents.usable).tolist():
        held = truth[place]
        assert contents.batch[place] == held.batch, place
        assert contents.kv_tokens[place] == held.kv_tokens, place
        assert contents.prefill_tokens[place] == held.prefill_tokens, place
        assert contents.prefill_quad[place] == held.prefill_quad, place
        assert contents.logprobs[place] == held.logprobs, place
    return contents


@pytest.mark.parametrize("seed", range(SEEDS))
def test_rebuilt_steps_are_the_true_ones(seed: int) -> None:
    dice = Dice(f"contents/{seed}")
    cached = seed % 4 == 3
    seats = dice.choice([1, 4, 16, 64])
    engine = replace(
        ENGINE,
        block_tokens=dice.choice([16, 128]),
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats + 1, dice.choice([64, 300, 2048])),
        async_scheduling=seed % 2 == 1,
        scheduling_policy=dice.choice(["fcfs", "priority"]),
        prefix_caching=cached,
    )
    made = make(load(dice, engine, cached), engine_settings=engine, noise=lambda: 1.0)
    contents = check(made)
    assert contents.usable.all(), contents.unusable
    assert contents.exact


@pytest.mark.parametrize("seed", range(20))
def test_after_a_preemption_no_wrong_step_is_taken_for_right(seed: int) -> None:
    dice = Dice(f"preempted/{seed}")
    engine = replace(
        ENGINE,
        kv_blocks=dice.choice([20, 40]),
        block_tokens=16,
        max_model_len=300,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        scheduling_policy=dice.choice(["fcfs", "priority"]),
    )
    made = make(load(dice, engine, cached=False), engine_settings=engine)
    check(made)


def test_preempted_loads_do_preempt() -> None:
    engine = replace(ENGINE, kv_blocks=20, block_tokens=16, max_model_len=300, max_num_seqs=16)
    made = make([Ask(0, "mixed", 60, 60) for _ in range(8)], engine_settings=engine)
    contents = check(made)
    assert sum(row.preemptions or 0 for row in made.recording.steps) > 0
    assert not contents.usable.all()
    assert contents.unusable["decoding requests unlike the finished ones"] > 0


@pytest.mark.parametrize("seed", range(10))
def test_a_cut_recording_loses_its_edges_only(seed: int) -> None:
    """A file that begins or ends amid traffic: what is left usable is still exact."""
    dice = Dice(f"cut/{seed}")
    made = make(load(dice, ENGINE, cached=False), cost=COST)
    steps = made.recording.steps
    begin, end = sorted(dice.sample(range(len(steps) + 1), 2))  # two places: something is left
    cut = Made(Recording(made.recording.header, steps[begin:end]), made.truth[begin:end])
    cut.client = made.client
    cut.recording.requests.extend(
        (index - begin, row) for index, row in made.recording.requests if begin <= index < end
    )
    check(cut)


def test_a_lost_request_spoils_only_the_steps_it_was_in() -> None:
    asks = [Ask(number * 400 * MS, "mixed", 100, 20) for number in range(10)]
    made = make(asks)
    whole = len(made.recording.steps)
    del made.recording.requests[4]
    contents = check(made)
    assert whole - int(contents.usable.sum()) == 20
