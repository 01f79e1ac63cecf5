"""Finding out what a server is, from itself."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from controller.upstream.matching import Match, advice, by_model, named
from controller.upstream.scrape import Page, cache_config, fetch, parse
from policy.announce import Sizes, announce
from policy.cost import StepCost, kv_blocks
from policy.files import FileError

if TYPE_CHECKING:
    from controller.config import Upstream
    from controller.upstream.replica import Replica
    from policy.events import ReplicaUp

MIB = 1 << 20

log = logging.getLogger(__name__)


class DiscoveryError(Exception):
    """A server that answers, but not in a way that it can be used: what, and what to do."""


class Card(msgspec.Struct, frozen=True):
    """A model as ``/v1/models`` lists it."""

    id: str
    root: str | None = None
    """What was loaded: a hub name, or a folder on the server."""
    parent: str | None = None
    """Of a LoRA adapter: the model that it changes."""
    max_model_len: int | None = None
    twinkeel_profile: str | None = None
    """A served twin says whose timing it has."""
    twinkeel_version: str | None = None


class _Cards(msgspec.Struct):
    data: list[Card]


async def describe(replica: Replica, upstream: Upstream) -> ReplicaUp:
    """What the policy is told of a server, asked of itself where ``upstream`` does not say it.

    Its model's version is ``upstream``'s, else a twin's own, else what the server loaded (``root``)
    or, without that, the model's name.

    Raises:
        DiscoveryError: it answers, but cannot be used.
        aiohttp.ClientError, OSError, TimeoutError: it does not answer.
    """
    return (await described(replica, upstream))[0]


async def described(replica: Replica, upstream: Upstream) -> tuple[ReplicaUp, Page, StepCost]:
    """The same, the page of metrics that it was read from, and its profile's step times."""
    cards = await cards_of(replica)
    status, metrics = await fetch(replica, "/metrics")
    if status != 200:
        metrics = b""
    engine = await _engine_version(replica)
    match = await asyncio.to_thread(_match, replica, upstream, cards)
    base = base_of(cards)
    flags = match.profile.engine
    cache = cache_config(metrics)
    sizes = Sizes(
        cache.kv_blocks if cache.kv_blocks > 1 else _own_blocks(replica, match),
        cache.block_tokens or flags.block_tokens,
        upstream.max_num_seqs or flags.max_num_seqs,
        upstream.max_num_batched_tokens or flags.max_num_batched_tokens,
        max(1, base.max_model_len or flags.max_model_len),
    )
    cost = StepCost.from_profile(match.profile)
    memory_mb = match.profile.tensor_parallel * match.gpu.memory_bytes // MIB
    closeness_permille, memory_mb = replica.placed or (1000, memory_mb)
    up = announce(
        replica.id, replica.name, match.profile, match.model, cost, sizes,
        models=_names(cards),
        version=version_of(cards, upstream),
        domain=upstream.domain,
        labels=_labels(upstream, engine),
        closeness_permille=closeness_permille,
        memory_mb=memory_mb,
    )  # fmt: skip
    if match.note:
        log.info("%s: %s (else: %s)", replica.name, match.note, advice(replica.url))
    return up, parse(metrics), cost


async def cards_of(replica: Replica) -> list[Card]:
    """What it lists, at least one."""
    status, body = await fetch(replica, "/v1/models")
    if status != 200:
        hint = ": it asks for a key, and none is sent" if status in (401, 403) else ""
        raise DiscoveryError(f"{replica.name}: /v1/models answers {status}{hint}")
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except (msgspec.MsgspecError, ValueError) as error:
        raise DiscoveryError(
            f"{replica.name}: /v1/models is no list of models ({error}): is {replica.url} an"
            " OpenAI-compatible server?"
        ) from error
    if not cards:
        raise DiscoveryError(f"{replica.name}: /v1/models lists no model: load one there")
    return cards


async def _engine_version(replica: Replica) -> str:
    """Of vLLM; empty: it does not say."""
    status, body = await fetch(replica, "/version")
    try:
        said: Any = json.loads(body) if status == 200 else {}
    except ValueError:
        return ""
    version = said.get("version") if isinstance(said, dict) else None
    return version if isinstance(version, str) else ""


def base_of(cards: list[Card]) -> Card:
    """The model itself, not an adapter."""
    return next((card for card in cards if card.parent is None), cards[0])


def _names(cards: list[Card]) -> tuple[str, ...]:
    """Of the model, then of its adapters; these in order, so that peers are seen to be alike."""
    own = [card.id for card in cards if card.parent is None]
    return tuple(dict.fromkeys(own + sorted(card.id for card in cards if card.parent is not None)))


def version_of(cards: list[Card], upstream: Upstream) -> str:
    """Of the model that it has loaded."""
    base = base_of(cards)
    return upstream.version or base.twinkeel_version or base.root or base.id


def _labels(upstream: Upstream, engine: str) -> tuple[str, ...]:
    """Those given, and the engine's version as ``vllm=0.32`` and in full."""
    if not engine or any(label.startswith("vllm=") for label in upstream.labels):
        return upstream.labels
    short = ".".join(engine.split(".")[:2])
    return tuple(dict.fromkeys((*upstream.labels, f"vllm={short}", f"vllm={engine}")))


def _match(replica: Replica, upstream: Upstream, cards: list[Card]) -> Match:
    base = base_of(cards)
    told = upstream.profile or base.twinkeel_profile
    try:
        match = named(told) if told else by_model([base.root or "", base.id])
    except FileError as error:
        raise DiscoveryError(f"{replica.name}: {error}: {advice(replica.url)}") from error
    if match is None:
        loaded = f" (loaded from {base.root})" if base.root and base.root != base.id else ""
        raise DiscoveryError(
            f"{replica.name} serves {base.id}{loaded}, whose step times are not known:"
            f" {advice(replica.url)}"
        )
    return match


def _own_blocks(replica: Replica, match: Match) -> int:
    """The profile's KV blocks, for a server that does not tell its own."""
    try:
        return kv_blocks(match.profile, match.model, match.gpu)
    except ValueError as error:
        raise DiscoveryError(
            f"{replica.name} does not tell its KV blocks, and {error}: give a profile with"
            " engine.kv_blocks"
        ) from error
