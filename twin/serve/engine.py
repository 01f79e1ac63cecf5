"""The twin's engine in real time.

The engine's clock is the planned time: it is told that it wakes exactly when it wanted to, however
late the event loop is, so lateness never adds up. It steps one decision at a time, because the end
of a step is also when tokens become visible, so one alarm a step serves both. When the clock stops
(a hung engine), everything stops with it, and goes on as if nothing had happened.

What leaves the engine takes the profile's time to get out: ``token_out`` for every sequence running
until the first token is out, for every token until the last is, and ``request_out`` at the end.
"""

from __future__ import annotations

from fractions import Fraction
from heapq import heappop, heappush
from time import monotonic_ns
from typing import TYPE_CHECKING, Protocol

from twin.engine import Engine, Sequence
from twin.engine.steptime import slowed
from twin.serve.alarm import alarm

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

    from policy.cost import Overheads, StepCost
    from twin.engine import EngineSettings, Load, StepRecord
    from twin.serve.steps import StepWriter

_FIRST, _FINISH = range(2)


class Hearer(Protocol):
    """Who asked for a sequence (its ``data``). Times are on the engine's clock, in ns."""

    first_ns: int
    """When the first token was computed; -1: it was not yet."""
    last_ns: int
    watching: bool
    """It wants to hear of tokens on the way."""
    sent: int
    """Tokens that it has heard of."""

    def hear_first(self) -> None:
        """The first token is out."""

    def hear_tokens(self, count: int) -> None:
        """``count`` tokens are out by now, more than ``sent``."""

    def hear_last(self) -> None:
        """All tokens (or the embedding) are out."""


