"""Parameters of ``policy.placement``."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from policy.parameters.section import Section

Weight = Annotated[int, Meta(ge=0, le=5000)]


class Affinity(Section, frozen=True, forbid_unknown_fields=True):
    """Which replicas a model may run on."""

    require: Annotated[
        tuple[str, ...], Meta(description="Labels that a replica must have, all of them.")
    ] = ()
    prefer: Annotated[
        tuple[str, ...], Meta(description="Labels that it should have; one is enough.")
    ] = ()


class Placement(Section, frozen=True, forbid_unknown_fields=True):
    """Which replica takes a request: the predicted time there, made longer by six dimensions."""

    rule: Annotated[
        Literal["scored", "soonest", "least_loaded", "random"],
        Meta(
            description="scored: predicted time and the six dimensions; soonest: predicted time"
            " alone; least_loaded: fewest in flight; random: any with room. The last three are to"
            " compare with."
        ),
    ] = "scored"
    memory_weight_permille: Annotated[
        Weight,
        Meta(
            description="Per mille by which the predicted time grows when no KV memory is free:"
            " room is worth keeping for long requests."
        ),
    ] = 100
    bandwidth_weight_permille: Annotated[
        Weight,
        Meta(
            description="Per mille by which it grows when the card's PCIe link and memory are busy"
            " with what is not ours."
        ),
    ] = 300
    closeness_weight_permille: Annotated[
        Weight,
        Meta(description="Per mille by which it grows when card, peers and CPU are far apart."),
    ] = 300
    heat_weight_permille: Annotated[
        Weight,
        Meta(
            description="Per mille by which it grows as heat or power comes up to the limit; counts"
            " from 800 per mille of it."
        ),
    ] = 300
    switch_weight_permille: Annotated[
        Weight,
        Meta(
            description="Per mille by which it grows when none of the prompt's prefix is warm there"
            " (computing it again is in the predicted time already)."
        ),
    ] = 50
    affinity_weight_permille: Annotated[
        Weight, Meta(description="Per mille by which it grows without a preferred label.")
    ] = 500
    affinity: Annotated[
        dict[str, Affinity],
        Meta(description='By model: {require: ["vllm=0.32"], prefer: ["rack=a"]}.'),
    ] = msgspec.field(default_factory=dict[str, Affinity])
    throttled_out: Annotated[
        bool,
        Meta(description="A card that lowers its clocks takes no new work while others can."),
    ] = True
    stale_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=86_400_000,
            description="ms; an older reading of a card says nothing, neither good nor bad.",
        ),
    ] = 60_000
    adapt_permille: Annotated[
        int,
        Meta(
            ge=0,
            le=500,
            description="Per mille of each prediction's error by which a replica's pace and the"
            " weights of bandwidth, closeness and heat are corrected; 0: never.",
        ),
    ] = 20
    pace_fade_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=86_400_000,
            description="ms without an answer from a replica after which a quarter of what was"
            " learned of its pace is forgotten, again and again: who was slow is tried again.",
        ),
    ] = 15_000
    adapt_most_permille: Annotated[
        int,
        Meta(
            ge=1000,
            le=100_000,
            description="Per mille of its given value that a weight adapts up to; down to as small"
            " a part of it.",
        ),
    ] = 4000
