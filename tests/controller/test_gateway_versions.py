"""Each answer says which version of its model made it: the one that really answered."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from controller.gateway.streams import version_label
from tests.controller.asking import Answer, ask, chat, session
from tests.controller.inprocess import serving
from tests.controller.processes import MODEL, settings_for
from twin.serve.server import serving as twin

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "x-twinkeel-model-version"
POLICY = """schema: 1
name: one failure opens the breaker
discipline: tiered
health: {enabled: false}
retries: {tries_most: 1}
breakers:
  actions: [cached, template]
  rules:
    - {name: any, kinds: [http_5xx], consecutive_least: 1, consecutive_ms: 0, open_ms: 30000}
"""


def labels(answer: Answer) -> tuple[str | None, str | None]:
    """In the headers, and in the body."""
    return answer.headers.get(HEADER), answer.extras.get("model_version")


async def break_down(url: str, kind: str | None) -> None:
    """A fault from now on; None: well again."""
    async with aiohttp.ClientSession() as client:
        if kind is None:
            answer = await client.delete(f"{url}/twin/fault")
        else:
            answer = await client.post(f"{url}/twin/fault", json={"kind": kind})
        assert answer.status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_retried_answer_has_the_label_of_whoever_gave_it(tmp_path: Path, stream: bool) -> None:
    """The first try goes to a server that is broken; what counts is where the last one went."""

    async def main() -> None:
        async with twin(version="v1") as first, twin(version="v2") as second:
            settings = settings_for([first, second], tmp_path)
            async with serving(settings) as running, session() as client:
                for broken, well in ((first, "v2"), (second, "v1")):
                    await break_down(broken, "http_500")
                    tries = 0
                    for number in range(4):
                        document = chat(MODEL, f"{well} {number}", 4, stream=stream)
                        answer = await ask(client, running.url, document)
                        assert answer.good, answer
                        assert labels(answer) == (well, well)
                        tries += answer.headers[HEADER] == well
                    assert tries == 4
                    await break_down(broken, None)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_kept_answer_has_the_label_of_whoever_made_it_and_a_template_none(
    tmp_path: Path, stream: bool
) -> None:
    async def main() -> None:
        policy = tmp_path / "policy.yaml"
        policy.write_text(POLICY)
        async with twin(version="v1") as url:
            settings = settings_for([url], tmp_path, policy=str(policy))
            async with serving(settings) as running, session() as client:

                async def asked(text: str) -> Answer:
                    document = chat(MODEL, text, 4, stream=stream)
                    return await ask(client, running.url, document)

                whole = await ask(client, running.url, chat(MODEL, "Hello", 4, stream=False))
                assert labels(whole) == ("v1", "v1")
                await break_down(url, "http_500")
                failed = await ask(client, running.url, chat(MODEL, "Oh", 4, stream=False))
                assert failed.status == 502
                assert HEADER not in failed.headers
                cached = await asked("Hello")
                assert cached.headers["x-twinkeel-degraded"] == "cached"
                assert labels(cached) == ("v1", "v1")
                template = await asked("Something else")
                assert template.headers["x-twinkeel-degraded"] == "template"
                assert labels(template) == (None, None)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("version", "label"),
    [
        ("v1.1", "v1.1"), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"), ("", ""), ("/models/qwen", ""),
        ("v\r\nx-evil: 1", ""), ("版本", ""),
    ],
)  # fmt: skip
def test_what_is_told_of_a_version(version: Any, label: str) -> None:
    assert version_label(version) == label
