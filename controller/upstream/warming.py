"""Warm-up: the first requests of a server, so that no caller has to wait for them."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

from controller.upstream.discovery import DiscoveryError, base_of, cards_of, version_of
from controller.upstream.scrape import ANSWERLESS, told
from policy.events import Warmed

if TYPE_CHECKING:
    from controller.upstream.replica import Replica

WARM_S_MOST = 120.0
"""The first logprobs of a fresh vLLM took up to 22 s to compile."""

log = logging.getLogger(__name__)


async def warm(replica: Replica, pooling: bool | None = None) -> Warmed:
    """Send one small request to each endpoint that the server has, one of them with logprobs, and
    see what it has loaded. An endpoint that answers 4xx is one that it does not serve.

    Args:
        pooling: it serves embeddings only; None: as it was described, else it does not.
    """
    version = "" if replica.spec is None else replica.spec.version
    try:
        async with asyncio.timeout(WARM_S_MOST):
            cards = await cards_of(replica)
            version = version_of(cards, replica.upstream)
            model = base_of(cards).id
            if pooling is None:
                pooling = replica.spec is not None and replica.spec.pooling
            answers = [await _asked(replica, model, *asked) for asked in _questions(model, pooling)]
    except (DiscoveryError, *ANSWERLESS) as error:
        log.warning("%s: warm-up failed: %s", replica.name, told(error))
        return Warmed(replica.id, version, False)
    ok = True in answers and False not in answers
    return Warmed(replica.id, version, ok)


def _questions(model: str, pooling: bool) -> list[tuple[str, dict[str, object]]]:
    if pooling:
        return [("/v1/embeddings", {"model": model, "input": "Hello"})]
    completion = {"model": model, "prompt": "Hello", "max_tokens": 2}
    chat = {"model": model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    return [
        ("/v1/completions", completion | {"logprobs": 2}),
        ("/v1/chat/completions", chat | {"logprobs": True, "top_logprobs": 2}),
    ]


async def _asked(
    replica: Replica, model: str, path: str, question: dict[str, object]
) -> bool | None:
    """Whether the answer is one of this model; None: the server has no such endpoint."""
    body = json.dumps(question).encode()
    async with replica.post(path, body, {"Content-Type": "application/json"}) as answer:
        text = await answer.read()
    if 400 <= answer.status < 500:
        return None
    try:
        said: Any = json.loads(text) if answer.status == 200 else {}
    except ValueError:
        said = {}
    good = isinstance(said, dict) and said.get("model") == model and _complete(said)
    if not good:
        log.warning("%s: %s answers its warm-up with %d, not as %s", replica.name, path,
                    answer.status, model)  # fmt: skip
    return good


def _complete(said: dict[str, Any]) -> bool:
    """A cut-off answer comes with a 200, too."""
    parts = said.get("choices") or said.get("data")
    if not isinstance(parts, list) or not parts or not isinstance(parts[0], dict):
        return False
    return parts[0].get("finish_reason") != "abort"
