"""Refit the shipped profiles' coefficients from the public step-time tables.

``python -m twin.fit`` prints every coefficient with its interval and the formula's error. The
tables are looked for under the directory that the environment variable ``TWINKEEL_DATA`` names,
in ``profiles/``; their sources are named in each profile. Numbers come out in nanoseconds.
"""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.table import Table

from policy.files import load_gpus, load_models, load_profile
from twin.regression import Array, StepTable, relative_error, robust_relative_least_squares

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

NS_PER_MS = 1e6
# What one step can hold: the default token budget of a large card, and the tokens of its KV pool.
MAX_PREFILL_TOKENS = 8192
MAX_KV_TOKENS = 450_000
# Every row is predicted once by a fit that did not see it (row number modulo FOLDS).
FOLDS = 5
FREE_TOKENS_GRID = range(0, 401, 10)
BOOTSTRAP_ROUNDS = 200


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """Relative error in per cent: of the fit on all rows, and on rows that a fit did not see."""

    rows: int
    mean_percent: float
    worst_percent: float
    held_out_mean_percent: float
    held_out_worst_percent: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients in ns by the profile's key, 95 % intervals, token counts, errors by table."""

    coefficients: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    free_tokens: Mapping[str, int]
    errors: Mapping[str, ErrorReport]


def decode_terms(table: StepTable) -> Array:
    return np.stack([np.ones(len(table.batch)), table.batch, table.kv_tokens], axis=1)


def prefill_terms(table: StepTable, free_tokens: int) -> Array:
    charged = np.maximum(0.0, table.prefill_tokens - free_tokens)
    return np.stack([np.ones(len(charged)), charged, table.prefill_quad], axis=1)


def fit_decode(table: StepTable) -> Array:
    return robust_relative_least_squares(decode_terms(table), table.time_ns)


def fit_prefill(table: StepTable) -> tuple[Array, int]:
    """Coefficients and the free tokens with the least mean relative error."""
    best: tuple[float, int, Array] | None = None
    for free in FREE_TOKENS_GRID:
        terms = prefill_terms(table, free)
        solution = robust_relative_least_squares(terms, table.time_ns)
        error = float(np.mean(relative_error(terms @ solution, table.time_ns)))
        if best is None or error < best[0]:
            best = (error, free, solution)
    assert best is not None
    return best[2], best[1]


def mixed_ns(table: StepTable, decode: Array, prefill: Array, free_tokens: int) -> Array:
    """The formula for steps that decode and prefill: the decode step, and the tokens on top."""
    charged = np.maximum(0.0, table.prefill_tokens - free_tokens)
    predicted: Array = decode_terms(table) @ decode
    on_top: Array = prefill[1] * charged + prefill[2] * table.prefill_quad
    return predicted + on_top


def fit_mixed(table: StepTable, decode: Array, prefill: Array) -> int:
    def error(free: int) -> float:
        return float(np.mean(relative_error(mixed_ns(table, decode, prefill, free), table.time_ns)))

    return min(FREE_TOKENS_GRID, key=error)


