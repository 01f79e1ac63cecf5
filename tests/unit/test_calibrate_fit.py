"""A designed load with a known cost gives that cost back; what is not good enough is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from policy.cost import TICKS_PER_NS, Profile, StepCost
from policy.files import load_profile
from tests.unit.test_calibrate_synthetic import (
    COST,
    ENGINE,
    HOST_NS,
    IN_NS,
    MS,
    OUT_NS,
    TOKEN_NS,
    TRUE_NS,
    Ask,
    Dice,
    Made,
    designed_load,
    make,
)
from traces.steps import Recording
from twin.calibrate import (
    Calibration,
    CalibrationError,
    drift,
    fit_passive,
    fit_profile,
    write_profile,
    write_report,
)
from twin.calibrate.client import read_client
from twin.calibrate.material import designed
from twin.uncertainty import errors_of, perturbed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LOGPROBS_NS = 20_000
WITH_LOGPROBS = msgspec.structs.replace(COST, per_logprobs_sequence=LOGPROBS_NS * TICKS_PER_NS)


def noise(seed: int, stalls: float = 0.0) -> Callable[[], float]:
    """Skewed, with mean one; now and then the machine stands still."""
    dice = Dice(f"noise/{seed}")

    def factor() -> float:
        if dice.random() < stalls:
            return 12.0
        return 0.92 + dice.gammavariate(1.0, 0.08)

    return factor


def fit(made: Made, folder: Path) -> Calibration:
    return fit_profile(
        made.write(folder), name="cpu-2core/tiny-test", gpu="cpu-2core", model="tiny-qwen3"
    )


@pytest.fixture(scope="module")
def made() -> Made:
    return make(designed_load(), cost=WITH_LOGPROBS, noise=noise(1))


@pytest.fixture(scope="module")
def good(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    return fit(made, tmp_path_factory.mktemp("good"))


def value(calibration: Calibration, name: str) -> float:
    assert calibration.draft is not None
    for part in (calibration.draft.step, calibration.draft.overheads):
        if hasattr(part, name):
            return float(getattr(part, name).value)
    raise AssertionError(name)


def test_known_coefficients_come_back_within_their_intervals(good: Calibration) -> None:
    assert good.refusal == ()
    assert good.profile is not None
    for name, true in (*TRUE_NS.items(), ("logprobs_per_sequence_ns", LOGPROBS_NS)):
        coefficient = getattr(good.profile.step, name)
        assert coefficient.value == pytest.approx(true, rel=0.05 if "logprobs" not in name else 0.4)
        low, high = coefficient.interval
        slack = 0.5 * (high - low)  # a 95 % interval misses one time in twenty
        assert low - slack <= true <= high + slack, name
        assert "calibrated: vLLM 0.32.0, 2026-09-21" in coefficient.source


def test_overheads_come_back(good: Calibration) -> None:
    assert value(good, "token_out_ns") == pytest.approx(TOKEN_NS, rel=0.3)
    assert value(good, "request_in_ns") == pytest.approx(IN_NS, rel=0.02)
    assert value(good, "request_out_ns") == pytest.approx(OUT_NS, rel=0.3)
    # The server's own view has no network in front; here both clocks are one.
    assert good.figures["server_in_ns"] == pytest.approx(IN_NS + OUT_NS, rel=0.1)
    assert good.figures["http_ns"] == 0


def test_errors_are_of_held_out_steps(good: Calibration) -> None:
    json.dumps(good.figures, allow_nan=False)  # plain numbers and texts
    held = good.figures["held_out_errors"]["all"]
    assert abs(held["bias_percent"]) < 1
    assert held["steps"] == good.figures["phases"]["check"] - good.figures["stalled_steps"]
    assert good.profile is not None
    for row in good.profile.trust.errors:
        assert row.held_out_mean_percent is not None
        assert row.held_out_mean_percent < 10
    for metric in ("e2e", "ttft", "tpot"):
        assert abs(good.figures["requests"][metric]["mean_error_percent"]) < 5, metric


def test_stalls_are_left_out_and_the_mean_is_kept(tmp_path: Path) -> None:
    stalled = fit(make(designed_load(), noise=noise(2, stalls=0.004)), tmp_path)
    assert 3 < stalled.figures["stalled_steps"] < 60
    assert stalled.profile is not None
    for name in ("decode_fixed_ns", "prefill_per_token_ns", "decode_per_kv_token_ns"):
        assert value(stalled, name) == pytest.approx(TRUE_NS[name], rel=0.05), name
    # The median of the noise is .975: a fit to it would promise 2.5 % too little.
    assert abs(stalled.figures["fitted_errors"]["all"]["bias_percent"]) < 0.7
    assert any("were left out" in note for note in stalled.profile.trust.notes)


def test_late_stamps_cancel_out(tmp_path: Path) -> None:
    dice = Dice(5)
    late = make(
        designed_load(),
        exact_periods=False,
        late_ns=lambda: dice.choice([0, 0, 0, 2 * MS]),
    )
    assert all(row.period_ns is None for row in late.recording.steps)
    found = fit(late, tmp_path)
    assert not found.figures["exact_periods"]
    assert value(found, "host_per_step_ns") == pytest.approx(HOST_NS, rel=0.15)
    assert value(found, "decode_fixed_ns") == pytest.approx(TRUE_NS["decode_fixed_ns"], rel=0.02)
    assert abs(found.figures["fitted_errors"]["decode"]["bias_percent"]) < 1


def test_a_bent_decode_curve_gets_a_padding_table(tmp_path: Path) -> None:
    bend = tuple(0 if batch < 12 else 2_000_000 * TICKS_PER_NS for batch in range(65))
    bent = msgspec.structs.replace(COST, padding=bend)
    found = fit(make(designed_load(), cost=bent, noise=noise(3)), tmp_path)
    assert found.figures["refinements"]["batch_padding"]["kept"] == 1
    assert found.draft is not None
    cost = StepCost.from_profile(found.draft)
    for batch in (1, 4, 16, 48):
        true = bent.step_ticks(batch, batch * 300)
        assert cost.step_ticks(batch, batch * 300) == pytest.approx(true, rel=0.04), batch
    # What is drawn is known about as well as the steps are, not as their split is.
    generator = np.random.default_rng(0)
    assert found.draft.trust.uncertainty is not None
    for batch in (4, 16):
        true = bent.step_ticks(batch, batch * 300)
        drawn = [
            StepCost.from_profile(perturbed(found.draft, generator)).step_ticks(batch, batch * 300)
            for _ in range(200)
        ]
        assert 0.001 < np.std(drawn) / true < 0.01, batch


def test_a_straight_curve_gets_none(good: Calibration) -> None:
    assert good.profile is not None
    assert good.profile.step.batch_padding == ()
    assert good.profile.step.prefill_free_tokens is None
    assert good.profile.step.mixed_free_tokens is None


def test_tokens_that_ride_along_are_found(tmp_path: Path) -> None:
    flat = msgspec.structs.replace(COST, prefill_free_tokens=192)
    found = fit(make(designed_load(), cost=flat, noise=noise(4)), tmp_path)
    assert found.draft is not None
    free = found.draft.step.prefill_free_tokens
    assert free is not None
    assert free.value == pytest.approx(192, abs=70)


def test_uncertainty_covers_steps_and_overheads(good: Calibration) -> None:
    assert good.profile is not None
    uncertainty = good.profile.trust.uncertainty
    assert uncertainty is not None
    assert {"decode_fixed_ns", "prefill_per_token_ns", "request_in_ns"} <= set(uncertainty.names)
    matrix = np.array(uncertainty.covariance_ns2)
    assert np.linalg.eigvalsh(
        matrix / np.sqrt(np.outer(np.diag(matrix), np.diag(matrix)))
    ).min() > (-1e-4)
    place = uncertainty.names.index("decode_fixed_ns")
    low, high = good.profile.step.decode_fixed_ns.interval or (0, 0)
    assert 4 * np.sqrt(matrix[place, place]) == pytest.approx(high - low, rel=0.2)
    assert 0 < uncertainty.run_to_run_percent < 2
    assert any("between the rounds of this one" in note for note in good.profile.trust.notes)


def test_the_profile_file_reads_back(good: Calibration, tmp_path: Path) -> None:
    assert good.profile is not None
    write_profile(good.profile, tmp_path / "profile.yaml")
    assert load_profile(tmp_path / "profile.yaml") == good.profile
    text = (tmp_path / "profile.yaml").read_text()
    assert "null" not in text
    assert "[]" not in text


def test_the_report_shows_fit_and_refusal(good: Calibration, tmp_path: Path) -> None:
    write_report(good, tmp_path / "good.html")
    page = (tmp_path / "good.html").read_text()
    for part in (
        "The fit is good",
        "Whole requests are off by",
        "decode_per_kv_token_ns",
        'id="residual-mixed"',
        "tpot",
    ):
        assert part in page, part
    assert "http://" not in page.split("<script>")[0]
    write_report(replace(good, profile=None, refusal=("too <few> steps",)), tmp_path / "bad.html")
    assert "too &lt;few&gt; steps" in (tmp_path / "bad.html").read_text()
    write_report(Calibration(None, ("nothing there",), {}), tmp_path / "none.html")
    assert "nothing there" in (tmp_path / "none.html").read_text()


def test_what_is_assumed_of_the_server_is_told(made: Made, tmp_path: Path) -> None:
    settings = msgspec.structs.replace(
        made.recording.header.settings,
        tensor_parallel=None, dtype=None, quantization="fp8", kv_cache_dtype="fp8_e5m2",
    )  # fmt: skip
    header = msgspec.structs.replace(made.recording.header, settings=settings)
    found = fit(replace(made, recording=replace(made.recording, header=header)), tmp_path)
    assert found.profile is not None, found.refusal
    notes = " ".join(found.profile.trust.notes)
    for part in (
        "tensor_parallel was not recorded: 1 is assumed", "dtype was not recorded: ",
        "quantized (fp8)", "KV cache holds fp8_e5m2",
    ):  # fmt: skip
        assert part in notes, part


def test_what_the_server_tells_is_not_called_assumed(good: Calibration) -> None:
    assert good.profile is not None
    assert not any("assumed" in note or "cannot say" in note for note in good.profile.trust.notes)


# ---- refusals ----


def refusal_of(made: Made, folder: Path, **settings: Any) -> str:
    """What a recording is refused for, all reasons in one."""
    if settings:
        header = msgspec.structs.replace(
            made.recording.header,
            settings=msgspec.structs.replace(made.recording.header.settings, **settings),
        )
        made = replace(made, recording=replace(made.recording, header=header))
    found = fit(made, folder)
    assert found.profile is None
    assert found.refusal
    return " | ".join(found.refusal)


def test_too_few_steps_are_refused_by_kind(tmp_path: Path) -> None:
    few = make([Ask(number * 100 * MS, "mixed", 64, 3) for number in range(10)])
    reasons = refusal_of(few, tmp_path)
    assert "20 usable decode steps, at least 100 are needed" in reasons
    assert "0 usable mixed steps" in reasons
    assert "0 held-out steps" in reasons
    assert "prompt parts from 64 to 64 only" in reasons
    assert "decode batches from 1 to 1 only" in reasons


def test_missing_settings_are_refused_or_taken_from_a_base(made: Made, tmp_path: Path) -> None:
    assert "lacks the server's kv_blocks" in refusal_of(made, tmp_path, kv_blocks=None)
    found = fit_profile(
        tmp_path,
        name="cpu-2core/tiny-test",
        gpu="cpu-2core",
        model="tiny-qwen3",
        base=load_profile("cpu/tiny-qwen3"),
    )
    assert found.profile is not None  # the folder was written without details of one life
    assert found.profile.engine.kv_blocks == 4096


def test_no_iteration_details_are_refused(made: Made, tmp_path: Path) -> None:
    header = msgspec.structs.replace(made.recording.header, details=False)
    blind = Recording(
        header,
        [
            row._replace(prefill_tokens=None, decode_requests=None, elapsed_ns=None)
            for row in made.recording.steps
        ],
        made.recording.requests,
    )
    reasons = refusal_of(replace(made, recording=blind), tmp_path)
    assert "--enable-logging-iteration-details" in reasons


def test_preemptions_are_refused(tmp_path: Path) -> None:
    tight = replace(ENGINE, kv_blocks=70, block_tokens=16, max_model_len=1100)
    asks = [ask for ask in designed_load(rounds=2) if ask.prompt_tokens < 1000]
    reasons = refusal_of(make(asks, engine_settings=tight), tmp_path)
    assert "pre-emptions in the load" in reasons


def test_preemptions_of_live_traffic_are_told(
    made: Made, good: Calibration, tmp_path: Path
) -> None:
    """Nobody can record it again with more blocks."""
    rows = list(made.recording.steps)
    rows[40] = rows[40]._replace(preemptions=2)
    again = Recording(made.recording.header, rows, made.recording.requests)
    replace(made, recording=again).write(tmp_path)
    found = fit_passive(tmp_path / "steps.jsonl", base_profile(good))
    assert found.profile is not None, found.refusal
    notes = found.profile.trust.notes
    assert any(note.startswith("2 pre-emptions in the traffic") for note in notes)


def slower(made: Made, choose: Callable[[int], float]) -> Made:
    """The same recording with each step's times multiplied."""
    steps = [
        row._replace(
            elapsed_ns=round((row.elapsed_ns or 0) * choose(place)),
            period_ns=None if row.period_ns is None else round(row.period_ns * choose(place)),
        )
        for place, row in enumerate(made.recording.steps)
    ]
    return replace(made, recording=Recording(made.recording.header, steps, made.recording.requests))


