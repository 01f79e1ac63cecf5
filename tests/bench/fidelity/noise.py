"""What two real runs of the same load differ by."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


def noise_percent(one: float, two: float, segments: Sequence[tuple[float, float]]) -> float:
    """How far two real runs are apart: all A and all B, or what the segments' own differences let
    expect of that, if it is more; per cent. Differences that happen to cancel hide nothing."""
    apart = abs(one - two)
    expected = sqrt(sum((a - b) ** 2 for a, b in segments)) / len(segments)
    return 200 * max(apart, expected) / (one + two)
