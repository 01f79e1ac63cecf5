"""Is the canary worse? Tests that stay valid however often one looks.

A request is the canary's if the hash of its key falls below the canary's share, so whether a key is
the canary's is drawn once, by chance, and says nothing about its traffic. If both policies do the
same, the keys that run into trouble are the canary's with exactly that share as their chance,
whatever the load does: bursts, cold caches, callers with heavy requests. That is all the null
hypothesis says. Each key counts once, for its second miss tells nothing new about the draw.

Evidence is money won by betting against the null hypothesis (an *e-process*): on average it cannot
grow, so the chance that it ever reaches 1/alpha is at most alpha, at whatever moments one looks
(Ville's inequality; Grunwald, de Heide and Koolen, "Safe testing", arXiv 1906.07801; Ramdas et al.,
"Game-theoretic statistics and safe anytime-valid inference", arXiv 2210.01948; for counts of two
arms: Lindon and Malek, "Anytime-valid inference for multinomial count data", arXiv 2011.03567).

Misses that belong together are one *incident*, which is one bet however many they are: its factor
is the mean of what each of its keys would have won. The mean of e-values is an e-value whatever
ties them to one another (Vovk and Wang, "E-values", arXiv 1912.06116), so what struck one arm by
chance cannot count twice.

Floats are only added, multiplied and divided here, in a fixed order: the same on every machine.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

WEALTH_LEAST, WEALTH_MOST = 1e-100, 1e100
"""Kept within these, so that nothing overflows and no bet is lost for ever. The lower one lifts
wealth by less than anyone will ever see."""
KEYS_MOST = 100_000
"""Entries of a table; further keys place no bet, and whoever bets must not go on as if they did."""
FED = 1 / 64
"""Of a reserve, what is bet with each value: half an hour of minutes uses up 40 % of it."""
_HASH, _NUMBER = 8, 2
"""Bytes of an entry: of its key's hash, and of its number."""


class Draw(NamedTuple):
    """One key in trouble."""

    chance: float
    """That it is the canary's, if both policies do the same."""
    canary: bool
    """Whether it is."""


class Bets(msgspec.Struct):
    """Wealth of several bettors, each of whom doubts one ratio and believes in another.

    A ratio is how many times as often the canary's keys run into trouble. A bettor who doubts
    ratio n and believes in a larger one has an e-process for "the ratio is at most n"; who believes
    in a smaller one has it for "at least n".
    """

    ratios: list[tuple[float, float]]
    """(doubted, believed)."""
    wealth: list[float]

    def incident(self, draws: Sequence[Draw]) -> None:
        """All bet on one incident, which has at least one draw."""
        for number, (doubted, believed) in enumerate(self.ratios):
            won = 0.0
            for draw in draws:
                won += factor(draw, doubted, believed)
            wealth = self.wealth[number] * (won / len(draws))
            self.wealth[number] = min(max(wealth, WEALTH_LEAST), WEALTH_MOST)


def bets(ratios: Sequence[tuple[float, float]]) -> Bets:
    """Fresh bettors, each with a wealth of 1."""
    return Bets(list(ratios), [1.0] * len(ratios))


def share_of(chance: float, ratio: float) -> float:
    """The canary's share of trouble, if its keys have it ``ratio`` times as often."""
    return ratio * chance / (1.0 - chance + ratio * chance)


def factor(draw: Draw, doubted: float, believed: float) -> float:
    """What a bet of 1 becomes: the likelihood ratio of the two."""
    null, other = share_of(draw.chance, doubted), share_of(draw.chance, believed)
    return other / null if draw.canary else (1.0 - other) / (1.0 - null)


