"""Parameters of ``policy.health``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Health(Section, frozen=True, forbid_unknown_fields=True):
    """When a replica or a GPU leaves the rotation, and how it comes back."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