def fit_gpu_tables(decode: StepTable, prefill: StepTable, mixed: StepTable) -> Fit:
    """All coefficients of one model. Mixed steps only choose ``mixed_free_tokens``."""
    decode_ns = fit_decode(decode)
    prefill_ns, prefill_free = fit_prefill(prefill)
    mixed_free = fit_mixed(mixed, decode_ns, prefill_ns)

    def predict_decode(seen: StepTable) -> Callable[[StepTable], Array]:
        solution = fit_decode(seen)
        return lambda rows: decode_terms(rows) @ solution

    def predict_prefill(seen: StepTable) -> Callable[[StepTable], Array]:
        solution, free = fit_prefill(seen)
        return lambda rows: prefill_terms(rows, free) @ solution

    def predict_mixed(seen: StepTable) -> Callable[[StepTable], Array]:
        free = fit_mixed(seen, decode_ns, prefill_ns)
        return lambda rows: mixed_ns(rows, decode_ns, prefill_ns, free)

    names = ("decode_fixed_ns", "decode_per_sequence_ns", "decode_per_kv_token_ns")
    prefill_names = ("prefill_fixed_ns", "prefill_per_token_ns", "prefill_per_quad_ns")
    return Fit(
        coefficients=_named(names, decode_ns) | _named(prefill_names, prefill_ns),
        intervals=_bootstrap(names, decode_terms(decode), decode.time_ns)
        | _bootstrap(prefill_names, prefill_terms(prefill, prefill_free), prefill.time_ns),
        free_tokens={"prefill_free_tokens": prefill_free, "mixed_free_tokens": mixed_free},
        errors={
            "decode": _errors(decode, predict_decode),
            "prefill": _errors(prefill, predict_prefill),
            "mixed": _errors(mixed, predict_mixed),
        },
    )


def read_gpu_tables(directory: Path, stem: str) -> tuple[StepTable, StepTable, StepTable]:
    """Decode, prefill and mixed steps of one model, kept to what one step can hold."""
    rows = _read_csv(directory / f"{stem}_decode.csv")
    batch, zero = rows["batch"], np.zeros(len(rows["batch"]))
    decode = StepTable(batch, batch * rows["context"], zero, zero, rows["ms"] * NS_PER_MS)
    rows = _read_csv(directory / f"{stem}_prefill.csv")
    zero = np.zeros(len(rows["batch"]))
    new_tokens = rows["batch"] * (rows["isl"] - rows["prefix_cached"])
    quad = rows["batch"] * (rows["isl"] ** 2 - rows["prefix_cached"] ** 2)
    prefill = StepTable(zero, zero, new_tokens, quad, rows["ms"] * NS_PER_MS)
    mixed = _mixed_table(_read_csv(directory / f"{stem}_mixed.csv"))
    return (
        decode.take(decode.kv_tokens <= MAX_KV_TOKENS),
        prefill.take(prefill.prefill_tokens <= MAX_PREFILL_TOKENS),
        mixed.take(mixed.batch > 0),
    )


def _mixed_table(rows: Mapping[str, Array]) -> StepTable:
    """The table's rule: decodes sit at isl + osl / 2; whole prompts of isl, or an even part."""
    prompts = np.ceil(rows["ctx_tokens"] / rows["isl"])
    parts = np.ceil(rows["isl"] / rows["ctx_tokens"])
    context = rows["isl"] + rows["osl"] / 2
    return StepTable(
        rows["gen_tokens"],
        rows["gen_tokens"] * context,
        rows["ctx_tokens"],
        prompts * rows["isl"] ** 2 / parts,
        rows["ms"] * NS_PER_MS,
    )


@dataclass(frozen=True, slots=True)
class OperatorFit:
    """A model without attention: ns by tokens in a step, before and behind the roofline's knee."""

    coefficients: Mapping[str, float]
    free_tokens: int
    error: ErrorReport


LAYER_OPERATORS = (
    "input_layernorm",
    "attn_pre_proj",
    "attn_rope",
    "attn_post_proj",
    "post_attention_layernorm",
    "mlp_up_proj",
    "mlp_act",
    "mlp_down_proj",
    "add",
)


