"""The vLLM environment as a whole: a real server starts, answers and goes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.controller.processes import http

if TYPE_CHECKING:
    from tests.live.server import Vllm

pytestmark = pytest.mark.live


def test_a_real_server_answers_one_completion(vllm: list[Vllm]) -> None:
    body = {"model": "tiny", "prompt": "def main():", "max_tokens": 8, "ignore_eos": True}
    status, answer = http("POST", f"{vllm[0].url}/v1/completions", body)
    assert status == 200
    completion = json.loads(answer)
    assert completion["choices"][0]["finish_reason"] == "length"
    assert completion["choices"][0]["text"]
    assert completion["usage"]["completion_tokens"] == 8
