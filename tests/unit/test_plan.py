"""What a plan is made of, without a run: service levels, prices, statistics, searches, machines,
formulas, days and words."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policy.cost import StepCost
from policy.files import FileError, load_gpus, load_profile
from tests.support import write_rows
from traces import open_trace
from twin.plan.estimates import Estimate, held, predicted, student, wilson
from twin.plan.inputs import Need, PlanError, SloFile, load_prices, load_slo, promise_of
from twin.plan.machines import (
    SAME_CHIP_PERCENT,
    SCALED_PERCENT,
    candidates,
    find_profile,
    fit_of,
    machine_of,
    region_of,
    scale_card,
    spread_percent,
    widened,
)
from twin.plan.search import largest_load, smallest
from twin.plan.show import short_names
from twin.plan.workload import (
    WINDOW_LEAST_S,
    Workload,
    _poisson,
    day_of,
    models_of,
    workload_of,
)
from twin.uncertainty import errors_of, perturbed

if TYPE_CHECKING:
    from pathlib import Path

SLO = """
schema: 1
confidence_percent: 90
classes:
  P0: {ttft_s_p95: 0.8, attainment_percent: 95}
tiers:
  Stable: {attainment_percent: 99}
"""


def slo_file(folder: Path, text: str) -> Path:
    path = folder / "slo.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def rows(count: int = 400, per_s: float = 20.0, **more: Any) -> list[dict[str, Any]]:
    """Chat requests of two classes and two lines; every hundredth is a turn of one session."""
    dice = np.random.default_rng(3)
    at_s = np.cumsum(dice.exponential(1 / per_s, count))
    return [
        {
            "arrival_s": float(at_s[n]), "prompt_tokens": int(dice.integers(100, 900)),
            "output_tokens": int(dice.integers(20, 120)), "model": "qwen3-8b", "endpoint": "chat",
            "sla_class": "P0" if n % 2 else "P1", "business_line": "shop" if n % 2 else "logs",
            "user_id": n % 50, "session_id": 7 if n % 100 == 0 else None, "prefix_block_tokens": 16,
            "prefix_ids": [1, 5007 if n % 100 == 0 else 1000 + n], **more,
        }
        for n in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    folder = tmp_path_factory.mktemp("load")
    trace = write_rows(folder / "t.parquet", rows())
    return workload_of(trace, folder / "days", model="qwen3-8b")


# Service levels and prices


def test_service_levels_become_needs(tmp_path: Path) -> None:
    promise = load_slo(slo_file(tmp_path, SLO))
    assert promise.confidence == 0.9
    assert promise.needs == (
        Need("class", "P0", "ttft_s_p95", 0.8),
        Need("class", "P0", "attainment", 0.95),
        Need("tier", "stable", "attainment", 0.99),
    )
    assert promise.slo.limit_s("P0") == 0.8
    assert promise.text() == "P0 p95 0.8 s, P0 attainment 95.0%, Stable attainment 99.0%"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schema: 2\nclasses: {P0: {ttft_s_p95: 1}}", "schema 2 is not known"),
        ("schema: 1", "nothing is promised"),
        ("schema: 1\nclasses: {P7: {ttft_s_p95: 1}}", "'P7' is unknown: use P0, P1, P2, other"),
        ("schema: 1\ntiers: {gold: {attainment_percent: 9}}", "'gold' is unknown: use turbo"),
        ("schema: 1\nclasses: {P0: {ttft_s_p95: -1}}", "got -1"),
        ("schema: 1\nclasses: {P0: {ttft_p95: 1}}", "did you mean ttft_s_p95"),
        ("schema: 1\nlines: {a: {good_ttft_s: 1}}", "good_ttft_s is for classes"),
    ],
)
def test_wrong_service_levels_are_told(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        load_slo(slo_file(tmp_path, text))


def test_prices_of_a_file_go_before_the_shipped_ones(tmp_path: Path) -> None:
    path = tmp_path / "prices.yaml"
    path.write_text("schema: 1\ngpus: {h200: {usd_per_hour: 9.5, source: mine}}", encoding="utf-8")
    prices = load_prices(path)
    gpus = load_gpus()
    assert prices.usd_per_hour(gpus["h200"]) == 9.5
    assert prices.source(gpus["h200"]) == "mine"
    assert prices.usd_per_hour(gpus["h100-sxm"]) == gpus["h100-sxm"].usd_per_hour
    path.write_text("schema: 1\ngpus: {h20: {usd_per_hour: 9.5, source: mine}}", encoding="utf-8")
    with pytest.raises(FileError, match=r"gpus\.h20: unknown card .*h200"):
        load_prices(path)
    path.write_text("schema: 1\ngpus: {h200: {usd_per_hour: -3, source: mine}}", encoding="utf-8")
    with pytest.raises(FileError, match=r"gpus\.h200: usd_per_hour: Expected .*, got -3"):
        load_prices(path)


# Statistics


@pytest.mark.parametrize(
    ("share", "freedom", "table"),
    [(0.9, 1, 3.078), (0.95, 2, 2.920), (0.95, 3, 2.353), (0.9, 5, 1.476), (0.975, 9, 2.262)],
)
def test_students_quantiles_are_those_of_the_tables(
    share: float, freedom: int, table: float
) -> None:
    assert student(share, freedom) == pytest.approx(table, rel=0.01)


def test_wilsons_interval() -> None:
    low, high = wilson(9, 10, 0.95)
    assert (low, high) == (pytest.approx(0.596, abs=1e-3), pytest.approx(0.982, abs=1e-3))
    assert wilson(0, 0) == (0.0, 1.0)


def test_a_predicted_interval_holds_nine_in_ten_of_the_next() -> None:
    dice = np.random.default_rng(5)
    inside = 0
    for _ in range(2000):
        *seen, following = np.exp(dice.normal(0.0, 0.3, 5)).tolist()
        found = predicted("x", seen, "s", "fitted")
        inside += found.low <= following <= found.high
    assert 0.88 <= inside / 2000 <= 0.925, "widened to hold the first, so a little above 90 %"


def test_what_is_free_has_no_interval() -> None:
    free = predicted("usd", [0.0, 0.0, 0.0], "USD", "fitted")
    assert free.low == free.value == free.high == 0.0


def test_a_row_names_no_model_where_cards_tell_enough() -> None:
    one, other = (machine_like(name) for name in ("h100-sxm/m", "h100-sxm/m@tp2"))
    assert short_names([one, other]) == {one.name: "h100-sxm", other.name: "h100-sxm@tp2"}
    twin = machine_like("h100-sxm/other")
    assert short_names([one, twin]) == {one.name: one.name, twin.name: twin.name}


def machine_like(name: str) -> Any:
    return SimpleNamespace(name=name)


def test_an_interval_has_no_end_where_a_run_has_none() -> None:
    found = predicted("p95", [1.0, 1.1, math.inf], "s", "fitted")
    assert (found.value, found.high) == (1.0, math.inf)
    assert "without end" in found.text()
    assert predicted("share", [0.99, 0.98, 1.0], "", "fitted", share=True, of=100).high == 1.0


def test_what_holds_by_chance_does_not_hold_with_confidence() -> None:
    assert held([0.5, 0.5, 0.5], 0.9)
    assert not held([0.5, 0.01, 0.4], 0.9)
    assert not held([0.5, -0.01, 0.5], 0.5)


# Searches


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 60))
def test_the_smallest_is_that_of_an_exhaustive_search(true: int, guess: int, least: int) -> None:
    asked: list[int] = []

    def holds(size: int) -> bool:
        asked.append(size)
        return size >= true

    most = 64
    found = smallest(holds, guess=guess, least=least, most=most)
    expected = next((n for n in range(least, most + 1) if n >= true), None)
    assert found == expected
    assert len(asked) == len(set(asked)), "no size is played twice"
    assert len(asked) <= 16


def test_nothing_holds() -> None:
    assert smallest(lambda size: False, guess=3, least=1, most=9) is None


@given(st.floats(0.05, 12.0), st.floats(0.3, 3.0))
def test_the_knee_is_bracketed(true: float, known: float) -> None:
    good, bad = largest_load(lambda x: x <= true, known=known, step=1.25, within=1.05, most=16.0)
    assert good <= true < bad
    assert not good or bad / good <= 1.05


def test_a_load_without_a_knee() -> None:
    assert largest_load(lambda x: True, known=1, step=2, within=1.1, most=8) == (8, math.inf)
    assert largest_load(lambda x: False, known=1, step=2, within=1.1, most=8)[0] == 0.0


# Machines


@pytest.mark.parametrize("card", ["h200", "l40s"])
@pytest.mark.parametrize("model", ["qwen3-8b", "llama-3.1-8b"])
def test_shipped_scaled_profiles_are_what_the_rule_gives(card: str, model: str) -> None:
    gpus = load_gpus()
    shipped = load_profile(f"{card}/{model}")
    scaled = scale_card(load_profile(f"h100-sxm/{model}"), gpus["h100-sxm"], gpus[card])
    assert msgspec.to_builtins(shipped) == msgspec.to_builtins(scaled)
    assert shipped.trust.status == "scaled"
    assert shipped.trust.fitted_on == f"scaled, not yet fitted: from h100-sxm/{model}"


def test_a_card_with_more_bandwidth_decodes_faster_and_computes_alike() -> None:
    h100, h200 = load_profile("h100-sxm/qwen3-8b").step, load_profile("h200/qwen3-8b").step
    ratio = h100.decode_fixed_ns.value / h200.decode_fixed_ns.value
    assert ratio == pytest.approx(4.8 / 3.35, rel=1e-4)
    assert h200.prefill_per_token_ns.value == h100.prefill_per_token_ns.value
    assert h200.host_per_step_ns == h100.host_per_step_ns
    assert "4.8" not in h200.decode_fixed_ns.source  # the factor is told, the card has the figure
    assert "by memory bandwidth, times 0.6979" in h200.decode_fixed_ns.source


def test_the_rule_is_too_slow_on_the_one_pair_that_was_fitted() -> None:
    """The claim in ``twin.plan.machines``: so what is drawn is wide, and called extrapolated."""
    gpus = load_gpus()
    scaled = scale_card(
        load_profile("h100-sxm/llama-3.1-8b"), gpus["h100-sxm"], gpus["rtx-4090"]
    ).step
    fitted = load_profile("rtx-4090/llama-3.1-8b").step
    off = {
        name: getattr(scaled, name).value / getattr(fitted, name).value
        for name in ("decode_fixed_ns", "prefill_per_token_ns")
    }
    assert off["decode_fixed_ns"] == pytest.approx(1.22, abs=0.06)
    assert off["prefill_per_token_ns"] == pytest.approx(1.34, abs=0.02)


def test_how_far_a_profile_can_be_trusted_widens_what_is_drawn() -> None:
    names = ("h100-sxm/qwen3-8b", "h200/qwen3-8b", "l40s/qwen3-8b", "h100-sxm/qwen3-14b@tp2")
    spreads = [spread_percent(find_profile(name)) for name in names]
    assert spreads == [4.1, SAME_CHIP_PERCENT, SCALED_PERCENT, 10.0]
    profile = widened(find_profile("l40s/qwen3-8b"))
    assert errors_of(profile).run_to_run == SCALED_PERCENT / 100
    drawn = [
        perturbed(profile, np.random.default_rng(n)).step.decode_fixed_ns.value for n in range(300)
    ]
    logs = np.log(np.array(drawn) / profile.step.decode_fixed_ns.value)
    assert float(np.std(logs)) == pytest.approx(0.2, rel=0.15)
    assert StepCost.from_profile(profile) == StepCost.from_profile(find_profile("l40s/qwen3-8b"))


def test_any_model_and_size_of_a_scaled_card(tmp_path: Path) -> None:
    machine = machine_of("h200/llama-3.1-70b@tp4", tmp_path)
    assert (machine.cards, machine.kind) == (4, "extrapolated")
    assert machine.text(3) == "12 H200 (3 x TP4)"
    found, rejected = candidates(("l40s",), "qwen3-8b", (1, 2), tmp_path)
    assert [one.name for one in found] == ["l40s/qwen3-8b"]
    assert rejected[0].gate == "profile"
    assert "no all-reduce over 2 l40s" in rejected[0].why
    found, rejected = candidates(("h100-sxm",), "llama-3.1-70b", (1,), tmp_path)
    assert not found
    assert rejected[0].gate == "memory"


def test_flags_that_are_set_otherwise(tmp_path: Path) -> None:
    plain = machine_of("h100-sxm/qwen3-8b", tmp_path)
    other = machine_of("h100-sxm/qwen3-8b", tmp_path, gpu_memory_utilization=0.95)
    assert other.kv_tokens > plain.kv_tokens
    assert other.path != plain.path
    assert load_profile(other.path).engine.gpu_memory_utilization == 0.95
    with pytest.raises(PlanError, match="max_num_seqs"):
        machine_of("h100-sxm/qwen3-8b", tmp_path, max_num_seqs=0)


def test_the_region_of_a_profile() -> None:
    assert region_of(load_profile("h100-sxm/qwen3-8b")).sequences == 256
    assert region_of(load_profile("h200/qwen3-8b")).source.startswith("aiconfigurator")
    own = msgspec.structs.replace(load_profile("cpu/tiny-qwen3"), name="mine/tiny")
    assert region_of(own).sequences == own.engine.max_num_seqs


def test_whether_it_fits_is_arithmetic() -> None:
    """Qwen3-8B on an H100: 90 % of 85.061 GB, 16.38 GB of weights, 147,456 bytes a token."""
    fit = fit_of("h100-sxm/qwen3-8b", 8192)
    assert fit.weights_bytes == 2 * 8_190_735_360
    assert fit.kv_token_bytes == 2 * 36 * 8 * 128 * 2
    left = fit.usable_bytes - fit.weights_bytes - fit.reserved_bytes
    assert fit.kv_tokens == (left // (16 * fit.kv_token_bytes) - 1) * 16
    assert fit.sequences == fit.kv_tokens // 8192 == 45
    assert fit.fits
    large = fit_of("h100-sxm/llama-3.1-70b", 8192)
    assert not large.fits
    assert "the weights alone do not fit" in large.why
    assert "the context does not" in fit_of("h100-sxm/llama-3.1-70b@tp2", 32_000).why
    assert "40,960" in fit_of("h100-sxm/qwen3-8b", 50_000).why


# Days


def test_a_stretch_is_the_busiest_part(tmp_path: Path) -> None:
    quiet = [
        {
            "arrival_s": 2.0 * n,
            "prompt_tokens": 100,
            "output_tokens": 10,
            "model": "m",
            "user_id": n,
        }
        for n in range(100)
    ]
    busy = [
        {"arrival_s": 300 + 0.1 * n, "prompt_tokens": 100, "output_tokens": 10, "model": "m",
         "user_id": n % 3}
        for n in range(100)
    ]  # fmt: skip
    trace = write_rows(tmp_path / "t.parquet", quiet + busy)
    found = workload_of(trace, tmp_path / "days", model="m", rows=50)
    assert found.rows == 50
    assert found.span_s == pytest.approx(4.9)
    assert found.notes[0] == "the busiest 50 of 200 requests"
    assert found.notes[1].startswith("less than a minute")
    assert found.users == 100, "those of the whole trace: whoever asks does not know the stretch"


def test_other_models_and_embeddings_are_left_out(tmp_path: Path) -> None:
    own, other = rows(60), rows(60)
    mixed = [
        row if n % 3 else {**row, "endpoint": "embeddings", "model": "e"}
        for n, row in enumerate(own)
    ]
    trace = write_rows(tmp_path / "t.parquet", mixed)
    assert models_of(trace) == {"qwen3-8b": 40}
    assert workload_of(trace, tmp_path / "a", model="qwen3-8b").rows == 40
    trace = write_rows(tmp_path / "u.parquet", other)
    assert workload_of(trace, tmp_path / "b", model="llama-3.1-8b").rows == 60, "all, for another"
    with pytest.raises(PlanError, match="a plan takes 20 or more"):
        workload_of(write_rows(tmp_path / "v.parquet", rows(10)), tmp_path / "c")
    with pytest.raises(PlanError, match="--assume-output"):
        workload_of(write_rows(tmp_path / "w.parquet", rows(30, output_tokens=None)),
                    tmp_path / "d")  # fmt: skip


def test_other_days_are_like_the_first_and_the_same_each_time(
    load: Workload, tmp_path: Path
) -> None:
    first = open_trace(load.day_0)
    whole = load.window(1.0)
    sizes = [open_trace(day_of(load.day_0, number, 1.0, whole)).rows for number in (1, 2, 3)]
    assert len(set(sizes)) > 1
    assert all(abs(size - first.rows) < 5 * math.sqrt(first.rows) for size in sizes)
    again = workload_of(first, tmp_path / "again", model="qwen3-8b")
    days = [day_of(one.day_0, 1, 1.0, whole).read_bytes() for one in (again, load)]
    assert days[0] == days[1]


def test_a_load_that_has_grown_has_more_of_the_same_at_its_own_pace(tmp_path: Path) -> None:
    load = workload_of(
        write_rows(tmp_path / "t.parquet", rows(1500, 5.0)), tmp_path, model="qwen3-8b"
    )
    for number in (0, 2):
        from_s, until_s = load.window(4.0)
        assert until_s - from_s == pytest.approx(load.span_s / 4)
        assert from_s <= load.peak_s <= until_s
        grown = open_trace(day_of(load.day_0, number, 4.0, (from_s, until_s)))
        inside = ((load.arrival_s >= from_s) & (load.arrival_s <= until_s)).sum()
        assert grown.rows == pytest.approx(4 * inside, rel=0.25 if number else 0.0)
        assert grown.duration_s <= load.span_s / 4 + 1e-6
    from_s, until_s = load.window(100.0)
    assert until_s - from_s == pytest.approx(WINDOW_LEAST_S), "no fleet fails in half a second"
    assert load.window(0.5) == (0.0, load.span_s), "a smaller load is thinned"
    thin = open_trace(day_of(load.day_0, 0, 0.5, load.window(0.5)))
    assert thin.rows == pytest.approx(load.rows / 2, rel=0.2)


def test_more_of_a_day_is_never_less_of_any_request() -> None:
    chance = np.random.default_rng(1).uniform(size=5000)
    few, many = _poisson(chance, 1.0), _poisson(chance, 1.3)
    assert (many >= few).all()
    assert few.mean() == pytest.approx(1.0, abs=0.05)
    assert few.var() == pytest.approx(1.0, abs=0.1)
    assert many.mean() == pytest.approx(1.3, abs=0.06)


def test_copies_are_sessions_of_their_own(load: Workload) -> None:
    for number in range(1, 9):
        (batch,) = open_trace(day_of(load.day_0, number, 1.0, load.window(1.0))).batches()
        table = batch.to_pydict()
        of_session = [s for s in table["session_id"] if s is not None]
        if len(set(of_session)) > 1:
            break
    else:
        raise AssertionError("no day has the session twice")
    counts = {session: of_session.count(session) for session in set(of_session)}
    assert set(counts.values()) == {4}, "each copy is whole"
    own = {ids[1] for ids, s in zip(table["prefix_ids"], table["session_id"], strict=True)
           if s is not None}  # fmt: skip
    assert len(own) == len(counts), "its own prefix is its own, the system prompt is shared"
    assert {ids[0] for ids in table["prefix_ids"]} == {1}


def test_new_tokens_are_what_nobody_had_before(load: Workload) -> None:
    first, second = load.new_tokens[:2]
    assert first == load.prompt_tokens[0]
    assert second == load.prompt_tokens[1] - 16, "the shared block"
    assert load.new_tokens[100] == load.prompt_tokens[100] - 32, "and the session's own"


def test_a_day_without_a_line(load: Workload) -> None:
    rest = open_trace(load.without_line("shop"))
    assert rest.rows == load.counts("line")["logs"] == 200


def test_the_figures_text_says_kind_and_interval() -> None:
    figure = Estimate("knee", 2.1, 1.9, 2.4, "x the load", "extrapolated", 4)
    assert figure.text() == "2.1 x the load (1.9 to 2.4, extrapolated)"
    assert replace(figure, low=2.1, high=2.1).text() == "2.1 x the load (extrapolated)"


def test_a_promise_can_be_made_without_a_file() -> None:
    promise = promise_of(msgspec.convert(
        {"schema": 1, "classes": {"other": {"ttft_s_p99": 2}}}, SloFile
    ))  # fmt: skip
    assert promise.needs == (Need("class", "", "ttft_s_p99", 2.0),)
    assert promise.needs[0].missed_most == 0.01
