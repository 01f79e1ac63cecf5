"""ServeGen's client tables: arrivals drawn from measured rates and fitted laws.

Tables of windows per client (tenant) of Alibaba Cloud Model Studio, after Xiang et al.,
ServeGen, arXiv 2505.09999. *Rates*: `model`, `client_id`, `t_s` (start of a 600 s window),
`rate_rps`, `dist` (Gamma or Weibull), `shape`. *Lengths*: for the same clients, in 6 h windows,
28 quantiles each of `input_tokens_q` and `output_tokens_q`, and `reason_ratio_mean`.

Each client is a renewal process whose gaps have the fitted shape and the window's rate, carried
on from window to window. A client without lengths takes its model's mean quantiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from traces.generate.arrivals import draw_gaps, first_gap
from traces.schema import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from traces.readers.common import ReadOptions, Rejects

    Array = np.ndarray[Any, np.dtype[Any]]
    Key = tuple[str, int]

COLUMNS = ("model", "client_id", "t_s", "rate_rps", "dist", "shape")
LENGTH_COLUMNS = (
    "model",
    "client_id",
    "t_s",
    "input_tokens_q",
    "output_tokens_q",
    "reason_ratio_mean",
)
WINDOW_S = 600.0
LENGTHS_WINDOW_S = 21_600
# fmt: off
QUANTILES = (
    0.005, 0.01, 0.02, 0.05, 0.10, 0.15, 0.20, 0.25, 0.30, 0.35, 0.40, 0.45, 0.50, 0.55,
    0.60, 0.65, 0.70, 0.75, 0.80, 0.85, 0.90, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999,
)
# fmt: on
_MOST_ROWS = 100_000_000
_BATCH_ROWS = 16_384
_LEAST_SHAPE = 0.01


@dataclass(frozen=True)
class _Lengths:
    """Quantiles of a client in a window, and the share of an answer that is reasoning."""

    prompt: Array
    answer: Array
    reason: float


@dataclass
class _Table:
    """Lengths by client, with the model's mean for clients without."""

    clients: dict[Key, dict[int, _Lengths]] = field(default_factory=dict)
    models: dict[str, _Lengths] = field(default_factory=dict)

    def of(self, model: str, client: int, t_s: float) -> _Lengths:
        windows = self.clients.get((model, client))
        if windows is None:
            return self.models[model]
        nearest = min(windows, key=lambda start: (abs(start + LENGTHS_WINDOW_S / 2 - t_s), start))
        return windows[nearest]


def read(path: Path, options: ReadOptions, rejects: Rejects) -> Iterator[pa.RecordBatch]:
    """Yield generated requests, in no particular order within a window.

    `options.models` and `options.window_s` choose, `options.rate_scale` thins or thickens,
    `options.seed` seeds. Raises: TraceError when that would give more than 100 million requests.
    """
    windows = _windows(path, options, rejects)
    expected = sum(w[3] for w in windows) * WINDOW_S * options.rate_scale
    if options.limit is None and expected > _MOST_ROWS:
        raise TraceError(
            f"{path}: that would be {expected:,.0f} requests; choose with --model and --window, "
            "or thin with --rate-scale"
        )
    table = _lengths(path, options)
    rng = np.random.Generator(np.random.PCG64(options.seed))
    left_over: dict[Key, float] = {}
    gathered, made = _Gathered(), 0
    for model, client, t_s, rate, dist, shape in windows:
        if model not in table.models:
            raise TraceError(f"{path}: the lengths table has no client of model {model!r}")
        total = rate * WINDOW_S * options.rate_scale
        law = dist.lower()
        if (model, client) not in left_over:
            left_over[model, client] = first_gap(rng, law, shape, _unit_scale(law, shape))
        at, left_over[model, client] = _renewals(rng, law, shape, left_over[model, client], total)
        times = t_s + at / total * WINDOW_S
        if options.limit is not None:
            times = times[: options.limit - made]
        made += times.size
        gathered.add(rng, times, model, client, table.of(model, client, t_s))
        yield from gathered.batches(_BATCH_ROWS)
        if options.limit is not None and made >= options.limit:
            break
    yield from gathered.batches(1)


def _windows(
    path: Path, options: ReadOptions, rejects: Rejects
) -> list[tuple[str, int, float, float, str, float]]:
    """The chosen client-windows, by time, model and client."""
    with pq.ParquetFile(path, pre_buffer=False) as file:
        table = file.read(list(COLUMNS)).combine_chunks()
    low, high = options.window_s or (-math.inf, math.inf)
    starts = table.column("t_s").to_numpy()
    wanted = (starts >= low) & (starts < high)
    models = table.column("model").cast(pa.string())
    if options.models:
        wanted &= np.isin(models.to_numpy(), options.models)
    at = np.flatnonzero(wanted)
    rows = table.take(pa.array(at))
    chosen = []
    columns = [rows.column(name).to_pylist() for name in COLUMNS]
    for number, row in zip((at + 1).tolist(), zip(*columns, strict=True), strict=True):
        model, client, t_s, rate, dist, shape = row
        rejects.seen += 1
        if None in row or dist not in ("Gamma", "Weibull") or not shape > 0 or not rate >= 0:
            rejects.bad(number, f"no renewal law: rate_rps {rate}, dist {dist!r}, shape {shape}")
        elif rate > 0:
            chosen.append((model, client, float(t_s), rate, dist, max(shape, _LEAST_SHAPE)))
    if not chosen:
        known = ", ".join(sorted({str(model) for model in models.unique().to_pylist()}))
        raise TraceError(f"{path}: no window is left; models are: {known}")
    return sorted(chosen, key=lambda w: (w[2], w[0], w[1]))


