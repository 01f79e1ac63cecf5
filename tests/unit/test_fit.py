"""The shipped coefficients are what a refit gives, and the quoted errors are measured ones."""

import math
import os
from pathlib import Path

import numpy as np
import pytest

from policy.cost import FitError
from policy.files import load_gpus, load_profile
from twin import fit
from twin.fit import ErrorReport, StepTable

needs_data = pytest.mark.skipif(
    "TWINKEEL_DATA" not in os.environ, reason="TWINKEEL_DATA is not set: no tables to fit"
)


@pytest.fixture(scope="module")
def data() -> Path:
    return Path(os.environ["TWINKEEL_DATA"])


THREE_DIGITS = 5e-4


def assert_quoted(quoted: FitError, measured: ErrorReport) -> None:
    assert quoted.rows == measured.rows
    for name in (
        "mean_percent",
        "worst_percent",
        "held_out_mean_percent",
        "held_out_worst_percent",
    ):
        assert getattr(quoted, name) == pytest.approx(getattr(measured, name), abs=0.051), name


def test_robust_least_squares_ignores_a_few_wild_rows() -> None:
    generator = np.random.default_rng(1)
    terms = np.stack([np.ones(60), generator.uniform(1, 100, 60)], axis=1)
    time_ns = terms @ np.array([50.0, 3.0])
    time_ns[::20] *= 3
    solution = fit.robust_relative_least_squares(terms, time_ns)
    assert solution == pytest.approx([50.0, 3.0], rel=0.02)


def test_a_table_made_by_the_formula_gives_its_coefficients_back() -> None:
    batch, context = (np.array(grid).ravel() for grid in np.meshgrid([1, 8, 64], [100, 900, 5000]))
    zero = np.zeros(9)
    decode = StepTable(
        batch.astype(float), (batch * context).astype(float), zero, zero, 6e6 + 1e4 * batch
    )
    decode = StepTable(
        decode.batch,
        decode.kv_tokens,
        zero,
        zero,
        decode.time_ns + 40 * decode.kv_tokens,
    )
    tokens = np.array([16.0, 64, 128, 512, 700, 1024, 2048, 4096, 8192])
    time_ns = 8e6 + 2e4 * np.maximum(0, tokens - 200) + 0.5 * tokens**2
    prefill = StepTable(zero, zero, tokens, tokens**2, time_ns)
    mixed = StepTable(
        decode.batch,
        decode.kv_tokens,
        tokens,
        tokens**2,
        decode.time_ns + 2e4 * np.maximum(0, tokens - 100) + 0.5 * tokens**2,
    )
    result = fit.fit_gpu_tables(decode, prefill, mixed)
    wanted = {
        "decode_fixed_ns": 6e6,
        "decode_per_sequence_ns": 1e4,
        "decode_per_kv_token_ns": 40,
        "prefill_fixed_ns": 8e6,
        "prefill_per_token_ns": 2e4,
        "prefill_per_quad_ns": 0.5,
    }
    assert result.coefficients == pytest.approx(wanted, rel=1e-6)
    assert result.free_tokens == {"prefill_free_tokens": 200, "mixed_free_tokens": 100}
    assert result.errors["mixed"].worst_percent == pytest.approx(0, abs=1e-3)


def test_the_entry_point_asks_for_its_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TWINKEEL_DATA", raising=False)
    assert fit.main() == 2
    assert "TWINKEEL_DATA" in capsys.readouterr().err


@needs_data
@pytest.mark.parametrize("name", sorted(fit.GPU_TABLES))
def test_the_shipped_coefficients_are_the_refit(data: Path, name: str) -> None:
    shipped, result = load_profile(name), fit.fit_profile(data, name)
    for key, value in result.coefficients.items():
        assert getattr(shipped.step, key).value == pytest.approx(value, rel=THREE_DIGITS), key
    for key, (low, high) in result.intervals.items():
        assert getattr(shipped.step, key).interval == pytest.approx((low, high), rel=1e-2), key
    for key, tokens in result.free_tokens.items():
        assert getattr(shipped.step, key).value == tokens
    quoted: dict[str, FitError] = {row.table: row for row in shipped.trust.errors}
    assert set(quoted) == {"decode", "prefill", "mixed"}
    for table, measured in result.errors.items():
        assert_quoted(quoted[table], measured)
    assert quoted["decode"].mean_percent < 3
    assert quoted["prefill"].mean_percent < 3
    assert quoted["mixed"].mean_percent < 5


@needs_data
def test_the_llama_2_profile_is_the_refit_of_its_operators(data: Path) -> None:
    shipped, result = load_profile("h100-sxm/llama-2-7b"), fit.fit_llama2(data)
    attention_ns = 32 * 2 * 3000
    for key, value in result.coefficients.items():
        wanted = value + attention_ns if key.endswith("_fixed_ns") else value
        assert getattr(shipped.step, key).value == pytest.approx(wanted, rel=THREE_DIGITS), key
    assert shipped.step.prefill_free_tokens is not None
    assert shipped.step.prefill_free_tokens.value == result.free_tokens
    assert_quoted(shipped.trust.errors[0], result.error)
    assert shipped.trust.status == "untuned"


@needs_data
def test_the_all_reduce_figures_are_the_refit(data: Path) -> None:
    for row in load_gpus()["h100-sxm"].all_reduce:
        latency_ns, per_kib_ns, error = fit.fit_network(data, row.workers)
        assert row.latency_ns == pytest.approx(latency_ns, rel=THREE_DIGITS)
        assert row.per_kib_ns == pytest.approx(per_kib_ns, rel=THREE_DIGITS)
        assert f"mean error {error.mean_percent:.0f} %" in row.source


# Median milliseconds of the tiny model on two CPU cores, vLLM 0.32.0, eager, a quiet machine:
# prefill alone by prompt tokens (4096 runs as two chunks of 2048).
TINY_PREFILL_MS = {
    16: 3.1,
    64: 4.4,
    128: 5.9,
    256: 9.1,
    512: 16.7,
    1024: 36.0,
    2048: 94.0,
    4096: 277.0,
}
TINY_CHUNK_TOKENS = 2048


def tiny_prefill_errors_percent(fixed_ns: float, token_ns: float, quad_ns: float) -> list[float]:
    """Relative error of the published rule on each measured prompt length."""
    errors: list[float] = []
    for tokens, measured_ms in TINY_PREFILL_MS.items():
        chunks = math.ceil(tokens / TINY_CHUNK_TOKENS)
        predicted_ns = chunks * fixed_ns + token_ns * tokens + quad_ns * tokens**2
        errors.append(abs(predicted_ns / (measured_ms * fit.NS_PER_MS) - 1) * 100)
    return errors


def test_the_tiny_profile_quotes_its_error_on_the_measured_table() -> None:
    profile = load_profile("cpu/tiny-qwen3")
    step = profile.step
    errors = tiny_prefill_errors_percent(
        step.prefill_fixed_ns.value, step.prefill_per_token_ns.value, step.prefill_per_quad_ns.value
    )
    quoted = profile.trust.errors[0]
    assert quoted.rows == len(errors)
    assert quoted.mean_percent == pytest.approx(np.mean(errors), abs=0.051)
    assert quoted.worst_percent == pytest.approx(max(errors), abs=0.051)
