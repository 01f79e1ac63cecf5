"""A recording, read and measured, and which of its steps are fitted and which held out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from twin.calibrate.checking import CHECK_PHASE
from twin.calibrate.client import key_of
from twin.calibrate.contents import read_contents
from twin.calibrate.fitting import Rows, balanced, likes, strata
from twin.calibrate.timing import near_most, rounds_of, time_steps

if TYPE_CHECKING:
    from traces.steps import Recording
    from twin.calibrate.client import ClientRow
    from twin.calibrate.contents import Contents, Flags, Ints
    from twin.calibrate.timing import Timing
    from twin.regression import Array, StepTable

WARM_PHASE = "warm"
HELD_OUT_OF = 5
"""Of live traffic one part of so many is held out."""
HELD_OUT_BLOCKS = 4
"""Blocks of a part: noise of one piece is not split between what is fitted and what is not."""


@dataclass(frozen=True)
class Material:
    """Steps are named by their place in the recording."""

    recording: Recording
    contents: Contents
    timing: Timing
    fitted: Ints
    held_out: Ints
    stalled: Ints
    """Left out of both because the machine stood still."""
    client: tuple[ClientRow, ...] = ()
    live: bool = False
    """Whatever came, not a designed load."""
    same_load: bool = False
    """What is held out is a part of the load that is fitted, not one of its own."""

    def kind(self, steps: Ints) -> Ints:
        return np.asarray(self.contents.kind[steps], dtype=np.int64)

    def table(self, steps: Ints) -> StepTable:
        """With whole steps' times, gap included."""
        return self.contents.table(self.timing.total_ns).take(steps)


def designed(recording: Recording, client: tuple[ClientRow, ...]) -> Material:
    """The designed load: the phase ``check`` is held out, ``warm`` is left alone."""
    asked = {key_of(row.id) or row.id for row in client if row.logprobs}
    contents = read_contents(recording, asked)
    if not contents.exact:  # nothing tells the phases apart
        return _without_warming(replace(live(recording), client=client, live=False))
    timing = time_steps(contents)
    checks = contents.in_phases({CHECK_PHASE})
    fitted = ~(contents.in_phases({WARM_PHASE}) | checks) & (contents.phase >= 0)
    return Material(
        recording,
        contents,
        timing,
        fitted=_kept(contents, timing, fitted),
        held_out=_kept(contents, timing, checks),
        stalled=np.flatnonzero(contents.usable & timing.wild & (fitted | checks)),
        client=client,
    )


def live(recording: Recording) -> Material:
    """Whatever a server served: every fifth part is held out."""
    contents = read_contents(recording)
    contents = replace(contents, phases=(), phase=np.full_like(contents.phase, -1))
    timing = time_steps(contents)
    held = timing.block // HELD_OUT_BLOCKS % HELD_OUT_OF == HELD_OUT_OF - 1
    return Material(
        recording,
        contents,
        timing,
        fitted=_kept(contents, timing, ~held),
        held_out=_kept(contents, timing, held),
        stalled=np.flatnonzero(contents.usable & timing.wild),
        live=True,
        same_load=True,
    )


def _without_warming(material: Material) -> Material:
    """The load begins with the phase ``warm``: as many steps as its tokens took are left alone."""
    rows = [row for row in material.client if row.phase == WARM_PHASE]
    tokens = sum(row.prompt_tokens + max(1, row.output_tokens) - 1 for row in rows)
    contents = material.contents
    first = int(np.searchsorted(np.cumsum(contents.prefill_tokens + contents.batch), tokens + 1))

    def later(steps: Ints) -> Ints:
        return steps[steps >= first]

    return replace(
        material,
        fitted=later(material.fitted),
        held_out=later(material.held_out),
        stalled=later(material.stalled),
    )


def _kept(contents: Contents, timing: Timing, wanted: Flags) -> Ints:
    return np.flatnonzero(contents.usable & ~timing.wild & wanted)


def rows_to_fit(material: Material) -> Rows:
    """The fitted steps, with the engine's part and the gap apart."""
    contents, timing, kept = material.contents, material.timing, material.fitted
    engine_ns, gap_ns = contents.engine_ns, timing.gap_ns[kept]
    known = np.isfinite(gap_ns)
    if known.any() and float(np.mean(gap_ns[known])) < 0:
        # With asynchronous scheduling the engine's waits may overlap: only the periods add up.
        engine_ns, gap_ns = timing.total_ns, np.where(known, 0.0, np.nan)
    elif known.any():
        usual = np.zeros(len(kept), dtype=np.bool_)
        usual[known] = near_most(gap_ns[known])
        gap_ns = np.where(usual, gap_ns, np.nan)
    kind, block = material.kind(kept), timing.block[kept]
    stratum = strata(contents.phase[kept], kind, block)
    return Rows(
        table=contents.table(engine_ns).take(kept),
        logprobs=contents.logprobs[kept],
        gap_ns=gap_ns,
        block=block,
        stratum=stratum,
        weight=balanced(stratum),
    )


def round_ratios(material: Material, predicted_ns: Array) -> dict[int, float]:
    """Measured over predicted time of each round, held-out load included.

    Rounds do not hold the same steps, and the formula is not off alike for all. So steps are
    compared with their like of the other rounds; what came in one round only does not count.
    """
    steps = np.concatenate([material.fitted, material.held_out])
    rounds = rounds_of(material.contents, CHECK_PHASE)[steps]
    measured, expected = material.timing.total_ns[steps], predicted_ns[steps]
    group = likes(material.table(steps))
    ratios: dict[int, list[tuple[float, float]]] = {}
    for each in np.unique(group):
        own = group == each
        if len(np.unique(rounds[own])) < 2:
            continue
        usual = float(np.sum(measured[own]) / np.sum(expected[own]))
        for number in np.unique(rounds[own]):
            its = own & (rounds == number)
            spent = float(np.sum(measured[its]))
            ratio = spent / float(np.sum(expected[its])) / usual
            ratios.setdefault(int(number), []).append((ratio, spent))
    return {
        number: float(np.average([each[0] for each in found], weights=[each[1] for each in found]))
        for number, found in sorted(ratios.items())
    }
