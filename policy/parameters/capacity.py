"""Parameters of ``policy.capacity``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Capacity(Section, frozen=True, forbid_unknown_fields=True):
    """How many replicas run, ahead of a forecast peak and by what is seen now."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
