"""Parameters of ``policy.chains``."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from policy.parameters.section import Section

Weight = Annotated[int, Meta(ge=1, le=1_000_000)]


class Step(Section, frozen=True, forbid_unknown_fields=True):
    """A step of a chain."""

    name: Annotated[str, Meta(min_length=1, description="As the caller names it.")]
    weight: Annotated[
        Weight,
        Meta(
            description="Its share of what is left, against the steps after it. In a file also a"
            " decimal, such as 0.2: then all of the plan are counted in thousandths."
        ),
    ] = 1
    external: Annotated[
        bool, Meta(description="The client's own step, such as a tool: it does not come by here.")
    ] = False


class Plan(Section, frozen=True, forbid_unknown_fields=True):
    """A kind of chain."""

    budget_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=86_400_000,
            description="ms from the first step's arrival to the last answer; 8 s is about as long"
            " as somebody waits for an agent without a sign of it. Also chain_timeout: 8s.",
        ),
    ] = 8000
    steps: Annotated[
        tuple[Step, ...],
        Meta(
            max_length=64,
            description="In order: {name: plan, weight: 2, external: false}. Without any, each step"
            " may take what is left.",
        ),
    ] = ()

    def __post_init__(self) -> None:
        names = [step.name for step in self.steps]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"step {twice[0]} is planned twice: a step's name stands for it")


class Chains(Section, frozen=True, forbid_unknown_fields=True):
    """Agent chains: one time budget for all steps, and checkpoints."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    default: Annotated[Plan, Meta(description="Plan of lines that are not listed.")] = (
        msgspec.field(default_factory=Plan)
    )
    lines: Annotated[
        dict[str, Plan], Meta(description="Plans by business line: {budget_ms: 8000, steps: []}.")
    ] = msgspec.field(default_factory=dict[str, Plan])
    step_weight: Annotated[
        Weight, Meta(description="Weight of a step that is not in the plan.")
    ] = 1
    step_limit_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400_000,
            description="ms that every step may take, whatever the others left over; past it the"
            " chain ends. What most gateways do, kept to compare with. 0: by weights.",
        ),
    ] = 0
    checkpoints: Annotated[
        bool, Meta(description="Save the chain's state after each step, so that it can resume.")
    ] = True
    steps_max: Annotated[
        int,
        Meta(ge=1, le=10_000, description="Steps of a chain that have a checkpoint at most."),
    ] = 64
    keep_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400_000,
            description="ms after its budget's end for which a chain is remembered, to be resumed"
            " or to refuse what returns late.",
        ),
    ] = 60_000
    chains_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Chains remembered at most; then those that are over make room, and while"
            " none is, a new chain's steps count as single requests.",
        ),
    ] = 100_000
    open_max: Annotated[
        int,
        Meta(
            ge=1,
            le=10_000_000,
            description="Steps in flight at most; further ones count as single requests.",
        ),
    ] = 100_000
