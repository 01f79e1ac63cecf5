"""The vLLM environment as a whole: a real server starts, answers and goes."""

from __future__ import annotations

import json
import time
import urllib.request

import pytest

from tests.live.server import vllm_server
from tests.live.vllm_env.ensure import environment, tiny_model

pytestmark = pytest.mark.live


def test_a_real_server_answers_one_completion() -> None:
    tiny_model(environment())  # made beforehand, so that the start-up alone is timed
    started = time.monotonic()
    with vllm_server() as url:
        print(f"vllm serve was healthy after {time.monotonic() - started:.1f} s")
        body = {"model": "tiny", "prompt": "def main():", "max_tokens": 8, "ignore_eos": True}
        request = urllib.request.Request(
            f"{url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
            completion = json.load(answer)
    assert completion["choices"][0]["finish_reason"] == "length"
    assert completion["choices"][0]["text"]
    assert completion["usage"]["completion_tokens"] == 8
