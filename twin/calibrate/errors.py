"""What goes wrong when a recording is read or fitted."""

from __future__ import annotations


class CalibrationError(ValueError):
    """A recording that cannot be used at all: what was wrong, and what to do."""
