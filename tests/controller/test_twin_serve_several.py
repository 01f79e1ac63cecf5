"""A completion of several prompts at once, as vLLM answers it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tests.controller.processes import MODEL, http

if TYPE_CHECKING:
    from tests.controller.processes import Twin

PROMPTS = [[11, 12, 13], [21, 22, 23, 24, 25], [31]]


def ask(twin: Twin, **more: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPTS, "max_tokens": 4, "ignore_eos": True, **more}
    status, answer = http("POST", f"{twin.url}/v1/completions", body)
    return status, json.loads(answer)


def test_each_prompt_has_its_choice_and_usage_is_the_sum(twins: list[Twin]) -> None:
    status, answer = ask(twins[0])
    assert status == 200
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (9, 12)


def test_a_choice_says_what_its_prompt_alone_is_answered(twins: list[Twin]) -> None:
    _, together = ask(twins[0], logprobs=2)
    _, alone = ask(twins[0], prompt=PROMPTS[1], logprobs=2)
    assert together["choices"][1]["text"] == alone["choices"][0]["text"]
    assert together["choices"][1]["logprobs"] == alone["choices"][0]["logprobs"]


def test_a_stream_takes_one_prompt_and_the_longest_has_to_fit(twins: list[Twin]) -> None:
    status, answer = ask(twins[0], stream=True)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    status, answer = ask(twins[0], prompt=[[5], [7] * 60_000])
    assert status == 400
    assert "60000 input tokens" in answer["error"]["message"]
