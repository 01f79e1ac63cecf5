"""Parameters of ``policy.rollout``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Rollout(Section, frozen=True, forbid_unknown_fields=True):
    """A new model version taking over from the old one."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
