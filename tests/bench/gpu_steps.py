"""Step times of a Qwen3-8B-shaped decoder on a GPU: ``python -m tests.bench.gpu_steps``.

Random weights in bf16, plain PyTorch: each point of a grid of prefill and decode steps is captured
as a CUDA graph (eager where that fails, with a note), warmed up, and timed with CUDA events; the
median counts. The result stands next to the GPU part of the profile ``h100-sxm/qwen3-8b``. On an
H200 decode, which reads memory, is scaled by the cards' bandwidths; prefill, which computes, is
not.

What the figures can say: there is no scheduler, no sampling but the argmax, no paged cache and no
server here, so the matrix products and attention measured are about the least that vLLM's step
takes with kernels of this kind. Small kernels are not fused here, which vLLM's are: by estimate a
millisecond of a small step on an H100, so small steps come out longer than vLLM's. Larger steps are
close to the whole.

Without a GPU a tiny shape runs on the CPU, only to show that the code runs; nothing is compared.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import statistics
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from policy.files import load_models, load_profile
from tests.figures import Figure, write_figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from policy.cost import ModelShape, Profile

FIGURES = Path("build/figures/gpu-steps.json")
POINTS = Path("build/gpu-steps.csv")
PROFILE = "h100-sxm/qwen3-8b"
LIMIT_S = 420.0  # no further point is begun after this
WARM_UP = 3
REPEATS = 15
POINT_S = 4.0  # and no further repetition of a point after this

# TB/s, as the cards' data sheets say.
BANDWIDTH = {"H200": 4.8, "H100": 3.35}
BASE_BANDWIDTH = BANDWIDTH["H100"]

PREFILL_TOKENS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
PREFILL_WITH_CONTEXT = (
    (128, 1024), (256, 2048), (512, 512), (512, 4096), (1024, 1024), (1024, 7168),
    (2048, 2048), (2048, 6144), (4096, 4096),
)  # fmt: skip
DECODE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DECODE_CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
TINY_PREFILL = ((16, 0), (64, 0), (64, 64))
TINY_DECODE = ((1, 64), (4, 64), (4, 256))


@dataclass(frozen=True, slots=True)
class Point:
    """One step: ``batch`` sequences that hold ``context`` tokens each and compute ``tokens``."""

    kind: str  # "prefill" or "decode"
    batch: int
    tokens: int
    context: int

    @property
    def kv_tokens(self) -> int:
        """Tokens that the cache holds when the step has ended."""
        return self.batch * (self.context + self.tokens)


@dataclass(frozen=True, slots=True)
class Timed:
    """A point and its median time; ``note`` says what was not as planned."""

    point: Point
    ms: float
    graph: bool
    note: str = ""


def grid(kv_budget_tokens: int) -> list[Point]:
    """The points whose cache fits, small ones first, so that a time limit cuts off the largest."""
    points = [Point("prefill", 1, tokens, 0) for tokens in PREFILL_TOKENS]
    points += [Point("prefill", 1, tokens, context) for tokens, context in PREFILL_WITH_CONTEXT]
    points += [
        Point("decode", batch, 1, context)
        for context in DECODE_CONTEXTS
        for batch in DECODE_BATCHES
    ]  # fmt: skip
    fitting = [point for point in points if point.kv_tokens <= kv_budget_tokens]
    return sorted(fitting, key=lambda point: (point.kv_tokens, point.kind, point.batch))


def tiny_grid() -> list[Point]:
    points = [Point("prefill", 1, tokens, context) for tokens, context in TINY_PREFILL]
    return points + [Point("decode", batch, 1, context) for batch, context in TINY_DECODE]


def kv_budget_tokens(free_bytes: int, shape: ModelShape, share: float = 0.85) -> int:
    """Cache tokens that may be laid out: a share of what is free once the weights are there.

    The rest is for activations of the largest prefill, logits and captured graphs.
    """
    left = int(free_bytes * share) - 3 * 2**30
    return max(0, left // shape.kv_bytes_per_token("bfloat16"))


def bandwidth_scale(device: str) -> float | None:
    """By how much a decode step measured on ``device`` is multiplied to stand for an H100 SXM.

    None: another card (the H100's PCIe and NVL boards have other memory), nothing is compared.
    """
    words = device.split()
    if "H200" in words:
        return BANDWIDTH["H200"] / BASE_BANDWIDTH
    if "H100" in words and not {"PCIe", "NVL"} & set(words):
        return 1.0
    return None


def profile_ms(profile: Profile, point: Point) -> float:
    """What the profile says of the step's GPU part, without the host's."""
    step = profile.step
    if point.kind == "decode":
        kv_tokens = point.batch * (point.context + 1)
        total_ns = (
            step.decode_fixed_ns.value
            + step.decode_per_sequence_ns.value * point.batch
            + step.decode_per_kv_token_ns.value * kv_tokens
        )
    else:
        free = 0 if step.prefill_free_tokens is None else step.prefill_free_tokens.value
        end = point.context + point.tokens
        quad = point.batch * (end * end - point.context * point.context)
        total_ns = (
            step.prefill_fixed_ns.value
            + step.prefill_per_token_ns.value * max(0, point.batch * point.tokens - free)
            + step.prefill_per_quad_ns.value * quad
        )
    return total_ns / 1e6


def on_an_h100_ms(timed: Timed, scale: float) -> float:
    return timed.ms * (scale if timed.point.kind == "decode" else 1.0)


def off_percent(profile: Profile, timed: Timed, scale: float) -> float:
    """By how much the profile lies above (+) or below (-) the measured step."""
    return (profile_ms(profile, timed.point) / on_an_h100_ms(timed, scale) - 1) * 100


def figures_of(
    profile: Profile, times: Sequence[Timed], device: str, scale: float | None, wall_s: float
) -> list[Figure]:
    """Figures of a run on a GPU; an unknown card only says that it ran."""
    eager = sum(not timed.graph for timed in times)
    how = f"{device}, random weights, bf16, plain PyTorch, {eager} of {len(times)} points eager"
    figures = [
        Figure("gpu_steps_points", len(times), "points", ">= 40", how),
        Figure("gpu_steps_s", round(wall_s, 1), "s", "<= 480", how),
    ]
    if scale is None:
        return figures
    how += f"; decode times {scale:.3f} for the bandwidth" if scale != 1 else ""
    for kind in ("decode", "prefill"):
        offs = [off_percent(profile, timed, scale) for timed in times if timed.point.kind == kind]
        if not offs:
            continue
        sizes = [abs(off) for off in offs]
        told = (
            f"GPU part of {profile.name} against the measured step, {len(offs)} {kind} points:"
            f" from {min(offs):+.0f} to {max(offs):+.0f} %, median with sign"
            f" {statistics.median(offs):+.1f} %; {how}"
        )
        value = round(statistics.median(sizes), 1)
        figures.append(Figure(f"gpu_{kind}_off_median_pct", value, "%", "<= 20", told))
    return figures


def cpu_figures(times: Sequence[Timed]) -> list[Figure]:
    how = (
        "no GPU here: a tiny random shape on the CPU, only to show that the code runs; no step"
        " time of a GPU was measured and nothing compared"
    )
    return [
        Figure("cpu_only_tiny_points", len(times), "points", f"= {len(tiny_grid())}", how),
    ]


def load_torch() -> Any:
    """PyTorch, which is no dependency of the project."""
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise SystemExit(
            f"gpu-steps measures with PyTorch, which is not installed ({error}): pip install torch"
        ) from error


class Decoder:
    """The layers of a Qwen3 decoder with random weights and a static KV cache.

    Args:
        shape: sizes.
        cache_tokens: tokens that the cache has room for; every point views it as its own shape.
    """

    def __init__(self, torch: Any, shape: ModelShape, device: str, cache_tokens: int) -> None:
        self.torch, self.shape, self.device = torch, shape, device
        self.functional = torch.nn.functional
        self.dtype = torch.bfloat16

        def random(*size: int) -> Any:
            return torch.empty(*size, device=device, dtype=self.dtype).normal_(0.0, 0.02)

        self.random = random
        heads, width = shape.heads + 2 * shape.kv_heads, shape.head_dim
        self.embedding = random(shape.vocab, shape.hidden)
        self.head = self.embedding if shape.tied_embeddings else random(shape.vocab, shape.hidden)
        self.layers = [
            {
                "qkv": random(heads * width, shape.hidden),
                "out": random(shape.hidden, shape.heads * width),
                "gate_up": random(2 * shape.intermediate, shape.hidden),
                "down": random(shape.hidden, shape.intermediate),
                "qk_norm": 1 + random(shape.heads + shape.kv_heads, width),
                "norm_1": 1 + random(shape.hidden),
                "norm_2": 1 + random(shape.hidden),
            }
            for _ in range(shape.layers)
        ]
        self.last_norm = 1 + random(shape.hidden)
        size = cache_tokens * shape.kv_heads * width
        self.keys = [random(size) for _ in range(shape.layers)]
        self.values = [random(size) for _ in range(shape.layers)]

    def views(self, point: Point) -> list[tuple[Any, Any]]:
        """Every layer's keys and values as (batch, kv heads, tokens, width)."""
        size = (point.batch, self.shape.kv_heads, point.context + point.tokens, self.shape.head_dim)
        count = size[0] * size[1] * size[2] * size[3]
        return [
            (keys[:count].view(size), values[:count].view(size))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    def step(self, point: Point, expand_heads: bool) -> Callable[[], Any]:
        """A function that computes the step into the cache and gives the next token ids."""
        torch, functional, shape = self.torch, self.functional, self.shape
        batch, tokens, context = point.batch, point.tokens, point.context
        rows, width = batch * tokens, shape.head_dim
        heads, kv_heads = shape.heads, shape.kv_heads
        ids = torch.randint(0, shape.vocab, (rows,), device=self.device)
        cos, signed_sin = self._rotation(tokens, context)
        views = self.views(point)
        mask, causal = None, tokens > 1
        if causal and context:
            mask = importlib.import_module("torch.nn.attention.bias").causal_lower_right(
                tokens, context + tokens
            )
            causal = False

        def attend(query: Any, keys: Any, values: Any) -> Any:
            if expand_heads:
                keys = keys.repeat_interleave(heads // kv_heads, dim=1)
                values = values.repeat_interleave(heads // kv_heads, dim=1)
            return functional.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=causal, enable_gqa=not expand_heads
            )

        def run() -> Any:
            hidden = functional.embedding(ids, self.embedding)
            for layer, (keys, values) in zip(self.layers, views, strict=True):
                normed = functional.rms_norm(hidden, (shape.hidden,), layer["norm_1"], 1e-6)
                qkv = functional.linear(normed, layer["qkv"])
                qkv = qkv.view(batch, tokens, heads + 2 * kv_heads, width)
                both = functional.rms_norm(qkv[:, :, : heads + kv_heads], (width,), None, 1e-6)
                both = both * layer["qk_norm"]
                turned = torch.addcmul(both * cos, both.roll(width // 2, -1), signed_sin)
                turned = turned.transpose(1, 2)  # (batch, heads, tokens, width)
                keys[:, :, context:].copy_(turned[:, heads:])
                values[:, :, context:].copy_(qkv[:, :, heads + kv_heads :].transpose(1, 2))
                attended = attend(turned[:, :heads], keys, values)
                attended = attended.transpose(1, 2).reshape(rows, heads * width)
                hidden = hidden + functional.linear(attended, layer["out"])
                normed = functional.rms_norm(hidden, (shape.hidden,), layer["norm_2"], 1e-6)
                gate, up = functional.linear(normed, layer["gate_up"]).chunk(2, dim=-1)
                hidden = hidden + functional.linear(functional.silu(gate) * up, layer["down"])
            last = hidden.view(batch, tokens, shape.hidden)[:, -1]
            last = functional.rms_norm(last, (shape.hidden,), self.last_norm, 1e-6)
            return functional.linear(last, self.head).argmax(dim=-1)

        return run

    def _rotation(self, tokens: int, context: int) -> tuple[Any, Any]:
        """Cosine and signed sine, (tokens, 1, width), for x * cos + roll(x) * sin."""
        torch, width = self.torch, self.shape.head_dim
        at = torch.arange(context, context + tokens, device=self.device, dtype=torch.float32)
        rate = 1e6 ** (-torch.arange(0, width, 2, device=self.device, dtype=torch.float32) / width)
        angle = torch.outer(at, rate)
        cos = torch.cat((angle.cos(), angle.cos()), dim=-1)
        sin = torch.cat((-angle.sin(), angle.sin()), dim=-1)
        return cos[:, None].to(self.dtype), sin[:, None].to(self.dtype)


def captured(torch: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` as a CUDA graph; the returned function keeps the graph alive."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    replay: Callable[[], Any] = graph.replay
    return replay


def median_ms(torch: Any, call: Callable[[], Any], gpu: bool) -> float:
    for _ in range(WARM_UP):
        call()
    times_ms: list[float] = []
    begun = time.monotonic()
    while len(times_ms) < REPEATS and (len(times_ms) < 3 or time.monotonic() - begun < POINT_S):
        if gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            times_ms.append(float(start.elapsed_time(end)))
        else:
            before = time.perf_counter()
            call()
            times_ms.append((time.perf_counter() - before) * 1e3)
    return statistics.median(times_ms)


def measure(decoder: Decoder, point: Point, gpu: bool) -> Timed:
    """One point: as a graph with grouped heads, and with what works where that does not.

    Raises:
        RuntimeError: nothing worked; PyTorch's own error.
    """
    torch = decoder.torch
    notes: list[str] = []
    ways = [
        (graph, expand)
        for expand in (False, True)
        for graph in ((True, False) if gpu else (False,))
    ]
    for number, (graph, expand_heads) in enumerate(ways):
        try:
            with torch.inference_mode():
                call = decoder.step(point, expand_heads)
                if graph:
                    call = captured(torch, call)
                return Timed(point, median_ms(torch, call, gpu), graph, "; ".join(notes))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            if number == len(ways) - 1:
                raise
            way = ("graph" if graph else "eager") + (", heads repeated" if expand_heads else "")
            notes.append(f"{way} failed: {_first_line(error)}")
            call = None  # a failed capture's memory must not outlive it
            if gpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
    raise AssertionError("no way was tried")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def run_points(
    decoder: Decoder, points: Iterable[Point], gpu: bool, deadline_s: float, console: Console
) -> list[Timed]:
    """All points until the deadline (monotonic); one that fails is left out and said so."""
    times: list[Timed] = []
    for point in points:
        if time.monotonic() > deadline_s:
            console.print(f"out of time: {point} and all larger ones are left out")
            break
        try:
            times.append(measure(decoder, point, gpu))
        except (RuntimeError, TypeError, NotImplementedError) as error:
            console.print(f"{point} left out: {_first_line(error)}")
        if gpu:
            decoder.torch.cuda.empty_cache()
    return times


def print_times(
    console: Console, times: Sequence[Timed], profile: Profile, scale: float | None
) -> None:
    table = Table(
        "kind", "batch", "tokens", "context", "ms", "on an H100", "profile", "off %", "note"
    )
    for timed in sorted(
        times, key=lambda row: (row.point.kind, row.point.context, row.point.batch)
    ):
        point = timed.point
        cells = [point.kind, *(str(n) for n in (point.batch, point.tokens, point.context))]
        cells.append(f"{timed.ms:.3f}")
        if scale is None:
            cells += ["", "", ""]
        else:
            cells.append(f"{on_an_h100_ms(timed, scale):.3f}")
            cells.append(f"{profile_ms(profile, point):.3f}")
            cells.append(f"{off_percent(profile, timed, scale):+.1f}")
        table.add_row(*cells, ("" if timed.graph else "eager ") + timed.note)
    console.print(table)


def write_points(path: Path, times: Sequence[Timed]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("kind", "batch", "tokens", "context", "ms", "graph", "note"))
        for timed in times:
            point = timed.point
            row = (point.kind, point.batch, point.tokens, point.context)
            writer.writerow((*row, f"{timed.ms:.4f}", int(timed.graph), timed.note))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="begin no point after this")
    parser.add_argument("--cpu", action="store_true", help="the tiny shape, even with a GPU")
    arguments = parser.parse_args()
    torch = load_torch()
    begun = time.monotonic()
    console = Console(width=130)
    profile = load_profile(PROFILE)
    gpu = bool(torch.cuda.is_available()) and not arguments.cpu
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch tells of kernels that it did not choose
        if gpu:
            shape, device = load_models()[profile.model], str(torch.cuda.get_device_name(0))
            weights_bytes = 2 * shape.total_parameters
            free_bytes = int(torch.cuda.mem_get_info(0)[0]) - weights_bytes
            points = grid(kv_budget_tokens(free_bytes, shape))
            if not points:
                raise SystemExit(
                    f"{device} has {free_bytes + weights_bytes} bytes free; {profile.model} needs "
                    f"{weights_bytes} for its weights and more for the cache: use a larger card"
                )
            room = max(point.kv_tokens for point in points)
            console.print(f"{device}: {len(points)} points, cache for {room} tokens")
            decoder = Decoder(torch, shape, "cuda", room)
            times = run_points(decoder, points, gpu, begun + arguments.limit_s, console)
            scale = bandwidth_scale(device)
            figures = figures_of(profile, times, device, scale, time.monotonic() - begun)
        else:
            console.print("no GPU: a tiny shape on the CPU, only to show that the code runs")
            torch.set_num_threads(1)
            shape, points, scale = load_models()["tiny-qwen3"], tiny_grid(), None
            decoder = Decoder(torch, shape, "cpu", max(point.kv_tokens for point in points))
            times = run_points(decoder, points, gpu, begun + arguments.limit_s, console)
            figures = cpu_figures(times)
    print_times(console, times, profile, scale)
    for figure in figures:
        console.print(f"{figure.name} = {figure.value} {figure.unit} ({figure.goal}); {figure.how}")
    write_points(POINTS, times)
    write_figures(FIGURES, figures)
    return 0 if times else 1


if __name__ == "__main__":
    raise SystemExit(main())