def checks(made: Made) -> set[int]:
    """Places of the held-out steps."""
    out: set[int] = set()
    for index, row in made.recording.requests:
        if ".check." in (row.id or ""):
            out.update(range(index - row.output_tokens + 1, index + 1))
    return out


def test_a_biased_check_is_refused(made: Made, tmp_path: Path) -> None:
    held_out = checks(made)
    faster = slower(made, lambda place: 1.1 if place in held_out else 1.0)
    assert "longer than predicted in all" in refusal_of(faster, tmp_path)


def test_a_formula_that_does_not_fit_is_refused(made: Made, tmp_path: Path) -> None:
    dice = Dice(9)
    wild = slower(made, lambda _: dice.choice([0.6, 1.4]))
    assert "half of the held-out steps are off by more than" in refusal_of(wild, tmp_path)


def test_a_kind_that_is_off_is_refused_though_all_are_well(made: Made, tmp_path: Path) -> None:
    """In the sum over all steps the others make up for it."""
    held_out = checks(made)
    rows = made.recording.steps
    mixed = {
        place for place in held_out if rows[place].prefill_tokens and rows[place].decode_requests
    }
    assert len(mixed) > 8
    slow = slower(made, lambda place: 1.35 if place in mixed else 0.95 if place in held_out else 1)
    assert "held-out mixed steps took" in refusal_of(slow, tmp_path)


