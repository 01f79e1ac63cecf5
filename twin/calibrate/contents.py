"""What each step of a recording held: context tokens and prefill work, rebuilt exactly.

A step's row has counts only. The rows of the finished requests say the rest: a request with n
output tokens that finished in step j without a pre-emption decoded in the n - 1 steps up to j, and
its prompt was complete in step j - n + 1. Earlier parts of a long prompt are what the prefill
tokens of the steps before leave over: the scheduler lets at most one prompt be in parts at a time,
and goes on with it before it begins another. A step whose rebuilt counts differ from the recorded
ones (a client left, a request was pre-empted, the file begins or ends inside) is not usable.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from twin.calibrate.client import key_of, phase_of
from twin.calibrate.errors import CalibrationError
from twin.regression import Array, StepTable

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from traces.steps import Recording, RequestRow, StepRow

Flags = NDArray[np.bool_]
Ints = NDArray[np.int64]

NO_PHASE, SEVERAL_PHASES = -1, -2
LONGEST_HOLE = 1_000_000
"""Steps that may lack between two rows; more is another server's life."""
KINDS = ("decode", "prefill", "mixed")


@dataclass(frozen=True)
class Contents:
    """One value a step, in the file's order."""

    batch: Array
    kv_tokens: Array
    """Sum of (computed + 1) over the decoding sequences."""
    prefill_tokens: Array
    prefill_quad: Array
    """Sum of c1**2 - c0**2 over the prompt parts."""
    logprobs: Array
    """Decoding sequences that asked for log-probabilities."""
    engine_ns: Array
    """The engine's own part of the step; NaN where it is not known."""
    period_ns: Array
    """End of the step before to its end; NaN where it did not follow one directly."""
    exact_periods: bool
    """The periods are by the engine's clock, not by stamps that come late now and then."""
    at_ns: Ints
    usable: Flags
    phase: Ints
    """Index into ``phases``; ``NO_PHASE`` or ``SEVERAL_PHASES``."""
    phases: tuple[str, ...]
    unusable: dict[str, int]
    """How many steps are not usable, by reason."""
    exact: bool
    """Rebuilt from the requests; else estimated from the KV usage."""
    prefill_step: dict[str, int]
    """Key of a request of the designed load -> index of the step that completed its prompt."""

    @property
    def kind(self) -> Ints:
        """Index into ``KINDS`` by step; -1 for an empty one."""
        decodes, prefills = self.batch > 0, self.prefill_tokens > 0
        kind = np.full(len(self.batch), -1, dtype=np.int64)
        kind[decodes & ~prefills] = 0
        kind[~decodes & prefills] = 1
        kind[decodes & prefills] = 2
        return kind

    def table(self, time_ns: Array) -> StepTable:
        return StepTable(
            self.batch, self.kv_tokens, self.prefill_tokens, self.prefill_quad, time_ns
        )

    def in_phases(self, names: Collection[str]) -> Flags:
        wanted = [place for place, name in enumerate(self.phases) if name in names]
        return np.isin(self.phase, wanted)


def read_contents(recording: Recording, logprobs: Collection[str] = ()) -> Contents:
    """Rebuild what the steps held.

    Args:
        logprobs: keys (``cal.<phase>.<n>``) of the requests that asked for log-probabilities.

    Raises:
        CalibrationError: there is no step, or the steps are of more than one server's life.
    """
    from twin.calibrate.usage import estimate

    steps = recording.steps
    if not steps:
        raise CalibrationError(
            "the recording has no step: was the server idle, or another file given?"
        )
    numbers = np.array([row.step for row in steps], dtype=np.int64)
    holes = np.diff(numbers)
    if len(holes) and (int(holes.min()) < 1 or int(holes.max()) > LONGEST_HOLE):
        place = int(np.argmax((holes < 1) | (holes > LONGEST_HOLE)))
        raise CalibrationError(
            f"step {numbers[place + 1]} follows step {numbers[place]}: the file holds more than "
            "one life of the server; cut it there and give one part"
        )
    if recording.requests:
        rebuilt = _Rebuilt(recording, numbers, frozenset(logprobs))
        return rebuilt.contents()
    return estimate(recording)


