"""How a client sends a message: with patience, and again when it was refused or failed."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from traces.generate.lengths import Law, NonNegative  # noqa: TC001 - msgspec reads them
from twin.arrivals import Asked
from twin.dice import Share, quantile_of
from twin.figures.spread import Trickle

if TYPE_CHECKING:
    from collections.abc import Callable

    from policy.decisions import Settled
    from twin.clients.setting import Setting
    from twin.world import Result

    Done = Callable[[Result, Settled], None]

NS = 1_000_000_000
_PATIENCE, _JITTER = range(2)
"""What is drawn of an attempt."""
_CALLERS_FAULT_HTTP = 400


class Retries(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """When a client sends its message again. The n-th wait is ``backoff_s * factor ** (n - 1)``."""

    attempts: Annotated[int, Meta(ge=1, le=100)] = 1
    """The first included; 1: never again."""
    backoff_s: NonNegative = 0.5
    factor: Annotated[float, Meta(ge=1, le=10)] = 2.0
    backoff_most_s: NonNegative = 30.0
    jitter: Share = 0.0
    """Each wait is shortened by up to this share of it, at random."""
    honour_retry_after: bool = True
    """Wait at least as long as the answer asks for."""
    on: tuple[Literal["shed", "failed"], ...] = ("shed", "failed")


class Sender:
    """Sends the messages of one kind of client and counts what became of them."""

    def __init__(
        self, setting: Setting, name: str, retries: Retries, patience_s: Law | None
    ) -> None:
        self._setting = setting
        self._retries = retries
        self._dice = setting.dice(name, "sender")
        self._patience = None if patience_s is None else quantile_of(patience_s)
        self._messages = 0
        self._attempts = 0
        self._outcomes: Counter[str] = Counter()
        self._answer_s = Trickle()

    def send(self, message: dict[str, Any], done: Done) -> None:
        """Send a request with the keywords of ``Asked``; ``done`` is told its last outcome."""
        number = self._messages
        self._messages += 1
        _Message(self, message, done, number, self._setting.world.now_ns).attempt()

    def figures(self) -> dict[str, Any]:
        """``answer_s``: from the first attempt to the answer, of messages that got one."""
        return {
            "messages": self._messages,
            "attempts": self._attempts,
            "attempts_per_message": self._attempts / self._messages if self._messages else None,
            "outcomes": dict(sorted(self._outcomes.items())),
            "answer_s": self._answer_s.figures(),
        }

    def offer(self, attempt: _Attempt, number: int, tries: int) -> None:
        """Hand an attempt to the world; with patience, it is cancelled when that has run out."""
        self._attempts += 1
        world = self._setting.world
        request = world.offer(attempt)
        if self._patience is not None:
            patience_s = self._patience(self._dice.uniform(number, tries, _PATIENCE))

            def gone(event: object) -> None:
                if attempt.open:
                    world.cancel(request)

            world.after(round(patience_s * NS), gone)

    def settled(self, message: _Message, attempt: _Attempt, result: Result, told: Settled) -> None:
        """An attempt is over: again, or that was it."""
        self._setting.gather(attempt, result)
        wait_ns = self._wait_ns(message, result, told)
        world = self._setting.world
        if wait_ns is not None:
            world.after(wait_ns, lambda event: message.attempt())
            return
        self._outcomes[result.outcome] += 1
        if result.outcome in ("answered", "degraded"):
            self._answer_s.add((world.now_ns - message.sent_ns) / NS)
        message.done(result, told)

    def _wait_ns(self, message: _Message, result: Result, told: Settled) -> int | None:
        """Until the next attempt; None: there is none."""
        retries = self._retries
        if result.outcome not in retries.on or result.http_code == _CALLERS_FAULT_HTTP:
            return None
        storm = self._setting.world.retry_attempts
        if message.tries >= max(retries.attempts, storm):
            return None
        if storm > retries.attempts:  # everybody presses the button again, at once
            return round(retries.backoff_s * NS)
        wait_s = min(
            retries.backoff_most_s, retries.backoff_s * retries.factor ** (message.tries - 1)
        )
        if retries.jitter:
            wait_s *= 1 - retries.jitter * self._dice.uniform(
                message.number, message.tries, _JITTER
            )
        wait_ns = round(wait_s * NS)
        return max(wait_ns, told.retry_after_ns) if retries.honour_retry_after else wait_ns


class _Message:
    """What a client wants answered, over all attempts."""

    __slots__ = ("_fields", "_sender", "done", "number", "sent_ns", "tries")

    def __init__(
        self, sender: Sender, fields: dict[str, Any], done: Done, number: int, sent_ns: int
    ) -> None:
        self._sender = sender
        self._fields = fields
        self.done = done
        self.number = number
        self.sent_ns = sent_ns
        self.tries = 0

    def attempt(self) -> None:
        self.tries += 1
        self._sender.offer(_Attempt(self, self._fields), self.number, self.tries)

    def settled(self, attempt: _Attempt, result: Result, told: Settled) -> None:
        self._sender.settled(self, attempt, result, told)


class _Attempt(Asked):
    """One request for a message."""

    __slots__ = ("_message",)

    def __init__(self, message: _Message, fields: dict[str, Any]) -> None:
        super().__init__(**fields)
        self._message = message

    def settled(self, result: Result, decision: Settled) -> None:
        self._message.settled(self, result, decision)