class LiveEngine:
    """An engine that wakes by itself in an event loop."""

    def __init__(
        self,
        loop: AbstractEventLoop,
        settings: EngineSettings,
        cost: StepCost,
        overheads: Overheads,
        writer: StepWriter | None = None,
    ) -> None:
        """``writer``: is told of every step."""
        self._writer = writer
        on_step = None if writer is None else self._stepped
        self._engine = Engine(
            settings, cost, self._first, self._finish, skip=False, on_step=on_step
        )
        self._plain_cost = cost
        self._in_ns = round(overheads.request_in_ns.value)
        self.in_s = self._in_ns / 1e9
        """From a request's arrival until the engine sees it."""
        self._out_ns = round(overheads.request_out_ns.value)
        self._token_ns = round(overheads.token_out_ns.value)
        self.prompt_tokens = 0
        """Of prompts that were computed."""
        self._stopped_ns = -1
        self._set_start(monotonic_ns())
        self._due: list[tuple[int, int, int, Sequence]] = []
        """Heap of (when, serial, what, sequence): what is on its way out."""
        self._serial = 0
        self._watched: dict[int, Sequence] = {}
        self._step_ns = 1
        self._woken_ns = 0
        self._alarm = alarm(loop, self._pump)
        self._alarm_ns = -1
        self._pumping = False

    # ---- time ----

    @property
    def now_ns(self) -> int:
        """The engine's clock: it stands still while the engine is stopped."""
        return monotonic_ns() - self._start_ns if self._stopped_ns < 0 else self._stopped_ns

    def _set_start(self, start_ns: int) -> None:
        self._start_ns = start_ns
        if self._writer is not None:
            self._writer.start_ns = start_ns

    def stop_clock(self) -> None:
        """The engine hangs from now on."""
        if self._stopped_ns < 0:
            self._stopped_ns = self.now_ns

    def start_clock(self) -> None:
        """It goes on where it stood."""
        if self._stopped_ns >= 0:
            self._set_start(monotonic_ns() - self._stopped_ns)
            self._stopped_ns = -1
            self._alarm_ns = -1
            self._arm()

    def slow(self, factor: float) -> None:
        """Steps take ``factor`` times as long as the profile says; 1: as long."""
        exact = Fraction(factor).limit_denominator(1000)
        self._engine.slow(slowed(self._plain_cost, exact, Fraction(1)), self.now_ns)
        self._arm()

    # ---- work ----

    def submit(self, seq: Sequence, name: str = "", at_ns: int | None = None) -> None:
        """Hand over a request whose ``data`` is a ``Hearer``. ``name``: its own, in the records;
        ``at_ns``: when it was read, if that was before now.

        Raises:
            UnfitError: the engine could never serve it.
        """
        at_ns = self.now_ns if at_ns is None else at_ns
        self._engine.submit(seq, at_ns + self._in_ns)
        if self._writer is not None:
            self._writer.add(seq, name)
        self._arm()

    def abort(self, seq: Sequence) -> bool:
        """Drop it, unless it is over; its hearer hears nothing more. Says whether it ran."""
        hearer = seq.data
        seq.data = None
        self._watched.pop(seq.id, None)
        if self._writer is not None:
            self._writer.drop(seq)
        if hearer is None or not self._engine.abort(seq.id, self.now_ns):
            return False
        self._arm()
        return True

    def close(self) -> None:
        self._alarm.close()

    def _first(self, seq: Sequence, at_ns: int) -> None:
        self.prompt_tokens += seq.prompt_tokens
        hearer: Hearer | None = seq.data
        if hearer is not None:
            hearer.first_ns = at_ns
            self._send(at_ns + self._token_ns * seq.turn, _FIRST, seq)

    def _finish(self, seq: Sequence) -> None:
        self._watched.pop(seq.id, None)
        if seq.pooling:
            self.prompt_tokens += seq.prompt_tokens
        hearer: Hearer | None = seq.data
        if hearer is not None:
            at_ns = self._engine.now_ns
            hearer.last_ns = at_ns
            if self._writer is not None:
                self._writer.finished(seq, self._in_ns, hearer.first_ns, at_ns)
            out_ns = seq.last_out_ns(hearer.first_ns, at_ns, self._token_ns)
            self._send(out_ns + self._out_ns, _FINISH, seq)

    def _stepped(self, record: StepRecord) -> None:
        assert self._writer is not None
        self._writer.decided(record, self._engine.now_ns)

    def _send(self, at_ns: int, what: int, seq: Sequence) -> None:
        self._serial += 1
        heappush(self._due, (at_ns, self._serial, what, seq))

    # ---- waking ----

    def _arm(self) -> None:
        if self._pumping or self._stopped_ns >= 0:
            return
        wake_ns = self._engine.next_wake_ns
        due = self._due
        if due and (wake_ns is None or due[0][0] < wake_ns):
            wake_ns = due[0][0]
        if wake_ns is not None and wake_ns != self._alarm_ns:
            self._alarm_ns = wake_ns
            self._alarm.set(wake_ns + self._start_ns)

    def _pump(self) -> None:
        """Do all that is due."""
        self._alarm_ns = -1
        if self._stopped_ns >= 0:
            return
        self._pumping = True
        try:
            now_ns = self.now_ns
            engine, writer = self._engine, self._writer
            woken_ns = -1
            while (wake_ns := engine.next_wake_ns) is not None and wake_ns <= now_ns:
                if writer is not None:
                    writer.wake(wake_ns)
                engine.wake(wake_ns)
                woken_ns = wake_ns
            if writer is not None:
                writer.flush()
            due = self._due
            while due and due[0][0] <= now_ns:
                _, _, what, seq = heappop(due)
                hearer: Hearer | None = seq.data
                if hearer is None:
                    continue
                if what == _FIRST:
                    hearer.hear_first()
                    if hearer.watching and hearer.last_ns < 0:
                        self._watched[seq.id] = seq
                else:
                    hearer.hear_last()
            if woken_ns >= 0 and self._watched:
                self._tell_tokens(woken_ns)
        finally:
            self._pumping = False
            self._arm()

    def _tell_tokens(self, now_ns: int) -> None:
        """A step has ended. Tokens still on their way out count with a later one."""
        self._step_ns = max(1, now_ns - self._woken_ns)
        self._woken_ns = now_ns
        step_ns, token_ns = self._step_ns, self._token_ns
        watched = list(self._watched.values())
        for seq, count in zip(watched, self._engine.outputs_at(watched, now_ns), strict=True):
            hearer: Hearer | None = seq.data
            if hearer is None:
                continue
            out = count - round(hearer.sent * token_ns / step_ns)
            if out > hearer.sent:
                hearer.hear_tokens(out)

    # ---- reading it ----

    @property
    def held(self) -> int:
        """Requests waiting and running."""
        return self._engine.held

    def load(self) -> Load:
        return self._engine.observe(self.now_ns)

    def output_tokens(self) -> int:
        return self._engine.totals(self.now_ns).output_tokens

    @property
    def engine(self) -> Engine:
        """For its counters only."""
        return self._engine
