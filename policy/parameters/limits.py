"""Parameters of ``policy.limits``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Limits(Section, frozen=True, forbid_unknown_fields=True):
    """How many requests of a user, a session and a model go on at once and per second."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
