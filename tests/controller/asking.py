"""A caller: sends requests as applications do, and keeps what came back and when."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
EMBEDDINGS = "/v1/embeddings"


@dataclass
class Answer:
    """What a caller got. Times are seconds on the monotonic clock; -1: it did not come to that."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    sent_s: float = -1.0
    headers_s: float = -1.0
    first_s: float = -1.0
    """First bytes that are no comment."""
    ended_s: float = -1.0
    clean: bool = False
    """It ended as HTTP ends an answer."""
    trouble: str = ""
    """How the connection broke."""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.sent_s

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.body)
        return document

    @property
    def events(self) -> list[bytes]:
        """Of a stream, comments included."""
        return [part for part in self.body.split(b"\n\n") if part]

    @property
    def comments(self) -> list[bytes]:
        return [event for event in self.events if event.startswith(b":")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """What its events hold."""
        data = [event[5:].strip() for event in self.events if event.startswith(b"data:")]
        return [json.loads(each) for each in data if each != b"[DONE]"]

    @property
    def done(self) -> bool:
        """It is a stream that ended with ``[DONE]``."""
        return self.body.rstrip().endswith(b"data: [DONE]")

    @property
    def error(self) -> dict[str, Any]:
        """Of the answer, or inside its stream; empty: none."""
        if self.headers.get("Content-Type", "").startswith("text/event-stream"):
            return next((chunk["error"] for chunk in self.chunks if "error" in chunk), {})
        return {} if self.status == 200 else self.document.get("error", {})

    @property
    def good(self) -> bool:
        """It is a whole answer."""
        if self.status != 200 or not self.clean or self.error:
            return False
        return self.done if b"data:" in self.body[:64] else bool(self.body)

    @property
    def extras(self) -> dict[str, Any]:
        """The ``twinkeel`` object, of the last event where it is a stream."""
        if self.headers.get("Content-Type", "").startswith("text/event-stream"):
            found = [chunk["twinkeel"] for chunk in self.chunks if "twinkeel" in chunk]
            return found[-1] if found else {}
        extras: dict[str, Any] = self.document.get("twinkeel", {})
        return extras

    @property
    def text(self) -> str:
        """What the model said."""
        chunks = self.chunks if b"data:" in self.body[:64] else [self.document]
        parts: list[str] = []
        for choice in (choice for chunk in chunks for choice in chunk.get("choices", [])):
            said = choice.get("delta") or choice.get("message") or {}
            parts.append(said.get("content") or choice.get("text") or "")
        return "".join(parts)


def session() -> aiohttp.ClientSession:
    """Without a bound on connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=120)
    )


async def ask(
    client: aiohttp.ClientSession,
    url: str,
    document: object,
    headers: Mapping[str, str] | None = None,
    path: str = CHAT,
    began: Callable[[], object] = lambda: None,
) -> Answer:
    """Send it and take all that comes; ``began`` is called when the answer does."""
    answer = Answer()
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    head = {"Content-Type": "application/json", **(headers or {})}
    parts: list[bytes] = []
    answer.sent_s = time.monotonic()
    try:
        async with client.post(f"{url}{path}", data=body, headers=head) as response:
            answer.status, answer.headers = response.status, response.headers
            answer.headers_s = time.monotonic()
            async for part in response.content.iter_any():
                if answer.first_s < 0 and not part.startswith(b":"):
                    answer.first_s = time.monotonic()
                    began()
                parts.append(part)
        answer.clean = True
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.trouble = f"{type(error).__name__}: {error}"
    answer.ended_s = time.monotonic()
    answer.body = b"".join(parts)
    return answer


async def ask_all(
    url: str,
    documents: list[dict[str, Any]],
    headers: Mapping[str, str] | None = None,
    path: str = CHAT,
    gap_s: float = 0.0,
) -> list[Answer]:
    """Send them side by side, the next one ``gap_s`` later."""
    async with session() as client:
        tasks = []
        for document in documents:
            tasks.append(asyncio.create_task(ask(client, url, document, headers, path)))
            if gap_s:
                await asyncio.sleep(gap_s)
        return list(await asyncio.gather(*tasks))


def chat(
    model: str, text: str = "Tell me a story.", max_tokens: int = 16, *, stream: bool = True,
    **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """A chat request that runs to its last token."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "stream": stream,
        **more,
    }
