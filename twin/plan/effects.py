"""What a fault costs a group of requests: points of attainment, and for how long.

By the side of the same day without it: requests are the same, so what differs is the fault's. It
lasts from the fault until a group is again within ``NEAR`` of what it would have been for
``QUIET_BINS``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from twin.plan.cell import BIN_S
from twin.plan.estimates import Estimate

if TYPE_CHECKING:
    from policy.evidence import Kind
    from twin.plan.cell import Outcome

NEAR = 0.02
QUIET_BINS = 4
Z = 1.645


@dataclass(frozen=True, slots=True)
class Effect:
    """On one group, while it lasts."""

    kind: str
    group: str
    points: Estimate
    """Of attainment, in per cent points."""
    lasts_s: Estimate
    """Its upper end is infinite where the stretch ends before the group is as good as before."""
    missed: Estimate
    """Requests that would have been good."""

    @property
    def name(self) -> str:
        """Of the group, for people."""
        return self.group.capitalize() if self.kind == "tier" else self.group or "other"


def effects_of(plain: Outcome, hit: Outcome, kind: Kind) -> tuple[Effect, ...]:
    """By group, the hardest hit first, of equals a tier; groups that do not notice are left out."""
    found = [
        effect
        for key in plain.bins
        if key in hit.bins and key[1]
        and (effect := _effect(key, plain, hit, kind)) is not None
    ]  # fmt: skip
    return tuple(sorted(found, key=lambda one: (-one.points.value, one.kind != "tier")))


def _effect(key: tuple[str, str], plain: Outcome, hit: Outcome, kind: Kind) -> Effect | None:
    size = max(plain.bins[key].shape[1], hit.bins[key].shape[1])
    base, seen = (_padded(outcome.bins[key], size) for outcome in (plain, hit))
    first = int(hit.fault_s // BIN_S)
    lost = _share(base) - _share(seen)
    worse = [place for place in range(first, size) if lost[place] > NEAR]
    if not worse:
        return None
    last = worse[0]
    for place in worse:
        if place - last > QUIET_BINS:
            break
        last = place
    span = slice(first, last + 1)
    before, after = base[:, span].sum(axis=1), seen[:, span].sum(axis=1)
    if not before[1] or not after[1]:
        return None
    p, q = before[0] / before[1], after[0] / after[1]
    if p <= q:
        return None
    reach = Z * math.sqrt(p * (1 - p) / before[1] + q * (1 - q) / after[1])
    points = 100 * (p - q)
    lasts = (last + 1) * BIN_S - hit.fault_s
    most = lasts + BIN_S if last + QUIET_BINS < size else math.inf
    missed = (p - q) * float(after[1])
    return Effect(
        key[0], key[1],
        Estimate("points", points, max(0.0, points - 100 * reach), points + 100 * reach,
                 "points", kind),
        Estimate("lasts_s", lasts, max(0.0, lasts - BIN_S), most, "s", kind),
        Estimate("missed", missed, max(0.0, missed * (1 - reach / (p - q))),
                 missed * (1 + reach / (p - q)), "requests", kind),
    )  # fmt: skip


def _share(bins: np.ndarray) -> np.ndarray:
    """Good of offered, over three bins: few requests fall into one."""
    kernel = np.ones(3)
    good, offered = (np.convolve(row, kernel, "same") for row in bins)
    share: np.ndarray = np.where(offered > 0, good / np.maximum(offered, 1), 1.0)
    return share


def _padded(bins: np.ndarray, size: int) -> np.ndarray:
    return np.pad(bins, ((0, 0), (0, size - bins.shape[1])))
