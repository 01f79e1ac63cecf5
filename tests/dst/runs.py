"""Random scenarios, played: most on the light fleet, some on the twin's engines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.dst.engines import EnginePlayer
from tests.dst.random_scenarios import Player, random_scenario

if TYPE_CHECKING:
    from collections.abc import Sequence

ENGINES_EVERY = 5
"""One in so many scenarios is played on engines, which costs more."""


def on_engines(seed: int) -> bool:
    """Is this scenario played in the twin's world?"""
    return seed % ENGINES_EVERY == ENGINES_EVERY - 1


def play(seed: int, seen: Counter[str] | None = None) -> int:
    """Play the scenario of this seed to its end; how many steps the policy took.

    Raises:
        tests.dst.rules.Broken: the policy broke an invariant.
    """
    scenario = random_scenario(seed)
    player = EnginePlayer(scenario, seen) if on_engines(seed) else Player(scenario, seen)
    player.play()
    return player.checker.steps


@dataclass(slots=True)
class Played:
    """What some scenarios came to."""

    scenarios: int = 0
    on_engines: int = 0
    """How many of them were played in the twin's world."""
    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    broken: list[tuple[int, str]] = field(default_factory=list)
    """(seed, what was broken)."""

    def add(self, other: Played) -> None:
        self.scenarios += other.scenarios
        self.on_engines += other.on_engines
        self.steps += other.steps
        self.seen += other.seen
        self.broken += other.broken


def play_all(seeds: Sequence[int]) -> Played:
    """Play these scenarios, and go on after one that breaks an invariant."""
    played = Played()
    for seed in seeds:
        played.scenarios += 1
        played.on_engines += on_engines(seed)
        try:
            played.steps += play(seed, played.seen)
        except Exception as error:  # a crash of the policy breaks every invariant
            played.broken.append((seed, f"{type(error).__name__}: {error}"))
    return played
