"""Parameters of ``policy.breakers``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Breakers(Section, frozen=True, forbid_unknown_fields=True):
    """Circuit breakers: when a model, a line or an error kind is cut off, and what then."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
