"""Parameters of ``policy.placement``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Placement(Section, frozen=True, forbid_unknown_fields=True):
    """Which replica takes a request: six weighted dimensions."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
