"""A profile's step coefficients from the times of single operators, measured on one card.

``python -m twin.fit_operators`` prints the refit of ``rtx-4090/llama-3.1-8b`` as YAML. The tables
are those of LLMServingSim's profiler, in ``profiles/llmservingsim_rtx4090`` under the directory
that the environment variable ``TWINKEEL_DATA`` names:

* ``dense.csv``: us of each operator whose time depends on the number of new tokens alone;
* ``per_sequence.csv``: us of the output head and the sampler by number of sequences;
* ``attention.csv``: us of one layer's attention kernel by prefill chunk, KV tokens in front of the
  chunk, decoding sequences, and KV tokens of each of them;
* ``meta.json`` of the run: KV tokens of the pool, limits of a step, sizes of the captured graphs.

One layer was measured, so a step is the sum of its operators, layers times over. Nothing else is
used: no time of a whole step, and nothing of what became of the run's requests.
"""

from __future__ import annotations

import csv
import json
import os
import sys
from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from policy.cost import Coefficient, Padding, Step, TokenCount, TokenPadding
from policy.files import load_models
from twin.fit import (
    FREE_TOKENS_GRID,
    ErrorReport,
    decode_terms,
    fit_decode,
    fit_prefill,
    mixed_ns,
)
from twin.regression import Array, StepTable, relative_error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PROFILE = "rtx-4090/llama-3.1-8b"
FOLDER = Path("profiles") / "llmservingsim_rtx4090"
MODEL = "llama-3.1-8b"
SOURCE = "LLMServingSim 5daddb21 (MIT), vLLM 0.19 operators on one RTX 4090, 32 layers"
NS_PER_US = 1e3
TILE_TOKENS = 64
"""Matrices are computed in tiles of so many tokens: dense.csv rises in stairs of this width."""
NORMS_PER_LAYER = 2
ONCE = ("embedding", "final_layernorm")
"""Operators that a step runs once, not in every layer."""
LEAST_CHUNK = 16
FILLS = (1 / 8, 1 / 4, 1 / 2, 3 / 4, 1)
"""Shares of the KV pool that the fitted steps hold."""
LEAST_CONTEXT = 128
"""Decode kernels read KV in tiles: below this length time does not follow KV tokens. Hardly a
request is shorter, so such steps are not fitted; they take less than the line says. Chosen with
the outcome of the recorded run in view, as is the next one."""
LEAST_MIXED_BATCH = 8
"""Beside a prefill a few sequences are read by too few units, and time follows the longest, not
the sum: such steps are not fitted; with long contexts they take more than the formula says."""
FOLDS = 5

