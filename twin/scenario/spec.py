"""The schema of a scenario file, version 1. docs/scenarios.md explains it with an example."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from traces.generate.lengths import NonNegative, Positive  # noqa: TC001 - msgspec reads them
from twin.cards import CardSettings  # noqa: TC001
from twin.clients import Calls, Chains, Sessions
from twin.clients.setting import Name  # noqa: TC001
from twin.drawn_answers import Answers  # noqa: TC001
from twin.faults import Fault  # noqa: TC001
from twin.figures import Measure
from twin.scenario.drill import Drill  # noqa: TC001
from twin.scenario.expect import Expectation  # noqa: TC001
from twin.source import Source  # noqa: TC001

SCHEMA = 1
Permille = Annotated[int, Meta(ge=0, le=1000)]
Client = Sessions | Chains | Calls


class Traffic(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Who asks for what. All of ``open`` is merged in order of arrival."""

    open: tuple[Source, ...] = ()
    """Requests that arrive whatever becomes of those before."""
    clients: tuple[Client, ...] = ()
    """Clients that wait for answers, retry, or walk through chains."""

    def __post_init__(self) -> None:
        names = [client.name for client in self.clients]
        if len(set(names)) < len(names):
            raise ValueError(f"two clients have the same name: {', '.join(names)}")


class Replicas(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replicas of one kind. Lists are dealt out in turn: the n-th card (or group of cards) gets the
    n-th entry, and the list begins anew where it is too short."""

    profile: str
    count: Annotated[int, Meta(ge=0, le=1000)] = 1
    """Up from the start; with ``slices``: cards."""
    standbys: Annotated[int, Meta(ge=0, le=1000)] = 0
    """Further ones, down until they are asked for."""
    serves: tuple[str, ...] = ()
    """Model names; empty: the profile's model, or any where the fleet has one profile only."""
    version: str = ""
    slices: tuple[str, ...] = ()
    """MIG slices that each card is cut into, such as 3g: a replica on each."""
    domains: tuple[str, ...] = ()
    """What fails together, from the host inwards, such as host1/card0; empty: host0/card0,
    host0/card1 and so on, eight cards a host. Slices add /mig0, /mig1."""
    labels: tuple[str, ...] = ()
    closeness_permille: tuple[Permille, ...] = ()
    cold_start_s: NonNegative | None = None
    kv_blocks: Annotated[int, Meta(ge=0)] = 0
    """0: computed from the card."""
    max_model_len: Annotated[int, Meta(ge=0)] = 0
    """0: the profile's."""

    def __post_init__(self) -> None:
        if not self.count + self.standbys:
            raise ValueError(f"{self.profile}: count and standbys are both 0: leave it out")
        if self.slices and (self.kv_blocks or self.max_model_len):
            raise ValueError("slices have the KV blocks that their memory leaves room for")


class PolicyChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy file with some of its keys set otherwise."""

    preset: str = "stable"
    """A shipped one, or a file."""
    set: dict[str, Any] = msgspec.field(default_factory=dict)
    """Nested as in the policy file."""


class _Happening(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Rollout(_Happening, frozen=True, tag="rollout"):
    """Someone asks for another version of a model."""

    at_s: NonNegative
    model: str
    version: str


class Forecasts(_Happening, frozen=True, tag="forecasts"):
    """Recorded forecasts (``twin.forecasts``) are fed at their times."""

    file: str


class Forecast(_Happening, frozen=True, tag="forecast"):
    """One forecast, written out. Rates are per second."""

    at_s: NonNegative
    horizons_s: tuple[Positive, ...]
    requests_p50: tuple[NonNegative, ...]
    requests_p90: tuple[NonNegative, ...]
    tokens_p50: tuple[NonNegative, ...]
    tokens_p90: tuple[NonNegative, ...]

    def __post_init__(self) -> None:
        columns = (self.requests_p50, self.requests_p90, self.tokens_p50, self.tokens_p90)
        if any(len(column) != len(self.horizons_s) for column in columns):
            raise ValueError(f"all lists must be as long as horizons_s: {len(self.horizons_s)}")
        if list(self.horizons_s) != sorted(self.horizons_s):
            raise ValueError("horizons_s must rise")


class Switch(_Happening, frozen=True, tag="switch"):
    """From here on another policy rules."""

    at_s: NonNegative
    policy: PolicyChoice


class Canary(_Happening, frozen=True, tag="canary"):
    """From here on another policy serves a share of the callers; named again, it gets
    another share."""

    at_s: NonNegative
    policy: PolicyChoice
    share_permille: Annotated[int, Meta(ge=1, le=1000)]
    salt: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    """Another one chooses other callers."""


class CanaryEnd(_Happening, frozen=True, tag="canary_end"):
    """From here on one policy serves everyone again."""

    at_s: NonNegative
    keep: Literal["old", "new"]


Happening = Rollout | Forecasts | Forecast | Switch | Canary | CanaryEnd


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that makes one run, but for the seed."""

    duration_s: Positive
    """Nothing new arrives from here on; what is open comes to its end."""
    traffic: Traffic
    fleet: Annotated[tuple[Replicas, ...], Meta(min_length=1)]
    policy: PolicyChoice = msgspec.field(default_factory=PolicyChoice)
    answers: Answers | None = None
    faults: tuple[Fault, ...] = ()
    drill: Drill | None = None
    """Faults that the seed draws, besides."""
    events: tuple[Happening, ...] = ()
    """What the policy is told from outside: rollouts, forecasts, another policy, a canary."""
    cards: CardSettings | None = None
    world: dict[str, int] = msgspec.field(default_factory=dict)
    """Fields of ``twin.world.WorldSettings``, in their own units."""
    measure: Measure = msgspec.field(default_factory=Measure)

    def __post_init__(self) -> None:
        if not (self.traffic.open or self.traffic.clients):
            raise ValueError("traffic has neither open sources nor clients: nobody asks")


class Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a scenario file says besides the set-up."""

    schema: Literal[1]
    name: Name
    about: str
    """What is shown, in a sentence or two."""
    source: str = ""
    """Where the claim comes from, in its own words."""
    seeds: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1)] = (0, 1, 2)
    runs: dict[Name, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Variants by name: what each sets otherwise. None: one run called ``base``."""
    expect: tuple[Expectation, ...] = ()
