"""Parameters of ``policy.health``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Permille, Section


class Health(Section, frozen=True, forbid_unknown_fields=True):
    """When a replica or a GPU leaves the rotation, and how it comes back."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    enforce: Annotated[
        bool,
        Meta(description="false: what would be taken out is counted and stays in (shadow)."),
    ] = True
    failures_most: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Consecutive failures that eject a replica; few, since each one is a"
            " caller's wasted try, and a probe brings it back.",
        ),
    ] = 3
    error_window_ms: Annotated[
        int,
        Meta(
            ge=100,
            le=3_600_000,
            description="ms over which a replica's share of failures counts, at most; kept in two"
            " halves, so at least half of it.",
        ),
    ] = 30_000
    error_share_permille: Annotated[
        Permille,
        Meta(
            description="Per mille of its answers failed that eject a replica, if its peers fail"
            " at most half as often: what fails everywhere is not the replica's fault."
        ),
    ] = 200
    error_volume_least: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Answers in the window before their share counts."),
    ] = 20
    first_grace_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="ms past the predicted first token of its oldest request with no sign of"
            " life: silent.",
        ),
    ] = 1500
    stall_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="ms without a token while answers are under way: silent.",
        ),
    ] = 2000
    ask_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="ms without a sign of life after which the tokens are read, again and"
            " again; silence is noticed later by this much at most.",
        ),
    ] = 700
    slow_permille: Annotated[
        int,
        Meta(
            ge=1001,
            le=1_000_000,
            description="Per mille of its peers' median of observed over predicted time to first"
            " token from which a replica is slow; well above what uneven load does.",
        ),
    ] = 2500
    slow_slack_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="ms added to both times before they are compared: a few ms more on a tiny"
            " prefill are not slow.",
        ),
    ] = 100
    slow_window_ms: Annotated[
        int,
        Meta(ge=1, le=3_600_000, description="ms between two comparisons with the peers."),
    ] = 5000
    slow_strikes: Annotated[
        int,
        Meta(ge=1, le=100, description="Consecutive comparisons lost that eject a replica."),
    ] = 2
    slow_samples_least: Annotated[
        int,
        Meta(ge=1, le=10_000, description="First tokens seen before a replica is compared."),
    ] = 16
    slow_samples_most: Annotated[
        int,
        Meta(ge=1, le=10_000, description="First tokens kept for one comparison; a bound."),
    ] = 64
    ejected_most_permille: Annotated[
        Permille,
        Meta(
            description="Per mille of a pool (replicas that serve the same models) out at a time:"
            " if most look bad, it is likely not them."
        ),
    ] = 500
    hung_ejections: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Ejections for silence in a row from which a replica hangs: a standby takes"
            " its place, and its process is to be restarted. Once it may only be slow to answer;"
            " twice, with nobody else's work there, it is not. Counts towards"
            " ejected_most_permille. 0: never.",
        ),
    ] = 2
    open_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="ms that a replica is out before it is tried again; doubles each time.",
        ),
    ] = 2000
    open_most_ms: Annotated[
        int, Meta(ge=1, le=86_400_000, description="ms out at most before it is tried again.")
    ] = 30_000
    forgive_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400_000,
            description="ms back in rotation after which the doubling begins anew.",
        ),
    ] = 60_000
    pause_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="ms that nothing is sent to a replica that said it is full (429, 503);"
            " then one request tries it. It is not ejected.",
        ),
    ] = 500
    replicas_max: Annotated[
        int, Meta(ge=1, le=1_000_000, description="Replicas watched; others count as healthy.")
    ] = 1024
    in_flight_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Requests watched per replica; others are not missed when it is silent.",
        ),
    ] = 4096

    def __post_init__(self) -> None:
        if self.open_ms > self.open_most_ms:
            raise ValueError(f"open_ms is {self.open_ms}, above open_most_ms, {self.open_most_ms}")
        if 2 * self.ask_ms > min(self.first_grace_ms, self.stall_ms):
            raise ValueError(
                f"ask_ms is {self.ask_ms}, above half of first_grace_ms or stall_ms,"
                f" {min(self.first_grace_ms, self.stall_ms)}: two readings are compared"
            )
        if self.slow_samples_least > self.slow_samples_most:
            raise ValueError(
                f"slow_samples_least is {self.slow_samples_least}, above slow_samples_most,"
                f" {self.slow_samples_most}"
            )
