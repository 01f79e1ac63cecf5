"""``/metrics`` as vLLM writes it: its names, its labels, its default buckets."""

from __future__ import annotations

from bisect import bisect_left
from time import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twin.serve.answers import Times
    from twin.serve.engine import LiveEngine

NS = 1e9
_FIRST_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_LENGTHS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000,
)  # fmt: skip
REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts by bucket; ``observe`` costs well under a microsecond."""

    __slots__ = ("_bounds", "_counts", "_help", "_name", "_sum")

    def __init__(self, name: str, help: str, bounds: tuple[float, ...]) -> None:
        self._name = name
        self._help = help
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, labels: str) -> list[str]:
        name = self._name
        out = [f"# HELP {name} {self._help}", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            edge = "+Inf" if bound is None else str(float(bound))
            out.append(f'{name}_bucket{{{labels},le="{edge}"}} {total}.0')
        out.append(f"{name}_count{{{labels}}} {total}.0")
        out.append(f"{name}_sum{{{labels}}} {self._sum!r}")
        return out


class ServerMetrics:
    """What a server counts beside its engine."""

    def __init__(self, model: str, live: LiveEngine, steps_path: str = "", life: str = "") -> None:
        """``steps_path``: where its step records are written; empty: nowhere. ``life``: in them."""
        self._model = _escaped(model)
        self._live = live
        self._steps_path = _escaped(steps_path)
        self._life = life
        self._start_s = time()
        self.rejections = 0
        self._success = dict.fromkeys(REASONS, 0)
        seconds = "in seconds."
        self.first = Histogram(
            "vllm:time_to_first_token_seconds",
            f"Histogram of time to first token {seconds}",
            _FIRST_S,
        )
        self.gaps = Histogram(
            "vllm:inter_token_latency_seconds",
            f"Histogram of inter-token latency {seconds}",
            _TOKEN_S,
        )
        self._token = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            _TOKEN_S,
        )
        self._whole, self._queue, self._inference, self._prefill, self._decode = (
            Histogram(f"vllm:{name}_seconds", f"Histogram of {what} {seconds}", _REQUEST_S)
            for name, what in (
                ("e2e_request_latency", "e2e request latency"),
                ("request_queue_time", "time spent in WAITING phase for request"),
                ("request_inference_time", "time spent in RUNNING phase for request"),
                ("request_prefill_time", "time spent in PREFILL phase for request"),
                ("request_decode_time", "time spent in DECODE phase for request"),
            )
        )
        self._prompt_length = Histogram(
            "vllm:request_prompt_tokens", "Number of prefill tokens processed.", _LENGTHS
        )
        self._output_length = Histogram(
            "vllm:request_generation_tokens", "Number of generation tokens processed.", _LENGTHS
        )

    def finished(
        self, reason: str, prompt: int, outputs: int, times: Times, entered_ns: int, left_ns: int
    ) -> None:
        """A request was answered. ``entered_ns`` to ``left_ns``: in the server."""
        self._success[reason] += 1
        self._whole.observe((left_ns - entered_ns) / NS)
        self._prompt_length.observe(prompt)
        if times.scheduled < 0 or times.last < 0:
            return
        self._queue.observe((times.scheduled - times.queued) / NS)
        self._inference.observe((times.last - times.scheduled) / NS)
        if times.first < 0:
            return
        self._output_length.observe(outputs)
        self.first.observe((times.first - entered_ns) / NS)
        self._prefill.observe((times.first - times.scheduled) / NS)
        self._decode.observe((times.last - times.first) / NS)
        if outputs > 1:
            gap_s = (times.last - times.first) / (outputs - 1) / NS
            self._token.observe(gap_s)
            self.gaps.observe(gap_s, outputs - 1)

    def render(self, pooling: bool) -> bytes:
        live, engine = self._live, self._live.engine
        settings, load = engine.settings, live.load()
        labels = f'engine="0",model_name="{self._model}"'
        usage = load.kv_blocks_used / (settings.kv_blocks - 1)
        made = 0 if pooling else live.output_tokens()
        out = [
            "# HELP process_start_time_seconds Start time of the process since unix epoch.",
            "# TYPE process_start_time_seconds gauge",
            f"process_start_time_seconds {self._start_s!r}",
        ]

        def one(name: str, kind: str, help: str, value: float, more: str = "") -> None:
            suffix = "_total" if kind == "counter" else ""
            full = f"vllm:{name}{suffix}"
            out.append(f"# HELP {full} {help}")
            out.append(f"# TYPE {full} {kind}")
            out.append(f"{full}{{{labels}{more}}} {float(value)!r}")

        one("num_requests_running", "gauge", "Number of requests in model execution batches.",
            load.running)  # fmt: skip
        one("num_requests_waiting", "gauge", "Number of requests waiting to be processed.",
            load.waiting)  # fmt: skip
        one("num_requests_waiting_by_reason", "gauge", "Number of waiting requests by reason.",
            load.waiting, ',reason="capacity"')  # fmt: skip
        one("engine_sleep_state", "gauge", "Engine sleep state.", 1, ',sleep_state="awake"')
        one("kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", usage)
        one("prefix_cache_queries", "counter", "Prefix cache queries, in tokens.",
            engine.prefix_tokens_queried)  # fmt: skip
        one("prefix_cache_hits", "counter", "Prefix cache hits, in tokens.",
            engine.prefix_tokens_hit)  # fmt: skip
        one("num_preemptions", "counter", "Cumulative number of preemptions.", engine.preemptions)
        one("prompt_tokens", "counter", "Number of prefill tokens processed.", live.prompt_tokens)
        one("generation_tokens", "counter", "Number of generation tokens processed.", made)
        one("admission_rejections", "counter", "Requests refused for a full queue.",
            self.rejections)  # fmt: skip
        out.append("# HELP vllm:request_success_total Count of successfully processed requests.")
        out.append("# TYPE vllm:request_success_total counter")
        for reason, count in self._success.items():
            tagged = f'{labels},finished_reason="{reason}"'
            out.append(f"vllm:request_success_total{{{tagged}}} {count}.0")
        for histogram in (
            self.first, self.gaps, self._token, self._whole, self._queue, self._inference,
            self._prefill, self._decode, self._prompt_length, self._output_length,
        ):  # fmt: skip
            out.extend(histogram.lines(labels))
        out.append("# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig")
        out.append("# TYPE vllm:cache_config_info gauge")
        caching = settings.prefix_caching
        out.append(
            f'vllm:cache_config_info{{block_size="{settings.block_tokens}",cache_dtype="auto",'
            f'enable_prefix_caching="{caching}",engine="0",'
            f'num_gpu_blocks="{settings.kv_blocks}"}} 1.0'
        )
        if self._steps_path:
            out.append("# HELP twinkeel_steps_info Where the engine's step records are written")
            out.append("# TYPE twinkeel_steps_info gauge")
            labels = f'engine="0",life="{self._life}",path="{self._steps_path}"'
            out.append(f"twinkeel_steps_info{{{labels}}} 1.0")
        return ("\n".join(out) + "\n").encode()


def _escaped(text: str) -> str:
    """As a label's value."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
