"""Parameters of the example in docs/mechanism.md."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Strikes(Section, frozen=True, forbid_unknown_fields=True):
    """When a user whose requests servers reject is held back."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
    rejections_least: Annotated[
        int,
        Meta(
            ge=1,
            le=1000,
            description="Rejections (4xx) in a row that hold a user back: a script with a wrong"
            " parameter sends the same mistake again and again.",
        ),
    ] = 20
    hold_ms: Annotated[
        int,
        Meta(ge=1, le=3_600_000, description="ms that a user is held back; people read the error."),
    ] = 10_000
    users_max: Annotated[
        int,
        Meta(ge=1, le=1_000_000, description="Users remembered; the one quiet longest goes."),
    ] = 1000
