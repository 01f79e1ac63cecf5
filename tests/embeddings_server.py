"""A small server of embeddings for tests, with vectors that mean something: hashed words and
three-letter pieces, so texts with much in common are near each other.

It stands for a model that no test can load; what it measures is the machinery around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from numpy.typing import NDArray

COMMON = re.compile(
    "(?:a|an|and|are|as|at|be|by|can|could|do|does|for|from|good|hello|hey|hi|how|i|if|in|is|it|know"
    "|me|my|of|on|or|please|so|tell|thank|thanks|that|the|there|they|this|to|was|we|what|when|where"
    "|which|who|why|will|with|would|you|your)"
)
COMMON_WEIGHT = 0.15
"""Words that are in most texts say little, as sentence models have learnt."""
WIDTH = 384
MODEL = "pieces"


def vector_of(text: str) -> NDArray[np.float64]:
    """Of length one, unless there is no letter in it. Words weigh more than pieces, common words
    less than others."""
    found = np.zeros(WIDTH)
    words = re.findall(r"\w+", text.lower())
    for word in words:
        weight = COMMON_WEIGHT if COMMON.fullmatch(word) else 1.0
        _add(found, word, weight)
        padded = f"<{word}>"
        for at in range(len(padded) - 2):
            _add(found, padded[at : at + 3], 0.3 * weight)
    length = np.linalg.norm(found)
    return found / length if length else found


def _add(found: NDArray[np.float64], piece: str, weight: float) -> None:
    number = int.from_bytes(blake2b(piece.encode(), digest_size=8).digest(), "big")
    found[number % WIDTH] += weight if number >> 60 & 1 else -weight


@dataclass
class Served:
    """The server, and how it behaves."""

    url: str = ""
    texts: list[str] = field(default_factory=list)
    """All that it was asked for."""
    delay_s: float = 0.0
    status: int = 200
    same: bool = False
    """Everything has one vector: to whoever asks, all texts are alike."""
    body: Any = None
    """What it says instead."""

    async def embeddings(self, request: web.Request) -> web.Response:
        document = await request.json()
        assert document["model"] == MODEL
        texts = document["input"]
        self.texts += texts
        await asyncio.sleep(self.delay_s)
        if self.status != 200:
            return web.Response(status=self.status)
        if self.body is not None:
            return web.json_response(self.body)
        vectors = [vector_of("one" if self.same else text).tolist() for text in texts]
        rows = [{"index": at, "embedding": each} for at, each in enumerate(vectors)]
        return web.json_response({"data": rows[::-1]})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL}]})


@contextlib.asynccontextmanager
async def embeddings_server() -> AsyncIterator[Served]:
    """One on a free port."""
    served = Served()
    app = web.Application()
    app.router.add_post("/v1/embeddings", served.embeddings)
    app.router.add_get("/v1/models", served.models)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield served
    finally:
        await runner.cleanup()
