"""Answers that are kept for a while, for callers whose model is cut off or cannot be trusted.

The same question of the same tenant to the same model and version finds one. Where a server of
embeddings is configured, so does one that says the same in other words: its words have to be equal
up to courtesies and short forms (``questions.meaning``), and its vector near. The words alone keep
opposites apart, whose vectors are near each other; the vectors are a second lock on the same door.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from controller.gateway import editing
from controller.gateway.questions import is_whole, key_of, likeness_of
from controller.store.answers import New, Vector
from controller.upstream import sse

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from controller.gateway.asking import Asked
    from controller.gateway.questions import Likeness
    from controller.store.answers import Kept, KeptAnswers
    from controller.upstream.embeddings import Embeddings
    from controller.upstream.replica import Replica
    from policy.parameters import Parameters

LOGGER = logging.getLogger("twinkeel")
ANSWER_BYTES_MOST = 256 * 1024
SIMILARITY_LEAST = 0.90
"""Cosine of two questions with equal words. Sentence models give paraphrases .85 and more, so these
are well above; opposites reach it, too, which is why it never decides alone."""
STREAMS_MOST = 500
"""Open requests up to which streams are gathered: that bounds the memory it takes."""
LOOK_S_MOST = 0.5
"""A look-up takes no longer: its caller waits, and the next of the actions may take its time."""
EMBED_S_MOST = 0.3
"""Of that, for the question's own vector."""
EMBED_LATER_S_MOST = 2.0
"""For vectors of questions whose answers are kept: nobody waits."""
TOGETHER_MOST = 16
"""Texts in one call."""
WAITING_MOST = 256
"""Questions that wait for their vector; with more, the oldest go without."""


def gathers(asked: Asked, parameters: Parameters, open_requests: int) -> bool:
    """Whether a stream's bytes are gathered while they pass, so that its answer can be kept."""
    document = asked.document
    return (
        open_requests <= STREAMS_MOST
        and keeps(parameters)
        and document.get("n") in (None, 1)
        and (document.get("logprobs") is None or document["logprobs"] is False)
        and not document.get("return_token_ids")
        and isinstance(document.get("prompt", ""), str)
    )


def keeps(parameters: Parameters) -> bool:
    """Whether anybody may get a kept answer: nobody is degraded first come, first served."""
    actions = (*parameters.breakers.actions, *parameters.confidence.actions)
    return parameters.discipline != "fifo" and "cached" in actions


def whole_of(body: bytes, chat: bool) -> bytes:
    """A kept answer in one piece, which was one or a stream; empty: there is nothing to read."""
    if not body.startswith((b"data:", b":")):
        return body
    splitter = sse.Splitter()
    payloads = [sse.payload(event) for event in splitter.feed(body)]
    try:
        whole = editing.as_whole(payloads, chat)
        choice = msgspec.json.decode(whole)["choices"][0]
    except (msgspec.DecodeError, KeyError, IndexError):
        return b""
    message = choice.get("message") or {}
    said = choice.get("text") or message.get("content") or message.get("tool_calls")
    return whole if said else b""