def as_array(values: Sequence[int | None]) -> Array:
    """Numbers with NaN for null."""
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def follows_directly(steps: Sequence[StepRow]) -> Flags:
    """Whether the engine went from the step before straight to this one.

    A sequence that decodes had its token before in the step before. Else there must have been
    work left: sequences running or waiting.
    """
    direct = np.zeros(len(steps), dtype=np.bool_)
    for place in range(1, len(steps)):
        before, row = steps[place - 1], steps[place]
        if row.step != before.step + 1:
            continue
        worked = bool(before.prefill_tokens or before.decode_requests)
        left = bool(before.running or before.waiting)
        direct[place] = worked and (bool(row.decode_requests) or left)
    return direct


def periods(steps: Sequence[StepRow], *, stamped: bool = True) -> tuple[Array, bool]:
    """Time from the end of the step before, NaN where none precedes; and whether it is exact.

    Args:
        stamped: the rows' times are stamps; those of a text log are whole seconds, and no measure.
    """
    given = as_array([row.period_ns for row in steps])
    direct = follows_directly(steps)
    exact = bool(np.isfinite(given[direct]).any())
    if exact:
        given[~direct] = np.nan
        return given, True
    out = np.full(len(steps), np.nan)
    if not stamped:
        return out, False
    at_ns = as_array([row.at_ns for row in steps])
    out[1:] = np.diff(at_ns)
    out[~direct] = np.nan
    return out, False


