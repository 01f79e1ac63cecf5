"""A drill: every so often something goes wrong, and the seed says what."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from traces.generate.lengths import NonNegative, Positive  # noqa: TC001 - msgspec reads them
from twin.dice import Dice
from twin.faults import Fault  # noqa: TC001


class Drill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of ``faults`` strikes every ``every_s``, each as likely as the others."""

    every_s: Positive
    faults: Annotated[tuple[Fault, ...], Meta(min_length=1)]
    """Their ``at_s`` counts from the moment for which they are drawn."""
    first_s: NonNegative = 0.0


def drawn(drill: Drill, duration_s: float, seed: int) -> list[Fault]:
    """The faults of a run, in order of the moments they are drawn for."""
    dice = Dice(seed, "drill")
    found: list[Fault] = []
    while (moment_s := drill.first_s + len(found) * drill.every_s) < duration_s:
        fault = drill.faults[dice.number(len(found)) % len(drill.faults)]
        found.append(msgspec.structs.replace(fault, at_s=moment_s + fault.at_s))
    return found
