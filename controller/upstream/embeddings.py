"""Vectors of questions, from a server that speaks OpenAI's ``/v1/embeddings``.

It is asked for what is better to have than to wait for: whatever goes wrong there, callers are only
told that there is no vector.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

WIDTH_MOST = 16_384
BODY_BYTES_MOST = 64 * 1024 * 1024
SLOW_S = 0.25
"""A time-out is the server's fault from then on; a caller that had less time says nothing of it."""
REST_S = 5.0
"""A server that failed is left alone for that long: callers do not wait for it one by one."""


class _Failed(Exception):
    """No vectors came: why."""


class _One(msgspec.Struct):
    embedding: list[float]
    index: int = -1


class _Answer(msgspec.Struct):
    data: list[_One]


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class Embeddings:
    """One server of embeddings.

    Args:
        url: such as ``http://10.0.0.9:8000``.
        model: what it calls its model; empty: the first that it names.
        on_trouble: is told why there are no vectors.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        url: str,
        model: str = "",
        on_trouble: Callable[[str], object] = lambda text: None,
    ) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._model = model
        self._on_trouble = on_trouble
        self._rests_until_s = 0.0
        self.asked = self.failed = 0
        """Calls for vectors, and those that came to nothing."""

    @property
    def space(self) -> str:
        """Whose vectors they are: others cannot be compared with them. Empty: not known yet."""
        return self._model

    async def embed(self, texts: Sequence[str], s_most: float) -> NDArray[np.float32] | None:
        """A vector of length one for each text, as rows; None: there are none in that time. With no
        text, only ``space`` is found out."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._rests_until_s or s_most <= 0:
            return None
        self.asked += 1
        try:
            async with asyncio.timeout(s_most):
                if not self._model:
                    self._model = await self._first_model()
                return await self._embed(texts) if texts else None
        except TimeoutError:
            if s_most < SLOW_S:
                return None
            why = f"no answer within {s_most:.3g} s"
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or type(error).__name__
        except (_Failed, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            why = str(error)
        self.failed += 1
        self._rests_until_s = asyncio.get_running_loop().time() + REST_S
        self._on_trouble(
            f"the embeddings of {self._url} cannot be had ({why}): only the very same questions"
            " find a kept answer meanwhile"
        )
        return None

    async def _first_model(self) -> str:
        async with self._session.get(f"{self._url}/v1/models", allow_redirects=False) as answer:
            models = msgspec.json.decode(await _read(answer), type=_Models).data
        if not models:
            raise _Failed("it names no model: give one, as in --embeddings URL,model=NAME")
        return models[0].id

    async def _embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        body: dict[str, Any] = {"model": self._model, "input": list(texts)}
        async with self._session.post(
            f"{self._url}/v1/embeddings", data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"}, allow_redirects=False,
        ) as answer:  # fmt: skip
            rows = msgspec.json.decode(await _read(answer), type=_Answer).data
        if len(rows) != len(texts):
            raise _Failed(f"{len(rows)} vectors for {len(texts)} texts")
        if all(row.index >= 0 for row in rows):
            rows.sort(key=lambda row: row.index)
        width = len(rows[0].embedding)
        if not 0 < width <= WIDTH_MOST or any(len(row.embedding) != width for row in rows):
            raise _Failed(f"vectors of {sorted({len(row.embedding) for row in rows})} numbers")
        vectors = np.array([row.embedding for row in rows], np.float64)
        with np.errstate(over="ignore"):
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(lengths).all() or not (lengths > 0).all():
            raise _Failed("a vector of no length")
        unit: NDArray[np.float32] = (vectors / lengths).astype(np.float32)
        return unit


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    if answer.status != 200:
        raise _Failed(f"it answered {answer.status}")
    data = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):
        data += part
        if len(data) > BODY_BYTES_MOST:
            raise _Failed(f"its answer has more than {BODY_BYTES_MOST} bytes")
    return bytes(data)
