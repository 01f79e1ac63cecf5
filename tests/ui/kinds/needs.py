"""Needs a package that nobody has."""

from __future__ import annotations

import twinkeel_of_nowhere  # noqa: F401
