"""Users in conversation: each sends its next message some time after the answer to the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from traces.generate.lengths import Law, NonNegative  # noqa: TC001 - msgspec reads them
from twin.clients.sender import NS, Sender
from twin.clients.setting import Client
from twin.dice import Share, quantile_of

if TYPE_CHECKING:
    from policy.decisions import Settled
    from twin.clients.setting import Setting
    from twin.world import Result

_TURNS, _PROMPT, _OUTPUT, _THINK, _START, _IMPATIENT, _AFTER, _PREFIX = range(8)
"""What is drawn of a user's session or turn."""
_ITEM_SHIFT = 20


class Sessions(Client, frozen=True, forbid_unknown_fields=True, tag="sessions", kw_only=True):
    """A fixed number of users, each in one session after the other until the traffic's end.

    A turn's prompt is the conversation so far and ``prompt_tokens`` of new text. An impatient
    message is followed by the next one although its answer is not there yet, so that two messages
    of a session are open at the same time.
    """

    users: Annotated[int, Meta(ge=1, le=1_000_000)]
    turns: Law
    think_s: Law
    """From an answer to the next message, and between two sessions of a user."""
    prompt_tokens: Law
    output_tokens: Law
    system_tokens: Annotated[int, Meta(ge=0)] = 0
    """The same text at the head of every prompt."""
    prompt_tokens_max: Annotated[int, Meta(ge=1)] = 16_000
    """A session whose prompt would be longer ends."""
    prefix_block_tokens: Annotated[int, Meta(ge=1, le=32_767)] = 64
    start_within_s: NonNegative = 10.0
    """Users send their first message at random instants of this long."""
    impatient_share: Share = 0.0
    """Of the messages."""
    impatient_after_s: Law | None = None
    """How long an impatient user waits before the next message."""

    def __post_init__(self) -> None:
        if (self.impatient_share > 0) != (self.impatient_after_s is not None):
            raise ValueError("impatient_share above 0 and impatient_after_s belong together")


class SessionClients:
    """All users of one ``Sessions``."""

    def __init__(self, spec: Sessions, setting: Setting) -> None:
        self.spec = spec
        self.setting = setting
        self.sender = Sender(setting, spec.name, spec.retries, spec.patience_s)
        self.dice = setting.dice(spec.name)
        self.turns = quantile_of(spec.turns)
        self.think = quantile_of(spec.think_s)
        self.prompt = quantile_of(spec.prompt_tokens)
        self.output = quantile_of(spec.output_tokens)
        self.impatience = quantile_of(spec.impatient_after_s or spec.think_s)
        self.sessions = 0
        self.impatient = 0

    def start(self) -> None:
        """Every user's first message, from now on."""
        world = self.setting.world
        world.clients += self.spec.users
        for number in range(self.spec.users):
            user = _User(self, number)
            begin_s = self.spec.start_within_s * self.dice.uniform(number, _START)
            world.after(round(begin_s * NS), user.begin)

    def figures(self) -> dict[str, Any]:
        return {
            **self.sender.figures(),
            "sessions": self.sessions,
            "impatient": self.impatient,
        }


class _User:
    """One user and its present session."""

    __slots__ = ("_all", "_context", "_dice", "_number", "_open", "_session", "_turn", "_turns")

    def __init__(self, clients: SessionClients, number: int) -> None:
        self._all = clients
        self._number = number
        self._session = -1
        self._turn = 0
        self._turns = 0
        self._open = 0
        self._context = 0
        self._dice = clients.dice

    def begin(self, event: object) -> None:
        """A new session, or the end of this user."""
        setting = self._all.setting
        if setting.world.now_ns >= setting.end_ns:
            setting.world.clients -= 1
            return
        self._session += 1
        self._all.sessions += 1
        self._dice = self._all.dice.at(self._number, self._session)
        self._turn = 0
        self._turns = max(1, round(self._all.turns(self._dice.uniform(_TURNS))))
        self._context = self._all.spec.system_tokens
        self._send()

    def _send(self) -> None:
        """The next message. Its prompt holds what has been said until now."""
        clients, turn = self._all, self._turn
        dice = self._dice.at(turn)
        new = max(1, round(clients.prompt(dice.uniform(_PROMPT))))
        limit = clients.spec.prompt_tokens_max
        self._context = prompt_tokens = min(limit, self._context + new)
        self._turn = turn + 1
        self._open += 1
        message = {
            **clients.spec.fields(),
            "prompt_tokens": prompt_tokens,
            "output_tokens": max(1, round(clients.output(dice.uniform(_OUTPUT)))),
            "user": f"{clients.spec.name}-{self._number}",
            "session": f"{clients.spec.name}-{self._number}-{self._session}",
            "prefix": self._prefix(prompt_tokens),
            "prefix_block_tokens": clients.spec.prefix_block_tokens,
        }
        clients.sender.send(message, self._answered)
        if dice.uniform(_IMPATIENT) < clients.spec.impatient_share:
            after_s = clients.impatience(dice.uniform(_AFTER))
            session = self._session
            clients.setting.world.after(
                round(after_s * NS), lambda event: self._press_on(session, turn)
            )

    def _press_on(self, session: int, turn: int) -> None:
        """Impatient: the next message, if the answer to the last one has not come."""
        waiting = self._session == session and self._turn == turn + 1 and self._open
        setting = self._all.setting
        if waiting and self._goes_on() and setting.world.now_ns < setting.end_ns:
            self._all.impatient += 1
            self._send()

    def _answered(self, result: Result, told: Settled) -> None:
        self._open -= 1
        self._context += result.output_tokens
        if self._open:
            return  # it waits for the answer to the message after this one
        think_s = self._all.think(self._dice.uniform(self._turn, _THINK))
        goes_on = self._goes_on()
        world = self._all.setting.world
        world.after(round(think_s * NS), self._next if goes_on else self.begin)

    def _next(self, event: object) -> None:
        setting = self._all.setting
        if setting.world.now_ns >= setting.end_ns:
            self.begin(event)
        else:
            self._send()

    def _goes_on(self) -> bool:
        return self._turn < self._turns and self._context < self._all.spec.prompt_tokens_max

    def _prefix(self, prompt_tokens: int) -> tuple[int, ...]:
        """Fingerprints of the prompt's blocks: the system prompt's, then the session's own."""
        spec = self._all.spec
        shared = self._all.dice.number(_PREFIX) >> 25 << _ITEM_SHIFT
        own = self._dice.number(_PREFIX) >> 25 << _ITEM_SHIFT
        blocks = range(prompt_tokens // spec.prefix_block_tokens)
        system = spec.system_tokens // spec.prefix_block_tokens
        return tuple((shared if block < system else own) + block for block in blocks)
