"""Parameters of ``policy.capacity``."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from policy.parameters.section import Permille, Section


class Capacity(Section, frozen=True, forbid_unknown_fields=True):
    """How many replicas run, ahead of a forecast peak and by what is seen now."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    rule: Annotated[
        Literal["forecast", "reactive", "hpa"],
        Meta(
            description="forecast: the forecast sets a floor and the reactive loop moves above it;"
            " reactive: that loop alone; hpa: the rule of Kubernetes' autoscaler, to compare with."
        ),
    ] = "forecast"
    loop_ms: Annotated[
        int,
        Meta(ge=100, le=3_600_000, description="ms between two looks at the load."),
    ] = 5000
    least_replicas: Annotated[
        int, Meta(ge=0, le=10_000, description="Replicas that a pool keeps at least.")
    ] = 1
    most_replicas: Annotated[
        int, Meta(ge=1, le=10_000, description="Replicas that a pool is given at most.")
    ] = 1000
    work_permille: Annotated[
        int,
        Meta(
            ge=50,
            le=1000,
            description="Per mille of a replica's time that the load seen now may take: the rest"
            " bears what comes while another replica starts.",
        ),
    ] = 800
    floor_work_permille: Annotated[
        int,
        Meta(
            ge=50,
            le=1000,
            description="The same for the load that is forecast: higher, since the forecast's"
            " upper quantile holds a reserve of its own.",
        ),
    ] = 900
    floor_quantile_permille: Annotated[
        Permille,
        Meta(
            description="Which forecast the floor is for: 0 the median, 1000 the 90th percentile,"
            " between them in proportion."
        ),
    ] = 1000
    margin_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=3_600_000,
            description="ms by which a replica is to be there before the load that needs it: most"
            " of the time between two forecasts.",
        ),
    ] = 240_000
    busy_permille: Annotated[
        int,
        Meta(
            ge=50,
            le=1000,
            description="Per mille of the in-flight target that may be taken, whatever the load is"
            " said to be: above it, work is about to wait. Survivors of a scale-in stay below it.",
        ),
    ] = 850
    drain_ms: Annotated[
        int,
        Meta(
            ge=1000,
            le=3_600_000,
            description="ms in which what waits now is to be worked off, beside what arrives.",
        ),
    ] = 60_000
    load_memory_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="ms over which the load is averaged: seconds of Poisson arrivals differ,"
            " and a replica takes longer to start than they last.",
        ),
    ] = 20_000
    trend_memory_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=3_600_000,
            description="ms over which the load is averaged to see it rise; a rise is taken to go"
            " on while a replica starts.",
        ),
    ] = 120_000
    trend_least_permille: Annotated[
        int,
        Meta(
            ge=0,
            le=100_000,
            description="Per mille above that average from which it is a rise and not chance.",
        ),
    ] = 200
    mix_memory_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=86_400_000,
            description="ms over which work per token is averaged, by which forecast tokens become"
            " replicas.",
        ),
    ] = 300_000
    down_window_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=3_600_000,
            description="ms for which less must have been enough before a replica is given up.",
        ),
    ] = 300_000
    hpa_metric: Annotated[
        Literal["work", "held"],
        Meta(
            description="hpa: what is averaged over replicas. work: of the load that arrives, which"
            " suits it best; held: requests running and waiting, of the in-flight target."
        ),
    ] = "work"
    hpa_target_permille: Annotated[
        int, Meta(ge=10, le=1000, description="hpa: per mille of it that a replica shall have.")
    ] = 700
    hpa_tolerance_permille: Annotated[
        Permille, Meta(description="hpa: per mille off its target that change nothing.")
    ] = 100
    hpa_sync_ms: Annotated[
        int, Meta(ge=100, le=3_600_000, description="hpa: ms between two looks at the load.")
    ] = 15_000
    turbo_extra_permille: Annotated[
        Permille,
        Meta(description="Per mille by which Turbo's capacity grows for a forecast peak."),
    ] = 300
    turbo_ahead_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="ms ahead of the peak that it grows.")
    ] = 60_000
    peak_rise_permille: Annotated[
        int,
        Meta(
            ge=1,
            le=100_000,
            description="Per mille by which a forecast must rise above the load now to be a peak.",
        ),
    ] = 200
    peak_near_permille: Annotated[
        Permille,
        Meta(description="Per mille of a peak's highest point from which on it is that peak."),
    ] = 900
    horizons_max: Annotated[
        int, Meta(ge=1, le=10_000, description="Horizons of a forecast that are kept, the nearest.")
    ] = 288
    replicas_max: Annotated[
        int,
        Meta(ge=1, le=100_000, description="Replicas known at most, the standbys among them."),
    ] = 4096