class Answers:
    """Keeps answers, and finds them again.

    Args:
        store: where they are kept; its owner closes it.
        embeddings: None: only the very same question finds an answer.
        wall_s: time of day.
    """

    def __init__(
        self,
        store: KeptAnswers,
        embeddings: Embeddings | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.store = store
        self.embeddings = embeddings
        self.looked = {"same": 0, "alike": 0, "none": 0}
        """Look-ups so far, by what they found."""
        self._wall_s = wall_s
        self._waiting: deque[tuple[bytes, str, Asked]] = deque(maxlen=WAITING_MOST)
        """Key, version and question of kept answers."""
        self._worker: asyncio.Task[None] | None = None

    def keep(self, asked: Asked, body: bytes, confidence_permille: int, version: str) -> None:
        """Keep an answer. Nobody waits for it; a large one is passed over."""
        if len(body) > ANSWER_BYTES_MOST or asked.endpoint == "embeddings":
            return
        if not is_whole(asked):
            return
        key = key_of(asked)
        self.store.keep(New(key, version, body, confidence_permille, self._wall_s()))
        if self.embeddings is not None and asked.endpoint == "chat":
            self._waiting.append((key, version, asked))
            if self._worker is None or self._worker.done():
                worker = self._embed_all(self.embeddings)
                self._worker = asyncio.get_running_loop().create_task(worker)

    async def find(
        self, asked: Asked, versions: Collection[str], s_left: float = LOOK_S_MOST
    ) -> Kept | None:
        """The youngest answer to the same question, else the nearest to one that says the same; in
        one piece, however it came.

        Args:
            versions: of the asked model, as it is served now; only answers of these will do.
            s_left: until the caller's deadline.
        """
        found, kept = "none", None
        try:
            async with asyncio.timeout(min(s_left, LOOK_S_MOST)):
                found, kept = await self._find(asked, versions, s_left)
        except TimeoutError:
            pass
        body = b"" if kept is None else whole_of(kept.body, asked.endpoint == "chat")
        self.looked[found if body else "none"] += 1
        return None if kept is None or not body else kept._replace(body=body)

    async def _find(
        self, asked: Asked, versions: Collection[str], s_left: float
    ) -> tuple[str, Kept | None]:
        nothing = "none", None
        if not versions:
            return nothing
        kept = await self.store.find(key_of(asked), versions)
        embeddings = self.embeddings
        if kept is not None or embeddings is None:
            return "same", kept
        likeness = likeness_of(asked)
        if likeness is None:
            return nothing
        s_most = min(s_left / 2, EMBED_S_MOST)
        if not embeddings.space:
            await embeddings.embed([], s_most)
        # The words go first: most questions have nobody to be compared with.
        if not await self.store.has_alike(likeness.alike, versions, embeddings.space):
            return nothing
        vectors = await embeddings.embed([likeness.text], s_most)
        if vectors is None:
            return nothing
        return "alike", await self.store.nearest(
            likeness.alike, versions, embeddings.space, vectors[0], SIMILARITY_LEAST
        )

    async def embedded(self) -> None:
        """Until no question waits for its vector any more."""
        if self._worker is not None:
            await asyncio.wait([self._worker])

    async def close(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)

    async def _embed_all(self, embeddings: Embeddings) -> None:
        while self._waiting:
            count = min(TOGETHER_MOST, len(self._waiting))
            taken = [self._waiting.popleft() for _ in range(count)]
            some = {(key, version): asked for key, version, asked in taken}
            keys = list(some)
            if embeddings.space:
                lacking = await self.store.lacking(keys, embeddings.space)
                keys = [key for key, lacks in zip(keys, lacking, strict=True) if lacks]
            found: dict[tuple[bytes, str], Likeness] = {}
            for key in keys:
                likeness = likeness_of(some[key])
                if likeness is not None:
                    found[key] = likeness
                await asyncio.sleep(0)  # others' turn
            if not found:
                continue
            texts = [each.text for each in found.values()]
            rows = await embeddings.embed(texts, EMBED_LATER_S_MOST)
            if rows is not None:
                vectors = [
                    Vector(*key, each.alike, row)
                    for (key, each), row in zip(found.items(), rows, strict=True)
                ]
                await self.store.put_vectors(vectors, embeddings.space)


def versions_of(replicas: Iterable[Replica], model: str) -> tuple[str, ...]:
    """The versions in which a model is served now; where no server of it is up, those in which it
    was last. Empty: nobody knows."""
    serving = [
        each
        for each in replicas
        if each.spec is not None and (not each.spec.models or model in each.spec.models)
    ]
    up = [each for each in serving if each.up]
    return tuple(sorted({each.spec.version for each in up or serving if each.spec is not None}))
