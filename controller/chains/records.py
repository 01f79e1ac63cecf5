"""What a finished step leaves in the store, and the names that are made from a chain's own."""

from __future__ import annotations

import secrets
from hashlib import blake2b
from typing import Any

import msgspec

from controller.chains.core import ChainError, Kind, Step

FORMAT = 1
CONTENT_TYPE = "application/vnd.twinkeel.step+json"
RENAMED_TYPE = "application/vnd.twinkeel.gateway-chain"
"""Of a row that is no step: under which name the chain goes on at the gateway from there."""
RENAMED = "\n"
"""What that row's step begins with, and no real one's."""
VALUE_BYTES_MOST = 16 * 1024 * 1024
OWN = "app/"
"""Before the user's name, so that a Redis that a gateway uses, too, keeps the two apart."""


class _Kept(msgspec.Struct):
    format: int
    kind: Kind
    value: msgspec.Raw
    attributes: dict[str, Any] = {}
    gateway_checkpoint: str = ""
    spent_ns: int = 0


def owner_of(user: str) -> str:
    return f"{OWN}{user}"


def encode(step: Step, now_ns: int) -> bytes:
    """A step as it is kept. Its value becomes what JSON makes of it, now as after a restart.

    Raises:
        ChainError: JSON cannot hold it, or it is too large.
    """
    try:
        raw = msgspec.json.encode(step.value)
        attributes = msgspec.json.decode(msgspec.json.encode(step.attributes))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ChainError(
            f"step {step.name!r} gave what JSON cannot hold ({error}): return texts, numbers, lists"
            " and mappings, since it is kept for a restart"
        ) from error
    if len(raw) > VALUE_BYTES_MOST:
        raise ChainError(
            f"step {step.name!r} gave {len(raw)} bytes of JSON, at most {VALUE_BYTES_MOST} are"
            " kept: keep it elsewhere and return where"
        )
    step.value = msgspec.json.decode(raw)
    step.attributes = attributes
    spent_ns = step.spent_ns + now_ns - step.began_ns
    return msgspec.json.encode(
        _Kept(
            FORMAT, step.kind, msgspec.Raw(raw), attributes, step.gateway_checkpoint, spent_ns
        )
    )  # fmt: skip


def decode(name: str, checkpoint: str, answer: bytes) -> Step:
    """The step again.

    Raises:
        ChainError: it is none of ours, or of another version.
    """
    try:
        kept = msgspec.json.decode(answer, type=_Kept)
        if kept.format != FORMAT:
            raise msgspec.ValidationError(f"format {kept.format}")
        value = msgspec.json.decode(kept.value)
    except msgspec.DecodeError as error:
        raise ChainError(
            f"step {name!r} was kept by another version, or is damaged ({error}; checkpoint"
            f" {checkpoint}): use the version that kept it, or another chain"
        ) from error
    return Step(
        name,
        kept.kind,
        "kept",
        value,
        checkpoint=checkpoint,
        gateway_checkpoint=kept.gateway_checkpoint,
        spent_ns=kept.spent_ns,
        attributes=kept.attributes,
    )


def renamed(chain: str, most: int) -> str:
    """Another name for the same chain, of so many characters at most."""
    token = secrets.token_hex(4)
    return f"{chain[: most - len(token) - 1]}~{token}"


def step_key(user: str, chain: str, step: str) -> str:
    """The same for the same step of the same chain, now and after any restart, and for no other."""
    return _digest("step", user, chain, step)


def trace_id(user: str, chain: str) -> str:
    """Of all runs of a chain, so that what came after a restart is seen beside what was before."""
    return _digest("trace", user, chain)


def check_trace_id(given: str) -> str:
    """A caller's own, as headers hold it; empty: it has none.

    Raises:
        ChainError: it is none.
    """
    lower = given.lower()
    if given and (len(given) != 32 or set(lower) - set("0123456789abcdef") or set(lower) == {"0"}):
        raise ChainError(
            f"the trace id is {given[:40]!r}: 32 hexadecimal digits, not all of them 0"
        )
    return lower


def traceparent(trace: str) -> str:
    """W3C trace context for one step."""
    return f"00-{trace}-{secrets.token_hex(8)}-01"


def _digest(*parts: str) -> str:
    text = "".join(f"{len(part)}:{part}" for part in parts)
    return blake2b(text.encode(), digest_size=16).hexdigest()
