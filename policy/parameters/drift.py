"""Parameters of ``policy.drift``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Drift(Section, frozen=True, forbid_unknown_fields=True):
    """When a replica's steps no longer take the time that its profile says."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    alarm_permille: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Per mille of the predicted time that steps take more, or less, from which"
            " it is told; the same limit as calibrate --against has. Above what a good fit"
            " misses by and a machine's speed does from one hour to the next.",
        ),
    ] = 100
    recover_permille: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="Per mille below which it is over; half of the alarm, so that a drift at"
            " the limit is one trouble and not many.",
        ),
    ] = 50
    steps_least: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Steps in one sample at least: single ones vary by more than the alarm.",
        ),
    ] = 200
    sample_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=3_600_000,
            description="ms that one sample covers at least, however many its steps: a neighbour's"
            " short burst is no drift.",
        ),
    ] = 10_000
    samples_least: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Samples judged together, by their median; nothing is judged before there"
            " are so many. An odd number; with 5, two that a compilation or a stall spoilt do not"
            " matter, and a drift is told after little more than a minute of load.",
        ),
    ] = 5
    forget_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=86_400_000,
            description="ms without a reading after which older samples say nothing any more.",
        ),
    ] = 600_000
    replicas_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Replicas watched; others never drift.")
    ] = 1024

    def __post_init__(self) -> None:
        if self.recover_permille > self.alarm_permille:
            raise ValueError(
                f"recover_permille is {self.recover_permille}, above alarm_permille,"
                f" {self.alarm_permille}"
            )
