"""Bytes pass as they are: what the caller gets against what vLLM put on the wire."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.controller.asking import CHAT, COMPLETIONS, Answer, ask, chat, session
from tests.controller.wire import Relay, relay

if TYPE_CHECKING:
    from tests.controller.processes import Controllers
    from tests.live.server import Vllm

pytestmark = pytest.mark.live

OFF = {"usage": False, "extras": False, "confidence": False}
COMPLETION = {"model": "tiny", "prompt": "def x", "max_tokens": 9, "ignore_eos": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat("tiny", "def main():", 9)),
    (CHAT, chat("tiny", "def main():", 9, stream=False)),
    (CHAT, chat("tiny", "a", 9, stream_options={"include_usage": True})),
    (CHAT, chat("tiny", "b", 9, stream_options={"include_usage": True,
                                                "continuous_usage_stats": True})),
    (CHAT, chat("tiny", "c", 5, logprobs=True, top_logprobs=3)),
    (CHAT, chat("tiny", "c", 5, logprobs=True, top_logprobs=3, stream=False)),
    (CHAT, chat("tiny", "d", 6, n=2)),
    (CHAT, chat("tiny", "e", 12, tools=[TOOL],
                tool_choice={"type": "function", "function": {"name": "f"}})),
    (COMPLETIONS, COMPLETION),
    (COMPLETIONS, {**COMPLETION, "stream": True}),
    (COMPLETIONS, {**COMPLETION, "stream": True, "logprobs": 2}),
    (CHAT, chat("tiny", "f", 9, temperature=-1)),
    (CHAT, chat("tiny", "h " * 9000, 4)),
]  # fmt: skip


async def _ask(url: str, asked: list[tuple[str, dict[str, Any]]], at_once: bool) -> list[Answer]:
    async with session() as client:
        waiting = (
            ask(client, url, document, {"x-request-id": f"bytes-{number}"}, path)
            for number, (path, document) in enumerate(asked)
        )
        if at_once:
            return list(await asyncio.gather(*waiting))
        return [await each for each in waiting]


def _by_name(passed: Relay) -> dict[str, bytes]:
    """What vLLM answered, by request id."""
    pairs = [*passed.exchanges(CHAT), *passed.exchanges(COMPLETIONS)]
    return {request.headers["x-request-id"]: answer.body for request, answer in pairs}


@pytest.mark.parametrize("at_once", [False, True], ids=["one_by_one", "at_once"])
def test_with_features_off_bytes_are_exactly_vllms(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers, at_once: bool
) -> None:
    asked = ASKED if not at_once else [(CHAT, chat("tiny", f"say {n}", 20)) for n in range(12)]
    with relay(vllm[0].url) as passed:
        controller = controllers(
            [vllm[0].upstream(profile, url=passed.url)], policy=patient, features=OFF
        )
        answers = asyncio.run(_ask(controller.url, asked, at_once))
        controller.stop()
    sent = _by_name(passed)
    assert len(sent) == len(asked)
    for number, answer in enumerate(answers):
        assert answer.clean, answer.trouble
        assert answer.body == sent[f"bytes-{number}"]
        assert answer.headers["x-request-id"] == f"bytes-{number}"
    good = [answer for answer in answers if answer.status == 200]
    assert len(good) >= len(asked) - 2


def test_with_features_on_only_the_listed_edits_are_made(
    vllm: list[Vllm], profile: str, patient: str, controllers: Controllers
) -> None:
    asked = [
        (CHAT, chat("tiny", "def main():", 9)),
        (CHAT, chat("tiny", "def main():", 9, stream_options={"include_usage": True})),
        (CHAT, chat("tiny", "def main():", 9, stream=False)),
    ]
    with relay(vllm[0].url) as passed:
        controller = controllers([vllm[0].upstream(profile, url=passed.url)], policy=patient)
        plain, usage, whole = asyncio.run(_ask(controller.url, asked, at_once=False))
        controller.stop()
    sent = _by_name(passed)

    theirs = sent["bytes-0"].split(b"\n\n")
    events = [event for event in theirs if b'"choices":[]' not in event]  # usage: taken out again
    assert len(theirs) == len(events) + 1
    assert _without_extras(plain) == b"\n\n".join(events)
    assert _without_extras(usage) == sent["bytes-1"]
    assert _without_extras(whole) == sent["bytes-2"]


def _without_extras(answer: Answer) -> bytes:
    """Its bytes, less the ``twinkeel`` object, which comes last in its object."""
    text = answer.body.decode()
    at = text.index(',"twinkeel":')
    extras, length = json.JSONDecoder().raw_decode(text[at + len(',"twinkeel":') :])
    assert extras["request_id"] == answer.headers["x-request-id"]
    return (text[:at] + text[at + len(',"twinkeel":') + length :]).encode()