def fit_operators(path: Path, layers: int, head_ns: float) -> OperatorFit:
    """Fixed, per-token and per-decode-sequence ns from per-operator times on one card.

    ``head_ns`` is added to every step for the output head, which the table lacks.
    """
    rows = _read_csv(path)
    single = rows["num_tensor_parallel_workers"] == 1
    single &= rows["num_tokens"] <= MAX_PREFILL_TOKENS
    tokens = rows["num_tokens"][single]
    layer_ms = sum((rows[f"time_stats.{name}.median"][single] for name in LAYER_OPERATORS), 0.0)
    time_ns = (rows["time_stats.emb.median"][single] + layers * layer_ms) * NS_PER_MS + head_ns
    zero = np.zeros(len(tokens))
    table = StepTable(zero, zero, tokens, zero, time_ns)

    def linear(seen: StepTable, free: int) -> tuple[float, Array, Array]:
        terms = prefill_terms(seen, free)[:, :2]
        solution = robust_relative_least_squares(terms, seen.time_ns)
        return float(np.mean(relative_error(terms @ solution, seen.time_ns))), solution, terms

    def choose(seen: StepTable) -> int:
        return min(FREE_TOKENS_GRID, key=lambda free: linear(seen, free)[0])

    def predict(seen: StepTable) -> Callable[[StepTable], Array]:
        best = choose(seen)
        solution = linear(seen, best)[1]
        return lambda rows: prefill_terms(rows, best)[:, :2] @ solution

    free = choose(table)
    fixed_ns, per_token_ns = linear(table, free)[1]
    small = table.take(tokens <= 128)
    decode_ns = robust_relative_least_squares(prefill_terms(small, 0)[:, :2], small.time_ns)
    return OperatorFit(
        coefficients={
            "prefill_fixed_ns": float(fixed_ns),
            "prefill_per_token_ns": float(per_token_ns),
            "decode_fixed_ns": float(decode_ns[0]),
            "decode_per_sequence_ns": float(decode_ns[1]),
        },
        free_tokens=free,
        error=_errors(table, predict),
    )


def fit_all_reduce(path: Path, workers: int) -> tuple[float, float, ErrorReport]:
    """Latency in ns and ns per KiB of one all-reduce among cards of one host."""
    rows = _read_csv(path, skip=("collective", ""))
    chosen = (rows["num_workers"] == workers) & (rows["rank"] == 0)
    size_kib = rows["size"][chosen] / 1024
    time_ns = rows["time_stats.all_reduce.median"][chosen] * NS_PER_MS
    zero = np.zeros(len(size_kib))
    table = StepTable(zero, zero, size_kib, zero, time_ns)

    def solve(seen: StepTable) -> Array:
        return robust_relative_least_squares(prefill_terms(seen, 0)[:, :2], seen.time_ns)

    def predict(seen: StepTable) -> Callable[[StepTable], Array]:
        solution = solve(seen)
        return lambda rows: prefill_terms(rows, 0)[:, :2] @ solution

    latency_ns, per_kib_ns = solve(table)
    return float(latency_ns), float(per_kib_ns), _errors(table, predict)


def output_head_ns() -> float:
    """Llama-2-7b's output head read once at the card's bandwidth (its table leaves it out)."""
    model, gpu = load_models()["llama-2-7b"], load_gpus()["h100-sxm"]
    head_bytes = 2 * model.vocab * model.hidden
    return head_bytes * 1e9 / (gpu.bandwidth_bytes_per_s * gpu.bandwidth_efficiency)


def _errors(
    table: StepTable, train: Callable[[StepTable], Callable[[StepTable], Array]]
) -> ErrorReport:
    seen = relative_error(train(table)(table), table.time_ns) * 100
    fold = np.arange(len(table.time_ns)) % FOLDS
    parts: list[Array] = []
    for number in range(FOLDS):
        rest = table.take(fold == number)
        parts.append(relative_error(train(table.take(fold != number))(rest), rest.time_ns) * 100)
    unseen = np.concatenate(parts)
    return ErrorReport(
        len(seen), float(seen.mean()), float(seen.max()), float(unseen.mean()), float(unseen.max())
    )


def _named(names: Sequence[str], solution: Array) -> dict[str, float]:
    return {name: float(value) for name, value in zip(names, solution, strict=True)}