def _lengths(path: Path, options: ReadOptions) -> _Table:
    where = options.lengths_path or path.with_name("servegen_client_lengths_6h.parquet")
    if not where.is_file():
        raise TraceError(f"{where}: no lengths table; say where it is: --lengths FILE")
    with pq.ParquetFile(where, pre_buffer=False) as file:
        source = file.read(list(LENGTH_COLUMNS))
    columns = [source.column(name).to_pylist() for name in LENGTH_COLUMNS]
    table = _Table()
    for model, client, t_s, prompt, answer, reason in zip(*columns, strict=True):
        if (options.models and model not in options.models) or not prompt or not answer:
            continue
        windows = table.clients.setdefault((model, client), {})
        windows[t_s] = _Lengths(np.array(prompt), np.array(answer), reason or 0.0)
    for name in dict.fromkeys(model for model, _ in table.clients):
        of_model = [w for key, ws in table.clients.items() if key[0] == name for w in ws.values()]
        table.models[name] = _Lengths(
            np.mean([w.prompt for w in of_model], axis=0),
            np.mean([w.answer for w in of_model], axis=0),
            float(np.mean([w.reason for w in of_model])),
        )
    return table


def _unit_scale(law: str, shape: float) -> float:
    """The scale that makes the mean gap 1."""
    if law == "gamma":
        return 1.0 / shape
    return math.exp(-math.lgamma(1.0 + 1.0 / shape))


def _renewals(
    rng: np.random.Generator, law: str, shape: float, first: float, total: float
) -> tuple[Array, float]:
    """(arrivals in operational time below `total`, what is left of the last gap after it)."""
    scale = _unit_scale(law, shape)
    parts, now = [], first
    while now < total:
        gaps = draw_gaps(rng, law, shape, scale, int((total - now) * 1.1) + 16)
        at = now + np.concatenate(([0.0], np.cumsum(gaps)))
        now = float(at[-1])
        below = at[:-1][at[:-1] < total]
        parts.append(below)
        if below.size < at.size - 1:
            now = float(at[below.size])
    return np.concatenate(parts) if parts else np.empty(0), now - total


@dataclass
class _Gathered:
    """Rows of many client-windows, until there are enough for a batch."""

    first_id: int = 0
    rows: int = 0
    parts: dict[str, list[Any]] = field(default_factory=dict)

    def add(
        self, rng: np.random.Generator, times: Array, model: str, client: int, of: _Lengths
    ) -> None:
        """Draw the lengths of the requests at `times` and keep them."""
        count = times.size
        prompt = np.rint(np.interp(rng.random(count), QUANTILES, of.prompt))
        answer = np.rint(np.interp(rng.random(count), QUANTILES, of.answer))
        reason = np.rint(answer * of.reason) if of.reason else np.full(count, -1.0)
        for name, values in (
            ("arrival_s", np.round(times, 6)),
            ("prompt_tokens", np.maximum(prompt, 1).astype(np.int32)),
            ("output_tokens", answer.astype(np.int32)),
            ("reasoning_tokens", reason.astype(np.int32)),
            ("labels", [(count, model, f"client-{client}")]),
        ):
            self.parts.setdefault(name, []).append(values)
        self.rows += count

    def batches(self, least: int) -> Iterator[pa.RecordBatch]:
        """Yield what is kept, when it is at least `least` rows, and forget it."""
        if self.rows < least:
            return
        labels = [label for part in self.parts.pop("labels") for label in part]
        counts = [label[0] for label in labels]
        columns: dict[str, Any] = {n: np.concatenate(p) for n, p in self.parts.items()}
        reason = columns["reasoning_tokens"]
        columns["reasoning_tokens"] = pa.array(reason, mask=reason < 0)
        columns["request_id"] = np.arange(self.first_id, self.first_id + self.rows)
        columns["arrival_res_s"] = np.zeros(self.rows, np.float32)
        for at, name in ((1, "model"), (2, "tenant_id")):
            names = list(dict.fromkeys(label[at] for label in labels))
            codes = np.array([names.index(label[at]) for label in labels], np.int32)
            columns[name] = pa.DictionaryArray.from_arrays(
                pa.array(np.repeat(codes, counts)), pa.array(names, pa.string())
            )
        self.first_id, self.rows, self.parts = self.first_id + self.rows, 0, {}
        yield pa.RecordBatch.from_pydict(columns)
