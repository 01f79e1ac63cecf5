"""Shares and their intervals, from runs that were played in pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from policy.evidence import Figure
from twin.validate.reading import CLASSES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policy.evidence import Kind
    from twin.validate.playing import Played

    Array = np.ndarray[Any, np.dtype[Any]]

GROUP_BLOCKS = 6
"""Blocks that are drawn together: half a minute, so that a burst is drawn as a whole."""
DRAWS = 2000
RULE_OF_THREE = 3.0
"""Of n requests none missed: up to 3 of n may, with 95 % confidence."""


class Counts(NamedTuple):
    """By group of blocks: what was offered to the live policy, and what each side missed of as
    much. Open-loop requests are the same for both; of clients that wait for answers there may be
    more on one side."""

    offered: Array
    candidate: Array
    live: Array

    @property
    def requests(self) -> int:
        return int(self.offered.sum())


class Pair(NamedTuple):
    """The same run and seed under both policies."""

    candidate: Played
    live: Played


def pairs_of(played: Sequence[Played]) -> list[Pair]:
    """Candidates beside their live twins, in order."""
    live = {(one.run.name, one.seed): one for one in played if one.side == "live"}
    return [
        Pair(one, live[one.run.name, one.seed])
        for one in played
        if one.side == "candidate" and (one.run.name, one.seed) in live
    ]


def counts(pairs: Sequence[Pair], sla: str = "") -> Counts:
    """Of a class, or of all: one row for each group of blocks of each pair."""
    columns = [CLASSES.index(sla)] if sla else list(range(len(CLASSES)))
    offered, ours, theirs = [], [], []
    for candidate, live in pairs:
        rows = max(len(candidate.story.offered), len(live.story.offered))
        own, other = candidate.story, live.story
        asked = own.offered[:, columns].sum()
        as_many = other.offered[:, columns].sum() / asked if asked else 1.0
        offered.append(_grouped(other.offered[:, columns].sum(axis=1), rows))
        ours.append(_grouped(own.missed[:, columns].sum(axis=1) * as_many, rows))
        theirs.append(_grouped(other.missed[:, columns].sum(axis=1), rows))
    joined = (np.concatenate(parts) if parts else np.zeros(0) for parts in (offered, ours, theirs))
    return Counts(*joined)


def _grouped(values: Array, rows: int) -> Array:
    size = -(-max(rows, 1) // GROUP_BLOCKS) * GROUP_BLOCKS
    padded = np.zeros(size)
    padded[: len(values)] = values
    grouped: Array = padded.reshape(-1, GROUP_BLOCKS).sum(axis=1)
    return grouped


def drawn_shares(part: Array, whole: Array) -> Array:
    """Shares of groups drawn with replacement."""
    generator = np.random.default_rng(0)
    rows = generator.integers(0, len(whole), (DRAWS, len(whole)))
    wholes = whole[rows].sum(axis=1)
    shares: Array = part[rows].sum(axis=1)[wholes > 0] / wholes[wholes > 0]
    return shares


def share(name: str, part: Array, whole: Array, kind: Kind) -> Figure:
    """A share of what was offered, with its two-sided 95 % interval (a bootstrap of half minutes).

    Where nothing or everything was seen, the rule of three gives the open end.
    """
    total = float(whole.sum())
    if not total:
        return Figure(name, 0.0, 0.0, 1.0, kind=kind)
    value = float(part.sum()) / total
    low, high = (float(end) for end in np.quantile(drawn_shares(part, whole), (0.025, 0.975)))
    if value in (0.0, 1.0):
        room = min(1.0, RULE_OF_THREE / total)
        low, high = (0.0, room) if value == 0.0 else (1.0 - room, 1.0)
    return Figure(name, value, min(low, value), max(high, value), kind=kind)


def difference(name: str, found: Counts, kind: Kind) -> Figure:
    """Share that the candidate misses less that the live policy misses, with its two-sided 95 %
    interval. It is never narrower than one request in n tells apart: 3 / n to each side."""
    total = found.requests
    if not total:
        return Figure(name, 0.0, -1.0, 1.0, kind=kind)
    apart = found.candidate - found.live
    value = float(apart.sum()) / total
    low, high = (
        float(end) for end in np.quantile(drawn_shares(apart, found.offered), (0.025, 0.975))
    )
    room = RULE_OF_THREE / total
    return Figure(
        name, value, max(-1.0, min(low, value - room)), min(1.0, max(high, value + room)), kind=kind
    )


def upper_difference(found: Counts) -> float:
    """The one-sided upper 95 % bound of ``difference``."""
    total = found.requests
    if not total:
        return 1.0
    apart = found.candidate - found.live
    value = float(apart.sum()) / total
    high = float(np.quantile(drawn_shares(apart, found.offered), 0.95))
    return max(high, value + RULE_OF_THREE / total)


def spread(name: str, values: Sequence[float], kind: Kind, unit: str = "") -> Figure:
    """The worst, which is the largest, of several seeds, and their range."""
    known = list(values) or [0.0]
    return Figure(name, max(known), min(known), max(known), unit, kind)
