"""The designed load: which requests, of what sizes, in which order.

It is sized by what the server can do (``Room``: everything fits, nothing is ever preempted) and by
how fast it is (``Speed``, measured first), so that it takes the time that it was given. Each kind
of step is visited in every round, so that a machine whose speed drifts hits all of them alike:
what does not fit into one round comes in the next ones.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from traces.steps import ServerSettings

ROUNDS = 4
SHARES = {
    "prefill": 0.12, "chunks": 0.08, "decode": 0.3, "deep": 0.12, "mixed": 0.15, "logprobs": 0.07,
    "check": 0.16,
}  # fmt: skip
"""Of a round's time; the single requests of ``api`` are as many as they are."""
MODEL_LEN_LEAST = 128
"""With less room than that there is nothing to measure."""
SHORT_TOKENS = 16
"""The shortest prompts."""
PREFILL_POINTS = 8
PREFILL_GAP_S = 0.005
CHUNKS = (1.5, 2.5, 4.0, 8.0)
"""Lengths of prompts that take several steps, in token budgets."""
DECODE_STEPS_LEAST, DECODE_STEPS_MOST = 24, 256
"""Of a cell of the decode table, with nothing else in the batch."""
LOGPROBS_STEPS = 24
MIXED_PROMPTS = 8
MIXED_GAP_STEPS = 3
API_A_ROUND = 10
API_GAP_S = 0.02
CHECK_LOADS = (0.5, 0.9)
"""Of the capacity; rounds take turns."""
CHECK_ASKS_MOST = 400
POOL_SHARE = 0.95
"""Of the KV blocks, so many are asked for at most."""


class Ask(NamedTuple):
    """One request: prompt and answer in tokens."""

    prompt_tokens: int
    output_tokens: int
    """Both of each of its prompts."""
    at_s: float = 0.0
    """From the phase's start; where requests go one by one, from the end of the one before."""
    logprobs: bool = False
    stream: bool = False
    prompts: int = 1
    """Several in one request come into the engine together, however busy the server is."""


@dataclass(frozen=True)
class Phase:
    """Requests that belong together; the engine is idle before and after."""

    name: str
    asks: tuple[Ask, ...]
    one_by_one: bool = False
    """Each is sent when the one before has been answered."""
    round: int = 0
    """From 1; 0: before the first."""

    @property
    def width(self) -> int:
        """Sequences in it."""
        return sum(ask.prompts for ask in self.asks)


