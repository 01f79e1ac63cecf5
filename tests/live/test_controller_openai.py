"""The ``openai`` client, unchanged, through the controller to real vLLM."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.controller.wire import relay

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.controller.processes import Controller, Controllers
    from tests.live.server import Vllm

pytestmark = pytest.mark.live

HELLO: Any = [{"role": "user", "content": "def main(argv):"}]
RUN_ON: Any = {"ignore_eos": True}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]


@pytest.fixture
def controller(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers
) -> Controller:
    return controllers([server.upstream(profile) for server in vllm], policy=patient)


@pytest.fixture
def client(controller: Controller) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{controller.url}/v1", api_key="none", max_retries=0, timeout=300
    ) as made:
        yield made


def test_answers_of_every_kind(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]

    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, extra_body=RUN_ON
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6

    completion = client.completions.create(
        model="tiny", prompt="def x", max_tokens=4, logprobs=2, extra_body=RUN_ON
    )
    logprobs = completion.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 4

    two = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, n=2, extra_body=RUN_ON
    )
    assert [choice.index for choice in two.choices] == [0, 1]


def test_streams_with_and_without_usage(client: openai.OpenAI) -> None:
    def run(**more: Any) -> list[Any]:
        with client.chat.completions.create(
            model="tiny", messages=HELLO, max_tokens=8, stream=True, extra_body=RUN_ON, **more
        ) as stream:
            return list(stream)

    chunks = run()
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"

    chunks = run(stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8

    with client.completions.create(
        model="tiny", prompt="def x", max_tokens=5, stream=True, extra_body=RUN_ON
    ) as stream:
        text = "".join(chunk.choices[0].text for chunk in stream)
    assert text


def test_tools_are_passed_through(client: openai.OpenAI) -> None:
    """The model is random: of a few seeds, one ends its call within the tokens that it has."""
    choice: Any = {"type": "function", "function": {"name": "weather"}}

    def asked(seed: int) -> dict[str, Any]:
        return {
            "model": "tiny", "messages": HELLO, "max_tokens": 60, "seed": seed, "temperature": 0.5,
            "tools": TOOLS, "tool_choice": choice,
        }  # fmt: skip

    for seed in range(1, 13):
        message = client.chat.completions.create(**asked(seed)).choices[0].message
        if message.tool_calls:
            break
    else:
        pytest.fail("no seed gave a tool call")
    whole = message.tool_calls[0].function
    assert whole.name == "weather"

    with client.chat.completions.create(**asked(seed), stream=True) as stream:
        deltas = [choice.delta for chunk in stream for choice in chunk.choices]
    calls = [call.function for delta in deltas for call in delta.tool_calls or ()]
    assert [call.name for call in calls if call.name] == ["weather"]
    assert "".join(call.arguments or "" for call in calls) == whole.arguments


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):  # vLLM's own words
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="tiny", prompt="x y " * 9000, stream=True)


def test_what_the_controller_does_not_know_is_passed_on(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers
) -> None:
    with relay(vllm[0].url) as passed:
        controller = controllers([vllm[0].upstream(profile, url=passed.url)], policy=patient)
        with openai.OpenAI(
            base_url=f"{controller.url}/v1", api_key="none", max_retries=0
        ) as client:
            client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=4, seed=7, top_p=0.9,
                extra_body={**RUN_ON, "min_tokens": 2, "an_unknown_field": {"a": [1, "ü"]}},
            )  # fmt: skip
        controller.stop()
    ((request, answer),) = passed.exchanges("/v1/chat/completions")
    sent = json.loads(request.body)
    assert sent["an_unknown_field"] == {"a": [1, "ü"]}
    assert (sent["min_tokens"], sent["seed"], sent["top_p"]) == (2, 7, 0.9)
    assert set(sent) <= {
        "model", "messages", "max_tokens", "seed", "top_p", "ignore_eos", "min_tokens",
        "an_unknown_field", "priority",
    }  # fmt: skip
    assert answer.head.split()[1] == "200"
