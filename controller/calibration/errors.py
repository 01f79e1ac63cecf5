"""The one error of calibration."""

from __future__ import annotations


class CalibrationError(Exception):
    """A recording cannot be made; the message says why, with the value, and what to do."""