class Room:
    """What the server can hold."""

    def __init__(self, settings: ServerSettings) -> None:
        """``settings``: with sizes, none of them null."""
        self.block_tokens = settings.block_tokens or 1
        self.budget = settings.max_num_batched_tokens or 1
        self.seqs = min(settings.max_num_seqs or 1, self.budget)
        self.model_len = settings.max_model_len or 1
        # One block is null and holds nothing.
        self.blocks = max(1, math.floor(((settings.kv_blocks or 2) - 1) * POOL_SHARE))

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def longest(self, batch: int) -> int:
        """Tokens, prompt and answer together, of each of ``batch`` sequences at a time."""
        return min(self.blocks // batch * self.block_tokens, self.model_len - 1)

    def widest(self, tokens: int) -> int:
        """Sequences of ``tokens`` that fit at a time."""
        return min(self.seqs, self.blocks // self.blocks_of(tokens))


class Speed(NamedTuple):
    """Roughly how fast the server is, in seconds; to size the load, not to fit anything."""

    prefill_fixed_s: float
    """A short prompt's answer of one token, the way in and out included."""
    prefill_token_s: float
    decode_fixed_s: float
    decode_sequence_s: float

    def prefill_s(self, tokens: int, steps: int = 1) -> float:
        return self.prefill_fixed_s * max(1, steps) + self.prefill_token_s * tokens

    def step_s(self, batch: int) -> float:
        """A step that decodes."""
        return self.decode_fixed_s + self.decode_sequence_s * batch

    def tokens_within(self, seconds: float) -> int:
        """Prompt tokens that are computed in that time."""
        left_s = max(0.0, seconds - self.prefill_fixed_s)
        return min(2**30, int(left_s / max(self.prefill_token_s, 1e-9)))


T = TypeVar("T")


class _Menu(Generic[T]):
    """Items to be visited in turn, as many a round as its time allows."""

    def __init__(self, items: list[T], dice: Random) -> None:
        dice.shuffle(items)
        self._items = deque(items)

    def take(self, within_s: float, cost_s: Callable[[T], float]) -> list[T]:
        """The next items; at least one, and none twice."""
        taken: list[T] = []
        spent_s = 0.0
        for _ in range(len(self._items)):
            spent_s += cost_s(self._items[0])
            if taken and spent_s > within_s:
                break
            taken.append(self._items[0])
            self._items.rotate(-1)
        return taken


class _Cell(NamedTuple):
    """Of the decode table: ``batch`` sequences that hold ``context`` tokens each, for so long."""

    batch: int
    context: int
    seconds: float


class Planner:
    """Plans rounds that take ``round_s`` each."""

    def __init__(self, room: Room, speed: Speed, round_s: float, dice: Random) -> None:
        self._room = room
        self._speed = speed
        self._dice = dice
        api_s = API_A_ROUND * (API_GAP_S + speed.prefill_fixed_s + 4 * speed.step_s(1))
        left_s = max(0.5 * round_s, round_s - api_s)
        self._share_s = {name: share * left_s for name, share in SHARES.items()}
        self._prefills = _Menu(list(range(PREFILL_POINTS + 1)), dice)
        self._chunks = _Menu(self._chunk_lengths(), dice)
        cells = self._cells()
        self._decodes = _Menu([cell for cell in cells if cell.context <= SHORT_TOKENS], dice)
        self._longs = _Menu([cell for cell in cells if cell.context > SHORT_TOKENS], dice)
        self._deeps = _Menu(self._deep_cells(), dice)
        self._mixed = _Menu(self._mixed_batches(), dice)
        self._logprobs = _Menu(self._batches(4, self._share_s["logprobs"], LOGPROBS_STEPS), dice)

    def round(self, number: int) -> list[Phase]:
        """The phases of a round, in random order, but the held-out load last."""
        phases = [
            *self._prefill_phases(number),
            *self._chunk_phases(),
            *self._decode_phases(),
            *self._mixed_phases(),
            *self._logprobs_phases(),
            self._api_phase(),
        ]
        self._dice.shuffle(phases)
        phases.append(self._check_phase(CHECK_LOADS[number % len(CHECK_LOADS)]))
        return [replace(phase, round=number + 1) for phase in phases if phase.asks]

    def seconds(self, phase: Phase) -> float:
        """About how long a phase takes."""
        speed = self._speed
        if phase.one_by_one:
            return sum(
                ask.at_s + self._prefill_s(ask.prompt_tokens) + ask.output_tokens * speed.step_s(1)
                for ask in phase.asks
            )
        last = phase.asks[-1]
        tokens = sum(ask.prompt_tokens * ask.prompts for ask in phase.asks)
        steps = max(ask.output_tokens for ask in phase.asks)
        width = min(phase.width, self._room.seqs)
        return max(last.at_s, speed.prefill_token_s * tokens) + steps * speed.step_s(width)

    def _prefill_s(self, tokens: int) -> float:
        return self._speed.prefill_s(tokens, -(-tokens // self._room.budget))

    # ---- prompts alone ----

    def _prefill_phases(self, number: int) -> list[Phase]:
        """Lengths lie between those of the other rounds; the whole budget is in each."""
        most = min(self._room.budget, self._room.longest(1) - 1)

        def length(point: int) -> int:
            if point == PREFILL_POINTS:
                return most
            power = (point + number % ROUNDS / ROUNDS) / PREFILL_POINTS
            return round(SHORT_TOKENS * math.pow(max(1.0, most / SHORT_TOKENS), power))

        within_s = self._share_s["prefill"]
        points = self._prefills.take(within_s, lambda point: self._prefill_s(length(point)))
        lengths = sorted({min(most, length(point)) for point in points})
        cost_s = sum(self._prefill_s(tokens) + PREFILL_GAP_S for tokens in lengths)
        again = max(1, min(4, int(within_s / cost_s)))
        asks: dict[int, list[Ask]] = {}
        for tokens in lengths:
            about = tokens if tokens == most else _nearest_power(tokens)
            asks.setdefault(about, []).extend([Ask(tokens, 1, PREFILL_GAP_S)] * again)
        return [
            Phase(f"prefill-{about}", tuple(each), one_by_one=True) for about, each in asks.items()
        ]

    def _chunk_lengths(self) -> list[int]:
        most = min(
            self._room.longest(1) - 2, self._speed.tokens_within(1.6 * self._share_s["chunks"])
        )
        found = [int(times * self._room.budget) for times in CHUNKS]
        fitting = [tokens for tokens in found if tokens <= most]
        if not fitting and most > 1.2 * self._room.budget:
            fitting = [most]
        return fitting

    def _chunk_phases(self) -> list[Phase]:
        taken = self._chunks.take(self._share_s["chunks"], self._prefill_s)
        return [Phase(f"chunks-{tokens}", (Ask(tokens, 2),), one_by_one=True) for tokens in taken]

    # ---- decode ----

    def _batches(self, factor: int, within_s: float, steps: int) -> list[int]:
        """Powers of ``factor``, and the most that the engine runs, as far as time allows."""
        found: list[int] = []
        batch = 1
        most = self._room.widest(SHORT_TOKENS + steps)
        while batch < most:
            found.append(batch)
            batch *= factor
        found.append(most)
        costs_s = [self._decode_s(batch, SHORT_TOKENS, steps) for batch in found]
        return [
            batch
            for batch, cost_s in zip(found, costs_s, strict=True)
            if batch == 1 or cost_s <= 1.6 * within_s
        ]

    def _decode_s(self, batch: int, context: int, steps: int) -> float:
        return self._prefill_s(batch * context) + steps * self._speed.step_s(batch)

    def _cells(self) -> list[_Cell]:
        within_s = self._share_s["decode"]
        batches = self._batches(2, within_s / 2, DECODE_STEPS_LEAST)
        seconds = within_s / (2 * len(batches))
        cells = [_Cell(batch, SHORT_TOKENS, seconds) for batch in batches]
        for batch in batches:
            context = self._affordable(batch, 0.6 * seconds)
            if context > 3 * SHORT_TOKENS:
                cells.append(_Cell(batch, context, seconds))
        return cells

    def _affordable(self, batch: int, within_s: float) -> int:
        """The longest context of each of ``batch`` sequences that fits and is computed in time."""
        tokens = self._speed.tokens_within(within_s) // batch
        steps = DECODE_STEPS_LEAST + 2 + -(-batch * tokens // self._room.budget)
        return min(tokens, self._room.longest(batch) - steps)

    def _deep_cells(self) -> list[_Cell]:
        """As much KV cache in use as time allows, by few and by many."""
        within_s = self._share_s["deep"]
        batches = [batch for batch in self._batches(4, within_s, DECODE_STEPS_LEAST) if batch > 1]
        cells = [
            _Cell(batch, self._affordable(batch, 0.7 * within_s), within_s) for batch in batches
        ]
        return [cell for cell in cells if cell.context > 3 * SHORT_TOKENS]

    def _decode_phases(self) -> list[Phase]:
        within_s = self._share_s["decode"] / 2

        def cost_s(cell: _Cell) -> float:
            least_s = self._decode_s(cell.batch, cell.context, DECODE_STEPS_LEAST)
            return max(cell.seconds, least_s)

        taken = [
            *self._decodes.take(within_s, cost_s),
            *self._longs.take(within_s, cost_s),
            *self._deeps.take(self._share_s["deep"], cost_s),
        ]
        phases = [self._decode_phase(cell) for cell in taken]
        return [phase for phase in phases if phase is not None]

    def _decode_phase(self, cell: _Cell) -> Phase | None:
        """All come at once; those prefilled first decode until the last ones have their share."""
        batch, context = cell.batch, cell.context
        if context > SHORT_TOKENS:
            context = max(SHORT_TOKENS, int(context * self._dice.uniform(0.5, 1.0)))
        prefill_steps = -(-batch * context // self._room.budget)
        left_s = cell.seconds - self._prefill_s(batch * context)
        steps = int(left_s / self._speed.step_s(batch))
        steps = min(max(steps, DECODE_STEPS_LEAST), DECODE_STEPS_MOST)
        outputs = min(steps + prefill_steps + 1, self._room.longest(batch) - context)
        if outputs < 2:
            return None
        name = f"decode-{batch}-{_nearest_power(context)}"
        return Phase(name, (Ask(context, outputs, prompts=batch),))

    def _logprobs_phases(self) -> list[Phase]:
        taken = self._logprobs.take(
            self._share_s["logprobs"],
            lambda batch: self._decode_s(batch, SHORT_TOKENS, LOGPROBS_STEPS),
        )
        outputs = LOGPROBS_STEPS + 1
        return [
            Phase(f"logprobs-{batch}", (Ask(SHORT_TOKENS, outputs, logprobs=True, prompts=batch),))
            for batch in taken
        ]

    # ---- prefills among decodes ----

    def _mixed_batches(self) -> list[int]:
        """Up to three quarters of the seats, so that prompts find one."""
        seats = self._room.widest(SHORT_TOKENS + DECODE_STEPS_LEAST + 16 * MIXED_GAP_STEPS)
        found = {max(1, seats * part // 16) for part in (1, 4, 8, 12)}
        within_s = self._share_s["mixed"]
        steps = MIXED_PROMPTS * MIXED_GAP_STEPS
        return [
            batch
            for batch in sorted(found)
            if batch == min(found) or self._decode_s(batch, SHORT_TOKENS, steps) <= within_s
        ]

    def _mixed_s(self, batch: int) -> float:
        steps = MIXED_PROMPTS * (MIXED_GAP_STEPS + 1)
        return self._decode_s(batch, SHORT_TOKENS, steps) + 0.5 * self._share_s["mixed"]

    def _mixed_phases(self) -> list[Phase]:
        taken = self._mixed.take(1.5 * self._share_s["mixed"], self._mixed_s)
        phases = [self._mixed_phase(batch, len(taken)) for batch in taken]
        return [phase for phase in phases if phase is not None]

    def _mixed_phase(self, batch: int, phases: int) -> Phase | None:
        """``batch`` sequences decode while prompts arrive one by one."""
        room, speed = self._room, self._speed
        a_prompt_s = self._share_s["mixed"] / (2 * phases * MIXED_PROMPTS)
        most = min(2 * room.budget, room.longest(1) // 2, 3 * speed.tokens_within(a_prompt_s))
        prompts = [
            Ask(self._between(SHORT_TOKENS, most), self._dice.randint(1, 4))
            for _ in range(min(MIXED_PROMPTS, room.seqs - batch))
        ]
        chunks = sum(-(-ask.prompt_tokens // max(1, room.budget - batch)) for ask in prompts)
        begin_steps = -(-batch * SHORT_TOKENS // room.budget)
        outputs = begin_steps + chunks + (len(prompts) + 2) * MIXED_GAP_STEPS + 4
        blocks = batch * room.blocks_of(SHORT_TOKENS + outputs)
        blocks += sum(room.blocks_of(ask.prompt_tokens + ask.output_tokens) for ask in prompts)
        if not prompts or blocks > room.blocks or SHORT_TOKENS + outputs > room.longest(batch):
            return None
        asks = [Ask(SHORT_TOKENS, outputs, prompts=batch)]
        at_s = self._prefill_s(batch * SHORT_TOKENS)
        for ask in prompts:
            at_s += MIXED_GAP_STEPS * speed.step_s(batch)
            asks.append(ask._replace(at_s=at_s))
            at_s += speed.prefill_token_s * ask.prompt_tokens
        return Phase("mixed", tuple(asks))

    # ---- single requests, and the load that is held out ----

    def _api_phase(self) -> Phase:
        """The way in and out: answers of one token and of eight, streamed and whole."""
        asks = [
            Ask(
                self._between(SHORT_TOKENS, min(64, self._room.budget)),
                8 if place % 2 else 1,
                API_GAP_S * self._dice.uniform(0.5, 1.5),
                stream=place // 2 % 2 == 1,
            )
            for place in range(API_A_ROUND)
        ]
        self._dice.shuffle(asks)
        return Phase("api", tuple(asks), one_by_one=True)

    def _check_phase(self, load: float) -> Phase:
        """Random arrivals of random requests, at ``load`` of what the server can do."""
        room, speed = self._room, self._speed
        seconds = self._share_s["check"]
        longest = room.longest(1)
        prompt_most = min(2 * room.budget, longest // 2, speed.tokens_within(0.1 * seconds))
        prompt_most = max(prompt_most, SHORT_TOKENS)
        steps = int(0.4 * seconds / speed.step_s(max(1, room.seqs // 2)))
        output_most = min(max(steps, 8), DECODE_STEPS_MOST, longest - prompt_most)
        prompt_mean = _mean_between(SHORT_TOKENS, prompt_most)
        output_mean = _mean_between(4, output_most)
        width = room.widest(round(prompt_mean + output_mean))
        work_s = speed.prefill_token_s * prompt_mean + output_mean * speed.step_s(width) / width
        gap_s = work_s / load
        asks: list[Ask] = []
        at_s = self._dice.expovariate(1 / gap_s)
        while at_s < seconds and len(asks) < CHECK_ASKS_MOST:
            asks.append(
                Ask(
                    self._between(SHORT_TOKENS, prompt_most), self._between(4, output_most), at_s,
                    stream=self._dice.random() < 0.5,
                )
            )  # fmt: skip
            at_s += self._dice.expovariate(1 / gap_s)
        return Phase("check", tuple(asks))

    def _between(self, least: int, most: int) -> int:
        """A whole number, its logarithm evenly spread."""
        if most <= least:
            return least
        return min(most, round(math.exp(self._dice.uniform(math.log(least), math.log(most)))))


def _nearest_power(tokens: int) -> int:
    """Of two: phases of about the same size have one name in all rounds."""
    return 1 << round(math.log2(tokens))


def _mean_between(least: int, most: int) -> float:
    """The mean of such numbers."""
    return float(least) if most <= least else (most - least) / math.log(most / least)
