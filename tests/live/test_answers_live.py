"""How far answers of real vLLM are trusted: scores, second runs, and a replica with bad weights.

The model has learned something: a random one has no confidence to lose.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.bench.answers import noisy
from tests.bench.answers.clean import EVERYTHING
from tests.bench.answers.replicas import policy, questions, replicas, upstreams
from tests.controller.asking import CHAT, COMPLETIONS, Answer, ask_all
from tests.controller.processes import http
from tests.live.server import MODEL

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.controller.processes import Controller, Controllers
    from tests.live.server import Vllm

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Vllm]]:
    """Two sound replicas, and one with noise on its weights."""
    with replicas([0, 0, noisy.NOISES[0]]) as started:
        yield started


@pytest.fixture
def controller(servers: list[Vllm], controllers: Controllers, tmp_path: Path) -> Controller:
    """In front of the sound ones; every answer is verified."""
    return controllers(
        upstreams(servers[:2]),
        policy=policy(tmp_path / "verifying.yaml", **EVERYTHING),
        features={"confidence": True},
    )


def asked(controller: Controller, path: str = CHAT, **more: Any) -> Answer:
    (document,) = questions(1, 12, **more)
    if path == COMPLETIONS:
        document["prompt"] = document.pop("messages")[0]["content"]
    (answer,) = asyncio.run(ask_all(controller.url, [document], path=path))
    assert answer.good, answer.body
    return answer


def test_an_answer_says_how_far_it_can_be_trusted(controller: Controller) -> None:
    answer = asked(controller, stream=False)
    score = answer.extras["confidence_score"]
    assert 0.2 < score < 1.0, "it has learned something, and not all"
    assert float(answer.headers["x-twinkeel-confidence"]) == score
    assert answer.extras["verification_status"] == "match", "its peer has the same weights"
    assert answer.headers["x-twinkeel-verification"] == "match"
    assert answer.document["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_says_it_in_its_last_event(controller: Controller, path: str) -> None:
    answer = asked(controller, path, stream=True)
    assert answer.done
    assert 0.2 < answer.extras["confidence_score"] < 1.0
    assert answer.extras["verification_status"] == "skipped_stream"
    assert ["twinkeel" in chunk for chunk in answer.chunks].index(True) == len(answer.chunks) - 1
    choices = [choice for chunk in answer.chunks for choice in chunk["choices"]]
    assert all(choice.get("logprobs") is None for choice in choices)


def shape(chunks: list[dict[str, Any]]) -> list[list[Any]]:
    """What is listed for each token: strings only, since logprobs are equal but for their last
    digits."""
    listed: list[list[Any]] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        logprobs = choice.get("logprobs") or {}
        for token in logprobs.get("content") or ():
            assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
            listed.append([token["token"], [each["token"] for each in token["top_logprobs"]]])
        for token, top in zip(
            logprobs.get("tokens") or (), logprobs.get("top_logprobs") or (), strict=True
        ):
            listed.append([token, list(top)])
    return listed


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        (CHAT, {"logprobs": True}),
        (CHAT, {"logprobs": True, "top_logprobs": 2}),
        (COMPLETIONS, {"logprobs": 0}),
        (COMPLETIONS, {"logprobs": 1}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_gets_the_logprobs_of_vllm_itself(
    servers: list[Vllm], controller: Controller, path: str, wanted: dict[str, Any], stream: bool
) -> None:
    answer = asked(controller, path, stream=stream, **wanted)
    (document,) = questions(1, 12, stream=False, **wanted)
    if path == COMPLETIONS:
        document["prompt"] = document.pop("messages")[0]["content"]
    status, body = http("POST", f"{servers[0].url}{path}", document)
    assert status == 200
    expected = shape([json.loads(body)])
    assert len(expected) == 12
    assert shape(answer.chunks if stream else [answer.document]) == expected
    assert answer.extras["confidence_score"] < 1.0


def test_a_replica_with_bad_weights_is_found_and_out(servers: list[Vllm], tmp_path: Path) -> None:
    answers, seen = noisy.load(servers, tmp_path, seconds=40.0)
    assert all(answer.good for answer in answers)
    assert seen.open_s is not None, seen
    assert seen.delivered <= 20, seen
    assert seen.clean_out == 0, seen


def test_its_model_is_the_same_for_all(servers: list[Vllm]) -> None:
    """Nothing else tells them apart: name, health and speed are those of the sound ones."""
    for server in servers:
        assert http("GET", f"{server.url}/health")[0] == 200
        listed = json.loads(http("GET", f"{server.url}/v1/models")[1])
        assert [each["id"] for each in listed["data"]] == [MODEL]