def _bootstrap(
    names: Sequence[str], terms: Array, time_ns: Array
) -> dict[str, tuple[float, float]]:
    """95 % intervals from resampled rows, with a fixed seed."""
    generator = np.random.default_rng(0)
    solutions: list[Array] = []
    for _ in range(BOOTSTRAP_ROUNDS):
        rows = generator.integers(0, len(time_ns), len(time_ns))
        solutions.append(robust_relative_least_squares(terms[rows], time_ns[rows]))
    low, high = np.quantile(np.stack(solutions), [0.025, 0.975], axis=0)
    return {
        name: (max(0.0, float(a)), float(b)) for name, a, b in zip(names, low, high, strict=True)
    }


def _read_csv(path: Path, skip: Sequence[str] = ()) -> dict[str, Array]:
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise ValueError(f"{path}: no rows")
    numeric = [name for name in rows[0] if name not in skip and _is_number(rows[0][name])]
    return {name: np.array([float(row[name]) for row in rows]) for name in numeric}


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


GPU_TABLES = {
    "h100-sxm/qwen3-8b": "aic012_h100sxm_vllm0.24_qwen3-8b",
    "h100-sxm/llama-3.1-8b": "aic012_h100sxm_vllm0.24_llama-3.1-8b",
}


def fit_profile(data: Path, name: str) -> Fit:
    """Refit one shipped profile from the tables under ``data/profiles``."""
    return fit_gpu_tables(
        *read_gpu_tables(data / "profiles" / "aiconfigurator_h100", GPU_TABLES[name])
    )


def fit_llama2(data: Path) -> OperatorFit:
    path = data / "profiles" / "vidur_h100" / "Llama-2-7b-hf.mlp.csv"
    return fit_operators(path, load_models()["llama-2-7b"].layers, output_head_ns())


def fit_network(data: Path, workers: int) -> tuple[float, float, ErrorReport]:
    return fit_all_reduce(data / "profiles" / "vidur_h100" / "h100_dgx.all_reduce.csv", workers)


def main() -> int:
    directory = os.environ.get("TWINKEEL_DATA")
    if not directory:
        print("set TWINKEEL_DATA to the directory that holds profiles/", file=sys.stderr)
        return 2
    data, console = Path(directory), Console(width=100)
    for name in GPU_TABLES:
        _print_fit(console, name, fit_profile(data, name))
    operators = fit_llama2(data)
    table = Table("h100-sxm/llama-2-7b", "ns")
    for key, value in operators.coefficients.items():
        table.add_row(key, f"{value:.4g}")
    table.add_row("prefill_free_tokens", str(operators.free_tokens))
    table.add_row("error", _error_text(operators.error))
    console.print(table)
    for workers in (2, 4, 8):
        latency_ns, per_kib_ns, error = fit_network(data, workers)
        console.print(
            f"all-reduce over {workers}: {latency_ns:.4g} ns + {per_kib_ns:.4g} ns/KiB; "
            + _error_text(error)
        )
    return 0


def _print_fit(console: Console, name: str, fit: Fit) -> None:
    shipped = load_profile(name).step
    table = Table(name, "refit", "shipped", "95 % interval")
    for key, value in fit.coefficients.items():
        low, high = fit.intervals[key]
        row = f"{getattr(shipped, key).value:.4g}"
        table.add_row(key, f"{value:.4g}", row, f"{low:.4g} to {high:.4g}")
    for key, tokens in fit.free_tokens.items():
        held = getattr(shipped, key)
        table.add_row(key, str(tokens), "" if held is None else str(held.value), "")
    for key, error in fit.errors.items():
        table.add_row(f"{key} error", _error_text(error), "", "")
    console.print(table)


def _error_text(error: ErrorReport) -> str:
    return (
        f"mean {error.mean_percent:.1f} %, worst {error.worst_percent:.1f} %; held out "
        f"{error.held_out_mean_percent:.1f} %, {error.held_out_worst_percent:.1f} % "
        f"({error.rows} rows)"
    )


if __name__ == "__main__":
    sys.exit(main())