class _Rebuilt:
    """The steps on a grid without holes, and the requests laid over it one by one."""

    def __init__(self, recording: Recording, numbers: Ints, logprobs: frozenset[str]) -> None:
        self.recording = recording
        self.logprobs_keys = logprobs
        self.first = int(numbers[0])
        self.size = int(numbers[-1]) - self.first + 1
        self.rows = numbers - self.first
        """Grid place of each row."""
        self.batch = np.zeros(self.size)
        self.kv = np.zeros(self.size)
        self.logprobs = np.zeros(self.size)
        self.quad = np.zeros(self.size)
        self.bad_prefill = np.zeros(self.size, dtype=np.bool_)
        self.phase = np.full(self.size, NO_PHASE, dtype=np.int64)
        self.phases: dict[str, int] = {}
        self.completed: dict[int, list[RequestRow]] = {}
        """Requests by the grid place of the step that completed their prompt."""
        self.prefill_step: dict[str, int] = {}
        self.overruns = bool(recording.header.settings.async_scheduling)
        parts = recording.header.settings.long_prefill_token_threshold
        self.several_parts = bool(parts)
        """More than one prompt may be in parts at once."""

    def contents(self) -> Contents:
        steps = self.recording.steps
        for index, request in self.recording.requests:
            if index >= 0 and request.reason != "abort" and not request.preemptions:
                self._decode(int(self.rows[index]), request)
        self._prefill()
        rows = self.rows
        recorded_batch = as_array([row.decode_requests for row in steps])
        tokens = as_array([row.prefill_tokens for row in steps])
        engine_ns = as_array([row.elapsed_ns for row in steps])
        period_ns, exact_periods = periods(steps)
        unusable: Counter[str] = Counter()
        usable = np.ones(len(steps), dtype=np.bool_)
        for reason, bad in (
            ("no iteration details", np.isnan(recorded_batch) | np.isnan(tokens)),
            ("no elapsed time", np.isnan(engine_ns) | (engine_ns <= 0)),
            ("empty step", (recorded_batch == 0) & (tokens == 0)),
            ("decoding requests unlike the finished ones", self.batch[rows] != recorded_batch),
            ("prompt parts unlike the finished requests", self.bad_prefill[rows]),
        ):
            unusable[reason] += int(np.sum(usable & bad))
            usable &= ~bad
        return Contents(
            batch=np.nan_to_num(recorded_batch),
            kv_tokens=self.kv[rows],
            prefill_tokens=np.nan_to_num(tokens),
            prefill_quad=self.quad[rows],
            logprobs=self.logprobs[rows],
            engine_ns=engine_ns,
            period_ns=period_ns,
            exact_periods=exact_periods,
            at_ns=np.array([row.at_ns for row in steps], dtype=np.int64),
            usable=usable,
            phase=self.phase[rows],
            phases=tuple(self.phases),
            unusable={reason: count for reason, count in unusable.items() if count},
            exact=True,
            prefill_step=self.prefill_step,
        )

    def _decode(self, end: int, request: RequestRow) -> None:
        """Lay a request over the steps in which it decoded: those up to ``end``."""
        outputs = max(1, request.output_tokens)
        prefilled = end - outputs + 1
        key = key_of(request.id)
        begin = max(0, prefilled + 1)
        if self.overruns and request.reason == "stop":
            end += 1  # the step after was on its way when the last token was seen
        end = min(end, self.size - 1)
        computed = request.prompt_tokens + np.arange(begin, end + 1) - (prefilled + 1)
        self.batch[begin : end + 1] += 1
        self.kv[begin : end + 1] += computed + 1
        if key is not None and key in self.logprobs_keys:
            self.logprobs[begin : end + 1] += 1
        self._mark(max(0, prefilled), end, phase_of(request.id))
        if prefilled >= 0:
            self.completed.setdefault(prefilled, []).append(request)
            if key is not None:
                place = int(np.searchsorted(self.rows, prefilled))
                if place < len(self.rows) and self.rows[place] == prefilled:
                    self.prefill_step[key] = place

    def _mark(self, begin: int, end: int, phase: str) -> None:
        if not phase:
            return
        number = self.phases.setdefault(phase, len(self.phases))
        seen = self.phase[begin : end + 1]
        seen[(seen != NO_PHASE) & (seen != number)] = SEVERAL_PHASES
        seen[seen == NO_PHASE] = number

    def _prefill(self) -> None:
        """Walk over the steps with new prompt tokens and find what each prompt part began at."""
        parts: list[tuple[int, int]] = []
        """(grid place, tokens) of the prompt that is in parts."""
        for row, place in zip(self.recording.steps, self.rows.tolist(), strict=True):
            done = self.completed.get(place, [])
            tokens, requests = row.prefill_tokens, row.prefill_requests
            if tokens is None or requests is None or (not tokens and not done):
                continue
            part = self._share_out(place, tokens, requests, done, parts)
            if part is None and parts:
                # Whoever began in parts may have left; what is here may be whole without it.
                self._spoil(parts)
                parts = []
                part = self._share_out(place, tokens, requests, done, parts)
            if part is None:
                self._spoil([(place, 0)])
                continue
            if done:
                parts = []
            if part:
                parts.append((place, part))
        self._spoil(parts)

    def _spoil(self, parts: list[tuple[int, int]]) -> None:
        for at, _ in parts:
            self.bad_prefill[at] = True
            self.quad[at] = 0.0

    def _share_out(
        self,
        place: int,
        tokens: int,
        requests: int,
        done: list[RequestRow],
        parts: list[tuple[int, int]],
    ) -> int | None:
        """Quadratic terms of one step.

        Returns:
            Tokens of a part that leaves its prompt unfinished; None: the counts do not agree.
        """
        if not done:
            return tokens if requests == 1 and not (self.several_parts and parts) else None
        continued = max(done, key=_scheduled_for) if parts else None
        quad: dict[int, int] = {place: 0}
        spent = 0
        for request in done:
            before = request.cached_tokens or 0
            if request is continued:
                for at, part in parts:
                    quad[at] = (before + part) ** 2 - before**2
                    before += part
            new = request.prompt_tokens - before
            if new < 1:
                return None
            spent += new
            quad[place] += request.prompt_tokens**2 - before**2
        rest = tokens - spent
        if requests == len(done) + (rest > 0) and rest >= 0:
            for at, value in quad.items():
                self.quad[at] += value
                if continued is not None:
                    self._mark(at, at, phase_of(continued.id))
            return rest
        return None


def _scheduled_for(request: RequestRow) -> tuple[int, int]:
    """How long before its first token it was scheduled; of equals, how long ago it arrived."""
    return (request.prefill_ns or 0, request.e2e_ns or 0)