def test_whole_requests_that_take_longer_than_their_steps_are_refused(
    made: Made, tmp_path: Path
) -> None:
    """By the server's own clock: the steps are as before, and time passes between them."""
    requests = [
        (index, row._replace(e2e_ns=round((row.e2e_ns or 0) * longer)))
        for index, row in made.recording.requests
        for longer in [1.25 if ".check." in row.id else 1.0]
    ]
    slow = Recording(made.recording.header, made.recording.steps, requests)
    reasons = refusal_of(replace(made, recording=slow), tmp_path)
    assert reasons.startswith("whole requests of the held-out load took")
    assert "longer than predicted" in reasons
    assert " | " not in reasons


def test_many_stalls_are_refused(tmp_path: Path) -> None:
    reasons = refusal_of(make(designed_load(), noise=noise(2, stalls=0.03)), tmp_path)
    assert "% of the time was in steps that took many times as long" in reasons


def test_steps_that_mostly_cannot_be_used_are_refused(made: Made, tmp_path: Path) -> None:
    """Another client's requests, which the records do not hold."""
    rows = [
        row._replace(decode_requests=(row.decode_requests or 0) + 1) if place % 5 < 3 else row
        for place, row in enumerate(made.recording.steps)
    ]
    other = Recording(made.recording.header, rows, made.recording.requests)
    reasons = refusal_of(replace(made, recording=other), tmp_path)
    assert f"of {len(rows)} steps can be used, at least 50% are needed" in reasons