class Table(msgspec.Struct, dict=True):
    """Small numbers by key. Its memory is one row of bytes that only grows, so that writing it down
    costs next to nothing however many keys there are."""

    rows: bytearray = msgspec.field(default_factory=bytearray)
    """Eight bytes of the key's hash and two of its number; the last row of a key counts."""

    def __post_init__(self) -> None:
        rows, each = self.rows, _HASH + _NUMBER
        self._numbers = {
            bytes(rows[at : at + _HASH]): int.from_bytes(
                rows[at + _HASH : at + each], "big", signed=True
            )
            for at in range(0, len(rows), each)
        }

    @property
    def full(self) -> bool:
        return len(self.rows) >= KEYS_MOST * (_HASH + _NUMBER)

    def get(self, key: str) -> int | None:
        return self._numbers.get(hash_of(key))

    def put(self, key: str, number: int) -> None:
        hash_ = hash_of(key)
        self._numbers[hash_] = number
        self.rows += hash_ + number.to_bytes(_NUMBER, "big", signed=True)


def hash_of(key: str) -> bytes:
    """Stands for the key: two are the same once in 10^19 pairs."""
    return blake2b(key.encode(errors="surrogatepass"), digest_size=_HASH).digest()


class Keys(msgspec.Struct):
    """Which keys have counted, and at what share of the canary's, in per mille."""

    shares: Table = msgspec.field(default_factory=Table)
    """Of those that were not the canary's; -1: was the canary's."""

    def draw(self, key: str, canary: bool, share_permille: int) -> Draw | None:
        """The bet that this key is good for; None: it says nothing (any more).

        A key that was not the canary's at a share of a lies somewhere in the rest, so at a larger
        share of b it has become the canary's with the chance (b - a) / (1000 - a).
        """
        before = self.shares.get(key) or 0
        if before < 0 or not before < share_permille < 1000 or self.shares.full:
            return None
        self.shares.put(key, -1 if canary else share_permille)
        return Draw((share_permille - before) / (1000 - before), canary)


class Incidents(msgspec.Struct):
    """Gathers draws into incidents: by time alone, so that no arm can choose."""

    gap_ns: int
    """Trouble this long after the last one begins another incident."""
    most_ns: int
    """No incident lasts longer: the next trouble begins another."""
    began_ns: int = -1
    last_ns: int = -1
    draws: list[Draw] = []

    def closed(self, now_ns: int) -> list[Draw]:
        """The draws of the incident that is over by now, once; empty: none is."""
        if self.began_ns < 0 or (
            now_ns - self.last_ns <= self.gap_ns and now_ns - self.began_ns <= self.most_ns
        ):
            return []
        draws, self.draws = self.draws, []
        self.began_ns = -1
        return draws

    def add(self, now_ns: int, draw: Draw | None) -> None:
        """Trouble, now; ``closed`` must have been asked before. Without a draw it only keeps the
        incident open."""
        if self.began_ns < 0:
            self.began_ns = now_ns
        self.last_ns = now_ns
        if draw is not None:
            self.draws.append(draw)


class MeanBets(msgspec.Struct):
    """An e-process for "the mean of what comes lies at or below ``level``": of values from 0 to 1,
    each of whatever spread, given all before. Bets a share of its wealth on each value
    (Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", arXiv
    2010.09686)."""

    level: float
    """Above 0."""
    stakes: tuple[float, ...] = (0.1, 0.3, 0.6)
    """Shares of the largest stake that can never be lost altogether, 1/level."""
    reserve: float = 0.0
    """Of each bettor's 1, not bet at first: before each value a little of what is left of it is
    added. So what was lost over a long quiet time does not make a late change hard to see."""
    wealth: list[float] = []

    def __post_init__(self) -> None:
        if not self.wealth:
            self.wealth = [1.0 - self.reserve] * len(self.stakes)

    def value(self, mean: float) -> None:
        """One more value was seen."""
        fed = self.reserve * FED
        self.reserve -= fed
        for number, stake in enumerate(self.stakes):
            wealth = (self.wealth[number] + fed) * (1.0 + stake * (mean / self.level - 1.0))
            self.wealth[number] = min(max(wealth, WEALTH_LEAST), WEALTH_MOST)

    def evidence(self) -> float:
        """Mean of all that they have: itself an e-process."""
        return self.reserve + sum(self.wealth) / len(self.wealth)
