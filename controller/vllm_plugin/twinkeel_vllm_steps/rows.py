"""From vLLM's objects to rows and header. vLLM calls its statistics no stable interface, so each
field is asked for by name and is null where this version of vLLM has none."""

from __future__ import annotations

import time
from typing import Any

from . import __version__

SCHEMA = 1
KIND = "vllm-steps"

Row = tuple[Any, ...]


class RowMaker:
    """Makes the rows of one engine's records. `speculative` tells that a step may decode several
    tokens of a request."""

    def __init__(self, speculative: bool) -> None:
        self._speculative = speculative
        self._step = 0

    def rows(
        self, at_ns: int, scheduler_stats: Any, iteration_stats: Any, details: bool
    ) -> list[Row]:
        """The step's row, if something was computed, then those of the requests it finished."""
        made: list[Row] = []
        if scheduler_stats is not None:
            step = self._step_row(at_ns, scheduler_stats, iteration_stats, details)
            if step is not None:
                made.append(step)
        if iteration_stats is not None:
            made.extend(
                request_row(at_ns, each)
                for each in getattr(iteration_stats, "finished_requests", ())
            )
        return made

    def _step_row(self, at_ns: int, stats: Any, iteration: Any, details: bool) -> Row | None:
        told = getattr(stats, "iteration_details", None)
        elapsed_ns: int | None = None
        prefills: int | None = None
        prefill_tokens: int | None = None
        latencies = getattr(iteration, "inter_token_latencies_iter", None) or ()
        if told is not None:
            if getattr(told, "is_dummy", False):
                return None
            step = told.iteration_index
            prefills, prefill_tokens = told.num_ctx_requests, told.num_ctx_tokens
            decodes = told.num_generation_requests
            if not self._speculative:
                # A request that goes on after a pre-emption counts as generating, whatever it
                # computes again.
                prefill_tokens += told.num_generation_tokens - decodes
            elapsed_ns = round(told.elapsed_ms * 1e6)
        elif details:
            return None  # vLLM only told that a request is gone; nothing was computed
        else:
            step = self._step
            decodes = len(latencies)
        self._step = step + 1
        waiting = getattr(stats, "num_waiting_reqs", None)
        if waiting is not None:
            waiting += getattr(stats, "num_skipped_waiting_reqs", 0)
        used = getattr(stats, "kv_cache_usage", None)
        return (
            "s",
            at_ns,
            step,
            prefills,
            prefill_tokens,
            decodes,
            elapsed_ns,
            getattr(stats, "num_running_reqs", None),
            waiting,
            None if used is None else round(used * 1e6),
            getattr(iteration, "num_preempted_reqs", 0),
            _ns(min(latencies, default=None)),
        )


def request_row(at_ns: int, finished: Any) -> Row:
    """The row of a finished request."""
    return (
        "r",
        at_ns,
        getattr(finished, "request_id", None),
        finished.num_prompt_tokens,
        getattr(finished, "num_cached_tokens", None),
        finished.num_generation_tokens,
        getattr(finished, "num_preemptions", None),
        _ns(getattr(finished, "queued_time", None)),
        _ns(getattr(finished, "prefill_time", None)),
        _ns(getattr(finished, "decode_time", None)),
        _ns(getattr(finished, "e2e_latency", None)),
        str(finished.finish_reason),
    )


def _ns(seconds: float | None) -> int | None:
    """Null when it is not known or negative: vLLM leaves 0 for a stamp that never came."""
    return None if seconds is None or seconds < 0 else round(seconds * 1e9)


def header(
    config: Any, engine: int, engines: int, version: str, details: bool, life: str
) -> dict[str, Any]:
    """A file's first line; both clocks are read now. `engines` share the blocks that `config`
    tells of; `life` is what `/metrics` says, too."""
    return {
        "schema": SCHEMA,
        "kind": KIND,
        "vllm": version,
        "plugin": __version__,
        "engine": engine,
        "wall_ns": time.time_ns(),
        "mono_ns": time.monotonic_ns(),
        "details": details,
        "settings": settings(config, engines),
        "life": life,
    }


def settings(config: Any, engines: int) -> dict[str, Any]:
    """What decides the engine's steps; `config` is vLLM's own configuration."""

    def of(path: str) -> Any:
        value = config
        for name in path.split("."):
            value = getattr(value, name, None)
        return value

    dtype = _name(of("model_config.dtype"))
    kv_dtype = _name(of("cache_config.cache_dtype"))
    served = of("model_config.served_model_name")
    blocks = of("cache_config.num_gpu_blocks")
    speculative = of("speculative_config")
    return {
        "model": _name(of("model_config.model")),
        "served_model": _name(
            served[0] if isinstance(served, (list, tuple)) and served else served
        ),
        "dtype": dtype,
        "kv_cache_dtype": dtype if kv_dtype == "auto" else kv_dtype,
        "quantization": _name(of("model_config.quantization")),
        "device": _name(of("device_config.device_type")),
        "tensor_parallel": of("parallel_config.tensor_parallel_size"),
        "block_tokens": of("cache_config.block_size"),
        "kv_blocks": blocks // engines if blocks else None,
        "max_num_batched_tokens": of("scheduler_config.max_num_batched_tokens"),
        "max_num_seqs": of("scheduler_config.max_num_seqs"),
        "max_model_len": of("model_config.max_model_len"),
        "scheduling_policy": _name(of("scheduler_config.policy")),
        "async_scheduling": of("scheduler_config.async_scheduling"),
        "prefix_caching": of("cache_config.enable_prefix_caching"),
        "gpu_memory_utilization": of("cache_config.gpu_memory_utilization"),
        "long_prefill_token_threshold": of("scheduler_config.long_prefill_token_threshold"),
        "enforce_eager": of("model_config.enforce_eager"),
        "task": "pooling" if of("model_config.runner_type") == "pooling" else "generate",
        "speculative": None if speculative is None else str(of("speculative_config.method")),
    }


def _name(value: Any) -> str | None:
    return None if value is None else str(value).removeprefix("torch.")
