"""Parameters of ``policy.rollout``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Rollout(Section, frozen=True, forbid_unknown_fields=True):
    """A new model version taking over from the old one."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    start_most_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=86_400_000,
            description="ms from starting the new replicas until all have answered their warm-up;"
            " past it the rollout is given up, and the old version serves on.",
        ),
    ] = 900_000
    watch_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400_000,
            description="ms after the last switch for which the old replicas run on, drained, and a"
            " breaker or a replica that fails brings them back; the breakers' rule doubt takes four"
            " minutes to tell. The pool is not scaled meanwhile. 0: the new version is not"
            " watched.",
        ),
    ] = 300_000
    drain_alarm_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=86_400_000,
            description="ms after a switch until someone is told that it is not over yet; nothing"
            " is cut short.",
        ),
    ] = 900_000
    rollouts_max: Annotated[
        int, Meta(ge=1, le=1000, description="Models that change their version at a time.")
    ] = 8
    replicas_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Replicas, and standbys, known at most.")
    ] = 1024
