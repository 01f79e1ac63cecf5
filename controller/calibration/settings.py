"""The server's settings: read from it, never assumed.

In this order: the header of its step records; ``/server_info`` (vLLM started with the variable
VLLM_SERVER_DEV_MODE=1); the labels of ``vllm:cache_config_info`` and the card in ``/v1/models``;
then options. An option fills a gap; where it contradicts the server, it is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from controller.calibration.errors import CalibrationError
from traces.steps import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from controller.calibration.server import Metrics, ModelCard

FLAGS = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len",
    "block_tokens": "--block-size",
    "kv_blocks": "--num-gpu-blocks-override",
    "dtype": "--dtype",
    "tensor_parallel": "--tensor-parallel-size",
    "scheduling_policy": "--scheduling-policy",
    "async_scheduling": "--async-scheduling",
    "prefix_caching": "--enable-prefix-caching",
}
"""What the load and the profile need, and vLLM's flag that sets it. Options have its name."""
_NO_LESS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "block_tokens")


def from_config(config: Mapping[str, Any]) -> ServerSettings:
    """Of ``/server_info``'s ``vllm_config``; what it lacks stays null."""

    def at(part: str, name: str) -> Any:
        section = config.get(part)
        return section.get(name) if isinstance(section, dict) else None

    served = at("model_config", "served_model_name")
    speculative = config.get("speculative_config")
    found = {
        "model": at("model_config", "model"),
        "served_model": served[0] if isinstance(served, list) and served else served,
        "dtype": _plain_dtype(at("model_config", "dtype")),
        "kv_cache_dtype": at("cache_config", "cache_dtype"),
        "quantization": at("model_config", "quantization"),
        "device": at("device_config", "device"),
        "tensor_parallel": at("parallel_config", "tensor_parallel_size"),
        "block_tokens": at("cache_config", "block_size"),
        "kv_blocks": at("cache_config", "num_gpu_blocks"),
        "max_num_batched_tokens": at("scheduler_config", "max_num_batched_tokens"),
        "max_num_seqs": at("scheduler_config", "max_num_seqs"),
        "max_model_len": at("model_config", "max_model_len"),
        "scheduling_policy": at("scheduler_config", "policy"),
        "async_scheduling": at("scheduler_config", "async_scheduling"),
        "prefix_caching": at("cache_config", "enable_prefix_caching"),
        "gpu_memory_utilization": at("cache_config", "gpu_memory_utilization"),
        "long_prefill_token_threshold": at("scheduler_config", "long_prefill_token_threshold"),
        "enforce_eager": at("model_config", "enforce_eager"),
        "task": "pooling" if at("model_config", "runner") == "pooling" else "generate",
        "speculative": None if speculative is None else "on",
    }
    return _converted(found, "/server_info")


def from_pages(metrics: Metrics, card: ModelCard) -> ServerSettings:
    """Of ``/metrics`` and ``/v1/models``."""
    cache = metrics.cache
    caching = {"True": True, "False": False}.get(cache.get("enable_prefix_caching", ""))
    utilization = cache.get("gpu_memory_utilization", "")
    found = {
        "model": card.root,
        "served_model": card.served,
        "kv_cache_dtype": cache.get("cache_dtype"),
        "block_tokens": _whole(cache.get("block_size", "")),
        "kv_blocks": _whole(cache.get("num_gpu_blocks", "")),
        "max_model_len": card.max_model_len,
        "prefix_caching": caching,
        "gpu_memory_utilization": float(utilization) if _is_number(utilization) else None,
    }
    return _converted(found, "/metrics and /v1/models")


def merge(told: Iterable[ServerSettings], given: Mapping[str, object]) -> ServerSettings:
    """The first that is known of each setting; ``told`` by the server, best source first.

    Raises:
        CalibrationError: something needed is missing, an option contradicts the server, or this
            is a server that cannot be calibrated.
    """
    sources = list(told)
    found: dict[str, object] = {}
    for name in ServerSettings.__struct_fields__:
        known = [getattr(source, name) for source in sources]
        found[name] = next((value for value in known if value is not None), None)
    for name, value in given.items():
        if value is None:
            continue
        if found.get(name) not in (None, value):
            raise CalibrationError(
                f"{FLAGS.get(name, name)} is {_shown(value)}, but the server says "
                f"{_shown(found[name])}: leave the option out"
            )
        found[name] = value
    # Only its best source knows the task; the others have the default.
    found["task"] = sources[0].task if sources else "generate"
    settings = _converted(found, "the options")
    _check(settings)
    return settings


def _check(settings: ServerSettings) -> None:
    missing = [name for name in FLAGS if getattr(settings, name) is None]
    if missing:
        flags = ", ".join(FLAGS[name] for name in missing)
        raise CalibrationError(
            f"the server does not tell {', '.join(missing)}: give what it was started with, or "
            f"vLLM's default for it ({flags}), or start vLLM with the plug-in for step records "
            "or with VLLM_SERVER_DEV_MODE=1"
        )
    if settings.task != "generate":
        raise CalibrationError(
            "this server makes embeddings: only one that generates can be calibrated"
        )
    if settings.speculative is not None:
        raise CalibrationError(
            f"speculative decoding is on ({settings.speculative}): a step then makes a varying "
            "number of tokens, which the step rule does not cover; start vLLM without it"
        )
    for name in _NO_LESS:
        if getattr(settings, name) < 1:
            raise CalibrationError(f"{FLAGS[name]} is {getattr(settings, name)}: at least 1")
    if (settings.kv_blocks or 0) < 2:
        raise CalibrationError(f"the server has {settings.kv_blocks} KV blocks: at least 2")


def _converted(found: Mapping[str, object], where: str) -> ServerSettings:
    try:
        return msgspec.convert(found, ServerSettings)
    except msgspec.ValidationError as error:
        raise CalibrationError(f"{where}: {error}") from error


def _plain_dtype(dtype: object) -> str | None:
    """``torch.bfloat16`` without its module."""
    return None if dtype is None else str(dtype).rpartition(".")[2]


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _whole(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
