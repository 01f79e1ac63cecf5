"""Where the public traces and step-time tables lie, for plain ``pytest`` as for ``make``."""

from __future__ import annotations

import os
from pathlib import Path

SHARED = Path(__file__).parents[1].parent / "shared"

if (SHARED / "traces").is_dir():
    os.environ.setdefault("TWINKEEL_DATA", str(SHARED))