def test_rounds_that_differ_are_refused(made: Made, tmp_path: Path) -> None:
    steps = len(made.recording.steps)
    drifting = slower(made, lambda place: 1.0 + 0.3 * place / steps)
    assert "the rounds differ by" in refusal_of(drifting, tmp_path)


def test_unknown_names_and_broken_files_are_errors(made: Made, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="unknown card 'h1000'"):
        fit_profile(tmp_path, name="a/b", gpu="h1000", model="tiny-qwen3")
    with pytest.raises(CalibrationError, match="cannot be read"):
        fit_profile(tmp_path, name="a/b", gpu="cpu-2core", model="tiny-qwen3")
    made.write(tmp_path)
    (tmp_path / "client.jsonl").write_text('{"id": 3}\n')
    with pytest.raises(CalibrationError, match="line 1"):
        fit(replace(made, client=[{"id": 3}]), tmp_path)
    with pytest.raises(CalibrationError, match=r"client\.jsonl: cannot be read"):
        read_client(tmp_path / "other" / "client.jsonl")


def test_two_lives_in_one_file_are_an_error(made: Made) -> None:
    rows = made.recording.steps
    twice = Recording(made.recording.header, [*rows[:60], *rows[:60]], [])
    with pytest.raises(CalibrationError, match=r"step 0 follows step 59.*more than one life"):
        drift(COST, twice)


