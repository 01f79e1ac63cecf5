"""Real vLLM with a model that has learned something, for what is measured of its answers."""

from __future__ import annotations

import contextlib
import sysconfig
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import yaml

from tests.controller.asking import CHAT, chat
from tests.controller.processes import http
from tests.live.server import MAX_NUM_BATCHED_TOKENS, MODEL, vllm_servers
from tests.live.vllm_env.ensure import environment, noisy_model, trained_model

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.live.server import Vllm

PROFILE = "cpu/tiny-qwen3"
OPTIONS = (
    "--enable-per-request-metrics", "--enable-prompt-tokens-details",
    "--num-gpu-blocks-override", "256",
    "--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS),
)  # fmt: skip
PROMPT_CHARACTERS = (60, 240)
MODULES = 48
"""Those that the model learned from: what it never saw is as new to it as noise."""
SCORES = {
    "entropy_mean_zero_milli": 8300,
    "entropy_worst_zero_milli": 8300,
    "close_zero_permille": 1000,
}
"""No trust is left where the model knows nothing: all of its 4096 words are equally likely, which
are 8.3 nats, and each is a close call. Sound answers then score 0.54 to 0.85, those of weights with
noise of .1 about 0.44."""


@contextlib.contextmanager
def replicas(noises: Sequence[float], own: Sequence[Sequence[str]] = ()) -> Iterator[list[Vllm]]:
    """One server for each noise, 0 for none, side by side; ``own`` are options of each."""
    env = environment()
    models = [noisy_model(env, noise) if noise else trained_model(env) for noise in noises]
    with vllm_servers(len(models), *OPTIONS, models=models, own=own) as servers:
        for server in servers:
            _warm(server)
        yield servers


def _warm(server: Vllm) -> None:
    """The first request for logprobs has vLLM compile what they need: seconds, or many of them."""
    for document in questions(2, 8, seed=7, stream=False, logprobs=True, top_logprobs=20):
        status, body = http("POST", f"{server.url}{CHAT}", document)
        assert status == 200, body


def upstreams(servers: Sequence[Vllm]) -> list[dict[str, object]]:
    """They as a controller is told of them."""
    return [server.upstream(PROFILE) for server in servers]


def policy(path: Path, **confidence: object) -> str:
    """A policy file in which nothing else happens to answers: the machine may be slow."""
    document = {
        "schema": 1,
        "name": "answers",
        "discipline": "tiered",
        "confidence": {**SCORES, "actions": ["template"], **confidence},
        "health": {"first_grace_ms": 60_000, "stall_ms": 60_000},
        "classes": {
            "p0_deadline_ms": 120_000, "p1_deadline_ms": 120_000, "p2_deadline_ms": 120_000,
            "p0_answer_ms": 120_000, "p1_answer_ms": 120_000, "p2_answer_ms": 120_000,
        },
    }  # fmt: skip
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return str(path)


def questions(count: int, max_tokens: int, seed: int = 1, **more: Any) -> list[dict[str, Any]]:
    """Chats whose user gives the beginning of a piece of the standard library; no two are alike."""
    dice = Random(seed)  # noqa: S311
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:MODULES]
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    asked: list[dict[str, Any]] = []
    for number in range(count):
        text = dice.choice([each for each in texts if len(each) > 2 * PROMPT_CHARACTERS[1]])
        start = dice.randrange(len(text) - PROMPT_CHARACTERS[1])
        piece = f"# {number}\n{text[start : start + dice.randint(*PROMPT_CHARACTERS)]}"
        asked.append(chat(MODEL, piece, max_tokens, **{"temperature": 0, **more}))
    return asked
