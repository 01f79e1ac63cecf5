"""Where the server's settings come from, and what is said when one of them is missing."""

from __future__ import annotations

import msgspec
import pytest

from controller.calibration import CalibrationError
from controller.calibration.cli import HELP
from controller.calibration.server import Metrics, ModelCard
from controller.calibration.settings import FLAGS, from_config, from_pages, merge
from traces.steps import ServerSettings

CARD = ModelCard("tiny", "/models/tiny", 8192)
CACHE = {
    "block_size": "128", "cache_dtype": "auto", "enable_prefix_caching": "True", "engine": "0",
    "gpu_memory_utilization": "0.92", "num_gpu_blocks": "512", "num_cpu_blocks": "None",
}  # fmt: skip
"""Of vLLM 0.32.0's vllm:cache_config_info."""
CONFIG = {
    "model_config": {
        "model": "/models/tiny", "served_model_name": "tiny", "dtype": "torch.bfloat16",
        "quantization": None, "max_model_len": 8192, "enforce_eager": True, "runner": "auto",
    },
    "cache_config": {
        "cache_dtype": "auto", "block_size": 128, "num_gpu_blocks": None,
        "num_gpu_blocks_override": 512, "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.92,
    },
    "device_config": {"device": "cpu"},
    "parallel_config": {"tensor_parallel_size": 1},
    "scheduler_config": {
        "max_num_batched_tokens": 256, "max_num_seqs": 64, "policy": "fcfs",
        "async_scheduling": False, "long_prefill_token_threshold": 0,
    },
    "speculative_config": None,
}  # fmt: skip
"""The used part of vLLM 0.32.0's /server_info?config_format=json."""
PAGES = from_pages(Metrics(0, 0, 0, CACHE, ()), CARD)
FULL = ServerSettings(
    model="/models/tiny", served_model="tiny", dtype="bfloat16", kv_cache_dtype="auto",
    device="cpu", tensor_parallel=1, block_tokens=128, kv_blocks=512, max_num_batched_tokens=256,
    max_num_seqs=64, max_model_len=8192, scheduling_policy="fcfs", async_scheduling=False,
    prefix_caching=True, gpu_memory_utilization=0.92, long_prefill_token_threshold=0,
    enforce_eager=True,
)  # fmt: skip


def test_server_info_and_the_pages_together_tell_everything() -> None:
    assert from_config(CONFIG).kv_blocks is None  # the API server of vLLM does not know it
    assert merge([from_config(CONFIG), PAGES], {}) == FULL


def test_records_come_before_server_info_and_that_before_the_pages() -> None:
    header = ServerSettings(max_num_seqs=7, kv_blocks=100)
    config = ServerSettings(max_num_seqs=8, max_num_batched_tokens=80, kv_blocks=200)
    found = merge([header, config, FULL], {})
    assert (found.max_num_seqs, found.kv_blocks) == (7, 100)
    assert found.max_num_batched_tokens == 80
    assert found.max_model_len == FULL.max_model_len


def test_what_is_missing_is_named_with_the_flag_of_vllm() -> None:
    with pytest.raises(CalibrationError) as caught:
        merge([from_config({}), PAGES], {})
    told = str(caught.value)
    for name in ("max_num_seqs", "max_num_batched_tokens", "dtype", "async_scheduling"):
        assert name in told
        assert FLAGS[name] in told
    for name in ("kv_blocks", "block_tokens", "max_model_len"):  # the pages have them
        assert name not in told
    assert "VLLM_SERVER_DEV_MODE=1" in told


def test_options_fill_what_the_server_does_not_say() -> None:
    given = {
        "max_num_seqs": 64, "max_num_batched_tokens": 256, "dtype": "bfloat16",
        "tensor_parallel": 1, "scheduling_policy": "fcfs", "async_scheduling": False,
        "kv_blocks": None,
    }  # fmt: skip
    found = merge([from_config({}), PAGES], given)
    assert found.max_num_seqs == 64
    assert found.async_scheduling is False
    assert found.kv_blocks == 512


def test_the_help_shows_all_that_a_stock_server_does_not_say() -> None:
    """In the example for a text log."""
    (example,) = [
        part
        for part in HELP.partition("Examples")[2].split("  twinkeel calibrate ")
        if "--log " in part
    ]
    words = example.split()
    given: dict[str, object] = {}
    for name, flag in FLAGS.items():
        if flag in words:
            value = words[words.index(flag) + 1]
            given[name] = int(value) if value.isdigit() else value
            if name == "async_scheduling":
                given[name] = True
    found = merge([from_config({}), PAGES], given)
    assert found.max_num_seqs == 256
    assert found.async_scheduling is True


def test_an_option_that_contradicts_the_server_is_refused() -> None:
    with pytest.raises(CalibrationError, match="--max-num-seqs is 128, but the server says 64"):
        merge([FULL], {"max_num_seqs": 128})
    assert merge([FULL], {"max_num_seqs": 64}) == FULL


def test_servers_that_cannot_be_calibrated_are_refused() -> None:
    pooling = msgspec.structs.replace(FULL, task="pooling")
    with pytest.raises(CalibrationError, match="embeddings"):
        merge([pooling], {})
    drafting = msgspec.structs.replace(FULL, speculative="ngram")
    with pytest.raises(CalibrationError, match=r"speculative decoding is on \(ngram\)"):
        merge([drafting], {})
    with pytest.raises(CalibrationError, match="1 KV blocks"):
        merge([msgspec.structs.replace(FULL, kv_blocks=1)], {})
    with pytest.raises(CalibrationError, match="--max-num-seqs is 0"):
        merge([msgspec.structs.replace(FULL, max_num_seqs=0)], {})


def test_settings_of_a_strange_kind_are_an_error_and_no_crash() -> None:
    strange = {"scheduler_config": {"max_num_seqs": "many"}}
    with pytest.raises(CalibrationError, match=r"/server_info.*max_num_seqs"):
        from_config(strange)
    assert from_config({"scheduler_config": None, "model_config": "?"}) == ServerSettings()
