"""The designed load as it is planned: it fits, it covers, and it takes the time it was given."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from controller.calibration.plan import CHECK_LOADS, ROUNDS, Phase, Planner, Room, Speed
from traces.steps import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

ON_CPU = Speed(
    prefill_fixed_s=0.03, prefill_token_s=1e-4, decode_fixed_s=0.01, decode_sequence_s=4e-4
)
ON_H100 = Speed(
    prefill_fixed_s=0.02, prefill_token_s=3e-5, decode_fixed_s=7e-3, decode_sequence_s=2e-5
)


def settings(
    seqs: int = 64, budget: int = 2048, model_len: int = 8192, blocks: int = 4096, block: int = 16
) -> ServerSettings:
    return ServerSettings(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=model_len,
        kv_blocks=blocks, block_tokens=block,
    )  # fmt: skip


SERVERS = {
    "tiny on CPU": (settings(128, 2048, 8192, 4096, 128), ON_CPU),
    "little budget": (settings(64, 256, 8192, 512, 128), ON_CPU),
    "H100": (settings(1024, 8192, 40960, 30_000, 16), ON_H100),
    "little pool": (settings(256, 2048, 4096, 300, 16), ON_H100),
    "one seat": (settings(1, 512, 1024, 200, 16), ON_CPU),
    "short model": (settings(8, 4096, 128, 64, 16), ON_CPU),
}


def rounds_of(name: str, seconds: float = 66.0, seed: int = 1) -> tuple[Planner, list[list[Phase]]]:
    sizes, speed = SERVERS[name]
    planner = Planner(Room(sizes), speed, seconds / ROUNDS, Random(seed))  # noqa: S311
    return planner, [planner.round(number) for number in range(ROUNDS)]


def all_phases(rounds: list[list[Phase]]) -> Iterator[Phase]:
    for phases in rounds:
        yield from phases


@pytest.mark.parametrize("name", SERVERS)
@pytest.mark.parametrize("seconds", [18.0, 66.0])
def test_everything_that_is_sent_at_once_fits_into_the_server(name: str, seconds: float) -> None:
    sizes, _ = SERVERS[name]
    assert sizes.kv_blocks is not None
    assert sizes.block_tokens is not None
    for seed in range(5):
        for phase in all_phases(rounds_of(name, seconds, seed)[1]):
            for ask in phase.asks:
                assert ask.prompt_tokens >= 1
                assert ask.output_tokens >= 1
                assert ask.prompt_tokens + ask.output_tokens <= (sizes.max_model_len or 0)
            if phase.one_by_one or phase.name == "check":  # the caller holds these back
                continue
            assert phase.width <= (sizes.max_num_seqs or 0), phase.name
            blocks = sum(
                ask.prompts * -(-(ask.prompt_tokens + ask.output_tokens) // sizes.block_tokens)
                for ask in phase.asks
            )
            assert blocks <= sizes.kv_blocks - 1, phase.name


@pytest.mark.parametrize("name", ["tiny on CPU", "little budget", "H100"])
def test_every_kind_of_step_is_in_every_round(name: str) -> None:
    _, rounds = rounds_of(name)
    for phases in rounds:
        kinds = {phase.name.partition("-")[0] for phase in phases}
        assert kinds == {"prefill", "chunks", "decode", "mixed", "logprobs", "api", "check"}
        assert phases[-1].name == "check"
    assert [{phase.round for phase in phases} for phases in rounds] == [{1}, {2}, {3}, {4}]


def test_decode_reaches_every_power_of_two_and_the_most_that_runs() -> None:
    _, rounds = rounds_of("tiny on CPU")
    widths = {phase.width for phase in all_phases(rounds) if phase.name.startswith("decode")}
    assert widths >= {1, 2, 4, 8, 16, 32, 64, 128}
    contexts: dict[int, set[int]] = {}
    for phase in all_phases(rounds):
        if phase.name.startswith("decode"):
            _, batch, context = phase.name.split("-")
            assert phase.width == int(batch)
            (held,) = {ask.prompt_tokens for ask in phase.asks}
            assert 0.7 < held / int(context) < 1.42
            contexts.setdefault(int(batch), set()).add(held)
    for batch in (1, 2, 4, 8, 16):
        assert max(contexts[batch]) >= 3 * min(contexts[batch]), contexts[batch]


def test_prompts_alone_span_the_token_budget_and_chunks_go_beyond_it() -> None:
    _, rounds = rounds_of("little budget")
    alone: set[int] = set()
    chunked: set[int] = set()
    for phase in all_phases(rounds):
        if phase.name.startswith("prefill"):
            alone |= {ask.prompt_tokens for ask in phase.asks}
        elif phase.name.startswith("chunks"):
            chunked |= {ask.prompt_tokens for ask in phase.asks}
    assert min(alone) == 16
    assert max(alone) == 256
    assert len(alone) > 30
    assert min(chunked) > 256
    assert max(chunked) >= 2 * 256


@pytest.mark.parametrize("name", ["tiny on CPU", "little budget", "H100", "little pool"])
@pytest.mark.parametrize("seconds", [18.0, 66.0])
def test_it_takes_about_as_long_as_it_was_given(name: str, seconds: float) -> None:
    planner, rounds = rounds_of(name, seconds)
    planned_s = sum(planner.seconds(phase) for phase in all_phases(rounds))
    assert 0.5 * seconds < planned_s < 1.5 * seconds


def test_single_requests_come_in_all_four_kinds() -> None:
    _, rounds = rounds_of("H100")
    asks = [ask for phase in all_phases(rounds) if phase.name == "api" for ask in phase.asks]
    assert len(asks) == 40
    assert {(ask.output_tokens, ask.stream) for ask in asks} == {
        (1, False), (1, True), (8, False), (8, True),
    }  # fmt: skip


def test_the_held_out_load_is_higher_in_every_other_round() -> None:
    _, rounds = rounds_of("H100")
    counts = [len(phases[-1].asks) for phases in rounds]
    assert min(counts[1::2]) > max(counts[0::2])
    assert CHECK_LOADS[0] < CHECK_LOADS[1]
    for phases in rounds:
        times = [ask.at_s for ask in phases[-1].asks]
        assert times == sorted(times)


def test_another_seed_gives_other_requests_and_the_same_seed_the_same() -> None:
    assert rounds_of("H100", seed=3)[1] == rounds_of("H100", seed=3)[1]
    assert rounds_of("H100", seed=3)[1] != rounds_of("H100", seed=4)[1]
