"""Parameters of ``policy.confidence``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Confidence(Section, frozen=True, forbid_unknown_fields=True):
    """How far an answer is trusted, and when it is run a second time."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
