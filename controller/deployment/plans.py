"""The plan of a deployment: the usual one, what its evidence has registered, what was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from controller.deployment.papers import Refusal
from policy.deployment import DeploymentPlan, is_judged

if TYPE_CHECKING:
    from policy.evidence import Evidence, Expected

SAMPLE_MOST = 1000
"""Requests that evidence may ask of the first canary; what is still not shown by then, the test,
which is valid at every look, goes on waiting for."""


def plan_of(given: dict[str, Any], evidence: Evidence | None) -> DeploymentPlan:
    """The usual plan, with what the evidence has registered before, and with what was asked for.

    Raises:
        Refusal: it is no plan.
    """
    fields: dict[str, Any] = {} if evidence is None else _registered(evidence.expected)
    try:
        plan = msgspec.convert({**fields, **given}, DeploymentPlan)
    except msgspec.ValidationError as error:
        raise Refusal("invalid_plan", f"the plan: {error}") from error
    if plan.stages[-1].kind != "full":
        raise Refusal("invalid_plan", "the plan: the last stage must be full")
    return plan


def _registered(expected: Expected) -> dict[str, Any]:
    """What the evidence says of the plan: it may ask for more care than usual, not for less."""
    stages: list[Any] = msgspec.to_builtins(DeploymentPlan().stages)
    first = next(stage for stage in stages if stage["kind"] == "canary")
    wanted = min(expected.sample_size, SAMPLE_MOST)
    first["least_requests"] = max(first["least_requests"], wanted)
    return {
        "stages": stages,
        "band": [msgspec.to_builtins(band) for band in expected.band if is_judged(band.figure)],
        "window_s": expected.window_s,
        "hurt_budget": max(1, min(expected.hurt_budget, DeploymentPlan().hurt_budget)),
    }
