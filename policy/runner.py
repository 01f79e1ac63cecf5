"""The loop around a policy, the same in both worlds: order, one armed timer, and the log."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from policy.events import Ticked

if TYPE_CHECKING:
    from collections.abc import Callable

    from policy.contract import Policy
    from policy.decisions import Decision
    from policy.events import Event


class Log(Protocol):
    """Where every step is written before its decisions are carried out (see ``policy.log``)."""

    def append(self, now_ns: int, event: Event, decisions: tuple[Decision, ...]) -> None: ...


class Runner:
    """Feeds a policy one event at a time and hands its decisions to the driver.

    ``clock_ns()`` reads the time; it must give a plain ``int`` that never goes back.
    ``apply(decision)`` carries a decision out and may feed new events: they wait their turn.
    ``arm(at_ns)`` asks for one call of ``tick()`` at that time. It is called only when nothing is
    armed or the policy's deadline moved earlier, so older timers may still fire: that is harmless.
    """

    __slots__ = (
        "_append", "_apply", "_arm", "_armed_ns", "_busy", "_clock_ns", "_deadline_ns", "_last_ns",
        "_queue", "_step",
    )  # fmt: skip

    def __init__(
        self,
        policy: Policy,
        clock_ns: Callable[[], int],
        apply: Callable[[Decision], object],
        arm: Callable[[int], object],
        log: Log,
    ) -> None:
        self._step = policy.step
        self._deadline_ns = policy.deadline_ns
        self._clock_ns = clock_ns
        self._apply = apply
        self._arm = arm
        self._append = log.append
        self._queue: deque[tuple[int, Event]] = deque()
        self._busy = False
        self._last_ns = 0
        self._armed_ns: int | None = None

    def feed(self, event: Event) -> None:
        """Let the policy see ``event`` now, or right after the event it is busy with."""
        now_ns = self._clock_ns()
        if type(now_ns) is not int or now_ns < self._last_ns:
            raise self._bad_clock(now_ns)
        self._last_ns = now_ns
        if self._busy or self._queue:
            self._queue.append((now_ns, event))
            if not self._busy:  # what an exception left behind goes first
                self._drain()
            return
        # The common case, without the queue: this is called three times a request.
        self._busy = True
        try:
            self._take(now_ns, event)
        finally:
            self._busy = False
        if self._queue:
            self._drain()

    def tick(self) -> None:
        """A timer fired. One that was armed before an earlier one has nothing to do; too early (the
        deadline moved since), the last one is armed again."""
        now_ns = self._clock_ns()
        if self._armed_ns is not None and now_ns < self._armed_ns:
            return
        self._armed_ns = None
        deadline_ns = self._deadline_ns()
        if deadline_ns is None:
            return
        if now_ns < deadline_ns:
            self._armed_ns = deadline_ns
            self._arm(deadline_ns)
        else:
            self.feed(Ticked())

    def _drain(self) -> None:
        self._busy = True
        try:
            while self._queue:
                self._take(*self._queue.popleft())
        finally:
            self._busy = False

    def _take(self, now_ns: int, event: Event) -> None:
        """One step: decide, log, arm, and only then carry out."""
        decisions = tuple(self._step(now_ns, event))
        self._append(now_ns, event, decisions)
        deadline_ns = self._deadline_ns()
        if deadline_ns is not None:
            self._rearm(now_ns, event, deadline_ns)
        for decision in decisions:
            self._apply(decision)

    def _rearm(self, now_ns: int, event: Event, deadline_ns: int) -> None:
        if deadline_ns <= now_ns and type(event) is Ticked:
            # Armed again at once, this would never let the clock move.
            raise RuntimeError(
                f"the policy was ticked at {now_ns} ns and wants its next tick at {deadline_ns} ns:"
                " a deadline must lie after the tick that served it"
            )
        if self._armed_ns is None or deadline_ns < self._armed_ns:
            self._armed_ns = deadline_ns
            self._arm(deadline_ns)

    def _bad_clock(self, now_ns: object) -> Exception:
        if type(now_ns) is not int:
            return TypeError(
                f"the clock gave {now_ns!r} ({type(now_ns).__name__}): convert it once, with"
                " int(), where the driver reads it"
            )
        return ValueError(
            f"the clock went back from {self._last_ns} to {now_ns} ns: use a monotonic clock"
        )
