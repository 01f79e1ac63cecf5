"""Intervals of a replay's figures: what is drawn, what they cover, which end is the worse."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from policy.cost import Padding, StepCost, TokenPadding, Trust, Uncertainty
from policy.files import load_policy, load_profile
from tests.support import bare_fleet, engine_settings, flat_cost, write_rows
from twin.fleet import cut, fleet_of
from twin.intervals import (
    Interval,
    UncertaintyError,
    figures_of,
    intervals_around,
    pessimistic,
    worse_end,
)
from twin.replay import Replay, ReplayOptions, replay
from twin.report.figures import duration_rows, group_of, names_in, overall_rows
from twin.summary import Summary
from twin.uncertainty import (
    _played,
    drawn_fleet,
    drawn_seed,
    errors_of,
    perturbed,
    uncertain_replay,
)

if TYPE_CHECKING:
    from pathlib import Path

    from policy.cost import Profile
    from traces import Trace
    from twin.fleet import ReplicaSpec

FIFO = load_policy("fifo")
H100 = load_profile("h100-sxm/qwen3-8b")
NAMES = ("decode_fixed_ns", "prefill_per_quad_ns", "request_in_ns")
SD_NS = np.array([5e5, 0.02, 2e6])
CORRELATION = np.array([[1, -0.8, 0.3], [-0.8, 1, 0.1], [0.3, 0.1, 1]])


def uncertain(
    names: tuple[str, ...], covariance: Any, percent: float = 0.0, base: Profile = H100
) -> Profile:
    """A profile whose errors are these and no others."""
    rows = tuple(tuple(float(value) for value in row) for row in covariance)
    known = Uncertainty(names, rows, percent)
    trust = msgspec.structs.replace(base.trust, uncertainty=known)
    return msgspec.structs.replace(without_intervals(base), trust=trust)


def without_intervals(profile: Profile) -> Profile:
    sections = {
        section: msgspec.structs.replace(
            getattr(profile, section),
            **{
                name: msgspec.structs.replace(value, interval=None)
                for name, value in coefficients(profile).items()
                if hasattr(getattr(profile, section), name)
            },
        )
        for section in ("step", "overheads")
    }
    return msgspec.structs.replace(profile, **sections)


def coefficients(profile: Profile) -> dict[str, Any]:
    sections = (profile.step, profile.overheads)
    return {
        name: getattr(section, name)
        for section in sections
        for name in section.__struct_fields__
        if hasattr(getattr(section, name), "interval")
    }


def values(profile: Profile) -> dict[str, float]:
    return {name: coefficient.value for name, coefficient in coefficients(profile).items()}


def draws(profile: Profile, count: int) -> list[dict[str, float]]:
    generator = np.random.default_rng(5)
    return [values(perturbed(profile, generator)) for _ in range(count)]


# ---- drawing a profile ----


def test_what_is_drawn_has_the_covariance_of_the_fit() -> None:
    """Variances of a fixed time and of a quadratic term are fifteen decades apart."""
    profile = uncertain(NAMES, np.outer(SD_NS, SD_NS) * CORRELATION)
    drawn = draws(profile, 6000)
    table = np.array([[row[name] for name in NAMES] for row in drawn])
    means = np.array([values(profile)[name] for name in NAMES])
    assert table.mean(axis=0) == pytest.approx(means, rel=0.005)
    assert table.std(axis=0) == pytest.approx(SD_NS, rel=0.04)
    assert np.corrcoef(table.T) == pytest.approx(CORRELATION, abs=0.04)
    others = [name for name in values(profile) if name not in NAMES]
    assert others
    assert all(row[name] == values(profile)[name] for row in drawn for name in others)


def test_nothing_is_drawn_below_zero() -> None:
    wide = H100.step.decode_fixed_ns.value
    drawn = draws(uncertain(("decode_fixed_ns",), [[wide**2]]), 2000)
    fixed = [row["decode_fixed_ns"] for row in drawn]
    assert min(fixed) == 0.0
    assert sum(value == 0 for value in fixed) / 2000 == pytest.approx(0.159, abs=0.03)


def test_intervals_alone_are_drawn_each_for_itself() -> None:
    drawn = draws(H100, 6000)
    low, high = H100.step.decode_fixed_ns.interval or (0.0, 0.0)
    fixed = np.array([row["decode_fixed_ns"] for row in drawn])
    tokens = np.array([row["prefill_per_token_ns"] for row in drawn])
    assert fixed.std() == pytest.approx((high - low) / 3.92, rel=0.04)
    assert fixed.mean() == pytest.approx(H100.step.decode_fixed_ns.value, rel=0.001)
    assert abs(np.corrcoef(fixed, tokens)[0, 1]) < 0.05


def test_the_covariance_goes_before_an_interval() -> None:
    known = Uncertainty(("decode_fixed_ns",), ((4.0,),))
    profile = msgspec.structs.replace(
        H100, trust=msgspec.structs.replace(H100.trust, uncertainty=known)
    )
    errors = errors_of(profile)
    assert "decode_fixed_ns" not in errors.alone_sd_ns
    assert "prefill_fixed_ns" in errors.alone_sd_ns
    fixed = [row["decode_fixed_ns"] for row in draws(profile, 1000)]
    assert np.std(fixed) == pytest.approx(2.0, rel=0.1)


def test_what_is_drawn_has_no_interval_any_more() -> None:
    fresh = perturbed(H100, np.random.default_rng(0))
    assert all(value.interval is None for value in coefficients(fresh).values())
    assert fresh.name == H100.name
    assert fresh.engine == H100.engine


def test_one_factor_goes_over_all_times_from_run_to_run() -> None:
    step = msgspec.structs.replace(
        H100.step,
        batch_padding=(Padding(8, 1000.0),),
        token_padding=(TokenPadding(64, -500.0), TokenPadding(4096, 3000.0)),
    )
    base = msgspec.structs.replace(H100, step=step)
    profile = uncertain((), [], percent=20.0, base=base)
    generator = np.random.default_rng(1)
    factors = []
    for _ in range(3000):
        fresh = perturbed(profile, generator)
        before, after = values(profile), values(fresh)
        ratios = [after[name] / before[name] for name in before if before[name]]
        ratios.append(fresh.step.batch_padding[0].extra_ns / 1000)
        extra_ns = [row.extra_ns / ratios[-1] for row in fresh.step.token_padding]
        assert extra_ns == pytest.approx([-500.0, 3000.0])
        assert max(ratios) == pytest.approx(min(ratios), rel=1e-9)
        factors.append(ratios[0])
    assert np.std(factors) == pytest.approx(0.2, rel=0.08)
    assert np.median(factors) == pytest.approx(1.0, abs=0.02)


def test_what_no_error_is_known_of_is_named() -> None:
    errors = errors_of(H100)
    assert set(errors.not_covered) == {
        "host_per_step_ns", "host_per_sequence_ns", "logprobs_per_sequence_ns", "request_in_ns",
        "request_out_ns", "token_out_ns", "prefill_free_tokens", "mixed_free_tokens",
    }  # fmt: skip
    assert "prefill_per_quad_ns" in errors.text()
    assert "request_in_ns" not in errors_of(uncertain(NAMES, np.diag(SD_NS**2))).not_covered
    nothing = errors_of(without_intervals(H100))
    assert nothing.text() == "nothing: no error is known of any coefficient"
    assert "decode_fixed_ns" in nothing.not_covered


def test_coefficients_that_go_together_wholly_are_drawn_so() -> None:
    profile = uncertain(NAMES[:2], [[4.0, -0.02], [-0.02, 1e-4]])
    before = values(profile)
    for row in draws(profile, 50):
        fixed = row["decode_fixed_ns"] - before["decode_fixed_ns"]
        quad = row["prefill_per_quad_ns"] - before["prefill_per_quad_ns"]
        assert quad == pytest.approx(-0.005 * fixed, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(
    ("covariance", "row"),
    [
        ([[1.0, 2.0, 0.0], [2.0, 1.0, 0.0], [0.0, 0.0, 1.0]], "row 2"),
        ([[1.0, 0.9, 0.9], [0.9, 1.0, 0.0], [0.9, 0.0, 1.0]], "row 3"),
        ([[0.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]], "row 1"),
    ],
)
def test_a_covariance_that_is_none_is_refused(covariance: Any, row: str) -> None:
    with pytest.raises(UncertaintyError, match=row) as caught:
        perturbed(uncertain(NAMES, covariance), np.random.default_rng(0))
    assert "h100-sxm/qwen3-8b" in str(caught.value)


def test_a_fixed_part_is_not_drawn_below_what_the_paddings_take_off_it() -> None:
    """Such a step would take less than no time."""
    fixed_ns = H100.step.decode_fixed_ns.value
    step = msgspec.structs.replace(
        H100.step,
        batch_padding=(Padding(8, -0.3 * fixed_ns),),
        token_padding=(TokenPadding(64, -0.2 * fixed_ns),),
    )
    wide = uncertain(
        ("decode_fixed_ns", "prefill_fixed_ns"), np.eye(2) * fixed_ns**2, 3.0,
        msgspec.structs.replace(H100, step=step),
    )  # fmt: skip
    drawn = draws(wide, 400)
    assert min(row["decode_fixed_ns"] for row in drawn) == pytest.approx(0.5 * fixed_ns, rel=0.1)
    assert min(row["prefill_fixed_ns"] for row in drawn) == pytest.approx(0.2 * fixed_ns, rel=0.1)


# ---- drawing a fleet ----


def test_replicas_of_a_profile_share_its_draw_and_profiles_do_not() -> None:
    fleet = fleet_of([("h100-sxm/qwen3-8b", 3), ("h100-sxm/llama-3.1-8b", 1)])
    drawn = drawn_fleet(fleet, seed=0, run=1)
    assert len({spec.cost for spec in drawn}) == 2
    assert all(old.cost != new.cost for old, new in zip(fleet, drawn, strict=True))
    assert all(StepCost.from_profile(spec.profile) == spec.cost for spec in drawn)
    assert [spec.name for spec in drawn] == [spec.name for spec in fleet]


def test_a_draw_hangs_on_seed_run_and_profile_only() -> None:
    alone = fleet_of([("h100-sxm/qwen3-8b", 1)])
    among = fleet_of([("h100-sxm/llama-3.1-8b", 2), ("h100-sxm/qwen3-8b", 1)])
    assert drawn_fleet(alone, 0, 1)[0].cost == drawn_fleet(among, 0, 1)[2].cost
    costs = {drawn_fleet(alone, seed, run)[0].cost for seed in (0, 1, -1) for run in (1, 2, 3)}
    assert len(costs) == 9
    assert len({drawn_seed(seed, run) for seed in (0, 1, -1) for run in (1, 2, 3)}) == 9


def test_the_policy_is_told_the_profile_as_it_is_written() -> None:
    fleet = fleet_of([("h100-sxm/qwen3-8b", 1)])
    drawn = drawn_fleet(fleet, 0, 1)
    assert drawn[0].up() == fleet[0].up()
    assert drawn[0].up("v2") == fleet[0].up("v2")


def test_a_slice_of_a_card_is_drawn_as_a_slice() -> None:
    whole = fleet_of([("h100-sxm/qwen3-8b", 1)])
    small = cut(whole[0], ["4g"])
    expected = cut(drawn_fleet(whole, 0, 1)[0], ["4g"])[0].cost
    assert drawn_fleet(small, 0, 1)[0].cost == expected != small[0].cost


def test_step_times_that_are_not_the_profiles_are_refused() -> None:
    with pytest.raises(UncertaintyError, match="not those of profile"):
        drawn_fleet(bare_fleet(1, engine_settings(), flat_cost()), 0, 1)


# ---- intervals ----


def test_the_ends_are_ranks_that_ninety_percent_lie_between() -> None:
    def around(runs: int) -> Interval:
        drawn = [{"span_s": float(number)} for number in range(1, runs + 1)]
        return intervals_around({"span_s": runs / 2}, drawn)["span_s"]

    assert around(19) == Interval(1, 19, 19)
    assert around(20) == Interval(1, 20, 20)
    assert around(39) == Interval(2, 38, 39)
    assert around(100) == Interval(5, 96, 100)


def test_an_interval_holds_the_runs_own_figure() -> None:
    drawn = [{"span_s": 5.0}] * 19
    assert intervals_around({"span_s": 7.0}, drawn)["span_s"] == Interval(5.0, 7.0, 19)


def test_a_count_that_is_missing_is_nought_and_a_duration_is_left_out() -> None:
    drawn = [*([{"shed_or_failed.shed: late": 3.0, "by_tier.lent.ttft_s_p95": 2.0}] * 19), {}]
    found = intervals_around({}, drawn)
    assert found["shed_or_failed.shed: late"] == Interval(0.0, 3.0, 20)
    assert found["by_tier.lent.ttft_s_p95"] == Interval(2.0, 2.0, 19)


def test_a_figure_that_few_runs_have_gets_no_interval() -> None:
    """The range of 18 holds the next one less often than nine times in ten."""
    drawn = [*({"by_tier.lent.ttft_s_p95": float(run)} for run in range(18)), {}, {}]
    assert intervals_around({"by_tier.lent.ttft_s_p95": 3.0}, drawn) == {}


@pytest.mark.parametrize(
    ("name", "worse"),
    [
        ("all.ttft_s_p95", 2.0),
        ("by_sla.P0.tpot_s_p99", 2.0),
        ("by_line.a.b.slo_attainment", 1.0),
        ("all.goodput_per_s", 1.0),
        ("all.shed", 2.0),
        ("shed_or_failed.shed: no room.", 2.0),
        ("usd_per_million_good_tokens", 2.0),
        ("gpu_busy_share.12", 2.0),
        ("verification.match", 1.0),
        ("verification.mismatch", 2.0),
    ],
)
def test_the_pessimistic_end(name: str, worse: float) -> None:
    assert pessimistic(Interval(1.0, 2.0, 20), name) == worse


def test_a_figure_without_a_rule_is_an_error() -> None:
    with pytest.raises(UncertaintyError, match=r"all\.luck"):
        pessimistic(Interval(1.0, 2.0, 20), "all.luck")


# ---- whole replays ----


def trace_of(tmp_path: Path, rows: int = 60, every_s: float = 0.05) -> Trace:
    return write_rows(
        tmp_path / "in.parquet",
        [
            {
                "arrival_s": every_s * row,
                "prompt_tokens": 300 + 40 * (row % 7),
                "output_tokens": 5 + row % 9,
                "sla_class": f"P{row % 3}",
                "business_line": "support",
            }
            for row in range(rows)
        ],
    )


def played(trace: Trace, **options: Any) -> Replay:
    fleet = fleet_of([("h100-sxm/qwen3-8b", 1)])
    return replay(trace, fleet, FIFO, ReplayOptions(**options), policy_name="fifo")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    trace = trace_of(tmp_path_factory.mktemp("uncertain"))
    return uncertain_replay(played(trace), trace, FIFO, runs=19, jobs=1)


def test_the_runs_own_figures_stay_what_they_are(run: Replay, tmp_path: Path) -> None:
    before = played(trace_of(tmp_path)).figures()
    after = run.figures()
    said = after.pop("uncertainty")
    for name in ("wall_s", "cpu_s", "peak_mib"):
        del before[name], after[name]
    assert after == before
    ttft = said["intervals"]["all.ttft_s_p95"]
    assert ttft["value"] == after["all"]["ttft_s_p95"]
    assert ttft["low"] < ttft["value"] < ttft["high"] == ttft["pessimistic"]
    assert said["runs"] == 19
    assert "token_out_ns" in said["not_covered"]["h100-sxm/qwen3-8b"]
    json.dumps(said, allow_nan=False)


def test_the_number_of_processes_changes_nothing(run: Replay, tmp_path: Path) -> None:
    trace = trace_of(tmp_path)
    told: list[None] = []
    again = uncertain_replay(
        played(trace), trace, FIFO, runs=19, jobs=2, progress=lambda: told.append(None)
    )
    assert len(told) == 19
    assert again.intervals is not None
    assert run.intervals is not None
    assert again.intervals.by_figure == run.intervals.by_figure


def test_a_process_that_is_ended_from_outside_is_told(tmp_path: Path) -> None:
    dying: Any = SimpleNamespace(play=os._exit)
    with pytest.raises(UncertaintyError, match="fewer with --jobs"):
        list(_played(dying, 19, 2))


def test_another_seed_draws_other_runs(run: Replay, tmp_path: Path) -> None:
    trace = trace_of(tmp_path)
    other = uncertain_replay(played(trace, seed=1), trace, FIFO, runs=19, jobs=1)
    assert other.intervals is not None
    assert run.intervals is not None
    one, another = (
        found.by_figure["all.ttft_s_mean"] for found in (run.intervals, other.intervals)
    )
    assert one != another


def test_each_run_has_a_seed_of_its_own(tmp_path: Path) -> None:
    """Which rows are left of a thinned trace hangs on the seed, whatever the profile."""
    trace = trace_of(tmp_path)
    fleet = fleet_of([("cpu/tiny-qwen3", 1)])
    sure = without_intervals(fleet[0].profile)
    trust = Trust(status="fitted", fitted_on="nothing")
    sure = msgspec.structs.replace(sure, trust=trust)
    fleet = [replace(fleet[0], profile=sure)]
    for scale, differs in ((1.0, False), (0.5, True)):
        plain = replay(trace, fleet, FIFO, ReplayOptions(scale=scale))
        found = uncertain_replay(plain, trace, FIFO, runs=19, jobs=1).intervals
        assert found is not None
        offered = found.by_figure["all.offered"]
        assert (offered.low < offered.high) is differs
    assert found.covered == {"cpu/tiny-qwen3": "nothing: no error is known of any coefficient"}


def test_too_few_runs_are_refused(run: Replay, tmp_path: Path) -> None:
    with pytest.raises(UncertaintyError, match="18 runs are too few"):
        uncertain_replay(run, trace_of(tmp_path), FIFO, runs=18)


def full(run: Replay) -> Replay:
    """With something in every part of the figures."""
    summary = run.summary
    made = Summary()
    made.all, made.prompt_tokens, made.cached_tokens = summary.all, 100, 10
    made.groups = {**summary.groups, "tier": {"stable": summary.all, "": summary.all}}
    made.shed_why = {"shed: deadline": 2, "failed: retries.": 1}
    made.degraded_how.update(["cached", "model small-1.5"])
    made.verification.update(["match", "mismatch", "not_needed", "skipped_budget", ""])
    return replace(run, summary=made)


def test_every_figure_that_the_report_has_has_a_worse_end(run: Replay) -> None:
    figures = figures_of(full(run))
    assert len(figures) > 150
    for prefix in ("all.", "by_tier.", "by_sla.", "by_line.", "shed_or_failed.", "degraded_how.",
                   "verification.", "gpu_busy_share."):  # fmt: skip
        assert any(name.startswith(prefix) for name in figures), prefix
    assert {worse_end(name) for name in figures} == {"low", "high"}


def test_every_figure_that_the_report_shows_has_an_interval(run: Replay) -> None:
    machine = {"wall time of the replay", "requests per wall second"}
    for row in overall_rows([run]):
        known = row.intervals[0]
        if row.name in machine:
            assert known is None
        elif not math.isnan(row.values[0]):
            assert known is not None, row.name
            assert known.low <= row.values[0] <= known.high
    for kind in ("sla", "line", "tier"):
        for name in names_in([run], kind):
            rows = duration_rows([group_of(run, kind, name)], [run], f"by_{kind}.{name}")
            for by_quantile in rows.values():
                for row in by_quantile.values():
                    known = row.intervals[0]
                    assert known is not None
                    assert known.low <= row.values[0] <= known.high


def test_a_class_that_was_turned_away_whole_waits_without_end(run: Replay) -> None:
    summary = Summary()
    summary.all.offered = summary.all.shed = 3
    figures = figures_of(replace(run, summary=summary))
    assert figures["all.ttft_s_p95"] == math.inf
    assert figures["usd_per_million_good_tokens"] == math.inf
    assert figures["all.shed_share"] == 1.0
    answered = figures_of(run)
    found = intervals_around(answered, [answered] * 18 + [figures])
    assert pessimistic(found["all.ttft_s_p95"], "all.ttft_s_p95") == math.inf
    assert found["all.ttft_s_p95"].low == answered["all.ttft_s_p95"]


# ---- do they hold what they say? ----


QUEUE_NAMES = ("prefill_fixed_ns", "prefill_per_token_ns")
QUEUE_SD_NS = np.array([4e6, 20_000.0])
QUEUE_CORRELATION = np.array([[1.0, -0.4], [-0.4, 1.0]])
GROUPS, TRUTHS = 4, 10


def queue_fleet(profile: Profile) -> list[ReplicaSpec]:
    """One prompt at a time: a queue with a fixed service time."""
    spec = fleet_of([("h100-sxm/qwen3-8b", 1)])[0]
    settings = replace(spec.settings, max_num_seqs=1, async_scheduling=False)
    return [replace(spec, profile=profile, cost=StepCost.from_profile(profile), settings=settings)]


def queue_profile(covariance: Any) -> Profile:
    base = H100
    step = msgspec.structs.replace(
        base.step,
        prefill_fixed_ns=msgspec.structs.replace(
            base.step.prefill_fixed_ns, value=4e7, interval=None
        ),
        prefill_per_token_ns=msgspec.structs.replace(
            base.step.prefill_per_token_ns, value=200_000.0, interval=None
        ),
        prefill_free_tokens=None,
    )
    return uncertain(QUEUE_NAMES, covariance, base=msgspec.structs.replace(base, step=step))


def truth_of(profile: Profile, shift_ns: Any) -> list[ReplicaSpec]:
    """The machine as it is, if the fit was wrong by this."""
    step = msgspec.structs.replace(
        profile.step,
        **{
            name: msgspec.structs.replace(
                getattr(profile.step, name), value=getattr(profile.step, name).value + float(shift)
            )
            for name, shift in zip(QUEUE_NAMES, shift_ns, strict=True)
        },
    )
    return queue_fleet(msgspec.structs.replace(profile, step=step))


def test_intervals_cover_the_true_run_about_as_often_as_they_say(tmp_path: Path) -> None:
    """Of 40 machines that the fit is wrong about as much as it says, 90.5 % lie inside.

    Where the fit is wrong by four times as much, or nothing is said of its errors, far fewer do:
    the test would notice. And the intervals are no wider than 20 draws should be, 3.7 standard
    deviations.
    """
    dice = np.random.default_rng(11)
    covariance = np.outer(QUEUE_SD_NS, QUEUE_SD_NS) * QUEUE_CORRELATION
    arrivals_s = np.cumsum(dice.exponential(0.1, 100))
    trace = write_rows(
        tmp_path / "in.parquet",
        [{"arrival_s": float(at_s), "prompt_tokens": 100, "output_tokens": 1}
         for at_s in arrivals_s],
    )  # fmt: skip
    unsure, sure = queue_profile(covariance), queue_profile(covariance * 0)
    figure = "all.ttft_s_mean"

    def interval(profile: Profile, seed: int) -> Interval:
        plain = replay(trace, queue_fleet(profile), FIFO, ReplayOptions(seed=seed))
        found = uncertain_replay(plain, trace, FIFO, runs=20, jobs=1).intervals
        assert found is not None
        return found.by_figure[figure]

    def truths(times: float) -> list[float]:
        shifts = dice.multivariate_normal([0, 0], covariance * times**2, GROUPS * TRUTHS)
        return [
            figures_of(replay(trace, truth_of(unsure, shift), FIFO, ReplayOptions(seed=999)))[
                figure
            ]
            for shift in np.maximum(shifts, [-3.9e7, -190_000.0])
        ]

    def hits(found: list[Interval], true: list[float]) -> int:
        pairs = zip(np.repeat(np.arange(len(found)), TRUTHS), true, strict=True)
        return sum(found[group].low <= value <= found[group].high for group, value in pairs)

    said = [interval(unsure, seed) for seed in range(GROUPS)]
    as_said = truths(1.0)
    assert 32 <= hits(said, as_said) <= 40
    assert hits(said, truths(4.0)) <= 24
    assert hits([interval(sure, 0)] * GROUPS, as_said) <= 10
    width = np.mean([one.high - one.low for one in said])
    assert 2.8 < width / np.std(as_said) < 4.8
