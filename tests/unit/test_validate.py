"""Shares, intervals and gates of a validation, from runs as they are played."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from policy.evidence import GATES, Source
from policy.parameters import Parameters
from twin.fleet import fleet_of
from twin.scenario.spec import Replicas, Setup
from twin.validate import gates, storms
from twin.validate.expecting import EVIDENCE, HARM_RATIO, bands, expected, sample_size
from twin.validate.gates import Goals
from twin.validate.making import Asked, judged
from twin.validate.numbers import counts, difference, pairs_of, share, upper_difference
from twin.validate.playing import Played
from twin.validate.reading import Story
from twin.validate.setups import Length, Run, Stress, capacity_rps

FLEET = (Replicas(profile="h100-sxm/qwen3-8b", count=3),)
GOALS = Goals()


def setup(duration_s: float = 60) -> Setup:
    streams = Stress(FLEET, Length(60, 60))._streams({"search": 0.5})
    raw = {
        "duration_s": duration_s,
        "traffic": {"open": [{"streams": streams}]},
        "fleet": msgspec.to_builtins(FLEET),
    }
    return msgspec.convert(raw, Setup)


def played(
    side: Any, missed: list[int], *, kind: Any = "trace", seed: int = 0, offered: int = 100,
    name: str = "", fault_s: tuple[float, float] | None = None, **story: Any,
) -> Played:  # fmt: skip
    """A run whose every block of 5 s has ``offered`` P1 requests, of which some are missed."""
    rows = np.array([[0, offered, 0]] * len(missed))
    lost = np.array([[0, each, 0] for each in missed])
    made = Story(offered=rows, missed=lost, **{"ttft_s": {"P1": [0.1, 0.2] * 500}, **story})
    run = Run(name or kind, kind, setup(5 * len(missed)), Path(), fault_s)
    return Played(run, seed, side, made, {"clients": {}}, f"{kind} {seed}")


def both(ours: list[int], theirs: list[int], **more: Any) -> list[Played]:
    return [played("candidate", ours, **more), played("live", theirs, **more)]


def test_a_share_lies_in_its_interval_and_zero_is_never_certain() -> None:
    found = counts(pairs_of(both([5] * 60, [1] * 60)))
    figure = share("missed", found.candidate, found.offered, "estimated")
    assert figure.value == pytest.approx(0.05)
    assert figure.low <= 0.05 <= figure.high
    none = share("missed", found.candidate * 0, found.offered, "estimated")
    assert (none.low, none.high) == (0.0, pytest.approx(3 / 6000))


def test_a_difference_covers_the_truth_about_as_often_as_it_says() -> None:
    """Bursts that hit both sides alike do not widen it: the runs are paired."""
    generator = np.random.default_rng(3)
    held = 0
    for _ in range(40):
        common = generator.binomial(40, 0.5, 60)
        apart = generator.binomial(30, 0.1, 60)
        figure = difference(
            "d", counts(pairs_of(both(list(common + apart), list(common)))), "estimated"
        )
        held += figure.low <= 0.03 <= figure.high
        assert figure.high - figure.low < 0.03
    assert held >= 34


def test_the_margin_is_held_against_the_upper_bound() -> None:
    same = both([2] * 60, [2] * 60)
    gate = gates.not_worse(same, GOALS, "estimated")
    assert gate.holds
    assert upper_difference(counts(pairs_of(same))) == pytest.approx(3 / 6000)
    worse = gates.not_worse(both([4] * 60, [2] * 60), GOALS, "estimated")
    assert not worse.holds
    assert "recorded traces: it may miss 2.05 points more (at most 1.00" in worse.why
    few = gates.not_worse(both([0] * 2, [0] * 2), GOALS, "estimated")
    assert not few.holds
    assert "more seeds or a longer trace" in few.why


def test_stress_has_a_wider_margin_and_traces_are_a_must() -> None:
    traces = both([0] * 60, [0] * 60)
    assert gates.not_worse(
        [*traces, *both([4] * 60, [0] * 60, kind="overload")], GOALS, "estimated"
    ).holds
    gate = gates.not_worse(
        [*traces, *both([9] * 60, [0] * 60, kind="long_prompts")], GOALS, "estimated"
    )
    assert not gate.holds
    assert gate.why.startswith("long prompts: ")
    assert not gates.not_worse(both([0], [0], kind="overload"), GOALS, "estimated").holds


def test_the_slo_gate_names_the_class_and_the_live_policy() -> None:
    assert gates.slo(both([5] * 20, [0] * 20), GOALS, "estimated").holds
    gate = gates.slo(both([6] * 20, [1] * 20), GOALS, "estimated")
    assert not gate.holds
    assert "P1: 94 % of its requests in time (the live policy: 99 %)" in gate.why


def fault(ours: list[int], theirs: list[int], **story: Any) -> list[Played]:
    return both(ours, theirs, kind="fault", name="fault gpu_lost", fault_s=(10.0, 20.0), **story)


def test_recovery_is_timed_from_the_faults_end() -> None:
    quick = [0, 0, 50, 50, 40, 0, 0, 0, 0, 0, 0, 0]
    slow = [0, 0, 50, 50, 50, 50, 50, 50, 50, 50, 0, 0]
    gate = gates.faults(fault(quick, quick), GOALS, "estimated")
    assert gate.holds
    assert gate.figures[0].value == 5.0
    gate = gates.faults(fault(slow, quick), GOALS, "estimated")
    assert not gate.holds
    assert "fault gpu_lost: back to 90 % of before only 30 s after its end" in gate.why
    assert gates.faults(fault(slow, slow), GOALS, "estimated").holds, "the live one is no faster"
    lost = gates.faults(fault(quick, quick, open_at_end=2), GOALS, "estimated")
    assert not lost.holds
    assert "2 requests had no outcome" in lost.why


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (Source("profile", "p", "", "untuned", 3.0), "never fitted"),
        (Source("profile", "p", "", "fitted", None), "does not say how far it is off"),
        (Source("profile", "p", "", "fitted", 15.1), "off by 15.1 %"),
        (Source("profile", "p", "", "fitted", 3.0, 31.0), "31 days old"),
    ],
)
def test_a_profile_that_is_not_good_enough(source: Source, sentence: str) -> None:
    gate = gates.profile([source], ())
    assert not gate.holds
    assert sentence in gate.why


def test_a_profile_that_is_good_enough_unless_it_drifts() -> None:
    fine = Source("profile", "p", "", "fitted", 3.0, 2.0)
    assert gates.profile([fine], ()).holds
    assert "p drifts" in gates.profile([fine], ("p",)).why


def test_determinism_takes_the_same_hash_and_the_same_replay() -> None:
    once = both([0], [0])
    assert gates.determinism(once, [played("candidate", [0])]).holds
    other = replace(once[0], log_hash="other")
    assert "gave two decision logs" in gates.determinism(once, [other]).why
    differs = replace(once[0], difference="segment 0, record 7, at 12 ns")
    gate = gates.determinism([differs], [])
    assert "decides otherwise at segment 0, record 7" in gate.why


def test_an_invariant_is_told_with_its_run() -> None:
    runs = both([0], [0], seed=3)
    assert gates.invariants(runs).holds
    runs[0].story.broken.append("request 7 is settled twice")
    gate = gates.invariants(runs)
    assert not gate.holds
    assert gate.why == "an invariant was broken in trace, seed 3: request 7 is settled twice"


def test_the_hint_of_a_verification_storm_is_computed_from_the_scores() -> None:
    scores = Counter({200: 10, 500: 20, 800: 70})
    run = played("candidate", [0], kind="doubt", tokens=50, second_tokens=50, scores=scores)
    gate = storms.verification_storm([run], Parameters(), "estimated")
    assert not gate.holds
    assert "second runs took 50% of what the replicas computed" in gate.why
    assert "budget_permille to 250 or less (it is 50)" in gate.why
    assert "verify_below_permille below 500 (it is 650)" in gate.why


def test_sample_sizes_fall_with_misses_and_rise_with_bursts() -> None:
    base = sample_size(0.01, 1.0, 0.05)
    assert sample_size(0.02, 1.0, 0.05) == pytest.approx(base / 2, rel=0.1)
    assert sample_size(0.01, 0.5, 0.05) == pytest.approx(2 * base, rel=0.01)
    assert sample_size(0.01, 1.0, 0.2) != base


def test_a_sample_of_that_size_finds_five_times_the_misses_four_times_in_five() -> None:
    """The bet that the formula is about, played."""
    generator = np.random.default_rng(5)
    miss, share_ = 0.01, 0.05
    size = sample_size(miss, 1.0, share_)
    wrong = HARM_RATIO * miss
    q = wrong * share_ / (wrong * share_ + miss * (1 - share_))
    found = 0
    for _ in range(400):
        hurt = generator.binomial(size, wrong)
        others = generator.binomial(round(size * (1 - share_) / share_), miss)
        order = generator.permutation([True] * hurt + [False] * others)
        wealth = np.cumsum(np.where(order, np.log(q / share_), np.log((1 - q) / (1 - share_))))
        found += bool(wealth.max(initial=0) >= np.log(EVIDENCE))
    assert 0.72 <= found / 400 <= 0.95


def test_the_band_holds_what_the_twin_saw() -> None:
    runs = both([1, 2, 3, 2] * 30, [2] * 120)
    said = expected(runs, 100, 4.0, "estimated")
    miss, ttft = said.band
    assert (miss.figure, ttft.figure) == ("slo_miss_share", "ttft_s_p95/P1")
    assert miss.low <= 0.02 <= miss.high < 0.1
    assert ttft.low < 0.2 < ttft.high
    assert said.effect.low <= 0.0 <= said.effect.high
    assert bands([], 0.05, 0.1) == ()


def test_stress_is_scaled_to_the_card_and_has_every_kind_of_fault() -> None:
    rates = []
    for profile in ("h100-sxm/qwen3-8b", "h100-sxm/llama-3.1-70b@tp4"):
        spec = fleet_of([(profile, 1)])[0]
        rates.append(capacity_rps(spec, 400, 40))
        assert rates[-1] > 3 * capacity_rps(spec, 1200, 200) > 0
    assert rates[0] > 2 * rates[1]
    runs = Stress(FLEET, Length(60, 40)).runs()
    kinds = [run.setup.faults[0].__struct_config__.tag for run in runs if run.kind == "fault"]
    assert len(set(kinds)) == len(kinds) == 14
    assert all(run.setup.fleet[0].count == 2 for run in runs)


def test_every_gate_that_a_controller_asks_for_is_made() -> None:
    asked = Asked(
        "c", Parameters(), "l", Parameters(), Parameters(), (), FLEET, GOALS
    )  # fmt: skip
    made = judged(asked, both([0] * 60, [0] * 60), [], (), "estimated")
    assert tuple(gate.name for gate in made) == GATES
