"""Parameters of ``policy.chains``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Chains(Section, frozen=True, forbid_unknown_fields=True):
    """Agent chains: one time budget for all steps, and checkpoints."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
