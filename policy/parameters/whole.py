"""The whole policy file, and its one canonical text."""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from policy.parameters.alerts import Alerts
from policy.parameters.breakers import Breakers
from policy.parameters.capacity import Capacity
from policy.parameters.chains import Chains
from policy.parameters.confidence import Confidence
from policy.parameters.drift import Drift
from policy.parameters.health import Health
from policy.parameters.limits import Limits
from policy.parameters.placement import Placement
from policy.parameters.queue import (
    Classes,
    Estimates,
    History,
    Inflight,
    Retries,
    Shedding,
    Tiers,
)
from policy.parameters.rollout import Rollout
from policy.parameters.section import Section

SCHEMA = 1


class Parameters(Section, frozen=True, forbid_unknown_fields=True):
    """A whole policy file."""

    schema: Annotated[int, Meta(description="Version of this file's layout.")] = SCHEMA
    name: Annotated[
        str,
        Meta(
            pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$",
            max_length=80,
            description="What reports call this policy; also the name of a folder.",
        ),
    ] = "unnamed"
    discipline: Annotated[
        Literal["fifo", "tiered"],
        Meta(
            description="fifo: at once to the least loaded replica; tiered: the dynamic tiered"
            " queue. fifo uses only shedding.retry_after_least_ms, estimates.bytes_per_token_most"
            " and history.keys_max."
        ),
    ] = "tiered"
    classes: Classes = msgspec.field(default_factory=Classes)
    tiers: Tiers = msgspec.field(default_factory=Tiers)
    inflight: Inflight = msgspec.field(default_factory=Inflight)
    shedding: Shedding = msgspec.field(default_factory=Shedding)
    retries: Retries = msgspec.field(default_factory=Retries)
    estimates: Estimates = msgspec.field(default_factory=Estimates)
    history: History = msgspec.field(default_factory=History)
    limits: Limits = msgspec.field(default_factory=Limits)
    breakers: Breakers = msgspec.field(default_factory=Breakers)
    confidence: Confidence = msgspec.field(default_factory=Confidence)
    chains: Chains = msgspec.field(default_factory=Chains)
    health: Health = msgspec.field(default_factory=Health)
    capacity: Capacity = msgspec.field(default_factory=Capacity)
    placement: Placement = msgspec.field(default_factory=Placement)
    rollout: Rollout = msgspec.field(default_factory=Rollout)
    alerts: Alerts = msgspec.field(default_factory=Alerts)
    drift: Drift = msgspec.field(default_factory=Drift)


def canonical(parameters: Parameters) -> str:
    """One text per policy, whatever file it came from: JSON, with every key in order."""
    return msgspec.json.encode(parameters, order="sorted").decode()


def policy_hash(parameters: Parameters) -> str:
    """SHA-256, in hexadecimal, of what the policy file says, however it is written."""
    return sha256(canonical(parameters).encode()).hexdigest()


def from_canonical(text: str) -> Parameters:
    """The policy that ``canonical`` wrote, as a log's header holds it."""
    return msgspec.json.decode(text, type=Parameters)
