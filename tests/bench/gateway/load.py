"""Ways to send requests: at a rate whatever comes back, or as fast as answers come."""

from __future__ import annotations

import asyncio
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.bench.gateway.client import Answer, Client, Exchange

MODEL = "qwen3-8b"
CHAT = "/v1/chat/completions"


def chat(
    max_tokens: int = 16,
    *,
    stream: bool = False,
    text: str = "Say something about the tide.",
    usage: bool = False,
    **more: object,
) -> bytes:
    """A chat request's body; the answer has exactly ``max_tokens`` tokens."""
    body: dict[str, object] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        **more,
    }
    if stream:
        body["stream"] = True
        if usage:
            body["stream_options"] = {"include_usage": True}
    return msgspec.json.encode(body)


def headers(user: str = "", sla: str = "", deadline_s: float = 0.0) -> bytes:
    """Header lines that say who asks, and how soon an answer is wanted."""
    lines = ""
    if user:
        lines += f"x-twinkeel-user: {user}\r\n"
    if sla:
        lines += f"x-twinkeel-sla: {sla}\r\n"
    if deadline_s:
        lines += f"x-twinkeel-deadline-ms: {round(deadline_s * 1000)}\r\n"
    return lines.encode()


async def paced(per_s: float, count: int, send: Callable[[int], None]) -> None:
    """Call ``send(i)`` for each i in turn, evenly spaced; late ones follow at once."""
    began_s = monotonic()
    sent = 0
    while sent < count:
        due = min(count, int((monotonic() - began_s) * per_s) + 1)
        while sent < due:
            send(sent)
            sent += 1
        if sent < count:
            await asyncio.sleep(max(0.0, began_s + sent / per_s - monotonic()))


async def open_loop(
    client: Client,
    requests: Sequence[bytes],
    per_s: float,
    count: int,
    *,
    kept: bool = False,
    on_event: Callable[[], None] | None = None,
) -> list[Answer]:
    """Send ``count`` of the requests, in turn, at that rate; all their answers, in order.
    ``on_event`` is called for every piece of them that comes."""
    exchanges: list[Exchange] = []

    def send(number: int) -> None:
        request = requests[number % len(requests)]
        exchanges.append(client.send(request, kept=kept, on_event=on_event))

    await paced(per_s, count, send)
    return [await exchange.done for exchange in exchanges]


async def closed_loop(
    client: Client, requests: Sequence[bytes], callers: int, for_s: float
) -> list[Answer]:
    """``callers`` send the next request as soon as the one before is answered."""
    answers: list[Answer] = []
    end_s = monotonic() + for_s

    async def caller(first: int) -> None:
        number = first
        while monotonic() < end_s:
            data = requests[number % len(requests)]
            answers.append(await client.send(data).done)
            number += callers

    await asyncio.gather(*(caller(first) for first in range(callers)))
    return answers


def kinds(answers: Iterable[Answer]) -> Counter[str]:
    return Counter(answer.kind for answer in answers)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share lies; 0 where there are none."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
