"""What every part of the policy file is built from."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Permille = Annotated[int, Meta(ge=0, le=1000)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the policy file."""
