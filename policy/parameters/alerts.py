"""Parameters of ``policy.alerts``."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from policy.parameters.section import Section


class Alerts(Section, frozen=True, forbid_unknown_fields=True):
    """What people are told, and how often."""

    enabled: Annotated[bool, Meta(description="Off: as if it were not there.")] = True
