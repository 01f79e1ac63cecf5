"""How fast the server is: a few requests before the designed load is sized.

They also warm it up: the first calls of a kind compile something, those with logprobs for seconds.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from controller.calibration.plan import SHORT_TOKENS, Ask, Phase, Speed

if TYPE_CHECKING:
    from controller.calibration.caller import Caller, Sent
    from controller.calibration.plan import Room

NAME = "warm"
STEPS = 16
FIRST_LONG_TOKENS = 256
LONG_S_MOST = 2.0
"""A prompt that takes longer tells enough about longer ones."""
WIDE_S_MOST = 4.0
NS = 1e9


async def measure(caller: Caller, room: Room) -> Speed:
    """Warm the server up and measure it.

    Raises:
        CalibrationError: it does not answer as it has to.
    """

    async def play(*asks: Ask) -> list[Sent]:
        return await caller.play(Phase(NAME, asks, one_by_one=True))

    short = Ask(SHORT_TOKENS, 1)
    few = room.widest(SHORT_TOKENS + STEPS + 1)
    await play(short, short._replace(stream=True), short._replace(output_tokens=4))
    logged = Ask(SHORT_TOKENS, 4, logprobs=True)
    await play(logged)
    await play(logged._replace(prompts=min(4, few)))

    prefill_s = _median_s(await play(short, short, short, short, short))
    long = Ask(SHORT_TOKENS, STEPS + 1)
    decode_s = (_median_s(await play(long, long, long)) - prefill_s) / STEPS
    token_s = await _token_s(caller, room, prefill_s)

    fixed_s = max(decode_s, 1e-6)
    sequence_s = 0.0
    batch = 1
    while batch < few:
        batch = min(few, batch * 8)
        (sent,) = await play(long._replace(prompts=batch))
        spent_s = sent.e2e_ns / NS - prefill_s - token_s * SHORT_TOKENS * (batch - 1)
        sequence_s = max(0.0, spent_s / STEPS - fixed_s) / (batch - 1)
        if sent.e2e_ns / NS > WIDE_S_MOST / 8:
            break
    return Speed(prefill_s, token_s, fixed_s, sequence_s)


async def _token_s(caller: Caller, room: Room, short_s: float) -> float:
    """Of each further prompt token."""
    most = min(room.budget, room.longest(1) - 1)
    tokens = min(FIRST_LONG_TOKENS, most)
    while True:
        ask = Ask(tokens, 1)
        (_, sent) = await caller.play(Phase(NAME, (ask, ask), one_by_one=True))
        spent_s = sent.e2e_ns / NS - short_s
        each_s = max(1e-8, spent_s / max(1, tokens - SHORT_TOKENS))
        longer = min(most, 4 * tokens)
        if longer <= tokens or each_s * longer > LONG_S_MOST:
            return each_s
        tokens = longer


def _median_s(sent: list[Sent]) -> float:
    return statistics.median(each.e2e_ns for each in sent) / NS
