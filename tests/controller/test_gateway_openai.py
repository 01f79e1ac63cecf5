"""The ``openai`` client, unchanged, in front of served twins; embeddings included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import openai
import pytest

from tests.controller.processes import EMBEDDING_PROFILE, MODEL, Controllers, Twin, twin_process

if TYPE_CHECKING:
    from collections.abc import Iterator

EMBEDDING_MODEL = "qwen3-embedding-0.6b"


@pytest.fixture(scope="module")
def embedder() -> Iterator[Twin]:
    with twin_process(profile=EMBEDDING_PROFILE) as twin:
        yield twin


@pytest.fixture
def client(twins: list[Twin], embedder: Twin, controllers: Controllers) -> Iterator[openai.OpenAI]:
    controller = controllers([*(twin.url for twin in twins), embedder.url])
    with openai.OpenAI(
        base_url=f"{controller.url}/v1", api_key="none", max_retries=0, timeout=20
    ) as made:
        yield made


def test_the_client_works_unchanged(client: openai.OpenAI) -> None:
    models = {model.id for model in client.models.list()}
    assert models == {MODEL, EMBEDDING_MODEL}

    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=12
    )
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 12

    completion = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=5)
    assert completion.choices[0].text

    one = client.embeddings.create(model=EMBEDDING_MODEL, input="a boat")
    assert len(one.data[0].embedding) >= 16
    several = client.embeddings.create(model=EMBEDDING_MODEL, input=["a boat", "a keel"])
    assert [each.index for each in several.data] == [0, 1]


def test_streams_with_and_without_usage(client: openai.OpenAI) -> None:
    def run(**more: object) -> list[openai.types.chat.ChatCompletionChunk]:
        with client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Hello"}],
            max_tokens=12,
            stream=True,
            extra_body={"ignore_eos": True},
            **more,  # type: ignore[call-overload]
        ) as stream:
            return list(stream)

    chunks = run()
    assert all(chunk.usage is None for chunk in chunks)
    assert all(chunk.choices for chunk in chunks)
    assert [choice.finish_reason for choice in chunks[-1].choices] == ["length"]

    chunks = run(stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_errors_are_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=messages)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=10_000_000,  # type: ignore[arg-type]
        )
    assert caught.value.response.headers["x-request-id"]


def test_an_error_inside_a_stream_is_an_exception_of_the_client(
    twins: list[Twin], client: openai.OpenAI
) -> None:
    for twin in twins:
        twin.fault("cut", after_tokens=3)
    with client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        stream=True,
        max_tokens=30,
        extra_body={"ignore_eos": True},
    ) as stream:
        assert next(iter(stream)).choices
        with pytest.raises(openai.APIError, match="broke"):
            list(stream)
