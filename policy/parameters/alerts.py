"""Parameters of ``policy.alerts``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Alerts(Section, frozen=True, forbid_unknown_fields=True):
    """What people are told, and how often."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    quiet_ms: Annotated[
        int,
        Meta(
            ge=0,
            le=86_400_000,
            description="ms without its cause after which an alert is told again; until then it"
            " is the same trouble.",
        ),
    ] = 300_000
    keys_max: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000,
            description="Alerts remembered; of more, the one quiet longest may be told twice.",
        ),
    ] = 1000