# ---- drift and live traffic ----


def test_drift_is_the_ratio_of_times(made: Made) -> None:
    same = drift(WITH_LOGPROBS, made.recording)
    assert same.ratio == pytest.approx(1.0, abs=0.01)
    assert same.interval[0] <= 1.0 + 0.01
    slow = drift(WITH_LOGPROBS, slower(made, lambda _: 1.2).recording)
    assert slow.ratio == pytest.approx(1.2, abs=0.015)
    assert slow.interval[0] > 1.15
    assert set(slow.by_kind) == {"decode", "prefill", "mixed"}
    assert sum(each["steps"] for each in slow.by_kind.values()) == slow.steps


def test_drift_by_kind_tells_what_became_slow(made: Made) -> None:
    kinds = [row.decode_requests == 0 for row in made.recording.steps]
    found = drift(COST, slower(made, lambda place: 1.5 if kinds[place] else 1.0).recording)
    assert found.by_kind["prefill"]["ratio"] == pytest.approx(1.5, abs=0.05)
    assert found.by_kind["decode"]["ratio"] == pytest.approx(1.0, abs=0.02)


def test_drift_needs_steps(made: Made) -> None:
    short = Recording(made.recording.header, made.recording.steps[:20], [])
    with pytest.raises(CalibrationError, match="at least 50 are needed"):
        drift(COST, short)


def base_profile(good: Calibration) -> Profile:
    assert good.profile is not None
    return good.profile


def live_traffic(slow: float) -> Made:
    """Prompts of one length and few at a time: too little to fit anew."""
    dice = Dice(6)
    asks = [Ask(number * 90 * MS, "", 120, dice.randint(5, 30)) for number in range(120)]
    return slower(make(asks, noise=noise(6)), lambda _: slow)


def test_live_traffic_that_covers_little_scales_the_base(good: Calibration, tmp_path: Path) -> None:
    live_traffic(1.3).write(tmp_path)
    found = fit_passive(tmp_path / "steps.jsonl", base_profile(good))
    assert found.figures["method"] == "scaled"
    assert found.figures["decode_ratio"] == pytest.approx(1.3, abs=0.04)
    assert found.profile is not None, found.refusal
    assert found.profile.step.prefill_per_token_ns.value == pytest.approx(1.3 * 20_000, rel=0.06)
    notes = " ".join(found.profile.trust.notes)
    assert "did not cover enough" in notes
    assert "part of the same load" in notes
    assert "steps only" in notes
    assert "scaled to" in found.profile.trust.fitted_on
    before, after = base_profile(good).trust.uncertainty, found.profile.trust.uncertainty
    assert before is not None
    assert after is not None
    assert after.names == before.names
    grown = after.covariance_ns2[0][0] / before.covariance_ns2[0][0]
    assert grown == pytest.approx(found.figures["decode_ratio"] ** 2, rel=1e-6)