Curve = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step of the engine can hold, and the batch sizes that graphs were captured for."""

    kv_tokens: int
    step_tokens: int
    sequences: int
    capture_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operators:
    """One card's operator times, in us, and how they add up to a step."""

    layers: int
    limits: Limits
    dense: Mapping[str, Curve]
    per_sequence: Mapping[str, Curve]
    attention: Mapping[tuple[int, int, int, int], float]
    """By (prefill chunk, KV tokens in front of it, decoding sequences, KV tokens of each)."""
    axes: tuple[tuple[int, ...], ...]
    """The grid of ``attention``, sorted; 0 stands for none."""

    def contexts(self, decodes: int, room_tokens: int) -> list[int]:
        """KV tokens of each of so many sequences when they fill the pool to each of ``FILLS``."""
        each = [int(room_tokens * fill) // decodes for fill in FILLS]
        return [tokens for tokens in each if LEAST_CONTEXT <= tokens <= self.axes[3][-1]]

    def step_ns(self, decodes: int, kv_each: int, chunk: int = 0, kv_prefill: int = 0) -> float:
        """ns of a step that decodes sequences of ``kv_each`` tokens and prefills one chunk."""
        tokens, sequences = decodes + chunk, decodes + bool(chunk)
        layers = self._dense_us(tokens) + self.layers * self._attention_us(
            (chunk, kv_prefill, decodes, kv_each)
        )
        head = sum(float(np.interp(sequences, *curve)) for curve in self.per_sequence.values())
        return (layers + head) * NS_PER_US

    def _dense_us(self, tokens: int) -> float:
        """All but attention. A captured graph runs at the next captured size; beyond the last one,
        as matrices are computed in tiles, the next measured number of tokens counts."""
        sizes = self.limits.capture_sizes
        if tokens <= sizes[-1]:
            tokens = sizes[bisect_left(sizes, tokens)]
        total = 0.0
        for name, (measured, time_us) in self.dense.items():
            calls = self.layers * (NORMS_PER_LAYER if name == "layernorm" else 1)
            at = int(np.searchsorted(measured, tokens))
            total += float(time_us[at]) * (1 if name in ONCE else calls)
        return total

    def _attention_us(self, at: tuple[int, int, int, int]) -> float:
        """Between the measured points, linear in all but the chunk; in that, in its square."""
        sides: list[tuple[tuple[int, float], ...]] = []
        for number, (axis, value) in enumerate(zip(self.axes, at, strict=True)):
            above = bisect_left(axis, value)
            if axis[above] == value:
                sides.append(((value, 1.0),))
                continue
            low, high = axis[above - 1], axis[above]
            power = 1 if number else 2
            share = (value**power - low**power) / (high**power - low**power)
            sides.append(((low, 1.0 - share), (high, share)))
        total = 0.0
        for chunk, kv_prefill, decodes, kv_each in product(*sides):
            point = (chunk[0], kv_prefill[0], decodes[0], kv_each[0])
            total += chunk[1] * kv_prefill[1] * decodes[1] * kv_each[1] * self.attention[point]
        return total


@dataclass(frozen=True, slots=True)
class OperatorStep:
    """The fitted step, how far the whole formula is off by table, and how far its line alone is
    (without paddings and the terms of mixed steps)."""

    step: Step
    errors: Mapping[str, ErrorReport]
    line_mean_percent: Mapping[str, float]


def read_operators(folder: Path, layers: int) -> Operators:
    """Read the tables.

    Raises:
        OSError, KeyError, ValueError: a table is missing or not in this form.
    """
    tables = folder / "profile_bf16" / "tp1"
    attention: dict[tuple[int, int, int, int], float] = {}
    with (tables / "attention.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            point = (
                int(row["prefill_chunk"]),
                int(row["kv_prefill"]),
                int(row["n_decode"]),
                int(row["kv_decode"]),
            )
            attention[point] = float(row["time_us"])
    meta = json.loads((folder / "vllm_run" / "meta.json").read_text(encoding="utf-8"))
    resolved = meta["resolved_config"]
    return Operators(
        layers=layers,
        limits=Limits(
            kv_tokens=meta["kv_cache"]["num_kv_tokens"],
            step_tokens=resolved["scheduler_config"]["max_num_batched_tokens"],
            sequences=resolved["scheduler_config"]["max_num_seqs"],
            capture_sizes=tuple(resolved["compilation_config"]["cudagraph_capture_sizes"]),
        ),
        dense=_read_curves(tables / "dense.csv", "tokens"),
        per_sequence=_read_curves(tables / "per_sequence.csv", "sequences"),
        attention=attention,
        axes=tuple(tuple(sorted(set(values))) for values in zip(*attention, strict=True)),
    )


def _read_curves(path: Path, axis: str) -> dict[str, Curve]:
    rows: defaultdict[str, dict[int, float]] = defaultdict(dict)
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows[row["layer"]][int(row[axis])] = float(row["time_us"])
    return {
        name: (np.array(sorted(curve), dtype=float), np.array([curve[x] for x in sorted(curve)]))
        for name, curve in rows.items()
    }


def decode_table(operators: Operators) -> StepTable:
    """Decode steps: both ends of every captured batch size, with the pool filled to each level."""
    limits = operators.limits
    sizes = [size for size in limits.capture_sizes if size <= limits.sequences]
    batches = sorted({*sizes, *(size + 1 for size in sizes[:-1])})
    points = [
        (batch, kv_each, 0, 0)
        for batch in batches
        for kv_each in operators.contexts(batch, limits.kv_tokens)
    ]
    return _compose(operators, points)


def prefill_table(operators: Operators) -> StepTable:
    """Steps that prefill one chunk, in front of it nothing or a part of the pool."""
    limits = operators.limits
    points = [
        (0, 0, chunk, kv)
        for chunk, kv in product(_chunks(limits.step_tokens), operators.axes[1])
        if chunk + kv <= limits.kv_tokens
    ]
    return _compose(operators, points)


def mixed_table(operators: Operators) -> StepTable:
    """Steps that prefill a chunk from its start and decode beside it."""
    limits = operators.limits
    points = [
        (batch, kv_each, chunk, 0)
        for batch in operators.axes[2]
        for chunk in _chunks(limits.step_tokens - batch)
        if LEAST_MIXED_BATCH <= batch < limits.sequences
        for kv_each in operators.contexts(batch, limits.kv_tokens - chunk)
    ]
    return _compose(operators, points)


def _chunks(most: int) -> list[int]:
    return [LEAST_CHUNK, LEAST_CHUNK * 2, *range(TILE_TOKENS, most + 1, TILE_TOKENS)]


def _compose(operators: Operators, points: Sequence[tuple[int, int, int, int]]) -> StepTable:
    rows = np.array(points, dtype=float).reshape(-1, 4)
    batch, kv_each, chunk, kv_prefill = rows.T
    return StepTable(
        batch,
        batch * kv_each,
        chunk,
        (kv_prefill + chunk) ** 2 - kv_prefill**2,
        np.array([operators.step_ns(*point) for point in points]),
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """A fit in numbers: the line, then what is padded onto it."""

    decode: Array
    prefill: Array
    prefill_free: int
    mixed_free: int
    batch_sizes: Sequence[int]
    batch_extra: Array
    mixed_extra: Array
    """ns for each decoding sequence, and for each of their KV tokens."""
    tile_extra: Array
    """ns by tiles of new tokens, from one tile on."""

    def line_ns(self, table: StepTable) -> Array:
        mixed = mixed_ns(table, self.decode, self.prefill, self.mixed_free)
        alone: Array = mixed_ns(table, np.zeros(3), self.prefill, self.prefill_free)
        alone += self.prefill[0]
        return np.where(table.batch > 0, mixed, alone)

    def padded_ns(self, table: StepTable) -> Array:
        batch_extra = self.batch_extra[_bucket(table.batch, self.batch_sizes)]
        mixed = decode_terms(table)[:, 1:] @ self.mixed_extra
        on_top = np.where(
            table.prefill_tokens > 0, self.tile_extra[_tile(table)] + mixed, batch_extra
        )
        padded: Array = self.line_ns(table) + on_top
        return padded


def _bucket(batch: Array, sizes: Sequence[int]) -> np.ndarray:
    return np.searchsorted(np.asarray(sizes, dtype=float), batch)


def _tile(table: StepTable) -> np.ndarray:
    tokens = table.batch + table.prefill_tokens
    return np.ceil(tokens / TILE_TOKENS).astype(int) - 1


def _fit(tables: Mapping[str, StepTable], sizes: Sequence[int], tiles: int) -> _Parts:
    """The line of decode steps and that of prefill steps first, as for any profile; then, with
    these held, what lies between them and the rows."""
    decode, prefill, mixed = tables["decode"], tables["prefill"], tables["mixed"]
    decode_ns = fit_decode(decode)
    prefill_ns, prefill_free = fit_prefill(prefill)
    off_ns = decode.time_ns - decode_terms(decode) @ decode_ns
    bucket = _bucket(decode.batch, sizes)
    batch_extra = np.array([np.median(off_ns[bucket == number]) for number in range(len(sizes))])
    lines = [
        _Parts(
            decode_ns, prefill_ns, prefill_free, mixed_free, sizes, batch_extra,
            np.zeros(2), np.zeros(tiles),
        )
        for mixed_free in FREE_TOKENS_GRID
    ]  # fmt: skip
    both = [(table, _terms_on_top(table, tiles)) for table in (prefill, mixed)]
    terms = np.concatenate([on_top / table.time_ns[:, None] for table, on_top in both])
    off = np.concatenate(
        [
            np.stack([1.0 - line.line_ns(table) / table.time_ns for line in lines], axis=1)
            for table, _ in both
        ]
    )
    solutions = np.linalg.lstsq(terms, off, rcond=None)[0]
    padded = [
        replace(line, mixed_extra=solution[:2], tile_extra=solution[2:])
        for line, solution in zip(lines, solutions.T, strict=True)
    ]
    return min(padded, key=lambda parts: _off_percent(parts.padded_ns(mixed), mixed).mean())


def _terms_on_top(table: StepTable, tiles: int) -> Array:
    """Decoding sequences, their KV tokens, and which tile the step's new tokens fill last."""
    stairs = np.zeros((len(table.batch), tiles))
    stairs[np.arange(len(table.batch)), _tile(table)] = 1.0
    return np.concatenate([decode_terms(table)[:, 1:], stairs], axis=1)


def fit_step(operators: Operators) -> OperatorStep:
    """Fit all coefficients of a step."""
    limits = operators.limits
    sizes = [size for size in limits.capture_sizes if size <= limits.sequences]
    tiles = -(-limits.step_tokens // TILE_TOKENS)
    tables = {
        "decode": decode_table(operators),
        "prefill": prefill_table(operators),
        "mixed": mixed_table(operators),
    }
    parts = _fit(tables, sizes, tiles)
    unseen: dict[str, list[Array]] = {name: [] for name in tables}
    for fold in range(FOLDS):
        folds = {name: np.arange(len(table.batch)) % FOLDS for name, table in tables.items()}
        seen = {name: table.take(folds[name] != fold) for name, table in tables.items()}
        trained = _fit(seen, sizes, tiles)
        for name, table in tables.items():
            rest = table.take(folds[name] == fold)
            unseen[name].append(_off_percent(trained.padded_ns(rest), rest))
    errors, line = {}, {}
    for name, table in tables.items():
        seen_percent = _off_percent(parts.padded_ns(table), table)
        held_out = np.concatenate(unseen[name])
        errors[name] = ErrorReport(
            len(seen_percent), float(seen_percent.mean()), float(seen_percent.max()),
            float(held_out.mean()), float(held_out.max()),
        )  # fmt: skip
        line[name] = float(_off_percent(parts.line_ns(table), table).mean())
    return OperatorStep(_step(parts), errors, line)


def _off_percent(predicted: Array, table: StepTable) -> Array:
    return relative_error(predicted, table.time_ns) * 100


def _step(parts: _Parts) -> Step:
    def coefficient(value: float, what: str) -> Coefficient:
        return Coefficient(float(value), f"{SOURCE}: {what}")

    per_sequence, per_kv_token = parts.mixed_extra
    none = Coefficient(0.0, "none: asynchronous scheduling hides it behind the step before")
    return Step(
        decode_fixed_ns=coefficient(parts.decode[0], "decode steps"),
        decode_per_sequence_ns=coefficient(parts.decode[1], "decode steps"),
        decode_per_kv_token_ns=coefficient(parts.decode[2], "decode steps"),
        prefill_fixed_ns=coefficient(parts.prefill[0], "prefill steps"),
        prefill_per_token_ns=coefficient(parts.prefill[1], "prefill steps"),
        prefill_per_quad_ns=coefficient(parts.prefill[2], "prefill steps"),
        host_per_step_ns=none,
        host_per_sequence_ns=none,
        logprobs_per_sequence_ns=Coefficient(20_000.0, "assumption, as for h100-sxm"),
        prefill_free_tokens=TokenCount(parts.prefill_free, "least mean error on a grid of 10"),
        mixed_free_tokens=TokenCount(parts.mixed_free, "least mean error on a grid of 10"),
        mixed_per_sequence_ns=coefficient(per_sequence, "steps that decode and prefill"),
        mixed_per_kv_token_ns=coefficient(per_kv_token, "steps that decode and prefill"),
        batch_padding=tuple(
            Padding(size, float(extra_ns))
            for size, extra_ns in zip(parts.batch_sizes, parts.batch_extra, strict=True)
        ),
        token_padding=tuple(
            TokenPadding((number + 1) * TILE_TOKENS, float(extra_ns))
            for number, extra_ns in enumerate(parts.tile_extra)
        ),
    )


def fit_rtx4090(data: Path) -> OperatorStep:
    """Refit ``rtx-4090/llama-3.1-8b`` from the tables under ``data``."""
    return fit_step(read_operators(data / FOLDER, load_models()[MODEL].layers))


def main() -> int:
    directory = os.environ.get("TWINKEEL_DATA")
    if not directory:
        print("set TWINKEEL_DATA to the directory that holds profiles/", file=sys.stderr)
        return 2
    result = fit_rtx4090(Path(directory))
    print(msgspec.yaml.encode(result.step).decode())
    for name, error in result.errors.items():
        print(f"# {name}: {error}; the line alone: {result.line_mean_percent[name]:.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