def test_a_scaled_profile_says_how_well_its_scale_is_known(
    good: Calibration, tmp_path: Path
) -> None:
    """Also where the base said nothing of its errors, and more of a spell of bad weather."""
    dice = Dice(8)
    spells = [dice.choice([0.8, 1.0, 1.2]) for _ in range(1000)]
    base = load_profile("cpu/tiny-qwen3")
    assert base.trust.uncertainty is None
    known: list[float] = []
    for place, traffic in enumerate(
        (live_traffic(1.3), slower(live_traffic(1.3), lambda place: spells[place // 60]))
    ):
        folder = tmp_path / str(place)
        folder.mkdir()
        traffic.write(folder)
        found = fit_passive(folder / "steps.jsonl", base)
        assert found.figures["method"] == "scaled"
        assert found.draft is not None
        uncertainty = found.draft.trust.uncertainty
        assert uncertainty is not None
        assert uncertainty.names == ()
        assert uncertainty.run_to_run_percent >= found.figures["run_to_run_percent"] * 0.999
        known.append(uncertainty.run_to_run_percent)
        write_profile(found.draft, folder / "profile.yaml")
        read = load_profile(folder / "profile.yaml")
        assert read == found.draft
        assert "from run to run" in errors_of(read).text()
        perturbed(read, np.random.default_rng(0))
    assert known[1] > 2 * known[0] > 0


def test_live_traffic_that_covers_enough_is_fitted(
    made: Made, good: Calibration, tmp_path: Path
) -> None:
    slower(made, lambda _: 1.3).write(tmp_path)
    found = fit_passive(tmp_path / "steps.jsonl", base_profile(good))
    assert found.figures["method"] == "fitted"
    assert found.profile is not None, found.refusal
    assert found.profile.step.prefill_per_token_ns.value == pytest.approx(1.3 * 20_000, rel=0.05)
    assert found.profile.overheads == base_profile(good).overheads


def test_without_requests_the_contents_are_estimated(made: Made, tmp_path: Path) -> None:
    """A stock server's log: counts and KV usage only, and no time but the elapsed."""
    settings = made.recording.header.settings
    blocks, size = settings.kv_blocks or 0, settings.block_tokens or 0
    rows = [
        row._replace(
            kv_used_ppm=round(
                1e6 * (held.kv_tokens + held.prefill_tokens
                       + size / 2 * (held.batch + held.prefill_requests)) / size / (blocks - 1)
            ),
            period_ns=None, running=None, waiting=None, preemptions=None,
        )
        for row, held in zip(made.recording.steps, made.truth, strict=True)
    ]  # fmt: skip
    header = msgspec.structs.replace(made.recording.header, plugin=None, vllm=None, wall_ns=0)
    found = fit(replace(made, recording=Recording(header, rows, [])), tmp_path)
    assert found.profile is not None, found.refusal
    assert not found.figures["exact_contents"]
    notes = " ".join(found.profile.trust.notes)
    assert "estimated from the KV usage" in notes
    assert "part of the same load" in notes
    assert "pre-empted is not known" in notes
    assert "steps only" in notes
    material = designed(Recording(header, rows, []), tuple(read_client(tmp_path / "client.jsonl")))
    tokens = sum(row["prompt_tokens"] + row["output_tokens"] - 1 for row in made.client
                 if row["phase"] == "warm")  # fmt: skip
    computed = np.cumsum([held.batch + held.prefill_tokens for held in made.truth])
    first = int(np.searchsorted(computed, tokens)) + 1
    assert first > 10
    assert min(material.fitted.min(), material.held_out.min()) == first
    assert "what lone streams took" in notes
    assert "vLLM (unknown), day unknown" in found.profile.step.decode_fixed_ns.source
    assert value(found, "decode_fixed_ns") == pytest.approx(TRUE_NS["decode_fixed_ns"], rel=0.1)
    total = value(found, "decode_fixed_ns") + value(found, "host_per_step_ns")
    assert total == pytest.approx(TRUE_NS["decode_fixed_ns"] + HOST_NS, rel=0.1)
    way_in = value(found, "request_in_ns") + value(found, "request_out_ns")
    assert way_in == pytest.approx(IN_NS + OUT_NS, rel=0.5)


def test_decoding_that_costs_more_beside_a_prefill_is_found(tmp_path: Path) -> None:
    dear = msgspec.structs.replace(COST, mixed_per_sequence=400_000 * TICKS_PER_NS)
    found = fit(make(designed_load(), cost=dear, noise=noise(7)), tmp_path)
    assert found.figures["refinements"]["mixed_terms"]["kept"] == 1
    assert found.draft is not None
    cost = StepCost.from_profile(found.draft)
    for batch in (2, 6):
        true = dear.step_ticks(batch, batch * 400, 300, 300**2)
        assert cost.step_ticks(batch, batch * 400, 300, 300**2) == pytest.approx(true, rel=0.06)
        alone = dear.step_ticks(batch, batch * 400)
        assert cost.step_ticks(batch, batch * 400) == pytest.approx(alone, rel=0.03)


def test_whole_requests_agree_by_both_clocks(good: Calibration) -> None:
    inside = good.figures["requests_inside"]
    assert abs(inside["e2e"]["mean_error_percent"]) < 5
    assert abs(inside["tpot"]["mean_error_percent"]) < 5


def test_a_starved_front_is_told(made: Made, tmp_path: Path) -> None:
    """Clients wait longer under load, and the server's own times know nothing of it."""
    late = [
        row | ({"e2e_ns": row["e2e_ns"] + 60 * MS} if row["phase"] == "check" else {})
        for row in made.client
    ]
    found = fit(replace(made, client=late), tmp_path)
    assert found.profile is not None
    assert any("front process" in note for note in found.profile.trust.notes)
    assert found.figures["requests"]["e2e"]["mean_error_percent"] < -10
    assert abs(found.figures["requests_inside"]["e2e"]["mean_error_percent"]) < 5
